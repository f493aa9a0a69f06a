//! Puts: admit, reserve, copy, commit, and on to the far tier.

use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::held::Guard;
use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{
    Error, Key, NamespaceId, Place, Refused, Reserved, Stamps, Token, Wanted, clock, parts,
};
use kvdepot_media::{Checksum, Done};

use super::budget::Share;
use super::caller::{Caller, Lanes};
use super::ledger::{Joiner, State, Waiter};
use super::{Core, steps};
use crate::buffers::BlockBuffers;
use crate::config::Overload;
use crate::metrics::Op;
use crate::task::{Outcome, Task};

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

/// Room for a block of the call, its index, and in a near tier what it has of the queue.
type Copy = (usize, Reserved, Option<Share>);

/// Index of a block that wants room, and what it has of the queue.
type Admitted = (usize, Option<Share>);

/// Where the keys of a call go.
#[derive(Default)]
struct Routes {
    /// Indices whose blocks were reserved, by tier.
    copies: [Vec<Copy>; 2],
    /// Indices that have their outcome without a copy.
    settled: Vec<(usize, Outcome)>,
    /// Indices that wait for the far tier; their buffers are not needed any more.
    released: usize,
}

impl Core {
    /// Starts a put. The copies run on the lanes.
    pub(crate) fn put(
        self: &Arc<Core>,
        namespace: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        buffers.check(keys.len(), false)?;
        let caller = Caller::Here(buffers);
        let task = self.begin(Op::Put, keys.len(), &caller, None);
        self.start_put(pass, namespace, keys, caller, &task);
        Ok(task)
    }

    /// Starts a put whose bytes are moved from where `caller` says.
    pub fn start_put(
        self: &Arc<Core>,
        pass: Pass,
        namespace: NamespaceId,
        keys: Vec<Key>,
        caller: Caller,
        task: &Task,
    ) {
        let put = Put {
            core: Arc::clone(self),
            namespace,
            stamps: self.uses.call(keys.len()),
            keys,
            caller,
            task: task.clone(),
            _pass: pass,
        };
        let all = (0..put.keys.len()).collect();
        Put::start(&Arc::new(put), all);
    }
}

impl Put {
    /// Routes these keys and starts their copies.
    fn start(self: &Arc<Put>, indices: Vec<usize>) {
        let routes = self.route(indices);
        for (_, outcome) in &routes.settled {
            self.core.metrics.put_outcome(*outcome);
        }
        self.task.settle(routes.settled);
        self.task.release(routes.released);
        for (tier, copies) in routes.copies.into_iter().enumerate() {
            let count = copies.len();
            let mut copies = copies.into_iter();
            for step in steps(count) {
                self.copy(tier, copies.by_ref().take(step.len()).collect());
            }
        }
    }

    fn route(self: &Arc<Put>, indices: Vec<usize>) -> Routes {
        let core = &self.core;
        let mut routes = Routes::default();
        let indices = self.decline(indices, &mut routes);
        let (near, mut far) = self.admit(indices, &mut routes);
        if core.far().is_some() && !routes.settled.is_empty() {
            let there = routes.settled.iter();
            let there = there.filter(|(_, outcome)| *outcome != Outcome::Declined);
            let used = |(at, _): &(usize, Outcome)| (&self.keys[*at], self.stamps.of(*at));
            core.near().touch(self.namespace, there.map(used));
        }
        let refused = self.reserve(0, near, &mut routes);
        for (index, outcome) in refused {
            if core.far().is_some() && core.overload == Overload::Wait {
                far.push((index, None));
            } else {
                routes.settled.push((index, outcome));
            }
        }
        if core.far().is_some() {
            far.sort_unstable_by_key(|(index, _)| *index);
            let refused = self.reserve(1, far, &mut routes);
            routes.settled.extend(refused);
        }
        routes
    }

