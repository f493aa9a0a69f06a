//! Memory that fails under a mapping: a line of persistent memory that cannot be corrected, a file
//! that somebody truncated, a device that is gone. Touching it is a `SIGBUS`, which by itself ends
//! the process.
//!
//! A handler puts zeroed memory of this process in the place of what failed, and the touch goes
//! on: what is read there does not verify, and what is written there is known to be lost
//! ([`super::Mapping::is_lost`], [`crate::Failure::MemoryLost`]). Faults at any other address go to
//! the handler that was there before.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Mappings that can be watched at a time.
const REGIONS: usize = 512;

/// Lost ranges that are told apart; beyond, all between the first and the last one counts as lost.
const RANGES: usize = 30;

/// A watched mapping. The handler may only use atomics.
#[derive(Debug)]
struct Region {
    /// Where it begins; 0 for a region that is not in use.
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

static WATCHED: [Region; REGIONS] = [const {
    Region {
        begin: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        file: AtomicI32::new(-1),
        count: AtomicUsize::new(0),
        ranges: [const { [const { AtomicUsize::new(0) }; 2] }; RANGES],
        hull: [const { AtomicUsize::new(0) }; 2],
    }
}; REGIONS];

/// Whether any mapping has ever lost anything: most processes never see that.
static ANY: AtomicBool = AtomicBool::new(false);

/// Held while a region is taken or given back.
static TAKING: Mutex<()> = Mutex::new(());

/// What handled `SIGBUS` before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Watches a mapping for as long as this lives.
#[derive(Debug)]
pub(super) struct Watch {
    region: &'static Region,
    /// A forked child has nothing to give back, and the lock may be held for ever there.
    pid: u32,
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
        install()?;
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = |region: &Region| region.begin.load(Ordering::Relaxed) == 0;
        let full = || io::Error::other(format!("{REGIONS} mappings are watched already"));
        let region = WATCHED
            .iter()
            .find(|region| unused(region))
            .ok_or_else(full)?;
        for end in region.ranges.iter().map(|range| &range[1]) {
            end.store(0, Ordering::Relaxed);
        }
        region.count.store(0, Ordering::Relaxed);
        region.hull[0].store(usize::MAX, Ordering::Relaxed);
        region.hull[1].store(0, Ordering::Relaxed);
        region.page.store(page, Ordering::Relaxed);
        let file = file.map_or(-1, |file| file.as_raw_fd());
        region.file.store(file, Ordering::Relaxed);
        region.end.store(addr + len, Ordering::Relaxed);
        // The handler reads this first.
        region.begin.store(addr, Ordering::Release);
        let pid = std::process::id();
        Ok(Self { region, pid })
    }

    /// Whether any of `len` bytes at `addr` were lost.
    pub(super) fn is_lost(&self, addr: usize, len: usize) -> bool {
        any() && self.region.has_lost(addr, addr + len)
    }

    /// How many ranges were lost.
    pub(super) fn losses(&self) -> usize {
        self.region.count.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if std::process::id() == self.pid {
            let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
            self.region.begin.store(0, Ordering::Release);
        }
    }
}

impl Region {
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
    /// was truncated. Gives it to the byte.
    fn lost_with(&self, addr: usize) -> (usize, usize) {
        let begin = self.begin.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        let at = addr & !(page - 1);
        let file = self.file.load(Ordering::Relaxed);
        // SAFETY: all zeros are a valid `stat`.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is writable; a handler may ask so.
        if file >= 0 && unsafe { libc::fstat(file, &raw mut stat) } == 0 {
            let behind = begin.saturating_add(stat.st_size as usize);
            if behind < at + page {
                return (behind, self.end.load(Ordering::Relaxed));
            }
        }
        (at, at + page)
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
        begin != 0 && (begin..region.end.load(Ordering::Relaxed)).contains(&addr)
    })
}

/// Installs the handler, once in a process.
fn install() -> io::Result<()> {
    if cfg!(miri) {
        return Ok(()); // Has no signals.
    }
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    // SAFETY: all zeros are a valid `sigaction`.
    let (mut before, mut ours): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: asks only; `before` is writable.
    let mut failed = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) };
    // The handler must find what was there before, as soon as it is installed.
    let _first = BEFORE.set(before);
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
    ours.sa_sigaction = handler as libc::sighandler_t;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    if failed == 0 {
        // SAFETY: `on_fault` does only what a handler may, see there; the mask is empty.
        failed = unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) };
    }
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    *installed = true;
    Ok(())
}

/// Only atomics, `mmap` and `sigaction`, all of which a handler may use, and `errno` is kept.
extern "C" fn on_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid `info`; a positive code says that
    // it stands for a fault, which has an address.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let is_fault = code > 0;
    // SAFETY: `errno` of this thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let kept = unsafe { *errno };
    let replaced = is_fault && region_of(addr).is_some_and(|region| replace(region, addr));
    if !replaced {
        pass_on(signal, info, context, is_fault);
    }
    // SAFETY: as above.
    unsafe { *errno = kept };
}

/// Puts zeroed memory in the place of what holds `addr`, and notes the loss before anybody can use
/// it.
fn replace(region: &Region, addr: usize) -> bool {
    let (begin, end) = region.lost_with(addr);
    region.note(begin, end);
    ANY.store(true, Ordering::Release);
    // The page that a truncated file ends in is still there.
    let begin = begin.next_multiple_of(region.page.load(Ordering::Relaxed));
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(begin);
    // SAFETY: whole pages of a watched mapping, whose bytes nobody refers to by reference and which
    // stays mapped while it is used, as it is by whoever touched it.
    let mapped = unsafe { libc::mmap(at, end - begin, protection, flags, -1, 0) };
    mapped == at
}

/// Lets whoever handled the signal before handle it.
fn pass_on(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
    is_fault: bool,
) {
    let Some(before) = BEFORE.get() else {
        return;
    };
    match before.sa_sigaction {
        libc::SIG_IGN if !is_fault => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // A handler that was installed later and calls this one by `raise`, as Python's
            // faulthandler does, comes without an address; the fault itself comes again.
            // SAFETY: as in `on_fault`.
            let raised = unsafe { (*info).si_code } == libc::SI_TKILL;
            if raised {
                return;
            }
            // SAFETY: all zeros but for the default action are a valid `sigaction`.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, std::ptr::null_mut());
                if !is_fault {
                    libc::raise(signal);
                }
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with that flag it is a function of these arguments.
            unsafe {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
        }
        handler => {
            // SAFETY: without that flag it is a function of the signal's number.
            unsafe {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}
