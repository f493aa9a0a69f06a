//! The tier `Peer`: one depot over many hosts.
//!
//! Each block has its home at some of the hosts, which rendezvous hashing says; each host gives an
//! arena of its own, its *share*, and answers others for it without its pipeline. A lookup asks two
//! hosts at most. Bytes go straight between the share of the home and the memory that the caller
//! has, by what the home has lent for as long as the block is pinned or reserved.
//!
//! `share` is what this host gives and `home` answers others for it; `hosts` knows the others and
//! `target` asks one of them, by `messages`; `wire` carries bytes, `held` has what is pinned or
//! reserved; `lookups` and `writes` are the verbs; `mover` brings blocks to their homes. Through
//! a `door` workers of this host read by themselves what its depot has pinned at another, as a
//! `loan`.

mod desk;
mod door;
mod held;
mod home;
mod hosts;
mod loan;
mod lookups;
mod messages;
mod mover;
mod moving;
mod options;
mod pass;
mod share;
mod target;
mod wire;
mod writes;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_arena::{
    Departed, Error, Key, NamespaceId, Place, Refused, Reserved, TierStats, Wanted, size,
};
use kvdepot_host::fork::Origin;
use kvdepot_media::Checksum;
use kvdepot_store::{
    Ends, Kinds, NamespacePage, NamespaceUsage, Page, Reply, Terms, Tier, TierKind, know_door,
};
use parking_lot::Mutex;

use crate::config::Config;
use crate::engine::Engine;
use crate::homes::Host;
use crate::membership::Membership;
use desk::{Desk, gather};
use door::PeerDoor;
use held::Held;
use home::Home;
use hosts::{Hosts, Whom};
use messages::{Ask, KEYS_MAX, Keys, Said};
use mover::Mover;
use options::{NAME, OPTIONS, Options, Secrets, Source, half, refused};
use pass::Pass;
use share::Share;
use target::Net;

/// Threads for what this host's own share may take time for.
const THREADS: usize = 4;

/// How long a close waits for what is under way.
const TO_CLOSE: Duration = Duration::from_millis(900);

/// Connections that others may have to this host.
const CONNECTIONS_MAX: usize = 65_536;

/// How often all hosts are asked for what is to be removed, where there is always more.
const ROUNDS_MAX: usize = 8;

/// What follows the answers of all hosts.
type Heard = Box<dyn FnOnce(Vec<Said>) + Send>;

/// Returns the kind of tier `Peer`, with its section of options.
#[must_use]
pub fn tier_kind() -> TierKind {
    TierKind {
        name: NAME,
        options: OPTIONS,
        check: |section, files| Options::read(section, files).map(drop),
        open: Arc::new(|section, terms| {
            let tier = Peers::open(&Options::read(section, true)?, &terms)?;
            Ok(Arc::new(tier) as Arc<dyn Tier>)
        }),
    }
}

/// Makes the tier `Peer` known to configurations of this process. Call it before a configuration is
/// read.
pub fn install() {
    Kinds::know(tier_kind());
    know_door(NAME, |key| Ok(Arc::new(PeerDoor::open(key)?) as _));
}

/// The tier.
struct Peers {
    common: Arc<Common>,
    mover: Arc<Mover>,
    /// Who watches the hosts, and who moves; `None` once it is closed.
    threads: Mutex<Option<Vec<JoinHandle<()>>>>,
    origin: Origin,
}

/// What its threads use.
struct Common {
    share: Arc<Share>,
    home: Arc<Home>,
    hosts: Arc<Hosts>,
    held: Arc<Held>,
    engine: Arc<Engine>,
    own: Arc<Desk>,
    lasts: bool,
    replicas: usize,
    secrets: Secrets,
}

