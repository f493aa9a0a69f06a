//! What other hosts ask this one, and what it has pinned and reserved for them.
//!
//! Whatever is handed out is bound to the initiator that asked: ended by its word, or when all its
//! connections have ended. That is safe by then, as only connections reach the memory, and what was
//! lent to it is withdrawn before the room is anybody else's.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kvdepot_arena::held::turn_len;
use kvdepot_arena::parts::ENTRY;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Refused, Reserved, Wanted};
use kvdepot_media::Checksum;
use parking_lot::{Mutex, MutexGuard};

use super::hosts::Hosts;
use super::messages::{
    Ask, Block, Id, KEYS_MAX, Keys, Pinned, Room, Said, Why, Written, decode, encode,
};
use super::share::Share;
use crate::engine::Engine;
use crate::grant::Rights;
use crate::peer::random;
use crate::serve::{Answers, Lent};

/// Most that one host may have pinned and reserved.
const HELD_MAX: usize = 262_144;

/// Calls that a host has given up and that may still make something, and as many names: as many as
/// one question has.
const FORGOTTEN_MAX: usize = KEYS_MAX;

/// Most that read one pin: workers of one engine.
const BORROWED_MAX: usize = 256;

/// Pins and reservations of all hosts.
type Guests = HashMap<[u8; 16], Guest>;

/// What one host has.
#[derive(Default)]
struct Guest {
    held: BTreeMap<Id, Hold>,
    /// The names of that, behind the calls that have made it.
    made: BTreeSet<(u64, Id)>,
    /// Calls that it has given up, which may still make something.
    calls: Forgotten,
    /// Names that it has given up, which may still be published. Apart from the calls: as many come
    /// at once as are remembered.
    names: Forgotten,
}

impl Guest {
    fn hold(&mut self, id: Id, hold: Hold) {
        self.made.insert((hold.call, id));
        self.held.insert(id, hold);
    }

    fn take(&mut self, id: Id) -> Option<Hold> {
        let hold = self.held.remove(&id)?;
        self.made.remove(&(hold.call, id));
        Some(hold)
    }

    /// Takes some of what these calls have made, as many as have a turn together; none where
    /// nothing is left of them.
    fn take_some_of(&mut self, calls: &[u64]) -> Vec<Hold> {
        let some = made_by(&self.made, calls, turn_len());
        some.into_iter().filter_map(|id| self.take(id)).collect()
    }
}

/// Names of what some calls have made, at most so many.
fn made_by<C: Copy + Ord>(made: &BTreeSet<(C, Id)>, calls: &[C], most: usize) -> Vec<Id> {
    let of = |call: &C| made.range((*call, Id::MIN)..=(*call, Id::MAX));
    let all = calls.iter().flat_map(of).map(|(_, id)| *id);
    all.take(most).collect()
}

/// The last numbers that a guest has given up.
#[derive(Default)]
struct Forgotten {
    /// The first was given up first.
    order: VecDeque<u64>,
    all: HashSet<u64>,
}

impl Forgotten {
    fn note(&mut self, gone: u64) {
        if !self.all.insert(gone) {
            return;
        }
        self.order.push_back(gone);
        if self.order.len() > FORGOTTEN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }

    fn has(&self, gone: u64) -> bool {
        self.all.contains(&gone)
    }
}

/// One pin or reservation. What is lent goes first.
struct Hold {
    lent: Lent,
    /// To those that the guest has told of its pin, each once.
    borrowed: BTreeMap<[u8; 16], Lent>,
    what: What,
    call: u64,
}

enum What {
    Pin(Pin),
    New(Reserved),
}

/// A pinned block; dropped, it is pinned no more.
struct Pin {
    share: Arc<Share>,
    place: Place,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.share.unpin(self.place.token);
    }
}

/// Answers other hosts.
pub(super) struct Home {
    name: String,
    share: Arc<Share>,
    engine: OnceLock<Weak<Engine>>,
    hosts: OnceLock<Weak<Hosts>>,
    guests: Mutex<Guests>,
    next: AtomicU64,
}

