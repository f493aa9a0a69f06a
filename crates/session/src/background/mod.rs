//! Saves in the background: the engine decodes on while its state is written.
//!
//! [`Saver::begin`] asks the engine where the rows lie that are not there yet. The engine then lets
//! them be copied in [slices](Snapshot::step), between its steps, and a thread writes what was
//! copied, at a bounded pace where one is given. All that snapshots have in memory is bounded. A
//! save is acknowledged by its [`Ticket`], and a failed one is told there and to [`OnEnd`]; nothing
//! is left of one that has failed or was cancelled.
//!
//! Rows of tokens that were computed do not change while more are decoded, so that a snapshot may
//! take its time. Objects do, and are copied at once.

mod job;
mod memory;
mod snapshot;
mod writer;

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_store::{BlockBuffers, Buffer};
use parking_lot::Mutex;

pub use job::{OnEnd, Progress, Ticket};
pub use snapshot::{Slice, Snapshot, Step};

use crate::chain::{Cut, bytes_of};
use crate::error::Error;
use crate::feed::Feed;
use crate::save::{Checkpoint, Rows, Saved, check_rows};
use crate::store::Sessions;
use job::{Job, Kept, Work, tell};
use memory::Taken;
use writer::{Shared, Will};

/// What saves in the background may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Limits {
    /// Bytes that all snapshots under way have in memory at most. At least a piece, and a save's
    /// objects.
    pub memory: u64,
    /// Bytes a second that are written. None for no bound.
    pub pace: Option<u64>,
}

/// What room a save takes at its beginning, and how long it waits for that, at most, before it is
/// refused. Without waiting, zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there are no other ways")]
pub enum Fit {
    /// For its objects, and for rows piece by piece, as others are written: a snapshot may be
    /// larger than all room, and takes as long as it is written.
    Piecewise(Duration),
    /// For all of it: the snapshot never waits for what is written.
    Whole(Duration),
}

