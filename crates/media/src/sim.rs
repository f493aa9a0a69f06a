//! Lanes without threads, for simulations: a seed is a schedule.
//!
//! A copier that is made by a thread which has entered a [`Schedule`] starts no lanes. Its slices
//! become *jobs* of the schedule, and are executed, or fail, when and in the order that the
//! simulation chooses. Whoever waits for a batch executes jobs meanwhile, and lets the simulation
//! do something in between.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A slice that waits for its turn: false makes it fail.
type Job = Box<dyn FnOnce(bool) + Send>;

/// Chooses among so many jobs.
type Choose = Box<dyn FnMut(usize) -> Turn + Send>;

/// Which job has its turn, and whether it succeeds.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a simulation makes them")]
pub struct Turn {
    /// Its number among those that wait.
    pub job: usize,
    /// Nothing is moved, and its parts fail.
    pub fails: bool,
}

/// What waits for its turn.
pub struct Schedule {
    jobs: Mutex<Vec<Job>>,
    choose: Mutex<Choose>,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Schedule>>> = const { RefCell::new(None) };
    static MEANWHILE: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// The schedule that this thread has entered.
#[must_use]
pub fn current() -> Option<Arc<Schedule>> {
    CURRENT.with_borrow(Clone::clone)
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
        Arc::new(Schedule {
            jobs: Mutex::default(),
            choose: Mutex::new(Box::new(choose)),
        })
    }

    /// Makes it this thread's. `meanwhile` is called between two jobs while this thread waits for
    /// a batch.
    #[must_use]
    pub fn enter(self: &Arc<Self>, meanwhile: impl Fn() + 'static) -> Entered {
        CURRENT.set(Some(Arc::clone(self)));
        MEANWHILE.set(Some(Rc::new(meanwhile)));
        Entered(())
    }

    /// How many jobs wait.
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

    pub(crate) fn push(&self, job: impl FnOnce(bool) + Send + 'static) {
        lock(&self.jobs).push(Box::new(job));
    }

    /// Executes jobs until `done`.
    ///
    /// # Panics
    /// When no job is left and it is not: a thread would wait for ever.
    pub(crate) fn until(&self, done: impl Fn() -> bool) {
        while !done() {
            let meanwhile = MEANWHILE.with_borrow(Clone::clone);
            if let Some(meanwhile) = meanwhile {
                meanwhile();
            }
            assert!(
                done() || self.step(),
                "somebody waits for a batch that no lane has"
            );
        }
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
