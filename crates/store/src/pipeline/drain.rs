//! Draining: the blocks of a device go to the others of its tier while all of them serve.
//!
//! A block is published where it goes before it leaves where it was, and lookups that overlap the
//! change look again, so that it can be loaded at every moment. The blocks used last go first:
//! where the others have too little room, the rest is evicted.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use kvdepot_arena::{Arena, Error, NamespaceId, Place, Token, Wanted, clock};

use super::Core;
use super::replicate::Replica;
use crate::config::size;
use crate::tier::Arenas;

/// Bytes copied in one go: gets that wait for the lanes wait no longer than for their own copies.
const BATCH_BYTES: u64 = 16 << 20;
const BATCH_BLOCKS: usize = 256;

/// Pause while blocks that somebody has pinned or is writing keep the device from being empty.
const PAUSE: Duration = Duration::from_millis(2);

/// Passes beyond the patience for what others let go, or have written, while the last one ran and
/// did not see it: somebody who pins and unpins might otherwise keep a drain for ever.
const LATE_PASSES: u32 = 8;

/// Result of draining a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Drained {
    /// Number of blocks moved to other devices.
    pub moved_blocks: u64,
    /// Payload of the moved blocks, in bytes.
    pub moved_bytes: u64,
    /// Number of blocks evicted.
    pub evicted_blocks: u64,
}

impl Core {
    /// Empties a device of tier `index`, to which nothing is written meanwhile and afterwards.
    /// Gives up, and lets it take writes again, when for `patience` nothing but pinned blocks and
    /// reservations was left.
    pub(crate) fn clear_out(
        &self,
        index: usize,
        arena: &Arena,
        others: bool,
        patience: Duration,
    ) -> Result<Drained, Error> {
        let tier = self.dax(index)?;
        let was_leaving = !tier.leave(arena, true);
        let mut drained = Drained::default();
        let emptied = self.empty_device(index, arena, others, patience, &mut drained);
        if emptied.is_err() && !was_leaving {
            tier.leave(arena, false);
        }
        let path = arena.path().map(|path| path.display().to_string());
        let Drained {
            moved_blocks,
            evicted_blocks,
            ..
        } = drained;
        let moved_bytes = size::show(drained.moved_bytes);
        let error = emptied.as_ref().err().map(ToString::to_string);
        tracing::info!(path, moved_blocks, %moved_bytes, evicted_blocks, error, "device drained");
        emptied.map(|()| drained)
    }

    fn empty_device(
        &self,
        index: usize,
        arena: &Arena,
        others: bool,
        patience: Duration,
        drained: &mut Drained,
    ) -> Result<(), Error> {
        let mut progress = clock::now();
        let mut late_passes = LATE_PASSES;
        loop {
            let before = arena.device();
            let mut left = arena.by_use();
            let tried: HashSet<Token> = left.iter().copied().collect();
            let mut moved = false;
            while !left.is_empty() {
                // Closing does not wait for a drain of a large device.
                let _pass = self.gate.enter()?;
                moved |= match others {
                    true => self.move_some(index, arena, &mut left, drained),
                    false => {
                        let evicted = arena.evict_these(&std::mem::take(&mut left)) as u64;
                        self.dax(index)?.tell_fallen();
                        drained.evicted_blocks += evicted;
                        evicted > 0
                    }
                };
            }
            let device = arena.device();
            if device.empty {
                return Ok(());
            }
            // What was being written may have been published meanwhile, and can go too.
            let fresh = || arena.by_use().iter().any(|token| !tried.contains(token));
            if moved || fresh() {
                progress = clock::now();
            } else if progress.elapsed() >= patience {
                let fewer = device.pinned + device.reserved < before.pinned + before.reserved;
                if !fewer || late_passes == 0 {
                    return Err(held(arena, &device, progress));
                }
                late_passes -= 1;
            }
            drop(self.gate.enter()?);
            std::thread::sleep(PAUSE.min(patience));
        }
    }

    /// Moves or evicts the last of these blocks; false when none could be.
    fn move_some(
        &self,
        index: usize,
        arena: &Arena,
        left: &mut Vec<Token>,
        drained: &mut Drained,
    ) -> bool {
        let Ok(tier) = self.dax(index) else {
            return false;
        };
        let (mut places, mut bytes): (Vec<Place>, u64) = (Vec::new(), 0);
        while places.len() < BATCH_BLOCKS
            && bytes < BATCH_BYTES
            && let Some(token) = left.pop()
        {
            if let Some(place) = arena.pin_token(token) {
                bytes += place.len;
                places.push(place);
            }
        }
        let replicas = self.move_blocks(tier, index, arena, &places);
        let of = |wanted: &[Replica]| -> Vec<Token> {
            let chosen = places.iter().zip(&replicas);
            let chosen = chosen.filter(|(_, replica)| wanted.contains(replica));
            chosen.map(|(place, _)| place.token).collect()
        };
        let moved = of(&[Replica::Stored]);
        let corrupt = of(&[Replica::Corrupt]);
        tier.moving();
        arena.hand_over(&moved);
        arena.discard(&corrupt);
        arena.unpin(places.iter().map(|place| place.token));
        let evicted = arena.evict_these(&of(&[Replica::Full, Replica::Declined])) as u64;
        tier.tell_fallen();
        let gone = places.iter().zip(&replicas);
        let gone = gone.filter(|(_, replica)| **replica == Replica::Stored);
        drained.moved_bytes += gone.map(|(place, _)| place.len).sum::<u64>();
        drained.moved_blocks += moved.len() as u64;
        drained.evicted_blocks += evicted;
        !moved.is_empty() || !corrupt.is_empty() || evicted > 0
    }

    fn move_blocks(
        &self,
        tier: &Arenas,
        index: usize,
        arena: &Arena,
        places: &[Place],
    ) -> Vec<Replica> {
        let copier = self.idle_copier.as_ref().unwrap_or(&self.copier);
        let room = |namespace: NamespaceId, blocks: &[Wanted]| {
            Some(tier.reserve_beside(arena.number(), namespace, blocks))
        };
        let arrived = self.copy_over((index, index), places, copier, (false, false), room);
        arrived.into_iter().map(|(replica, _)| replica).collect()
    }

    /// The tier at a position, which is one of arenas.
    fn dax(&self, index: usize) -> Result<&Arenas, Error> {
        let tier = self.tiers.get(index).and_then(|tier| tier.here());
        tier.ok_or(Error::Closed(""))
    }
}

/// What keeps a device from being emptied.
fn held(arena: &Arena, device: &kvdepot_arena::Device, since: Instant) -> Error {
    Error::Busy {
        path: arena.path().unwrap_or_else(|| arena.name().as_ref()).into(),
        pinned: device.pinned,
        reserved: device.reserved,
        waited_s: (since.elapsed().as_secs_f64() * 100.0).round() / 100.0,
    }
}
