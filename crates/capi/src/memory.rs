//! The caller's memory: the bytes of blocks, each in one or many pieces, and when it has them back.
//!
//! A call that answers has seen to it by itself that nothing uses its memory any more. One that
//! panics has not: lanes may still be at work for it. So all memory of a call has an owner, of
//! which each lane has a clone for as long as it touches a byte. What unwinds through a call waits
//! until the last of them is gone, and ends the process where one stays: memory that the caller
//! takes for its own again would be read, or written, behind its back.

use std::ffi::c_void;
use std::process::abort;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_store::{BlockBuffers, Buffer};
use parking_lot::Mutex;

use crate::given::{In, Plain};
use crate::guard::Failure;

/// How long what unwinds waits for lanes: longer than a sound one takes for what it is at, a slice
/// on a slow medium.
const PATIENCE: Duration = Duration::from_secs(120);

/// `kvd_buffer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Piece {
    /// Where it lies.
    pub data: *mut c_void,
    /// Bytes.
    pub len: usize,
}

/// `kvd_block`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Block {
    /// Its pieces, in their order.
    pub pieces: In<Piece>,
    /// How many.
    pub pieces_len: usize,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Piece {}

// SAFETY: pointers and numbers.
unsafe impl Plain for Block {}

/// Whether anybody still has some memory.
#[derive(Debug, Default)]
struct Use {
    is_over: Mutex<bool>,
    ended: Condvar,
}

/// What keeps it in use: the owner that buffers have.
#[derive(Debug)]
struct Kept(Arc<Use>);

impl Drop for Kept {
    fn drop(&mut self) {
        *self.0.is_over.lock() = true;
        self.0.ended.notify_all();
    }
}

/// The memory of a call, or of something that was opened. The first thing that a call makes, so
/// that it is the last one to go.
#[derive(Debug)]
pub(crate) struct Lent {
    /// `None` once it is wanted back.
    kept: Option<Arc<Kept>>,
    uses: Arc<Use>,
    patience: Duration,
    /// Whether this thread was unwinding before: then that is not this call's.
    unwound: bool,
}

impl Lent {
    pub(crate) fn new() -> Lent {
        Lent::with_patience(PATIENCE)
    }

    fn with_patience(patience: Duration) -> Lent {
        let uses = Arc::<Use>::default();
        Lent {
            kept: Some(Arc::new(Kept(Arc::clone(&uses)))),
            uses,
            patience,
            unwound: thread::panicking(),
        }
    }

    /// Waits until nobody has any of it, so long at most; whether that is so.
    fn is_back(&mut self, until: Option<Instant>) -> bool {
        self.kept = None;
        let mut is_over = self.uses.is_over.lock();
        while !*is_over {
            match until {
                None => self.uses.ended.wait(&mut is_over),
                Some(until) => {
                    if self.uses.ended.wait_until(&mut is_over, until).timed_out() {
                        return *is_over;
                    }
                }
            }
        }
        true
    }

    /// Waits until nobody has any of it.
    pub(crate) fn take_back(mut self) {
        let _back = self.is_back(None);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !thread::panicking() || self.unwound {
            return;
        }
        let until = Instant::now() + self.patience;
        if !self.is_back(Some(until)) {
            tracing::error!("a fault of kvdepot, and a lane has not let go of the caller's memory");
            abort();
        }
    }
}

