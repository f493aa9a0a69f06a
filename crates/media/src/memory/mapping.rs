//! Memory that is mapped and shared: anonymous memory, files, DAX devices.
//!
//! A mapping covers its whole medium, shared with every other process that maps it. Guarantees:
//!
//! * What is created has its space: a file system without room is an error at creation, which
//!   leaves no file behind, and never a `SIGBUS` later. Anonymous memory can neither shrink nor
//!   grow, whoever holds a descriptor. A file can still be truncated by its owner's other
//!   programs, and memory can fail: see [`Mapping::is_lost`].
//! * Opening follows no symbolic link and opens no file of another user or one that others may
//!   write; what cannot be mapped is refused by its kind.
//! * A forked child does not inherit the memory, so that it cannot write it.

use super::flush;
use super::huge::{self, Pages};
use super::lost::Watch;
use super::medium::{Kind, alignment_of};
use super::opened::{Descriptor, Opened, check_len};
use crate::buffer::{Buffer, Owner, check_range};
use crate::error::{Error, Result};
use crate::once;
use kvdepot_host::{self, fork::Origin};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Access mode of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Read only; buffers over the mapping are not writable.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

/// The required durability of written bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flush {
    /// Visible to the other processes of this machine, as every write is immediately.
    None,
    /// Durable after a power loss, if the medium supports that.
    Power,
}

/// A medium that is completely mapped into memory. Dropping the last reference unmaps it.
#[derive(Debug)]
pub struct Mapping {
    addr: usize,
    /// Bytes of address space: whole pages, which on a device are huge.
    mapped: usize,
    medium: Opened,
    access: Access,
    /// There until the drop.
    watch: Option<Watch>,
    /// A forked child has nothing to unmap.
    origin: Origin,
}

impl Mapping {
    /// Creates anonymous shared memory of `len` bytes, zeroed. Its pages are allocated on first
    /// access.
    ///
    /// `name` is shown in `/proc/PID/maps`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a length of zero, [`Error::Io`] if a system call fails.
    pub fn anonymous(name: &str, len: u64) -> Result<Arc<Self>> {
        Self::anonymous_of(Pages::Huge, name, len)
    }

