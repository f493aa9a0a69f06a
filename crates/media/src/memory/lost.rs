//! Memory that fails under a mapping: a line of persistent memory that cannot be corrected, a file
//! that somebody truncated, a device that is gone. Touching it is a `SIGBUS`, which by itself ends
//! the process.
//!
//! A handler puts zeroed memory of this process in the place of what failed, and the touch goes
//! on: what is read there does not verify, and what is written there is known to be lost
//! ([`super::Mapping::is_lost`], [`crate::Failure::MemoryLost`]). Faults at any other address go to
//! the handler that was there before (`chain`).
//!
//! A forked child has none of the mappings, and may have anything else at their addresses: there
//! nothing is watched that was watched before the fork.

mod chain;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering, fence};

use kvdepot_host::fork::{self, Origin};

/// Mappings that can be watched at a time.
const REGIONS: usize = 512;

/// Lost ranges that are told apart; beyond, all between the first and the last one counts as lost.
const RANGES: usize = 30;

/// The beginning of a region that is not in use.
const FREE: usize = 0;

/// The beginning of a region that is being taken. No mapping begins there.
const TAKEN: usize = 1;

/// A watched mapping. The handler may only use atomics, and so may whoever takes a region: a lock
/// could be held by another thread at a fork, and then for ever in the child.
#[derive(Debug)]
struct Region {
    /// Where it begins, or `FREE`, or `TAKEN`.
    begin: AtomicUsize,
    end: AtomicUsize,
    /// What can be replaced: pages of this size.
    page: AtomicUsize,
    /// The file, which may have been truncated; -1 for other media.
    file: AtomicI32,
    /// How many ranges were lost.
    count: AtomicUsize,
    /// Beginning and end of each; an end of 0 is not noted yet.
    ranges: [[AtomicUsize; 2]; RANGES],
    /// The beginning of the first, the end of the last.
    hull: [AtomicUsize; 2],
}

static WATCHED: [Region; REGIONS] = [const { Region::new() }; REGIONS];

/// Whether any mapping has ever lost anything: most processes never see that.
static ANY: AtomicBool = AtomicBool::new(false);

/// Watches a mapping for as long as this lives.
#[derive(Debug)]
pub(super) struct Watch {
    region: &'static Region,
    /// In a forked child the region is free, or what the child itself watches.
    origin: Origin,
}

impl Watch {
    /// Watches `len` bytes at `addr`, which are mapped until after this is dropped. `page` is the
    /// smallest part of them that can be mapped anew; `file` is what was mapped, if that is a file,
    /// and stays open.
    pub(super) fn new(
        addr: usize,
        len: usize,
        page: usize,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<Self> {
        // Before anything is watched, so that there is no child that watches.
        forget_in_children()?;
        let origin = Origin::here().map_err(io::Error::other)?;
        chain::install()?;
        let full = || io::Error::other(format!("{REGIONS} mappings are already being watched"));
        let region = WATCHED.iter().find(|region| region.take());
        let region = region.ok_or_else(full)?;
        let file = file.map_or(-1, |file| file.as_raw_fd());
        region.watch(addr, len, page, file);
        Ok(Self { region, origin })
    }

    /// Whether any of `len` bytes at `addr` were lost; all are in a forked child.
    pub(super) fn is_lost(&self, addr: usize, len: usize) -> bool {
        !self.origin.is_here() || (any() && self.region.has_lost(addr, addr + len))
    }

    /// How many ranges were lost.
    pub(super) fn losses(&self) -> usize {
        match self.origin.is_here() {
            true => self.region.count.load(Ordering::Acquire),
            false => 0,
        }
    }
}

impl Watch {
    /// Notes what a mapping had lost in whose place this one comes.
    pub(super) fn note(&self, addr: usize, len: usize) {
        self.region.note(addr, addr + len);
        ANY.store(true, Ordering::Release);
    }

    /// What was lost, by addresses: beginning and end of each range, in no order. `None` while a
    /// loss is being noted.
    pub(super) fn lost(&self) -> Option<Vec<(usize, usize)>> {
        let region = &self.region;
        let count = self.losses();
        let read = |range: &[AtomicUsize; 2]| {
            let end = range[1].load(Ordering::Acquire);
            (end > 0).then(|| (range[0].load(Ordering::Relaxed), end))
        };
        match region.ranges.get(..count) {
            Some(ranges) => ranges.iter().map(read).collect(),
            None => Some(vec![read(&region.hull)?]),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.origin.is_here() {
            self.region.begin.store(FREE, Ordering::Release);
        }
    }
}

impl Region {
    const fn new() -> Self {
        Self {
            begin: AtomicUsize::new(FREE),
            end: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            file: AtomicI32::new(-1),
            count: AtomicUsize::new(0),
            ranges: [const { [const { AtomicUsize::new(0) }; 2] }; RANGES],
            hull: [const { AtomicUsize::new(0) }; 2],
        }
    }

