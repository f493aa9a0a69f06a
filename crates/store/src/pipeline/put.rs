//! Puts: admit, reserve, copy, commit, and on to the far tier.

mod kept;
mod late;
mod write;

use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Refused, Stamps, Token, Wanted};

use super::caller::Caller;
use super::edge::Stays;
use super::ledger::{Dues, Joiner, Joins, State, Waiter};
use super::onward::{Sent, Shut};
use super::spending::Spent;
use super::turns::steps;
use super::{Core, Edge};
use crate::buffers::BlockBuffers;
use crate::config::Overload;
use crate::metrics::Op;
use crate::task::{Outcome, Task};
use crate::tier::{Arenas, Stage};
use write::Copy;

/// One call's blocks. It holds the caller's memory until the last copy of it has stopped.
pub(crate) struct Put {
    core: Arc<Core>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    caller: Caller,
    task: Task,
    stamps: Stamps,
    _pass: Pass,
}

/// Index of a block that wants room, and what it has of the queue.
type Admitted = (usize, Dues);

/// Where the keys of a call go.
#[derive(Default)]
struct Routes {
    /// Indices whose blocks were reserved, with their tier.
    copies: Vec<(usize, Copy)>,
    /// Indices that have their outcome without a copy.
    settled: Vec<(usize, Outcome)>,
    /// Indices that wait for the far tier; their buffers are not needed any more.
    released: usize,
    /// Indices that an edge keeps in the tier before it, where they are if they are there.
    kept: Vec<usize>,
    /// Tiers and indices that found room there, and nothing that may be written.
    unpaid: Vec<(usize, usize)>,
}

impl Routes {
    fn stay(&mut self, index: usize, stays: Stays) {
        match stays {
            Stays::Barred => self.settled.push((index, Outcome::Declined)),
            Stays::Kept => self.kept.push(index),
        }
    }
}

impl Core {
    /// Starts a put. The copies run on the lanes.
    pub(crate) fn put(
        self: &Arc<Core>,
        namespace: NamespaceId,
        after: Option<Key>,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter_as(Op::Put.name(), keys.len())?;
        buffers.check(keys.len(), false)?;
        let caller = Caller::Here(buffers);
        let task = self.begin(Op::Put, keys.len(), &caller, None);
        self.start_put(pass, namespace, (after, keys), caller, &task);
        Ok(task)
    }

    /// Starts a put from the memory of `caller`. The outcomes are recorded in `task`.
    pub fn start_put(
        self: &Arc<Core>,
        pass: Pass,
        namespace: NamespaceId,
        (after, keys): (Option<Key>, Vec<Key>),
        caller: Caller,
        task: &Task,
    ) {
        let put = Put {
            core: Arc::clone(self),
            namespace,
            stamps: self.stamps_after(namespace, after, &keys),
            keys,
            caller,
            task: task.clone(),
            _pass: pass,
        };
        let all = (0..put.keys.len()).collect();
        Put::start(&Arc::new(put), all);
    }
}

impl Joins for Put {
    fn start_over(self: Arc<Put>, index: usize) {
        match self.core.gate.hurries() {
            true => self.refuse(index, Outcome::Closed),
            false => self.start(vec![index]),
        }
    }

    fn refuse(&self, index: usize, outcome: Outcome) {
        self.core.metrics.put_outcome(outcome);
        self.task.settle([(index, outcome)]);
    }
}

impl Put {
    /// Routes these keys and starts their copies.
    fn start(self: &Arc<Put>, indices: Vec<usize>) {
        let core = &self.core;
        let mut routes = Routes::default();
        let indices = self.decline(indices, &mut routes);
        let mut wanted = self.admit(indices, &mut routes);
        if core.acknowledges_far() && !routes.settled.is_empty() {
            let there = routes.settled.iter();
            let there = there.filter(|(_, outcome)| *outcome != Outcome::Declined);
            let used = |(at, _): &(usize, Outcome)| (&self.keys[*at], self.stamps.of(*at));
            let near = core.near().here();
            near.iter()
                .for_each(|near| near.touch(self.namespace, there.clone().map(used)));
        }
        for tier in 0..wanted.len() {
            let here = std::mem::take(&mut wanted[tier]);
            let refused = self.place(tier, here, &mut routes);
            if let Some(next) = wanted.get_mut(tier + 1) {
                next.extend(refused);
                next.sort_unstable_by_key(|(index, _)| *index);
            }
        }
        self.run(routes);
    }

