//! Files, read and written at offsets by a bounded set of threads.
//!
//! A file that was opened with `O_DIRECT` says what positions, lengths and memory it takes, and
//! what does not fit goes through the slab. Calls that are interrupted or do less than was asked go
//! on where they stopped; errors keep the system's number ([`Failure::Os`]).

mod threads;

pub use threads::Threads;

use crate::buffer::Buffer;
use crate::carrier::{Alignment, Carrier, Op, Receipt};
use crate::error::{Error, Failure, Result};
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// What direct I/O takes on every file system, where one does not tell.
const DIRECT: u64 = 4096;

/// A file whose bytes batches move.
#[derive(Debug)]
pub struct File {
    fd: OwnedFd,
    writable: bool,
    alignment: Alignment,
    threads: Arc<Threads>,
}

impl File {
    /// A file that is open, and who reads and writes it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when its flags cannot be read, or it was opened to be appended to: the system
    /// would write at its end whatever the offset.
    pub fn new(file: impl Into<OwnedFd>, threads: &Arc<Threads>) -> Result<Arc<Self>> {
        let fd = file.into();
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(|e| Error::io("look at", "file", e))?;
        if flags.contains(OFlags::APPEND) {
            let problem = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(Error::io(
                "write at offsets of",
                "file opened to append",
                problem,
            ));
        }
        let alignment = match flags.contains(OFlags::DIRECT) {
            true => direct(&fd),
            false => Alignment::NONE,
        };
        Ok(Arc::new(Self {
            fd,
            writable: flags & OFlags::RWMODE != OFlags::RDONLY,
            alignment,
            threads: Arc::clone(threads),
        }))
    }

    /// `len` bytes of the file from `offset` on, which keep it open.
    #[must_use]
    pub fn buffer(self: &Arc<Self>, offset: usize, len: usize) -> Buffer {
        let carrier = Arc::clone(self) as Arc<dyn Carrier>;
        Buffer::carried(carrier, offset, len, self.writable)
    }

    /// Does what a receipt asks for; how many bytes, fewer at the end of the file.
    fn perform(&self, receipt: &Receipt) -> std::result::Result<usize, Failure> {
        let mut done = 0;
        while done < receipt.len() {
            let (fd, len) = (self.fd.as_raw_fd(), receipt.len() - done);
            let memory = receipt.memory().wrapping_add(done).cast::<libc::c_void>();
            let Ok(at) = libc::off_t::try_from(receipt.at() + done as u64) else {
                let errno = libc::EOVERFLOW;
                return Err(Failure::Os { errno });
            };
            // SAFETY: the memory is `receipt.len()` bytes long and, to be read into, writable for
            // as long as the receipt lives; the system returns an error where it is gone.
            let moved = unsafe {
                match receipt.op() {
                    Op::Read => libc::pread(fd, memory, len, at),
                    Op::Write => libc::pwrite(fd, memory, len, at),
                }
            };
            match usize::try_from(moved) {
                Ok(0) => break,
                Ok(moved) => done += moved,
                Err(_) => match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    errno => {
                        return Err(Failure::Os {
                            errno: errno.unwrap_or(libc::EIO),
                        });
                    }
                },
            }
        }
        Ok(done)
    }
}

impl Carrier for File {
    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn carry(self: Arc<Self>, receipts: Vec<Receipt>) {
        let threads = Arc::clone(&self.threads);
        threads.push(
            receipts
                .into_iter()
                .map(|receipt| (Arc::clone(&self), receipt)),
        );
    }
}

/// What direct I/O on a file takes.
fn direct(fd: &OwnedFd) -> Alignment {
    let asked = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let told = asked
        .ok()
        .map(|file| file.stx_dio_mem_align.max(file.stx_dio_offset_align));
    // One number for both: regions and buffers of engines lie at pages anyway.
    let at = told.map_or(DIRECT, u64::from);
    let at = if at.is_power_of_two() && at <= DIRECT {
        at
    } else {
        DIRECT
    };
    Alignment {
        at,
        memory: Some(at as usize),
    }
}
