//! File I/O at offsets, with an io_uring ring, a bounded set of threads, or the USRBIO rings of a
//! 3FS.
//!
//! For a file that was opened with `O_DIRECT`, the system reports the required alignment of
//! positions, lengths and memory. Other transfers use the staging buffer. Interrupted or partial
//! calls are continued. Errors keep the system's number ([`Failure::Os`]).
//!
//! If a file has a [`Losses`] listener, bytes that the medium fails to return read as zeros, which
//! fail verification.

mod aligned;
mod hands;
mod job;
pub mod plain;
mod ring;
mod threads;
mod usrbio;

pub use aligned::{Aligned, PAGE};
pub use hands::Hands;
use job::{Enlisted, Performs};
pub use usrbio::UsrbioConfig;
pub(crate) use usrbio::is_used as uses_3fs;

use crate::buffer::Buffer;
use crate::carrier::{Alignment, Carrier, Op, Receipt, Registration, SlabMemory};
use crate::error::{Error, Failure, Result};
use crate::memory::Descriptor;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

/// A listener for ranges of a file that the medium has lost.
pub trait Losses: fmt::Debug + Send + Sync {
    /// Reports that the medium has lost `len` bytes at offset `at`; `error` is the error of the
    /// system.
    fn lost(&self, at: u64, len: u64, error: &io::Error);
}

/// The I/O mode of a file: buffered or direct, with its alignment.
///
/// Files that are opened in the same way on one file system have the same mode, so it needs to be
/// queried only once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manner {
    is_direct: bool,
    alignment: Alignment,
}

impl Manner {
    /// Buffered I/O, through the page cache.
    pub const CACHED: Manner = Manner {
        is_direct: false,
        alignment: Alignment::NONE,
    };

    /// Returns the mode of an open file.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if its flags cannot be read.
    pub fn of(fd: BorrowedFd<'_>) -> Result<Manner> {
        Ok(Manner::with(fd, flags(fd)?))
    }

    fn with(fd: BorrowedFd<'_>, flags: OFlags) -> Manner {
        match flags.contains(OFlags::DIRECT) {
            true => Manner {
                is_direct: true,
                alignment: direct(fd),
            },
            false => Manner::CACHED,
        }
    }

    /// Returns true if the file bypasses the page cache.
    #[must_use]
    pub fn is_direct(self) -> bool {
        self.is_direct
    }
}

fn flags(fd: BorrowedFd<'_>) -> Result<OFlags> {
    rustix::fs::fcntl_getfl(fd).map_err(|errno| look(errno.into()))
}

fn look(source: io::Error) -> Error {
    Error::io("examine", "file", source)
}

/// A file whose bytes batches can move.
#[derive(Debug)]
pub struct File {
    /// There until the drop.
    fd: Option<Descriptor>,
    enlisted: Enlisted,
    writable: bool,
    is_direct: bool,
    alignment: Alignment,
    hands: Arc<Hands>,
    losses: Option<Arc<dyn Losses>>,
}

impl File {
    /// Creates a file from an open descriptor and the engine that reads and writes it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if its flags cannot be read, or if it was opened for appending. The system
    /// would then write at its end regardless of the offset.
    pub fn new(fd: impl Into<Descriptor>, hands: &Arc<Hands>) -> Result<Arc<Self>> {
        Self::with(fd, hands, None)
    }

    /// Creates a file as [`File::new`] does, with a listener for lost ranges. Lost ranges read as
    /// zeros.
    ///
    /// # Errors
    ///
    /// The errors of [`File::new`].
    pub fn heard(
        fd: impl Into<Descriptor>,
        hands: &Arc<Hands>,
        losses: Arc<dyn Losses>,
    ) -> Result<Arc<Self>> {
        Self::with(fd, hands, Some(losses))
    }