impl Home {
    pub(super) fn new(name: &str, share: &Arc<Share>) -> Result<Home, Error> {
        // Those of a process that was there before name nothing.
        let first =
            random::<8>().map_err(|_| Error::Closed("cannot get random bytes from the system"))?;
        Ok(Home {
            name: name.to_owned(),
            share: Arc::clone(share),
            engine: OnceLock::new(),
            hosts: OnceLock::new(),
            guests: Mutex::default(),
            next: AtomicU64::new(u64::from_le_bytes(first)),
        })
    }

    /// By whom it lends.
    pub(super) fn serve_by(&self, engine: &Arc<Engine>) {
        let _once = self.engine.set(Arc::downgrade(engine));
    }

    /// By whom it knows what is to stay here.
    pub(super) fn know(&self, hosts: &Arc<Hosts>) {
        let _once = self.hosts.set(Arc::downgrade(hosts));
    }

    /// Ends all that is held.
    pub(super) fn close(&self) {
        let guests = std::mem::take(&mut *self.guests.lock());
        drop(guests);
    }

    /// Works for one turn of a call's keys under the lock, which those that wait for it get next.
    fn turn<R>(&self, work: impl FnOnce(&mut Guests) -> R) -> R {
        let mut guests = self.guests.lock();
        let done = work(&mut guests);
        MutexGuard::unlock_fair(guests);
        done
    }

    fn lend(&self, guest: [u8; 16], place: &Place, rights: Rights) -> Option<Lent> {
        let engine = self.engine.get()?.upgrade()?;
        let buffers = self.share.buffers(place, 0, place.len).ok()?;
        engine.lend(guest, &buffers, rights).ok().flatten()
    }

