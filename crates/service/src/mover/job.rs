//! A mover's batch under way, and what became of its parts.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_media::{Checksum, Ticket};
use kvdepot_store::Journal;
use parking_lot::Mutex;

/// A batch of copies in progress. Dropping the value does not cancel the batch.
pub struct MoveJob {
    pub(crate) ticket: Ticket,
    pub(crate) report: Arc<Mutex<Report>>,
    pub(crate) bytes: u64,
    pub(crate) journal: Journal,
}

pub(crate) struct Report {
    /// Of each placement that was moved.
    pub(crate) moved: Vec<Option<Checksum>>,
    /// Those whose bytes have another checksum than they should.
    pub(crate) corrupt: Vec<bool>,
    /// The first thing that went wrong.
    pub(crate) error: Option<String>,
    pub(crate) elapsed: Option<Duration>,
}

impl MoveJob {
    /// Waits until the copy threads no longer use the caller's memory.
    ///
    /// `timeout` is the maximum time to wait; `None`: unlimited. Returns false at the time-out.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.ticket.wait(timeout)
    }

    /// Returns true if the copy threads no longer use the caller's memory.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }

    /// Returns the checksum of each part that was copied, and that matched if one was expected.
    ///
    /// The result of other parts is `None`. Before the job is done, all are `None`.
    #[must_use]
    pub fn checksums(&self) -> Vec<Option<Checksum>> {
        self.report.lock().moved.clone()
    }

    /// Returns for each part whether its checksum differs from the expected one.
    ///
    /// Parts that are neither corrupt nor among [`MoveJob::checksums`] were not copied, and their
    /// bytes are unknown.
    #[must_use]
    pub fn corrupt(&self) -> Vec<bool> {
        self.report.lock().corrupt.clone()
    }

    /// Returns the bytes of the batch.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the time from the call to the end of the last copy, or to now while the job is in
    /// progress.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let elapsed = self.report.lock().elapsed;
        elapsed.unwrap_or_else(|| self.journal.elapsed())
    }

    /// Returns a message about the first failure, if there was one.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.report.lock().error.clone()
    }
}

impl Report {
    pub(crate) fn note(&mut self, what: &str) {
        if self.error.is_none() {
            self.error = Some(what.to_owned());
        }
    }
}
