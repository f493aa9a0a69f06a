//! The caller's memory: the bytes of blocks in one or more pieces, and their release.
//!
//! A call that returns normally has ensured that no thread uses its memory. After a panic, copy
//! threads may still use it. Therefore all memory of a call has an owner, and each copy thread has
//! a clone of the owner while it accesses the memory. A panic that unwinds through a call waits
//! until the last clone is dropped. If one stays, it aborts the process: the caller would otherwise
//! reuse memory that a thread still reads or writes.

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

/// Longest wait of a panic for copy threads: longer than a working thread needs for one slice on a
/// slow medium.
const PATIENCE: Duration = Duration::from_secs(120);

/// A range of memory, `kvd_buffer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Piece {
    /// Address of the memory.
    pub data: *mut c_void,
    /// Size in bytes, at least 1.
    pub len: usize,
}

/// The memory of one block, `kvd_block`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Block {
    /// The pieces, in the order of the block's bytes.
    pub pieces: In<Piece>,
    /// Number of pieces, at least 1.
    pub pieces_len: usize,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Piece {}

// SAFETY: pointers and numbers.
unsafe impl Plain for Block {}

/// State of some memory: in use or released.
#[derive(Debug, Default)]
struct Use {
    is_over: Mutex<bool>,
    ended: Condvar,
}

/// Owner of buffers: the memory is in use until the last clone is dropped.
#[derive(Debug)]
struct Kept(Arc<Use>);

impl Drop for Kept {
    fn drop(&mut self) {
        *self.0.is_over.lock() = true;
        self.0.ended.notify_all();
    }
}

/// The memory of a call, or of an object that was opened. A call makes it first, so that it is
/// dropped last.
#[derive(Debug)]
pub(crate) struct Lent {
    /// `None` after the release was requested.
    kept: Option<Arc<Kept>>,
    uses: Arc<Use>,
    patience: Duration,
    /// True if this thread was unwinding before the call.
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

    /// Waits for the release of the memory until `until`. Returns true if it is released.
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

    /// Waits for the release of the memory.
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
            tracing::error!(
                "internal error: a copy thread still uses the caller's memory; ending the process"
            );
            abort();
        }
    }
}

impl Piece {
    /// Converts the range into a buffer of the crates below.
    pub(crate) fn buffer(
        &self,
        lent: &Lent,
        field: &str,
        is_written: bool,
    ) -> Result<Buffer, Failure> {
        let addr = self.data.addr();
        let reason = match (addr, self.len) {
            (_, 0) => Some(("0 bytes".to_owned(), "at least one byte")),
            (0, _) => Some(("NULL".to_owned(), "host memory")),
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
                "released memory",
                "memory that is not released",
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

/// Converts pieces into buffers.
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

/// Converts blocks into buffers.
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
