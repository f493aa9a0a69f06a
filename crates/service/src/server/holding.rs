//! What a client holds by the two-phase verbs.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use kvdepot_arena::parts::Parts;
use kvdepot_arena::{Error, Place};
use kvdepot_store::placement::Holder;
use kvdepot_store::{Core, Grouped, Pin, Reservation};
use parking_lot::Mutex;

use crate::frame::rows::{KEYS_MAX, Name};
use crate::frame::verbs::Group;
use crate::line::credit::{Allowance, Credit, LIMITS};

/// Most pins and reservations that are remembered as granted by answers of which it is unknown
/// whether they were heard: far beyond what an honest client leaves unread.
const UNHEARD_MAX: usize = 2 * KEYS_MAX;

/// Of one client process. It passes to the next connection where one breaks.
pub(crate) struct Holding {
    pub(crate) holder: Holder,
    pub(crate) allowance: Allowance,
    held: Mutex<Held>,
    /// Held while a group is declared or ended.
    declaring: Mutex<()>,
}

#[derive(Default)]
struct Held {
    /// With how often each was pinned.
    pins: HashMap<Name, (u32, Place), BuildHasherDefault<Mix>>,
    reservations: HashMap<Name, Reservation>,
    /// By the client's numbers.
    groups: HashMap<u64, (Grouped, Vec<Credit>)>,
    /// What was granted in answers that the client may not have heard, with their calls' numbers,
    /// oldest first.
    unheard: VecDeque<(u64, Ticket)>,
    /// The client has ended: nothing is added any more.
    over: bool,
}

/// One thing that was granted.
pub(crate) enum Ticket {
    Pin(Name),
    Reservation(Name),
}

/// What a call gives a client that hears of it.
pub(crate) enum Granted {
    Nothing,
    Pins(Vec<Option<(usize, Place)>>),
    Reservations(Vec<Reservation>),
}

impl Holding {
    pub(crate) fn new(holder: Holder) -> Holding {
        Holding {
            holder,
            allowance: Allowance::new(LIMITS),
            held: Mutex::new(Held::default()),
            declaring: Mutex::new(()),
        }
    }

    /// Enters what the answer to a call grants, and that it may not have been heard. Answers what
    /// is to be given back: all of it, when the client has ended.
    pub(crate) fn grant(&self, call: u64, granted: Granted) -> Granted {
        let mut held = self.held.lock();
        if held.over {
            return granted;
        }
        held.note(call, &granted);
        held.add(granted);
        Granted::Nothing
    }

    /// Takes reservations back that a call could not commit. Answers as [`Holding::grant`].
    pub(crate) fn put_back(&self, reservations: Vec<Reservation>) -> Granted {
        let granted = Granted::Reservations(reservations);
        let mut held = self.held.lock();
        if held.over {
            return granted;
        }
        held.add(granted);
        Granted::Nothing
    }

    /// Does what is to be undone at the client's end; `None` once it has ended.
    pub(crate) fn while_here<R>(&self, work: impl FnOnce() -> R) -> Option<R> {
        let held = self.held.lock();
        (!held.over).then(work)
    }

    /// Declares a client's group, or more of it, or another class.
    pub(crate) fn group(&self, core: &Arc<Core>, call: &Group<'_>) -> Result<(), Error> {
        let keys = call.keys.allowed()?;
        // Nobody misses it meanwhile, who comes over another connection either.
        let _one = self.declaring.lock();
        let known = self.held.lock().groups.remove(&call.number);
        // Another class takes no more of what the owner keeps.
        let credit = match (&known, keys) {
            (Some(_), []) => Ok(None),
            _ => self.allowance.group(keys.len()).map(Some),
        };
        let (group, done) = match (known, credit) {
            (None, credit) => {
                let credits = credit?.into_iter().collect();
                let group = core.group(call.namespace, keys, call.class)?;
                ((group, credits), Ok(()))
            }
            (Some(known), Err(error)) => (known, Err(error)),
            (Some((group, mut credits)), Ok(credit)) => {
                credits.extend(credit);
                let done = group.add(keys).and_then(|()| group.set_class(call.class));
                ((group, credits), done)
            }
        };
        let mut held = self.held.lock();
        if held.over {
            drop(held);
            drop(group);
            return Err(Error::Closed(""));
        }
        held.groups.insert(call.number, group);
        done
    }

