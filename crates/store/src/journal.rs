//! The log's lines about tasks: one when a task is dispatched and one when it is finished, with
//! task id, operation, number of subtasks (blocks), bytes and milliseconds, process and thread.
//! Between them are two more for each stage: what one tier does of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use kvdepot_host::cpu;
use parking_lot::Mutex;

/// The number of the next task of this process.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Log entries of one task, or of one stage of a task.
///
/// There is one entry when the task is dispatched and one when it is finished.
#[derive(Clone, Copy, Debug)]
pub struct Journal {
    task: u64,
    op: &'static str,
    /// Of a stage.
    tier: Option<&'static str>,
    subtasks: usize,
    bytes: u64,
    started: Instant,
}

/// The stages of one task so far.
#[derive(Default)]
pub(crate) struct Stages(Mutex<Vec<Stage>>);

struct Stage {
    journal: Journal,
    done: usize,
    ended: Duration,
}

impl Journal {
    /// Logs that a task is dispatched, and starts its clock.
    ///
    /// `op` is the name of the operation, `subtasks` the number of blocks and `bytes` their total
    /// payload.
    pub fn dispatched(op: &'static str, subtasks: usize, bytes: u64) -> Journal {
        let task = NEXT.fetch_add(1, Ordering::Relaxed);
        Journal::begun((task, op), None, subtasks, bytes)
    }

    /// Logs that the one stage of a task is dispatched that nobody has asked for: the copies of
    /// such a batch are of many calls.
    pub(crate) fn in_background(
        op: &'static str,
        tier: &'static str,
        subtasks: usize,
        bytes: u64,
    ) -> Journal {
        let task = NEXT.fetch_add(1, Ordering::Relaxed);
        Journal::begun((task, op), Some(tier), subtasks, bytes)
    }

    fn begun(
        (task, op): (u64, &'static str),
        tier: Option<&'static str>,
        subtasks: usize,
        bytes: u64,
    ) -> Journal {
        let what = what(tier);
        tracing::debug!(
            task,
            op,
            tier,
            subtasks,
            bytes,
            process = std::process::id(),
            thread = cpu::this_thread(),
            "{what} dispatched"
        );
        Journal {
            task,
            op,
            tier,
            subtasks,
            bytes,
            started: clock::now(),
        }
    }

    /// Returns the time since the task was dispatched.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Logs that the task is finished, with `done` successful subtasks.
    pub fn finished(&self, done: usize) {
        self.finished_after(self.elapsed(), done);
    }

    fn finished_after(&self, elapsed: Duration, done: usize) {
        let Journal {
            task,
            op,
            tier,
            subtasks,
            bytes,
            ..
        } = *self;
        let what = what(tier);
        let ms = (elapsed.as_secs_f64() * 1e6).round() / 1e3;
        tracing::debug!(
            task,
            op,
            tier,
            subtasks,
            done,
            bytes,
            process = std::process::id(),
            thread = cpu::this_thread(),
            ms,
            "{what} finished"
        );
    }
}

fn what(tier: Option<&str>) -> &'static str {
    match tier {
        None => "task",
        Some(_) => "stage",
    }
}

impl Stages {
    /// Blocks of a task are handed to the lanes, from or to a tier. Logs the first of each tier.
    pub(crate) fn begin(&self, journal: &Journal, tier: &'static str, blocks: usize, bytes: u64) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let mut stages = self.0.lock();
        let known = stages.iter_mut().find(|one| one.journal.tier == Some(tier));
        if let Some(Stage { journal, .. }) = known {
            journal.subtasks += blocks;
            journal.bytes += bytes;
            return;
        }
        let name = (journal.task, journal.op);
        stages.push(Stage {
            journal: Journal::begun(name, Some(tier), blocks, bytes),
            done: 0,
            ended: Duration::ZERO,
        });
    }

    /// The copies of so many of them have ended well.
    pub(crate) fn end(&self, tier: &'static str, done: usize) {
        let mut stages = self.0.lock();
        let stage = stages.iter_mut().find(|one| one.journal.tier == Some(tier));
        if let Some(stage) = stage {
            stage.done += done;
            stage.ended = stage.journal.elapsed();
        }
    }

    /// Logs each: nothing is copied any more.
    pub(crate) fn finish(&self) {
        for stage in self.0.lock().drain(..) {
            stage.journal.finished_after(stage.ended, stage.done);
        }
    }
}
