//! A hang is a failure: a thread that looks whether the history under way is overdue.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The history under way: when it began, and what to say when it hangs.
static UNDER_WAY: Mutex<Option<(Instant, Duration, String)>> = Mutex::new(None);
/// Where it is.
static STEP: AtomicU64 = AtomicU64::new(0);

/// Exit status of a process that hung.
pub const HUNG: i32 = 3;

/// Starts the thread, once a process.
///
/// # Panics
/// When it cannot be started.
pub fn start() {
    let look = || {
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let under_way = lock();
            let Some((begun, limit, text)) = &*under_way else {
                continue;
            };
            if begun.elapsed() > *limit {
                let step = STEP.load(Ordering::Relaxed);
                println!("FAILED: a call did not end within {limit:?} (step {step})\n{text}");
                #[expect(
                    clippy::exit,
                    reason = "nothing else ends a process whose thread hangs"
                )]
                std::process::exit(HUNG);
            }
        }
    };
    std::thread::Builder::new().spawn(look).unwrap();
}

/// A history begins, and ends within `limit`, or the process ends saying `text`.
pub fn begin(limit: Duration, text: String) {
    *lock() = Some((Instant::now(), limit, text));
}

/// It is at this step.
pub fn at(step: u64) {
    STEP.store(step, Ordering::Relaxed);
}

/// It has ended.
pub fn end() {
    *lock() = None;
}

fn lock() -> std::sync::MutexGuard<'static, Option<(Instant, Duration, String)>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}
