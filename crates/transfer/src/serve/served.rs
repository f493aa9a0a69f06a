//! One connection that is served: what it uses, and when it is over.

use std::sync::Arc;

use kvdepot_host::Condvar;
use parking_lot::Mutex;

use crate::grant::{Grant, Use};
use crate::line::Line;

/// The grants that a frame reads or writes.
#[derive(Default)]
pub(super) struct Using {
    /// It writes there, and does not read.
    pub(super) writes: bool,
    pub(super) grants: Vec<Use>,
}

/// One connection that is served.
pub(super) struct Served {
    pub(super) line: Line,
    /// What the frame that is at work uses.
    pub(super) using: Mutex<Using>,
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Served {
    pub(super) fn new(line: Line) -> Served {
        Served {
            line,
            using: Mutex::default(),
            is_over: Mutex::new(false),
            over: Condvar::new(),
        }
    }

    pub(super) fn kill(&self) {
        self.line.shutdown();
    }

    /// True if the frame that is served reads or writes the grant; with `writes` only if it writes.
    pub(super) fn uses(&self, grant: &Arc<Grant>, writes: bool) -> bool {
        let using = self.using.lock();
        (using.writes || !writes) && using.grants.iter().any(|one| one.is_of(grant))
    }

    /// Nothing of it touches memory any more.
    pub(super) fn end(&self) {
        self.using.lock().grants.clear();
        *self.is_over.lock() = true;
        self.over.notify_all();
    }

    pub(super) fn wait(&self) {
        let mut is_over = self.is_over.lock();
        while !*is_over {
            self.over.wait(&mut is_over);
        }
    }
}
