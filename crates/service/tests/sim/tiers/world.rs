//! A depot over tiers that stand apart, what may be in it, and what is under way.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdepot_arena::parts;
use kvdepot_service::Mover;
use kvdepot_store::sim::{Entered, Schedule};
use kvdepot_store::{Buffer, Config, Depot, Identity, Namespace, Task, at_once};
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::twin::Id;
use serde_json::{Value, json};

use super::directory::Seen;
use super::memory::Bytes;
use super::posix::{FAN_OUT, SECRET};
use super::shelf::{Mood, Shelf};
use super::steps::{KEYS, NAMESPACES, Shape};
use super::terms::{LIMITS, Offers};
use super::two_phase::{Held, Pinned};
use super::verbs::kinds;
use crate::world::{Law, Turns, key, law, spec};

/// What may be stored under a key. What was put before a removal that was answered, and that no
/// put met, is never seen again.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// Which bytes; another number after a removal.
    pub content: u64,
    /// Whether somebody has begun to put them, and when last.
    pub begun: Option<u64>,
    /// The numbers before, and until when a reader may have got them.
    pub past: Vec<(u64, u64)>,
    /// A put was acknowledged, and nothing has happened since that may undo it.
    pub lasting: bool,
    /// When somebody last asked to remove it, or it rotted.
    pub disturbed: u64,
    /// Calls under way that remove it.
    pub removing: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Put,
    Get,
    Prefetch,
    Lookup,
}

/// What a task has to answer for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    There,
    Absent,
    Any,
}

/// A task under way.
pub struct Flying {
    pub task: Task,
    pub asked: Asked,
    pub ids: Vec<Id>,
    pub buffers: Vec<Buffer>,
    pub expect: Vec<Expect>,
    /// Which blocks of a put nothing endangered when it began.
    pub safe: Vec<bool>,
    pub since: u64,
    /// How often tiers had begun to fail, and whether all of them answered.
    pub storms: u64,
    pub calm: bool,
    /// It has asked no tier apart, and waits for none.
    pub is_near: bool,
    /// The second depot was asked.
    pub foreign: bool,
    /// Nothing was under way that it had to wait for when it began, and how often calls had been
    /// inside of others.
    pub idle: bool,
    pub inner: u64,
}

/// What the depot was asked since it was opened, and what has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub put_blocks: u64,
    pub get_blocks: u64,
    pub stored: u64,
    pub full: u64,
    pub declined: u64,
    pub dropped: u64,
    pub hits: u64,
    /// Reservations that were not made, whatever the reason.
    pub refused: u64,
}

pub struct World {
    pub shape: Shape,
    pub dir: tempfile::TempDir,
    pub schedule: Arc<Schedule>,
    entered: RefCell<Option<Entered>>,
    pub turns: Arc<Turns>,
    /// The tiers that stand apart, near to far.
    pub shelves: Vec<Arc<Shelf>>,
    pub depot: RefCell<Option<Depot>>,
    pub blocks: RefCell<BTreeMap<Id, Block>>,
    pub flying: RefCell<Vec<Flying>>,
    pub held: RefCell<Vec<Held>>,
    pub pins: RefCell<Vec<Pinned>>,
    pub mover: RefCell<Option<Mover>>,
    /// How often the depot was opened.
    openings: Cell<u32>,
    pub counts: Cell<Counts>,
    pub calm: Cell<bool>,
    /// How often that has ended.
    pub storms: Cell<u64>,
    pub now: Cell<u64>,
    /// Calls inside of one another now, and inner ones so far.
    pub nested: Cell<u32>,
    pub inner: Cell<u64>,
    pub rng: RefCell<Rng>,
    pub tally: RefCell<Tally>,
    pub broken: RefCell<Option<String>>,
    pub offers: RefCell<Offers>,
    /// A second depot over the directory of `Posix`, and how many have died.
    pub sharer: RefCell<Option<Depot>>,
    pub deaths: Cell<u32>,
    /// When something was done to a block by one depot of which the other may not know.
    pub foreign: RefCell<BTreeMap<Id, Instant>>,
    /// The schedule's time of each step.
    pub times: RefCell<BTreeMap<u64, Instant>>,
    /// What lay in that directory at the last look, and whether something was given up since
    /// that had room.
    pub seen: RefCell<Option<Seen>>,
    pub freed: Cell<bool>,
    /// Blocks that have rotted.
    pub rotted: RefCell<BTreeSet<Id>>,
    numbers: Cell<u64>,
    seed: u64,
}

