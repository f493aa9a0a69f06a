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

/// What a mapping may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Reading only; buffers over the mapping are not writable.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

/// How far written bytes must have got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flush {
    /// To the other processes of this machine, where they already are.
    None,
    /// To where they survive a power cut, as far as the medium has such a place.
    Power,
}

/// A medium mapped into memory as a whole. Dropping the last reference unmaps it.
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
    /// Anonymous shared memory of `len` bytes, zeroed, whose pages are taken when they are first
    /// touched. `name` is shown in `/proc/PID/maps`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a length of zero, [`Error::Io`] when the system refuses.
    pub fn anonymous(name: &str, len: u64) -> Result<Arc<Self>> {
        Self::anonymous_of(Pages::Huge, name, len)
    }

    /// As [`Mapping::anonymous`], which asks for huge pages, of the pages that are named.
    ///
    /// # Errors
    ///
    /// As there.
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

    /// A new file of `len` bytes with its space allocated, mode 0600, synced with its directory.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the file exists already ([`Error::is_already_exists`]) or the file
    /// system has no room ([`Error::is_no_space`]); in the second case no file is left behind.
    pub fn create(path: &Path, len: u64) -> Result<Arc<Self>> {
        Opened::create(path, len, |medium| Self::map(medium, Access::ReadWrite))
    }

    /// An existing regular file, or a DAX device.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::WrongKind`], [`Error::SymbolicLink`], [`Error::ForeignOwner`],
    /// [`Error::TooSmall`] for an empty file, [`Error::Dax`].
    pub fn open(path: &Path, access: Access) -> Result<Arc<Self>> {
        Self::map(Opened::open(path, access)?, access)
    }

    /// The first `len` bytes of the medium that `fd` refers to, for descriptors that were received
    /// from the medium's owner.
    ///
    /// # Errors
    ///
    /// [`Error::TooSmall`] when the medium is shorter, [`Error::WrongKind`], [`Error::Dax`],
    /// [`Error::Io`] (also when the descriptor does not allow `access`).
    pub fn from_fd(fd: impl Into<Descriptor>, len: u64, access: Access) -> Result<Arc<Self>> {
        Self::map(Opened::from_fd(fd, len)?, access)
    }

    /// What is open already.
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
            allowed: "what fits this machine's address space",
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
            .map_err(|errno| Error::io("keep from children", mapping.name(), errno))?;
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

    /// Whether the medium has failed under any of `len` bytes at `offset`: what is read there is
    /// not what was written, and what is written there goes nowhere.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn is_lost(&self, offset: u64, len: u64) -> Result<bool> {
        let at = self.at(offset, len)?;
        let watch = self.watch.as_ref();
        Ok(watch.is_some_and(|watch| watch.is_lost(at, len as usize)))
    }

    /// What the medium has lost since it was mapped, as offset and length in bytes, in no order.
    /// `None` while a loss is being noted: ask again.
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

    /// How often the medium has failed since it was mapped.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.watch.as_ref().map_or(0, Watch::losses) as u64
    }

    /// The length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> u64 {
        self.medium.len()
    }

    /// What lies under it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.medium.kind()
    }

    /// What is mapped.
    #[must_use]
    pub fn opened(&self) -> &Opened {
        &self.medium
    }

    /// What it may be used for.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// The path it was opened or created by; none for memory and received descriptors.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.medium.path()
    }

    /// The descriptor of the medium.
    ///
    /// # Errors
    ///
    /// [`kvdepot_host::Error::Forked`] in a forked child, for one that carries a lock.
    pub fn fd(&self) -> kvdepot_host::Result<BorrowedFd<'_>> {
        self.medium.fd()
    }

    /// A descriptor to hand to another process. A read-only one is opened anew, so that the
    /// receiver cannot map it for writing.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] when writing is asked for and this mapping does not have it,
    /// [`Error::Io`].
    pub fn try_clone_fd(&self, access: Access) -> Result<OwnedFd> {
        match (access, self.access) {
            (Access::ReadWrite, Access::ReadOnly) => Err(Error::ReadOnly { addr: self.addr }),
            _ => self.medium.try_clone_fd(access),
        }
    }

    /// A buffer over `len` bytes at `offset`, writable if the mapping is; it keeps the mapping.
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

    /// Gives the first `len` bytes of a file their space; what is in them stays. A file that
    /// somebody made with `truncate`, or copied with its holes, would be a `SIGBUS` on a full disk.
    /// Memory and devices have their space.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], with [`Error::is_no_space`] when the file system has no room;
    /// [`Error::ReadOnly`].
    pub fn allocate(&self, len: u64) -> Result<()> {
        self.check_writable(self.at(0, len)?)?;
        self.medium.allocate(len)
    }

    /// The same file with `len` bytes, more than it has, mapped as a whole. Its new space is
    /// allocated, and lasts. This mapping stays what it is, and both show the same bytes, and have
    /// lost the same.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what is no file, or is as long already; [`Error::TooSmall`] for a
    /// file that was truncated; [`Error::Io`], with
    /// [`Error::is_no_space`] when the file system has no room; [`Error::ReadOnly`]. The file is
    /// then as long as it was.
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

    /// Brings written bytes of a range to where `flush` wants them: for files by `msync`, for DAX
    /// by writing back the processor's cache lines and a fence. Anonymous memory has no such
    /// place, and nothing is done.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]; [`Error::Io`] when the medium could not take the bytes: they must
    /// then be taken for lost.
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

    /// The mapping that has a buffer, and where in that it begins; `None` for memory of any other
    /// kind.
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

/// The size of a page of this system, in bytes.
#[must_use]
pub fn page_size() -> usize {
    rustix::param::page_size()
}