    /// Finds room in a tier, or further away, and starts the copies.
    fn place_beyond(self: &Arc<Put>, from: usize, mut wanted: Vec<Admitted>, mut routes: Routes) {
        for tier in from..self.core.tiers.len() {
            wanted = self.place(tier, wanted, &mut routes);
        }
        self.run(routes);
    }

    /// Starts what is routed.
    fn run(self: &Arc<Put>, mut routes: Routes) {
        // Each goes into a nearer tier.
        while !routes.unpaid.is_empty() {
            self.keep_near(&mut routes);
        }
        for (_, outcome) in &routes.settled {
            self.core.metrics.put_outcome(*outcome);
        }
        self.note_refused(&routes);
        // They are put again.
        if self.core.edges.iter().any(Edge::is_for_touched) {
            let stored = routes.settled.iter();
            let stored = stored.filter(|(_, outcome)| *outcome == Outcome::Done);
            let stored: Vec<Key> = stored.map(|(at, _)| self.keys[*at]).collect();
            self.core.touch(self.namespace, &stored);
        }
        self.task.settle(routes.settled);
        self.task.release(routes.released + routes.kept.len());
        self.end_kept(routes.kept, self.core.ack);
        let mut copies = routes.copies.into_iter().peekable();
        while let Some((tier, _)) = copies.peek() {
            let tier = *tier;
            let mine = std::iter::from_fn(|| copies.next_if(|(other, _)| *other == tier));
            let mine: Vec<Copy> = mine.map(|(_, copy)| copy).collect();
            let count = mine.len();
            let mut mine = mine.into_iter();
            for step in steps(count, usize::MAX) {
                self.copy(tier, mine.by_ref().take(step.len()).collect());
            }
        }
    }

    /// Finds room in one tier; answers those that found none and may go further. Those for which
    /// a tier answers later go on by themselves.
    fn place(
        self: &Arc<Put>,
        tier: usize,
        wanted: Vec<Admitted>,
        routes: &mut Routes,
    ) -> Vec<Admitted> {
        if wanted.is_empty() {
            return wanted;
        }
        let core = &self.core;
        let refused = match &core.tiers[tier] {
            Stage::Here(arenas) => self.reserve(tier, arenas, wanted, routes),
            Stage::Apart(apart) if !self.caller.reaches(apart) || !core.takes_puts(tier) => {
                wanted.into_iter().map(|(index, _)| index).collect()
            }
            Stage::Apart(apart) => {
                self.reserve_late(tier, apart, wanted, true);
                return Vec::new();
            }
        };
        if core.goes_on(tier) && core.overload == Overload::Wait {
            return self.pass_by(tier, refused, routes);
        }
        let refused = refused.into_iter().map(|index| (index, Outcome::Full));
        routes.settled.extend(refused);
        Vec::new()
    }

    /// Those that go over the edge behind a tier which does not take them; the others are settled.
    fn pass_by(&self, tier: usize, refused: Vec<usize>, routes: &mut Routes) -> Vec<Admitted> {
        let edge = &self.core.edges[tier];
        let mut further = Vec::with_capacity(refused.len());
        for index in refused {
            match edge.lets_by(&self.identity(index), self.caller.bytes(index)) {
                Ok(()) => {
                    let dues = Dues {
                        passed: true,
                        ..Dues::default()
                    };
                    further.push((index, dues));
                }
                Err(stays) => routes.stay(index, stays),
            }
        }
        further
    }

    fn all_wanted(&self, admitted: &[Admitted]) -> Vec<Wanted> {
        let indices = admitted.iter().map(|(index, _)| *index);
        indices.map(|index| self.wanted(index)).collect()
    }

    fn wanted(&self, index: usize) -> Wanted {
        Wanted {
            key: self.keys[index],
            len: self.caller.bytes(index),
            parts: 1,
            stamp: self.stamps.of(index),
            copy: false,
            evict: true,
        }
    }

