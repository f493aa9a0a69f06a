//! Files without a checksum: what a strong straightforward program would do, to measure against.

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

/// A way to move blocks between files and memory that hashes nothing. Which one is fastest depends
/// on the machine and the blocks: the limit is the best of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainFiles {
    /// Threads, each with a ring of its own and its share of the blocks.
    pub threads: usize,
    /// Requests that all threads together have under way at a time.
    pub depth: usize,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Whether memory and, where there is only one, the file are made known to the kernel before.
    pub registered: bool,
    /// Whether new files get their space before they are written.
    pub allocated: bool,
}

/// Where blocks lie.
#[derive(Clone, Copy)]
#[expect(clippy::exhaustive_enums, reason = "in files of their own, or in one")]
pub enum PlainAt<'a> {
    /// Each is a file of its own, by its name in a directory; written ones are made.
    Each(BorrowedFd<'a>, &'a [&'a CStr]),
    /// All are in one file, at these offsets.
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

/// A plain way with its rings, from and to one piece of memory.
pub struct PlainRings {
    way: PlainFiles,
    /// They go before the memory.
    rings: Vec<IoUring>,
    memory: Buffer,
}

impl PlainRings {
    /// Makes the rings.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] where the system has none for this process, or does not take the memory;
    /// [`Error::Elsewhere`] for memory of a device, [`Error::ReadOnly`] for what cannot be written.
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

    /// Moves block `i`, of `block` bytes, between its place and the `slots[i]`-th block of the
    /// memory.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] for a slot beyond the memory, and [`Error::Io`] where a file is
    /// missing, too short, or fails.
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
    Error::io("move", "a block and its file", source.into())
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

/// Whether a name is there: one system call.
///
/// # Errors
///
/// [`Error::Io`] for what is no answer.
pub fn is_there(dir: BorrowedFd<'_>, name: &CStr) -> Result<bool> {
    match rustix::fs::accessat(dir, name, rustix::fs::Access::EXISTS, AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(fail(errno)),
    }
}

/// Writes a page and makes it the file of a name in one step, durable if it `lasts`.
///
/// # Errors
///
/// [`Error::Io`] where the system refuses.
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

/// Writes a page, and then another one that says so, each durable before the next if it `lasts`.
///
/// # Errors
///
/// [`Error::Io`] where the system refuses.
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

/// The flag of files that bypass the page cache.
pub const DIRECT: i32 = libc::O_DIRECT;

/// Gives a file its space.
///
/// # Errors
///
/// [`Error::Io`] where there is none.
pub fn allocate(file: &std::fs::File, len: u64) -> Result<()> {
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len).map_err(fail)
}

/// Waits until all of a file system is on its medium.
///
/// # Errors
///
/// [`Error::Io`] where the system refuses.
pub fn settle(dir: BorrowedFd<'_>) -> Result<()> {
    rustix::fs::syncfs(dir).map_err(fail)
}

/// Empties the page cache of a file, from this byte on.
///
/// # Errors
///
/// [`Error::Io`] where the system refuses.
pub fn cool(file: &std::fs::File, from: u64) -> Result<()> {
    rustix::fs::fadvise(file, from, None, rustix::fs::Advice::DontNeed).map_err(fail)
}
