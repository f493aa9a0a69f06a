//! File I/O without checksums: the baseline that a simple, fast program reaches, for benchmarks.

use super::aligned::{Aligned, PAGE};
use crate::buffer::{Buffer, check_range};
use crate::carrier::Op;
use crate::error::{Error, Result};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// A method to move blocks between files and memory without hashing.
///
/// The fastest method depends on the machine and the blocks; the limit is the best of all methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainFiles {
    /// Number of threads. Each has its own ring and its share of the blocks.
    pub threads: usize,
    /// Number of requests that all threads together have in flight.
    pub depth: usize,
    /// True if files bypass the page cache.
    pub direct: bool,
    /// True if the memory and, if there is only one, the file are registered with the kernel in
    /// advance.
    pub registered: bool,
    /// True if the space of new files is allocated before they are written.
    pub allocated: bool,
}

/// The location of blocks in files.
#[derive(Clone, Copy)]
#[expect(clippy::exhaustive_enums, reason = "in files of their own, or in one")]
pub enum PlainAt<'a> {
    /// Each block is a separate file, by its name in a directory. Writes create the files.
    Each(BorrowedFd<'a>, &'a [&'a CStr]),
    /// All blocks are in one file, at these offsets.
    One(BorrowedFd<'a>, &'a [u64]),
}

impl PlainAt<'_> {
    fn count(&self) -> usize {
        match self {
            Self::Each(_, names) => names.len(),
            Self::One(_, offsets) => offsets.len(),
        }
    }
}

/// Most bytes of memory that the kernel takes as one.
const FIXED_MAX: usize = 1 << 30;

/// A baseline method with its rings, for one piece of memory.
pub struct PlainRings {
    way: PlainFiles,
    /// They go before the memory.
    rings: Vec<IoUring>,
    memory: Buffer,
}

impl PlainRings {
    /// Creates the rings.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the system provides no rings for this process, or rejects the memory.
    /// [`Error::Elsewhere`] for memory of a device, [`Error::ReadOnly`] for memory that is not
    /// writable.
    pub fn new(way: PlainFiles, memory: &Buffer) -> Result<Self> {
        memory.check_host()?;
        if !memory.is_writable() {
            let addr = memory.addr();
            return Err(Error::ReadOnly { addr });
        }
        let mut rings = Vec::new();
        for _ in 0..way.threads.max(1) {
            let entries = share(way).next_power_of_two() as u32;
            let ring = IoUring::builder()
                .dontfork()
                .setup_coop_taskrun()
                .build(entries)
                .or_else(|_| IoUring::builder().dontfork().build(entries))
                .map_err(set_up)?;
            if way.registered {
                register(&ring, memory)?;
            }
            rings.push(ring);
        }
        Ok(Self {
            way,
            rings,
            memory: memory.clone(),
        })
    }

    /// Moves block `i`, of `block` bytes, between its location in `at` and slot `slots[i]` of the
    /// memory. Slots have `block` bytes each.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] for a slot outside the memory. [`Error::Io`] if a file is missing,
    /// too short, or fails.
    pub fn run(&mut self, op: Op, at: PlainAt<'_>, block: usize, slots: &[usize]) -> Result<()> {
        for slot in slots {
            let end = self.memory.len() as u64;
            check_range((slot * block) as u64, block as u64, end)?;
        }
        let count = at.count().min(slots.len());
        let threads = self.rings.len();
        let mut shares: Vec<Share<'_>> = (0..threads)
            .zip(&mut self.rings)
            .map(|(number, ring)| Share {
                way: self.way,
                ring,
                memory: &self.memory,
                blocks: count * number / threads..count * (number + 1) / threads,
                at,
                block,
                slots,
            })
            .collect();
        let [first, others @ ..] = &mut shares[..] else {
            return Ok(());
        };
        std::thread::scope(|scope| {
            let others = others.iter_mut();
            let others: Vec<_> = others
                .map(|share| scope.spawn(move || share.run(op)))
                .collect();
            let mut ran = first.run(op);
            for other in others {
                let ended = |_| Err(fail(io::Error::other("a thread panicked")));
                let other = other.join().unwrap_or_else(ended);
                ran = ran.and(other);
            }
            ran
        })
    }
}

impl fmt::Debug for PlainRings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainRings")
            .field("way", &self.way)
            .finish_non_exhaustive()
    }
}

