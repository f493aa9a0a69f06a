//! What is under way: who waits for whose reservation, what waits for the far tier, what waits
//! for promotion.
//!
//! Lock order: the ledger before an arena. Whoever sees a reservation of another call registers
//! with it before letting go of the ledger, and whoever ends a reservation takes the ledger
//! afterwards, so that nobody waits for a reservation that has already ended.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_arena::held::{Guard, Mutex};
use kvdepot_arena::{Identity, Place, Reserved, Token, clock};
use kvdepot_host::Condvar;

use super::budget::Share;
use super::loads::Load;
use super::spending::Spent;
use super::turns::Turn;
use crate::task::{Outcome, Task};
use crate::tier::Permits;

/// Work in both directions and who waits for it.
pub(crate) struct Ledger {
    state: Mutex<State>,
    /// There is work at an edge, or an end.
    pub(super) work: Vec<Condvar>,
    /// The queues ran empty.
    drained: Condvar,
}

/// A call of which some keys share another call's outcome.
pub(super) trait Joins: Send + Sync {
    /// Has a key routed again, as the other call has ended.
    fn start_over(self: Arc<Self>, index: usize);

    /// Ends a key.
    fn refuse(&self, index: usize, outcome: Outcome);
}

/// A key that shares another call's outcome.
pub(super) struct Joiner {
    pub(super) call: Arc<dyn Joins>,
    pub(super) index: usize,
}

/// Who joined the writing of a block to a tier that may answer late.
#[derive(Default)]
pub(super) struct Written {
    pub(super) joiners: Vec<Joiner>,
    /// How many of them had when the tier was asked to publish it: what it has published is theirs
    /// too. For the others it may have been removed before they came.
    pub(super) before: usize,
}

/// A key of a put whose bytes are in a tier that does not acknowledge them, on their way on.
#[derive(Clone)]
pub(super) struct Waiter {
    pub(super) task: Task,
    pub(super) index: usize,
    /// Of the step of a prefetch that waits for all its blocks.
    pub(super) _turn: Option<Arc<Turn>>,
}

/// A block of a far tier, pinned there, that shall be near.
pub(super) struct Promotion {
    pub(super) tier: usize,
    pub(super) place: Place,
    /// Who waits for it, if anybody does.
    pub(super) waiter: Option<Waiter>,
    /// Somebody else is writing it near: when it is given up.
    pub(super) busy_until: Option<Instant>,
    /// By which gets that want it wait for it.
    pub(super) load: Option<Load>,
}

impl Promotion {
    /// Whether gets wait for it.
    pub(super) fn is_joined(&self) -> bool {
        self.load.as_ref().is_some_and(Load::is_joined)
    }
}

/// A block on its way to the next tier.
pub(super) struct OnItsWay {
    share: Share,
    /// Until the next tier is asked to publish it.
    spent: Spent,
    pub(super) waiters: Vec<Waiter>,
}

/// What goes with room for a block, until that is published.
#[derive(Default)]
pub(super) struct Dues {
    /// What it has of the queue behind its tier.
    pub(super) share: Option<Share>,
    /// Whether a nearer tier did not take it: room in the queue is found once it is there.
    pub(super) passed: bool,
    /// Where it passes the tier before by: what it takes of what may be written.
    pub(super) spent: Spent,
    /// Its slot, where its caller keeps it as long as it likes, or may be stopped.
    pub(super) _slot: Option<Permits>,
}

/// What goes with a reservation of somebody of whom nobody knows when it ends.
#[derive(Default)]
pub(super) struct Held {
    /// Itself, in a tier that may answer late: others know it by its token.
    pub(super) reserved: Option<Reserved>,
    /// Dropped after the reservation has ended, because others have its slot then.
    pub(super) dues: Dues,
}

/// What waits at an edge.
#[derive(Default)]
pub(super) struct Queues {
    /// Blocks of the nearer tier, pinned, on their way to the other.
    pub(super) outward: VecDeque<Place>,
    /// When they are looked at again, after some that could not be written yet.
    pub(super) rest_until: Option<Instant>,
    /// Blocks of the other tier on their way to the nearest one.
    pub(super) promotions: VecDeque<Promotion>,
    /// The first promotions, of which none was joined when they were looked at, and how many joins
    /// there had been when that began.
    pub(super) looked: usize,
    pub(super) joins: u64,
    /// The first promotions, all of which are looked at before one of them is looked at again.
    pub(super) round: usize,
    pub(super) promotion_bytes: u64,
    /// Their number: each is pinned until it has come.
    pub(super) promotion_blocks: usize,
    /// It was the turn of what goes on.
    pub(super) went_on: bool,
    /// Batches since the first promotion might have had its turn.
    pub(super) passed: u32,
}

#[derive(Default)]
pub(super) struct State {
    /// By the tier and the reservation they wait for.
    pub(super) joiners: HashMap<(usize, Token), Vec<Joiner>>,
    /// By the tier and the block that is written to it, where the tier may answer late.
    pub(super) written: HashMap<(usize, Identity), Written>,
    /// What waits at each edge.
    pub(super) edges: Vec<Queues>,
    /// Blocks in the queues or being copied to the next tier, and who waits for them.
    pub(super) waiting: HashMap<Token, OnItsWay>,
    /// Reservations of callers of the two-phase verbs, by tier: nobody knows when they end. Growth
    /// moves all entries at once, under the lock: each is a few words.
    pub(super) held: HashMap<(usize, Token), Box<Held>>,
    /// No call begins any more, and so no held reservation is committed any more.
    pub(super) closing: bool,
    pub(super) stop: bool,
    /// The edge that a simulation looks at next.
    #[cfg(feature = "sim")]
    pub(super) turn: usize,
}

