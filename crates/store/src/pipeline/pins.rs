//! Published blocks that stay where they are while somebody reads them: `pin → move → unpin`. A
//! pin ends by its verb or with the process that made it, never by time.

use std::sync::Arc;

use kvdepot_arena::parts::{self, Parts};
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Stamps, held};

use super::Core;
use super::ledger::Promotion;
use super::turns::{in_row, steps};
use crate::placement::{self, Holder};
use crate::tier::{Answer, Apart, Outside, Stage};

/// A published block that stays in place until it is unpinned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a pin that nobody ends keeps its block for ever"]
pub struct Pin {
    /// Position of its tier in the pipeline.
    pub tier: usize,
    pub(crate) tier_name: &'static str,
    /// Location of its bytes.
    pub place: Place,
    pub(crate) parts: Parts,
    /// Where they lie, where that is in no medium.
    pub(crate) outside: Option<Outside>,
    /// Holder of the pin.
    pub holder: Holder,
}

impl Pin {
    /// Creates the pin of a block in a tier of a server, given by position and name.
    pub fn new(holder: Holder, tier: (usize, &'static str), place: Place, parts: Parts) -> Pin {
        let (tier, tier_name) = tier;
        Pin {
            tier,
            tier_name,
            place,
            parts,
            outside: None,
            holder,
        }
    }

    /// Returns the pin with the location of a block outside of all media.
    pub fn outside(self, outside: Option<Outside>) -> Pin {
        Pin { outside, ..self }
    }

    /// Returns the location of the bytes for a worker.
    ///
    /// It is opaque, and valid as long as the pin.
    #[must_use]
    pub fn placement(&self) -> Vec<u8> {
        placement::encode(self.holder, &self.place, &self.parts, self.outside.as_ref())
    }

    /// Returns the name of the tier that has the block.
    #[must_use]
    pub fn tier(&self) -> &'static str {
        self.tier_name
    }

    /// Returns the key of the block.
    #[must_use]
    pub fn key(&self) -> Key {
        self.place.identity.key
    }

    /// Returns the payload length without a part table, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }
}

impl Core {
    /// Pins blocks where they are nearest, each with its parts as `make` has it; `None` for a miss.
    /// Those on other hosts are one where the caller, of that seat, does not go `through_doors`.
    pub(super) fn pin_as<T: Clone>(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: &[Key],
        (seat, through_doors): (u64, bool),
        make: impl Fn((usize, &Stage), Place, Parts) -> T,
    ) -> Result<Vec<Option<T>>, Error> {
        let _pass = self.gate.enter()?;
        self.asked(namespace, keys);
        self.offer_again(namespace, keys);
        let stamps = self.uses.asked();
        let mut pins: Vec<Option<T>> = vec![None; keys.len()];
        for (tier, here) in self.tiers.iter().enumerate() {
            let mut places = Vec::with_capacity(keys.len());
            let each = |index: usize, place| places.push((index, place));
            let mut found: Vec<bool> = pins.iter().map(Option::is_some).collect();
            match here {
                Stage::Here(arenas) => {
                    arenas.pin(namespace, keys, &mut found, |index| stamps.of(index), each);
                    let used = (0..keys.len()).filter(|index| pins[*index].is_some());
                    arenas.touch(namespace, used.map(|at| (&keys[at], stamps.of(at))));
                    for (_, place) in &places {
                        self.note_touch(tier, &place.identity, place.len);
                    }
                }
                Stage::Apart(apart) => {
                    let pinned = pin_apart(
                        apart,
                        (seat, through_doors),
                        namespace,
                        (keys, stamps),
                        &found,
                    );
                    let stamped = |(index, place)| {
                        let stamp = stamps.of(index);
                        (index, Place { stamp, ..place })
                    };
                    places.extend(pinned.into_iter().map(stamped));
                }
            }
            self.awaited
                .end(namespace, places.iter().map(|(at, _)| &keys[*at]));
            let used = places.iter().map(|(at, _)| (keys[*at], stamps.of(*at)));
            self.note_used(tier, namespace, used);
            // One whose part table does not verify is asked of the next tier.
            open(here, places, |index, place, parts| {
                pins[index] = Some(make((tier, here), place, parts));
            });
        }
        Ok(pins)
    }