    fn with(
        fd: impl Into<Descriptor>,
        hands: &Arc<Hands>,
        losses: Option<Arc<dyn Losses>>,
    ) -> Result<Arc<Self>> {
        let owned = fd.into();
        let fd = owned.get().map_err(|error| look(io::Error::other(error)))?;
        let flags = flags(fd)?;
        if flags.contains(OFlags::APPEND) {
            let problem = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(Error::io(
                "write at offsets in",
                "a file opened with O_APPEND",
                problem,
            ));
        }
        let manner = Manner::with(fd, flags);
        let writable = flags & OFlags::RWMODE != OFlags::RDONLY;
        Ok(Self::made((owned, writable), hands, manner, losses))
    }

    /// Creates a file from an open descriptor whose properties are known; `writable` is true if it
    /// can be written.
    ///
    /// The call checks nothing. Wrong properties cause errors of later reads and writes.
    pub fn known(
        (fd, writable): (impl Into<Descriptor>, bool),
        hands: &Arc<Hands>,
        manner: Manner,
    ) -> Arc<Self> {
        Self::made((fd.into(), writable), hands, manner, None)
    }

    fn made(
        (fd, writable): (Descriptor, bool),
        hands: &Arc<Hands>,
        manner: Manner,
        losses: Option<Arc<dyn Losses>>,
    ) -> Arc<Self> {
        let Manner {
            is_direct,
            mut alignment,
        } = manner;
        if hands.of_3fs().is_some() {
            alignment = Alignment::NONE;
        }
        if hands.patience().is_some() {
            alignment.memory = None;
        }
        Arc::new(Self {
            fd: Some(fd),
            enlisted: Enlisted::default(),
            writable,
            is_direct,
            alignment,
            hands: Arc::clone(hands),
            losses,
        })
    }

    /// Registers the file with 3FS now, in the calling thread, which may hang as long as the mount
    /// does.
    ///
    /// Without this call, a background thread registers the file when its first bytes move. A
    /// failure is reported when bytes move.
    pub fn enlist(&self) {
        if let Some(usrbio) = self.hands.of_3fs() {
            let _seen_later = usrbio.enlist(self);
        }
    }

