//! How much a client may have asked for that is not done yet. It bounds what the owner keeps for
//! its tasks, and what can wait in its outbox while it does not read.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvdepot_arena::Error;

use crate::frame::KEYS_MAX;

/// Most keys of tasks that a client has under way: twice those of the largest call, because it
/// learns of a task's end before the last of it is gone here.
const KEYS_UNDER_WAY: usize = 2 * KEYS_MAX;

/// Most tasks: each costs something, however few its keys.
const TASKS_UNDER_WAY: usize = 1 << 16;

/// Most calls about devices at a time: each has a thread.
const SLOW_UNDER_WAY: usize = 4;

/// What one client may have under way, over all its connections.
pub(crate) struct Allowance {
    keys: Arc<Credits>,
    tasks: Arc<Credits>,
    slow: Arc<Credits>,
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance {
            keys: Credits::new(KEYS_UNDER_WAY),
            tasks: Credits::new(TASKS_UNDER_WAY),
            slow: Credits::new(SLOW_UNDER_WAY),
        }
    }
}

impl Allowance {
    /// For a task of so many keys.
    pub(crate) fn task(&self, keys: usize) -> Result<[Credit; 2], Error> {
        Ok([self.keys.take("keys", keys)?, self.tasks.take("tasks", 1)?])
    }

    /// For a call about devices.
    pub(crate) fn slow(&self) -> Result<Credit, Error> {
        self.slow.take("calls about devices", 1)
    }
}

/// Most of one kind that one client has at a time.
struct Credits {
    limit: usize,
    used: AtomicUsize,
}

/// Given back when it is dropped.
#[must_use = "dropped, it is given back"]
pub(crate) struct Credit {
    of: Arc<Credits>,
    count: usize,
}

impl Credits {
    fn new(limit: usize) -> Arc<Credits> {
        Arc::new(Credits {
            limit,
            used: AtomicUsize::new(0),
        })
    }

    fn take(self: &Arc<Credits>, what: &str, count: usize) -> Result<Credit, Error> {
        let more = |used: usize| {
            let used = used.checked_add(count)?;
            (used <= self.limit).then_some(used)
        };
        let took = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        match took {
            Ok(_) => Ok(Credit {
                of: Arc::clone(self),
                count,
            }),
            Err(used) => {
                let allowed = format!("at most {} under way for a client", self.limit);
                let value = format!("{count} more than {used}");
                Err(Error::input(what, value, allowed))
            }
        }
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.of.used.fetch_sub(self.count, Ordering::AcqRel);
    }
}
