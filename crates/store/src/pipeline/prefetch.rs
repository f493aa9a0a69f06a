//! Prefetches: the blocks of a prompt are promoted to the first tier before their bytes are read.
//! Blocks of asynchronous tiers are promoted step by step: a step is pinned when the blocks of the
//! step before are promoted.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_arena::gate::Pass;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Stamps};
use parking_lot::Mutex;

use super::Core;
use super::ledger::{Promotion, Waiter};
use super::turns::{STEP_MAX, Turn, one_by_one};
use crate::journal::Journal;
use crate::task::{Mirror, Outcome, Task};

impl Core {
    /// Promotes the consecutive hits from the first key to the first tier, in the background.
    ///
    /// Until they are read, the blocks count as prefetched by the client with number `seat`.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn prefetch(
        self: &Arc<Core>,
        seat: u64,
        namespace: NamespaceId,
        keys: &[Key],
        mirror: Option<Mirror>,
    ) -> Result<Task, Error> {
        let _pass = self.gate.enter()?;
        self.metrics.prefetch(keys.len() as u64);
        let journal = Journal::dispatched("prefetch", keys.len(), 0);
        let task = Task::with_mirror(keys.len(), journal, mirror);
        // There are no buffers to hold.
        task.release(keys.len());
        self.asked(namespace, keys);
        self.fetch((Which::Prefix, Some(seat)), namespace, keys, &task);
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
        let _pass = self.gate.enter()?;
        let task = Task::new(keys.len(), Journal::dispatched("prefetch", keys.len(), 0));
        task.release(keys.len());
        self.fetch((which, None), namespace, keys, &task);
        Ok(task)
    }

    fn fetch(
        self: &Arc<Core>,
        (which, seat): (Which, Option<u64>),
        namespace: NamespaceId,
        keys: &[Key],
        task: &Task,
    ) {
        let call = Call {
            core: Arc::clone(self),
            namespace,
            keys: keys.to_vec(),
            task: task.clone(),
            which,
            seat,
            stamps: self.uses.asked(),
            brought: AtomicU64::new(0),
            ended: Mutex::new(None),
        };
        let count = keys.len();
        let apart = self.is_apart();
        let most = if apart {
            self.step_max().min(STEP_MAX)
        } else {
            count
        };
        let call = Arc::new(call);
        let begins = (0..count).step_by(most.max(1));
        let steps = begins.map(move |begin| begin..(begin + most).min(count));
        one_by_one(steps, move |step, turn| call.start(step, turn));
    }
}

/// Which hits are brought near.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// The consecutive ones from the first key.
    Prefix,
    Each,
}

/// A prefetch.
struct Call {
    core: Arc<Core>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    task: Task,
    which: Which,
    /// Of the client whose blocks count as awaited.
    seat: Option<u64>,
    stamps: Stamps,
    /// Bytes of blocks that were sent near so far.
    brought: AtomicU64,
    /// The outcome of the keys behind the last step, once it is known without asking for them.
    ended: Mutex<Option<Outcome>>,
}

/// Consecutive keys of a prefetch, and what is known of them.
struct Step {
    call: Arc<Call>,
    keys: Range<usize>,
    turn: Turn,
    found: Vec<bool>,
    /// Tiers, numbers in the step, and places of what is pinned.
    pinned: Vec<(usize, usize, Place)>,
    _pass: Pass,
}

impl Call {
    /// Brings near what the tiers have of these keys. The turn ends when these have come.
    fn start(self: &Arc<Call>, keys: Range<usize>, turn: Turn) {
        let ended = *self.ended.lock();
        let pass = match ended {
            None => self.core.gate.enter().map_err(|_| Outcome::Closed),
            Some(outcome) => Err(outcome),
        };
        let pass = match pass {
            Ok(pass) => pass,
            Err(outcome) => {
                let rest: Vec<_> = keys.map(|index| (index, outcome)).collect();
                return self.task.acknowledge_all(&rest);
            }
        };
        let mut step = Step {
            found: vec![false; keys.len()],
            pinned: Vec::with_capacity(keys.len()),
            call: Arc::clone(self),
            keys,
            turn,
            _pass: pass,
        };
        for (number, tier) in self.core.arenas() {
            let (begin, pinned) = (step.keys.start, &mut step.pinned);
            let stamp = |index| self.stamps.of(begin + index);
            let each = |index: usize, place| pinned.push((number, index, place));
            let keys = &self.keys[step.keys.clone()];
            tier.pin(self.namespace, keys, &mut step.found, stamp, each);
        }
        step.ask(0);
    }
}

