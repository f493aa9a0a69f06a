//! The log's two lines about a task: one when it is dispatched, one when it is finished, with task
//! id, operation, number of subtasks (blocks), bytes and milliseconds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::clock;

/// The number of the next task of this process.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What the log says about one task.
#[derive(Clone, Copy, Debug)]
pub struct Journal {
    task: u64,
    op: &'static str,
    subtasks: usize,
    bytes: u64,
    started: Instant,
}

impl Journal {
    /// Logs that a task is dispatched.
    pub fn dispatched(op: &'static str, subtasks: usize, bytes: u64) -> Journal {
        let task = NEXT.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(task, op, subtasks, bytes, "task dispatched");
        Journal {
            task,
            op,
            subtasks,
            bytes,
            started: clock::now(),
        }
    }

    /// Since it was dispatched.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Logs that it is finished, `done` of its subtasks with success.
    pub fn finished(&self, done: usize) {
        let Journal {
            task,
            op,
            subtasks,
            bytes,
            ..
        } = self;
        let ms = (self.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        tracing::debug!(task, op, subtasks, done, bytes, ms, "task finished");
    }
}