    /// Notes the blocks that were not stored: the next call of the prompt continues them.
    fn note_refused(&self, routes: &Routes) {
        let settled = || routes.settled.iter();
        let full = settled().filter(|(_, outcome)| *outcome == Outcome::Full);
        let first = full.map(|(at, _)| *at).min();
        let lost = [Outcome::Declined, Outcome::Dropped];
        if first.is_some() || settled().any(|(_, outcome)| lost.contains(outcome)) {
            self.core
                .note_refused(self.namespace, &self.keys, first, self.stamps);
        }
    }

    fn identity(&self, index: usize) -> Identity {
        Identity {
            namespace: self.namespace,
            key: self.keys[index],
        }
    }

    fn joiner(self: &Arc<Put>, index: usize) -> Joiner {
        Joiner {
            call: Arc::clone(self) as _,
            index,
        }
    }

    /// Those that are to be stored; the others are settled.
    fn decline(&self, indices: Vec<usize>, routes: &mut Routes) -> Vec<usize> {
        let core = &self.core;
        if core.learned.is_none() || core.saved.has(self.namespace) {
            return indices;
        }
        let keys: Vec<Key> = indices.iter().map(|at| self.keys[*at]).collect();
        let len = |at: usize| self.caller.bytes(indices[at]);
        let Some(declined) = core.declined(self.namespace, &keys, len) else {
            return indices;
        };
        let mut declined = declined.into_iter();
        let mut kept = indices;
        kept.retain(|at| {
            let is_declined = declined.next() == Some(true);
            if is_declined {
                routes.settled.push((*at, Outcome::Declined));
            }
            !is_declined
        });
        kept
    }

    /// What goes to which tier, near to far; the rest is settled.
    fn admit(&self, indices: Vec<usize>, routes: &mut Routes) -> Vec<Vec<Admitted>> {
        let core = &self.core;
        let mut wanted = Vec::with_capacity(core.tiers.len());
        wanted.resize_with(core.tiers.len(), Vec::new);
        for index in indices {
            if core.acknowledges_far() {
                let (id, key) = (self.namespace, &self.keys[index]);
                let stamp = self.stamps.of(index);
                let mut lasting = core.tiers[core.ack..].iter().filter_map(Stage::here);
                if lasting.any(|tier| tier.find_again(id, key, stamp).is_some()) {
                    routes.settled.push((index, Outcome::Done));
                    continue;
                }
            }
            let (identity, len) = (self.identity(index), self.caller.bytes(index));
            match core.entrance(&self.caller, &identity, len) {
                Ok((tier, share)) => {
                    let dues = Dues {
                        share,
                        ..Dues::default()
                    };
                    wanted[tier].push((index, dues));
                }
                Err(Shut::Stays(stays)) => routes.stay(index, stays),
                Err(Shut::Out(outcome)) => routes.settled.push((index, outcome)),
            }
        }
        wanted
    }

    /// Reserves in one tier of arenas; answers the keys that found no room.
    fn reserve(
        self: &Arc<Put>,
        tier: usize,
        arenas: &Arenas,
        wanted: Vec<Admitted>,
        routes: &mut Routes,
    ) -> Vec<usize> {
        let mut blocks = self.all_wanted(&wanted);
        let mut refused = Vec::new();
        let wanted = match tier {
            0 => self.reserve_unlocked(arenas, wanted, &mut blocks, routes, &mut refused),
            _ => wanted,
        };
        let mut left = wanted;
        while !left.is_empty() {
            left = self.reserve_or_join((tier, arenas), left, &blocks, routes, &mut refused);
            blocks = self.all_wanted(&left);
        }
        refused
    }

