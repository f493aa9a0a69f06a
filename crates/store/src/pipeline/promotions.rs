//! Promotions: what was read far, or is wanted near, comes into the near tier.

use std::time::Duration;

use kvdepot_arena::{Identity, Place, clock};
use kvdepot_media::is_simulated;

use super::Core;
use super::ledger::Promotion;
use super::loads::Load;
use super::replicate::Replica;
use crate::task::Outcome;
use crate::tier::Apart;

/// Pause before a block is tried again that somebody else is writing near.
const RETRY: Duration = Duration::from_millis(1);
/// How long that goes on: a copy of this process takes some milliseconds, and a client may have
/// stopped in the middle of a put.
const BUSY_MAX: Duration = Duration::from_secs(1);

/// A promotion, and what became of it.
type Ended = (Promotion, Replica);

impl Core {
    /// Asks for far blocks, pinned there, to be copied near, as far as there is room on the way.
    /// Ends their pins in time.
    pub(super) fn promote_later(&self, tier: usize, blocks: Vec<Promotion>) {
        let (wanted, mut passed) = match self.promote {
            true => self.worth_promoting(blocks),
            false => (Vec::new(), blocks),
        };
        let limit = self.near().block_max() / 8;
        passed.extend(self.enqueue_promotions(wanted.into_iter(), limit));
        self.tiers[tier].unpin(passed.iter().map(|one| &one.place));
    }

    /// Puts blocks on their way to the near tier, up to `limit` bytes on the way; the rest is
    /// answered, still pinned.
    pub(super) fn enqueue_promotions(
        &self,
        blocks: impl Iterator<Item = Promotion>,
        limit: u64,
    ) -> Vec<Promotion> {
        let mut refused = Vec::new();
        let mut ledger = self.ledger.lock();
        for (at, block) in blocks.enumerate() {
            ledger.take_turns(at);
            let edge = block.tier - 1;
            let stop = ledger.stop;
            let queues = &mut ledger.edges[edge];
            let tier = self.tiers[block.tier].apart();
            let most = tier.map_or(usize::MAX, Apart::promotions_max);
            let has_room =
                queues.promotion_bytes + block.place.len <= limit && queues.promotion_blocks < most;
            // One that somebody waits for finds room by itself, however large it is.
            let is_alone = queues.promotion_bytes == 0 && block.is_awaited();
            if stop || !(has_room || is_alone) {
                refused.push(block);
            } else {
                queues.promotion_bytes += block.place.len;
                queues.promotion_blocks += 1;
                queues.promotions.push_back(block);
                self.ledger.work[edge].notify_one();
            }
        }
        refused
    }

    pub(super) fn promote_blocks(&self, blocks: Vec<Promotion>) {
        let Some(first) = blocks.first() else {
            return;
        };
        let (tier, from) = (first.tier, &self.tiers[first.tier]);
        // What was read is with its reader already; only what was asked for is waited for.
        let idle = self.idle_copier.as_ref();
        let idle = idle.filter(|_| !blocks.iter().any(Promotion::is_awaited));
        if idle.is_some() {
            // Nobody waits for what may take its time.
            let loads = blocks.iter().filter_map(|block| block.load.as_ref());
            loads.for_each(Load::turn_away);
        }
        let places: Vec<Place> = blocks.iter().map(|block| block.place).collect();
        let replicas = self.replicate(tier, 0, &places, idle.unwrap_or(&self.copier));
        for (place, (replica, _)) in places.iter().zip(&replicas) {
            match replica {
                Replica::Stored => {
                    self.metrics.promoted(place.len);
                    // What it would go on to has it.
                    let over = self.edges[..tier].iter();
                    over.for_each(|edge| edge.note(&place.identity, place.len, true));
                }
                Replica::Corrupt => {
                    tracing::warn!(key = %place.identity.key, tier = from.name(),
                        "checksum mismatch during promotion; block removed");
                }
                _ => {}
            }
        }
        let ended = blocks.into_iter().zip(replicas);
        let ended = ended.map(|(block, (replica, _))| (block, replica));
        let (corrupt, ended): (Vec<_>, Vec<_>) =
            ended.partition(|(_, replica)| *replica == Replica::Corrupt);
        let (later, ended): (Vec<_>, Vec<_>) = ended
            .into_iter()
            .partition(|(block, replica)| *replica == Replica::Busy && block.waits());
        let ended = self.once_more(later, ended);
        let places = |of: &[(Promotion, Replica)]| -> Vec<Place> {
            of.iter().map(|(block, _)| block.place).collect()
        };
        from.unpin(places(&ended).iter());
        self.promoted(tier, ended);
        from.discard_and_unpin(&places(&corrupt));
        self.promoted(tier, corrupt);
    }

    /// Blocks are on their way near no more, nor pinned.
    fn promoted(&self, tier: usize, blocks: Vec<(Promotion, Replica)>) {
        let bytes: u64 = blocks.iter().map(|(block, _)| block.place.len).sum();
        {
            let mut ledger = self.ledger.lock();
            let queues = &mut ledger.edges[tier - 1];
            queues.promotion_bytes = queues.promotion_bytes.saturating_sub(bytes);
            queues.promotion_blocks = queues.promotion_blocks.saturating_sub(blocks.len());
        }
        for (block, replica) in &blocks {
            if let Some(load) = block.load.as_ref().filter(|_| *replica == Replica::Stored) {
                load.arrived();
            }
            let Identity { namespace, key } = block.place.identity;
            match replica {
                Replica::Stored => self.awaited.arrived(block.place.identity),
                _ => self.awaited.end(namespace, std::iter::once(&key)),
            }
            if let Some(waiter) = &block.waiter {
                waiter.task.acknowledge(waiter.index, arrival(*replica));
            }
        }
    }
    /// Puts blocks back, still pinned, that somebody else is writing near and that are waited for;
    /// all that are not are in `ended`.
    fn once_more(&self, later: Vec<(Promotion, Replica)>, mut ended: Vec<Ended>) -> Vec<Ended> {
        if later.is_empty() {
            return ended;
        }
        std::thread::sleep(RETRY);
        let until = clock::now() + BUSY_MAX;
        // Who else wants these need not wait as long: without the ledger, which that may take.
        let loads = later.iter().filter_map(|(block, _)| block.load.as_ref());
        loads.for_each(Load::turn_away);
        let mut ledger = self.ledger.lock();
        for (mut block, replica) in later {
            if ledger.stop {
                ended.push((block, replica));
                continue;
            }
            block.busy_until.get_or_insert(until);
            let edge = block.tier - 1;
            ledger.edges[edge].promotions.push_back(block);
            self.ledger.work[edge].notify_one();
        }
        ended
    }
}

impl Promotion {
    pub(super) fn is_awaited(&self) -> bool {
        self.waiter.is_some() || self.is_joined()
    }

    /// Whether it is tried again where somebody else is writing it. A schedule of a simulation has
    /// no time to pass.
    fn waits(&self) -> bool {
        let is_late = self.busy_until.is_some_and(|until| until <= clock::now());
        self.waiter.is_some() && !is_late && !is_simulated()
    }
}

/// What a prefetch is told of a block.
fn arrival(replica: Replica) -> Outcome {
    match replica {
        Replica::Stored => Outcome::Done,
        Replica::Corrupt => Outcome::Corrupt,
        Replica::Full => Outcome::Full,
        Replica::Declined => Outcome::Declined,
        Replica::Removed => Outcome::Miss,
        Replica::Busy | Replica::Orphans | Replica::Failed => Outcome::Dropped,
    }
}