    /// Creates anonymous shared memory as [`Mapping::anonymous`] does, with the given page size
    /// instead of huge pages.
    ///
    /// # Errors
    ///
    /// The errors of [`Mapping::anonymous`].
    pub fn anonymous_of(pages: Pages, name: &str, len: u64) -> Result<Arc<Self>> {
        check_len(len)?;
        let fail = |operation| move |errno: Errno| Error::io(operation, name, errno);
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(fail("create memory"))?;
        rustix::fs::ftruncate(&fd, len).map_err(fail("size memory"))?;
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(fail("protect memory"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(fail("seal memory"))?;
        let medium = Opened::new(fd, len, Kind::Anonymous, None);
        let memory = Self::map(medium, Access::ReadWrite)?;
        // A system without huge pages does not know the advice; ordinary ones serve as well.
        let _known = memory.advise(memory.addr, memory.mapped, pages.advice());
        Ok(memory)
    }

    /// Anonymous shared memory of `len` bytes that is a file of a folder in memory, without a
    /// name: it can be given one. Its length is not sealed.
    ///
    /// # Errors
    ///
    /// As [`Mapping::anonymous`].
    pub(crate) fn nameable(folder: &str, len: u64) -> Result<Arc<Self>> {
        check_len(len)?;
        let fail = |operation| move |errno: Errno| Error::io(operation, folder, errno);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)
            .map_err(fail("create memory"))?;
        rustix::fs::ftruncate(&fd, len).map_err(fail("size memory"))?;
        let medium = Opened::new(fd, len, Kind::Anonymous, None);
        Self::map(medium, Access::ReadWrite)
    }

    /// Creates and maps a new file of `len` bytes with mode 0600. Its space is allocated, and the
    /// file is synced with its directory.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file exists already ([`Error::is_already_exists`]) or the file system
    /// has too little space ([`Error::is_no_space`]). In the second case no file remains.
    pub fn create(path: &Path, len: u64) -> Result<Arc<Self>> {
        Opened::create(path, len, |medium| Self::map(medium, Access::ReadWrite))
    }

    /// Opens and maps an existing regular file or a DAX device.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::WrongKind`], [`Error::SymbolicLink`], [`Error::ForeignOwner`],
    /// [`Error::TooSmall`] for an empty file, [`Error::Dax`].
    pub fn open(path: &Path, access: Access) -> Result<Arc<Self>> {
        Self::map(Opened::open(path, access)?, access)
    }

    /// Maps the first `len` bytes of the medium that `fd` refers to, for a descriptor from the
    /// medium's owner.
    ///
    /// # Errors
    ///
    /// [`Error::TooSmall`] if the medium is shorter, [`Error::WrongKind`], [`Error::Dax`],
    /// [`Error::Io`] (also if the descriptor does not allow `access`).
    pub fn from_fd(fd: impl Into<Descriptor>, len: u64, access: Access) -> Result<Arc<Self>> {
        Self::map(Opened::from_fd(fd, len)?, access)
    }

    /// Maps a medium that is open already.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::Dax`].
    pub fn of(medium: Opened, access: Access) -> Result<Arc<Self>> {
        Self::map(medium, access)
    }

    fn map(medium: Opened, access: Access) -> Result<Arc<Self>> {
        let protection = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let (len, kind, subject) = (medium.len(), medium.kind(), || medium.name());
        let origin = Origin::here();
        let origin = origin.map_err(|e| Error::io("map", subject(), io::Error::other(e)))?;
        let from = medium.fd_to("map")?;
        let page = match kind {
            Kind::Dax => alignment_of(from, &subject())?,
            Kind::Anonymous | Kind::File | Kind::Block => page_size(),
        };
        let mapped = len.next_multiple_of(page as u64);
        let bytes = usize::try_from(mapped).map_err(|_| Error::Invalid {
            field: "length",
            value: len,
            allowed: "at most the address space of this machine",
        })?;
        let mapped = match kind {
            // The device chooses addresses that suit it.
            // SAFETY: a new mapping at an address that the system chooses touches no other memory.
            Kind::Dax => unsafe {
                let flags = MapFlags::SHARED;
                rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, from, 0)
            },
            Kind::Anonymous | Kind::File | Kind::Block => huge::map(from, bytes, protection),
        };
        let at = mapped.map_err(|errno| Error::io("map", subject(), errno))?;
        let addr = at.expose_provenance();
        let mut mapping = Self {
            addr,
            mapped: bytes,
            medium,
            access,
            watch: None,
            origin,
        };
        // SAFETY: the range is the mapping just made; the advice concerns future children only.
        unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxDontFork) }
            .map_err(|errno| Error::io("exclude from forked children", mapping.name(), errno))?;
        if kind == Kind::Anonymous {
            // For systems that give huge pages to those who ask; small ones serve as well.
            let _known = mapping.advise(addr, bytes, Advice::LinuxHugepage);
        }
        let file = match kind {
            Kind::File => Some(mapping.medium.fd_to("watch")?),
            Kind::Anonymous | Kind::Dax | Kind::Block => None,
        };
        let watch = Watch::new(addr, bytes, page, file);
        mapping.watch = Some(watch.map_err(|error| Error::io("watch", mapping.name(), error))?);
        Ok(Arc::new(mapping))
    }

    /// Returns true if the medium has failed under any of the `len` bytes at `offset`.
    ///
    /// Reads there return other bytes than were written, and writes there have no effect on the
    /// medium.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn is_lost(&self, offset: u64, len: u64) -> Result<bool> {
        let at = self.at(offset, len)?;
        let watch = self.watch.as_ref();
        Ok(watch.is_some_and(|watch| watch.is_lost(at, len as usize)))
    }

    /// Returns the ranges that the medium has lost since it was mapped, as offset and length in
    /// bytes, in any order.
    ///
    /// Returns `None` while a loss is being recorded; call again then.
    #[must_use]
    pub fn lost(&self) -> Option<Vec<(u64, u64)>> {
        let Some(watch) = &self.watch else {
            return Some(Vec::new());
        };
        let last = self.addr + self.len() as usize;
        let inside = |(begin, end): (usize, usize)| {
            let (begin, end) = (begin.clamp(self.addr, last), end.clamp(self.addr, last));
            ((begin - self.addr) as u64, (end - begin) as u64)
        };
        let ranges = watch.lost()?.into_iter().map(inside);
        Some(ranges.filter(|(_, len)| *len > 0).collect())
    }

    /// Returns the number of failures of the medium since it was mapped.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.watch.as_ref().map_or(0, Watch::losses) as u64
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> u64 {
        self.medium.len()
    }

    /// Returns the kind of the medium.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.medium.kind()
    }

    /// Returns the medium.
    #[must_use]
    pub fn opened(&self) -> &Opened {
        &self.medium
    }

    /// Returns the access mode.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the path by which the medium was opened or created; `None` for memory and received
    /// descriptors.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.medium.path()
    }

    /// Returns the descriptor of the medium.
    ///
    /// # Errors
    ///
    /// [`kvdepot_host::Error::Forked`] in a forked child, if the descriptor carries a lock.
    pub fn fd(&self) -> kvdepot_host::Result<BorrowedFd<'_>> {
        self.medium.fd()
    }

    /// Returns a descriptor for another process. A read-only one is reopened, so that the receiver
    /// cannot map it for writing.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] if `access` includes writing but this mapping is read-only,
    /// [`Error::Io`].
    pub fn try_clone_fd(&self, access: Access) -> Result<OwnedFd> {
        match (access, self.access) {
            (Access::ReadWrite, Access::ReadOnly) => Err(Error::ReadOnly { addr: self.addr }),
            _ => self.medium.try_clone_fd(access),
        }
    }

    /// Returns a buffer over `len` bytes at `offset`, writable if the mapping is. The buffer keeps
    /// the mapping alive.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn buffer(self: &Arc<Self>, offset: u64, len: u64) -> Result<Buffer> {
        let at = self.at(offset, len)?;
        let owner: Owner = Arc::<Self>::clone(self);
        let writable = self.access == Access::ReadWrite;
        // SAFETY: the range lies inside the mapping, which lives as long as the owner, and no
        // Rust reference to its bytes is ever made.
        Ok(unsafe { Buffer::from_raw(at, len as usize, writable, owner) })
    }

    /// Copies the bytes at `offset` into `out`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn read_into(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let at = self.at(offset, out.len() as u64)?;
        let from: *const u8 = std::ptr::with_exposed_provenance(at);
        // SAFETY: the range lies inside the mapping; `out` is a reference and so not in it. Others
        // may write there meanwhile, which `once` is for.
        unsafe { once::copy(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies `bytes` to `offset`, with ordinary stores.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`], [`Error::ReadOnly`].
    pub fn write_from(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.at(offset, bytes.len() as u64)?;
        self.check_writable(at)?;
        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the range lies inside the mapping, which is writable; `bytes` is not in it. What
        // others write there at once is a mixture, of which nothing is concluded here.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Allocates the space of the first `len` bytes of a file without changing their content.
    ///
    /// Without this call, a file that was created with `truncate` or copied with holes would cause
    /// a `SIGBUS` on a full disk. Memory and devices need no allocation.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], with [`Error::is_no_space`] if the file system has too little space;
    /// [`Error::ReadOnly`].
    pub fn allocate(&self, len: u64) -> Result<()> {
        self.check_writable(self.at(0, len)?)?;
        self.medium.allocate(len)
    }

    /// Grows the file to `len` bytes and returns a mapping of all of it. The new space is allocated
    /// and durable.
    ///
    /// This mapping keeps its length. Both mappings show the same bytes and the same lost ranges.
    ///
    /// # Errors
    ///
    /// The file then keeps its length.
    ///
    /// * [`Error::Invalid`] if the medium is not a file, or if `len` is not larger than its length.
    /// * [`Error::TooSmall`] for a file that was truncated.
    /// * [`Error::Io`], with [`Error::is_no_space`] if the file system has too little space.
    /// * [`Error::ReadOnly`].
    pub fn grown(&self, len: u64) -> Result<Arc<Self>> {
        self.check_writable(self.addr)?;
        let map = |medium| Self::map(medium, self.access);
        let grown = self.medium.grown(len, map)?;
        let lost = loop {
            if let Some(lost) = self.lost() {
                break lost;
            }
            std::hint::spin_loop();
        };
        if let Some(watch) = &grown.watch {
            lost.into_iter()
                .for_each(|(at, len)| watch.note(grown.addr + at as usize, len as usize));
        }
        Ok(grown)
    }

    pub(super) fn advise(&self, at: usize, bytes: usize, advice: Advice) -> rustix::io::Result<()> {
        let at = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the range is part of this mapping, and only advice that keeps the content is
        // given.
        unsafe { rustix::mm::madvise(at, bytes, advice) }
    }

    /// Makes the written bytes of a range as durable as `flush` requires.
    ///
    /// For files it uses `msync`. For DAX it writes back the processor's cache lines and fences.
    /// For anonymous memory it does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]. [`Error::Io`] if the medium failed to store the bytes; treat them as
    /// lost then.
    pub fn sync(&self, offset: u64, len: u64, flush: Flush) -> Result<()> {
        let at = self.at(offset, len)?;
        if flush == Flush::None || len == 0 {
            return Ok(());
        }
        match self.kind() {
            Kind::Anonymous => Ok(()),
            Kind::Dax => {
                // SAFETY: the range lies inside the mapping.
                unsafe { flush::write_back(at, len as usize) };
                Ok(())
            }
            Kind::File | Kind::Block => {
                let (at, bytes) = self.pages(offset, len)?;
                let at = std::ptr::with_exposed_provenance_mut(at);
                // SAFETY: the range is part of this mapping; syncing changes no byte of it.
                unsafe { rustix::mm::msync(at, bytes, MsyncFlags::SYNC) }
                    .map_err(|errno| Error::io("sync", self.name(), errno))
            }
        }
    }

    /// The address of `offset`, when `len` bytes from there on lie inside.
    pub(crate) fn at(&self, offset: u64, len: u64) -> Result<usize> {
        check_range(offset, len, self.len())?;
        Ok(self.addr + offset as usize)
    }

    /// Returns the mapping that contains `buffer`, and the buffer's offset in it. Returns `None`
    /// for memory of any other kind.
    #[must_use]
    pub fn of_buffer(buffer: &Buffer) -> Option<(Arc<Self>, u64)> {
        let mapping = Arc::clone(buffer.owner()).downcast::<Self>().ok()?;
        let offset = buffer.addr().checked_sub(mapping.addr)? as u64;
        check_range(offset, buffer.len() as u64, mapping.len()).ok()?;
        Some((mapping, offset))
    }

    /// The whole pages around a range: system calls take nothing less.
    pub(super) fn pages(&self, offset: u64, len: u64) -> Result<(usize, usize)> {
        let at = self.at(offset, len)?;
        let first = at / page_size() * page_size();
        Ok((first, at + len as usize - first))
    }

    pub(super) fn check_writable(&self, addr: usize) -> Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => Err(Error::ReadOnly { addr }),
        }
    }

    pub(super) fn name(&self) -> String {
        self.medium.name()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        // Before the addresses can be anybody else's.
        self.watch = None;
        let at = std::ptr::with_exposed_provenance_mut(self.addr);
        // SAFETY: the range was mapped by this process and belongs to this value alone; every
        // buffer over it holds a reference to this value.
        let unmapped = unsafe { rustix::mm::munmap(at, self.mapped) };
        debug_assert!(
            unmapped.is_ok(),
            "unmapping an own mapping cannot fail: {unmapped:?}"
        );
    }
}

/// Returns the page size of this system in bytes.
#[must_use]
pub fn page_size() -> usize {
    rustix::param::page_size()
}