    /// Returns for each key the payload bytes of its block in a tier that acknowledges puts.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn acknowledged(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: &[Key],
    ) -> Result<Vec<Option<u64>>, Error> {
        let _pass = self.gate.enter()?;
        let stamps = self.uses.asked();
        let mut lens: Vec<Option<u64>> = vec![None; keys.len()];
        for (tier, here) in self.tiers.iter().enumerate().skip(self.ack) {
            if !self.takes_puts(tier) {
                continue;
            }
            let note = |lens: &mut Vec<Option<u64>>, places: Vec<(usize, Place)>| {
                let mut pinned = Vec::with_capacity(places.len());
                open(here, places, |index, place, parts| {
                    lens[index] = Some(parts.iter().map(|part| part.len).sum());
                    pinned.push(place);
                });
                here.unpin(pinned.iter());
            };
            let mut found: Vec<bool> = lens.iter().map(Option::is_some).collect();
            match here {
                Stage::Here(arenas) => {
                    let mut places = Vec::new();
                    let stamp = |index| stamps.of(index);
                    arenas.pin(namespace, keys, &mut found, stamp, |index, place| {
                        places.push((index, place));
                    });
                    note(&mut lens, places);
                }
                // Not by a probe, which believes for a while what others may have removed since.
                Stage::Apart(apart) => {
                    let missing: Vec<usize> = (0..keys.len()).filter(|at| !found[*at]).collect();
                    let steps = steps(missing.len(), apart.step_max());
                    in_row(steps, apart.lookup_limit(), |step| {
                        let step = &missing[step];
                        let asked: Vec<Key> = step.iter().map(|at| keys[*at]).collect();
                        let used: Vec<u64> = step.iter().map(|at| stamps.of(*at)).collect();
                        let pinned = apart.pin(namespace, &asked, &used).wait()?;
                        let each = step.iter().zip(pinned);
                        let places = each.filter_map(|(at, place)| Some((*at, place?)));
                        let places: Vec<(usize, Place)> = places.collect();
                        let has_some = !places.is_empty();
                        note(&mut lens, places);
                        Some(has_some)
                    });
                }
            }
        }
        Ok(lens)
    }

    /// Releases pins.
    ///
    /// If `served` is true, their bytes were read: blocks of lower tiers are promoted.
    pub fn unpin(&self, pins: &[Pin], served: bool) {
        if self.gate.forked() {
            return;
        }
        for tier in 0..self.tiers.len() {
            let mine = pins.iter().filter(|pin| pin.tier == tier);
            let places: Vec<Place> = mine.map(|pin| pin.place).collect();
            if places.is_empty() {
                continue;
            }
            if served {
                let bytes = places.iter().map(|place| place.len).sum();
                self.metrics.hit(tier, places.len() as u64, bytes);
            }
            if tier > 0 && served {
                let (again, places) = self.read_again(tier, places);
                self.tiers[tier].unpin(places.iter());
                let blocks = again.into_iter().map(|place| Promotion {
                    tier,
                    place,
                    waiter: None,
                    busy_until: None,
                    load: self.loads.claim(tier, place.identity),
                });
                self.promote_later(tier, blocks.collect());
            } else {
                self.tiers[tier].unpin(places.iter());
            }
        }
    }

    /// Blocks that were read, those first that are worth being read once more to come near.
    fn read_again(&self, tier: usize, places: Vec<Place>) -> (Vec<Place>, Vec<Place>) {
        let apart = self.tiers[tier].apart();
        let Some(apart) = apart.filter(|apart| apart.door().is_some()) else {
            return (places, Vec::new());
        };
        places.into_iter().partition(|place| apart.was_read(place))
    }

    /// Releases a pin that did not reach its client.
    pub fn let_go(&self, tier: usize, place: Place) {
        self.tiers[tier].unpin([place].iter());
    }

    /// Unpublishes blocks that a worker found corrupt, each in the tier where it is pinned.
    ///
    /// Waits for the tiers and returns the number of blocks.
    pub fn discard(&self, pins: &[Pin]) -> usize {
        // Once closed the medium may have another owner.
        let Ok(_pass) = self.gate.enter() else {
            return 0;
        };
        let all = self.tiers.iter().enumerate();
        let asked = all.filter_map(|(number, tier)| {
            let here = pins.iter().filter(|pin| pin.tier == number);
            let places: Vec<Place> = here.map(|pin| pin.place).collect();
            (!places.is_empty()).then(|| tier.discard(&places))
        });
        let asked: Vec<Answer<usize>> = asked.collect();
        asked.into_iter().filter_map(Answer::wait).sum()
    }
}