    /// Keeps what was made for a guest, unless it has too much or has given the call up.
    fn keep(&self, guest: [u8; 16], hold: Hold) -> Option<Id> {
        let mut guests = self.guests.lock();
        let of = guests.entry(guest).or_default();
        if of.held.len() >= HELD_MAX || of.calls.has(hold.call) {
            drop(guests);
            drop(hold);
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        of.hold(id, hold);
        Some(id)
    }

    fn take(&self, guest: [u8; 16], id: Id) -> Option<Hold> {
        self.guests.lock().get_mut(&guest)?.take(id)
    }

    fn pin(
        &self,
        guest: [u8; 16],
        (keys, used): (&Keys, &[u64]),
        call: u64,
        macs: u8,
    ) -> Vec<Option<Pinned>> {
        let places = self.share.pin((guest, used), keys.id(), &keys.keys());
        let one = |place: Place| {
            let pin = self.pinned(place);
            let table = if place.parts > 1 { ENTRY } else { 0 };
            let each = table + u64::from(macs);
            let tail = self.share.tail(&place, u64::from(place.parts) * each)?;
            let lent = self.lend(guest, &place, Rights::READ)?;
            let grant = lent.number();
            let what = What::Pin(pin);
            let hold = Hold {
                lent,
                borrowed: BTreeMap::new(),
                what,
                call,
            };
            let id = self.keep(guest, hold)?;
            Some(Pinned {
                id,
                grant,
                len: place.len,
                parts: place.parts,
                checksum: place.checksum.0,
                tail,
            })
        };
        places.into_iter().map(|place| one(place?)).collect()
    }

    fn reserve(
        &self,
        guest: [u8; 16],
        namespace: NamespaceId,
        call: u64,
        blocks: &[Block],
    ) -> Vec<Result<Room, Why>> {
        let wanted = blocks.iter().map(wanted_of).collect();
        let answers = self.share.reserve(guest, namespace, wanted).into_iter();
        let one = |answer: Result<Reserved, Refused>| {
            let reserved = answer.map_err(why_of)?;
            let lent = self.lend(guest, &reserved, Rights::WRITE);
            let lent = lent.ok_or(Why::Declined)?;
            let grant = lent.number();
            let what = What::New(reserved);
            let hold = Hold {
                lent,
                borrowed: BTreeMap::new(),
                what,
                call,
            };
            let id = self.keep(guest, hold).ok_or(Why::Declined)?;
            Ok(Room { id, grant })
        };
        answers.map(one).collect()
    }

    /// Publishes what a guest has written; `Some` of what is there, with the grant to read it where
    /// it is pinned.
    fn commit(&self, guest: [u8; 16], written: &Written, pinned: bool) -> Option<u32> {
        let Hold {
            lent, what, call, ..
        } = self.take(guest, written.id)?;
        let What::New(reserved) = what else {
            return None;
        };
        // Nobody writes there any more when this is done.
        drop(lent);
        let place = Place {
            checksum: Checksum(written.checksum),
            ..*reserved
        };
        if !self.share.write_tail(&place, &written.tail) {
            return None;
        }
        if !self.share.commit(reserved, place.checksum, pinned) {
            return None;
        }
        if !pinned {
            return Some(0);
        }
        let what = What::Pin(self.pinned(place));
        let lent = self.lend(guest, &place, Rights::READ)?;
        let number = lent.number();
        let hold = Hold {
            lent,
            borrowed: BTreeMap::new(),
            what,
            call,
        };
        let mut guests = self.guests.lock();
        let of = guests.entry(guest).or_default();
        if of.names.has(written.id) {
            drop(guests);
            drop(hold);
            return None;
        }
        of.hold(written.id, hold);
        Some(number)
    }

    fn pinned(&self, place: Place) -> Pin {
        Pin {
            share: Arc::clone(&self.share),
            place,
        }
    }

    /// Ends pins and reservations, and whatever those calls have made or will make. Other threads
    /// get the lock after each turn.
    fn release(&self, guest: [u8; 16], ids: &[Id], calls: &[u64]) {
        for some in ids.chunks(turn_len()) {
            let ended: Vec<Hold> = self.turn(|guests| {
                // Also of a guest that has nothing yet: what it has given up may still be made.
                let of = guests.entry(guest).or_default();
                let end = |id: &Id| {
                    let ended = of.take(*id);
                    if ended.is_none() {
                        of.names.note(*id);
                    }
                    ended
                };
                some.iter().filter_map(end).collect()
            });
            drop(ended);
        }
        for some in calls.chunks(turn_len()) {
            self.turn(|guests| {
                let of = guests.entry(guest).or_default();
                some.iter().for_each(|call| of.calls.note(*call));
            });
            // From here on they make nothing more.
            loop {
                let made = self.turn(|guests| guests.entry(guest).or_default().take_some_of(some));
                if made.is_empty() {
                    break;
                }
                drop(made);
            }
        }
    }

    /// What did not verify there goes, unless it does here: then only its way was at fault. What
    /// has MACs behind it does not here, and goes, as only its readers know whether it is forged.
    fn discard(&self, guest: [u8; 16], ids: &[Id]) -> usize {
        let mut places: Vec<Place> = Vec::new();
        for some in ids.chunks(turn_len()) {
            self.turn(|guests| {
                let held = guests.get(&guest).map(|of| &of.held);
                let pin = |id: &Id| match &held?.get(id)?.what {
                    What::Pin(pin) => Some(pin.place),
                    What::New(_) => None,
                };
                places.extend(some.iter().filter_map(pin));
            });
        }
        // One whose pin ends meanwhile is another by its token.
        let wrong = places.iter().filter(|place| !self.share.verifies(place));
        let tokens: Vec<_> = wrong.map(|place| place.token).collect();
        self.share.arena().discard(&tokens)
    }

    /// Lends a guest what another one has pinned and told it of. Under the lock, so that it is of
    /// that pin and goes with it. Other threads get the lock after each turn.
    fn borrow(
        &self,
        guest: [u8; 16],
        holder: [u8; 16],
        ids: impl Iterator<Item = Id>,
    ) -> Vec<Option<u32>> {
        let mut numbers = Vec::new();
        let mut ids = ids.peekable();
        while ids.peek().is_some() {
            let some: Vec<Id> = ids.by_ref().take(turn_len()).collect();
            self.turn(|guests| {
                let mut held = guests.get_mut(&holder).map(|of| &mut of.held);
                let one = |id: &Id| self.borrow_one(guest, held.as_mut()?.get_mut(id)?);
                numbers.extend(some.iter().map(one));
            });
        }
        numbers
    }

    fn borrow_one(&self, guest: [u8; 16], hold: &mut Hold) -> Option<u32> {
        let What::Pin(pin) = &hold.what else {
            return None;
        };
        if let Some(lent) = hold.borrowed.get(&guest) {
            return Some(lent.number());
        }
        if hold.borrowed.len() >= BORROWED_MAX {
            return None;
        }
        let lent = self.lend(guest, &pin.place, Rights::READ)?;
        let number = lent.number();
        hold.borrowed.insert(guest, lent);
        Some(number)
    }

    /// Which of these blocks stay here: who asks will let go of its own.
    fn keeps(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let Some(hosts) = self.hosts.get().and_then(Weak::upgrade) else {
            return vec![false; keys.len()];
        };
        self.share.keep(namespace, keys, |key| {
            hosts.homes(&Identity { namespace, key }).is_own
        })
    }

    fn say(&self, guest: [u8; 16], ask: Ask) -> Said {
        match ask {
            Ask::Contains(keys) => Said::Flags(self.share.contains(keys.id(), &keys.keys())),
            Ask::Pin {
                keys,
                call,
                macs,
                used,
            } => Said::Pinned(self.pin(guest, (&keys, &used), call, macs)),
            Ask::Reserve {
                namespace,
                call,
                blocks,
            } => {
                let namespace = NamespaceId(namespace);
                Said::Reserved(self.reserve(guest, namespace, call, &blocks))
            }
            Ask::Commit { blocks, pinned } => {
                let each = blocks.iter();
                Said::Stored(each.map(|one| self.commit(guest, one, pinned)).collect())
            }
            Ask::Release { ids, calls } => {
                self.release(guest, &ids, &calls);
                Said::Done
            }
            Ask::Discard(ids) => Said::Count(self.discard(guest, &ids) as u64),
            Ask::Remove(keys) => Said::Flags(self.share.remove(keys.id(), &keys.keys())),
            Ask::Clear(namespace) => Said::Count(self.share.clear(NamespaceId(namespace)) as u64),
            Ask::List {
                namespace,
                from,
                limit,
            } => {
                let limit = (limit as usize).min(KEYS_MAX);
                let (blocks, next) = self.share.list(NamespaceId(namespace), from, limit);
                let blocks = blocks.into_iter().map(|(key, len)| (key.0, len));
                Said::Page(blocks.collect(), next)
            }
            Ask::Name => Said::Name(self.name.clone()),
            Ask::Namespaces => {
                let all = self.share.namespaces().into_iter();
                let row = |one: kvdepot_store::NamespaceUsage| {
                    (one.id.0, one.description, one.blocks, one.bytes)
                };
                Said::Namespaces(all.map(row).collect())
            }
            Ask::Keeps(keys) => Said::Flags(self.keeps(keys.id(), &keys.keys())),
            Ask::Borrow { holder, ids } => Said::Lent(self.borrow(guest, holder, ids.into_iter())),
            Ask::Describe { namespace, text } => {
                self.share.arena().describe(NamespaceId(namespace), &text);
                Said::Done
            }
        }
    }
}

pub(super) fn wanted_of(block: &Block) -> Wanted {
    Wanted {
        key: Key(block.key),
        len: block.len,
        parts: block.parts,
        stamp: block.stamp,
        copy: block.copy,
        evict: block.evict,
    }
}

pub(super) fn why_of(refused: Refused) -> Why {
    match refused {
        Refused::Present(_) => Why::Present,
        Refused::Reserved(_) => Why::Reserved,
        Refused::Declined => Why::Declined,
        Refused::Full(full) => Why::of(full.cause),
    }
}

impl Answers for Home {
    fn answer(&self, initiator: [u8; 16], call: &[u8]) -> Option<Vec<u8>> {
        let ask: Ask = decode(call)?;
        // Whatever is asked, before any of it is done.
        let said = ask.is_bounded().then(|| self.say(initiator, ask))?;
        encode(&said)
    }