impl World {
    pub fn new(seed: u64, shape: &Shape) -> World {
        let turns = Arc::new(Turns::new(seed));
        let chooser = Arc::clone(&turns);
        let schedule = Schedule::new(move |waiting| chooser.choose(waiting));
        schedule.show_time();
        let dir = tempfile::Builder::new()
            .prefix("kvsim")
            .tempdir_in(crate::disk::dir())
            .unwrap();
        // The last one alone is `Posix`.
        let (before, last) = match shape.bytes {
            Bytes::Posix => (Bytes::Files, "Posix"),
            other => (other, "Far"),
        };
        let mid = Shelf::new(
            "Mid",
            shape.mid_lasts,
            shape.mid << 10,
            (before, dir.path()),
        );
        let far = Shelf::new(last, true, 1 << 30, (shape.bytes, dir.path()));
        far.answers_within(shape.limits.unwrap_or(LIMITS));
        let shelves = [("Mid", mid), ("Far", far)].into_iter();
        let shelves = shelves.filter(|(name, _)| shape.pipeline.contains(name));
        World {
            shape: shape.clone(),
            dir,
            schedule,
            entered: RefCell::default(),
            turns,
            shelves: shelves.map(|(_, shelf)| shelf).collect(),
            depot: RefCell::default(),
            blocks: RefCell::default(),
            flying: RefCell::default(),
            held: RefCell::default(),
            pins: RefCell::default(),
            mover: RefCell::default(),
            openings: Cell::new(0),
            counts: Cell::default(),
            calm: Cell::new(false),
            storms: Cell::new(0),
            now: Cell::new(0),
            nested: Cell::new(0),
            inner: Cell::new(0),
            rng: RefCell::new(Rng::new(seed)),
            tally: RefCell::default(),
            broken: RefCell::default(),
            offers: RefCell::default(),
            sharer: RefCell::default(),
            deaths: Cell::new(0),
            foreign: RefCell::default(),
            times: RefCell::default(),
            seen: RefCell::default(),
            freed: Cell::new(false),
            rotted: RefCell::default(),
            numbers: Cell::new(seed << 20),
            seed,
        }
    }

    /// Lanes, threads, answers and time are steps from now on.
    pub fn enter(&self, meanwhile: impl Fn() + 'static) {
        *self.entered.borrow_mut() = Some(self.schedule.enter(meanwhile));
    }

    pub fn leave(&self) {
        self.entered.borrow_mut().take();
    }