impl Ledger {
    /// For so many edges.
    pub(crate) fn new(edges: usize) -> Ledger {
        let mut state = State::default();
        state.edges.resize_with(edges, Queues::default);
        Ledger {
            state: Mutex::new(state),
            work: (0..edges).map(|_| Condvar::new()).collect(),
            drained: Condvar::new(),
        }
    }

    pub(super) fn lock(&self) -> Guard<'_, State> {
        self.state.lock()
    }

    /// Puts a pinned block of a tier on its way to the next one. False when it is already: a block
    /// is visible before its put gets here, so another put may have sent it.
    pub(super) fn enqueue(
        &self,
        state: &mut State,
        edge: usize,
        place: Place,
        (share, spent): (Share, Spent),
        waiters: Vec<Waiter>,
    ) -> bool {
        match state.waiting.entry(place.token) {
            Entry::Occupied(mut on_its_way) => {
                on_its_way.get_mut().waiters.extend(waiters);
                false
            }
            Entry::Vacant(vacant) => {
                vacant.insert(OnItsWay {
                    share,
                    spent,
                    waiters,
                });
                state.edges[edge].outward.push_back(place);
                self.work[edge].notify_one();
                true
            }
        }
    }

    /// The next tier has been asked to publish these.
    pub(super) fn written(&self, tokens: impl Iterator<Item = Token>) {
        let mut state = self.state.lock();
        for token in tokens {
            if let Some(one) = state.waiting.get_mut(&token) {
                one.spent.written();
            }
        }
    }

    /// Ends a block's way to the next tier.
    pub(super) fn finish(&self, place: &Place, outcome: Outcome) {
        let ended = {
            let mut state = self.state.lock();
            let ended = state.waiting.remove(&place.token);
            // Before anybody learns that nothing waits.
            let ended = ended.map(|ended| {
                drop((ended.share, ended.spent));
                ended.waiters
            });
            if state.waiting.is_empty() {
                self.drained.notify_all();
            }
            ended
        };
        for waiter in ended.into_iter().flatten() {
            waiter.task.acknowledge(waiter.index, outcome);
        }
    }

    /// Tells whoever waits for nothing to be on its way, where that is so.
    pub(super) fn look_drained(&self) {
        if self.state.lock().waiting.is_empty() {
            self.drained.notify_all();
        }
    }

    /// Whether somebody holds it now.
    pub(crate) fn is_taken(&self) -> bool {
        self.state.is_taken()
    }

    /// Waits until every tier has what was on its way to it.
    pub(crate) fn drain(&self, timeout: Duration) -> bool {
        let deadline = clock::now().checked_add(timeout);
        let mut state = self.state.lock();
        while !state.waiting.is_empty() {
            match deadline {
                None => state.wait(&self.drained),
                Some(deadline) => {
                    if !state.wait_until(&self.drained, deadline) {
                        return state.waiting.is_empty();
                    }
                }
            }
        }
        true
    }

    /// Answers those who joined a reservation that will not be committed any more. Others wait
    /// for puts that are under way.
    pub(crate) fn part_from_held(&self) {
        let joiners: Vec<Joiner> = {
            let mut state = self.state.lock();
            state.closing = true;
            let State {
                joiners,
                written,
                held,
                ..
            } = &mut *state;
            let late = held.iter().filter_map(|((tier, _), held)| {
                let reserved = held.reserved.as_ref()?;
                written.remove(&(*tier, reserved.identity))
            });
            let late: Vec<Joiner> = late.flat_map(|written| written.joiners).collect();
            let ended = held.keys().filter_map(|name| joiners.remove(name));
            ended.flatten().chain(late).collect()
        };
        for joiner in joiners {
            joiner.call.refuse(joiner.index, Outcome::Closed);
        }
    }

    /// Tells the background threads to end, and answers everybody who still waits. What waited is
    /// still pinned, each in its tier.
    pub(crate) fn stop(&self) -> Vec<(usize, Place)> {
        let (mut left, mut near) = (Vec::new(), Vec::new());
        let held;
        let waiters: Vec<Waiter> = {
            let mut state = self.state.lock();
            state.stop = true;
            held = std::mem::take(&mut state.held);
            for (tier, queues) in state.edges.iter_mut().enumerate() {
                left.extend(queues.outward.drain(..).map(|place| (tier, place)));
                near.extend(queues.promotions.drain(..));
            }
            left.extend(near.iter().map(|one| (one.tier, one.place)));
            let far = state.waiting.drain().flat_map(|(_, ended)| ended.waiters);
            far.chain(near.iter_mut().filter_map(|one| one.waiter.take()))
                .collect()
        };
        // Who joined them goes on.
        drop((held, near));
        self.work.iter().for_each(|work| {
            work.notify_all();
        });
        self.drained.notify_all();
        for waiter in waiters {
            waiter.task.acknowledge(waiter.index, Outcome::Closed);
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry_len<K, V>(_of: &HashMap<K, V>) -> usize {
        size_of::<(K, V)>()
    }

    #[test]
    fn a_map_that_grows_by_a_large_call_moves_little_of_each_key() {
        let state = State::default();
        let each = [
            entry_len(&state.held),
            entry_len(&state.joiners),
            entry_len(&state.written),
        ];
        assert!(each.iter().all(|len| *len <= 128), "{each:?} bytes");
    }
}
