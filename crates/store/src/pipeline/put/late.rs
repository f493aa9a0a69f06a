//! Room for the blocks of a put in a tier that may answer late, step by step.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use kvdepot_arena::Refused;
use kvdepot_arena::held::turn_len;

use super::{Admitted, Put, Routes};
use crate::pipeline::ledger::{Dues, Joins, Written};
use crate::pipeline::turns::{Turn, in_turns};
use crate::task::Outcome;
use crate::tier::{Answer, Apart, Permits};

impl Put {
    /// Reserves in an asynchronous tier. Calls of this process for the same keys join the first
    /// call, or the one that writes these keys to an upper tier; the tier handles other processes.
    /// Blocks that the tier rejects skip it if `further` is true.
    pub(super) fn reserve_late(
        self: &Arc<Put>,
        tier: usize,
        apart: &Apart,
        wanted: Vec<Admitted>,
        further: bool,
    ) {
        let mut mine = Vec::with_capacity(wanted.len());
        let mut closed = Vec::new();
        let mut wanted = wanted.into_iter().peekable();
        while wanted.peek().is_some() {
            // Others have the ledger in between.
            let turn: Vec<Admitted> = wanted.by_ref().take(turn_len()).collect();
            let blocks = self.all_wanted(&turn);
            let mut ledger = self.core.ledger.lock();
            let nearer = self.core.reserved_nearer(tier, self.namespace, &blocks);
            for ((index, dues), nearer) in turn.into_iter().zip(nearer) {
                if let Some(Refused::Reserved(token)) = nearer {
                    closed.extend(self.join(&mut ledger, tier, token, index));
                    continue;
                }
                let name = (tier, self.identity(index));
                match ledger.written.entry(name) {
                    Entry::Occupied(mut others) => {
                        others.get_mut().joiners.push(self.joiner(index));
                    }
                    Entry::Vacant(vacant) => {
                        vacant.insert(Written::default());
                        mine.push((index, dues));
                    }
                }
            }
        }
        closed
            .into_iter()
            .for_each(|index| self.refuse(index, Outcome::Closed));
        // By steps: a tier may have to wait until it has what a question needs, such as open files,
        // and those of the steps before are released by then.
        let put = Arc::clone(self);
        in_turns(mine, apart.step_max(), move |step, turn| {
            put.ask_for_room(tier, step, further, turn);
        });
    }

    /// Reserves in an asynchronous tier what this call has claimed there.
    fn ask_for_room(self: &Arc<Put>, tier: usize, mine: Vec<Admitted>, further: bool, turn: Turn) {
        let Some(apart) = self.core.tiers[tier].apart() else {
            return;
        };
        let put = Arc::clone(self);
        let slots = match turn.is_over() || self.core.gate.hurries() {
            true => Answer::Now(None),
            false => apart.take_for_moves(self.caller.seat(), mine.len()),
        };
        slots.then(move |slots| put.ask_with(slots, tier, mine, (further, turn)));
    }

    /// The same with the slots that the call has there: `None` if nothing is to be asked, and none
    /// inside if it got no slots.
    fn ask_with(
        self: &Arc<Put>,
        slots: Option<Option<Permits>>,
        tier: usize,
        mine: Vec<Admitted>,
        (further, turn): (bool, Turn),
    ) {
        let Some(apart) = self.core.tiers[tier].apart() else {
            return;
        };
        let put = Arc::clone(self);
        // One that gets no slots has waited for as long as a lookup may take.
        let limit = match &slots {
            Some(None) => apart.lookup_limit(),
            _ => apart.limit(),
        };
        if let Some(Some(_)) = &slots {
            turn.begins();
        }
        let wanted = self.all_wanted(&mine);
        let answer = match &slots {
            None => Answer::Now(None),
            Some(Some(_)) => apart.reserve(self.namespace, &wanted),
            Some(None) => {
                let cause = apart.no_moved();
                let refused = wanted.iter().map(|one| Err(apart.no_slots(one.len, cause)));
                Answer::Now(Some(refused.collect()))
            }
        };
        let mut slots = slots.flatten();
        answer.then(move |answers| {
            let mut routes = Routes::default();
            let goes_on = further && put.core.goes_on(tier);
            let answered = answers.is_some();
            let mut answers = answers.unwrap_or_default().into_iter();
            let (mut refused, mut ended) = (Vec::new(), Vec::new());
            for (index, dues) in mine {
                match answers.next() {
                    Some(Ok(reserved)) => match put.core.spend(tier, reserved.len) {
                        Some(spent) => {
                            let dues = Dues {
                                spent,
                                _slot: slots.as_mut().and_then(Permits::take),
                                ..dues
                            };
                            routes.copies.push((tier, (index, reserved, dues)));
                            continue;
                        }
                        None => routes.unpaid.push((tier, index)),
                    },
                    // It is acknowledged further away.
                    Some(Err(Refused::Present(_))) if goes_on && tier < put.core.ack => {
                        refused.push(index);
                    }
                    Some(Err(Refused::Present(_))) if tier < put.core.ack => {
                        routes.settled.push((index, Outcome::Declined));
                    }
                    Some(Err(Refused::Present(_))) => routes.settled.push((index, Outcome::Done)),
                    Some(Err(Refused::Declined)) => {
                        routes.settled.push((index, Outcome::Declined));
                    }
                    _ if goes_on => refused.push(index),
                    _ if !further => routes.settled.push((index, Outcome::Declined)),
                    // Another process writes it, which may fail.
                    Some(Err(Refused::Reserved(_))) => {
                        routes.settled.push((index, Outcome::Dropped));
                    }
                    Some(Err(_)) if answered && !put.core.gate.hurries() => {
                        routes.settled.push((index, Outcome::Full));
                    }
                    _ => routes.settled.push((index, put.core.lost())),
                }
                ended.push(put.identity(index));
            }
            put.core.resolve_late(tier, &ended);
            let refused = match goes_on {
                true => put.pass_by(tier, refused, &mut routes),
                false => Vec::new(),
            };
            if routes.copies.is_empty() {
                turn.came_to_nothing(limit);
            }
            put.place_beyond(tier + 1, refused, routes);
            drop(turn);
        });
    }
}
