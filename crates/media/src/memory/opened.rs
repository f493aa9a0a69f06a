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

/// The descriptor of a medium, which is kept with it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Descriptor {
    /// One that a forked child may have too.
    Plain(OwnedFd),
    /// One whose description carries a lock, which a forked child must not keep.
    Locked(LockFd),
    /// The same, of several who use it: the lock goes with the last of them.
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

/// A medium that is open.
#[derive(Debug)]
pub struct Opened {
    fd: Descriptor,
    len: u64,
    kind: Kind,
    path: Option<PathBuf>,
}

impl Opened {
    /// A new file of `len` bytes with its space allocated, mode 0600, synced with its directory.
    /// `then` makes of it what it is for.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the file exists already ([`Error::is_already_exists`]) or the file
    /// system has no room ([`Error::is_no_space`]); [`Error::Invalid`]; those of `then`. No file is
    /// left behind but for the first.
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

    /// An existing regular file, or a device. The links to block devices below `/dev` are followed:
    /// only they name a disk, or a logical volume, the same after each start of the machine.
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

    /// The first `len` bytes of the medium that a descriptor refers to.
    ///
    /// # Errors
    ///
    /// [`Error::TooSmall`] when the medium is shorter, [`Error::WrongKind`], [`Error::Dax`],
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

    /// The length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a medium is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// What it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The path it was opened or created by; none for memory and received descriptors.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Its name in errors.
    #[must_use]
    pub fn name(&self) -> String {
        self.path().map_or_else(|| "memory".to_string(), shown)
    }

    /// Its descriptor.
    ///
    /// # Errors
    ///
    /// [`kvdepot_host::Error::Forked`] in a forked child, for one that carries a lock.
    pub fn fd(&self) -> kvdepot_host::Result<BorrowedFd<'_>> {
        self.fd.get()
    }

    pub(super) fn fd_to(&self, operation: &'static str) -> Result<BorrowedFd<'_>> {
        let fail = |error| Error::io(operation, self.name(), io::Error::other(error));
        self.fd().map_err(fail)
    }

    /// A descriptor to hand to another process. A read-only one is opened anew, so that the
    /// receiver cannot map it for writing; another one allows what this one does.
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

    /// Makes a file that group or others may write its user's alone, mode 0600, and returns the
    /// mode that it had; `None` for all else.
    ///
    /// # Errors
    ///
    /// [`Error::OpenMode`] when the system refuses, [`Error::Io`].
    pub fn make_private(&self) -> Result<Option<u32>> {
        let fd = self.fd_to("look at the mode of")?;
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

    /// Gives the first `len` bytes of a file their space; what is in them stays. A file that
    /// somebody made with `truncate`, or copied with its holes, would fail on a full disk when it
    /// is written. Memory and devices have their space.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], with [`Error::is_no_space`] when the file system has no room.
    pub fn allocate(&self, len: u64) -> Result<()> {
        let fd = self.fd_to("allocate the space of")?;
        if self.kind != Kind::File || len == 0 || has_no_holes(fd) {
            return Ok(());
        }
        allocate(fd, &self.name(), len, fill_holes)
    }

    /// The same file with `len` bytes, more than it has, of which `then` makes what it is for. Its
    /// new space is allocated, and lasts. This one stays what it is, and both show the same bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what is no file, or is as long already; [`Error::TooSmall`] for a
    /// file that was truncated; [`Error::Io`], with [`Error::is_no_space`] when the file system has
    /// no room; those of `then`. The file is then as long as it was.
    pub fn grown<T>(&self, len: u64, then: impl FnOnce(Self) -> Result<T>) -> Result<T> {
        if self.kind != Kind::File || len <= self.len {
            return Err(Error::Invalid {
                field: "length",
                value: len,
                allowed: "more than a file has",
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

    /// The parts of a range, as offset and length, that may be more than zeros: of a file what was
    /// ever written there, as far as its file system knows, else all of it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] in a forked child.
    pub fn written(&self, offset: u64, len: u64) -> Result<Vec<(u64, u64)>> {
        if self.kind != Kind::File {
            return Ok(vec![(offset, len)]);
        }
        let ranges = data(self.fd_to("look for holes in")?, offset, offset + len);
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