    fn left(&self, initiator: [u8; 16]) {
        let (guest, others) = self.turn(|guests| {
            let guest = guests.remove(&initiator);
            (guest, guests.keys().copied().collect::<Vec<_>>())
        });
        drop(guest);
        for other in others {
            let mut from: Bound<Id> = Bound::Unbounded;
            loop {
                let (lent, last) = self.turn(|guests| {
                    let held = guests.get_mut(&other).map(|of| &mut of.held);
                    let rest =
                        held.map(|held| held.range_mut((from, Bound::Unbounded)).take(turn_len()));
                    let (mut lent, mut last): (Vec<Lent>, Option<Id>) = (Vec::new(), None);
                    for (id, hold) in rest.into_iter().flatten() {
                        lent.extend(hold.borrowed.remove(&initiator));
                        last = Some(*id);
                    }
                    (lent, last)
                });
                drop(lent);
                match last {
                    Some(id) => from = Bound::Excluded(id),
                    None => break,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::cmp;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use kvdepot_arena::{TakesBack, Token};

    use super::*;
    use crate::config::Config;
    use crate::peer_tier::share::OWN;

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);
    const KEY: Key = Key([2; 32]);
    const OTHER: [u8; 16] = [3; 16];
    const CALL: u64 = 7;

    const ALL: usize = 1000;
    /// Far more than a turn has, and far fewer than all.
    const MOST: usize = 300;

    /// A home that has a block, and a guest that it may lend memory.
    struct Scene {
        home: Arc<Home>,
        place: Place,
        guest: [u8; 16],
        _engines: [Arc<Engine>; 2],
    }

    /// A home that has a block, and where that is.
    fn home() -> (Arc<Home>, Place) {
        let share = Arc::new(Share::open(("Peer", 0), None, (1 << 20, false)).unwrap());
        let wanted = Wanted {
            key: KEY,
            len: 64,
            parts: 1,
            stamp: 0,
            copy: false,
            evict: true,
        };
        let reserved = share.reserve(OWN, NAMESPACE, vec![wanted]).pop();
        let reserved = reserved.unwrap().unwrap();
        let place = *reserved;
        assert!(share.commit(reserved, Checksum::default(), false));
        (Arc::new(Home::new("a", &share).unwrap()), place)
    }

    impl Scene {
        fn new() -> Scene {
            let engine = || {
                let config = Config {
                    local: false,
                    rdma: Some(Vec::new()),
                    // More than a machine stands still.
                    timeout: Duration::from_secs(60),
                    ..Config::default()
                };
                Arc::new(Engine::start(config).unwrap())
            };
            let (serves, asks) = (engine(), engine());
            // From here on it has a session there.
            asks.ping(serves.address().unwrap()).unwrap();
            let (home, place) = home();
            home.serve_by(&serves);
            Scene {
                home,
                place,
                guest: asks.initiator,
                _engines: [serves, asks],
            }
        }

        /// Something that a call makes, which the guest has from then on, unless it has given the
        /// call up.
        fn make(&self, what: What, call: u64) -> Option<Id> {
            let lent = self.home.lend(self.guest, &self.place, Rights::READ);
            let hold = Hold {
                lent: lent.unwrap(),
                borrowed: BTreeMap::new(),
                what,
                call,
            };
            self.home.keep(self.guest, hold)
        }

        fn hold(&self, what: What, call: u64) -> Id {
            self.make(what, call).unwrap()
        }

        fn pin(&self) -> What {
            let place = self.home.share.hold(NAMESPACE, KEY).unwrap();
            What::Pin(self.home.pinned(place))
        }

        fn pins(&self, count: usize) -> Vec<Id> {
            let pin = |_| self.hold(self.pin(), CALL);
            (0..count).map(pin).collect()
        }
    }

    /// The most that has changed between two looks.
    #[derive(Default)]
    struct Steps {
        last: AtomicUsize,
        most: AtomicUsize,
    }

    impl Steps {
        fn look(&self, now: usize) {
            let step = self.last.swap(now, Ordering::Relaxed).abs_diff(now);
            self.most.fetch_max(step, Ordering::Relaxed);
        }

        fn assert_turns(&self) {
            let most = self.most.load(Ordering::Relaxed);
            assert!((1..MOST).contains(&most), "{most} under one lock");
        }
    }

    /// Looks, whenever a reservation ends, how much the guest has left.
    struct Looks {
        home: Weak<Home>,
        guest: [u8; 16],
        steps: Steps,
    }

    impl TakesBack for Looks {
        fn take_back(&self, _: Token) {
            if let Some(home) = self.home.upgrade() {
                let guests = home.guests.try_lock();
                let guests = guests.expect("the lock is held while a reservation ends");
                self.steps.look(guests[&self.guest].held.len());
            }
        }
    }

    #[test]
    fn what_a_host_gives_up_ends_in_turns_and_nothing_else_does() {
        let scene = Scene::new();
        let (home, guest) = (&scene.home, scene.guest);
        for is_of_a_call in [false, true] {
            let looks = Arc::new(Looks {
                home: Arc::downgrade(home),
                guest,
                steps: Steps::default(),
            });
            let hold = |call| {
                let whose = Arc::clone(&looks) as Arc<dyn TakesBack>;
                scene.hold(What::New(Reserved::new(whose, scene.place)), call)
            };
            let stays = hold(CALL + 1);
            let ids: Vec<Id> = (0..ALL).map(|_| hold(CALL)).collect();
            looks.steps.last.store(ALL + 1, Ordering::Relaxed);
            match is_of_a_call {
                true => home.release(guest, &[], &[CALL - 1, CALL, CALL]),
                false => home.release(guest, &ids, &[]),
            }
            looks.steps.assert_turns();
            let left = home.guests.lock()[&guest].held.len();
            assert_eq!(left, 1);
            home.release(guest, &[stays], &[]);
            let guests = home.guests.lock();
            assert!(guests[&guest].held.is_empty() && guests[&guest].made.is_empty());
        }
        // What the call makes later ends with its value.
        assert!(scene.make(scene.pin(), CALL).is_none());
        assert_eq!(home.share.arena().stats().pinned_blocks, 0);
    }

    #[test]
    fn calls_that_were_given_up_make_nothing_however_many_names_are_given_up_later() {
        let scene = Scene::new();
        let (home, guest) = (&scene.home, scene.guest);
        let all: Vec<u64> = (0..KEYS_MAX as u64).collect();
        home.release(guest, &[], &all);
        // The names have ended by then: their host says them again, as it has heard no answer.
        home.release(guest, &all, &[]);
        for call in [0, KEYS_MAX as u64 - 1] {
            assert!(scene.make(scene.pin(), call).is_none());
        }
        assert_eq!(home.share.arena().stats().pinned_blocks, 0);
    }

    #[test]
    fn a_call_that_borrows_lets_others_have_their_turn_between_its_pins() {
        let scene = Scene::new();
        let (home, guest) = (&scene.home, scene.guest);
        let ids = scene.pins(ALL);
        let steps = Steps::default();
        let looked = ids.iter().copied().inspect(|_| {
            let guests = home.guests.try_lock();
            let guests = guests.expect("the lock is held for all pins");
            let held = guests[&guest].held.values();
            steps.look(held.filter(|hold| !hold.borrowed.is_empty()).count());
        });
        let lent = home.borrow(guest, guest, looked);
        steps.look(lent.iter().flatten().count());
        steps.assert_turns();
        assert!(lent.len() == ALL && !lent.contains(&None));
        let again = home.borrow(guest, guest, ids.into_iter());
        assert_eq!(again, lent, "each is lent once");
    }

    #[test]
    fn what_a_host_has_borrowed_ends_with_its_connections() {
        let scene = Scene::new();
        let (home, guest) = (&scene.home, scene.guest);
        let ids = scene.pins(ALL);
        // As if another one had pinned them.
        let pinned = home.guests.lock().remove(&guest).unwrap();
        home.guests.lock().insert(OTHER, pinned);
        let lent = home.borrow(guest, OTHER, ids.into_iter());
        assert!(lent.len() == ALL && !lent.contains(&None));
        home.left(guest);
        let guests = home.guests.lock();
        let held = &guests[&OTHER].held;
        assert!(held.len() == ALL && held.values().all(|hold| hold.borrowed.is_empty()));
    }

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// The number of a call, which counts comparisons.
    #[derive(Clone, Copy, PartialEq, Eq)]
    struct Call(u64);

    impl Ord for Call {
        fn cmp(&self, other: &Call) -> cmp::Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Call {
        fn partial_cmp(&self, other: &Call) -> Option<cmp::Ordering> {
            Some(self.cmp(other))
        }
    }

    #[test]
    fn what_a_call_has_made_is_found_without_a_look_at_all_that_is_held() {
        const HELD: u64 = 10_000;
        let made = (0..HELD).map(|id| (Call(id / 10), id)).collect();
        COMPARED.set(0);
        let found = made_by(&made, &[Call(7), Call(HELD), Call(900)], 15);
        assert_eq!(found, Vec::from_iter((70..80).chain(9000..9005)));
        let compared = COMPARED.get();
        assert!(compared < 1000, "{compared} comparisons");
    }

    #[test]
    fn what_was_given_up_last_is_remembered() {
        let mut forgotten = Forgotten::default();
        let all = FORGOTTEN_MAX as u64 + 10;
        (0..all).for_each(|call| forgotten.note(call));
        // Nothing more has to go for what is known.
        forgotten.note(all - 1);
        assert!(!forgotten.has(9) && forgotten.has(10) && forgotten.has(all - 1));
    }

    /// Questions of each verb that has lists, with so many in one of them.
    fn questions(count: usize) -> Vec<Ask> {
        let namespace = NAMESPACE.0;
        let keys = |count| Keys {
            namespace,
            keys: vec![KEY.0; count],
        };
        let pin = |keys, used| Ask::Pin {
            keys,
            call: 1,
            macs: 0,
            used,
        };
        let release = |ids, calls| Ask::Release { ids, calls };
        let block = Block {
            key: KEY.0,
            len: 64,
            parts: 1,
            copy: false,
            evict: true,
            stamp: 0,
        };
        let written = Written {
            id: 9,
            checksum: [0; 16],
            tail: Vec::new(),
        };
        let names = || vec![9; count];
        vec![
            Ask::Contains(keys(count)),
            pin(keys(count), Vec::new()),
            pin(keys(0), names()),
            Ask::Reserve {
                namespace,
                call: 1,
                blocks: vec![block; count],
            },
            Ask::Commit {
                blocks: vec![written; count],
                pinned: false,
            },
            release(names(), Vec::new()),
            release(Vec::new(), names()),
            Ask::Discard(names()),
            Ask::Keeps(keys(count)),
            Ask::Borrow {
                holder: OTHER,
                ids: names(),
            },
            Ask::Remove(keys(count)),
        ]
    }

    #[test]
    fn questions_of_too_much_fail_whatever_their_verb() {
        let (home, _) = home();
        let answers = |ask: &Ask| home.answer(OTHER, &encode(ask).unwrap()).is_some();
        let each = |count| questions(count).iter().map(answers).collect::<Vec<bool>>();
        assert!(!each(KEYS_MAX + 1).contains(&true), "each of them fails");
        let is_there = || home.share.contains(NAMESPACE, &[KEY]) == [true];
        assert!(is_there(), "nothing of it is done");
        assert!(!each(KEYS_MAX).contains(&false), "each of them is answered");
        assert!(!is_there());
        let namespace = NAMESPACE.0;
        let others = [
            Ask::Clear(namespace),
            Ask::List {
                namespace,
                from: 0,
                limit: u32::MAX,
            },
            Ask::Namespaces,
            Ask::Describe {
                namespace,
                text: "a".to_owned(),
            },
            Ask::Name,
        ];
        assert!(others.iter().all(answers));
    }
}
