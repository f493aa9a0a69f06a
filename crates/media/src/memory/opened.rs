//! A medium that is open: a regular file, a device, anonymous memory. Mapping it is one way to
//! use it; files and block devices can be read and written by calls as well.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::mapping::Access;
use super::medium::{
    Kind, allocate, check_kind, check_owner, check_system, data, extent_of, fill_holes,
    has_no_holes, lengthen, shown, sync_new, write_zeros,
};
use crate::error::{Error, Result};
use kvdepot_host::{self, fork::LockFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The descriptor of an open medium.
#[derive(Debug)]
#[non_exhaustive]
pub enum Descriptor {
    /// A descriptor that a forked child may keep.
    Plain(OwnedFd),
    /// A descriptor whose description carries a lock. A forked child must not keep it.
    Locked(LockFd),
    /// A locked descriptor with several users. The lock ends with the last of them.
    Shared(Arc<LockFd>),
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self::Plain(fd)
    }
}

impl From<std::fs::File> for Descriptor {
    fn from(file: std::fs::File) -> Self {
        Self::Plain(file.into())
    }
}

impl From<Arc<LockFd>> for Descriptor {
    fn from(fd: Arc<LockFd>) -> Self {
        Self::Shared(fd)
    }
}

impl From<LockFd> for Descriptor {
    fn from(fd: LockFd) -> Self {
        Self::Locked(fd)
    }
}

impl Descriptor {
    pub(crate) fn get(&self) -> kvdepot_host::Result<BorrowedFd<'_>> {
        match self {
            Self::Plain(fd) => Ok(fd.as_fd()),
            Self::Locked(fd) => fd.fd(),
            Self::Shared(fd) => fd.fd(),
        }
    }
}

/// An open medium.
#[derive(Debug)]
pub struct Opened {
    fd: Descriptor,
    len: u64,
    kind: Kind,
    path: Option<PathBuf>,
}