    /// Returns the descriptor.
    ///
    /// # Errors
    ///
    /// The error of the host in a forked child, which does not have the descriptor.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        let fd = self.fd.as_ref().ok_or(Errno::BADF)?;
        fd.get().map_err(io::Error::other)
    }

    /// Reads `out.len()` bytes at offset `at` in the calling thread, for data that batches do not
    /// move.
    ///
    /// # Errors
    ///
    /// The errors of the system; [`io::ErrorKind::UnexpectedEof`] if the file ends before.
    pub fn read_exact_at(&self, at: u64, out: &mut [u8]) -> io::Result<()> {
        let (begin, mut pages, skip) = self.pages(at, out.len());
        let enough = skip + out.len();
        if self.fill(begin, &mut pages, enough)? < enough {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.copy_from_slice(&pages[skip..enough]);
        Ok(())
    }

    /// Reads until there is enough, or the file's end; how many bytes.
    fn fill(&self, begin: u64, pages: &mut [u8], enough: usize) -> io::Result<usize> {
        let mut done = 0;
        while done < enough {
            match rustix::io::pread(self.fd()?, &mut pages[done..], begin + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(done)
    }

    /// Writes `bytes` at offset `at` in the calling thread, for data that batches do not move.
    ///
    /// If direct I/O requires whole pages, the call reads and rewrites the other bytes of these
    /// pages. No other thread or process may write them at the same time.
    ///
    /// # Errors
    ///
    /// The errors of the system.
    pub fn write_all_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let (begin, mut pages, skip) = self.pages(at, bytes.len());
        if pages.len() != bytes.len() {
            let all = pages.len();
            // What is behind the end is zeros.
            self.fill(begin, &mut pages, all)?;
        }
        pages[skip..skip + bytes.len()].copy_from_slice(bytes);
        self.put_all(begin, &pages)
    }

    /// Writes `bytes` at offset `at` through the page cache, also if the file bypasses it
    /// otherwise.
    ///
    /// No other thread or process may use the file yet. The bytes reach the medium later, or when
    /// the file is synced.
    ///
    /// # Errors
    ///
    /// The errors of the system.
    pub fn write_cached_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        if !self.is_direct {
            return self.put_all(at, bytes);
        }
        let fd = self.fd()?;
        let flags = rustix::fs::fcntl_getfl(fd)?;
        rustix::fs::fcntl_setfl(fd, flags - OFlags::DIRECT)?;
        let written = self.put_all(at, bytes);
        let again = rustix::fs::fcntl_setfl(fd, flags);
        written.and_then(|()| again.map_err(io::Error::from))
    }

    fn put_all(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(self.fd()?, &bytes[done..], at + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Memory for a range with what direct I/O takes around it: where that begins in the file, and
    /// the range in it.
    fn pages(&self, at: u64, len: usize) -> (u64, Pages, usize) {
        if !self.is_direct {
            return (at, Pages::Any(vec![0; len]), 0);
        }
        let skip = at % PAGE as u64;
        let pages = Pages::Direct(Aligned::new(skip as usize + len));
        (at - skip, pages, skip as usize)
    }

    /// Returns a buffer over `len` bytes of the file at `offset`. The buffer keeps the file open.
    #[must_use]
    pub fn buffer(self: &Arc<Self>, offset: usize, len: usize) -> Buffer {
        let carrier = Arc::clone(self) as Arc<dyn Carrier>;
        Buffer::carried(carrier, offset, len, self.writable)
    }

    /// Reads or writes some of what a receipt asks for; how many bytes, or the system's error.
    fn call(&self, receipt: &Receipt, done: usize, len: usize) -> std::result::Result<usize, i32> {
        let fd = self.fd().map_err(|_| libc::EBADF)?.as_raw_fd();
        let memory = receipt.memory().wrapping_add(done).cast::<libc::c_void>();
        let at = libc::off_t::try_from(receipt.at() + done as u64);
        let at = at.map_err(|_| libc::EOVERFLOW)?;
        // SAFETY: the memory is `receipt.len()` bytes long and, to be read into, writable for
        // as long as the receipt lives; the system returns an error where it is gone.
        let moved = unsafe {
            match receipt.op() {
                Op::Read => libc::pread(fd, memory, len, at),
                Op::Write => libc::pwrite(fd, memory, len, at),
            }
        };
        let errno = |_| io::Error::last_os_error().raw_os_error();
        usize::try_from(moved).map_err(|error| errno(error).unwrap_or(libc::EIO))
    }
}

impl Performs for File {
    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        File::fd(self)
    }

    fn enlisted(&self) -> &Enlisted {
        &self.enlisted
    }

    fn perform(&self, receipt: &Receipt) -> std::result::Result<usize, Failure> {
        let (mut done, mut most) = (0, usize::MAX);
        while done < receipt.len() {
            let len = (receipt.len() - done).min(most);
            let error = match self.call(receipt, done, len) {
                // With what lies behind the end nobody can do anything, or nobody wants it.
                Ok(0) if self.losses.is_none() || done >= receipt.least() => break,
                Ok(0) => io::ErrorKind::UnexpectedEof.into(),
                Ok(moved) => {
                    done += moved;
                    continue;
                }
                Err(libc::EINTR) => continue,
                Err(errno) => io::Error::from_raw_os_error(errno),
            };
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let losses = self.losses.as_ref().filter(|_| errno == libc::EIO);
            let losses = losses.ok_or(Failure::Os { errno })?;
            if len > PAGE {
                // No more is lost than must be.
                most = PAGE;
                continue;
            }
            losses.lost(receipt.at() + done as u64, len as u64, &error);
            if receipt.op() == Op::Write {
                return Err(Failure::Os { errno });
            }
            let memory = receipt.memory().wrapping_add(done);
            // SAFETY: memory of the receipt, as in `call`.
            unsafe { memory.write_bytes(0, len) };
            done += len;
        }
        Ok(done)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if let (Some(usrbio), Some(fd)) = (self.hands.of_3fs(), self.fd.take()) {
            usrbio.close(fd, &self.enlisted);
        }
    }
}

impl Carrier for File {
    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn hands(&self) -> usize {
        Arc::as_ptr(&self.hands).addr()
    }

    fn is_slow(&self) -> bool {
        true
    }

    fn patience(&self, _op: Op) -> Option<Duration> {
        self.hands.patience()
    }

    fn registrar(&self) -> usize {
        let usrbio = self.hands.of_3fs();
        usrbio.map_or(0, |usrbio| Arc::as_ptr(usrbio).addr())
    }

    fn register(self: Arc<Self>, memory: &SlabMemory) -> Option<Registration> {
        self.hands.of_3fs()?.register(memory)
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let (hands, direct) = (Arc::clone(&self.hands), self.is_direct);
        let jobs = receipts.into_iter();
        hands.push(
            direct,
            jobs.map(|receipt| (Arc::clone(&self) as _, receipt)),
        );
    }
}

/// Memory for a call, by what the file takes.
enum Pages {
    Any(Vec<u8>),
    Direct(Aligned),
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Any(bytes) => bytes,
            Self::Direct(pages) => pages,
        }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Any(bytes) => bytes,
            Self::Direct(pages) => pages,
        }
    }
}

