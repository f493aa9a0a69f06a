//! The processes of a history, what is known of their blocks, and what must hold between deeds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvdepot_store::{BlockBuffers, Buffer, Depot, Namespace, Outcome};
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::twin::Id;
use kvdepot_testkit::worker::{Silence, Worker};
use serde_json::json;

use super::signal::{proceed, stop};
use super::steps::{KEYS, Meanwhile, Shape};
use crate::common::raw::Raw;
use crate::history::NAMESPACES;
use crate::laws::live_in;
use crate::world::{Law, key, law, number, spec};

/// Longer than any call takes, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A key that no deed names.
const SCRATCH: u16 = 300;

/// What is known of a block.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Each removal makes another content the key's.
    pub generation: u64,
    /// Somebody has begun to write it since.
    pub begun: bool,
    /// It was acknowledged.
    pub there: bool,
    /// It outlives its owner.
    pub lasting: bool,
    /// A removal had no answer and may happen at any time.
    pub murky: bool,
}

/// A reservation or a pin of a client.
#[derive(Clone, Debug)]
pub struct Hold {
    pub client: usize,
    pub id: Id,
    pub generation: u64,
    pub name: u64,
    pub placement: String,
    /// Whether nothing has happened since to its client and owner.
    pub sound: bool,
    /// Its client is gone, and the mover still has its placement.
    pub dead: bool,
}

pub struct Crowd {
    pub shape: Shape,
    seed: u64,
    dir: tempfile::TempDir,
    pub owner: Option<Worker>,
    pub clients: Vec<Option<Worker>>,
    /// Which of them may have lost their connections.
    away: Vec<bool>,
    pub mover: Option<Worker>,
    watcher: Option<Depot>,
    pub known: BTreeMap<Id, Known>,
    pub held: Vec<Hold>,
    pub pins: Vec<Hold>,
    early: BTreeSet<Id>,
    /// Whether somebody has asked the owner who left.
    listens: bool,
    /// The owner has the arena's file mapped as it was before it was cut.
    pub truncated: bool,
    /// The arena has less than it was made with.
    pub cut: bool,
    pub kib: u64,
    pub tally: Tally,
}

impl Crowd {
    pub fn new(seed: u64, shape: &Shape) -> Crowd {
        let dir = tempfile::Builder::new()
            .prefix("kvsim")
            .tempdir_in(crate::disk::dir())
            .unwrap();
        Crowd {
            shape: shape.clone(),
            seed,
            dir,
            owner: None,
            clients: (0..shape.clients).map(|_| None).collect(),
            away: vec![false; usize::from(shape.clients)],
            mover: None,
            watcher: None,
            known: BTreeMap::new(),
            held: Vec::new(),
            pins: Vec::new(),
            early: BTreeSet::new(),
            listens: false,
            truncated: false,
            cut: false,
            kib: if shape.roomy { 8 << 10 } else { 512 },
            tally: Tally::default(),
        }
    }