/// Requests that one thread has under way.
fn share(way: PlainFiles) -> usize {
    way.depth.div_ceil(way.threads.max(1)).max(1)
}

fn set_up(source: io::Error) -> Error {
    Error::io("set up", "io_uring", source)
}

/// Makes memory known to the kernel, in pieces that it takes.
fn register(ring: &IoUring, memory: &Buffer) -> Result<()> {
    let (base, len) = (memory.as_mut_ptr(), memory.len());
    let vector = |at: usize| libc::iovec {
        iov_base: base.wrapping_add(at).cast(),
        iov_len: FIXED_MAX.min(len - at),
    };
    let vectors: Vec<_> = (0..len).step_by(FIXED_MAX).map(vector).collect();
    // SAFETY: who has the ring keeps the memory, and lets go of the ring before it.
    unsafe { ring.submitter().register_buffers(&vectors) }.map_err(set_up)
}

fn fail(source: impl Into<io::Error>) -> Error {
    Error::io("copy", "a block and its file", source.into())
}

/// What one thread moves.
struct Share<'a> {
    way: PlainFiles,
    ring: &'a mut IoUring,
    memory: &'a Buffer,
    blocks: std::ops::Range<usize>,
    at: PlainAt<'a>,
    block: usize,
    slots: &'a [usize],
}

impl Share<'_> {
    fn run(&mut self, op: Op) -> Result<()> {
        let file = match self.at {
            PlainAt::One(file, _) if self.way.registered => file,
            _ => return self.keep_going(op),
        };
        let registered = self.ring.submitter().register_files(&[file.as_raw_fd()]);
        registered.map_err(set_up)?;
        let moved = self.keep_going(op);
        let forgotten = self.ring.submitter().unregister_files().map_err(set_up);
        moved.and(forgotten)
    }

    /// Keeps as many requests under way as it may; after an error it waits for those that are.
    fn keep_going(&mut self, op: Op) -> Result<()> {
        let depth = share(self.way);
        let mut open: Vec<Option<OwnedFd>> = Vec::new();
        open.resize_with(self.blocks.len(), || None);
        let (first, mut waiting) = (self.blocks.start, self.blocks.clone());
        let (mut under_way, mut ran) = (0, Ok(()));
        loop {
            while under_way < depth && ran.is_ok() {
                let Some(number) = waiting.next() else { break };
                match self.begin(op, number) {
                    Ok(file) => {
                        open[number - first] = file;
                        under_way += 1;
                    }
                    Err(error) => ran = Err(error),
                }
            }
            if under_way == 0 {
                return ran;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if ran.is_ok() => ran = Err(fail(error)),
                Err(_) => {}
            }
            for completion in self.ring.completion() {
                under_way -= 1;
                open[completion.user_data() as usize - first] = None;
                let error = match usize::try_from(completion.result()) {
                    Ok(moved) if moved == self.block => continue,
                    Ok(_) => io::ErrorKind::UnexpectedEof.into(),
                    Err(_) => io::Error::from_raw_os_error(-completion.result()),
                };
                if ran.is_ok() {
                    ran = Err(fail(error));
                }
            }
        }
    }

    /// Asks for a block; its file, where it has one of its own.
    fn begin(&mut self, op: Op, number: usize) -> Result<Option<OwnedFd>> {
        let (own, fd, offset) = match self.at {
            PlainAt::Each(dir, names) => {
                let file = self.open(op, dir, names[number])?;
                let fd = file.as_raw_fd();
                (Some(file), fd, 0)
            }
            PlainAt::One(file, offsets) => (None, file.as_raw_fd(), offsets[number]),
        };
        let memory = self.memory.as_mut_ptr();
        let place = self.slots[number] * self.block;
        let request = self.request(op, fd, memory.wrapping_add(place), place, offset);
        let request = request.user_data(number as u64);
        // SAFETY: the memory was checked to be there and is kept, and so is the file until this
        // request has completed: who has begun one waits for it.
        let put = unsafe { self.ring.submission().push(&request) };
        put.map_err(|full| fail(io::Error::other(full)))?;
        Ok(own)
    }

    fn request(&self, op: Op, fd: i32, memory: *mut u8, place: usize, at: u64) -> squeue::Entry {
        let len = self.block as u32;
        let index = (place / FIXED_MAX) as u16;
        // A block that lies in two of the kernel's pieces is none of either.
        let within = place / FIXED_MAX == (place + self.block - 1) / FIXED_MAX;
        let is_one = matches!(self.at, PlainAt::One(..));
        match (op, self.way.registered && within, is_one) {
            (Op::Read, true, true) => {
                { opcode::ReadFixed::new(types::Fixed(0), memory, len, index).offset(at) }.build()
            }
            (Op::Read, true, false) => {
                opcode::ReadFixed::new(types::Fd(fd), memory, len, index).build()
            }
            (Op::Read, false, _) => opcode::Read::new(types::Fd(fd), memory, len)
                .offset(at)
                .build(),
            (Op::Write, true, true) => opcode::WriteFixed::new(types::Fixed(0), memory, len, index)
                .offset(at)
                .build(),
            (Op::Write, true, false) => {
                opcode::WriteFixed::new(types::Fd(fd), memory, len, index).build()
            }
            (Op::Write, false, _) => opcode::Write::new(types::Fd(fd), memory, len)
                .offset(at)
                .build(),
        }
    }

    fn open(&self, op: Op, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd> {
        let direct = match self.way.direct {
            true => OFlags::DIRECT,
            false => OFlags::empty(),
        };
        let (flags, mode) = match op {
            Op::Read => (OFlags::RDONLY, Mode::empty()),
            Op::Write => (
                OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL,
                Mode::RUSR | Mode::WUSR,
            ),
        };
        let file = rustix::fs::openat(dir, name, flags | direct | OFlags::CLOEXEC, mode);
        let file = file.map_err(fail)?;
        if op == Op::Write && self.way.allocated {
            let len = self.block as u64;
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len).map_err(fail)?;
        }
        Ok(file)
    }
}

