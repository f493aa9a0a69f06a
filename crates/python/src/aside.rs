//! Moves that a thread of the mover's begins, so that whoever asks for them goes on at once: making
//! buffers of ten thousand pages, and planning them, takes milliseconds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_host::cpu;
use kvdepot_service::{MoveJob as ServiceJob, Mover as ServiceMover};
use kvdepot_store::Checksum;
use parking_lot::Mutex;

/// A job that was begun, or will be.
pub(crate) enum Job {
    Begun(ServiceJob),
    Later(Arc<Later>),
}

/// A job that a thread begins.
pub(crate) struct Later {
    /// `Err` says why it was not.
    begun: Mutex<Option<Result<Arc<ServiceJob>, String>>>,
    changed: Condvar,
    asked: Instant,
    blocks: usize,
}

impl Later {
    pub(crate) fn new(blocks: usize) -> Arc<Later> {
        Arc::new(Later {
            begun: Mutex::new(None),
            changed: Condvar::new(),
            asked: Instant::now(),
            blocks,
        })
    }
}

impl Job {
    /// Whether no lane touches the caller's memory any more, or none does within `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let later = match self {
            Job::Begun(job) => return job.wait(Some(limit)),
            Job::Later(later) => later,
        };
        let end = Instant::now() + limit;
        let mut begun = later.begun.lock();
        while begun.is_none() {
            if later.changed.wait_until(&mut begun, end).timed_out() {
                return false;
            }
        }
        let job = begun
            .as_ref()
            .and_then(|begun| begun.as_ref().ok().map(Arc::clone));
        // Others may ask meanwhile.
        drop(begun);
        let left = end.saturating_duration_since(Instant::now());
        job.is_none_or(|job| job.wait(Some(left)))
    }

    /// What `of` says of the job, or `otherwise` what is so before it has begun, or where it has
    /// not.
    fn ask<T>(
        &self,
        of: impl FnOnce(&ServiceJob) -> T,
        otherwise: impl FnOnce(&Later, Option<&str>) -> T,
    ) -> T {
        match self {
            Job::Begun(job) => of(job),
            Job::Later(later) => match &*later.begun.lock() {
                Some(Ok(job)) => of(job),
                Some(Err(why)) => otherwise(later, Some(why)),
                None => otherwise(later, None),
            },
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.ask(ServiceJob::is_done, |_, failed| failed.is_some())
    }

    pub(crate) fn checksums(&self) -> Vec<Option<Checksum>> {
        self.ask(ServiceJob::checksums, |later, _| vec![None; later.blocks])
    }

    pub(crate) fn corrupt(&self) -> Vec<bool> {
        self.ask(ServiceJob::corrupt, |later, _| vec![false; later.blocks])
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.ask(ServiceJob::bytes, |_, _| 0)
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.ask(ServiceJob::elapsed, |later, _| later.asked.elapsed())
    }

    /// Whether it was not begun, and will not be.
    pub(crate) fn is_refused(&self) -> bool {
        self.ask(|_| false, |_, failed| failed.is_some())
    }

    pub(crate) fn error(&self) -> Option<String> {
        self.ask(ServiceJob::error, |_, failed| failed.map(str::to_owned))
    }
}

/// Has what it is about called when it goes, whatever has become of it.
struct Promise(Option<Arc<Later>>);

impl Promise {
    fn keep(mut self, begun: Result<ServiceJob, String>) {
        self.tell(begun);
    }

    fn tell(&mut self, begun: Result<ServiceJob, String>) {
        if let Some(later) = self.0.take() {
            *later.begun.lock() = Some(begun.map(Arc::new));
            later.changed.notify_all();
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.tell(Err(
            "the mover (connection to the server) is closed; attach again".to_owned(),
        ));
    }
}

type Task = Box<dyn FnOnce() + Send>;

/// The thread of a mover's that begins jobs, once there is one to begin.
#[derive(Default)]
pub(crate) struct Beginner(Mutex<State>);

#[derive(Default)]
enum State {
    #[default]
    Idle,
    Runs(Sender<Task>, JoinHandle<()>),
    Closed,
}

/// What has a mover.
pub(crate) trait HasMover: Send + Sync + 'static {
    fn mover(&self) -> Option<&ServiceMover>;
}

impl Beginner {
    /// Has `begin` called by the thread, or here where there can be none; the mover stays until
    /// then. It is dropped where the mover was closed.
    pub(crate) fn begin<M: HasMover>(
        &self,
        whose: &Arc<M>,
        blocks: usize,
        begin: impl FnOnce(&ServiceMover) -> Result<ServiceJob, String> + Send + 'static,
    ) -> Job {
        let later = Later::new(blocks);
        let promise = Promise(Some(Arc::clone(&later)));
        let whose = Arc::clone(whose);
        let task: Task = Box::new(move || {
            if let Some(mover) = whose.mover() {
                promise.keep(begin(mover));
            }
        });
        let mut state = self.0.lock();
        if matches!(*state, State::Idle) {
            let (sender, tasks) = channel::<Task>();
            let thread = cpu::spawn("kvdepot-begin", move || {
                cpu::interrupt_nobody();
                run(&tasks);
            });
            if let Ok(thread) = thread {
                *state = State::Runs(sender, thread);
            }
        }
        match &*state {
            // Where the thread is gone, the promise is dropped, and says so.
            State::Runs(sender, _) => drop(sender.send(task)),
            State::Idle => {
                drop(state);
                task();
            }
            State::Closed => {}
        }
        Job::Later(later)
    }

    /// Begins what was asked for, and nothing more.
    pub(crate) fn close(&self) {
        let state = std::mem::replace(&mut *self.0.lock(), State::Closed);
        if let State::Runs(sender, thread) = state {
            drop(sender);
            if thread.thread().id() != std::thread::current().id() {
                drop(thread.join());
            }
        }
    }
}

/// What the thread does. Between tasks it holds nothing: the mover may go.
fn run(tasks: &Receiver<Task>) {
    for task in tasks {
        // One that panics is told as refused by its promise, and the next one is begun.
        drop(catch_unwind(AssertUnwindSafe(task)));
    }
}