impl Peers {
    fn open(options: &Options, terms: &Terms) -> Result<Peers, Error> {
        let share = Arc::new(Share::open(
            (NAME, terms.number),
            options.path.clone(),
            (options.capacity, terms.is_last),
        )?);
        let home = Arc::new(Home::new(&options.name, &share)?);
        let config = Config {
            listen: Some(options.listen),
            token: options.secrets.token(),
            tls: options.secrets.tls.clone(),
            // What is written is known to have come before it is published. Who reads verifies, and
            // the home looks itself before a block goes, but for one that has MACs.
            checksum: true,
            verifies_reads: terms.keys.is_none(),
            local: false,
            rdma: Some(Vec::new()),
            timeout: half(terms.lookup),
            connections_max: CONNECTIONS_MAX,
            ..Config::default()
        };
        let engine = Engine::answering(config, Some(Arc::clone(&home) as _)).map_err(refused)?;
        let engine = Arc::new(engine);
        let secrets = &options.secrets;
        if secrets.tokens.len() > 1 {
            let renewed = engine.renew(&secrets.tokens, secrets.tls.as_ref());
            renewed.map_err(refused)?;
        }
        home.serve_by(&engine);
        let membership = match &options.source {
            Source::Fixed(hosts) => Membership::fixed(hosts.clone()),
            Source::Etcd(settings) => {
                let listens = engine.address();
                let address = options.advertise.or(listens).unwrap_or(options.listen);
                let host = Host {
                    name: options.name.clone(),
                    address: address.to_string(),
                    capacity: options.capacity,
                    // Of the membership's: no clocks of two hosts are compared.
                    incarnation: 0,
                };
                Membership::etcd(settings, Some(host), Box::new(|_| ()))
            }
        };
        let membership = membership.map_err(|error| {
            let allowed = format!("hosts that can form a cluster ({error})");
            Error::config("peer", "this section", allowed)
        })?;
        let net = Net::new(Arc::clone(&engine), half(terms.lookup), half(terms.timeout));
        let hosts = Hosts::new(
            &options.name,
            membership,
            options.replicas,
            Arc::new(net),
            terms.timeout,
        );
        let hosts = Arc::new(hosts);
        let pass = Pass {
            holder: engine.initiator,
            token: secrets.token(),
            tls: secrets.tls.clone(),
            lookup: half(terms.lookup),
            timeout: half(terms.timeout),
        };
        let held = Held::new(terms.number, terms.keys.clone(), &share, pass);
        home.know(&hosts);
        let common = Arc::new(Common {
            share,
            home,
            hosts,
            held,
            engine,
            own: Desk::new("kvdepot-share", THREADS),
            lasts: options.path.is_some() || terms.is_last,
            replicas: options.replicas,
            secrets: secrets.clone(),
        });
        common.share.arena().keep();
        common.share.spread(&common.hosts);
        // From here on dropping it ends all that was begun.
        let peers = Peers {
            mover: Arc::new(Mover::new(&common)),
            common,
            threads: Mutex::new(Some(Vec::new())),
            origin: Origin::here()?,
        };
        let hosts = Arc::clone(&peers.common.hosts);
        let mover = Arc::clone(&peers.mover);
        let watch = spawn("kvdepot-peers", move || hosts.watch())?;
        peers.threads.lock().get_or_insert_default().push(watch);
        let moves = spawn("kvdepot-mover", move || mover.work())?;
        peers.threads.lock().get_or_insert_default().push(moves);
        Ok(peers)
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    kvdepot_host::cpu::spawn(name, work).map_err(|source| Error::Io {
        path: "cannot start a thread".into(),
        source,
    })
}

impl Common {
    /// Asks every host to remove something, again and again until no host has had any of it: what
    /// was on its way from a host that had not been asked yet may have come to one that had been.
    /// All answers go to `then`.
    fn ask_to_remove(
        self: &Arc<Self>,
        ask: impl Fn() -> Ask + Clone + Send + 'static,
        own: impl Fn(&Share) -> Said + Clone + Send + 'static,
        so_far: Vec<Said>,
        then: impl FnOnce(Vec<Said>) + Send + 'static,
    ) {
        let common = Arc::clone(self);
        let (first, again, round) = (ask.clone(), own.clone(), so_far.len());
        self.ask_all(first, own, move |mut said: Vec<Said>| {
            let has_found = said.iter().any(|said| match said {
                Said::Flags(flags) => flags.contains(&true),
                Said::Count(count) => *count > 0,
                _ => false,
            });
            let is_over = !has_found || round > ROUNDS_MAX * said.len();
            said.extend(so_far);
            match is_over {
                true => then(said),
                false => common.ask_to_remove(ask, again, said, Box::new(then) as Heard),
            }
        });
    }

