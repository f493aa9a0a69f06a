//! What a client holds by the two-phase verbs.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use parking_lot::Mutex;

use super::credit::Allowance;
use super::placement::Holder;
use crate::arena::{Place, Token};
use crate::parts::Parts;
use crate::pipeline::{Core, Pin, Reservation};

/// Of one client process. It passes to the next connection where one breaks.
pub(super) struct Holding {
    pub(super) holder: Holder,
    pub(super) allowance: Allowance,
    held: Mutex<Held>,
}

/// A pin or reservation as a client names it: by tier and token.
pub(super) type Name = (usize, Token);

#[derive(Default)]
struct Held {
    /// With how often each was pinned.
    pins: HashMap<Name, (u32, Place), BuildHasherDefault<Mix>>,
    reservations: HashMap<Name, Reservation>,
    /// The client has ended: nothing is added any more.
    over: bool,
}

/// What a call gives a client that hears of it.
pub(super) enum Granted {
    Nothing,
    Pins(Vec<Option<(usize, Place)>>),
    Reservations(Vec<Reservation>),
}

impl Holding {
    pub(super) fn new(holder: Holder) -> Holding {
        Holding {
            holder,
            allowance: Allowance::default(),
            held: Mutex::new(Held::default()),
        }
    }

    /// Enters what was granted; gives it back when the client has ended.
    pub(super) fn add(&self, core: &Core, granted: Granted) {
        let mut held = self.held.lock();
        if held.over {
            drop(held);
            return give_back(core, granted);
        }
        match granted {
            Granted::Nothing => {}
            Granted::Pins(pins) => {
                held.pins.reserve(pins.len());
                for (tier, place) in pins.into_iter().flatten() {
                    let entry = held.pins.entry((tier, place.token));
                    entry.or_insert((0, place)).0 += 1;
                }
            }
            Granted::Reservations(reservations) => {
                let named = |one: Reservation| ((one.tier, one.place.token), one);
                held.reservations
                    .extend(reservations.into_iter().map(named));
            }
        }
    }

    /// Pins that the client names, which are its own no more.
    pub(super) fn take_pins(&self, core: &Core, names: &[Name]) -> Vec<Pin> {
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
    pub(super) fn pins(&self, core: &Core, names: &[Name]) -> Vec<Pin> {
        let held = self.held.lock();
        let known = names.iter().filter_map(|name| {
            let (_, place) = held.pins.get(name)?;
            Some(self.pin(core, name.0, *place))
        });
        known.collect()
    }

    /// Reservations that the client names, which are its own no more; `None` for those it has not.
    pub(super) fn take_reservations(&self, names: &[Name]) -> Vec<Option<Reservation>> {
        let mut held = self.held.lock();
        let taken = names.iter().map(|name| held.reservations.remove(name));
        taken.collect()
    }

    /// Gives everything back, and takes nothing any more. No mover is at any of it.
    pub(super) fn end(&self, core: &Core) {
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
    pub(super) fn count(&self) -> usize {
        let held = self.held.lock();
        held.pins.len() + held.reservations.len()
    }

    /// A pin as the pipeline knows it, to be ended.
    fn pin(&self, core: &Core, tier: usize, place: Place) -> Pin {
        Pin {
            tier,
            tier_name: core.tiers[tier].name(),
            medium: place.token.device,
            place,
            parts: Parts::Many(Vec::new()),
            holder: self.holder,
        }
    }
}

/// Ends what the client never heard of.
pub(super) fn give_back(core: &Core, granted: Granted) {
    match granted {
        Granted::Nothing => {}
        Granted::Pins(pins) => {
            for (tier, place) in pins.into_iter().flatten() {
                core.tiers[tier].unpin([place.token].into_iter());
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
