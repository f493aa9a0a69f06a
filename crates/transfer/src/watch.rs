//! Whose time is over: one thread that looks at what is under way, while anything is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use parking_lot::Mutex;

/// How often it looks. A task ends at most so long, and what ending takes, behind its time.
const EVERY: Duration = Duration::from_millis(20);

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
    /// Calls `look` now and then, which says whether anything is under way.
    pub(crate) fn start(look: impl Fn(Instant) -> bool + Send + 'static) -> std::io::Result<Watch> {
        let shared = Arc::new(Shared::default());
        let its = Arc::clone(&shared);
        let thread = kvdepot_host::cpu::spawn("kvdepot-watch", move || run(&its, &look))?;
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

fn run(shared: &Shared, look: &impl Fn(Instant) -> bool) {
    let (mut seen, mut idle) = (0, 0);
    let mut is_over = shared.is_over.lock();
    while !*is_over {
        if idle >= AWAKE {
            shared.is_asleep.store(true, Ordering::SeqCst);
            // A task that has begun meanwhile saw it awake.
            if shared.begun.load(Ordering::SeqCst) == seen {
                shared.woken.wait(&mut is_over);
            }
            shared.is_asleep.store(false, Ordering::SeqCst);
            idle = 0;
        } else {
            shared.woken.wait_for(&mut is_over, EVERY);
        }
        let begun = shared.begun.load(Ordering::SeqCst);
        let is_busy = parking_lot::MutexGuard::unlocked(&mut is_over, || look(Instant::now()));
        idle = if is_busy || begun != seen {
            0
        } else {
            idle + 1
        };
        seen = begun;
    }
}
