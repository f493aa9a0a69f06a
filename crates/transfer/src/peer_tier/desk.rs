//! A few threads for what takes its time: begun when there is something to do, ended when there is
//! nothing for a while. Each host has some of its own, so that a slow one holds up nobody else's.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_host::cpu;
use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// Most jobs that wait: behind these nobody would wait any more.
const WAITING_MAX: usize = 65_536;

/// How long a thread stays that has nothing to do.
const IDLE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    ended: bool,
}

/// The threads.
pub(super) struct Desk {
    name: &'static str,
    most: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Desk {
    pub(super) fn new(name: &'static str, most: usize) -> Arc<Desk> {
        Arc::new(Desk {
            name,
            most,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Has a job done; where too many wait, there is no thread, or all has ended, it is dropped:
    /// false.
    pub(super) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.state.lock();
        if state.ended || state.jobs.len() >= WAITING_MAX {
            drop(state);
            drop(job);
            return false;
        }
        state.jobs.push_back(Box::new(job));
        if state.jobs.len() > state.idle && state.threads < self.most {
            let desk = Arc::clone(self);
            if cpu::spawn(self.name, move || desk.work()).is_ok() {
                state.threads += 1;
            }
        }
        let left = match state.threads {
            0 => std::mem::take(&mut state.jobs),
            _ => VecDeque::new(),
        };
        self.changed.notify_one();
        drop(state);
        left.is_empty()
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!(
                        desk = self.name,
                        "internal error: handler of a request panicked; the request failed"
                    );
                }
                state = self.state.lock();
                continue;
            }
            if state.ended {
                break;
            }
            state.idle += 1;
            let is_late = self.changed.wait_for(&mut state, IDLE).timed_out();
            state.idle -= 1;
            if is_late && state.jobs.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        self.changed.notify_all();
    }

    /// Takes nothing any more, drops what waits, and waits for what is at work, as long as that.
    pub(super) fn end(&self, deadline: Instant) {
        let mut state = self.state.lock();
        state.ended = true;
        let left = std::mem::take(&mut state.jobs);
        self.changed.notify_all();
        drop(state);
        drop(left);
        let mut state = self.state.lock();
        while state.threads > 0 {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }
}

/// What several say, once the last has said it or will not.
struct Sheet<T, D> {
    answers: Vec<Option<T>>,
    left: usize,
    done: Option<D>,
}

/// Where one of them says it. Dropped, it says nothing.
pub(super) struct Slot<T, D: FnOnce(Vec<Option<T>>)> {
    sheet: Arc<Mutex<Sheet<T, D>>>,
    at: usize,
    said: Option<T>,
}

impl<T, D: FnOnce(Vec<Option<T>>)> Slot<T, D> {
    pub(super) fn say(mut self, said: Option<T>) {
        self.said = said;
    }
}

impl<T, D: FnOnce(Vec<Option<T>>)> Drop for Slot<T, D> {
    fn drop(&mut self) {
        let last = {
            let mut sheet = self.sheet.lock();
            sheet.answers[self.at] = self.said.take();
            sheet.left -= 1;
            match sheet.left {
                0 => sheet
                    .done
                    .take()
                    .zip(Some(std::mem::take(&mut sheet.answers))),
                _ => None,
            }
        };
        if let Some((done, answers)) = last {
            done(answers);
        }
    }
}

/// Slots for so many, and what follows the last; at once where there are none.
pub(super) fn gather<T, D: FnOnce(Vec<Option<T>>)>(count: usize, done: D) -> Vec<Slot<T, D>> {
    if count == 0 {
        done(Vec::new());
        return Vec::new();
    }
    let sheet = Arc::new(Mutex::new(Sheet {
        answers: (0..count).map(|_| None).collect(),
        left: count,
        done: Some(done),
    }));
    let slot = |at| Slot {
        sheet: Arc::clone(&sheet),
        at,
        said: None,
    };
    (0..count).map(slot).collect()
}
