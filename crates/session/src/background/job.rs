//! One save in the background: what is known of it, and what it is made of.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_store::Buffer;
use parking_lot::Mutex;

use super::memory::Taken;
use crate::error::Error;
use crate::feed::Feed;
use crate::manifest::Reason;
use crate::save::{Checkpoint, Saved};

/// Callback for the end of a save, with its result and the number of bytes that it wrote. For
/// example, it reports to a [`Policy`](crate::policy::Policy).
///
/// The saver's thread calls it, and it must not wait for that thread. If the save is rejected at
/// its beginning, the caller's thread calls it.
pub type OnEnd = Box<dyn FnOnce(Result<Saved, &Error>, u64) + Send>;

/// Progress of a background save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes of rows that were missing at the beginning of the save.
    pub bytes: u64,
    /// Bytes of rows that are copied. When all are, the engine may reuse its memory.
    pub copied: u64,
    /// Bytes of rows that are stored, or that were found to be stored already.
    pub written: u64,
    /// True if the save has ended, with or without success.
    pub is_over: bool,
}

/// Handle to a background save. Dropping it does not affect the save.
#[derive(Clone)]
pub struct Ticket(pub(super) Arc<Job>);

/// What a checkpoint is, as the save's own.
pub(super) struct Kept {
    pub(super) tokens: Vec<u32>,
    pub(super) text: Vec<u8>,
    pub(super) reason: Reason,
    pub(super) context_tokens: u32,
    pub(super) objects: Vec<(String, Buffer)>,
    pub(super) note: String,
    pub(super) created: u64,
}

impl Kept {
    fn checkpoint(&self) -> Checkpoint<'_> {
        Checkpoint {
            tokens: &self.tokens,
            text: &self.text,
            reason: self.reason,
            context_tokens: self.context_tokens,
            objects: self.objects.clone(),
            note: self.note.clone(),
            created: self.created,
            exact: false,
        }
    }
}

/// What the writer has until the end.
pub(super) struct Work {
    pub(super) feed: Feed,
    pub(super) kept: Kept,
    /// For the objects.
    pub(super) room: Option<Taken>,
    pub(super) on_end: Option<OnEnd>,
}

pub(super) struct Job {
    bytes: u64,
    /// None once it has ended. Locked by the thread that writes alone, but for the start.
    work: Mutex<Option<Work>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    copied: u64,
    written: u64,
    /// All of it was handed to the thread that writes.
    is_whole: bool,
    end: Option<Result<Saved, Arc<Error>>>,
}

impl Job {
    pub(super) fn new(bytes: u64, work: Work) -> Arc<Job> {
        Arc::new(Job {
            bytes,
            work: Mutex::new(Some(work)),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        })
    }

    pub(super) fn copied(&self, bytes: u64) {
        self.state.lock().copied += bytes;
    }

    pub(super) fn whole(&self) {
        self.state.lock().is_whole = true;
    }

    pub(super) fn is_whole(&self) -> bool {
        self.state.lock().is_whole
    }

    /// Why it has failed, once it has.
    pub(super) fn failed(&self) -> Option<Error> {
        match &self.state.lock().end {
            Some(Err(error)) => Some(Error::Background(Arc::clone(error))),
            _ => None,
        }
    }

    /// Stores a piece; what goes wrong ends the save.
    pub(super) fn store(&self, piece: usize, rows: Vec<u8>) -> Result<(), Error> {
        let mut work = self.work.lock();
        let Some(feed) = work.as_mut().map(|work| &mut work.feed) else {
            return Ok(());
        };
        let bytes = rows.len() as u64;
        feed.store(piece, rows)?;
        // Its memory is counted until here.
        feed.settle()?;
        self.state.lock().written += bytes;
        self.changed.notify_all();
        Ok(())
    }

    /// Makes it a session.
    pub(super) fn commit(&self) {
        let Some(work) = self.work.lock().take() else {
            return;
        };
        let Work {
            feed,
            kept,
            room,
            on_end,
        } = work;
        let written = feed.bytes_written();
        let saved = feed.commit(kept.checkpoint());
        drop((kept, room));
        self.end(saved, written, on_end);
    }

    /// Ends it without a session, if it has not ended; nothing is left of it.
    pub(super) fn fail(&self, error: Error) {
        let Some(work) = self.work.lock().take() else {
            return;
        };
        let written = work.feed.bytes_written();
        if let Err(error) = work.feed.undo() {
            tracing::warn!(%error,
                "cannot delete the blocks of a failed save; the next sweep deletes the blocks");
        }
        drop((work.kept, work.room));
        self.end(Err(error), written, work.on_end);
    }

    fn end(&self, saved: Result<Saved, Error>, written: u64, on_end: Option<OnEnd>) {
        let written = saved.as_ref().map_or(written, |saved| saved.bytes_written);
        if let Err(error) = &saved {
            tracing::warn!(%error, "background save failed; the session is not stored");
        }
        // Before whoever waits knows: what is told there has been told then.
        tell(on_end, saved.as_ref().copied(), written);
        self.state.lock().end = Some(saved.map_err(Arc::new));
        self.changed.notify_all();
    }
}

/// Tells of an end. Whoever waits does so for the save, and not for this.
pub(super) fn tell(on_end: Option<OnEnd>, saved: Result<Saved, &Error>, written: u64) {
    if let Some(on_end) = on_end {
        let told = AssertUnwindSafe(|| on_end(saved, written));
        if catch_unwind(told).is_err() {
            tracing::warn!(
                "callback at the end of a save panicked; the save itself is not affected"
            );
        }
    }
}

impl Ticket {
    /// Returns the current progress.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let state = self.0.state.lock();
        Progress {
            bytes: self.0.bytes,
            copied: state.copied,
            written: state.written,
            is_over: state.end.is_some(),
        }
    }

    /// Waits at most `within` until the save has ended; `None` waits without a limit.
    ///
    /// # Errors
    /// [`Error::Background`] with the error of the save, or [`Error::Depot`] with a time-out; the
    /// save continues after a time-out.
    pub fn wait(&self, within: Option<Duration>) -> Result<Saved, Error> {
        let until = within.and_then(|within| Instant::now().checked_add(within));
        let mut state = self.0.state.lock();
        loop {
            match &state.end {
                Some(Ok(saved)) => return Ok(*saved),
                Some(Err(error)) => return Err(Error::Background(Arc::clone(error))),
                None => {}
            }
            let is_late = match until {
                None => {
                    self.0.changed.wait(&mut state);
                    false
                }
                Some(until) => self.0.changed.wait_until(&mut state, until).timed_out(),
            };
            if is_late && state.end.is_none() {
                return Err(late("a background save", within));
            }
        }
    }
}

pub(super) fn late(what: &'static str, within: Option<Duration>) -> Error {
    let seconds = within.map_or(0.0, |within| within.as_secs_f64());
    kvdepot_store::Error::Timeout { what, seconds }.into()
}