/// Saves sessions in the background, on a thread of its own. Dropped, it cancels what has not
/// ended; [`close`](Saver::close) finishes it first.
pub struct Saver {
    sessions: Sessions,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Saver {
    /// One for these sessions.
    ///
    /// # Errors
    /// [`Error::Input`] for limits under which nothing can be saved, [`Error::Io`] where there is
    /// no thread to be had.
    pub fn new(sessions: &Sessions, limits: Limits) -> Result<Saver, Error> {
        if limits.memory == 0 {
            return Err(Error::input(
                "memory",
                0,
                "bytes, at least those of a piece",
            ));
        }
        if limits.pace == Some(0) {
            return Err(Error::input(
                "pace",
                0,
                "bytes a second, or none for no bound",
            ));
        }
        let shared = Shared::new(limits.memory, limits.pace);
        let thread = std::thread::Builder::new().name("kvdepot-saver".into());
        let theirs = Arc::clone(&shared);
        let thread = thread.spawn(move || writer::run(&theirs));
        let thread = thread.map_err(|source| Error::Io {
            path: "a thread".into(),
            source,
        })?;
        Ok(Saver {
            sessions: sessions.clone(),
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Bytes that snapshots have in memory now.
    #[must_use]
    pub fn memory_used(&self) -> u64 {
        self.shared.memory.used()
    }

    /// Begins a save. `rows` is asked once, for the pieces that are not there, and may give the
    /// engine's own memory, which stays as it is until all was copied; objects are copied now.
    ///
    /// # Errors
    /// [`Error::Input`] for what cannot be; [`Error::NoRoom`] by `fit`; `rows`' own, and those of
    /// the depot. Nothing has begun then, and `on_end` has been told so.
    pub fn begin(
        &self,
        checkpoint: Checkpoint<'_>,
        fit: Fit,
        rows: Box<Rows<'_>>,
        mut on_end: Option<OnEnd>,
    ) -> Result<Snapshot, Error> {
        let begun = self.begin_untold(checkpoint, fit, rows, &mut on_end);
        if let Err(error) = &begun {
            tell(on_end, Err(error), 0);
        }
        begun
    }

    /// Begins a save, which takes `on_end` once nothing refuses it any more.
    fn begin_untold(
        &self,
        checkpoint: Checkpoint<'_>,
        fit: Fit,
        rows: Box<Rows<'_>>,
        on_end: &mut Option<OnEnd>,
    ) -> Result<Snapshot, Error> {
        let why = "false: what is to be compared is saved at once";
        checkpoint.check_any(self.sessions.piece_tokens, why)?;
        let (count, each) = (checkpoint.tokens.len(), self.sessions.piece_tokens as usize);
        let links = Cut::of_tokens(self.sessions.piece_tokens).links(&bytes_of(checkpoint.tokens));
        let feed = Feed::of(&self.sessions, links)?;
        let missing = feed.missing();
        let mut given = BlockBuffers::default();
        if !missing.is_empty() {
            let run = |piece: &usize| piece * each..((piece + 1) * each).min(count);
            given = rows(&missing.iter().map(run).collect::<Vec<_>>())?;
            check_rows(&given, missing.len())?;
        }
        let sizes = (0..given.len()).map(|at| given.bytes(at));
        feed.check_size(sizes.clone().chain(checkpoint.sizes()))?;
        let bytes: u64 = sizes.sum();
        let (room, for_objects) = self.room(fit, &given, &checkpoint)?;
        let objects = checkpoint.objects.iter();
        let objects = objects.map(|(name, bytes)| {
            let copy = Buffer::from_vec(bytes.to_vec());
            (name.clone(), copy)
        });
        let kept = Kept {
            tokens: checkpoint.tokens.to_vec(),
            text: checkpoint.text.to_vec(),
            reason: checkpoint.reason,
            context_tokens: checkpoint.context_tokens,
            objects: objects.collect(),
            note: checkpoint.note.clone(),
            created: checkpoint.created,
        };
        let work = Work {
            feed,
            kept,
            room: for_objects,
            on_end: on_end.take(),
        };
        let job = Job::new(bytes, work);
        if !self.shared.open(&job) {
            let closed = || kvdepot_store::Error::Closed(": so is its saver").into();
            job.fail(closed());
            return Err(closed());
        }
        let source = missing.into_iter().enumerate();
        // One without bytes has nothing to be copied, and would be left when all was.
        let rows = |at| given.pieces(at).iter().filter(|some| !some.is_empty());
        let source = source.map(|(at, piece)| (piece, rows(at).cloned().collect()));
        let source: VecDeque<_> = source.collect();
        Ok(Snapshot::new(Arc::clone(&self.shared), job, source, room))
    }

    /// Saves at once, by the same thread and within the same bounds.
    ///
    /// # Errors
    /// As [`begin`](Saver::begin), and those of the save.
    pub fn save(
        &self,
        checkpoint: Checkpoint<'_>,
        rows: Box<Rows<'_>>,
        on_end: Option<OnEnd>,
    ) -> Result<Saved, Error> {
        let mut snapshot = self.begin(checkpoint, Fit::Piecewise(Duration::MAX), rows, on_end)?;
        snapshot.finish(None)?;
        snapshot.ticket().wait(None)
    }

    /// Room for the rows, where all of it is taken at once, and for the objects.
    fn room(
        &self,
        fit: Fit,
        rows: &BlockBuffers,
        checkpoint: &Checkpoint<'_>,
    ) -> Result<(Option<Taken>, Option<Taken>), Error> {
        let each = || (0..rows.len()).map(|at| rows.bytes(at));
        let lent = (0..rows.len()).flat_map(|at| rows.pieces(at));
        let lent = lent.chain(checkpoint.objects.iter().map(|(_, bytes)| bytes));
        if lent.into_iter().any(|some| !some.is_memory()) {
            let allowed = "memory of this process";
            return Err(Error::input("rows", "memory of a device", allowed));
        }
        let objects = checkpoint
            .objects
            .iter()
            .map(|(_, bytes)| bytes.len() as u64);
        let objects: u64 = objects.sum();
        let (all, largest) = (each().sum::<u64>(), each().max().unwrap_or(0));
        let most = self.shared.memory.most();
        let least = match fit {
            Fit::Piecewise(_) => objects + largest,
            Fit::Whole(_) => objects + all,
        };
        let refused = || Error::NoRoom {
            wanted: least,
            used: self.shared.memory.used(),
            most,
        };
        if least > most {
            return Err(refused());
        }
        let memory = &self.shared.memory;
        match fit {
            Fit::Piecewise(within) => {
                let held = memory.hold(objects, largest, Some(within));
                Ok((None, Some(held.ok_or_else(refused)?)))
            }
            Fit::Whole(within) => {
                let mut whole = memory.take(least, Some(within)).ok_or_else(refused)?;
                let for_objects = whole.split(objects);
                Ok((Some(whole), Some(for_objects)))
            }
        }
    }

    /// Waits, without a pace, until all saves have ended whose snapshot is taken. What became of
    /// them their tickets say.
    ///
    /// # Errors
    /// A time-out; they go on.
    pub fn flush(&self, within: Option<Duration>) -> Result<(), Error> {
        self.shared.flush(false, within)
    }

    /// Ends: saves whose snapshot is taken are finished, without a pace, and others are cancelled.
    ///
    /// # Errors
    /// A time-out; it goes on, and this may be called again.
    pub fn close(&self, within: Option<Duration>) -> Result<(), Error> {
        self.shared.will(Will::Finish);
        self.shared.flush(true, within)?;
        self.join();
        Ok(())
    }

    /// Ends now: what has not ended is cancelled, and nothing is left of it. Waits for the piece
    /// that is being written.
    pub fn cancel(&self) {
        self.shared.will(Will::Stop);
        self.join();
    }

    fn join(&self) {
        if let Some(thread) = self.thread.lock().take() {
            // It has told whoever waits, also where it has panicked.
            let _ended = thread.join();
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.cancel();
    }
}
