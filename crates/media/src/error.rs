//! What can go wrong while memory is mapped, buffers are described and bytes are moved.

use std::io;
use std::path::PathBuf;

/// An error of this crate. Each message names the field or path, the value and the allowed values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call on a medium failed.
    #[error("cannot {operation} {subject}: {source}")]
    Io {
        /// The operation, for example `open`.
        operation: &'static str,
        /// Path or name of the medium.
        subject: String,
        /// The system's error.
        source: io::Error,
    },
    /// There is a driver, but no CUDA device with this number.
    #[error("device: {ordinal} is not allowed; allowed: {allowed}")]
    NoDevice {
        /// Number of the device.
        ordinal: i32,
        /// Description of the existing numbers.
        allowed: String,
    },
    /// The path exists but is not a medium, or is not suitable for this use.
    #[error("{path} is {found}; allowed: regular files, DAX devices (/dev/daxX.Y) and, for \
             Nvme, block devices", path = path.display())]
    WrongKind {
        /// Path that was opened.
        path: PathBuf,
        /// Kind of the object at the path, for example "a directory".
        found: &'static str,
    },
    /// The last component of the path is a symbolic link.
    #[error("{path} is a symbolic link, which is not allowed; use the path of the file itself", path = path.display())]
    SymbolicLink {
        /// Path that was opened.
        path: PathBuf,
    },
    /// The file belongs to another user.
    #[error("{path} belongs to uid {owner}, but this process runs as uid {expected}; change the \
             owner (chown {expected}), or run the process as uid {owner}", path = path.display())]
    ForeignOwner {
        /// Path that was opened.
        path: PathBuf,
        /// User ID that owns the file.
        owner: u32,
        /// Effective user ID of this process.
        expected: u32,
    },
    /// Group or others may write the file, and its mode cannot be changed.
    #[error(
        "{path} has mode {mode:04o}, so other users could write the file; kvdepot cannot change \
         the mode ({source}); set the mode to 0600 (chmod 600)", path = path.display())]
    OpenMode {
        /// Path that was opened.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
        /// The system's error when the mode was changed.
        source: io::Error,
    },
    /// A medium is smaller than requested.
    #[error("{subject} has {available} bytes, but {requested} bytes were requested")]
    TooSmall {
        /// Path or name of the medium.
        subject: String,
        /// Requested length in bytes.
        requested: u64,
        /// Length of the medium in bytes.
        available: u64,
    },
    /// A block device has logical blocks that are larger than a page of 4096 bytes.
    #[error(
        "{path} has logical blocks of {sector} bytes; allowed: at most 4096 bytes",
        path = path.display()
    )]
    Sector {
        /// Path of the device.
        path: PathBuf,
        /// Size of its logical blocks in bytes.
        sector: u32,
    },
    /// A length or an offset is not allowed.
    #[error("{field}: {value} is not allowed; allowed: {allowed}")]
    Invalid {
        /// Name of the argument.
        field: &'static str,
        /// The value in the call.
        value: u64,
        /// Description of the allowed values.
        allowed: &'static str,
    },
    /// A range exceeds a buffer or a mapping.
    #[error("range of {len} bytes at offset {offset} exceeds the end at {end}")]
    OutOfBounds {
        /// Offset of the range in bytes.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Length of the buffer or mapping in bytes.
        end: u64,
    },
    /// The destination, or its mapping, is read-only.
    #[error("destination at address {addr:#x} is read-only")]
    ReadOnly {
        /// Address of the destination.
        addr: usize,
    },
    /// The call needs memory of this process, but the bytes are in a device, a file or a peer.
    #[error("buffer at {addr:#x} is not host memory; copy the buffer with a batch")]
    Elsewhere {
        /// Address or offset of the bytes in that location.
        addr: usize,
    },
    /// The buffers of one side of a part are in several locations.
    #[error(
        "the buffer at {addr:#x} is not in the same memory, file or device as the first source (or \
         destination) of the copy; use buffers that are all in host memory, in one file, or on one \
         device"
    )]
    MixedEnds {
        /// Address or offset of the first buffer that differs.
        addr: usize,
    },
    /// The I/O backend of a destination cannot write it at this alignment.
    #[error(
        "destination of {len} bytes at offset {at}: length and offset must be multiples of \
         {alignment} (the last buffer may be padded)"
    )]
    Unaligned {
        /// Offset of the destination in bytes.
        at: u64,
        /// Length of the destination in bytes.
        len: u64,
        /// Required alignment of both, in bytes.
        alignment: u64,
    },
    /// Sources and destinations of a part differ in total length.
    #[error(
        "copy {tag}: the sources have {src} bytes, but the destinations have {dst} bytes; use \
         equal lengths"
    )]
    LengthMismatch {
        /// The caller's number for the part.
        tag: u32,
        /// Total length of the sources in bytes.
        src: u64,
        /// Total length of the destinations in bytes.
        dst: u64,
    },
    /// Source and destination of a part share memory.
    #[error("copy {tag}: source and destination overlap at address {addr:#x}")]
    Overlap {
        /// The caller's number for the part.
        tag: u32,
        /// An address in both.
        addr: u64,
    },
    /// A batch has the maximum number of parts.
    #[error("too many copies in one batch; allowed: at most {max}")]
    BatchFull {
        /// Maximum number of parts in a batch.
        max: usize,
    },
    /// The description of a DAX device in sysfs is missing or invalid.
    #[error("{path}: {problem}", path = path.display())]
    Dax {
        /// Path of the sysfs file or of the device.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// The copier is closed.
    #[error("the copy threads have stopped: the depot was closed, or the process is a fork")]
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

    /// Returns true if the medium had no free space (`ENOSPC` or `EDQUOT`).
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Io { source, .. } if matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        ))
    }

    /// Returns true if a path did not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// Returns true if a path existed already.
    #[must_use]
    pub fn is_already_exists(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

/// The result of this crate's operations.
pub type Result<T> = std::result::Result<T, Error>;

/// The reason for which a part failed. The bytes of its destination are then unspecified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The copy thread that moved the part, or a piece of it, panicked.
    #[error("internal error: a copy thread panicked, so the copy failed")]
    LanePanicked,
    /// The ticket was cancelled before the part was finished.
    #[error("the batch was cancelled")]
    Cancelled,
    /// The medium of the destination failed; memory of this process has replaced it.
    #[error("medium error at the destination of the copy")]
    MemoryLost,
    /// A device failed to read or write some bytes of the part.
    #[error("copy to or from a CUDA device failed")]
    Device,
    /// The system failed to read or write some bytes of the part.
    #[error("medium error: {}", std::io::Error::from_raw_os_error(*errno))]
    Os {
        /// Error number of the system.
        errno: i32,
    },
    /// Some bytes are missing or were not accepted, for example because a file ends early.
    #[error("incomplete read or write: {carried} of {asked} bytes")]
    Short {
        /// Number of bytes that were moved.
        carried: u64,
        /// Number of bytes that were requested.
        asked: u64,
    },
    /// An I/O backend dropped a request without a report: it panicked or has ended.
    #[error("the I/O backend ended before it completed the request")]
    Unanswered,
    /// The copier was closed, or belongs to the process from which this one was forked.
    #[error("the copy threads have stopped: the depot was closed, or the process is a fork")]
    Closed,
}