/// What direct I/O on a file takes.
fn direct(fd: BorrowedFd<'_>) -> Alignment {
    let asked = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let told = asked
        .ok()
        .map(|file| file.stx_dio_mem_align.max(file.stx_dio_offset_align));
    // One number for both: regions and buffers of engines lie at pages anyway.
    let most = PAGE as u64;
    let at = told.map_or(most, u64::from);
    let at = if at.is_power_of_two() && at <= most {
        at
    } else {
        most
    };
    Alignment {
        at,
        memory: Some(at as usize),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File as System;
    use std::sync::{Mutex, mpsc};

    use super::*;
    use crate::checksum::{self, PartId};
    use crate::copier::{Copier, CopierConfig};

    #[derive(Debug, Default)]
    struct Lost(Mutex<Vec<(u64, u64)>>);

    impl Losses for Lost {
        fn lost(&self, at: u64, len: u64, error: &io::Error) {
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
            self.0.lock().unwrap().push((at, len));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no flags of files")]
    fn what_the_medium_does_not_give_back_is_told_and_does_not_verify() {
        // Where this process has no memory, the system fails as a disk does.
        let mut memory = System::options();
        let memory = memory.read(true).write(true).open("/proc/self/mem");
        let (lost, hands) = (Arc::new(Lost::default()), Hands::new(1).unwrap());
        let file = File::heard(memory.unwrap(), &hands, Arc::clone(&lost) as _).unwrap();
        let copier = Copier::new(CopierConfig::default()).unwrap();
        let id = PartId {
            namespace: [1; 16],
            key: [2; 32],
            part: 0,
            parts: 1,
        };
        let pages = || file.buffer(PAGE, 2 * PAGE);
        let there = || Buffer::from_vec(vec![7; 2 * PAGE]);
        let sum = checksum::of(&id, &[7; 2 * PAGE]);
        let mut outcomes = Vec::new();
        for (from, to) in [(pages(), there()), (there(), pages())] {
            let mut batch = copier.batch();
            batch.part(&id, &[from], &[to], Some(sum), 0).unwrap();
            let (sender, ended) = mpsc::channel();
            let ticket = copier.submit(batch, move |done| {
                let (_, outcome) = done.part(0).unwrap();
                sender.send(outcome.map(|outcome| outcome.matches)).unwrap();
            });
            assert!(ticket.wait(None));
            outcomes.push(ended.recv().unwrap());
        }
        let errno = libc::EIO;
        assert_eq!(outcomes, [Ok(Some(false)), Err(Failure::Os { errno })]);
        let page = |number: u64| (number * PAGE as u64, PAGE as u64);
        assert_eq!(*lost.0.lock().unwrap(), [page(1), page(2), page(1)]);
    }
}
