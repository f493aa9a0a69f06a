//! Lanes without threads, for simulations: a seed is a schedule.
//!
//! A copier that is made by a thread which has entered a [`Schedule`] starts no lanes. Its slices
//! become *jobs* of the schedule, and are executed, or fail, when and in the order that the
//! simulation chooses. Whoever waits executes jobs meanwhile, and lets the simulation do something
//! in between. What else happens late, such as another store's answers, can be jobs too. Time
//! passes when the simulation says so, or when nothing is left but to wait for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A slice that waits for its turn: false makes it fail.
type Job = Box<dyn FnOnce(bool) + Send>;

/// What follows when some time is over; false where nobody waits for it any more.
type Ring = Box<dyn FnOnce() -> bool + Send>;

/// Chooses among so many jobs.
type Choose = Box<dyn FnMut(usize) -> Turn + Send>;

/// The choice of a job to run, and whether it succeeds.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a simulation makes them")]
pub struct Turn {
    /// Its number among those that wait.
    pub job: usize,
    /// Nothing is moved, and its parts fail.
    pub fails: bool,
}

/// The jobs that wait for their turn.
pub struct Schedule {
    jobs: Mutex<Vec<Job>>,
    choose: Mutex<Choose>,
    time: Mutex<Time>,
}

/// Time that passes in steps.
struct Time {
    now: Instant,
    /// The next to end first, and of equal ones the first that began.
    alarms: BTreeMap<(Instant, u64), Ring>,
    begun: u64,
    /// Whether clocks show it.
    is_shown: bool,
}

/// Behind real clocks for as long as a simulation runs, so that no limit that was reckoned with
/// this time is waited for.
const BEHIND: Duration = Duration::from_secs(24 * 3600);

thread_local! {
    static CURRENT: RefCell<Option<Arc<Schedule>>> = const { RefCell::new(None) };
    static MEANWHILE: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// The schedule that this thread has entered.
#[must_use]
pub fn current() -> Option<Arc<Schedule>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Returns the time that clocks show instead of real time in this thread.
#[must_use]
pub fn now() -> Option<Instant> {
    CURRENT.with_borrow(|current| current.as_ref().and_then(|schedule| schedule.shown()))
}

/// Undoes an [`Schedule::enter`] when it is dropped.
#[derive(Debug)]
pub struct Entered(());

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(None);
        MEANWHILE.set(None);
    }
}

impl Schedule {
    /// An empty one.
    #[must_use]
    pub fn new(choose: impl FnMut(usize) -> Turn + Send + 'static) -> Arc<Schedule> {
        let real = Instant::now();
        Arc::new(Schedule {
            jobs: Mutex::default(),
            choose: Mutex::new(Box::new(choose)),
            time: Mutex::new(Time {
                now: real.checked_sub(BEHIND).unwrap_or(real),
                alarms: BTreeMap::new(),
                begun: 0,
                is_shown: false,
            }),
        })
    }

    /// Has clocks show its time in the thread that has entered it.
    pub fn show_time(&self) {
        lock(&self.time).is_shown = true;
    }

    fn shown(&self) -> Option<Instant> {
        let time = lock(&self.time);
        time.is_shown.then_some(time.now)
    }

    /// Has `ring` called when so much time has passed.
    pub fn after(&self, limit: Duration, ring: impl FnOnce() -> bool + Send + 'static) {
        let mut time = lock(&self.time);
        // Further away than clocks go: never.
        let Some(end) = time.now.checked_add(limit) else {
            return;
        };
        time.begun += 1;
        let name = (end, time.begun);
        time.alarms.insert(name, Box::new(ring));
    }

    /// Time passes until something follows from that; false when nothing would.
    pub fn ring(&self) -> bool {
        self.ring_before(None)
    }

    /// So much time passes.
    pub fn pass(&self, span: Duration) {
        let end = lock(&self.time).now + span;
        while self.ring_before(Some(end)) {}
        lock(&self.time).now = end;
    }

    fn ring_before(&self, end: Option<Instant>) -> bool {
        loop {
            let (ring, before) = {
                let mut time = lock(&self.time);
                let Some(next) = time.alarms.first_entry() else {
                    return false;
                };
                let (at, _) = *next.key();
                if end.is_some_and(|end| at > end) {
                    return false;
                }
                (next.remove(), std::mem::replace(&mut time.now, at))
            };
            if ring() {
                return true;
            }
            // Nobody has noticed.
            lock(&self.time).now = before;
        }
    }

    /// Makes it this thread's. `meanwhile` is called between two jobs while this thread waits for
    /// a batch.
    #[must_use]
    pub fn enter(self: &Arc<Self>, meanwhile: impl Fn() + 'static) -> Entered {
        CURRENT.set(Some(Arc::clone(self)));
        MEANWHILE.set(Some(Rc::new(meanwhile)));
        Entered(())
    }

    /// Returns the number of waiting jobs.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.jobs).len()
    }

    /// Gives one job its turn; false when there is none.
    pub fn step(&self) -> bool {
        let waiting = self.waiting();
        if waiting == 0 {
            return false;
        }
        let turn = lock(&self.choose)(waiting);
        let job = {
            let mut jobs = lock(&self.jobs);
            let at = turn.job % jobs.len();
            jobs.remove(at)
        };
        job(!turn.fails);
        true
    }

    /// Lists a job; false is said to one that fails.
    pub fn push(&self, job: impl FnOnce(bool) + Send + 'static) {
        lock(&self.jobs).push(Box::new(job));
    }

    /// Executes jobs, and lets time pass where there is none, until `done`; false when nothing is
    /// left that could happen: a thread would wait for ever.
    pub fn until(&self, done: impl Fn() -> bool) -> bool {
        while !done() {
            let meanwhile = MEANWHILE.with_borrow(Clone::clone);
            if let Some(meanwhile) = meanwhile {
                meanwhile();
            }
            if !done() && !self.step() && !self.ring() {
                return false;
            }
        }
        true
    }
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule")
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
