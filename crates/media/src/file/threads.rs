//! Threads that do for files what would keep a lane waiting.

use super::job::Job;
use crate::error::{Error, Result};
use crate::simulated::is_simulated;
use crate::turns::Turns;
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The most threads; a bound against a wrong unit in a configuration.
const THREADS_MAX: usize = 256;

/// The threads' stacks: they call the system and report.
const STACK_BYTES: usize = 256 << 10;

/// Something that a thread does.
pub(super) trait Work: Send + 'static {
    fn run(self);

    /// Whose it is: calls take turns.
    fn call(&self) -> usize {
        0
    }
}

impl Work for Job {
    fn run(self) {
        perform(self);
    }

    fn call(&self) -> usize {
        self.1.call()
    }
}

impl Work for Box<dyn FnOnce() + Send> {
    fn run(self) {
        self();
    }
}

/// A bounded set of threads, for any number of files. They end with the last one of these.
pub(super) struct Threads<J: Work = Job> {
    queue: Arc<Queue<J>>,
    threads: Vec<JoinHandle<()>>,
    origin: Origin,
}

struct Queue<J> {
    state: Mutex<State<J>>,
    changed: Condvar,
}

struct State<J> {
    jobs: Turns<J>,
    ended: bool,
}

impl<J: Work> Threads<J> {
    /// Starts `count` threads named `kvdepot-file-N`; so many reads and writes are under way at a
    /// time. A simulation's does everything in the thread that asks for it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for none or more than 256, [`Error::Io`] when one cannot be started.
    pub(super) fn new(count: usize) -> Result<Arc<Self>> {
        if count == 0 || count > THREADS_MAX {
            return Err(Error::Invalid {
                field: "file threads",
                value: count as u64,
                allowed: "1 to 256",
            });
        }
        let origin = Origin::here();
        let origin =
            origin.map_err(|e| Error::io("start", "file threads", std::io::Error::other(e)))?;
        let mut threads = Self {
            queue: Arc::new(Queue {
                state: Mutex::new(State {
                    jobs: Turns::default(),
                    ended: false,
                }),
                changed: Condvar::new(),
            }),
            threads: Vec::new(),
            origin,
        };
        for number in 0..if is_simulated() { 0 } else { count } {
            let queue = Arc::clone(&threads.queue);
            let thread = std::thread::Builder::new()
                .name(format!("kvdepot-file-{number}"))
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    // Pinned ones still work; there is nobody to tell.
                    drop(cpu::reset_affinity());
                    queue.run();
                });
            // On failure, dropping `threads` ends those that run.
            let thread =
                thread.map_err(|error| Error::io("start a thread for", "file I/O", error))?;
            threads.threads.push(thread);
        }
        Ok(Arc::new(threads))
    }

    pub(super) fn push(&self, jobs: impl ExactSizeIterator<Item = J>) {
        if self.threads.is_empty() {
            return jobs.for_each(J::run);
        }
        let count = jobs.len();
        let mut state = self.queue.state();
        jobs.for_each(|job| state.jobs.push(job.call(), job));
        drop(state);
        match count {
            1 => self.queue.changed.notify_one(),
            _ => self.queue.changed.notify_all(),
        }
    }
}

impl<J: Work> Drop for Threads<J> {
    fn drop(&mut self) {
        self.queue.state().ended = true;
        self.queue.changed.notify_all();
        let current = std::thread::current().id();
        // A forked child has none, and a thread cannot wait for itself.
        let foreign = !self.origin.is_here();
        if foreign
            || self
                .threads
                .iter()
                .any(|thread| thread.thread().id() == current)
        {
            return;
        }
        for thread in self.threads.drain(..) {
            // It catches what panics; there is no result to look at.
            drop(thread.join());
        }
    }
}

impl<J: Work> Queue<J> {
    fn run(&self) {
        while let Some(job) = self.next() {
            // What panics has given its job back by then, and the others have this thread still.
            drop(catch_unwind(AssertUnwindSafe(|| job.run())));
        }
    }

    /// Waits for a job; none when all is done and the set has ended.
    fn next(&self) -> Option<J> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop() {
                return Some(job);
            }
            if state.ended {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn state(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<J: Work> std::fmt::Debug for Threads<J> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}

/// The file is let go before the report, so that mostly others close it.
fn perform((file, receipt): Job) {
    if receipt.is_cancelled() {
        return;
    }
    let done = file.perform(&receipt);
    drop(file);
    match done {
        Ok(bytes) => receipt.carried(bytes),
        Err(failure) => receipt.failed(failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_outlives_what_panics_in_it() {
        let threads = Threads::<Box<dyn FnOnce() + Send>>::new(1).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let jobs: [Box<dyn FnOnce() + Send>; 2] = [
            Box::new(|| panic!("nothing to say")),
            Box::new(move || tell.send(()).unwrap()),
        ];
        threads.push(jobs.into_iter());
        told.recv_timeout(std::time::Duration::from_secs(60))
            .unwrap();
    }
}
