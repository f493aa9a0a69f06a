//! Gets: pin, copy and verify, unpin. The nearest tier that has a block serves it; one that does
//! not verify is unpublished there, and the next tier is asked.

mod beyond;
mod copies;
mod finish;
mod plan;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::held::Mutex;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Stamps};

use super::Core;
use super::caller::Caller;
use super::loads::{Joining, Load};
use super::turns::{STEP_MAX, Turn, in_turns, steps};
use crate::buffers::BlockBuffers;
use crate::metrics::Op;
use crate::task::{Outcome, Task};
use crate::tier::{Answer, Permits, Stage};
pub use plan::plan;

/// Options of a get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GetOptions {
    /// True to copy through the staging buffer, for memory into which direct copies are slow.
    pub staged: bool,
    /// True to stop at the first key that is not a hit.
    ///
    /// The outcome of the later keys is `Miss`, and their buffers stay unchanged. A buffer of the
    /// wrong length ends the hits like a miss.
    pub prefix: bool,
}

/// One call. It holds the caller's memory until the last copy into it has stopped.
struct Get {
    core: Arc<Core>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    caller: Caller,
    task: Task,
    stamps: Stamps,
    /// What had arrived in the near tier before the call looked there.
    arrived: u64,
    staged: bool,
    /// Of keys that it loads from tiers that are slow to read.
    loads: Mutex<HashMap<usize, Load>>,
    /// There are tiers that the caller's lanes do not reach, and a near one for what they have.
    lies_beyond: bool,
    /// Keys that have come near, or could not: they do so once.
    brought: Mutex<HashSet<usize>>,
    _pass: Pass,
}

impl Core {
    /// Starts a get. The copies run on the lanes.
    pub(crate) fn get(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter_as(Op::Get.name(), keys.len())?;
        buffers.check(keys.len(), true)?;
        if options.staged || buffers.on_device() {
            self.copier.make_slab()?;
        }
        let caller = Caller::Here(buffers);
        let task = self.begin(Op::Get, keys.len(), &caller, None);
        self.start_get(pass, namespace, keys, caller, &task, options);
        Ok(task)
    }

    /// Starts a get into the memory of `caller`. The outcomes are recorded in `task`.
    pub fn start_get(
        self: &Arc<Core>,
        pass: Pass,
        namespace: NamespaceId,
        keys: Vec<Key>,
        caller: Caller,
        task: &Task,
        options: GetOptions,
    ) {
        self.asked(namespace, &keys);
        self.offer_again(namespace, &keys);
        let core = Arc::clone(self);
        let mut apart = self.tiers.iter().filter_map(Stage::apart);
        let lies_beyond = self.tiers[0].here().is_some() && apart.any(|one| !caller.reaches(one));
        let get = Get {
            stamps: core.uses.asked(),
            arrived: core.loads.arrived(),
            core,
            namespace,
            keys,
            caller,
            task: task.clone(),
            staged: options.staged,
            loads: Mutex::default(),
            lies_beyond,
            brought: Mutex::default(),
            _pass: pass,
        };
        let get = Arc::new(get);
        if options.prefix {
            get.start_hits(0);
        } else {
            get.start_each();
        }
    }
}

impl Get {
    /// Serves each key by itself. The tiers that answer at once serve all keys here; what they have
    /// not is asked for in turns, in the threads that answer.
    fn start_each(self: &Arc<Get>) {
        let tiers = self.core.tiers.iter();
        let (count, most) = (self.keys.len(), self.core.step_max());
        let Some(apart) = tiers.map(Stage::apart).position(|apart| apart.is_some()) else {
            return steps(count, most)
                .for_each(|step| self.start(step.collect(), 0, Joining::Each, None));
        };
        let mut missed = Vec::new();
        for step in steps(count, most) {
            let serve = |left, tier| self.serve_at(tier, left, Joining::Each);
            missed.extend((0..apart).fold(step.collect(), serve));
        }
        let get = Arc::clone(self);
        in_turns(missed, most, move |step, turn| {
            get.start(step, apart, Joining::Each, Some(Arc::new(turn)));
        });
    }