impl Piece {
    /// As the crates below have it.
    pub(crate) fn buffer(
        &self,
        lent: &Lent,
        field: &str,
        is_written: bool,
    ) -> Result<Buffer, Failure> {
        let addr = self.data.addr();
        let reason = match (addr, self.len) {
            (_, 0) => Some(("0 bytes".to_owned(), "at least one byte")),
            (0, _) => Some(("NULL".to_owned(), "memory of this process")),
            (_, len) if addr.checked_add(len).is_none() => {
                let value = format!("{len} bytes at {addr:#x}");
                Some((value, "memory that ends below 2^64"))
            }
            _ => None,
        };
        if let Some((value, allowed)) = reason {
            return Err(Failure::input(field, value, allowed));
        }
        let Some(kept) = &lent.kept else {
            return Err(Failure::input(
                field,
                "memory",
                "none of what was taken back",
            ));
        };
        let owner = Arc::<Kept>::clone(kept);
        self.data.expose_provenance();
        // SAFETY: it begins above 0 and ends below 2^64, as was just looked at. The header asks the
        // caller for memory of so many bytes that nobody else writes (or, of destinations, uses)
        // until the call has returned, or what it has opened has let go of it; a call that panics
        // returns when the last clone of the owner is gone (`Lent`). Nothing here makes a reference
        // to them.
        Ok(unsafe { Buffer::from_raw(addr, self.len, is_written, owner) })
    }
}

/// The memory of so many pieces.
pub(crate) fn pieces(
    lent: &Lent,
    field: &str,
    pieces: &[Piece],
    is_written: bool,
) -> Result<Vec<Buffer>, Failure> {
    let each = pieces.iter().enumerate();
    each.map(|(nth, piece)| piece.buffer(lent, &format!("{field}[{nth}]"), is_written))
        .collect()
}

/// The memory of so many blocks.
pub(crate) fn buffers(
    lent: &Lent,
    field: &str,
    blocks: &[Block],
    is_written: bool,
) -> Result<BlockBuffers, Failure> {
    let mut all = BlockBuffers::default();
    for (at, block) in blocks.iter().enumerate() {
        if block.pieces_len == 0 {
            let field = format!("{field}[{at}].pieces_len");
            return Err(Failure::input(field, 0, "at least one piece"));
        }
        let field = format!("{field}[{at}].pieces");
        let given = block.pieces.slice(&field, block.pieces_len)?;
        all.push(pieces(lent, &field, given, is_written)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::guard::{Status, guard};

    /// Set in the process that is to abort.
    const STAYS: &str = "KVDEPOT_TEST_LANE_STAYS";

    /// A call that hands memory to a lane, and then panics.
    fn panics(lent: Lent, lane: impl FnOnce(&Buffer) + Send + 'static) -> Status {
        let mut bytes = [7_u8; 8];
        let piece = Piece {
            data: bytes.as_mut_ptr().cast(),
            len: bytes.len(),
        };
        guard(move || {
            let lent = lent;
            let buffer = piece.buffer(&lent, "bytes", false)?;
            let _lane = thread::spawn(move || {
                lane(&buffer);
                drop(buffer);
            });
            panic!("on purpose");
        })
    }

    #[test]
    fn who_panics_returns_when_no_lane_reads_the_memory_any_more() {
        let has_read = Arc::new(AtomicBool::new(false));
        let its = Arc::clone(&has_read);
        let status = panics(Lent::new(), move |buffer| {
            // Far longer than the panic takes.
            thread::sleep(Duration::from_millis(300));
            assert_eq!(buffer.to_vec(), [7; 8]);
            its.store(true, Ordering::Release);
        });
        assert_eq!(status, Status::Bug);
        assert!(has_read.load(Ordering::Acquire));
    }

    #[test]
    fn who_panics_before_a_lane_has_the_memory_returns_at_once() {
        let status = guard(|| {
            let _lent = Lent::new();
            panic!("on purpose");
        });
        assert_eq!(status, Status::Bug);
    }

    #[test]
    fn a_lane_that_stays_ends_the_process() {
        if std::env::var_os(STAYS).is_some() {
            let lent = Lent::with_patience(Duration::from_millis(100));
            panics(lent, |_| thread::sleep(Duration::from_secs(600)));
            return;
        }
        let name = "memory::tests::a_lane_that_stays_ends_the_process";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact"]).env(STAYS, "1");
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        // SIGABRT.
        assert_eq!(command.status().unwrap().signal(), Some(6));
    }
}