    /// Ends a client's group.
    pub(crate) fn dissolve(&self, number: u64) {
        let _one = self.declaring.lock();
        let group = self.held.lock().groups.remove(&number);
        drop(group);
    }

    /// The client has heard every answer.
    pub(crate) fn hear(&self) {
        // With its memory: a call may have had a million keys.
        self.held.lock().unheard = VecDeque::new();
    }

    /// What was granted in answers behind that to the call which the client has heard last.
    pub(crate) fn take_unheard(&self, heard: u64) -> Vec<Ticket> {
        let unheard = std::mem::take(&mut self.held.lock().unheard);
        let unheard = unheard.into_iter().filter(|(call, _)| *call > heard);
        unheard.map(|(_, ticket)| ticket).collect()
    }

    /// Ends what the client has never heard of.
    pub(crate) fn give_back(&self, core: &Core, unheard: &[Ticket]) {
        let (mut pins, mut reservations) = (Vec::new(), Vec::new());
        for ticket in unheard {
            match ticket {
                Ticket::Pin(name) => pins.push(*name),
                Ticket::Reservation(name) => reservations.push(*name),
            }
        }
        core.unpin(&self.take_pins(core, &pins), false);
        let reservations = self.take_reservations(&reservations);
        let reservations: Vec<Reservation> = reservations.into_iter().flatten().collect();
        core.abort(&reservations);
    }

    /// Pins that the client names, which are its own no more.
    pub(crate) fn take_pins(&self, core: &Core, names: &[Name]) -> Vec<Pin> {
        let mut held = self.held.lock();
        let mut pins = Vec::with_capacity(names.len());
        for name in names {
            let Some((count, place)) = held.pins.get_mut(name) else {
                continue;
            };
            *count -= 1;
            pins.push(self.pin(core, name.0, *place));
            if *count == 0 {
                held.pins.remove(name);
            }
        }
        pins
    }

    /// Those of the named pins that are the client's.
    pub(crate) fn pins(&self, core: &Core, names: &[Name]) -> Vec<Pin> {
        let held = self.held.lock();
        let known = names.iter().filter_map(|name| {
            let (_, place) = held.pins.get(name)?;
            Some(self.pin(core, name.0, *place))
        });
        known.collect()
    }

    /// Reservations that the client names, which are its own no more; `None` for those it has not.
    pub(crate) fn take_reservations(&self, names: &[Name]) -> Vec<Option<Reservation>> {
        let mut held = self.held.lock();
        let taken = names.iter().map(|name| held.reservations.remove(name));
        taken.collect()
    }

    /// Gives everything back, and takes nothing any more. No mover is at any of it.
    pub(crate) fn end(&self, core: &Core) {
        let ended = Held {
            over: true,
            ..Held::default()
        };
        let held = std::mem::replace(&mut *self.held.lock(), ended);
        let reservations: Vec<Reservation> = held.reservations.into_values().collect();
        core.abort(&reservations);
        for ((tier, _), (count, place)) in held.pins {
            for _ in 0..count {
                core.unpin(&[self.pin(core, tier, place)], false);
            }
        }
    }

    /// How many pins and reservations there are.
    pub(crate) fn count(&self) -> usize {
        let held = self.held.lock();
        held.pins.len() + held.reservations.len()
    }

    /// A pin as the pipeline knows it, to be ended.
    fn pin(&self, core: &Core, tier: usize, place: Place) -> Pin {
        let tier = (tier, core.tier_name(tier));
        Pin::new(self.holder, tier, place, Parts::Many(Vec::new()))
    }
}

