//! Faults that tests inject into the lanes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The length of the units that a lane panics at; 0 for none.
static PANIC_AT: AtomicU64 = AtomicU64::new(0);

/// One fault at a time: the tests of a process share it.
static TURN: Mutex<()> = Mutex::new(());

/// A fault that lasts as long as this lives.
pub(crate) struct Fault(#[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

/// Makes every lane panic that begins a unit of exactly `len` bytes; choose an odd one.
pub(crate) fn panic_at(len: u64) -> Fault {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    PANIC_AT.store(len, Ordering::SeqCst);
    Fault(turn)
}

impl Drop for Fault {
    fn drop(&mut self) {
        PANIC_AT.store(0, Ordering::SeqCst);
    }
}

/// Called at the beginning of every unit.
pub(crate) fn strike(len: u64) {
    assert!(PANIC_AT.load(Ordering::SeqCst) != len, "injected");
}