/// Returns true if a file has the name `name`. The check is one system call.
///
/// # Errors
///
/// [`Error::Io`] if the system call fails.
pub fn is_there(dir: BorrowedFd<'_>, name: &CStr) -> Result<bool> {
    match rustix::fs::accessat(dir, name, rustix::fs::Access::EXISTS, AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(fail(errno)),
    }
}

/// Writes a page to the file `new` and renames it to `name` in one step; durable if `lasts` is set.
///
/// # Errors
///
/// [`Error::Io`] if a system call fails.
pub fn publish(dir: BorrowedFd<'_>, new: &CStr, name: &CStr, lasts: bool) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = rustix::fs::openat(dir, new, flags | OFlags::DIRECT, mode).map_err(fail)?;
    write_page(&file, 0)?;
    if lasts {
        rustix::fs::fdatasync(&file).map_err(fail)?;
    }
    rustix::fs::renameat(dir, new, dir, name).map_err(fail)?;
    match lasts {
        true => rustix::fs::fsync(dir).map_err(fail),
        false => Ok(()),
    }
}

/// Writes a page at `at`, and then a page at `record` that confirms it. If `lasts` is set, each is
/// durable before the next step.
///
/// # Errors
///
/// [`Error::Io`] if a system call fails.
pub fn commit(file: &OwnedFd, at: u64, record: u64, lasts: bool) -> Result<()> {
    for at in [at, record] {
        write_page(file, at)?;
        if lasts {
            rustix::fs::fdatasync(file).map_err(fail)?;
        }
    }
    Ok(())
}

fn write_page(file: &OwnedFd, at: u64) -> Result<()> {
    let page = Aligned::new(PAGE);
    match rustix::io::pwrite(file, &page, at).map_err(fail)? {
        PAGE => Ok(()),
        _ => Err(fail(io::Error::from(io::ErrorKind::WriteZero))),
    }
}

/// The open flag for files that bypass the page cache.
pub const DIRECT: i32 = libc::O_DIRECT;

/// Allocates the space for the first `len` bytes of a file.
///
/// # Errors
///
/// [`Error::Io`] if there is too little space.
pub fn allocate(file: &std::fs::File, len: u64) -> Result<()> {
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len).map_err(fail)
}

/// Waits until all data of a file system is on its medium.
///
/// # Errors
///
/// [`Error::Io`] if the system call fails.
pub fn settle(dir: BorrowedFd<'_>) -> Result<()> {
    rustix::fs::syncfs(dir).map_err(fail)
}

/// Removes a file from the page cache, from byte `from` on.
///
/// # Errors
///
/// [`Error::Io`] if the system call fails.
pub fn cool(file: &std::fs::File, from: u64) -> Result<()> {
    rustix::fs::fadvise(file, from, None, rustix::fs::Advice::DontNeed).map_err(fail)
}