    /// Takes the region, unless it is in use.
    fn take(&self) -> bool {
        let taken = self
            .begin
            .compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        // Whoever reads what is stored from here on sees that the region was taken: `region_of`.
        fence(Ordering::Release);
        taken.is_ok()
    }

    /// Watches from now on; the caller has taken the region.
    fn watch(&self, addr: usize, len: usize, page: usize, file: i32) {
        for end in self.ranges.iter().map(|range| &range[1]) {
            end.store(0, Ordering::Relaxed);
        }
        self.count.store(0, Ordering::Relaxed);
        self.hull[0].store(usize::MAX, Ordering::Relaxed);
        self.hull[1].store(0, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.file.store(file, Ordering::Relaxed);
        self.end.store(addr + len, Ordering::Relaxed);
        // The handler reads this first.
        self.begin.store(addr, Ordering::Release);
    }

    fn has_lost(&self, begin: usize, end: usize) -> bool {
        let count = self.count.load(Ordering::Acquire);
        let overlaps = |range: &[AtomicUsize; 2]| {
            let lost_end = range[1].load(Ordering::Acquire);
            // What is counted and not noted yet may be anywhere.
            lost_end == 0 || (begin < lost_end && range[0].load(Ordering::Relaxed) < end)
        };
        match self.ranges.get(..count) {
            Some(ranges) => ranges.iter().any(overlaps),
            None => overlaps(&self.hull),
        }
    }

    /// What is lost when the page at `addr` is: that page, or all behind the end of a file that
    /// was truncated before it. Gives the bytes that are lost, and where the pages to replace
    /// begin: the last page of a file is there as long as any byte of it is.
    fn lost_with(&self, addr: usize) -> Lost {
        let begin = self.begin.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        let at = addr & !(page - 1);
        let file = self.file.load(Ordering::Relaxed);
        // SAFETY: all zeros are a valid `stat`.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is writable; a handler may ask so.
        if file >= 0 && unsafe { libc::fstat(file, &raw mut stat) } == 0 {
            let behind = begin.saturating_add(stat.st_size as usize);
            // Otherwise this very page has failed, though it is inside the file.
            if behind <= at {
                return Lost {
                    begin: behind,
                    pages: behind.next_multiple_of(page),
                    end: self.end.load(Ordering::Relaxed),
                };
            }
        }
        Lost {
            begin: at,
            pages: at,
            end: at + page,
        }
    }

    fn note(&self, begin: usize, end: usize) {
        self.hull[0].fetch_min(begin, Ordering::AcqRel);
        self.hull[1].fetch_max(end, Ordering::AcqRel);
        let index = self.count.fetch_add(1, Ordering::AcqRel);
        if let Some(range) = self.ranges.get(index) {
            range[0].store(begin, Ordering::Relaxed);
            range[1].store(end, Ordering::Release);
        }
    }
}

/// A part of a mapping that is lost.
struct Lost {
    /// The first byte that is.
    begin: usize,
    /// The first page to replace.
    pages: usize,
    end: usize,
}

/// Whether any mapping of this process has lost anything.
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Acquire)
}

/// Whether any of `len` bytes at `addr`, in one mapping, were lost.
pub(crate) fn is_lost(addr: usize, len: usize) -> bool {
    any() && region_of(addr).is_some_and(|region| region.has_lost(addr, addr + len))
}

fn region_of(addr: usize) -> Option<&'static Region> {
    WATCHED.iter().find(|region| {
        let begin = region.begin.load(Ordering::Acquire);
        let inside = begin > TAKEN && (begin..region.end.load(Ordering::Relaxed)).contains(&addr);
        // Both of one mapping: the region may have been given back and taken anew in between.
        fence(Ordering::Acquire);
        inside && region.begin.load(Ordering::Relaxed) == begin
    })
}

/// Makes sure that children watch nothing. Cheap after the first call.
fn forget_in_children() -> io::Result<()> {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if !INSTALLED.load(Ordering::SeqCst) {
        // Twice does no harm, see `fork::install`.
        // SAFETY: it stores to atomics alone.
        unsafe { fork::at_fork(None, None, forget_in_child) }.map_err(io::Error::other)?;
        INSTALLED.store(true, Ordering::SeqCst);
    }
    Ok(())
}

extern "C" fn forget_in_child() {
    for region in &WATCHED {
        region.begin.store(FREE, Ordering::SeqCst);
    }
}

/// A fault at `addr`: puts zeroed memory in the place of what holds it, and notes the loss before
/// anybody can use it. False when nothing is watched there. For the handler: only atomics, `fstat`
/// and `mmap`.
fn replace(addr: usize) -> bool {
    let Some(region) = region_of(addr) else {
        return false;
    };
    let Lost { begin, pages, end } = region.lost_with(addr);
    region.note(begin, end);
    ANY.store(true, Ordering::Release);
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(pages);
    // SAFETY: whole pages of a watched mapping, whose bytes nobody refers to by reference and which
    // stays mapped while it is used, as it is by whoever touched it.
    let mapped = unsafe { libc::mmap(at, end - pages, protection, flags, -1, 0) };
    mapped == at
}
