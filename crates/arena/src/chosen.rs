//! Blocks that are chosen before any of them is evicted: where eviction has a limit, none is
//! unless enough may be.

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;

use crate::body::{Arena, State};
use crate::bury::{Victim, bite_len};
use crate::index::Index;
use crate::turnover::EvictionLimit;

/// Progress of a choice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// More blocks are chosen.
    Open,
    /// Those that were chosen are enough, and go.
    Made,
    /// They are too few, and all are listed again.
    Vain,
}

/// Blocks that are evicted together or not at all. Until then the order of use does not list them.
pub(crate) struct Chosen {
    limit: EvictionLimit,
    progress: Progress,
    /// The oldest one first, each with its sequence: its slot may be another block's when it goes.
    victims: VecDeque<(Victim, u64)>,
    /// Slots and sequences of all of them: the order of use may list a block more than once.
    known: HashSet<(u32, u64)>,
    room: u64,
}

impl Chosen {
    /// Creates an empty choice. Without a limit, no block is chosen.
    pub(crate) fn within(limit: EvictionLimit) -> Chosen {
        let progress = match limit {
            EvictionLimit::NONE => Progress::Made,
            _ => Progress::Open,
        };
        Chosen {
            limit,
            progress,
            victims: VecDeque::new(),
            known: HashSet::new(),
            room: 0,
        }
    }

    /// Bytes of all that were chosen.
    pub(crate) fn room(&self) -> u64 {
        self.room
    }

    /// Number of all that were chosen.
    pub(crate) fn count(&self) -> u64 {
        self.known.len() as u64
    }

    /// Adds blocks that the order of use does not list.
    pub(crate) fn add(&mut self, index: &Index, victims: Vec<Victim>) {
        for victim in victims {
            let entry = index.get(victim.0);
            if self.known.insert((victim.0, entry.sequence)) {
                self.room += entry.extents.room();
                self.victims.push_back((victim, entry.sequence));
            }
        }
    }
}

impl Arena {
    /// Takes a step of a choice: chooses a few blocks, until `is_enough` of their bytes and their
    /// number, or returns a few of those that go. Other threads may have the lock between two
    /// steps.
    ///
    /// If the blocks that may be evicted are not enough, none of them goes: all are listed again, a
    /// few in a step, and the last one breaks with `None`. Continues once all have gone.
    pub(crate) fn choose(
        &self,
        state: &mut State,
        chosen: &mut Chosen,
        is_enough: impl Fn(u64, u64) -> bool,
    ) -> ControlFlow<Option<Vec<Victim>>> {
        if chosen.progress == Progress::Open {
            let (room, count) = (chosen.room, chosen.count());
            let enough = |more: u64, few: u64| is_enough(room + more, count + few);
            if let Some((victims, _)) = self.least_used(state, bite_len(), chosen.limit, enough) {
                chosen.add(&self.index, victims);
                return ControlFlow::Break(Some(Vec::new()));
            }
            if is_enough(room, count) {
                chosen.progress = Progress::Made;
            } else if state.relisting > 0 {
                // What others list again may do. Who looks later than they do sees all of it.
                return ControlFlow::Break(Some(Vec::new()));
            } else {
                (chosen.known, chosen.room) = (HashSet::new(), 0);
                chosen.progress = Progress::Vain;
                state.relisting += 1;
            }
        }
        let few = bite_len().min(chosen.victims.len());
        let some: Vec<(Victim, u64)> = chosen.victims.drain(..few).collect();
        if chosen.progress == Progress::Vain {
            for ((slot, _), _) in &some {
                state.order.keep(&self.index, *slot);
            }
            if few > 0 {
                return ControlFlow::Break(Some(Vec::new()));
            }
            state.relisting -= 1;
            return ControlFlow::Break(None);
        }
        if few == 0 {
            return ControlFlow::Continue(());
        }
        let some = some.into_iter();
        let some = some.filter_map(|one| self.still_goes(state, one, chosen.limit));
        ControlFlow::Break(Some(some.collect()))
    }

    /// A block that was chosen, if it is there and the limit still allows it. (Others had the lock
    /// since: its slot may be another block's by now, and of blocks that are used all the time
    /// nothing else tells that they were used since.)
    fn still_goes(
        &self,
        state: &mut State,
        (victim, sequence): (Victim, u64),
        limit: EvictionLimit,
    ) -> Option<Victim> {
        let (slot, _) = victim;
        let entry = self.index.check(slot, sequence)?;
        if limit.allows(self.index.stamp_of(slot, &entry)) {
            return Some(victim);
        }
        state.order.keep(&self.index, slot);
        None
    }
}