    /// Nobody is waited for: what broke a law may hang.
    #[expect(clippy::mem_forget, reason = "its close may hang")]
    pub fn abandon(&mut self) {
        std::mem::forget(self.watcher.take());
        self.clients.clear();
        self.mover = None;
        self.owner = None;
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub fn arena(&self) -> PathBuf {
        self.dir.path().join("arena")
    }

    pub fn has_far(&self) -> bool {
        self.shape.pipeline.contains("Dax")
    }

    /// Everything fits, so that nothing is ever evicted.
    pub fn is_roomy(&self) -> bool {
        self.shape.roomy && !self.cut
    }

    /// The content of a block.
    pub fn content(&self, id: Id, generation: u64) -> u64 {
        let block = generation << 12 | u64::from(id.0) << 8 | u64::from(id.1);
        (self.seed << 24) ^ block
    }

    /// The lengths of its parts: which blocks have several depends on the key alone.
    pub fn parts(&self, id: Id, generation: u64) -> Vec<u64> {
        let mut rng = Rng::new(self.content(id, generation));
        let count = match id.1 % 3 {
            2 => rng.between(2, 4),
            _ => 1,
        };
        let len = |rng: &mut Rng| match rng.below(10) {
            0..2 => rng.between(1, 200),
            2..4 => rng.between(4080, 4112),
            4 if self.shape.roomy => rng.between(100_000, 300_000),
            _ => rng.between(5_000, 30_000),
        };
        (0..count).map(|_| len(&mut rng)).collect()
    }

    fn spec(&self) -> String {
        let shape = &self.shape;
        let mut settings = json!({
            "socket": self.socket(),
            "lock_wait": "15s",
            "lanes": 2,
            "close_timeout": "1s",
            "overload": if shape.drop { "drop" } else { "wait" },
        });
        if shape.pipeline.contains("Cache") {
            let kib = match (shape.roomy, shape.pipeline) {
                (true, "Cache") => 12 << 10,
                (true, _) => 1 << 10,
                _ => 192,
            };
            settings["cache"] = json!({"capacity": kib << 10});
        }
        if self.has_far() {
            settings[if shape.disk { "nvme" } else { "dax" }] = json!({
                "path": self.arena(),
                "capacity": self.kib << 10,
                "records": if shape.roomy { 256 } else { 16 },
                "durability": if shape.power { "power" } else { "process" },
            });
        }
        let far = if shape.disk { "Nvme" } else { "Dax" };
        json!([shape.pipeline.replace("Dax", far), settings]).to_string()
    }

    /// Starts all of them.
    pub fn open(&mut self) -> Law {
        self.start_owner()?;
        let watcher = kvdepot_service::connect_within(&self.socket(), Some(1), Some(PATIENCE));
        self.watcher = Some(watcher.map_err(|error| format!("connect: {error}"))?);
        self.start_mover()?;
        self.is_ready()
    }

    fn start_owner(&mut self) -> Law {
        self.tally.door("open");
        let arena = self.arena();
        let tables = arena.exists().then(|| live_in(&Raw::open(&arena)));
        let (inside, lost) = tables.map_or((0, 0), |(inside, lost)| (inside.len(), lost));
        let found = format!("open {inside} {lost} 0");
        self.truncated = false;
        let mut owner = Worker::start(&format!("owner {}", self.spec()));
        owner.tell("open");
        let said = heard(owner.answer(PATIENCE), "owner")?;
        law!(said == found, "opening: {said}, not {found}");
        self.owner = Some(owner);
        Ok(())
    }

    pub fn start_mover(&mut self) -> Law {
        self.tally.door("attach");
        if self.mover.is_none() {
            self.mover = Some(Worker::start(&format!("mover {}", self.socket().display())));
        }
        let said = self.ask_mover("attach")?;
        law!(said == "attached", "attach: {said}");
        Ok(())
    }

    pub fn ask_mover(&mut self, command: &str) -> Law<String> {
        let mover = self.mover.as_mut().unwrap();
        mover.tell(command);
        heard(mover.answer(PATIENCE), "mover")
    }

    pub fn watcher(&self) -> &Depot {
        self.watcher.as_ref().unwrap()
    }

    fn namespace(&self, ns: u8) -> Law<Namespace> {
        let namespace = self.watcher().namespace(&spec(ns));
        namespace.map_err(|error| format!("namespace: {error}"))
    }

    /// A client's process, started where there is none.
    pub fn client(&mut self, client: usize) -> Law<&mut Worker> {
        if self.clients[client].is_none() {
            self.tally.door("connect");
            let role = format!("client {} {}", self.socket().display(), self.shape.timeout);
            let mut worker = Worker::start(&role);
            worker.tell("open");
            let mut said = heard(worker.answer(PATIENCE), "client")?;
            // An impatient one may find a busy owner.
            for _ in 0..20 {
                if said == "open" || self.shape.timeout >= 1000 {
                    break;
                }
                worker.tell("open");
                said = heard(worker.answer(PATIENCE), "client")?;
            }
            law!(said == "open", "connect: {said}");
            self.clients[client] = Some(worker);
        }
        Ok(self.clients[client].as_mut().unwrap())
    }

    /// As [`Crowd::tell`], once the client has its owner again: until then an owner that is there
    /// is none to it.
    pub fn ask(
        &mut self,
        client: usize,
        command: &str,
        fate: (Meanwhile, u16),
    ) -> Law<Option<String>> {
        if self.away[client] {
            self.is_back(client)?;
        }
        self.tell(client, command, fate)
    }

    /// Tells a client what to do, lets something happen meanwhile, and answers what it says; `None`
    /// where nobody is left to say anything. An owner that was killed stays away.
    pub fn tell(
        &mut self,
        client: usize,
        command: &str,
        (meanwhile, after): (Meanwhile, u16),
    ) -> Law<Option<String>> {
        let after = Duration::from_micros(u64::from(after));
        let longer = Duration::from_millis(self.shape.timeout + 150);
        self.client(client)?;
        if meanwhile == Meanwhile::Cut {
            let deaf = after.as_micros().is_multiple_of(2);
            let (fault, how) = match deaf {
                true => ("answer unread", "deaf"),
                false => ("connection cut", "then"),
            };
            self.tally.fault(fault);
            let command = format!("cut {} {how}", after.as_micros());
            self.tell(client, &command, (Meanwhile::Nothing, 0))?;
            self.shake(client);
        }
        self.client(client)?.tell(command);
        match meanwhile {
            Meanwhile::Nothing | Meanwhile::Cut => {}
            Meanwhile::Stopped => {
                self.tally.fault("client stopped");
                self.shake(client);
                let worker = self.client(client)?;
                sleep(after);
                stop(worker);
                sleep(longer);
                proceed(worker);
            }
            Meanwhile::Killed => {
                sleep(after);
                self.kill_client(client);
                return Ok(None);
            }
            Meanwhile::OwnerKilled => {
                sleep(after);
                self.kill_owner();
            }
            Meanwhile::OwnerStopped => {
                self.tally.fault("owner stopped");
                (0..self.clients.len()).for_each(|client| self.shake(client));
                sleep(after);
                stop(self.owner.as_ref().unwrap());
            }
        }
        let said = heard(self.client(client)?.answer(PATIENCE), "client");
        if meanwhile == Meanwhile::OwnerStopped {
            proceed(self.owner.as_ref().unwrap());
        }
        if std::env::var_os("SIM_LOG").is_some() {
            println!("  {command:.60}: {said:?}");
        }
        self.away[client] |= matches!(
            meanwhile,
            Meanwhile::Cut | Meanwhile::Stopped | Meanwhile::OwnerStopped
        );
        said.map(Some)
    }

    /// A client has its owner again.
    pub fn is_back(&mut self, client: usize) -> Law {
        self.away[client] = false;
        let said = self.tell(client, "found", (Meanwhile::Nothing, 0))?;
        law!(
            said.as_deref() == Some("connected true"),
            "a client did not find its owner: {said:?}"
        );
        Ok(())
    }

    /// What a client holds may be lost.
    fn shake(&mut self, client: usize) {
        let holds = self.held.iter_mut().chain(&mut self.pins);
        holds
            .filter(|hold| hold.client == client)
            .for_each(|hold| hold.sound = false);
    }

    pub fn kill_client(&mut self, client: usize) {
        self.tally.fault("client killed");
        self.shake(client);
        self.away[client] = false;
        if let Some(mut worker) = self.clients[client].take() {
            worker.kill();
        }
        let holds = self.held.iter_mut().chain(&mut self.pins);
        holds
            .filter(|hold| hold.client == client)
            .for_each(|hold| hold.dead = true);
    }

    pub fn kill_owner(&mut self) {
        self.tally.fault("owner killed");
        if let Some(mut owner) = self.owner.take() {
            owner.kill();
        }
    }

    /// What the owner says of its medium from now on is no error.
    pub fn expect_losses(&mut self) -> Law {
        let owner = self.owner.as_mut().unwrap();
        owner.tell("losses");
        heard(owner.answer(PATIENCE), "owner").map(drop)
    }

    /// Closes the owner, which ends whatever others hold.
    pub fn close_owner(&mut self) -> Law {
        self.tally.door("close");
        let mut owner = self.owner.take().unwrap();
        owner.tell("close");
        let said = heard(owner.answer(PATIENCE), "owner")?;
        law!(said == "closed", "close: {said}");
        Ok(())
    }

    /// The next owner, where the last one is gone: everybody finds it.
    fn next_owner(&mut self) -> Law {
        self.held.clear();
        self.pins.clear();
        for known in self.known.values_mut() {
            known.there &= known.lasting;
        }
        self.start_owner()?;
        self.start_mover()?;
        for client in 0..self.clients.len() {
            if self.clients[client].is_some() {
                self.is_back(client)?;
            }
        }
        self.is_ready()?;
        if !self.is_roomy() {
            // Whatever was under way may have evicted.
            let listed = self.listing()?;
            for (id, known) in &mut self.known {
                known.there &= listed.contains(id);
            }
        }
        let told = self.told()?;
        // What left with the last owner nobody knows.
        law!(
            !self.listens || told.is_none(),
            "another owner's departures are said to be all there were: {told:?}"
        );
        self.early.clear();
        Ok(())
    }

    /// Those who worked for the last owner are gone soon.
    fn is_ready(&self) -> Law {
        soon(|| {
            law!(self.watcher().is_connected(), "the owner is not found");
            let scratch = [(key(SCRATCH), vec![1])];
            let namespace = self.namespace(0)?;
            let reserved = namespace.reserve_strict(&scratch);
            let reserved = reserved.map_err(|error| format!("a new owner: {error}"))?;
            namespace.abort(&reserved.into_iter().flatten().collect::<Vec<_>>());
            Ok(())
        })
    }

    /// Nothing is held by those who are gone, and what was acknowledged is there.
    pub fn come_to_rest(&mut self) -> Law {
        if self.owner.is_none() {
            self.next_owner()?;
        }
        self.forget_dead();
        self.owner.as_mut().unwrap().tell("well?");
        let said = heard(self.owner.as_mut().unwrap().answer(PATIENCE), "owner")?;
        law!(said == "here", "the owner says {said}");
        soon(|| self.nothing_is_left())?;
        self.look()
    }

    /// The mover may go on having what some dead clients held.
    fn forget_dead(&mut self) {
        for holds in [&mut self.held, &mut self.pins] {
            let mut dead = 0;
            holds.retain(|hold| {
                dead += usize::from(hold.dead);
                !hold.dead || dead <= 3
            });
        }
    }

    fn nothing_is_left(&self) -> Law {
        let stats = self.watcher().stats();
        law!(self.watcher().is_connected(), "the watcher lost its owner");
        let alive = |holds: &[Hold]| holds.iter().filter(|hold| !hold.dead).count() as u64;
        let (held, pins) = (alive(&self.held), alive(&self.pins));
        let pinned: u64 = stats.tiers.iter().map(|tier| tier.pinned_blocks).sum();
        let reserved: u64 = stats.tiers.iter().map(|tier| tier.reserved_blocks).sum();
        law!(
            reserved <= held,
            "{reserved} blocks stay reserved, {held} are known"
        );
        law!(
            pinned <= pins,
            "{pinned} blocks stay pinned, {pins} are known"
        );
        let queued = stats.write_back_bytes;
        law!(
            queued == 0 || held > 0,
            "{queued} bytes stay queued for nobody"
        );
        Ok(())
    }

    fn listing(&self) -> Law<BTreeSet<Id>> {
        let mut found = BTreeSet::new();
        for ns in 0..NAMESPACES as u8 {
            let blocks = self.namespace(ns)?.blocks();
            let blocks = blocks.map_err(|error| error.to_string())?;
            found.extend(blocks.iter().map(|(key, _)| (ns, number(key))));
        }
        Ok(found)
    }

    /// Who left, as the owner says; `None` where it has lost count.
    fn told(&self) -> Law<Option<BTreeSet<Id>>> {
        let gone = self.watcher().gone(10_000);
        let gone = gone.map_err(|error| error.to_string())?;
        let ns = |namespace| (0..NAMESPACES as u8).find(|ns| spec(*ns).id().unwrap() == namespace);
        let told = gone.blocks.iter().filter_map(|(identity, _)| {
            let number = number(&identity.key);
            Some((ns(identity.namespace)?, number))
        });
        Ok((!gone.overflowed).then(|| told.collect()))
    }

    fn look(&mut self) -> Law {
        let listed = self.listing()?;
        let told = self.told()?;
        self.listens = true;
        let early = std::mem::take(&mut self.early);
        let roomy = self.is_roomy();
        for (id, known) in &mut self.known {
            if known.there && !known.murky && !listed.contains(id) && !self.truncated {
                let said = early.contains(id) || told.as_ref().is_none_or(|told| told.contains(id));
                // What a full queue has kept near alone fits there as far as it fits.
                let fits = roomy && (known.lasting || self.shape.pipeline != "Cache|Dax");
                law!(
                    said && !fits,
                    "LOST: {id:?}, acknowledged, is not there (said so: {said}), {known:?}"
                );
            }
            known.there &= listed.contains(id);
        }
        for id in &listed {
            let known = self.known.get(id);
            law!(
                known.is_some_and(|known| known.begun || known.murky),
                "{id:?} is there, and nobody wrote it: {known:?}"
            );
        }
        let late = told.into_iter().flatten();
        self.early = late.filter(|id| listed.contains(id)).collect();
        Ok(())
    }

    /// Everything is let go, comes back, and can be filled again.
    pub fn finish(&mut self) -> Law {
        self.let_go()?;
        self.come_to_rest()?;
        self.read_all()?;
        if self.seed.is_multiple_of(2) {
            self.kill_owner();
            self.come_to_rest()?;
            self.read_all()?;
        }
        self.come_to_rest()?;
        if !self.truncated {
            self.fill()?;
        }
        if self.seed.is_multiple_of(3) {
            // Its clients go with it, or find that it has.
            self.clients.iter_mut().for_each(|client| *client = None);
        }
        self.close_owner()
    }

    /// All of the arena is free again, and can be written.
    fn fill(&mut self) -> Law {
        self.tally.door("final fill");
        for ns in 0..NAMESPACES as u8 {
            let cleared = self.namespace(ns)?.clear();
            cleared.map_err(|error| format!("clear: {error}"))?;
        }
        let all_free = || {
            let stats = self.watcher().stats();
            let full = stats.tiers.iter().find(|tier| {
                tier.blocks > 0 || tier.free_bytes + tier.lost_bytes != tier.capacity_bytes
            });
            law!(full.is_none(), "all was cleared, and there is {full:?}");
            Ok(())
        };
        soon(all_free)?;
        let stats = self.watcher().stats();
        let room = stats.tiers.last().map_or(0, |tier| tier.free_bytes);
        let namespace = self.namespace(0)?;
        // Of a near tier what may wait for the far one, and all of the last.
        let near = (stats.tiers.len() > 1).then(|| stats.tiers[0].free_bytes / 2);
        let mut whole = Vec::new();
        for (len, index) in near.into_iter().chain([room]).zip(0..) {
            let one = namespace.reserve_strict(&[(key(SCRATCH + index), vec![len])]);
            let one = one.map_err(|error| format!("all {len} bytes are free, but: {error}"))?;
            law!(one[0].is_some(), "all is free, and nothing was reserved");
            whole.extend(one.into_iter().flatten());
        }
        namespace.abort(&whole);
        soon(all_free)?;
        // A little is always made free ahead of need.
        let bytes = content(7, (room / 16 * 15) as usize);
        let put = BlockBuffers::whole([Buffer::from_vec(bytes.clone())]);
        let put = namespace.put(vec![key(SCRATCH)], put);
        let put = put.map_err(|error| error.to_string())?;
        let stored = put
            .wait(Some(PATIENCE))
            .map_err(|error| error.to_string())?;
        law!(stored == [true], "a last put: {:?}", put.outcomes());
        let buffer = Buffer::from_vec(vec![0; bytes.len()]);
        let got = namespace.get(vec![key(SCRATCH)], BlockBuffers::whole([buffer.clone()]));
        let got = got.map_err(|error| error.to_string())?;
        let _waited = got
            .wait(Some(PATIENCE))
            .map_err(|error| error.to_string())?;
        law!(
            got.outcomes() == [Outcome::Done] && buffer.to_vec() == bytes,
            "a last get: {:?}",
            got.outcomes()
        );
        Ok(())
    }

    /// All keys of a namespace.
    pub fn all_keys() -> impl Iterator<Item = u16> {
        0..KEYS as u16
    }
}

/// What a process says, unless it says nothing, or that something is wrong.
pub fn heard(said: Result<String, Silence>, who: &str) -> Law<String> {
    match said {
        Ok(said) if said.starts_with("WRONG") || said.starts_with("HANGS") => {
            Err(format!("{who}: {said}"))
        }
        Ok(said) => Ok(said),
        Err(Silence::Late) => Err(format!("a call of the {who} does not end")),
        Err(Silence::Ended) => Err(format!("the {who} has ended by itself")),
    }
}

/// Waits for what other processes do soon.
pub fn soon<T>(mut look: impl FnMut() -> Law<T>) -> Law<T> {
    let begun = Instant::now();
    loop {
        match look() {
            Err(_) if begun.elapsed() < PATIENCE => sleep(Duration::from_millis(1)),
            answer => return answer,
        }
    }
}