impl Opened {
    /// Creates a file of `len` bytes with mode 0600. Its space is allocated, and the file is synced
    /// with its directory.
    ///
    /// `then` converts the medium into the returned value.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file exists already ([`Error::is_already_exists`]) or the file system
    /// has too little space ([`Error::is_no_space`]). [`Error::Invalid`], and the errors of `then`.
    /// Except in the first case, no file remains.
    pub fn create<T>(path: &Path, len: u64, then: impl FnOnce(Self) -> Result<T>) -> Result<T> {
        check_len(len)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, mode)
            .map_err(|errno| Error::io("create", shown(path), errno))?;
        let zeros = |fd: BorrowedFd<'_>, subject: &str, len| write_zeros(fd, subject, 0, len);
        let made = allocate(fd.as_fd(), &shown(path), len, zeros)
            .and_then(|()| sync_new(&fd, path))
            .and_then(|()| then(Self::new(fd, len, Kind::File, Some(path.into()))));
        if made.is_err()
            && let Err(error) = std::fs::remove_file(path)
        {
            return Err(Error::io("remove the unfinished file", shown(path), error));
        }
        made
    }

    /// Opens an existing regular file or a device.
    ///
    /// Links below `/dev` that lead to block devices are followed, because only they name a disk or
    /// logical volume in the same way after each boot.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::WrongKind`], [`Error::SymbolicLink`], [`Error::ForeignOwner`],
    /// [`Error::TooSmall`] for an empty file, [`Error::Dax`], [`Error::Sector`].
    pub fn open(path: &Path, access: Access) -> Result<Self> {
        match behind_link(path) {
            Some(device) => Ok(Self {
                path: Some(path.into()),
                ..Self::open_itself(&device, access)?
            }),
            None => Self::open_itself(path, access),
        }
    }

    fn open_itself(path: &Path, access: Access) -> Result<Self> {
        // Looked at before it is opened: opening a FIFO or a tape drive has effects of its own.
        let io = |operation| move |errno: Errno| Error::io(operation, shown(path), errno);
        check_kind(path, &rustix::fs::lstat(path).map_err(io("open"))?)?;
        let mode = match access {
            Access::ReadOnly => OFlags::RDONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        let flags = mode | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::LOOP) => {
                return Err(Error::SymbolicLink {
                    path: path.to_path_buf(),
                });
            }
            opened => opened.map_err(io("open"))?,
        };
        let stat = rustix::fs::fstat(&fd).map_err(io("stat"))?;
        // Looked at again: it may have been replaced in between.
        check_kind(path, &stat)?;
        check_system(path, fd.as_fd())?;
        let (kind, len) = extent_of(fd.as_fd(), &stat, Some(path))?;
        // Who may use a device is its node's affair.
        if !matches!(kind, Kind::Dax | Kind::Block) {
            check_owner(path, &stat)?;
        }
        if len == 0 {
            return Err(Error::TooSmall {
                subject: shown(path),
                requested: 1,
                available: 0,
            });
        }
        Ok(Self::new(fd, len, kind, Some(path.into())))
    }

    /// Opens the first `len` bytes of the medium that `fd` refers to.
    ///
    /// # Errors
    ///
    /// [`Error::TooSmall`] if the medium is shorter, [`Error::WrongKind`], [`Error::Dax`],
    /// [`Error::Io`].
    pub fn from_fd(fd: impl Into<Descriptor>, len: u64) -> Result<Self> {
        check_len(len)?;
        let owned = fd.into();
        let fd = owned
            .get()
            .map_err(|e| Error::io("use", "descriptor", io::Error::other(e)))?;
        let subject = format!("descriptor {}", fd.as_raw_fd());
        let stat = rustix::fs::fstat(fd).map_err(|e| Error::io("stat", subject.as_str(), e))?;
        check_kind(Path::new(&subject), &stat)?;
        let (kind, available) = extent_of(fd, &stat, None)?;
        if len > available {
            return Err(Error::TooSmall {
                subject,
                requested: len,
                available,
            });
        }
        Ok(Self::new(owned, len, kind, None))
    }

    pub(super) fn new(
        fd: impl Into<Descriptor>,
        len: u64,
        kind: Kind,
        path: Option<PathBuf>,
    ) -> Self {
        Self {
            fd: fd.into(),
            len,
            kind,
            path,
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a medium is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the kind of the medium.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the path by which the medium was opened or created; `None` for memory and received
    /// descriptors.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the name of the medium for messages.
    #[must_use]
    pub fn name(&self) -> String {
        self.path().map_or_else(|| "memory".to_string(), shown)
    }

    /// Returns the descriptor.
    ///
    /// # Errors
    ///
    /// [`kvdepot_host::Error::Forked`] in a forked child, if the descriptor carries a lock.
    pub fn fd(&self) -> kvdepot_host::Result<BorrowedFd<'_>> {
        self.fd.get()
    }

    pub(super) fn fd_to(&self, operation: &'static str) -> Result<BorrowedFd<'_>> {
        let fail = |error| Error::io(operation, self.name(), io::Error::other(error));
        self.fd().map_err(fail)
    }

    /// Returns a descriptor for another process.
    ///
    /// A read-only one is reopened, so that the receiver cannot map it for writing. Otherwise it
    /// has the access mode of this descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn try_clone_fd(&self, access: Access) -> Result<OwnedFd> {
        match access {
            Access::ReadWrite => rustix::io::fcntl_dupfd_cloexec(self.fd_to("duplicate")?, 3)
                .map_err(|errno| Error::io("duplicate", self.name(), errno)),
            Access::ReadOnly => {
                let link = format!("/proc/self/fd/{}", self.fd_to("reopen")?.as_raw_fd());
                rustix::fs::open(link, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                    .map_err(|errno| Error::io("reopen", self.name(), errno))
            }
        }
    }

    /// Changes the mode of a file that group or others may write to 0600.
    ///
    /// Returns the previous mode, or `None` if nothing had to change.
    ///
    /// # Errors
    ///
    /// [`Error::OpenMode`] if the mode cannot be changed, [`Error::Io`].
    pub fn make_private(&self) -> Result<Option<u32>> {
        let fd = self.fd_to("read the mode of")?;
        let stat = rustix::fs::fstat(fd).map_err(|e| Error::io("stat", self.name(), e))?;
        let mode = stat.st_mode & 0o7777;
        if self.kind != Kind::File || mode & 0o022 == 0 {
            return Ok(None);
        }
        let made = rustix::fs::fchmod(fd, Mode::RUSR | Mode::WUSR);
        made.map_err(|errno| Error::OpenMode {
            path: self.name().into(),
            mode,
            source: errno.into(),
        })?;
        Ok(Some(mode))
    }

    /// Allocates the space of the first `len` bytes of a file without changing their content.
    ///
    /// Without this call, writes to a file that was created with `truncate` or copied with holes
    /// would fail on a full disk. Memory and devices need no allocation.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], with [`Error::is_no_space`] if the file system has too little space.
    pub fn allocate(&self, len: u64) -> Result<()> {
        let fd = self.fd_to("allocate space for")?;
        if self.kind != Kind::File || len == 0 || has_no_holes(fd) {
            return Ok(());
        }
        allocate(fd, &self.name(), len, fill_holes)
    }

    /// Grows the file to `len` bytes. The new space is allocated and durable.
    ///
    /// `then` converts the grown medium into the returned value. This value keeps its length. Both
    /// show the same bytes.
    ///
    /// # Errors
    ///
    /// The file then keeps its length.
    ///
    /// * [`Error::Invalid`] if the medium is not a file, or if `len` is not larger than its length.
    /// * [`Error::TooSmall`] for a file that was truncated.
    /// * [`Error::Io`], with [`Error::is_no_space`] if the file system has too little space.
    /// * The errors of `then`.
    pub fn grown<T>(&self, len: u64, then: impl FnOnce(Self) -> Result<T>) -> Result<T> {
        if self.kind != Kind::File || len <= self.len {
            return Err(Error::Invalid {
                field: "length",
                value: len,
                allowed: "more than the present length of the file",
            });
        }
        check_len(len)?;
        let fd = self.try_clone_fd(Access::ReadWrite)?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| Error::io("stat", self.name(), e))?;
        let available = u64::try_from(stat.st_size).unwrap_or(0);
        if available < self.len {
            // What is lost here would be zeros there.
            return Err(Error::TooSmall {
                subject: self.name(),
                requested: self.len,
                available,
            });
        }
        let zeros =
            |fd: BorrowedFd<'_>, subject: &str, len| write_zeros(fd, subject, self.len, len);
        lengthen(self.fd_to("lengthen")?, &self.name(), available, || {
            allocate(fd.as_fd(), &self.name(), len, zeros)?;
            rustix::fs::fsync(&fd).map_err(|errno| Error::io("sync", self.name(), errno))?;
            then(Self::new(fd, len, self.kind, self.path.clone()))
        })
    }

    /// Returns the parts of a range that may contain other bytes than zeros, as offset and length.
    ///
    /// For a file these are the ranges that were ever written, as far as its file system reports
    /// them; otherwise the whole range.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] in a forked child.
    pub fn written(&self, offset: u64, len: u64) -> Result<Vec<(u64, u64)>> {
        if self.kind != Kind::File {
            return Ok(vec![(offset, len)]);
        }
        let ranges = data(self.fd_to("find holes in")?, offset, offset + len);
        let range = |(begin, end)| (begin, end - begin);
        Ok(ranges.into_iter().map(range).collect())
    }
}

/// The block device that a link below `/dev` leads to.
fn behind_link(path: &Path) -> Option<PathBuf> {
    let nodes = Path::new("/dev");
    let is_link = path.starts_with(nodes) && path.is_symlink();
    let device = is_link.then(|| path.canonicalize().ok()).flatten()?;
    let is_block = |device: &PathBuf| {
        let found = device.metadata();
        found.is_ok_and(|found| found.file_type().is_block_device())
    };
    Some(device).filter(|device| device.starts_with(nodes) && is_block(device))
}

pub(super) fn check_len(len: u64) -> Result<()> {
    if len > 0 && i64::try_from(len).is_ok() {
        return Ok(());
    }
    Err(Error::Invalid {
        field: "length",
        value: len,
        allowed: "1 to 2^63 - 1 bytes",
    })
}
