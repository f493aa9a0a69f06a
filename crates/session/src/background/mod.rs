//! Background saves: the engine continues to decode while its state is written.
//!
//! [`Saver::begin`] requests the addresses of the missing rows. The engine then copies them in
//! [slices](Snapshot::step) between its steps, and a thread writes the copies, at a limited pace if
//! one is set. The memory of all snapshots together is limited.
//!
//! A [`Ticket`] reports the end of a save, and so does the [`OnEnd`] callback. A save that failed
//! or was cancelled is removed completely.
//!
//! Rows of computed tokens do not change while the engine decodes, so that a snapshot may take a
//! long time. Objects do change, and are copied immediately.

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

/// Limits of all background saves of a [`Saver`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Limits {
    /// Memory of all snapshots in progress, in bytes; at least one piece and the objects of one
    /// save.
    pub memory: u64,
    /// Pace of writing, in bytes per second; `None` for no limit.
    pub pace: Option<u64>,
}

/// Memory that a save reserves at its beginning, and the longest wait for it. After that time the
/// save is rejected; zero does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there are no other ways")]
pub enum Fit {
    /// Memory for the objects, and for rows piece by piece. The snapshot may be larger than the
    /// memory limit, and then takes until its pieces are written.
    Piecewise(Duration),
    /// Memory for the whole snapshot, which then does not wait for writes.
    Whole(Duration),
}

/// Writer of background saves, with its own thread.
///
/// Dropping a saver cancels the saves that have not ended; [`close`](Saver::close) finishes them
/// first.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use kvdepot_session::background::{Fit, Limits, Saver, Slice};
/// use kvdepot_session::{Checkpoint, Reason, Sessions, Spec};
/// use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, NamespaceSpec};
///
/// # let dir = tempfile::tempdir()?;
/// # let posix = serde_json::json!({"path": dir.path(), "capacity": "64MiB"});
/// # let config = Config::new("Posix", &serde_json::json!({"socket": "off", "posix": posix}))?;
/// # let spec = Spec::new(NamespaceSpec {
/// #     model: "m".into(),
/// #     dtype: "f16".into(),
/// #     block_tokens: 256,
/// #     ..NamespaceSpec::default()
/// # });
/// # let depot = Depot::open(&config)?;
/// let sessions = Sessions::open(depot, &spec)?;
/// let saver = Saver::new(&sessions, Limits { memory: 64 << 20, pace: None })?;
/// let tokens: Vec<u32> = (0..1000).collect();
/// let checkpoint = Checkpoint {
///     tokens: &tokens,
///     text: b"",
///     reason: Reason::Continued,
///     context_tokens: 4096,
///     objects: Vec::new(),
///     note: String::new(),
///     created: 1_700_000_000,
///     exact: false,
/// };
/// let now = Fit::Piecewise(Duration::ZERO);
/// let mut snapshot = saver.begin(checkpoint, now, Box::new(|runs| {
///     // Buffers of the engine, 100 bytes per token.
///     let rows = runs.iter().map(|run| Buffer::from_vec(vec![7; run.len() * 100]));
///     Ok(BlockBuffers::whole(rows))
/// }), None)?;
/// while snapshot.left() > 0 {
///     snapshot.step(Slice::Time(Duration::from_millis(1)))?;
///     // Here the engine computes its next step.
/// }
/// let saved = snapshot.ticket().wait(Some(Duration::from_secs(60)))?;
/// assert_eq!(saved.cache_write_tokens, 1000);
/// saver.close(None)?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct Saver {
    sessions: Sessions,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Saver {
    /// Creates a saver for `sessions`, and starts its thread.
    ///
    /// # Errors
    /// [`Error::Input`] if a limit is zero, and [`Error::Io`] if the thread cannot be started.
    pub fn new(sessions: &Sessions, limits: Limits) -> Result<Saver, Error> {
        if limits.memory == 0 {
            return Err(Error::input(
                "memory",
                0,
                "a number of bytes, at least the size of one piece",
            ));
        }
        if limits.pace == Some(0) {
            return Err(Error::input(
                "pace",
                0,
                "bytes per second (1 or more), or none for no limit",
            ));
        }
        let shared = Shared::new(limits.memory, limits.pace);
        let thread = std::thread::Builder::new().name("kvdepot-saver".into());
        let theirs = Arc::clone(&shared);
        let thread = thread.spawn(move || writer::run(&theirs));
        let thread = thread.map_err(|source| Error::Io {
            path: "cannot start a thread".into(),
            source,
        })?;
        Ok(Saver {
            sessions: sessions.clone(),
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Returns the memory that snapshots use now, in bytes.
    #[must_use]
    pub fn memory_used(&self) -> u64 {
        self.shared.memory.used()
    }

    /// Begins a save.
    ///
    /// `rows` is called at most once, with the runs of tokens of the missing pieces. It may return
    /// the engine's own memory, which must stay unchanged until all rows are copied. Objects are
    /// copied before this call returns. `on_end` is called once when the save ends.
    ///
    /// # Errors
    /// * [`Error::Input`] if an argument is not allowed, for example an exact checkpoint.
    /// * [`Error::NoRoom`] if there is not enough memory, as `fit` requests it.
    /// * Errors of `rows`, and [`Error::Depot`] if the depot fails or the saver is closed.
    ///
    /// After an error no save has begun, and `on_end` was called with the error.
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
        let why = "false; exact sessions cannot be saved in the background";
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
            let closed = || kvdepot_store::Error::Closed(": its saver is closed too").into();
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

    /// Saves a checkpoint and waits, on the same thread and within the same limits.
    ///
    /// # Errors
    /// Errors of [`begin`](Saver::begin), and [`Error::Background`] with the error of the save.
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
            let allowed = "host memory";
            return Err(Error::input("rows", "device memory", allowed));
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

    /// Waits until all saves whose rows are copied have ended. During the wait, `pace` is ignored.
    ///
    /// The tickets report the results. `within` is the longest wait; `None` waits without a limit.
    ///
    /// # Errors
    /// [`Error::Depot`] with a time-out; the saves continue.
    pub fn flush(&self, within: Option<Duration>) -> Result<(), Error> {
        self.shared.flush(false, within)
    }

    /// Finishes the saves whose rows are copied, without a pace, cancels all others, and ends the
    /// thread.
    ///
    /// # Errors
    /// [`Error::Depot`] with a time-out; closing continues, and the call may be repeated.
    pub fn close(&self, within: Option<Duration>) -> Result<(), Error> {
        self.shared.will(Will::Finish);
        self.shared.flush(true, within)?;
        self.join();
        Ok(())
    }

    /// Cancels all saves that have not ended, removes their parts, and ends the thread.
    ///
    /// The call waits for the piece that is being written.
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
