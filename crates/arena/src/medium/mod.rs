//! A medium as its arena uses it: bytes at offsets, which are read, written and made durable. A
//! mapping is the fast way to it, calls are another; the arena above does not know which.
//!
//! Guarantees: what was written is read, by whichever way, in this process and in others; what is
//! synced outlives a power cut. Where the medium fails, its bytes are *lost*: that is noted, and
//! they are not used again while the arena is open. Each range that is written at a time is its
//! writer's alone, but need not fill a page of its own.

mod direct;
mod group;
mod mapped;
#[cfg(test)]
pub(crate) mod watched;

use std::fmt;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use kvdepot_host::fork::LockFd;
use kvdepot_media::{Buffer, Error, Kind, Mapping, Opened, Result};

use crate::format::record;
use crate::options::Access;
use direct::Direct;

/// The bytes of a record with its offset on the medium.
pub type Written = (u64, [u8; record::LEN]);

/// Takes the writers' lock for an open file description; whether it has it.
pub(crate) type Lock = fn(BorrowedFd<'_>) -> bool;

/// A medium, whoever has it.
pub(crate) type Shared = Arc<dyn Medium>;

/// The operations that an arena needs from its medium. Any call may wait for I/O.
pub trait Medium: fmt::Debug + Send + Sync {
    /// Returns the file, device or memory.
    fn opened(&self) -> &Opened;

    /// Copies the bytes at `at` into `out`. After an error, bytes that could not be read are zeros.
    ///
    /// # Errors
    ///
    /// The range exceeds the medium, or the medium failed; the bytes then count as lost.
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()>;

    /// Writes `bytes` to `at`.
    ///
    /// # Errors
    ///
    /// The range exceeds the medium, or the medium failed; the bytes then count as lost.
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Makes ranges, as offset and length, durable. Returns true for each range that is durable.
    fn sync(&self, ranges: &[(u64, u64)]) -> Vec<bool>;

    /// Writes records as a group and, with `durable`, makes the group durable. Returns true for
    /// each record that the medium has.
    fn commit(&self, records: &[Written], durable: bool) -> Vec<bool>;

    /// Returns true if the medium has failed under any of these bytes.
    fn is_lost(&self, at: u64, len: u64) -> bool;

    /// Returns the lost ranges as offset and length. Returns `None` while a loss is being recorded;
    /// call again then.
    fn lost(&self) -> Option<Vec<(u64, u64)>>;

    /// Returns the number of failures of the medium.
    fn losses(&self) -> u64;

    /// Announces that this process may write from now on. Writes that continue after the process is
    /// killed must keep this lock until they end.
    fn lock_writes(&self, _lock: Lock) {}

    /// Announces that this process starts no further writes. Writes in progress continue.
    fn unlock_writes(&self) {}

    /// Grows the medium to `len` bytes and returns it.
    ///
    /// # Errors
    ///
    /// The errors of [`Mapping::grown`].
    fn grown(&self, len: u64) -> Result<Arc<dyn Medium>>;

    /// Announces that a range is read next, so that the medium can load it.
    ///
    /// # Errors
    ///
    /// A failure to load the range, which a read would not report separately.
    fn expect(&self, _at: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    /// Returns a buffer over a range, for batches.
    ///
    /// # Errors
    ///
    /// The range exceeds the medium.
    fn buffer(&self, at: u64, len: u64) -> Result<Buffer>;

    /// Returns the mapping of the medium, if it is mapped.
    fn mapping(&self) -> Option<&Arc<Mapping>> {
        None
    }
}

impl dyn Medium + '_ {
    /// Bytes that it has.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.opened().len()
    }

    /// Makes a range durable.
    ///
    /// # Errors
    /// Where it is not, of which the log says more.
    pub(crate) fn sync_one(&self, at: u64, len: u64) -> Result<()> {
        match self.sync(&[(at, len)]).as_slice() {
            [true] => Ok(()),
            _ => Err(Error::Io {
                operation: "sync",
                subject: self.opened().name(),
                source: ErrorKind::Other.into(),
            }),
        }
    }
}

/// Opens what is at a path.
pub(crate) fn open(path: &Path, access: Access) -> Result<Shared> {
    let mode = kvdepot_media::Access::ReadWrite;
    let opened = Opened::open(path, mode)?;
    let is_block = opened.kind() == Kind::Block;
    Ok(match access {
        Access::Direct => Arc::new(Direct::new(opened)?),
        // A mapping of its page cache would do, but none that says what power cuts leave of it.
        Access::Mapped if is_block => {
            let (path, found) = (path.into(), "a block device");
            return Err(Error::WrongKind { path, found });
        }
        Access::Mapped => Arc::new(Mapping::of(opened, mode)?),
    })
}

/// Opens the first `len` bytes of a medium that another process has sent.
///
/// # Errors
///
/// The errors of opening the medium.
pub fn adopt(fd: LockFd, len: u64, writes: bool, access: Access) -> Result<Arc<dyn Medium>> {
    let mode = match writes {
        true => kvdepot_media::Access::ReadWrite,
        false => kvdepot_media::Access::ReadOnly,
    };
    Ok(match access {
        Access::Mapped => Arc::new(Mapping::from_fd(fd, len, mode)?),
        Access::Direct => Arc::new(Direct::adopted(fd, len)?),
    })
}

/// Makes a file, of which nothing is left where that fails.
pub(crate) fn create(path: &Path, len: u64, access: Access) -> Result<Shared> {
    Ok(match access {
        Access::Mapped => Arc::new(Mapping::create(path, len)?),
        Access::Direct => Arc::new(Opened::create(path, len, Direct::new)?),
    })
}
