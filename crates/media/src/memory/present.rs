//! Pages made present ahead of their use: a copy that stops for a page fault every few KiB takes
//! several times as long.

use std::io;

use super::mapping::{Access, Mapping, page_size};
use super::medium::{self, Kind};
use crate::error::{Error, Result};
use rustix::io::Errno;
use rustix::mm::Advice;

/// Runs of fewer pages than this are left to their page faults, which bring so many at once.
const RUN_MIN: usize = 16;

impl Mapping {
    /// Loads the pages of a range into memory and maps them for reading.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]. [`Error::Io`] if a page cannot be loaded; accessing it would cause a
    /// `SIGBUS`.
    pub fn populate_read(&self, offset: u64, len: u64) -> Result<()> {
        self.populate(offset, len, Advice::LinuxPopulateRead)
    }

    /// Allocates the pages of a range and maps them for writing, without changing their content.
    ///
    /// Anonymous memory gets huge pages if the system provides them.
    ///
    /// # Errors
    ///
    /// The errors of [`Mapping::populate_read`], and [`Error::ReadOnly`].
    pub fn populate_write(&self, offset: u64, len: u64) -> Result<()> {
        let at = self.at(offset, len)?;
        self.check_writable(at)?;
        if self.kind() == Kind::Anonymous {
            self.take_huge_pages(at, len as usize);
        }
        self.populate(offset, len, Advice::LinuxPopulateWrite)
    }

    /// Maps the pages of a range in advance, without reading from a disk.
    ///
    /// For a file, it maps the pages that are in memory already, for reading. For other media it
    /// maps all pages, for the access mode of the mapping.
    ///
    /// # Errors
    ///
    /// The errors of [`Mapping::populate_read`].
    pub fn populate_resident(&self, offset: u64, len: u64) -> Result<()> {
        if self.kind() != Kind::File || len == 0 {
            return match self.access() {
                Access::ReadWrite => self.populate_write(offset, len),
                Access::ReadOnly => self.populate_read(offset, len),
            };
        }
        let (at, bytes) = self.pages(offset, len)?;
        let mut pages = vec![0_u8; bytes.div_ceil(page_size())];
        let first: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the range is part of this mapping, and there is a byte for each of its pages.
        let failed = unsafe { libc::mincore(first, bytes, pages.as_mut_ptr()) } != 0;
        if failed {
            let error = io::Error::last_os_error();
            return Err(Error::io("find the resident pages of", self.name(), error));
        }
        let mut begin = 0;
        for run in pages.chunk_by(|a, b| a & 1 == b & 1) {
            if run[0] & 1 == 1 && run.len() >= RUN_MIN {
                let (from, len) = (begin * page_size(), run.len() * page_size());
                self.populated(at + from, len.min(bytes - from), Advice::LinuxPopulateRead)?;
            }
            begin += run.len();
        }
        Ok(())
    }

    /// Returns the parts of a range that may contain other bytes than zeros, as (offset, length).
    ///
    /// For a file these are the ranges that were ever written, as far as its file system reports
    /// them; otherwise the whole range.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]. [`Error::Io`] in a forked child.
    pub fn written(&self, offset: u64, len: u64) -> Result<Vec<(u64, u64)>> {
        self.at(offset, len)?;
        self.opened().written(offset, len)
    }

    /// Keeps all of it in memory, if the user may.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], mostly because it is more than `RLIMIT_MEMLOCK` allows.
    pub(crate) fn lock_in_memory(&self) -> Result<()> {
        let (at, bytes) = self.pages(0, self.len())?;
        let at = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the range is this mapping; no byte of it changes.
        unsafe { rustix::mm::mlock(at, bytes) }
            .map_err(|errno| Error::io("lock", self.name(), errno))
    }

    /// Allocates what is not yet of memory that is a file of a folder in memory.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the folder has no room, instead of the `SIGBUS` that touching it would
    /// be: before Linux 5.14 populating says nothing.
    pub(crate) fn take_space(&self) -> Result<()> {
        let fd = self.opened().fd_to("allocate")?;
        match medium::has_no_holes(fd) {
            true => Ok(()),
            false => medium::allocate(fd, &self.name(), self.len(), medium::fill_holes),
        }
    }

    fn populate(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        if len == 0 {
            return self.at(offset, len).map(drop);
        }
        let (at, bytes) = self.pages(offset, len)?;
        self.populated(at, bytes, advice)
    }

    fn populated(&self, at: usize, bytes: usize, advice: Advice) -> Result<()> {
        match self.advise(at, bytes, advice) {
            // Before Linux 5.14 there is no such advice; pages then come when they are touched.
            Err(Errno::INVAL) if self.kind() != Kind::Dax => Ok(()),
            answer => answer.map_err(|errno| Error::io("populate", self.name(), errno)),
        }
    }
}
