//! Published blocks that stay where they are while somebody reads them: `pin → move → unpin`. A
//! pin ends by its verb or with the process that made it, never by time.

use std::sync::Arc;

use kvdepot_arena::parts::{self, Parts};
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, held};

use super::Core;
use super::ledger::Promotion;
use crate::placement::{self, Holder};
use crate::tier::{Apart, FileAt, Stage};

/// A published block that stays where it is until it is unpinned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a pin that nobody ends keeps its block for ever"]
pub struct Pin {
    /// Where it is, near to far.
    pub tier: usize,
    pub(crate) tier_name: &'static str,
    /// Where its bytes are.
    pub place: Place,
    pub(crate) parts: Parts,
    /// The file that has them, where they lie in one.
    pub(crate) file: Option<FileAt>,
    /// Whose it is.
    pub holder: Holder,
}

impl Pin {
    /// The pin of a block in the tier at `tier`, in its owner's depot.
    pub fn new(holder: Holder, tier: (usize, &'static str), place: Place, parts: Parts) -> Pin {
        let (tier, tier_name) = tier;
        Pin {
            tier,
            tier_name,
            place,
            parts,
            file: None,
            holder,
        }
    }

    /// The pin of a block that lies in a file, if it does.
    pub fn in_file(self, file: Option<FileAt>) -> Pin {
        Pin { file, ..self }
    }

    /// Where the bytes are, for a mover: opaque, and valid while the pin is.
    #[must_use]
    pub fn placement(&self) -> Vec<u8> {
        placement::encode(self.holder, &self.place, &self.parts, self.file.as_ref())
    }

    /// The name of the tier that has the block.
    #[must_use]
    pub fn tier(&self) -> &'static str {
        self.tier_name
    }

    /// The block's key.
    #[must_use]
    pub fn key(&self) -> Key {
        self.place.identity.key
    }

    /// Payload bytes, without a part table.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len).sum()
    }
}

impl Core {
    /// Pins blocks where they are nearest, each as `make` has it; `None` for a miss, also where
    /// `make` answers that the block does not verify.
    pub(super) fn pin_as<T: Clone>(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: &[Key],
        make: impl Fn(usize, &Stage, Place) -> Option<T>,
    ) -> Result<Vec<Option<T>>, Error> {
        let _pass = self.gate.enter()?;
        self.asked(namespace, keys);
        let stamps = self.uses.call(keys.len());
        let mut pins: Vec<Option<T>> = vec![None; keys.len()];
        for (tier, here) in self.tiers.iter().enumerate() {
            let mut places = Vec::with_capacity(keys.len());
            let each = |index: usize, place| places.push((index, place));
            let mut found: Vec<bool> = pins.iter().map(Option::is_some).collect();
            let arenas = match here {
                Stage::Here(arenas) => arenas,
                Stage::Apart(apart) => {
                    for (index, place) in pin_apart(apart, namespace, keys, &found) {
                        let stamp = stamps.of(index);
                        pins[index] = make(tier, here, Place { stamp, ..place });
                    }
                    continue;
                }
            };
            arenas.pin(namespace, keys, &mut found, |index| stamps.of(index), each);
            let used = (0..keys.len()).filter(|index| pins[*index].is_some());
            arenas.touch(namespace, used.map(|at| (&keys[at], stamps.of(at))));
            for (index, place) in places {
                self.note_touch(tier, &place.identity, place.len);
                // One whose part table does not verify is asked of the next tier.
                pins[index] = make(tier, here, place);
            }
        }
        Ok(pins)
    }

    /// Ends pins. `served` blocks of a far tier are promoted: their bytes have just been read.
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
                let blocks = places.into_iter().map(|place| Promotion {
                    tier,
                    place,
                    waiter: None,
                    load: self.loads.claim(tier, place.identity),
                });
                self.promote_later(tier, blocks.collect());
            } else {
                self.tiers[tier].unpin(places.iter());
            }
        }
    }

    /// Ends a pin that nobody has heard of.
    pub fn let_go(&self, tier: usize, place: Place) {
        self.tiers[tier].unpin([place].iter());
    }

    /// Unpublishes blocks that a mover found not to verify, in the tiers where they are pinned.
    pub fn discard(&self, pins: &[Pin]) -> usize {
        // Once closed the medium may have another owner.
        let Ok(_pass) = self.gate.enter() else {
            return 0;
        };
        pins.iter()
            .map(|pin| self.tiers[pin.tier].discard(&[pin.place]))
            .sum()
    }
}

/// Pins what a tier apart has of the keys that are not found yet, where others can read it by
/// themselves. Waits for its answer.
fn pin_apart(
    apart: &Apart,
    namespace: NamespaceId,
    keys: &[Key],
    found: &[bool],
) -> Vec<(usize, Place)> {
    let missing: Vec<usize> = (0..keys.len()).filter(|at| !found[*at]).collect();
    if missing.is_empty() || apart.directory().is_none() || held::passes() {
        return Vec::new();
    }
    let asked: Vec<Key> = missing.iter().map(|at| keys[*at]).collect();
    let pinned = apart.pin(namespace, &asked).wait().unwrap_or_default();
    let pinned = missing.into_iter().zip(pinned).filter_map(|(at, place)| {
        // The checksum is seeded with who was asked for, whatever the tier says it is.
        let identity = Identity {
            namespace,
            key: keys[at],
        };
        Some((at, Place { identity, ..place? }))
    });
    let pinned: Vec<(usize, Place)> = pinned.collect();
    apart.lend(pinned.iter().map(|(_, place)| place));
    pinned
}

/// A pinned block's parts; `None`, and unpinned, when their table cannot be read, and unpublished
/// too when it does not verify.
pub(super) fn open(from: &Stage, place: &Place) -> Option<Parts> {
    if let Some(parts) = parts::single(place) {
        return Some(parts);
    }
    let found = from.ends().parts(place);
    match found {
        Ok(Some(parts)) => return Some(Parts::from(parts)),
        Ok(None) => {
            from.discard(&[*place]);
        }
        Err(error) => {
            tracing::warn!(%error, key = %place.identity.key, "a part table cannot be read");
        }
    }
    from.unpin([place].into_iter());
    None
}