/// Pins what a tier apart has of the keys that are not found yet, where others can read it by
/// themselves, as far as there are slots for pins that last. Waits for its answers, step by step:
/// other calls have their turn between two steps.
fn pin_apart(
    apart: &Apart,
    (seat, through_doors): (u64, bool),
    namespace: NamespaceId,
    (keys, stamps): (&[Key], Stamps),
    found: &[bool],
) -> Vec<(usize, Place)> {
    let missing: Vec<usize> = (0..keys.len()).filter(|at| !found[*at]).collect();
    let is_reached = apart.directory().is_some() || through_doors && apart.door().is_some();
    if missing.is_empty() || !is_reached || held::passes() {
        return Vec::new();
    }
    let ends = apart.tier().ends();
    let mut all = Vec::new();
    // Only the first step waits for slots of others: by then this call has none.
    let mut patience = apart.lookup_limit();
    let steps = steps(missing.len(), apart.step_max());
    in_row(steps, apart.lookup_limit(), |step| {
        let step = &missing[step];
        let slots = apart.take_lasting(seat, step.len(), std::mem::take(&mut patience))?;
        let asked: Vec<Key> = step.iter().map(|at| keys[*at]).collect();
        let used: Vec<u64> = step.iter().map(|at| stamps.of(*at)).collect();
        let pinned = apart.pin(namespace, &asked, &used).wait()?;
        let pinned = step.iter().zip(pinned).filter_map(|(at, place)| {
            // The checksum is seeded with who was asked for, whatever the tier says it is.
            let identity = Identity {
                namespace,
                key: keys[*at],
            };
            Some((*at, Place { identity, ..place? }))
        });
        // Not all that is behind a door can be reached there.
        let is_somewhere =
            |(_, place): &(usize, Place)| place.extents.room() > 0 || ends.outside(place).is_some();
        let (pinned, nowhere): (Vec<_>, Vec<_>) = pinned.partition(is_somewhere);
        let places = |of: &[(usize, Place)]| of.iter().map(|(_, place)| *place).collect::<Vec<_>>();
        apart.unpin(&places(&nowhere));
        apart.lend(pinned.iter().map(|(_, place)| place), slots);
        let has_some = !pinned.is_empty();
        all.extend(pinned);
        Some(has_some)
    });
    all
}

/// Says the parts of blocks that were pinned in a tier. Those whose table cannot be read are
/// unpinned, and unpublished too when it does not verify: waits for that.
fn open(from: &Stage, pinned: Vec<(usize, Place)>, mut each: impl FnMut(usize, Place, Parts)) {
    let (mut corrupt, mut unread) = (Vec::new(), Vec::new());
    for (index, place) in pinned {
        if let Some(parts) = parts::single(&place) {
            each(index, place, parts);
            continue;
        }
        match from.ends().parts(&place) {
            Ok(Some(parts)) => each(index, place, Parts::from(parts)),
            Ok(None) => corrupt.push(place),
            Err(error) => {
                tracing::warn!(%error, key = %place.identity.key,
                    "cannot read the list of a block's parts; the block is a miss");
                unread.push(place);
            }
        }
    }
    from.unpin(unread.iter());
    from.discard_and_unpin(&corrupt);
}
