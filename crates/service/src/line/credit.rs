//! How much a client may have asked for that is not done yet. It bounds what the owner keeps for
//! its tasks, and what can wait in its outbox while it does not read. The owner says how much that
//! is when the client attaches; a client that keeps to it is not refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvdepot_arena::Error;

use crate::frame::hello::Limits;
use crate::frame::rows::KEYS_MAX;

/// What an owner lets a client have under way: twice the keys of the largest call, because a client
/// learns of a task's end before the last of it is gone there; so many tasks, because each costs
/// something, however few its keys; and calls about devices, each of which has a thread.
pub(crate) const LIMITS: Limits = Limits {
    keys: 2 * KEYS_MAX,
    tasks: 1 << 16,
    slow: 4,
};

/// Keys that a client's groups have, and groups: the owner keeps some hundred bytes for each.
const GROUPED: usize = KEYS_MAX;

/// What one client may have under way, over all its connections.
pub(crate) struct Allowance {
    keys: Arc<Credits>,
    tasks: Arc<Credits>,
    slow: Arc<Credits>,
    grouped: Arc<Credits>,
}

impl Allowance {
    pub(crate) fn new(limits: Limits) -> Allowance {
        Allowance {
            keys: Credits::new(limits.keys),
            tasks: Credits::new(limits.tasks),
            slow: Credits::new(limits.slow),
            grouped: Credits::new(GROUPED),
        }
    }

    /// For a task of so many keys.
    pub(crate) fn task(&self, keys: usize) -> Result<[Credit; 2], Error> {
        Ok([self.keys.take("keys", keys)?, self.tasks.take("tasks", 1)?])
    }

    /// For a group, or more of one, of so many keys.
    pub(crate) fn group(&self, keys: usize) -> Result<Credit, Error> {
        self.grouped.take("keys of groups, and groups", keys + 1)
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
                let allowed = format!("at most {} in progress per client", self.limit);
                let value = format!("{count} in addition to {used}");
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