    /// The choices of a step depend on its number alone.
    pub fn reseed(&self, step: u64) {
        let mut rng = Rng::new(self.seed ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        self.turns.reseed(rng.fork());
        for shelf in &self.shelves {
            shelf.reseed(rng.fork());
        }
        *self.rng.borrow_mut() = rng;
    }

    pub fn door(&self, name: &'static str) {
        self.tally.borrow_mut().door(name);
    }

    pub fn fault(&self, name: &'static str) {
        self.tally.borrow_mut().fault(name);
    }

    pub fn tick(&self) -> u64 {
        self.now.set(self.now.get() + 1);
        if let Some(now) = kvdepot_media::sim::now() {
            self.times.borrow_mut().insert(self.now.get(), now);
        }
        self.now.get()
    }

    fn config(&self) -> Config {
        let shape = &self.shape;
        let mut settings = json!({
            "socket": match shape.moved {
                true => self.socket().to_str().unwrap().to_owned(),
                false => "off".into(),
            },
            "lanes": 2,
            "close_timeout": "0s",
            "promote": shape.promote,
            "overload": if shape.drop { "drop" } else { "wait" },
        });
        if shape.write_back > 0 {
            settings["write_back_depth"] = json!(shape.write_back << 10);
        }
        if shape.pipeline.contains("Cache") {
            settings["cache"] = json!({"capacity": shape.cache << 10});
        }
        if shape.pipeline.contains("Dax") {
            let path = self.dir.path().join("arena");
            let capacity = shape.dax << 10;
            let section = json!({"path": path, "capacity": capacity, "records": 64});
            settings[if shape.disk { "nvme" } else { "dax" }] = section;
        }
        if shape.bytes == Bytes::Posix {
            settings["posix"] = self.posix_section();
        }
        if shape.keyed {
            settings["mac_key_file"] = json!(self.keys());
        }
        let section = |tier: &str| match tier {
            "Dax" if shape.disk => "nvme".to_owned(),
            "Far" if shape.bytes == Bytes::Posix => "posix".to_owned(),
            other => other.to_ascii_lowercase(),
        };
        for behind in shape.pipeline.split('|').skip(1) {
            if behind == shape.second {
                settings[section(behind)]["admission"] = json!("second");
            }
            if behind == shape.terms.tier {
                shape.terms.put_into(&mut settings[section(behind)]);
            }
        }
        if let Some(limits) = shape.limits {
            let ms = |limit: Duration| format!("{}ms", limit.as_millis());
            let settings = &mut settings[section("Far")];
            settings["lookup_timeout"] = json!(ms(limits.lookup));
            settings["timeout"] = json!(ms(limits.other));
        }
        let far = if shape.disk { "Nvme" } else { "Dax" };
        let mut pipeline = shape.pipeline.replace("Dax", far);
        if shape.bytes == Bytes::Posix {
            pipeline = pipeline.replace("Far", "Posix");
        }
        Config::with_kinds(&kinds(&self.shelves), &pipeline, &settings).unwrap()
    }

    /// A file of keys.
    pub fn keys(&self) -> PathBuf {
        let path = self.dir.path().join("keys");
        if !path.exists() {
            let digits: String = SECRET.iter().map(|byte| format!("{byte:02x}")).collect();
            std::fs::write(&path, format!("- {digits}\n")).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        }
        path
    }

    pub fn posix_section(&self) -> Value {
        json!({
            "path": self.shelves.last().map(|shelf| shelf.path()),
            "capacity": self.room(),
            "fan_out": FAN_OUT,
            "direct": if self.shape.disk { "auto" } else { "false" },
        })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join(format!("s{}", self.openings.get()))
    }

    pub fn open(&self) -> Law {
        self.door("open");
        self.openings.set(self.openings.get() + 1);
        self.forget_seen();
        let depot = kvdepot_service::open(&self.config());
        let depot = depot.map_err(|error| format!("open: {error}"))?;
        *self.depot.borrow_mut() = Some(depot);
        self.counts.set(Counts::default());
        *self.offers.borrow_mut() = Offers {
            opened: kvdepot_media::sim::now(),
            ..Offers::default()
        };
        Ok(())
    }

    pub fn owner(&self) -> Depot {
        self.depot.borrow().clone().unwrap()
    }

    pub fn namespace(&self, ns: u8) -> Law<Namespace> {
        let namespace = self.owner().namespace(&spec(ns));
        namespace.map_err(|error| format!("namespace: {error}"))
    }

    /// Everything ends, and each task has its outcome.
    pub fn close(&self) -> Law {
        self.door("close");
        drop(self.mover.take());
        self.forget_seen();
        self.shelves.iter().for_each(|shelf| shelf.closes());
        let depot = self.depot.borrow_mut().take().unwrap();
        // Nobody calls what is being closed.
        self.alone(|| depot.close());
        // They end with their owner.
        drop((self.held.take(), self.pins.take()));
        self.collect()?;
        self.none_waits("after close")
    }

    /// Nothing else happens meanwhile.
    pub fn alone<T>(&self, call: impl FnOnce() -> T) -> T {
        self.nested.set(self.nested.get() + 9);
        let answer = call();
        self.nested.set(self.nested.get() - 9);
        answer
    }

    /// Every block that there may be.
    pub fn all_ids() -> impl Iterator<Item = Id> {
        (0..NAMESPACES as u8).flat_map(|ns| (0..KEYS as u16).map(move |key| (ns, key)))
    }

    pub fn identity(id: Id) -> Identity {
        Identity {
            namespace: spec(id.0).id().unwrap(),
            key: key(id.1),
        }
    }

    /// Bytes of a block: always the same.
    pub fn len(&self, id: Id) -> usize {
        let mut rng = Rng::new(self.seed ^ u64::from(id.1) << 8 ^ u64::from(id.0));
        1 + rng.below(self.shape.largest) as usize
    }

    /// Lengths of the parts of a block: always the same. With several it is written in two phases,
    /// and not put.
    pub fn parts(&self, id: Id) -> Vec<u64> {
        let len = self.len(id) as u64;
        let mut rng = Rng::new(self.seed ^ u64::from(id.1) << 24 ^ u64::from(id.0));
        let count = len.min(*rng.pick(&[1, 1, 1, 2, 3]));
        let mut lens = vec![len / count; count as usize];
        lens[0] += len % count;
        lens
    }

    /// Bytes of a block where it is stored, with its part table.
    pub fn payload(&self, id: Id) -> u64 {
        parts::payload_len(&self.parts(id))
    }

    pub fn block(&self, id: Id) -> Block {
        let mut blocks = self.blocks.borrow_mut();
        let new = || Block {
            content: self.number(),
            ..Block::default()
        };
        blocks.entry(id).or_insert_with(new).clone()
    }

    pub fn change(&self, id: Id, change: impl FnOnce(&mut Block)) {
        self.block(id);
        change(self.blocks.borrow_mut().get_mut(&id).unwrap());
    }

    pub fn number(&self) -> u64 {
        self.numbers.set(self.numbers.get() + 1);
        self.numbers.get()
    }

    /// Whether somebody is putting it.
    pub fn is_written(&self, id: Id) -> bool {
        let flying = self.flying.borrow();
        let mut puts = flying.iter().filter(|one| one.asked == Asked::Put);
        let held = self.held.borrow().iter().any(|one| one.id == id);
        held || puts.any(|one| one.ids.contains(&id) && !one.task.is_done())
    }

    /// Whether all of these are in tiers of arenas.
    pub fn are_near(&self, ns: u8, keys: &[u16]) -> Law<Vec<bool>> {
        let namespace = self.namespace(ns)?;
        let keys: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        let found = match at_once(|| namespace.contains(&keys)) {
            Ok(found) | Err(found) => found,
        };
        found.map_err(|error| format!("contains, at once: {error}"))
    }

    /// What a question has to answer now, if all tiers answer it.
    pub fn expect(&self, id: Id) -> Law<Expect> {
        let identity = World::identity(id);
        let known =
            self.is_safe(id) && !self.is_written(id) && !self.was_foreign(id, self.now.get());
        if !self.calm.get() || !known {
            return Ok(Expect::Any);
        }
        let apart = self.shelves.iter().any(|shelf| shelf.has(&identity));
        let is_near = self.are_near(id.0, &[id.1])?[0];
        Ok(match is_near || apart {
            // It may go for want of room before anybody looks for it there, and be remembered.
            _ if self.collects() && !is_near => Expect::Any,
            true => Expect::There,
            false => Expect::Absent,
        })
    }

    /// Whether nothing may take it away that was asked for before, or comes to light.
    pub fn is_safe(&self, id: Id) -> bool {
        let identity = World::identity(id);
        let goes = self.shelves.iter().any(|shelf| shelf.may_go(&identity));
        !goes && self.block(id).removing == 0 && !self.is_rotten(id)
    }

    /// Whether somebody may have discarded it since.
    pub fn has_rotted(&self, id: Id) -> bool {
        self.rotted.borrow().contains(&id)
    }

    /// Whether some tier has it, and its bytes are no longer what they were.
    pub fn is_rotten(&self, id: Id) -> bool {
        let identity = World::identity(id);
        let knows = |shelf: &Arc<Shelf>| shelf.knows(identity.namespace, identity.key);
        let mut known = self.shelves.iter().filter(|shelf| knows(shelf));
        known.any(|shelf| !shelf.has(&identity))
    }

    /// Slices, carries and answers that have failed.
    pub fn faults(&self) -> u64 {
        self.turns.failed.load(Ordering::Relaxed)
    }

    /// Questions that tiers were asked so far.
    pub fn asked(&self) -> u64 {
        self.shelves.iter().map(|shelf| shelf.counts().0).sum()
    }

    /// Does all that can be done, and lets time pass where nothing else can happen.
    pub fn settle(&self) -> Law {
        let depot = self.owner();
        for number in 0..3000 {
            let works = self.schedule.step() || depot.step_evictor() || depot.step_background();
            // What is tried again and again may wait for time to pass.
            let waits = !works || number % 16 == 0 && self.schedule.waiting() == 0;
            let rings = waits && self.schedule.ring();
            if !works && !rings {
                return Ok(());
            }
        }
        // A copy of what somebody has reserved is tried again and again.
        law!(!self.held.borrow().is_empty(), "it does not come to rest");
        Ok(())
    }

    /// From now on tiers and lanes may fail.
    pub fn storm(&self) {
        self.calm.set(false);
        self.freed.set(true);
        self.storms.set(self.storms.get() + 1);
    }

    /// Every tier answers, and is asked again.
    pub fn calm_down(&self) -> Law {
        for shelf in &self.shelves {
            let late = shelf.mood().late;
            shelf.set_mood(Mood {
                late,
                ..Mood::default()
            });
        }
        self.turns.fail.store(0, Ordering::Relaxed);
        self.settle()?;
        // The longest that one is left alone.
        self.schedule.pass(Duration::from_secs(61));
        let namespace = self.namespace(0)?;
        let unknown = [key(KEYS as u16 + 100)];
        let found = self.alone(|| namespace.contains(&unknown));
        law!(
            found.as_deref().is_ok_and(|found| !found[0]),
            "nobody has put it: {found:?}"
        );
        self.alone(|| self.settle())?;
        self.calm.set(true);
        Ok(())
    }
}