impl Call {
    /// Returns true if a block may be promoted beside those that others wait for.
    fn admits(&self, place: &Place, most: u64) -> bool {
        let admit = |seat| {
            let awaited = &self.core.awaited;
            awaited.admit((seat, most), place.identity, place.len)
        };
        self.seat.is_none_or(admit)
    }
}

impl Step {
    /// Asks the tiers from `tier` on for what was not found, and brings near what they have.
    fn ask(mut self, tier: usize) {
        let call = Arc::clone(&self.call);
        let next = call.core.next_apart(tier, &self.found);
        let Some((at, apart, missing)) = next.filter(|_| !self.turn.is_over()) else {
            return self.bring();
        };
        let (begin, limit) = (self.keys.start, apart.lookup_limit());
        let keys: Vec<Key> = missing.iter().map(|at| call.keys[begin + at]).collect();
        let used: Vec<u64> = missing
            .iter()
            .map(|at| call.stamps.of(begin + at))
            .collect();
        apart.pin(call.namespace, &keys, &used).then(move |places| {
            let places = places.unwrap_or_default();
            if places.iter().all(Option::is_none) {
                self.turn.came_to_nothing(limit);
            }
            for ((index, place), (key, stamp)) in missing
                .into_iter()
                .zip(places)
                .zip(keys.into_iter().zip(used))
            {
                if let Some(place) = place {
                    self.found[index] = true;
                    // Whatever the tier says it is.
                    let namespace = self.call.namespace;
                    let place = Place {
                        identity: Identity { namespace, key },
                        stamp,
                        ..place
                    };
                    self.pinned.push((at, index, place));
                }
            }
            self.ask(at + 1);
        });
    }

    /// Brings hits near, of which some were pinned in tiers.
    fn bring(self) {
        let Step {
            call,
            keys,
            turn,
            found,
            mut pinned,
            ..
        } = self;
        let core = &call.core;
        let hits = match call.which {
            Which::Prefix => found.iter().take_while(|found| **found).count(),
            Which::Each => found.len(),
        };
        let mut rest = (hits < found.len()).then_some(Outcome::Miss);
        let turn = Arc::new(turn);
        pinned.sort_unstable_by_key(|(_, index, _)| *index);
        let limit = core.near().block_max() / 2;
        let mut ahead = Vec::new();
        let mut passed = Vec::new();
        let mut ended = Vec::new();
        for (tier, index, place) in pinned {
            if tier == 0 || index >= hits {
                passed.push((tier, place));
                ended.extend((index < hits).then_some((keys.start + index, Outcome::Done)));
                continue;
            }
            // So that the later blocks of a call evict none of its first.
            let before = call.brought.fetch_add(place.len, Ordering::Relaxed);
            let is_too_much = before > 0 && before + place.len > limit;
            if is_too_much || !call.admits(&place, limit) {
                passed.push((tier, place));
                ended.push((keys.start + index, Outcome::Dropped));
                continue;
            }
            let waiter = Waiter {
                task: call.task.clone(),
                index: keys.start + index,
                _turn: Some(Arc::clone(&turn)),
            };
            ahead.push(Promotion {
                tier,
                place,
                waiter: Some(waiter),
                busy_until: None,
                load: core.loads.claim(tier, place.identity),
            });
        }
        let missed = (0..found.len()).filter(|index| *index >= hits || !found[*index]);
        ended.extend(missed.map(|index| (keys.start + index, Outcome::Miss)));
        for block in core.enqueue_promotions(ahead.into_iter(), limit) {
            call.brought.fetch_sub(block.place.len, Ordering::Relaxed);
            let Identity { namespace, key } = block.place.identity;
            core.awaited.end(namespace, std::iter::once(&key));
            passed.push((block.tier, block.place));
            ended.extend(block.waiter.map(|waiter| (waiter.index, Outcome::Dropped)));
        }
        let is_gap = |(_, outcome): &(usize, Outcome)| *outcome == Outcome::Dropped;
        if call.which == Which::Prefix && ended.iter().any(is_gap) {
            // No hit counts behind a gap.
            rest = rest.or(Some(Outcome::Dropped));
        }
        if rest.is_some() {
            *call.ended.lock() = rest;
        }
        for (number, tier) in core.tiers.iter().enumerate() {
            let here = passed.iter().filter(|(tier, _)| *tier == number);
            tier.unpin(here.map(|(_, place)| place));
        }
        call.task.acknowledge_all(&ended);
        // Once the last of those on their way has come, the next step begins.
        drop(turn);
    }
}
