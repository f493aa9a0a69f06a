//! Steps of a call that asynchronous tiers answer: a few are in flight at a time. So calls of few
//! keys get their turn between the steps of a large one, and a step's time limit begins when the
//! tiers can turn to it. If a step comes to nothing within its limit, the steps after it end at
//! once: a call takes no longer than one limit without progress.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use parking_lot::Mutex;

/// Steps of a call that are in flight: as many as hide the time that a tier takes to answer.
const IN_FLIGHT: usize = 4;

/// The most blocks that are planned in one go: so many that handing them over costs nothing to
/// speak of, and at 16 KiB a block enough to fill slices.
pub(super) const STEP_MAX: usize = 512;

/// The fewest, unless there are no more.
const STEP_MIN: usize = 32;

/// Cuts a call into steps, so that its lookups, its copies and what follows them overlap: the
/// lanes copy one step while the next is looked up and planned. The first steps are short, because
/// the lanes wait for them, and so are the last ones, because the caller waits for what follows
/// their copies. No step has more than `most` blocks.
pub(super) fn steps(count: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let most = most.clamp(1, STEP_MAX);
    let mut begin = 0;
    std::iter::from_fn(move || {
        let left = count - begin;
        let step = begin
            .min(left / 2)
            .clamp(STEP_MIN.min(most), most)
            .min(left);
        begin += step;
        (step > 0).then_some(begin - step..begin)
    })
}

/// Has `ask` ask a tier for one step after the other, and wait for the answers. It returns false if
/// the answer is nothing; `None` ends the call. As with turns, nothing within `limit` ends it too.
pub(super) fn in_row(
    steps: impl Iterator<Item = Range<usize>>,
    limit: Duration,
    mut ask: impl FnMut(Range<usize>) -> Option<bool>,
) {
    for step in steps {
        let begun = clock::now();
        match ask(step) {
            Some(found) if found || clock::since(begun) < limit => {}
            _ => return,
        }
    }
}

/// The steps of a call.
struct Turns<S> {
    left: Mutex<Box<dyn Iterator<Item = S> + Send>>,
    start: Box<dyn Fn(S, Turn) + Send + Sync>,
    /// Whether a step came to nothing within its limit.
    is_over: Arc<AtomicBool>,
}

/// A step that is in flight. The next one starts when this is dropped.
pub(super) struct Turn {
    next: Option<Box<dyn FnOnce() + Send + Sync>>,
    begun: Mutex<Instant>,
    is_over: Arc<AtomicBool>,
}

impl Turn {
    /// Whether the tiers are not to be asked any more.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Notes that a tier is asked now: the step has waited for others until then.
    pub(super) fn begins(&self) {
        *self.begun.lock() = clock::now();
    }

    /// Notes that a tier with that limit has answered the step with nothing.
    pub(super) fn came_to_nothing(&self, limit: Duration) {
        if clock::since(*self.begun.lock()) >= limit {
            self.is_over.store(true, Ordering::Release);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(next) = self.next.take() {
            next();
        }
    }
}

/// Has `start` begin the steps of these, each of `most` at most. It drops the turn once the tiers
/// have answered the step.
pub(super) fn in_turns<T: Send + 'static>(
    items: Vec<T>,
    most: usize,
    start: impl Fn(Vec<T>, Turn) + Send + Sync + 'static,
) {
    let steps = steps(items.len(), most);
    let mut items = items.into_iter();
    let steps = steps.map(move |step| items.by_ref().take(step.len()).collect());
    begin(IN_FLIGHT, steps, start);
}

/// Has `start` begin each of these steps when the one before has dropped its turn.
pub(super) fn one_by_one<S: Send + 'static>(
    steps: impl Iterator<Item = S> + Send + 'static,
    start: impl Fn(S, Turn) + Send + Sync + 'static,
) {
    begin(1, steps, start);
}

fn begin<S: Send + 'static>(
    in_flight: usize,
    steps: impl Iterator<Item = S> + Send + 'static,
    start: impl Fn(S, Turn) + Send + Sync + 'static,
) {
    let turns = Arc::new(Turns {
        left: Mutex::new(Box::new(steps)),
        start: Box::new(start),
        is_over: Arc::default(),
    });
    (0..in_flight).for_each(|_| turns.go_on());
}