    /// Those that are to be stored; the others are settled.
    fn decline(&self, indices: Vec<usize>, routes: &mut Routes) -> Vec<usize> {
        let core = &self.core;
        if core.learned.is_none() {
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

    /// What goes to the near tier and what at once to the far one; the rest is settled.
    fn admit(&self, indices: Vec<usize>, routes: &mut Routes) -> (Vec<Admitted>, Vec<Admitted>) {
        let core = &self.core;
        let seat = self.caller.seat();
        let mut near = Vec::new();
        let mut far = Vec::new();
        for index in indices {
            let len = self.caller.bytes(index);
            let Some(tier) = core.far() else {
                near.push((index, None));
                continue;
            };
            let stamp = self.stamps.of(index);
            if tier
                .find_again(self.namespace, &self.keys[index], stamp)
                .is_some()
            {
                routes.settled.push((index, Outcome::Done));
            } else if core.bypasses(len) {
                far.push((index, None));
            } else if let Some(share) = core.budget.admit(seat, len) {
                near.push((index, Some(share)));
            } else if core.overload == Overload::Wait {
                // At the far tier's speed: that is how a full queue delays.
                far.push((index, None));
            } else {
                routes.settled.push((index, Outcome::Dropped));
            }
        }
        (near, far)
    }

    /// Reserves in one tier; answers the keys that found no room.
    fn reserve(
        self: &Arc<Put>,
        tier: usize,
        wanted: Vec<Admitted>,
        routes: &mut Routes,
    ) -> Vec<(usize, Outcome)> {
        if wanted.is_empty() {
            return Vec::new();
        }
        let room = |(index, _): &Admitted| Wanted {
            key: self.keys[*index],
            len: self.caller.bytes(*index),
            parts: 1,
            stamp: self.stamps.of(*index),
            copy: false,
            evict: true,
        };
        let mut blocks: Vec<Wanted> = wanted.iter().map(room).collect();
        let mut refused = Vec::new();
        let wanted = match tier {
            0 => self.reserve_unlocked(wanted, &mut blocks, routes, &mut refused),
            _ => wanted,
        };
        if !wanted.is_empty() {
            self.reserve_or_join(tier, wanted, &blocks, routes, &mut refused);
        }
        refused
    }

    /// Reserves in the nearest tier what nobody else has there, without the ledger: most calls
    /// need nothing of it. Answers the rest, of which `blocks` are left.
    fn reserve_unlocked(
        &self,
        wanted: Vec<Admitted>,
        blocks: &mut Vec<Wanted>,
        routes: &mut Routes,
        refused: &mut Vec<(usize, Outcome)>,
    ) -> Vec<Admitted> {
        let core = &self.core;
        let through = core.far().is_some();
        let answers = core.near().reserve_waiting(self.namespace, blocks);
        core.evict_ahead(0);
        let (mut rest, mut left) = (Vec::new(), Vec::new());
        let each = wanted.into_iter().zip(answers).zip(&*blocks);
        for (((index, share), answer), block) in each {
            match answer {
                Ok(place) => routes.copies[0].push((index, place, share)),
                Err(Refused::Present(_)) if !through => {
                    routes.settled.push((index, Outcome::Done));
                }
                Err(Refused::Declined) => routes.settled.push((index, Outcome::Declined)),
                Err(Refused::Full(_)) => refused.push((index, Outcome::Full)),
                Err(Refused::Present(_) | Refused::Reserved(_)) => {
                    rest.push((index, share));
                    left.push(*block);
                }
            }
        }
        *blocks = left;
        rest
    }

    /// Reserves in a tier, and joins those who write the same keys, or wait for them.
    fn reserve_or_join(
        self: &Arc<Put>,
        tier: usize,
        wanted: Vec<Admitted>,
        blocks: &[Wanted],
        routes: &mut Routes,
        refused: &mut Vec<(usize, Outcome)>,
    ) {
        let core = &self.core;
        let through = tier == 0 && core.far().is_some();
        let (mut ledger, answers) = core.reserve_locked(tier, self.namespace, blocks);
        for ((index, share), answer) in wanted.into_iter().zip(answers) {
            match answer {
                Ok(place) => routes.copies[tier].push((index, place, share)),
                Err(Refused::Present(token)) if through => {
                    if core.send_far(&mut ledger, token, vec![self.waiter(index)]) {
                        routes.released += 1;
                    } else {
                        refused.push((index, Outcome::Full));
                    }
                }
                Err(Refused::Present(_)) => routes.settled.push((index, Outcome::Done)),
                Err(Refused::Reserved(token)) => {
                    let name = (core.tier_of(token).unwrap_or(tier), token);
                    if ledger.closing && ledger.held.contains_key(&name) {
                        routes.settled.push((index, Outcome::Closed));
                        continue;
                    }
                    let joiner = Joiner {
                        put: Arc::clone(self),
                        index,
                    };
                    ledger.joiners.entry(name).or_default().push(joiner);
                }
                Err(Refused::Declined) => routes.settled.push((index, Outcome::Declined)),
                Err(Refused::Full(_)) => refused.push((index, Outcome::Full)),
            }
        }
    }

    /// Ends a key that was not copied.
    pub(super) fn refuse(&self, index: usize, outcome: Outcome) {
        self.core.metrics.put_outcome(outcome);
        self.task.settle([(index, outcome)]);
    }

    fn waiter(&self, index: usize) -> Waiter {
        Waiter {
            task: self.task.clone(),
            index,
        }
    }

    fn copy(self: &Arc<Put>, tier: usize, copies: Vec<Copy>) {
        let core = &self.core;
        let buffers = match &self.caller {
            Caller::Here(buffers) => buffers,
            Caller::There { lanes, .. } => return self.copy_there(lanes.as_ref(), tier, copies),
        };
        let devices = core.tiers[tier].devices();
        let mut batch = core.copier.batch();
        let mut verdicts = Verdicts::new(Bytes::New, copies.len());
        let planned = copies
            .iter()
            .enumerate()
            .try_for_each(|(tag, (index, place, _))| {
                let mapping = devices.mapping(place.token)?;
                let target = parts::buffers(&mapping, &place.extents, 0, place.len)?;
                let id = parts::part_id(&place.identity, 0, 1);
                batch.part(&id, buffers.pieces(*index), &target, None, tag as u32)?;
                verdicts.planned(tag, 1);
                Ok::<(), Error>(())
            });
        if let Err(error) = planned {
            tracing::error!(%error, "a put could not be planned");
            let failed = vec![Moved::Failed; copies.len()];
            self.finish(tier, copies, &failed);
            return;
        }
        let started = clock::now();
        let put = Arc::clone(self);
        let done = move |done: &mut Done<'_>| {
            verdicts.count(done);
            put.core.metrics.moved(Op::Put, tier, started);
            put.finish(tier, copies, &verdicts.all());
        };
        let _ticket = core.copier.submit(batch, done);
    }

    /// Has another process's lanes copy.
    fn copy_there(self: &Arc<Put>, lanes: &dyn Lanes, tier: usize, mut copies: Vec<Copy>) {
        // Like those of the two-phase verbs: nobody knows when they end.
        let handed = copies.iter_mut();
        let handed = handed.map(|(index, reserved, _)| (*index, reserved.hand_out()));
        let blocks: Vec<(usize, Place)> = handed.collect();
        let held: Vec<_> = blocks.iter().map(|(_, at)| (tier, at.token)).collect();
        let names = held.iter().map(|name| (*name, None));
        self.core.ledger.lock().held.extend(names);
        let started = clock::now();
        let put = Arc::clone(self);
        let done = move |moved: &[Moved]| {
            put.core.metrics.moved(Op::Put, tier, started);
            put.finish(tier, copies, moved);
            let mut ledger = put.core.ledger.lock();
            // What was given up stays reserved: nobody joins it.
            let ended = held.iter().zip(moved);
            for (name, _) in ended.filter(|(_, moved)| **moved != Moved::Abandoned) {
                ledger.held.remove(name);
            }
        };
        lanes.move_blocks(&blocks, Box::new(done));
    }

    /// All copies into one tier have stopped.
    fn finish(self: &Arc<Put>, tier: usize, copies: Vec<Copy>, moved: &[Moved]) {
        let core = &self.core;
        let into = &core.tiers[tier];
        let through = tier == 0 && core.far().is_some();
        let mut written = Vec::new();
        let mut failed = Vec::new();
        let mut places: Vec<(usize, Place, Option<Share>)> = Vec::with_capacity(copies.len());
        for ((index, mut reserved, share), moved) in copies.into_iter().zip(moved) {
            places.push((index, *reserved, share));
            match moved {
                Moved::Done(checksum) => written.push((reserved, *checksum)),
                Moved::Corrupt | Moved::Failed => failed.push(reserved.hand_out().token),
                Moved::Abandoned => {
                    reserved.hand_out();
                }
            }
        }
        let copies = places;
        let mut stored = into.commit(written, through).into_iter();
        into.abort(&failed);
        // What the medium could not take failed too.
        let checksums: Vec<Option<Checksum>> = moved
            .iter()
            .map(|moved| match moved {
                Moved::Done(checksum) => stored.next().filter(|ok| *ok).map(|_| *checksum),
                _ => None,
            })
            .collect();
        let ended: Vec<Token> = copies.iter().map(|(_, place, _)| place.token).collect();
        let mut settled = Vec::new();
        let keys = copies.iter().map(|(_, place, _)| &place.identity.key);
        core.fetch_known(self.namespace, keys);
        {
            let is_queued = |(_, _, share): &(usize, Place, Option<Share>)| share.is_some();
            let mut ledger = copies.iter().any(is_queued).then(|| core.ledger.lock());
            for ((index, place, share), checksum) in copies.into_iter().zip(checksums) {
                if checksum.is_some() {
                    core.note_stored(self.namespace, &place.identity.key, place.len);
                }
                match (checksum, share.zip(ledger.as_mut())) {
                    (Some(checksum), Some((share, ledger))) => {
                        let place = Place { checksum, ..place };
                        let waiters = vec![self.waiter(index)];
                        core.write_back_later(ledger, place, share, waiters);
                    }
                    (Some(_), None) => settled.push((index, Outcome::Done)),
                    (None, _) => settled.push((index, Outcome::Dropped)),
                }
            }
        }
        let released = ended.len() - settled.len();
        for (_, outcome) in &settled {
            core.metrics.put_outcome(*outcome);
        }
        self.task.settle(settled);
        self.task.release(released);
        core.resolve(tier, &ended);
    }
}

impl Core {
    /// Reserves room in a tier, and comes back with the ledger, so that the caller registers with
    /// the reservations of others before they can end. What must go first goes while the ledger is
    /// free. A key that is being written to a nearer tier is not written here, too: the queue may
    /// have filled between two calls. (The other way round it is: whoever comes second need not
    /// keep its buffers until the first has committed.)
    pub(super) fn reserve_locked(
        &self,
        tier: usize,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> (Guard<'_, State>, Vec<Result<Reserved, Refused>>) {
        let into = &self.tiers[tier];
        let mut spaces = None;
        let mut elsewhere = vec![None; blocks.len()];
        let mut wanted: Vec<Wanted> = blocks.to_vec();
        loop {
            let ledger = self.ledger.lock();
            let now = self.reserved_nearer(tier, namespace, blocks);
            if now != elsewhere {
                // What was made room for may be another selection of them.
                spaces = None;
                let here = blocks.iter().zip(&now).filter(|(_, there)| there.is_none());
                wanted = here.map(|(wanted, _)| *wanted).collect();
                elsewhere = now;
            }
            if let Some(answers) = into.reserve(namespace, &wanted, spaces.take()) {
                self.evict_ahead(tier);
                let mut answers = answers.into_iter();
                let each = elsewhere.into_iter();
                let answers = each.filter_map(|there| match there {
                    Some(refused) => Some(Err(refused)),
                    None => answers.next(),
                });
                return (ledger, answers.collect());
            }
            drop(ledger);
            spaces = Some(into.make_room(namespace, &wanted));
        }
    }

    /// Which of these blocks are being written to a nearer tier than this one.
    fn reserved_nearer(
        &self,
        tier: usize,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Option<Refused>> {
        let mut answers = vec![None; blocks.len()];
        for nearer in &self.tiers[..tier] {
            nearer.reserved(namespace, blocks, &mut answers);
        }
        answers
    }

    /// The tier that made a token.
    fn tier_of(&self, token: Token) -> Option<usize> {
        self.tiers.iter().position(|tier| tier.made(token))
    }

    /// Sees to it that a block that is published in the near tier is on its way to the far one,
    /// where it is not. False when it is gone again.
    pub(super) fn send_far(&self, ledger: &mut State, token: Token, waiters: Vec<Waiter>) -> bool {
        if let Some(others) = ledger.waiting.get_mut(&token) {
            others.waiters.extend(waiters);
            return true;
        }
        // Published, and neither far nor on its way: its write-back had failed.
        let Some(place) = self.near().pin_token(token) else {
            return false;
        };
        // Whoever put it, it goes on by itself.
        let share = self.budget.take(0, place.len);
        self.write_back_later(ledger, place, share, waiters);
        true
    }

    /// Puts a block of the near tier on its way to the far one. It comes with a pin, which is
    /// given back when it is on its way already, and with what it has of the queue.
    pub(super) fn write_back_later(
        &self,
        ledger: &mut State,
        place: Place,
        share: Share,
        waiters: Vec<Waiter>,
    ) {
        if !self.ledger.enqueue(ledger, place, share, waiters) {
            self.near().unpin([place.token].into_iter());
        }
    }

    /// Ends reservations for those who joined them: each starts over, finds the block published
    /// and shares its fate, or takes over if it is gone.
    pub(super) fn resolve(&self, tier: usize, ended: &[Token]) {
        let joiners: Vec<Joiner> = {
            let mut ledger = self.ledger.lock();
            if ledger.joiners.is_empty() {
                return;
            }
            let of = ended
                .iter()
                .filter_map(|token| ledger.joiners.remove(&(tier, *token)));
            of.flatten().collect()
        };
        for joiner in joiners {
            joiner.put.start(vec![joiner.index]);
        }
    }
}
