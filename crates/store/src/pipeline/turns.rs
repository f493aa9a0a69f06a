//! Steps of a call that asynchronous tiers answer: a few are in flight at a time. So calls of few
//! keys get their turn between the steps of a large one, and a step's time limit begins when the
//! tiers can turn to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Steps of a call that are in flight: as many as hide the time that a tier takes to answer.
const IN_FLIGHT: usize = 4;

/// The steps of a call.
struct Turns<S> {
    left: Mutex<Box<dyn Iterator<Item = S> + Send>>,
    start: Box<dyn Fn(S, Turn) + Send + Sync>,
}

/// A step that is in flight. The next one starts when this is dropped.
pub(super) struct Turn {
    next: Option<Box<dyn FnOnce() + Send>>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(next) = self.next.take() {
            next();
        }
    }
}

/// Has `start` begin each of these steps. It drops the turn once the tiers have answered the step.
pub(super) fn in_turns<S: Send + 'static>(
    steps: impl Iterator<Item = S> + Send + 'static,
    start: impl Fn(S, Turn) + Send + Sync + 'static,
) {
    let turns = Arc::new(Turns {
        left: Mutex::new(Box::new(steps)),
        start: Box::new(start),
    });
    (0..IN_FLIGHT).for_each(|_| turns.go_on());
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
            let next = Some(Box::new(next) as Box<dyn FnOnce() + Send>);
            (self.start)(step, Turn { next });
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
            in_turns(0..100_000, move |step, turn| {
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
}
