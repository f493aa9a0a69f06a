//! Jobs that wait, in turn: one of each call after the other, so that a small call does not wait
//! for the end of a large one.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Empty queues of calls that are kept, so that the next calls allocate none.
const SPARE: usize = 4;

pub(crate) struct Turns<J, C = usize> {
    calls: HashMap<C, VecDeque<J>>,
    /// The calls that have jobs here; the first has the next turn.
    order: VecDeque<C>,
    spare: Vec<VecDeque<J>>,
}

impl<J, C: Copy + Eq + Hash> Turns<J, C> {
    /// Adds a job of a call, behind the others of that call.
    pub(crate) fn push(&mut self, call: C, job: J) {
        let spare = &mut self.spare;
        let new = || spare.pop().unwrap_or_default();
        let jobs = self.calls.entry(call).or_insert_with(new);
        if jobs.is_empty() {
            self.order.push_back(call);
        }
        jobs.push_back(job);
    }

    pub(crate) fn pop(&mut self) -> Option<J> {
        self.pop_if(|_, _| true)
    }

    /// Takes the first job of the first call for which `may` returns true.
    pub(crate) fn pop_if(&mut self, may: impl Fn(C, &J) -> bool) -> Option<J> {
        let first = |call: &C| self.calls.get(call).and_then(VecDeque::front);
        let is_next = |call: &C| first(call).is_some_and(|job| may(*call, job));
        let at = self.order.iter().position(is_next)?;
        let call = self.order.remove(at)?;
        let jobs = self.calls.get_mut(&call)?;
        let job = jobs.pop_front();
        match jobs.is_empty() {
            true => self.end(call),
            false => self.order.push_back(call),
        }
        job
    }

    /// Forgets a call that has no jobs.
    fn end(&mut self, call: C) {
        let empty = self.calls.remove(&call);
        let kept = empty.filter(|_| self.spare.len() < SPARE);
        self.spare.extend(kept);
    }

    /// Takes out all jobs for which `is_over` returns true.
    pub(crate) fn extract(&mut self, is_over: impl Fn(&J) -> bool) -> Vec<J> {
        let mut over = Vec::new();
        for jobs in self.calls.values_mut() {
            let (out, left): (VecDeque<J>, _) =
                std::mem::take(jobs).into_iter().partition(&is_over);
            over.extend(out);
            *jobs = left;
        }
        self.calls.retain(|_, jobs| !jobs.is_empty());
        self.order.retain(|call| self.calls.contains_key(call));
        over
    }
}

impl<J, C> Default for Turns<J, C> {
    fn default() -> Self {
        Self {
            calls: HashMap::new(),
            order: VecDeque::new(),
            spare: Vec::new(),
        }
    }
}

/// Bytes that each call has under way, of which one call has at most a part.
#[derive(Default)]
pub(crate) struct UnderWay(HashMap<usize, usize>);

impl UnderWay {
    /// Whether a call may have `bytes` more, up to `most`. A call that has none may.
    pub(crate) fn may_have(&self, call: usize, bytes: usize, most: usize) -> bool {
        self.0.get(&call).is_none_or(|has| has + bytes <= most)
    }

    pub(crate) fn begin(&mut self, call: usize, bytes: usize) {
        *self.0.entry(call).or_default() += bytes;
    }

    pub(crate) fn end(&mut self, call: usize, bytes: usize) {
        if let Some(has) = self.0.get_mut(&call) {
            *has -= bytes;
            if *has == 0 {
                self.0.remove(&call);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_batch_has_its_turn_among_the_jobs_of_a_large_one() {
        let mut turns = Turns::default();
        for job in 0..1000 {
            turns.push(7, (7, job));
        }
        assert_eq!(turns.pop(), Some((7, 0)));
        turns.push(8, (8, 0));
        turns.push(8, (8, 1));
        let next: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        let expected = [(7, 1), (8, 0), (7, 2), (8, 1), (7, 3), (7, 4)];
        assert_eq!(next[..6], expected);
        assert_eq!(next.len(), 1001);
        assert!(turns.calls.is_empty(), "what has ended is forgotten");
    }

    #[test]
    fn jobs_that_are_over_are_taken_out_and_the_others_keep_their_turns() {
        let mut turns = Turns::default();
        for job in 0..4 {
            turns.push(7, (7, job));
            turns.push(8, (8, job));
        }
        let mut over = turns.extract(|(call, job)| *call == 8 || *job == 1);
        over.sort_unstable();
        assert_eq!(over, [(7, 1), (8, 0), (8, 1), (8, 2), (8, 3)]);
        let next: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(next, [(7, 0), (7, 2), (7, 3)]);
        assert!(turns.order.is_empty());
    }

    #[test]
    fn a_call_has_a_part_of_what_is_under_way_and_others_find_the_rest() {
        let (mut turns, mut under_way) = (Turns::default(), UnderWay::default());
        (0..100).for_each(|_| turns.push(7, 10));
        // Larger than a part: it goes alone.
        turns.push(8, 50);
        let mut next = |under_way: &mut UnderWay, call: usize| {
            let job = turns.pop_if(|of, job| of == call && under_way.may_have(of, *job, 40));
            job.inspect(|job| under_way.begin(call, *job)).is_some()
        };
        let begun = (0..100).filter(|_| next(&mut under_way, 7)).count();
        assert_eq!(begun, 4);
        assert!(next(&mut under_way, 8));
        under_way.end(7, 10);
        assert!(next(&mut under_way, 7) && !next(&mut under_way, 7));
        (0..4).for_each(|_| under_way.end(7, 10));
        under_way.end(8, 50);
        assert!(under_way.0.is_empty(), "what has ended is forgotten");
    }
}
