//! Prefetches: a prompt's blocks come near before anybody asks for their bytes.

use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Stamps};

use super::Core;
use super::ledger::{Promotion, Waiter};
use crate::journal::Journal;
use crate::task::{Mirror, Outcome, Task};

impl Core {
    /// Brings the consecutive hits from the first key into the near tier, in the background.
    pub fn prefetch(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: &[Key],
        mirror: Option<Mirror>,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        self.metrics.prefetch(keys.len() as u64);
        let journal = Journal::dispatched("prefetch", keys.len(), 0);
        let task = Task::with_mirror(keys.len(), journal, mirror);
        // There are no buffers to hold.
        task.release(keys.len());
        self.asked(namespace, keys);
        self.fetch((pass, Which::Prefix), namespace, keys, &task);
        Ok(task)
    }

    /// Brings blocks near that any tier has, for a call that goes on when the task is over: those
    /// that had no room on their way end as dropped.
    pub(super) fn bring_near(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: &[Key],
        which: Which,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        let task = Task::new(keys.len(), Journal::dispatched("prefetch", keys.len(), 0));
        task.release(keys.len());
        self.fetch((pass, which), namespace, keys, &task);
        Ok(task)
    }

    fn fetch(
        self: &Arc<Core>,
        (pass, which): (Pass, Which),
        namespace: NamespaceId,
        keys: &[Key],
        task: &Task,
    ) {
        let stamps = self.uses.asked();
        let mut found = vec![false; keys.len()];
        let mut pinned: Vec<(usize, usize, Place)> = Vec::with_capacity(keys.len());
        for (number, tier) in self.arenas() {
            let stamp = |index| stamps.of(index);
            let each = |index: usize, place| pinned.push((number, index, place));
            tier.pin(namespace, keys, &mut found, stamp, each);
        }
        let late = self.tiers.iter().position(|tier| tier.apart().is_some());
        if let Some(late) = late.filter(|_| found.contains(&false)) {
            let call = Call {
                core: Arc::clone(self),
                namespace,
                keys: keys.to_vec(),
                task: task.clone(),
                which,
                stamps,
                _pass: pass,
            };
            return call.ask(late, found, pinned);
        }
        self.bring((task, which), &found, pinned);
    }

    /// Brings hits near, of which some were pinned in tiers, and ends the task.
    fn bring(
        &self,
        (task, which): (&Task, Which),
        found: &[bool],
        mut pinned: Vec<(usize, usize, Place)>,
    ) {
        let hits = match which {
            Which::Prefix => found.iter().take_while(|found| **found).count(),
            Which::Each => found.len(),
        };
        pinned.sort_unstable_by_key(|(_, index, _)| *index);
        let mut ahead = Vec::new();
        let mut passed = Vec::new();
        for (tier, index, place) in pinned {
            if tier > 0 && index < hits {
                let task = task.clone();
                let waiter = Some(Waiter { task, index });
                ahead.push(Promotion {
                    tier,
                    place,
                    waiter,
                    busy_until: None,
                    load: self.loads.claim(tier, place.identity),
                });
                continue;
            }
            passed.push((tier, place));
            if index < hits {
                task.acknowledge(index, Outcome::Done);
            }
        }
        let missed = (0..found.len()).filter(|index| *index >= hits || !found[*index]);
        missed.for_each(|index| task.acknowledge(index, Outcome::Miss));
        let refused = self.enqueue_promotions(ahead.into_iter(), self.near().block_max() / 2);
        for block in refused {
            passed.push((block.tier, block.place));
            if let Some(Waiter { task, index }) = block.waiter {
                task.acknowledge(index, Outcome::Dropped);
            }
        }
        for (number, tier) in self.tiers.iter().enumerate() {
            let here = passed.iter().filter(|(tier, _)| *tier == number);
            tier.unpin(here.map(|(_, place)| place));
        }
    }
}

/// Which hits are brought near.
#[derive(Clone, Copy)]
pub(super) enum Which {
    /// The consecutive ones from the first key.
    Prefix,
    Each,
}

/// A prefetch that asks tiers which may answer late.
struct Call {
    core: Arc<Core>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    task: Task,
    which: Which,
    stamps: Stamps,
    _pass: Pass,
}

impl Call {
    /// Asks the tiers from `tier` on for what was not found, and brings near what they have.
    fn ask(self, tier: usize, mut found: Vec<bool>, mut pinned: Vec<(usize, usize, Place)>) {
        let core = Arc::clone(&self.core);
        let Some((at, apart, mut missing)) = core.next_apart(tier, &found) else {
            return core.bring((&self.task, self.which), &found, pinned);
        };
        missing.truncate(apart.promotions_max());
        let keys: Vec<Key> = missing.iter().map(|index| self.keys[*index]).collect();
        let used = missing.iter().map(|index| self.stamps.of(*index));
        let used: Vec<u64> = used.collect();
        apart.pin(self.namespace, &keys, &used).then(move |places| {
            for (index, place) in missing.into_iter().zip(places.unwrap_or_default()) {
                if let Some(place) = place {
                    found[index] = true;
                    // Whatever the tier says it is.
                    let (namespace, key) = (self.namespace, self.keys[index]);
                    let place = Place {
                        identity: Identity { namespace, key },
                        stamp: self.stamps.of(index),
                        ..place
                    };
                    pinned.push((at, index, place));
                }
            }
            self.ask(at + 1, found, pinned);
        });
    }
}
