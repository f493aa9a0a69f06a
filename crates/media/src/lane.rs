//! The lanes: threads that live as long as their copier and execute slices.
//!
//! Each lane has a queue. It takes from its own first and from the others' when that is empty, so
//! a slow lane does not hold up a batch. In each queue calls take turns. An idle lane spins for a
//! moment (the next wave of a batch is often microseconds away), then parks.

use crate::memory::mover::Mover;
use crate::turns::Turns;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Looks at the clock once in so many turns of a spin.
const SPINS_PER_LOOK: u32 = 64;

/// What a lane does at once. A panic in it ends it, and not the lane; dropping it unrun is to tell
/// whoever waits for it.
pub(crate) trait Task {
    /// Whether more comes only once a disk has done something: a lane need not look out for it.
    fn is_slow(&self) -> bool {
        false
    }

    /// The call that it is of, by a number that no other has at the same time.
    fn call(&self) -> usize {
        0
    }

    fn run(self, mover: Mover);
}

/// The queues of all lanes.
pub(crate) struct Queues<T> {
    lanes: Vec<Lane<T>>,
    /// What was begun and goes on, before all that is new.
    resumed: Mutex<Turns<T>>,
    resumed_count: AtomicUsize,
    /// Tasks in all queues.
    waiting: AtomicUsize,
    stop: AtomicBool,
    mover: Mover,
}

struct Lane<T> {
    tasks: Mutex<Turns<T>>,
    /// Set by the lane before it parks, taken back by whoever wakes it.
    parked: AtomicBool,
    thread: OnceLock<Thread>,
}

impl<T: Task> Queues<T> {
    pub(crate) fn new(lanes: usize, mover: Mover) -> Self {
        let lane = || Lane {
            tasks: Mutex::default(),
            parked: AtomicBool::new(false),
            thread: OnceLock::new(),
        };
        Self {
            lanes: (0..lanes).map(|_| lane()).collect(),
            resumed: Mutex::default(),
            resumed_count: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            mover,
        }
    }

    pub(crate) fn mover(&self) -> Mover {
        self.mover
    }

    /// Gives a task to a lane. Nobody is woken: [`Queues::wake`] follows.
    pub(crate) fn push(&self, lane: usize, task: T) {
        // Counted first, so that the count never falls below zero. Together with the order in
        // `park`: a lane that parks sees this task, or is seen parked by `wake`.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        lock(&self.lanes[lane].tasks).push(task.call(), task);
    }

    /// Gives the lanes a task that goes before all that was pushed, and wakes one.
    pub(crate) fn resume(&self, task: T) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.resumed_count.fetch_add(1, Ordering::SeqCst);
        lock(&self.resumed).push(task.call(), task);
        self.wake(0, 1);
    }

    /// Wakes up to `count` parked lanes, beginning with number `first`.
    pub(crate) fn wake(&self, first: usize, count: usize) {
        let lanes = self.lanes.len();
        let mut left = count;
        for step in 0..lanes {
            if left == 0 {
                return;
            }
            let lane = &self.lanes[(first + step) % lanes];
            if lane.parked.load(Ordering::SeqCst) && lane.parked.swap(false, Ordering::SeqCst) {
                left -= 1;
                if let Some(thread) = lane.thread.get() {
                    thread.unpark();
                }
            }
        }
    }

    /// Makes the lanes end once they find nothing to do.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake(0, self.lanes.len());
    }

    /// Executes a task in the calling thread.
    pub(crate) fn execute(&self, task: T) {
        execute(task, self.mover);
    }

    /// What the thread of lane `lane` does, until it is stopped.
    pub(crate) fn run(&self, lane: usize, spin: Duration) {
        // The first thing the thread does, before anybody can find it parked.
        self.lanes[lane].thread.get_or_init(std::thread::current);
        let mut looks_out = true;
        loop {
            while let Some(task) = self.take(lane) {
                looks_out = !task.is_slow();
                execute(task, self.mover);
            }
            if looks_out && self.spin(spin) {
                continue;
            }
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            self.park(lane);
        }
    }

    /// Waits a moment; whether there is something to do.
    fn spin(&self, limit: Duration) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..SPINS_PER_LOOK {
                if self.waiting.load(Ordering::Relaxed) > 0 {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= limit || self.stop.load(Ordering::Relaxed) {
                return false;
            }
        }
    }

    fn park(&self, lane: usize) {
        let parked = &self.lanes[lane].parked;
        parked.store(true, Ordering::SeqCst);
        while parked.load(Ordering::SeqCst) {
            // After the flag, so that a task pushed before it is seen here, and one pushed after
            // it finds the flag.
            if self.waiting.load(Ordering::SeqCst) > 0 || self.stop.load(Ordering::SeqCst) {
                parked.store(false, Ordering::SeqCst);
                return;
            }
            std::thread::park();
        }
    }

    /// What goes on; otherwise the oldest task of lane `lane`, or else of the next that has one.
    fn take(&self, lane: usize) -> Option<T> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let lanes = self.lanes.len();
        let task = self.take_resumed().or_else(|| {
            (0..lanes).find_map(|step| lock(&self.lanes[(lane + step) % lanes].tasks).pop())
        })?;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Some(task)
    }

    fn take_resumed(&self) -> Option<T> {
        if self.resumed_count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let task = lock(&self.resumed).pop()?;
        self.resumed_count.fetch_sub(1, Ordering::SeqCst);
        Some(task)
    }
}

impl<T> std::fmt::Debug for Queues<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queues")
            .field("lanes", &self.lanes.len())
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

/// Executes a task. A panic in it ends the task, whose guard tells the batch, and not the lane.
pub(crate) fn execute<T: Task>(task: T, mover: Mover) {
    // The panic hook has told the user, and the guard has told the batch.
    drop(catch_unwind(AssertUnwindSafe(move || task.run(mover))));
}

/// No code that runs under these locks can panic half way, so poison means nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing(u32);

    impl Task for Nothing {
        fn call(&self) -> usize {
            self.0 as usize / 100
        }

        fn run(self, _mover: Mover) {}
    }

    #[test]
    fn what_goes_on_is_taken_before_what_is_new_and_calls_take_turns() {
        let mover = Mover {
            kernel: None,
            stream_min: 4096,
        };
        let queues = Queues::new(2, mover);
        (0..4).for_each(|number| queues.push(number % 2, Nothing(number as u32)));
        queues.resume(Nothing(10));
        queues.resume(Nothing(11));
        // Of another call.
        queues.resume(Nothing(110));
        queues.push(1, Nothing(101));
        let order: Vec<u32> = std::iter::from_fn(|| queues.take(1))
            .map(|one| one.0)
            .collect();
        assert_eq!(order, [10, 110, 11, 1, 101, 3, 0, 2]);
    }
}