impl Held {
    fn add(&mut self, granted: Granted) {
        match granted {
            Granted::Nothing => {}
            Granted::Pins(pins) => {
                self.pins.reserve(pins.len());
                for (tier, place) in pins.into_iter().flatten() {
                    let entry = self.pins.entry((tier, place.token));
                    entry.or_insert((0, place)).0 += 1;
                }
            }
            Granted::Reservations(reservations) => {
                let named = |one: Reservation| ((one.tier, one.place.token), one);
                self.reservations
                    .extend(reservations.into_iter().map(named));
            }
        }
    }

    /// Remembers what the answer to a call grants; of too much the oldest counts as heard, which
    /// costs the client that never says so, and nobody else.
    fn note(&mut self, call: u64, granted: &Granted) {
        match granted {
            Granted::Nothing => {}
            Granted::Pins(pins) => {
                self.unheard.reserve(pins.len());
                let name = |(tier, place): &(usize, Place)| (*tier, place.token);
                let names = pins.iter().flatten().map(name);
                self.unheard
                    .extend(names.map(|name| (call, Ticket::Pin(name))));
            }
            Granted::Reservations(reservations) => {
                let names = reservations.iter().map(|one| (one.tier, one.place.token));
                let tickets = names.map(|name| (call, Ticket::Reservation(name)));
                self.unheard.extend(tickets);
            }
        }
        let excess = self.unheard.len().saturating_sub(UNHEARD_MAX);
        self.unheard.drain(..excess);
    }
}

/// Ends what the client never heard of.
pub(crate) fn give_back(core: &Core, granted: Granted) {
    match granted {
        Granted::Nothing => {}
        Granted::Pins(pins) => {
            for (tier, place) in pins.into_iter().flatten() {
                core.let_go(tier, place);
            }
        }
        Granted::Reservations(reservations) => core.abort(&reservations),
    }
}

/// Hashes names of pins: the owner has made their numbers itself, and a call has hundreds.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write_u64(&mut self, word: u64) {
        // An odd number without a pattern: that of SplitMix64.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::format::record::Packed;
    use kvdepot_arena::{Identity, Key, NamespaceId, Token};

    use super::*;

    fn place(slot: u32) -> Place {
        Place {
            token: Token {
                device: 0,
                slot,
                sequence: 1,
            },
            identity: Identity {
                namespace: NamespaceId([0; 16]),
                key: Key([0; 32]),
            },
            extents: Packed::default(),
            len: 1,
            parts: 1,
            checksum: kvdepot_media::Checksum::default(),
            stamp: 0,
        }
    }

    #[test]
    fn what_a_client_never_says_it_has_heard_is_remembered_up_to_a_limit() {
        const EACH: usize = 1 << 12;
        let holding = Holding::new(Holder {
            session: 1,
            seat: 1,
        });
        let calls = (UNHEARD_MAX / EACH) as u64 + 10;
        for call in 1..=calls {
            let pins = (0..EACH as u32).map(|slot| Some((0, place(slot))));
            holding.grant(call, Granted::Pins(pins.collect()));
        }
        assert_eq!(holding.held.lock().unheard.len(), UNHEARD_MAX);
        assert_eq!(holding.count(), EACH, "each many times");
        assert_eq!(holding.take_unheard(calls - 2).len(), 2 * EACH);
        holding.grant(calls + 1, Granted::Pins(vec![None, Some((0, place(0)))]));
        holding.hear();
        assert!(holding.take_unheard(0).is_empty());
    }

    #[test]
    fn nothing_is_begun_for_a_client_that_has_ended() {
        let holding = Holding::new(Holder {
            session: 1,
            seat: 1,
        });
        assert_eq!(holding.while_here(|| 7), Some(7));
        holding.held.lock().over = true;
        assert_eq!(holding.while_here(|| 7), None);
    }
}
