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
    /// The path exists but is not something that can be mapped.
    #[error("{path} is {found}: allowed are regular files and device DAX (/dev/daxX.Y)", path = path.display())]
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
    #[error("{path} belongs to uid {owner}: only files of uid {expected} are opened", path = path.display())]
    ForeignOwner {
        /// The path that was opened.
        path: PathBuf,
        /// The uid that owns the file.
        owner: u32,
        /// The effective uid of this process.
        expected: u32,
    },
    /// Group or others may write the file.
    #[error("{path} has mode {mode:04o}: files that group or others may write are refused, set it to 0600", path = path.display())]
    OpenMode {
        /// The path that was opened.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
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
    /// Memory of a device where only memory of this process can be used.
    #[error(
        "memory at address {addr:#x} is a device's: allowed are destinations of gets, all of one device"
    )]
    OnDevice {
        /// The address of the memory.
        addr: usize,
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