    /// Serves these keys from a tier that answers at once; returns those that it has not.
    fn serve_at(self: &Arc<Get>, tier: usize, indices: Vec<usize>, joining: Joining) -> Vec<usize> {
        let indices = self.join_at(tier, indices, joining);
        let (pinned, rest) = self.pin(tier, &indices);
        self.serve(tier, pinned, None);
        rest
    }

    /// Begins to load these keys, where this tier is the first that is slow to read; returns those
    /// that it loads by itself.
    fn join_at(
        self: &Arc<Get>,
        tier: usize,
        mut indices: Vec<usize>,
        joining: Joining,
    ) -> Vec<usize> {
        if self.core.loads.begin_at(tier) && !indices.is_empty() {
            let get = Arc::clone(self);
            let restart = move |joined| move || get.start(joined, 0, Joining::Never, None);
            indices = self.begin_loads(indices, joining, restart);
            let (near, rest) = self.arrived_since(self.arrived, indices);
            indices = rest;
            self.serve(0, near, None);
        }
        indices
    }

    /// Serves these keys from the tiers from `first` on. Their `turn` ends when the tiers have
    /// answered, and what asynchronous ones have of them has been copied.
    fn start(
        self: &Arc<Get>,
        mut indices: Vec<usize>,
        first: usize,
        joining: Joining,
        turn: Option<Arc<Turn>>,
    ) {
        for (tier, stage) in self.core.tiers.iter().enumerate().skip(first) {
            let Stage::Apart(apart) = stage else {
                indices = self.serve_at(tier, indices, joining);
                continue;
            };
            indices = self.join_at(tier, indices, joining);
            if indices.is_empty() {
                return;
            }
            if !self.caller.reaches(apart) || turn.as_deref().is_some_and(Turn::is_over) {
                continue;
            }
            let (get, limit) = (Arc::clone(self), apart.lookup_limit());
            let waits = turn.clone();
            return self.ask(tier, indices, waits, move |pinned, rest| {
                if let Some(turn) = turn.as_deref().filter(|_| pinned.is_empty()) {
                    turn.came_to_nothing(limit);
                }
                get.serve(tier, pinned, turn.clone());
                get.start(rest, tier + 1, joining, turn);
            });
        }
        drop(turn);
        self.bring_each(indices);
    }

