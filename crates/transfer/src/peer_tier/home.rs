//! What other hosts ask this one, and what it has pinned and reserved for them.
//!
//! Whatever is handed out is bound to the initiator that asked: ended by its word, or when all its
//! connections have ended. That is safe by then, as only connections reach the memory, and what was
//! lent to it is withdrawn before the room is anybody else's.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kvdepot_arena::parts::ENTRY;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Refused, Reserved, Wanted};
use kvdepot_media::Checksum;
use parking_lot::Mutex;

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

/// Calls that a host has given up whose answers may still be made.
const FORGOTTEN_MAX: usize = 4096;

/// Most that read one pin: workers of one engine.
const BORROWED_MAX: usize = 256;

/// What one host has.
#[derive(Default)]
struct Guest {
    held: HashMap<Id, Hold>,
    /// What it has given up that may still be made: calls, and names that are being published.
    forgotten: VecDeque<Gone>,
}

/// What a guest has given up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gone {
    Call(u64),
    Name(Id),
}

/// One pin or reservation. What is lent goes first.
struct Hold {
    lent: Lent,
    /// To those that the guest has told of its pin, each once.
    borrowed: Vec<([u8; 16], Lent)>,
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
    guests: Mutex<HashMap<[u8; 16], Guest>>,
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

    fn lend(&self, guest: [u8; 16], place: &Place, rights: Rights) -> Option<Lent> {
        let engine = self.engine.get()?.upgrade()?;
        let buffers = self.share.buffers(place, 0, place.len).ok()?;
        engine.lend(guest, &buffers, rights).ok().flatten()
    }

    /// Keeps what was made for a guest, unless it has too much or has given the call up.
    fn keep(&self, guest: [u8; 16], hold: Hold) -> Option<Id> {
        let mut guests = self.guests.lock();
        let of = guests.entry(guest).or_default();
        if of.held.len() >= HELD_MAX || of.forgotten.contains(&Gone::Call(hold.call)) {
            drop(guests);
            drop(hold);
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        of.held.insert(id, hold);
        Some(id)
    }

    fn take(&self, guest: [u8; 16], id: Id) -> Option<Hold> {
        self.guests.lock().get_mut(&guest)?.held.remove(&id)
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
                borrowed: Vec::new(),
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
                borrowed: Vec::new(),
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
            borrowed: Vec::new(),
            what,
            call,
        };
        let mut guests = self.guests.lock();
        let of = guests.entry(guest).or_default();
        if of.forgotten.contains(&Gone::Name(written.id)) {
            drop(guests);
            drop(hold);
            return None;
        }
        of.held.insert(written.id, hold);
        Some(number)
    }

    fn pinned(&self, place: Place) -> Pin {
        Pin {
            share: Arc::clone(&self.share),
            place,
        }
    }

    fn release(&self, guest: [u8; 16], ids: &[Id], calls: &[u64]) {
        let mut ended = Vec::new();
        {
            let mut guests = self.guests.lock();
            // Also of a guest that has nothing yet: what it has given up may still be made.
            let of = guests.entry(guest).or_default();
            for id in ids {
                match of.held.remove(id) {
                    Some(hold) => ended.push(hold),
                    None => of.forgotten.push_back(Gone::Name(*id)),
                }
            }
            if !calls.is_empty() {
                let made = of.held.extract_if(|_, hold| calls.contains(&hold.call));
                ended.extend(made.map(|(_, hold)| hold));
                let calls = calls.iter().map(|call| Gone::Call(*call));
                of.forgotten.extend(calls);
            }
            let over = of.forgotten.len().saturating_sub(FORGOTTEN_MAX);
            of.forgotten.drain(..over);
        }
        drop(ended);
    }

    /// What did not verify there goes, unless it does here: then only its way was at fault. What
    /// has MACs behind it does not here, and goes, as only its readers know whether it is forged.
    fn discard(&self, guest: [u8; 16], ids: &[Id]) -> usize {
        let places: Vec<Place> = {
            let guests = self.guests.lock();
            let held = guests.get(&guest).map(|of| &of.held);
            let pin = |id: &Id| match &held?.get(id)?.what {
                What::Pin(pin) => Some(pin.place),
                What::New(_) => None,
            };
            ids.iter().filter_map(pin).collect()
        };
        // One whose pin ends meanwhile is another by its token.
        let wrong = places.iter().filter(|place| !self.share.verifies(place));
        let tokens: Vec<_> = wrong.map(|place| place.token).collect();
        self.share.arena().discard(&tokens)
    }

    /// Lends a guest what another one has pinned and told it of. Under the lock, so that it is of
    /// that pin and goes with it.
    fn borrow(&self, guest: [u8; 16], holder: [u8; 16], ids: &[Id]) -> Vec<Option<u32>> {
        let mut guests = self.guests.lock();
        let mut held = guests.get_mut(&holder).map(|of| &mut of.held);
        let mut one = |id: &Id| {
            let hold = held.as_mut()?.get_mut(id)?;
            let What::Pin(pin) = &hold.what else {
                return None;
            };
            if let Some((_, lent)) = hold.borrowed.iter().find(|(who, _)| *who == guest) {
                return Some(lent.number());
            }
            if hold.borrowed.len() >= BORROWED_MAX {
                return None;
            }
            let lent = self.lend(guest, &pin.place, Rights::READ)?;
            let number = lent.number();
            hold.borrowed.push((guest, lent));
            Some(number)
        };
        ids.iter().map(&mut one).collect()
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

    fn say(&self, guest: [u8; 16], ask: Ask) -> Option<Said> {
        Some(match ask {
            Ask::Contains(keys) => {
                bounded(keys.keys.len())?;
                Said::Flags(self.share.contains(keys.id(), &keys.keys()))
            }
            Ask::Pin {
                keys,
                call,
                macs,
                used,
            } => {
                bounded(keys.keys.len())?;
                Said::Pinned(self.pin(guest, (&keys, &used), call, macs))
            }
            Ask::Reserve {
                namespace,
                call,
                blocks,
            } => {
                bounded(blocks.len())?;
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
            Ask::Keeps(keys) => {
                bounded(keys.keys.len())?;
                Said::Flags(self.keeps(keys.id(), &keys.keys()))
            }
            Ask::Borrow { holder, ids } => {
                bounded(ids.len())?;
                Said::Lent(self.borrow(guest, holder, &ids))
            }
            Ask::Describe { namespace, text } => {
                self.share.arena().describe(NamespaceId(namespace), &text);
                Said::Done
            }
        })
    }
}

fn bounded(count: usize) -> Option<()> {
    (count <= KEYS_MAX).then_some(())
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
        let said = self.say(initiator, decode(call)?)?;
        encode(&said)
    }

    fn left(&self, initiator: [u8; 16]) {
        let (guest, borrowed) = {
            let mut guests = self.guests.lock();
            let guest = guests.remove(&initiator);
            let holds = guests.values_mut().flat_map(|of| of.held.values_mut());
            let left = |hold: &mut Hold| {
                let mine = hold.borrowed.extract_if(.., |(who, _)| *who == initiator);
                mine.collect::<Vec<_>>()
            };
            (guest, holds.flat_map(left).collect::<Vec<_>>())
        };
        drop(borrowed);
        drop(guest);
    }
}
