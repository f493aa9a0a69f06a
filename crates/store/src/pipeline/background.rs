//! The thread that writes back and promotes. Write-back comes first: it is what acknowledges.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_arena::{Error, Place, clock};
use parking_lot::Mutex;

use super::Core;
use super::ledger::{Promotion, State};
use super::replicate::Replica;
use crate::task::Outcome;

/// Bytes moved in one go: a few tens of milliseconds of copying, so that a close or a promotion
/// never waits long, and enough to keep all lanes busy.
const BATCH_BYTES: u64 = 64 << 20;
/// The same of promotions: their lanes get a few per cent of a busy processor, and write-backs
/// wait for the batch under way.
const PROMOTE_BYTES: u64 = 4 << 20;
const BATCH_BLOCKS: usize = 1024;
/// Pause before a block is tried again that somebody else is writing to the far tier.
const RETRY: Duration = Duration::from_millis(1);
/// Pause before the far tier is asked again while processes of its last owner may still write
/// there: short against an engine's start, and nothing to speak of in the meantime.
const RETRY_ORPHANS: Duration = Duration::from_millis(50);

/// The running thread.
pub(crate) struct Background {
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Work {
    WriteBack(Vec<Place>),
    Promote(Vec<Promotion>),
}

impl Background {
    /// Starts the thread, where the pipeline has more than one tier.
    pub(crate) fn start(core: &Arc<Core>) -> Result<Background, Error> {
        let thread = if core.far().is_some() && !is_stepped() {
            let core = Arc::clone(core);
            let run = move || {
                // Whatever the opening thread is pinned to; slower if it fails, nothing else.
                let _cpus = kvdepot_host::cpu::reset_affinity();
                core.run();
            };
            let spawned = std::thread::Builder::new()
                .name("kvdepot-backgnd".into())
                .spawn(run);
            Some(spawned.map_err(|source| Error::Io {
                path: "thread".into(),
                source,
            })?)
        } else {
            None
        };
        Ok(Background {
            thread: Mutex::new(thread),
        })
    }

    /// Waits for the thread after [`super::Ledger::stop`].
    pub(crate) fn join(&self) {
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the write-back thread panicked");
        }
    }
}

impl Core {
    fn run(&self) {
        while let Some(work) = self.next_work() {
            self.work(work);
        }
    }

    fn work(&self, work: Work) {
        match work {
            Work::WriteBack(places) => self.write_back(&places),
            Work::Promote(blocks) => self.promote_blocks(blocks),
        }
    }

    /// Does what the thread would do next; false when there is nothing.
    #[cfg(feature = "sim")]
    pub(crate) fn step(&self) -> bool {
        let work = {
            let mut ledger = self.ledger.lock();
            if ledger.stop {
                return false;
            }
            ledger.take_work(true)
        };
        let Some(work) = work else { return false };
        self.work(work);
        true
    }

    /// Takes the next work, or `None` at the end.
    fn next_work(&self) -> Option<Work> {
        let mut ledger = self.ledger.lock();
        loop {
            if ledger.stop {
                return None;
            }
            let rested = ledger.rest_until.is_none_or(|end| end <= clock::now());
            if let Some(work) = ledger.take_work(rested) {
                return Some(work);
            }
            match ledger.rest_until.filter(|_| !rested) {
                Some(end) => {
                    ledger.wait_until(&self.ledger.work, end);
                }
                None => ledger.wait(&self.ledger.work),
            }
        }
    }

    fn write_back(&self, places: &[Place]) {
        let near = self.near();
        let replicas = self.replicate(near, 1, places, &self.copier);
        let (mut again, mut pause) = (Vec::new(), RETRY);
        let mut ended = Vec::new();
        for (place, replica) in places.iter().zip(replicas) {
            let outcome = match replica {
                // Whoever put it did so before it was removed.
                Replica::Stored | Replica::Removed => Outcome::Done,
                Replica::Full => Outcome::Full,
                Replica::Failed => Outcome::Dropped,
                Replica::Corrupt => {
                    near.discard(&[place.token]);
                    tracing::warn!(key = %place.identity.key, tier = near.name(),
                        "a block did not verify on its way to the far tier");
                    Outcome::Corrupt
                }
                Replica::Busy | Replica::Orphans => {
                    if replica == Replica::Orphans {
                        pause = RETRY_ORPHANS;
                    }
                    again.push(*place);
                    continue;
                }
            };
            ended.push((*place, outcome));
        }
        near.unpin(ended.iter().map(|(place, _)| place.token));
        for (place, outcome) in &ended {
            if *outcome != Outcome::Done {
                // It has not left unread: it did not arrive.
                self.forget(place.identity.namespace, &[place.identity.key]);
            }
            self.metrics.put_outcome(*outcome);
            self.ledger.finish(place, *outcome);
        }
        if !again.is_empty() {
            let mut ledger = self.ledger.lock();
            if !ledger.stop {
                ledger.queue.extend(again);
                // Promotions have their turn meanwhile.
                ledger.rest_until = clock::now().checked_add(pause);
            }
        }
    }

