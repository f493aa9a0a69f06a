//! Huge pages under anonymous memory: a processor translates one address where it translated 512,
//! and copies are the faster for it.
//!
//! Three things make them likely, none makes them sure: addresses at which they fit, the advice
//! that they are wanted, and asking for them at once when memory is populated. The last works
//! where the system gives shared memory none at a page fault, which is how most come. Where there
//! are none to be had, ordinary pages serve: [`Mapping::huge_bytes`] tells.

use super::mapping::{Mapping, page_size};
use crate::error::{Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;

/// Bytes of a huge page. Where pages are larger than 4 KiB it has more, and none is had here.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// The page size of anonymous memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pages {
    /// Huge pages if the system provides them.
    Huge,
    /// Ordinary pages, for comparison with huge ones.
    Small,
}

impl Pages {
    pub(super) fn advice(self) -> Advice {
        match self {
            Self::Huge => Advice::LinuxHugepage,
            Self::Small => Advice::LinuxNoHugepage,
        }
    }
}

/// Maps `bytes` of `fd` from its beginning, at an address that huge pages can begin at if there is
/// room for one.
pub(super) fn map(
    fd: BorrowedFd<'_>,
    bytes: usize,
    protection: ProtFlags,
) -> rustix::io::Result<*mut c_void> {
    let shared = MapFlags::SHARED;
    let Some(room) = bytes.checked_add(HUGE_PAGE).filter(|_| bytes >= HUGE_PAGE) else {
        // SAFETY: a new mapping at an address that the system chooses touches no other memory.
        return unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, shared, fd, 0) };
    };
    let nothing = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: as above; it has neither access nor memory, and is there to be replaced.
    let reserved = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), nothing)
    }?;
    let begin = reserved.expose_provenance();
    let at = begin.next_multiple_of(HUGE_PAGE);
    let unmap = |from: usize, to: usize| match to - from {
        0 => Ok(()),
        // SAFETY: these are ranges of the reservation alone, which nobody knows of yet.
        len => unsafe { rustix::mm::munmap(std::ptr::with_exposed_provenance_mut(from), len) },
    };
    let to = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the range lies inside the reservation, which is this function's own: rounding up
    // adds less than the `HUGE_PAGE` bytes that it is larger.
    let mapped =
        unsafe { rustix::mm::mmap(to, bytes, protection, shared | MapFlags::FIXED, fd, 0) };
    if mapped.is_err() {
        unmap(begin, begin + room)?;
        return mapped;
    }
    let end = (at + bytes).next_multiple_of(page_size());
    unmap(begin, at)?;
    unmap(end, begin + room)?;
    mapped
}

impl Mapping {
    /// Asks for huge pages under all of a range that they fit into; its content stays. Whether
    /// there are any shows in [`Mapping::huge_bytes`] alone, for ordinary ones do too.
    pub(super) fn take_huge_pages(&self, at: usize, bytes: usize) {
        let (begin, end) = (
            at.next_multiple_of(HUGE_PAGE),
            (at + bytes) / HUGE_PAGE * HUGE_PAGE,
        );
        for page in (begin..end).step_by(HUGE_PAGE) {
            // Of what nobody has touched the system collapses nothing; one page of each is enough.
            if self
                .advise(page, page_size(), Advice::LinuxPopulateWrite)
                .is_err()
            {
                return;
            }
        }
        if begin < end {
            let first: *mut c_void = std::ptr::with_exposed_provenance_mut(begin);
            // SAFETY: the range is part of this mapping; its content stays, whatever the answer.
            let _ordinary_ones_serve =
                unsafe { libc::madvise(first, end - begin, libc::MADV_COLLAPSE) };
        }
    }

    /// Returns the number of bytes that this process maps with huge pages now.
    ///
    /// The call is slow: it reads the description of every mapping of the process.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if that description cannot be read.
    pub fn huge_bytes(&self) -> Result<u64> {
        let smaps = std::fs::read_to_string("/proc/self/smaps")
            .map_err(|error| Error::io("read", "/proc/self/smaps", error))?;
        let (at, bytes) = self.pages(0, self.len())?;
        Ok(huge_bytes(&smaps, at..at + bytes))
    }
}

/// What `smaps` says of huge pages in the mappings that begin in a range of addresses.
fn huge_bytes(smaps: &str, range: std::ops::Range<usize>) -> u64 {
    let mut inside = false;
    let mut kib = 0;
    for line in smaps.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or_default();
        let begin = first
            .split_once('-')
            .map(|(begin, _)| usize::from_str_radix(begin, 16));
        if let Some(Ok(begin)) = begin {
            inside = range.contains(&begin);
        } else if inside && matches!(first, "AnonHugePages:" | "ShmemPmdMapped:") {
            let number = line.split_ascii_whitespace().nth(1);
            kib += number.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    kib << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_counted_in_the_mappings_asked_for() {
        let smaps = "7f0000200000-7f0000800000 rw-s 00000000 00:01 7  /memfd:a (deleted)\n\
                     Rss:                6144 kB\nAnonHugePages:         0 kB\n\
                     ShmemPmdMapped:     4096 kB\n\
                     7f0000800000-7f0000a00000 rw-p 00000000 00:00 0\n\
                     AnonHugePages:      2048 kB\n";
        let all = 0x7f00_0020_0000..0x7f00_00a0_0000;
        assert_eq!(huge_bytes(smaps, all.clone()), 6 << 20);
        assert_eq!(huge_bytes(smaps, all.start..0x7f00_0080_0000), 4 << 20);
        assert_eq!(huge_bytes(smaps, 0..all.start), 0);
    }
}
