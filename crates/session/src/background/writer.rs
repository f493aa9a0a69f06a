//! The thread that writes what snapshots have copied.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use parking_lot::Mutex;

use super::job::{Job, late};
use super::memory::{Memory, Taken};
use crate::error::Error;

/// What the thread is to do next.
pub(super) enum Item {
    /// To store a piece.
    Piece {
        job: Arc<Job>,
        piece: usize,
        rows: Vec<u8>,
        room: Taken,
    },
    /// To make a session of what was stored.
    End(Arc<Job>),
    /// To forget it.
    Cancel(Arc<Job>),
}

/// How it goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub(super) enum Will {
    #[default]
    Work,
    /// It ends once all is written that was copied.
    Finish,
    /// It ends now.
    Stop,
}

/// What engine and thread share.
pub(super) struct Shared {
    pub(super) memory: Arc<Memory>,
    /// Bytes a second.
    pace: Option<u64>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    /// Saves that have not ended.
    open: Vec<Arc<Job>>,
    will: Will,
    /// How many wait for the end: until then nothing is paced.
    hurries: usize,
    is_over: bool,
}

impl Shared {
    pub(super) fn new(memory: u64, pace: Option<u64>) -> Arc<Shared> {
        Arc::new(Shared {
            memory: Memory::new(memory),
            pace,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Takes a save on, unless it is closed.
    pub(super) fn open(&self, job: &Arc<Job>) -> bool {
        let mut state = self.state.lock();
        let is_open = state.will == Will::Work && !state.is_over;
        if is_open {
            state.open.push(Arc::clone(job));
        }
        is_open
    }

    pub(super) fn push(&self, item: Item) {
        let mut state = self.state.lock();
        if !state.is_over {
            state.items.push_back(item);
            self.changed.notify_all();
        }
    }

    pub(super) fn will(&self, will: Will) {
        let mut state = self.state.lock();
        if will > state.will {
            state.will = will;
        }
        self.changed.notify_all();
    }

    /// Waits until all has ended that was copied whole, or until the thread has.
    pub(super) fn flush(&self, closing: bool, within: Option<Duration>) -> Result<(), Error> {
        let until = within.and_then(|within| Instant::now().checked_add(within));
        let mut state = self.state.lock();
        let reached = |state: &State| match closing {
            true => state.is_over,
            false => state.is_over || !state.open.iter().any(|job| job.is_whole()),
        };
        state.hurries += 1;
        self.changed.notify_all();
        while !reached(&state) {
            let is_late = match until {
                None => {
                    self.changed.wait(&mut state);
                    false
                }
                Some(until) => self.changed.wait_until(&mut state, until).timed_out(),
            };
            if is_late {
                break;
            }
        }
        state.hurries -= 1;
        match reached(&state) {
            true => Ok(()),
            false => Err(late("the wait for background saves", within)),
        }
    }

    /// The next thing to do; None at the end.
    fn next(&self) -> Option<Item> {
        let mut state = self.state.lock();
        loop {
            if state.will == Will::Stop {
                return None;
            }
            if let Some(item) = state.items.pop_front() {
                return Some(item);
            }
            if state.will == Will::Finish {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    /// Waits until then, unless somebody waits for the end.
    fn rest(&self, until: Instant) {
        let mut state = self.state.lock();
        while state.will == Will::Work && state.hurries == 0 && Instant::now() < until {
            self.changed.wait_until(&mut state, until);
        }
    }

    fn ended(&self, job: &Arc<Job>) {
        let mut state = self.state.lock();
        state.open.retain(|other| !Arc::ptr_eq(other, job));
        self.changed.notify_all();
    }

    fn over(&self) {
        let (open, items) = {
            let mut state = self.state.lock();
            state.is_over = true;
            (
                std::mem::take(&mut state.open),
                std::mem::take(&mut state.items),
            )
        };
        // They have room that somebody may wait for.
        drop(items);
        open.iter().for_each(|job| job.fail(Error::Cancelled));
        self.changed.notify_all();
    }
}

/// Whatever ends the thread, nobody waits for it for ever.
struct LastWord<'a>(&'a Shared);

impl Drop for LastWord<'_> {
    fn drop(&mut self) {
        self.0.over();
    }
}

/// What the thread does.
pub(super) fn run(shared: &Shared) {
    let _last = LastWord(shared);
    let mut free_at = Instant::now();
    while let Some(item) = shared.next() {
        match item {
            Item::Piece {
                job,
                piece,
                rows,
                room,
            } => {
                if let Some(pace) = shared.pace {
                    shared.rest(free_at);
                    let taken = Duration::from_secs_f64(rows.len() as f64 / pace.max(1) as f64);
                    free_at = free_at.max(Instant::now()) + taken;
                }
                let stored = job.store(piece, rows);
                drop(room);
                if let Err(error) = stored {
                    job.fail(error);
                    shared.ended(&job);
                }
            }
            Item::End(job) => {
                job.commit();
                shared.ended(&job);
            }
            Item::Cancel(job) => {
                job.fail(Error::Cancelled);
                shared.ended(&job);
            }
        }
    }
}
