//! Whose time is over, and who has gone: one thread that looks at what is under way while anything
//! is, and now and then at what is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use parking_lot::Mutex;

/// How often it looks. A task ends at most so long, and what ending takes, behind its time.
const EVERY: Duration = Duration::from_millis(20);

/// How often it looks where nothing is under way, and something is kept.
const KEPT_EVERY: Duration = Duration::from_secs(1);

/// What a look has found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// Something is under way.
    Busy,
    /// Nothing is, but something may have to go later.
    Kept,
    Nothing,
}

/// Looks without a new task after which it sleeps until there is one: waking it costs a submitter
/// more than a small request takes.
const AWAKE: u32 = 100;

pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    /// Tasks begun so far.
    begun: AtomicU64,
    is_asleep: AtomicBool,
    is_over: Mutex<bool>,
    woken: Condvar,
}

impl Watch {
    /// Calls `look` now and then, which says what it has found. It is told when it is to look at
    /// what is kept, too.
    pub(crate) fn start(
        mut look: impl FnMut(Instant, bool) -> Found + Send + 'static,
    ) -> std::io::Result<Watch> {
        let shared = Arc::new(Shared::default());
        let its = Arc::clone(&shared);
        let thread = kvdepot_host::cpu::spawn("kvdepot-watch", move || run(&its, &mut look))?;
        Ok(Watch {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// A task has begun.
    pub(crate) fn begin(&self) {
        self.shared.begun.fetch_add(1, Ordering::SeqCst);
        if self.shared.is_asleep.load(Ordering::SeqCst) {
            drop(self.shared.is_over.lock());
            self.shared.woken.notify_all();
        }
    }

    /// Ends the thread.
    pub(crate) fn close(&self) {
        *self.shared.is_over.lock() = true;
        self.shared.woken.notify_all();
        let thread = self.thread.lock().take();
        // It catches nothing, and has nothing to say.
        drop(thread.map(JoinHandle::join));
    }
}

fn run(shared: &Shared, look: &mut impl FnMut(Instant, bool) -> Found) {
    let (mut seen, mut idle, mut found) = (0, 0, Found::Nothing);
    let mut looked = Instant::now();
    let mut is_over = shared.is_over.lock();
    while !*is_over {
        if idle >= AWAKE {
            shared.is_asleep.store(true, Ordering::SeqCst);
            // A task that has begun meanwhile saw it awake.
            if shared.begun.load(Ordering::SeqCst) == seen {
                match found {
                    Found::Nothing => shared.woken.wait(&mut is_over),
                    _ => drop(shared.woken.wait_for(&mut is_over, KEPT_EVERY)),
                }
            }
            shared.is_asleep.store(false, Ordering::SeqCst);
        } else {
            shared.woken.wait_for(&mut is_over, EVERY);
        }
        let begun = shared.begun.load(Ordering::SeqCst);
        let now = Instant::now();
        let kept = now.saturating_duration_since(looked) >= KEPT_EVERY;
        if kept {
            looked = now;
        }
        found = parking_lot::MutexGuard::unlocked(&mut is_over, || look(now, kept));
        idle = match found == Found::Busy || begun != seen {
            true => 0,
            false => AWAKE.min(idle + 1),
        };
        seen = begun;
    }
}
