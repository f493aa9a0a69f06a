//! A mover's batch under way, and what became of its parts.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_media::{Checksum, Ticket};
use kvdepot_store::Journal;
use parking_lot::Mutex;

/// A batch under way. Dropping it changes nothing for the batch.
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
    /// Waits until no lane touches the caller's memory any more; false when `timeout` passed
    /// first.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.ticket.wait(timeout)
    }

    /// Whether that is so now.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }

    /// The checksum of each part that was moved, and matched where one was expected; `None` for
    /// the others. All `None` before the job is done.
    #[must_use]
    pub fn checksums(&self) -> Vec<Option<Checksum>> {
        self.report.lock().moved.clone()
    }

    /// Which parts have another checksum than they should. Those that are neither here nor among
    /// [`MoveJob::checksums`] were not moved: nothing is known about their bytes.
    #[must_use]
    pub fn corrupt(&self) -> Vec<bool> {
        self.report.lock().corrupt.clone()
    }

    /// Bytes of the batch.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// From the call to the end of the last lane; so far, while it is under way.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let elapsed = self.report.lock().elapsed;
        elapsed.unwrap_or_else(|| self.journal.elapsed())
    }

    /// Why something failed, if something did; for people.
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