    /// Begins to load what no nearer tier has, but for what others load: that waits for them, and
    /// then begins anew by what `restart` makes.
    fn begin_loads<T: FnOnce() + Send + Sync + 'static>(
        &self,
        mut indices: Vec<usize>,
        joining: Joining,
        restart: impl FnOnce(Vec<usize>) -> T,
    ) -> Vec<usize> {
        let core = &self.core;
        let near_max = core.near().block_max();
        let named = |at: &&usize| self.caller.bytes(**at) <= near_max;
        let identity = |at: &usize| Identity {
            namespace: self.namespace,
            key: self.keys[*at],
        };
        let names = indices.iter().filter(named).map(|at| (*at, identity(at)));
        let names: Vec<(usize, Identity)> = names.collect();
        let reaches = |tier: &Stage| tier.apart().is_none_or(|apart| self.caller.reaches(apart));
        let may_load = self.lies_beyond || core.tiers[1..].iter().any(reaches);
        let mut begun = core.loads.begin(&names, joining, may_load);
        self.loads.lock().extend(begun.loads.drain(..));
        let joined = std::mem::take(&mut begun.joined);
        if joined.is_empty() {
            return indices;
        }
        core.metrics.joined(joined.len() as u64);
        let mut others = joined.iter().peekable();
        indices.retain(|at| others.next_if_eq(&at).is_none());
        if joining == Joining::First {
            indices.clear();
        }
        core.loads.wait(begun, restart(joined));
        indices
    }

    /// Pins what the near tier has got of these since it was looked at, and answers the rest.
    fn arrived_since(&self, before: u64, indices: Vec<usize>) -> (Vec<(usize, Place)>, Vec<usize>) {
        if self.core.loads.arrived() == before {
            return (Vec::new(), indices);
        }
        let (near, rest) = self.pin(0, &indices);
        self.end_loads(near.iter().map(|(index, _)| *index));
        (near, rest)
    }

    /// Nobody waits for these any more. Who did goes on.
    fn end_loads(&self, indices: impl Iterator<Item = usize>) {
        let ended: Vec<Load> = {
            let mut loads = self.loads.lock();
            match loads.is_empty() {
                true => return,
                false => indices.filter_map(|index| loads.remove(&index)).collect(),
            }
        };
        drop(ended);
    }

    /// Asks a tier that may answer late to pin these, and goes on with what it has and what not.
    fn ask(
        self: &Arc<Get>,
        tier: usize,
        indices: Vec<usize>,
        turn: Option<Arc<Turn>>,
        then: impl FnOnce(Vec<(usize, Place)>, Vec<usize>) + Send + 'static,
    ) {
        let Some(apart) = self.core.tiers[tier].apart() else {
            return then(Vec::new(), indices);
        };
        let get = Arc::clone(self);
        let slots = apart.take_for_moves(self.caller.seat(), indices.len());
        slots.then(move |slots| {
            let apart = get.core.tiers[tier].apart();
            let Some((apart, slots)) = apart.zip(slots.flatten()) else {
                return then(Vec::new(), indices);
            };
            if let Some(turn) = turn {
                turn.begins();
            }
            let keys: Vec<Key> = indices.iter().map(|index| get.keys[*index]).collect();
            let asked = apart.pin(get.namespace, &keys, &get.stamps_of(&indices));
            let get = Arc::clone(&get);
            asked.then(move |places| {
                let (pinned, rest) = get.sort_out(tier, indices, places, slots);
                then(pinned, rest);
            });
        });
    }

    fn stamps_of(&self, indices: &[usize]) -> Vec<u64> {
        indices.iter().map(|index| self.stamps.of(*index)).collect()
    }

    /// Sorts keys into those that an asynchronous tier has pinned and the rest. The pins have
    /// `slots` until they end.
    fn sort_out(
        &self,
        tier: usize,
        indices: Vec<usize>,
        places: Option<Vec<Option<Place>>>,
        slots: Permits,
    ) -> (Vec<(usize, Place)>, Vec<usize>) {
        let places = places.unwrap_or_default();
        if let Some(apart) = self.core.tiers[tier].apart() {
            apart.lend(places.iter().flatten(), slots);
        }
        let mut each = places.into_iter().chain(std::iter::repeat(None));
        let (mut pinned, mut rest) = (Vec::new(), Vec::new());
        for index in indices {
            // The checksum is seeded with who was asked for, whatever the tier says it is.
            let (namespace, key) = (self.namespace, self.keys[index]);
            let identity = Identity { namespace, key };
            match each.next().flatten() {
                Some(place) => {
                    let stamp = self.stamps.of(index);
                    pinned.push((
                        index,
                        Place {
                            identity,
                            stamp,
                            ..place
                        },
                    ));
                }
                None => rest.push(index),
            }
        }
        (pinned, rest)
    }

    /// Serves the hits before the first gap, step by step from `begin` on. Everything behind the
    /// gap is a miss.
    fn start_hits(self: &Arc<Get>, begin: usize) {
        let mut begin = begin;
        let most = self.core.step_max();
        let mut first = steps(self.keys.len(), most);
        while begin < self.keys.len() {
            // Behind an answer that came late, whole steps: each may take as long.
            let short = first.next().filter(|step| step.start == begin);
            let whole = begin + STEP_MAX.min(most);
            let end = short.map_or(whole, |step| step.end);
            let step = begin..end.min(self.keys.len());
            begin = step.end;
            match self.find_hits(step, Joining::First) {
                Some(true) => {}
                // It goes on when the answer has come, or is over.
                Some(false) | None => return,
            }
        }
    }

    /// Pins a step, and serves it. Whether it had no gap; `None` where a tier answers later, which
    /// goes on with what follows.
    fn find_hits(self: &Arc<Get>, step: Range<usize>, joining: Joining) -> Option<bool> {
        let found = Vec::with_capacity(self.core.tiers.len());
        self.find_further(step.clone(), step.collect(), found, None, joining)
    }

    /// What comes after a step that was pinned later.
    fn go_on(self: &Arc<Get>, found: Option<bool>, end: usize) {
        if found == Some(true) {
            self.start_hits(end);
        }
    }

    /// The same in those tiers that `found` has nothing of yet. The first of them is an
    /// asynchronous one if the call has `slots` there.
    fn find_further(
        self: &Arc<Get>,
        step: Range<usize>,
        mut rest: Vec<usize>,
        mut found: Vec<Vec<(usize, Place)>>,
        mut slots: Option<Permits>,
        joining: Joining,
    ) -> Option<bool> {
        let arrived = self.core.loads.arrived();
        while let Some(tier) = self.core.tiers.get(found.len()) {
            // A call that has slots began its loads before it waited for these.
            let begins = slots.is_none() && self.core.loads.begin_at(found.len());
            if begins && !rest.is_empty() {
                let (get, again) = (Arc::clone(self), step.clone());
                let restart = |_| {
                    // It holds nothing while it waits.
                    for (tier, pinned) in self.core.tiers.iter().zip(&found) {
                        tier.unpin(pinned.iter().map(|(_, place)| place));
                    }
                    move || {
                        let end = again.end;
                        let found = get.find_hits(again, Joining::Never);
                        get.go_on(found, end);
                    }
                };
                rest = self.begin_loads(rest, joining, restart);
                if rest.is_empty() {
                    return None;
                }
                let (near, missing) = self.arrived_since(arrived, rest);
                found[0].extend(near);
                rest = missing;
            }
            if let Stage::Apart(apart) = tier
                && !rest.is_empty()
                && self.caller.reaches(apart)
            {
                let asked = || apart.take_for_moves(self.caller.seat(), rest.len());
                let taken = slots
                    .take()
                    .map_or_else(asked, |slots| Answer::Now(Some(Some(slots))));
                let tier = found.len();
                let get = Arc::clone(self);
                let slots = match taken {
                    Answer::Now(taken) => taken.flatten(),
                    later @ Answer::Later(_) => {
                        later.then(move |slots| {
                            let slots = slots.flatten();
                            if slots.is_none() {
                                found.push(Vec::new());
                            }
                            let end = step.end;
                            let found = get.find_further(step, rest, found, slots, joining);
                            get.go_on(found, end);
                        });
                        return None;
                    }
                };
                let Some(slots) = slots else {
                    found.push(Vec::new());
                    continue;
                };
                let keys: Vec<Key> = rest.iter().map(|index| self.keys[*index]).collect();
                let later = match apart.pin(self.namespace, &keys, &self.stamps_of(&rest)) {
                    Answer::Now(places) => {
                        let (pinned, missing) = self.sort_out(tier, rest, places, slots);
                        found.push(pinned);
                        rest = missing;
                        continue;
                    }
                    later @ Answer::Later(_) => later,
                };
                later.then(move |places| {
                    let (pinned, rest) = get.sort_out(tier, rest, places, slots);
                    found.push(pinned);
                    let end = step.end;
                    let found = get.find_further(step, rest, found, None, joining);
                    get.go_on(found, end);
                });
                return None;
            }
            let (pinned, missing) = match tier {
                Stage::Here(_) => self.pin(found.len(), &rest),
                Stage::Apart(_) => (Vec::new(), rest),
            };
            found.push(pinned);
            rest = missing;
        }
        if rest.first().is_some_and(|first| self.may_bring(*first)) {
            for (tier, pinned) in self.core.tiers.iter().zip(&found) {
                tier.unpin(pinned.iter().map(|(_, place)| place));
            }
            self.bring_hits(step, rest);
            return None;
        }
        Some(self.serve_hits(&step, rest.first().copied(), found))
    }

    /// Serves what was pinned of a step before its first gap; whether there is none.
    fn serve_hits(
        self: &Arc<Get>,
        step: &Range<usize>,
        absent: Option<usize>,
        tiers: Vec<Vec<(usize, Place)>>,
    ) -> bool {
        // Of a block in parts the length is known once its table has been read.
        let misfits = |(index, place): &&(usize, Place)| {
            place.parts == 1 && place.len != self.caller.bytes(*index)
        };
        let misfit = tiers
            .iter()
            .flatten()
            .filter(misfits)
            .map(|(at, _)| *at)
            .min();
        let gap = misfit.into_iter().chain(absent).min().unwrap_or(step.end);
        for (tier, pinned) in tiers.into_iter().enumerate() {
            let (hits, behind): (Vec<_>, Vec<_>) =
                pinned.into_iter().partition(|(at, _)| *at < gap);
            self.core.tiers[tier].unpin(behind.iter().map(|(_, place)| place));
            self.serve(tier, hits, None);
        }
        if gap == step.end {
            return true;
        }
        let outcome = |at| match Some(at) == misfit {
            true => (at, Outcome::Length),
            false => (at, Outcome::Miss),
        };
        self.miss((gap..self.keys.len()).map(outcome));
        false
    }

    /// Copies what was pinned in one tier, and stamps it in those behind.
    fn serve(self: &Arc<Get>, tier: usize, pinned: Vec<(usize, Place)>, turn: Option<Arc<Turn>>) {
        if pinned.is_empty() {
            return;
        }
        for (_, place) in &pinned {
            self.core.note_touch(tier, &place.identity, place.len);
        }
        let served: Vec<usize> = pinned.iter().map(|(index, _)| *index).collect();
        let read = served.iter().map(|index| &self.keys[*index]);
        self.core.awaited.end(self.namespace, read);
        self.copy(tier, pinned, turn);
        // While the lanes copy.
        let used = served
            .iter()
            .map(|at| (&self.keys[*at], self.stamps.of(*at)));
        for behind in self.core.tiers[tier + 1..].iter().filter_map(Stage::here) {
            behind.touch(self.namespace, used.clone());
        }
    }

    /// Ends keys that are not served.
    fn miss(&self, ended: impl ExactSizeIterator<Item = (usize, Outcome)>) {
        if ended.len() > 0 {
            self.core.metrics.missed(ended.len() as u64);
            let ended: Vec<(usize, Outcome)> = ended.collect();
            let indices: Vec<usize> = ended.iter().map(|(index, _)| *index).collect();
            self.task.settle(ended);
            self.end_loads(indices.into_iter());
        }
    }

    /// Pins what one tier has; answers that, and the keys it has not.
    fn pin(&self, tier: usize, indices: &[usize]) -> (Vec<(usize, Place)>, Vec<usize>) {
        let keys: Vec<Key> = indices.iter().map(|index| self.keys[*index]).collect();
        let mut pinned = Vec::with_capacity(indices.len());
        let mut found = vec![false; indices.len()];
        let each = |position: usize, place| pinned.push((indices[position], place));
        let stamp = |position: usize| self.stamps.of(indices[position]);
        if let Some(arenas) = self.core.tiers[tier].here() {
            arenas.pin(self.namespace, &keys, &mut found, stamp, each);
        }
        let missing = indices.iter().zip(&found).filter(|(_, found)| !**found);
        (pinned, missing.map(|(index, _)| *index).collect())
    }
}