impl<S: Send + 'static> Turns<S> {
    fn go_on(self: &Arc<Turns<S>>) {
        loop {
            let Some(step) = self.left.lock().next() else {
                return;
            };
            // Set by the first of the two: the end of the step, and of the call that starts it.
            let ended = Arc::new(AtomicBool::new(false));
            let (turns, was_started) = (Arc::clone(self), Arc::clone(&ended));
            let next = move || {
                if was_started.swap(true, Ordering::AcqRel) {
                    turns.go_on();
                }
            };
            let turn = Turn {
                next: Some(Box::new(next)),
                begun: Mutex::new(clock::now()),
                is_over: Arc::clone(&self.is_over),
            };
            // The steps after one that panics run in its unwinding.
            let start = AssertUnwindSafe(|| (self.start)(step, turn));
            if catch_unwind(start).is_err() {
                tracing::error!("internal error: a step of a call panicked; the call failed");
            }
            if !ended.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_steps_are_in_flight_and_each_starts_once() {
        for answers_at_once in [true, false] {
            let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
            let held: Arc<Mutex<Vec<Turn>>> = Arc::default();
            let (notes, holds) = (Arc::clone(&seen), Arc::clone(&held));
            begin(IN_FLIGHT, 0..100_000, move |step, turn| {
                notes.lock().push(step);
                match answers_at_once {
                    true => drop(turn),
                    false => holds.lock().push(turn),
                }
            });
            let mut ended: usize = 0;
            while let Some(turn) = { held.lock().pop() } {
                assert_eq!(seen.lock().len(), (ended + IN_FLIGHT).min(100_000));
                drop(turn);
                ended += 1;
            }
            assert_eq!(*seen.lock(), Vec::from_iter(0..100_000));
        }
    }

    #[test]
    fn steps_behind_one_that_came_to_nothing_within_its_limit_ask_nobody() {
        for limit in [Duration::ZERO, Duration::from_secs(3600)] {
            let asked: Arc<Mutex<Vec<u32>>> = Arc::default();
            let notes = Arc::clone(&asked);
            begin(IN_FLIGHT, 0..100, move |step, turn| {
                if !turn.is_over() {
                    notes.lock().push(step);
                    turn.came_to_nothing(limit);
                }
            });
            let expected = if limit.is_zero() { 0..1 } else { 0..100 };
            assert_eq!(*asked.lock(), Vec::from_iter(expected));
        }
    }

    #[test]
    fn a_step_that_panics_keeps_no_other_from_its_turn() {
        let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
        let notes = Arc::clone(&seen);
        begin(IN_FLIGHT, 0..10, move |step, _turn| {
            notes.lock().push(step);
            assert!(step % 2 == 0, "an odd step");
        });
        assert_eq!(*seen.lock(), Vec::from_iter(0..10));
    }

    #[test]
    fn steps_cover_a_call_once_short_at_both_ends() {
        let counts = [0, 1, 31, 32, 33, 500, 4096, 100_000];
        let each = counts.map(|count| [usize::MAX, 100, 8].map(|most| (count, most)));
        for (count, most) in each.into_iter().flatten() {
            let steps: Vec<Range<usize>> = steps(count, most).collect();
            assert!(
                steps
                    .iter()
                    .map(Range::len)
                    .all(|len| (1..=STEP_MAX.min(most)).contains(&len))
            );
            let ends = steps.iter().map(|step| step.end);
            let begins = steps.iter().map(|step| step.start);
            assert!(
                begins.eq(std::iter::once(0)
                    .filter(|_| count > 0)
                    .chain(ends.take(steps.len().saturating_sub(1))))
            );
            assert_eq!(steps.last().map_or(0, |step| step.end), count);
        }
        let lens: Vec<usize> = steps(1000, STEP_MAX).map(|step| step.len()).collect();
        assert_eq!(lens, [32, 32, 64, 128, 256, 244, 122, 61, 32, 29]);
    }
}