    /// Reserves in the nearest tier what nobody else has there, without the ledger: most calls
    /// need nothing of it. Answers the rest, of which `blocks` are left.
    fn reserve_unlocked(
        &self,
        near: &Arenas,
        wanted: Vec<Admitted>,
        blocks: &mut Vec<Wanted>,
        routes: &mut Routes,
        refused: &mut Vec<usize>,
    ) -> Vec<Admitted> {
        let core = &self.core;
        let through = core.acknowledges_far();
        let answers = near.reserve_waiting(self.namespace, blocks);
        core.evict_ahead(0);
        let (mut rest, mut left) = (Vec::new(), Vec::new());
        let each = wanted.into_iter().zip(answers).zip(&*blocks);
        for (((index, dues), answer), block) in each {
            match answer {
                Ok(place) => {
                    let spent = Spent::default();
                    let dues = Dues { spent, ..dues };
                    routes.copies.push((0, (index, place, dues)));
                }
                Err(Refused::Present(_)) if !through => {
                    core.note_touch(0, &self.identity(index), block.len);
                    routes.settled.push((index, Outcome::Done));
                }
                Err(Refused::Declined) => routes.settled.push((index, Outcome::Declined)),
                Err(Refused::Full(_)) => refused.push(index),
                Err(Refused::Present(_) | Refused::Reserved(_)) => {
                    rest.push((index, dues));
                    left.push(*block);
                }
            }
        }
        *blocks = left;
        rest
    }

    /// Reserves in a tier, and joins those who write the same keys, or wait for them. Answers the
    /// keys whose reservation by another call has ended before it was joined.
    fn reserve_or_join(
        self: &Arc<Put>,
        (tier, arenas): (usize, &Arenas),
        wanted: Vec<Admitted>,
        blocks: &[Wanted],
        routes: &mut Routes,
        refused: &mut Vec<usize>,
    ) -> Vec<Admitted> {
        let core = &self.core;
        let through = tier < core.ack;
        let answers = core.reserve_here(tier, arenas, self.namespace, blocks);
        // The same key may come again in this call, and join.
        let (mut given_up, mut again) = (Vec::new(), Vec::new());
        let mut ledger = core.ledger.lock();
        let each = wanted.into_iter().zip(answers).zip(blocks).enumerate();
        for (at, (((index, dues), answer), block)) in each {
            ledger.take_turns(at);
            match answer {
                Ok(reserved) => match core.spend(tier, reserved.len) {
                    Some(spent) => {
                        let dues = Dues { spent, ..dues };
                        routes.copies.push((tier, (index, reserved, dues)));
                    }
                    None => {
                        routes.unpaid.push((tier, index));
                        given_up.push(reserved);
                    }
                },
                Err(Refused::Present(token)) if through => {
                    let waiters = vec![self.waiter(index)];
                    match core.send_on(&mut ledger, tier, token, waiters) {
                        Sent::OnItsWay => routes.released += 1,
                        Sent::Stays(stays) => routes.stay(index, stays),
                        // Its space may be free.
                        Sent::Gone => again.push((index, dues)),
                    }
                }
                Err(Refused::Present(_)) => routes.settled.push((index, Outcome::Done)),
                Err(Refused::Reserved(_)) => {
                    let Some(token) = core.reserved_now(tier, self.namespace, block) else {
                        again.push((index, dues));
                        continue;
                    };
                    let closed = self.join(&mut ledger, tier, token, index);
                    let closed = closed.map(|index| (index, Outcome::Closed));
                    routes.settled.extend(closed);
                }
                Err(Refused::Declined) => routes.settled.push((index, Outcome::Declined)),
                Err(Refused::Full(_)) => refused.push(index),
            }
        }
        drop(ledger);
        core.give_up(tier, given_up);
        again
    }

    /// Joins whoever has reserved a block in this tier or a nearer one; answers the index where
    /// nobody can commit that any more.
    fn join(
        self: &Arc<Put>,
        ledger: &mut State,
        tier: usize,
        token: Token,
        index: usize,
    ) -> Option<usize> {
        let name = (self.core.tier_of(token).unwrap_or(tier), token);
        if ledger.closing && ledger.held.contains_key(&name) {
            return Some(index);
        }
        let joiners = ledger.joiners.entry(name).or_default();
        joiners.push(self.joiner(index));
        None
    }

    fn waiter(&self, index: usize) -> Waiter {
        Waiter {
            task: self.task.clone(),
            index,
            _turn: None,
        }
    }
}