    /// Asks every host the same, and has `then` run with what all have said; not, where one has
    /// said nothing.
    fn ask_all(
        self: &Arc<Self>,
        ask: impl Fn() -> Ask,
        own: impl FnOnce(&Share) -> Said + Send + 'static,
        then: impl FnOnce(Vec<Said>) + Send + 'static,
    ) {
        let (all, is_known) = (self.hosts.all(), self.hosts.is_known());
        let done = move |said: Vec<Option<Said>>| {
            // Where this host is none of them its own share has not been asked.
            let said: Option<Vec<Said>> = said.into_iter().collect();
            if let Some(said) = said.filter(|_| is_known) {
                then(said);
            }
        };
        let mut own = Some(own);
        for (slot, whom) in gather(all.len(), done).into_iter().zip(all) {
            match (whom, &own) {
                (Some(Whom::Own), Some(_)) => {
                    let (share, own) = (Arc::clone(&self.share), own.take());
                    self.own.run(move || slot.say(own.map(|own| own(&share))));
                }
                (Some(Whom::Far(target)), _) => {
                    target.ask(ask(), move |said| slot.say(said.map(|(said, _)| said)));
                }
                _ => drop(slot),
            }
        }
    }
}

impl Tier for Peers {
    fn name(&self) -> &'static str {
        NAME
    }

    fn lasts(&self) -> bool {
        self.common.lasts
    }

    fn renew(&self) -> Result<(), Error> {
        let secrets = self.common.secrets.read_again()?;
        let renewed = self
            .common
            .engine
            .renew(&secrets.tokens, secrets.tls.as_ref());
        renewed.map_err(refused)?;
        // Workers that attach from now on prove it.
        self.common.held.renew(secrets.token());
        Ok(())
    }

    fn block_max(&self) -> u64 {
        // Of this host's share; another may have a larger one, and a smaller one refuses.
        self.common.share.arena().layout().data_len()
    }

    fn probe(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        lookups::probe(&self.common, namespace, keys, reply);
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        used: &[u64],
        reply: Reply<Vec<Option<Place>>>,
    ) {
        lookups::pin(&self.common, namespace, (keys, used), reply);
    }

    fn unpin(&self, places: &[Place]) {
        self.common.held.unpin(places);
    }

    fn discard(&self, places: &[Place], reply: Reply<usize>) {
        lookups::discard(&self.common, places, reply);
    }

    fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reply: Reply<Vec<Result<Reserved, Refused>>>,
    ) {
        writes::reserve(&self.common, namespace, blocks, reply);
    }

    fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool, reply: Reply<Vec<bool>>) {
        writes::commit(&self.common, written, pinned, reply);
    }

    fn remove(&self, namespace: NamespaceId, keys: &[Key], reply: Reply<Vec<bool>>) {
        // Each chunk of the keys by a question of its own.
        let chunks: Vec<Vec<Key>> = keys.chunks(KEYS_MAX).map(<[Key]>::to_vec).collect();
        let done = move |gone: Vec<Option<Vec<bool>>>| {
            if let Some(gone) = gone.into_iter().collect::<Option<Vec<_>>>() {
                reply.answer(gone.concat());
            }
        };
        for (slot, chunk) in gather(chunks.len(), done).into_iter().zip(chunks) {
            let mut gone = vec![false; chunk.len()];
            let asked = Keys::new(namespace, chunk.iter().copied());
            self.common.ask_to_remove(
                move || Ask::Remove(asked.clone()),
                move |share| Said::Flags(share.remove(namespace, &chunk)),
                Vec::new(),
                move |said| {
                    for said in said {
                        let Said::Flags(flags) = said else {
                            return;
                        };
                        gone.iter_mut()
                            .zip(flags)
                            .for_each(|(gone, flag)| *gone |= flag);
                    }
                    slot.say(Some(gone));
                },
            );
        }
    }

    /// Counts copies.
    fn clear(&self, namespace: NamespaceId, reply: Reply<usize>) {
        self.common.ask_to_remove(
            move || Ask::Clear(namespace.0),
            move |share| Said::Count(share.clear(namespace) as u64),
            Vec::new(),
            move |said| {
                let count = |said: &Said| match said {
                    Said::Count(count) => Some(*count as usize),
                    _ => None,
                };
                if let Some(counts) = said.iter().map(count).collect::<Option<Vec<_>>>() {
                    reply.answer(counts.into_iter().sum());
                }
            },
        );
    }

    /// A mark is a host of the view and a slot of its share. A block is named by each that has it.
    fn list(&self, namespace: NamespaceId, from: u64, limit: usize, reply: Reply<Page>) {
        let (host, slot) = ((from >> 32) as usize, from as u32);
        let all = self.common.hosts.all();
        let next = (host + 1 < all.len()).then_some((host as u64 + 1) << 32);
        let mark = move |more: Option<u32>| match more {
            Some(slot) => Some((host as u64) << 32 | u64::from(slot)),
            None => next,
        };
        let page = move |reply: Reply<Page>, blocks: Vec<(Key, u64)>, more| {
            reply.answer((blocks, mark(more)));
        };
        match all.get(host).cloned().flatten() {
            None if all.is_empty() => page(reply, Vec::new(), None),
            None => drop(reply),
            Some(Whom::Own) => {
                let (blocks, more) = self.common.share.list(namespace, slot, limit);
                page(reply, blocks, more);
            }
            Some(Whom::Far(target)) => {
                let ask = Ask::List {
                    namespace: namespace.0,
                    from: slot,
                    limit: limit.min(KEYS_MAX) as u32,
                };
                target.ask(ask, move |said| {
                    if let Some((Said::Page(blocks, more), _)) = said {
                        let blocks = blocks.into_iter().map(|(key, len)| (Key(key), len));
                        page(reply, blocks.collect(), more.filter(|more| *more > slot));
                    }
                });
            }
        }
    }

    fn describe(&self, namespace: NamespaceId, description: &str) {
        let (own, text) = (description.to_owned(), description.to_owned());
        let ask = move || Ask::Describe {
            namespace: namespace.0,
            text: text.clone(),
        };
        let describe = move |share: &Share| {
            share.arena().describe(namespace, &own);
            Said::Done
        };
        self.common.ask_all(ask, describe, drop);
    }

    /// A mark is a host of the view. One that does not answer has none.
    fn namespaces(&self, from: u64, reply: Reply<NamespacePage>) {
        let all = self.common.hosts.all();
        let host = from as usize;
        let next = (host + 1 < all.len()).then_some(from + 1);
        match all.get(host).cloned().flatten() {
            None => drop(reply.answer((Vec::new(), next))),
            Some(Whom::Own) => drop(reply.answer((self.common.share.namespaces(), next))),
            Some(Whom::Far(target)) => target.ask(Ask::Namespaces, move |said| {
                let all = match said {
                    Some((Said::Namespaces(all), _)) => all,
                    _ => Vec::new(),
                };
                let usage = |(id, text, blocks, bytes)| {
                    let mut usage = NamespaceUsage::described(NamespaceId(id), text);
                    (usage.blocks, usage.bytes) = (blocks, bytes);
                    usage
                };
                reply.answer((all.into_iter().map(usage).collect(), next));
            }),
        }
    }

    fn about(&self) -> String {
        let common = &self.common;
        let capacity = size::show(common.share.arena().stats().capacity_bytes);
        let hosts = common.hosts.view().hosts().len();
        let at = common.engine.address();
        let at = at.map_or_else(String::new, |at| format!(" at {at}"));
        let down = match common.hosts.down() {
            0 => String::new(),
            down => format!(", {down} of them unreachable"),
        };
        format!("{NAME} {capacity}{at}, one of {hosts} hosts{down}")
    }

    /// Of this host's share. With several homes another may still have them: nothing is said.
    fn departed(&self, listener: u64, limit: usize) -> Departed {
        match self.common.replicas {
            1 => self.common.share.arena().departed(listener, limit),
            _ => Departed::default(),
        }
    }

    fn forget_listener(&self, listener: u64) {
        self.common.share.arena().forget_listener(listener);
    }

    /// Of this host's share, but for what it asks others, and has pinned and reserved at all.
    fn stats(&self) -> TierStats {
        let common = &self.common;
        let mut stats = common.share.arena().stats();
        let net = common.hosts.net();
        stats.requests = net.calls.load(Ordering::Relaxed);
        let unheard = net.unheard.load(Ordering::Relaxed);
        if unheard > 0 {
            stats.request_errors.insert("timeout".to_owned(), unheard);
        }
        let refused = common.engine.stats().refused_greetings;
        if refused > 0 {
            stats
                .request_errors
                .insert("handshake_failed".to_owned(), refused);
        }
        stats
    }

    fn ends(&self) -> Arc<dyn Ends> {
        Arc::clone(&self.common.held) as _
    }

    fn close(&self) {
        if !self.origin.is_here() {
            return;
        }
        let Some(threads) = self.threads.lock().take() else {
            return;
        };
        let common = &self.common;
        let deadline = Instant::now() + TO_CLOSE;
        common.held.close();
        common.hosts.begin_close();
        self.mover.end();
        // Whoever waits for another host is told that there is nothing to wait for.
        common.engine.close();
        threads.into_iter().for_each(|thread| drop(thread.join()));
        common.home.close();
        common.hosts.close(deadline);
        common.own.end(deadline);
        common.share.close();
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.close();
    }
}
