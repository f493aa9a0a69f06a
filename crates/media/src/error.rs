//! What can go wrong while memory is mapped, buffers are described and bytes are moved.

use std::io;
use std::path::PathBuf;

/// An error of this crate.
///
/// Every message names the field or the path, the value that was given and what is allowed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a medium.
    #[error("{operation} {subject}: {source}")]
    Io {
        /// What was attempted, for example `open`.
        operation: &'static str,
        /// The path or the name of the medium.
        subject: String,
        /// What the operating system answered.
        source: io::Error,
    },
    /// There is a driver, and no CUDA device with this number.
    #[error("device: {ordinal} is not allowed; allowed: {allowed}")]
    NoDevice {
        /// The number.
        ordinal: i32,
        /// The numbers that there are, for people.
        allowed: String,
    },
    /// The path exists but is no medium, or none for this use.
    #[error("{path} is {found}: allowed are regular files, device DAX (/dev/daxX.Y) and, for Nvme, block devices", path = path.display())]
    WrongKind {
        /// The path that was opened.
        path: PathBuf,
        /// What it is, for example "a directory".
        found: &'static str,
    },
    /// The last component of the path is a symbolic link.
    #[error("{path} is a symbolic link: links are refused, name the file itself", path = path.display())]
    SymbolicLink {
        /// The path that was opened.
        path: PathBuf,
    },
    /// The file belongs to another user.
    #[error("{path} belongs to uid {owner}: only files of uid {expected}, which this process has, are opened; give it the file (chown {expected}), or run it as uid {owner}", path = path.display())]
    ForeignOwner {
        /// The path that was opened.
        path: PathBuf,
        /// The uid that owns the file.
        owner: u32,
        /// The effective uid of this process.
        expected: u32,
    },
    /// Group or others may write the file, and its mode cannot be changed.
    #[error("{path} has mode {mode:04o}: files that group or others may write are refused, and its mode cannot be changed ({source}); set it to 0600 (chmod 600)", path = path.display())]
    OpenMode {
        /// The path that was opened.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// What the system answers to a change of them.
        source: io::Error,
    },
    /// A medium is smaller than what was asked of it.
    #[error("{subject} holds {available} bytes: {requested} bytes were requested")]
    TooSmall {
        /// The path or the name of the medium.
        subject: String,
        /// The length that was requested.
        requested: u64,
        /// The length that is there.
        available: u64,
    },
    /// A block device that cannot be read and written in pages.
    #[error("{path} has logical blocks of {sector} bytes: allowed are at most 4096", path = path.display())]
    Sector {
        /// The device.
        path: PathBuf,
        /// Bytes of its logical blocks.
        sector: u32,
    },
    /// A length or an offset that cannot be used.
    #[error("{field} is {value}: {allowed}")]
    Invalid {
        /// The argument's name.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A range reaches beyond the end of a buffer or a mapping.
    #[error("range of {len} bytes at offset {offset} reaches beyond the end at {end}")]
    OutOfBounds {
        /// The first byte of the range.
        offset: u64,
        /// The length of the range.
        len: u64,
        /// The length of what it lies in.
        end: u64,
    },
    /// The destination, or the mapping under it, may not be written.
    #[error("destination at address {addr:#x} is read-only")]
    ReadOnly {
        /// The address of the destination.
        addr: usize,
    },
    /// Bytes of a device, a file or a peer where only memory of this process can be used.
    #[error("bytes at {addr:#x} are not in this process's memory: only batches move them")]
    Elsewhere {
        /// Their address or offset there.
        addr: usize,
    },
    /// One side of a part lies at several ends.
    #[error(
        "the buffer at {addr:#x} lies elsewhere than the first of its side: allowed are memory, one file or one device"
    )]
    MixedEnds {
        /// The address or offset of the first buffer that differs.
        addr: usize,
    },
    /// A destination that its carrier cannot write as it is.
    #[error(
        "destination of {len} bytes at offset {at}: both must be multiples of {alignment}, but for the length of a padded last one"
    )]
    Unaligned {
        /// Its offset.
        at: u64,
        /// Its length.
        len: u64,
        /// What both are to be multiples of.
        alignment: u64,
    },
    /// Sources and destinations of a part do not have the same total length.
    #[error("part {tag}: sources have {src} bytes and destinations {dst}: they must be equal")]
    LengthMismatch {
        /// The caller's number of the part.
        tag: u32,
        /// The total length of the sources.
        src: u64,
        /// The total length of the destinations.
        dst: u64,
    },
    /// Source and destination of a part share memory.
    #[error("part {tag}: source and destination overlap at address {addr:#x}")]
    Overlap {
        /// The caller's number of the part.
        tag: u32,
        /// An address inside both.
        addr: u64,
    },
    /// A batch has no room for another part.
    #[error("a batch holds at most {max} parts")]
    BatchFull {
        /// The largest number of parts of a batch.
        max: usize,
    },
    /// The description of a DAX device in sysfs is missing or makes no sense.
    #[error("{path}: {problem}", path = path.display())]
    Dax {
        /// The sysfs file or the device that was looked at.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The copier no longer takes batches.
    #[error("the copier is closed")]
    Closed,
}

impl Error {
    pub(crate) fn io(
        operation: &'static str,
        subject: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::Io {
            operation,
            subject: subject.into(),
            source: source.into(),
        }
    }

    /// Whether the medium had no space left (`ENOSPC` or `EDQUOT`).
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Io { source, .. } if matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        ))
    }

    /// Whether a path did not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Whether a path existed already.
    #[must_use]
    pub fn is_already_exists(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

/// The result of this crate's operations.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a part has no outcome. Its destination's bytes are then unspecified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The lane that had it, or one that had a piece of it, panicked.
    #[error("a lane panicked while it moved this part")]
    LanePanicked,
    /// The ticket was cancelled before the part was finished.
    #[error("the batch was cancelled")]
    Cancelled,
    /// The medium failed under its destination, which is memory of this process now.
    #[error("the medium failed where this part was to be stored")]
    MemoryLost,
    /// A device did not take its bytes, or did not give them.
    #[error("the device did not carry this part")]
    Device,
    /// The system refused to read or write some of its bytes.
    #[error("the medium failed: {}", std::io::Error::from_raw_os_error(*errno))]
    Os {
        /// The system's error number.
        errno: i32,
    },
    /// Some of its bytes are not there, or were not taken: a file that ends early.
    #[error("the medium carried {carried} of {asked} bytes")]
    Short {
        /// How many bytes were carried.
        carried: u64,
        /// How many were asked for at once.
        asked: u64,
    },
    /// A carrier gave up some of its bytes without an answer: it panicked, or has ended.
    #[error("the carrier gave no answer")]
    Unanswered,
    /// The copier was closed, or belongs to the process that this one was forked from.
    #[error("the copier is closed")]
    Closed,
}
