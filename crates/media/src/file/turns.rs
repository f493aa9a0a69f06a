//! Jobs that wait, in turn: one of each batch after the other, so that a small batch does not wait
//! for the end of a large one.

use std::collections::{HashMap, VecDeque};

pub(super) struct Turns<J> {
    batches: HashMap<usize, VecDeque<J>>,
    /// The batches that have jobs here; the first has the next turn.
    order: VecDeque<usize>,
}

impl<J> Turns<J> {
    /// Adds a job of a batch, behind the others of that.
    pub(super) fn push(&mut self, batch: usize, job: J) {
        let jobs = self.batches.entry(batch).or_default();
        if jobs.is_empty() {
            self.order.push_back(batch);
        }
        jobs.push_back(job);
    }

    pub(super) fn pop(&mut self) -> Option<J> {
        let batch = self.order.pop_front()?;
        let jobs = self.batches.get_mut(&batch)?;
        let job = jobs.pop_front();
        match jobs.is_empty() {
            true => drop(self.batches.remove(&batch)),
            false => self.order.push_back(batch),
        }
        job
    }
}

impl<J> Default for Turns<J> {
    fn default() -> Self {
        Self {
            batches: HashMap::new(),
            order: VecDeque::new(),
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
        assert!(turns.batches.is_empty(), "what has ended is forgotten");
    }
}
