//! Who moves bytes between memory and sessions' files.

use std::sync::{Arc, mpsc};

use kvdepot_host::limits;
use kvdepot_media::file::{File, Hands};
use kvdepot_media::{Batch, Checksum, Copier, CopierConfig, Descriptor, Failure, Ticket};
use kvdepot_store::Durability;

use crate::error::{Error, io};

/// Most lanes that hash and copy unless configured: with the disk's requests under way besides,
/// more of them do not make a file faster.
const LANES_MAX: usize = 4;

/// Options for reading and writing session files.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileOptions {
    /// True to bypass the page cache (`O_DIRECT`), if the file system supports it. Default: true.
    pub direct: bool,
    /// Failures that an acknowledged save survives. Default: the end of the process.
    pub durability: Durability,
    /// Number of threads that hash and copy, 1 to 256. Default: the number of processors, at most
    /// 4.
    pub lanes: usize,
}

impl Default for FileOptions {
    fn default() -> FileOptions {
        FileOptions {
            direct: true,
            durability: Durability::Process,
            lanes: limits::cpus_of_group().unwrap_or(2).clamp(1, LANES_MAX),
        }
    }
}

/// Threads, and an io_uring ring if the kernel has one, that move bytes between memory and session
/// files. Any number of files may share one mover.
#[derive(Debug)]
pub struct FileMover {
    copier: Copier,
    hands: Arc<Hands>,
    options: FileOptions,
}

/// What became of each part of a batch: its tag, and its checksum, or why there is none. The last
/// is whether it is the expected one.
pub(super) type Outcomes = Vec<(u32, Result<(Checksum, bool), Failure>)>;

/// A batch that is under way.
#[derive(Debug)]
pub(super) struct Flight {
    ticket: Ticket,
    ended: mpsc::Receiver<Outcomes>,
}

impl FileMover {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::Depot`] if an option is out of range, or if threads cannot be started.
    pub fn new(options: FileOptions) -> Result<Arc<FileMover>, Error> {
        let mut config = CopierConfig::default();
        config.lanes = options.lanes;
        Ok(Arc::new(FileMover {
            copier: Copier::new(config)?,
            hands: Hands::new(options.lanes)?,
            options,
        }))
    }

    /// Returns the options.
    #[must_use]
    pub fn options(&self) -> &FileOptions {
        &self.options
    }

    /// Returns a description of the I/O backend in words.
    #[must_use]
    pub fn way(&self) -> String {
        self.hands.way(self.options.direct)
    }

    /// A file that is open, for batches.
    pub(super) fn file(&self, fd: impl Into<Descriptor>) -> Result<Arc<File>, Error> {
        Ok(File::new(fd, &self.hands)?)
    }

    pub(super) fn batch(&self) -> Batch {
        self.copier.batch()
    }

    /// Begins to move a batch.
    pub(super) fn submit(&self, batch: Batch) -> Flight {
        let (sender, ended) = mpsc::channel();
        let ticket = self.copier.submit(batch, move |done| {
            let each = done.parts().map(|(tag, part)| {
                let sum = part.map(|one| (one.checksum, one.matches != Some(false)));
                (tag, sum)
            });
            // Who has gone meanwhile does not ask.
            let _heard = sender.send(each.collect());
        });
        Flight { ticket, ended }
    }
}

impl Flight {
    /// Waits until nothing of it moves any more.
    pub(super) fn wait(self) -> Outcomes {
        let ended = self.ended.recv();
        let _done = self.ticket.wait(None);
        ended.unwrap_or_default()
    }

    /// Gives up what has not begun, and waits for the rest.
    pub(super) fn give_up(self) {
        self.ticket.cancel();
        let _done = self.ticket.wait(None);
    }
}

/// What a failure is to whoever saves or restores.
pub(super) fn failed(path: &std::path::Path, failure: Failure) -> Error {
    let source = match failure {
        Failure::Os { errno } => std::io::Error::from_raw_os_error(errno),
        other => std::io::Error::other(other),
    };
    io(path)(source)
}