    /// Asks for far blocks, pinned there, to be copied near, as far as there is room on the way.
    /// Ends their pins in time.
    pub(super) fn promote_later(&self, tier: usize, places: Vec<Place>) {
        if !self.promote {
            return self.tiers[tier].unpin(places.iter().map(|place| place.token));
        }
        let (wanted, passed): (Vec<Place>, Vec<Place>) = self.worth_promoting(places);
        self.tiers[tier].unpin(passed.iter().map(|place| place.token));
        let blocks = wanted.into_iter().map(|place| Promotion {
            tier,
            place,
            waiter: None,
        });
        let refused = self.enqueue_promotions(blocks, self.near().block_max() / 8);
        self.tiers[tier].unpin(refused.iter().map(|one| one.place.token));
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
        for block in blocks {
            if ledger.stop || ledger.promotion_bytes + block.place.len > limit {
                refused.push(block);
            } else {
                ledger.promotion_bytes += block.place.len;
                ledger.promotions.push_back(block);
            }
        }
        self.ledger.work.notify_one();
        refused
    }

    fn promote_blocks(&self, blocks: Vec<Promotion>) {
        let Some(first) = blocks.first() else {
            return;
        };
        let from = &self.tiers[first.tier];
        // What was read is with its reader already; only what was asked for is waited for.
        let idle = self.idle_copier.as_ref().filter(|_| first.waiter.is_none());
        let places: Vec<Place> = blocks.iter().map(|block| block.place).collect();
        let replicas = self.replicate(from, 0, &places, idle.unwrap_or(&self.copier));
        for (place, replica) in places.iter().zip(&replicas) {
            match replica {
                Replica::Stored => self.metrics.promoted(place.len),
                Replica::Corrupt => {
                    from.discard(&[place.token]);
                    tracing::warn!(key = %place.identity.key, tier = from.name(),
                        "a block did not verify on its way to the near tier");
                }
                _ => {}
            }
        }
        from.unpin(places.iter().map(|place| place.token));
        let bytes: u64 = places.iter().map(|place| place.len).sum();
        {
            let mut ledger = self.ledger.lock();
            ledger.promotion_bytes = ledger.promotion_bytes.saturating_sub(bytes);
        }
        for (block, replica) in blocks.into_iter().zip(replicas) {
            if let Some(waiter) = block.waiter {
                waiter.task.acknowledge(waiter.index, arrival(replica));
            }
        }
    }
}

/// Whether a simulation takes the thread's steps.
#[cfg(feature = "sim")]
pub(super) fn is_stepped() -> bool {
    kvdepot_media::sim::current().is_some()
}

#[cfg(not(feature = "sim"))]
pub(super) fn is_stepped() -> bool {
    false
}

impl State {
    /// What is to be done next; write-backs only when those that could not be written have
    /// `rested`.
    fn take_work(&mut self, rested: bool) -> Option<Work> {
        if rested && !self.queue.is_empty() {
            let mut bytes = 0;
            let fits = |place: &&Place| {
                bytes += place.len;
                bytes <= BATCH_BYTES
            };
            let batch = self.queue.iter().take(BATCH_BLOCKS);
            let count = batch.take_while(fits).count();
            return Some(Work::WriteBack(self.queue.drain(..count.max(1)).collect()));
        }
        let first = self.promotions.pop_front()?;
        let (tier, awaited) = (first.tier, first.waiter.is_some());
        let most = if awaited { BATCH_BYTES } else { PROMOTE_BYTES };
        let mut bytes = first.place.len;
        let mut blocks = vec![first];
        let fits = |next: &&Promotion| {
            bytes += next.place.len;
            next.tier == tier && next.waiter.is_some() == awaited && bytes <= most
        };
        let more = self.promotions.iter().take_while(fits).count();
        blocks.extend(self.promotions.drain(..more));
        Some(Work::Promote(blocks))
    }
}

/// What a prefetch is told of a block.
fn arrival(replica: Replica) -> Outcome {
    match replica {
        Replica::Stored => Outcome::Done,
        Replica::Corrupt => Outcome::Corrupt,
        Replica::Full => Outcome::Full,
        Replica::Removed => Outcome::Miss,
        Replica::Busy | Replica::Orphans | Replica::Failed => Outcome::Dropped,
    }
}
