//! Threads for what a file system takes its time for: to look, to open, to make, to rename.
//!
//! A call of many keys is many jobs. Calls take turns, job by job, so that a small one does not
//! wait for the end of a large one. Where threads compute, a step of a call has a part of them at a
//! time. Several steps in progress may have all of them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, clock};
use kvdepot_host::Condvar;
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use kvdepot_media::is_simulated;
use parking_lot::{Mutex, MutexGuard};

use crate::tier::late::Pulse;

/// What a thread does.
type Job = Box<dyn FnOnce() + Send>;

/// How long an end waits for threads that are at a file system.
const PATIENCE: Duration = Duration::from_secs(1);

/// Most jobs that wait: behind these nobody would wait any more.
const WAITING_MAX: usize = 1 << 16;

/// Number of threads.
#[derive(Clone, Copy)]
pub(super) struct Threads {
    pub(super) all: usize,
    /// Most that work for one step of a call.
    pub(super) call: usize,
    /// Most that work for all jobs without a waiting caller.
    pub(super) unawaited: usize,
}

/// The threads of one tier. A simulation has none: jobs are done at once.
pub(super) struct Desk {
    queue: Arc<Queue>,
    origin: Origin,
}

struct Queue {
    most: Threads,
    state: Mutex<State>,
    changed: Condvar,
    pulse: Arc<Pulse>,
}

#[derive(Default)]
struct State {
    /// The jobs of each call that waits; the first call has the next turn.
    calls: VecDeque<Call>,
    /// All of their jobs.
    waiting: usize,
    /// Threads that work for jobs without a waiting caller.
    unawaited: Arc<AtomicUsize>,
    threads: usize,
    ended: bool,
}

struct Call {
    jobs: VecDeque<Job>,
    /// Jobs without a waiting caller. They arrived one by one, and have the turns of one call.
    unawaited: bool,
    /// Threads that work for it; those of all unawaited jobs are counted together.
    at_work: Arc<AtomicUsize>,
}

impl State {
    /// The next job of the first call that may have another thread, and where that is counted.
    fn next(&mut self, most: Threads) -> Option<(Job, Arc<AtomicUsize>)> {
        let may_go_on = |call: &Call| {
            let most = match call.unawaited {
                true => most.unawaited,
                false => most.call,
            };
            // After the end no other call comes that could want a thread.
            self.ended || call.at_work.load(Ordering::Relaxed) < most
        };
        // Only calls at work are passed over: fewer than there are threads.
        let at = self.calls.iter().position(may_go_on)?;
        let mut call = self.calls.remove(at)?;
        let job = call.jobs.pop_front()?;
        self.waiting -= 1;
        let at_work = Arc::clone(&call.at_work);
        at_work.fetch_add(1, Ordering::Relaxed);
        if !call.jobs.is_empty() {
            self.calls.push_back(call);
        }
        Some((job, at_work))
    }

    fn add(&mut self, mut call: Call) {
        self.waiting += call.jobs.len();
        let mut calls = self.calls.iter_mut().filter(|_| call.unawaited);
        match calls.find(|others| others.unawaited) {
            Some(others) => others.jobs.append(&mut call.jobs),
            None => self.calls.push_back(call),
        }
    }
}

impl Desk {
    pub(super) fn new(what: &str, mut threads: Threads) -> Result<Desk, Error> {
        if is_simulated() {
            threads.all = 0;
        }
        let desk = Desk {
            queue: Arc::new(Queue {
                most: threads,
                state: Mutex::default(),
                changed: Condvar::default(),
                pulse: Arc::default(),
            }),
            origin: Origin::here()?,
        };
        for number in 0..threads.all {
            let queue = Arc::clone(&desk.queue);
            queue.state.lock().threads += 1;
            let run = move || {
                // Pinned ones still work; there is nobody to tell.
                let _free = cpu::reset_affinity();
                queue.run();
            };
            let thread = std::thread::Builder::new().name(format!("kvdepot-{what}-{number}"));
            // On failure, dropping `desk` ends those that run.
            thread.spawn(run).map_err(|source| {
                desk.queue.state.lock().threads -= 1;
                Error::Io {
                    path: "cannot start a thread".into(),
                    source,
                }
            })?;
        }
        Ok(desk)
    }

    /// Whether calls that wait for their turn wait for others.
    pub(super) fn pulse(&self) -> &Arc<Pulse> {
        &self.queue.pulse
    }

    /// Most threads that work for one step of a call.
    pub(super) fn threads(&self) -> usize {
        let most = self.queue.most;
        most.all.min(most.call).max(1)
    }

    /// Has a job done; where too many wait, or all has ended, it is dropped.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.call(VecDeque::from([Box::new(job) as Job]), false);
    }

    /// Runs a job without a waiting caller. All such jobs together have the turns of one call.
    pub(super) fn run_unawaited(&self, job: impl FnOnce() + Send + 'static) {
        self.call(VecDeque::from([Box::new(job) as Job]), true);
    }

    /// The same for all jobs of a call.
    fn call(&self, jobs: VecDeque<Job>, unawaited: bool) {
        if self.queue.most.all == 0 {
            return jobs.into_iter().for_each(|job| job());
        }
        let count = jobs.len();
        let mut state = self.queue.state.lock();
        // What nobody waits for leaves half of it to calls.
        let most = if unawaited {
            WAITING_MAX / 2
        } else {
            WAITING_MAX
        };
        if state.ended || state.waiting + count > most {
            drop(state);
            drop(jobs);
            return;
        }
        let at_work = match unawaited {
            true => Arc::clone(&state.unawaited),
            false => Arc::default(),
        };
        state.add(Call {
            jobs,
            unawaited,
            at_work,
        });
        match count {
            1 => self.queue.changed.notify_one(),
            _ => self.queue.changed.notify_all(),
        };
    }

    /// Does what waits and ends. What a file system does not answer by then is left alone: its
    /// thread holds nothing but what it asks for.
    pub(super) fn end(&self, deadline: Instant) {
        if !self.origin.is_here() {
            return;
        }
        let mut state = self.queue.state.lock();
        if std::mem::replace(&mut state.ended, true) {
            return;
        }
        self.queue.changed.notify_all();
        while state.threads > 0 {
            if self
                .queue
                .changed
                .wait_until(&mut state, deadline)
                .timed_out()
            {
                tracing::warn!(
                    threads = state.threads,
                    "file system not responding; closing the tier without waiting for I/O threads"
                );
                let left = std::mem::take(&mut state.calls);
                state.waiting = 0;
                drop(state);
                drop(left);
                return;
            }
        }
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.end(clock::now() + PATIENCE);
    }
}

impl Queue {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((job, at_work)) = state.next(self.most) {
                MutexGuard::unlocked(&mut state, || {
                    if catch_unwind(AssertUnwindSafe(job)).is_err() {
                        tracing::error!(
                            "internal error: file operation panicked; the request failed"
                        );
                    }
                    self.pulse.beat();
                });
                // This thread takes what may go on by that: nobody else has to be woken.
                at_work.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            if state.ended {
                state.threads -= 1;
                self.changed.notify_all();
                return;
            }
            self.changed.wait(&mut state);
        }
    }
}

/// Does `work` for each item, `grain` of them at a time, and then `done` with all that came of it,
/// in order. Where a part of it was dropped, or has panicked, `done` is dropped too, and so is what
/// came of the others: it gives back by itself what it holds.
pub(super) fn each<I, T, W, D>(desk: &Desk, (items, grain): (Vec<I>, usize), work: W, done: D)
where
    I: Send + 'static,
    T: Send + 'static,
    W: Fn(I) -> T + Send + Sync + 'static,
    D: FnOnce(Vec<T>) + Send + 'static,
{
    struct Sheet<T, D> {
        answers: Vec<Option<T>>,
        left: usize,
        done: Option<D>,
    }
    let count = items.len();
    if count == 0 {
        return done(Vec::new());
    }
    // One turn for each of its threads, unless that would be long for others who wait for theirs.
    let share = count.div_ceil(desk.threads());
    let grain = match share <= grain * 4 {
        true => grain.max(share),
        false => grain,
    };
    let grain = grain.max(1);
    let sheet = Arc::new(Mutex::new(Sheet {
        answers: (0..count).map(|_| None).collect(),
        left: count,
        done: Some(done),
    }));
    let work = Arc::new(work);
    let mut items = items.into_iter().enumerate();
    let mut jobs = VecDeque::<Job>::with_capacity(count.div_ceil(grain));
    loop {
        let mine: Vec<(usize, I)> = items.by_ref().take(grain).collect();
        if mine.is_empty() {
            return desk.call(jobs, false);
        }
        let (sheet, work) = (Arc::clone(&sheet), Arc::clone(&work));
        jobs.push_back(Box::new(move || {
            let answers: Vec<(usize, T)> = mine
                .into_iter()
                .map(|(at, item)| (at, work(item)))
                .collect();
            let last = {
                let mut sheet = sheet.lock();
                sheet.left -= answers.len();
                for (at, answer) in answers {
                    sheet.answers[at] = Some(answer);
                }
                match sheet.left {
                    0 => sheet
                        .done
                        .take()
                        .zip(Some(std::mem::take(&mut sheet.answers))),
                    _ => None,
                }
            };
            if let Some((done, answers)) = last {
                done(answers.into_iter().flatten().collect());
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Longer than a machine stands still.
    const LONG: Duration = Duration::from_secs(60);

    /// Each of which may work for one call.
    fn threads(all: usize) -> Threads {
        Threads {
            all,
            call: all,
            unawaited: all,
        }
    }

    #[test]
    fn a_large_call_and_what_nobody_waits_for_leave_threads_for_others() {
        const JOBS: usize = 100;
        for (most, is_unawaited) in [(4, false), (1, true)] {
            let threads = Threads {
                all: 8,
                call: 4,
                unawaited: 1,
            };
            let desk = Desk::new("test", threads).unwrap();
            let (begin, begun) = mpsc::channel();
            let (go, gone) = mpsc::channel::<()>();
            let gone = Arc::new(Mutex::new(gone));
            let job = move || {
                let _waits = (begin.send(()), gone.lock().recv());
            };
            match is_unawaited {
                true => (0..JOBS).for_each(|_| desk.run_unawaited(job.clone())),
                false => each(&desk, (vec![(); JOBS], 1), move |()| job(), |_: Vec<()>| {}),
            }
            for _ in 0..most {
                begun.recv_timeout(LONG).unwrap();
            }
            // Each of these needs a thread.
            for _ in 0..JOBS {
                let (tell, told) = mpsc::channel();
                desk.run(move || tell.send(()).unwrap());
                told.recv_timeout(LONG).unwrap();
            }
            assert_eq!(begun.try_iter().count(), 0, "more than {most} threads");
            drop(go);
        }
    }

    #[test]
    fn a_small_call_waits_for_a_turn_and_not_for_the_end_of_a_large_one() {
        const GRAIN: usize = 4;
        let desk = Desk::new("test", threads(1)).unwrap();
        let (begin, begun) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        let gone = Mutex::new(gone);
        let done_before = Arc::new(Mutex::new(0));
        let count = Arc::clone(&done_before);
        let large = move |()| {
            let _first = begin.send(());
            let _waits = gone.lock().recv();
            *count.lock() += 1;
        };
        each(
            &desk,
            (vec![(); 100 * GRAIN], GRAIN),
            large,
            |_: Vec<()>| {},
        );
        begun.recv().unwrap();
        let (tell, told) = mpsc::channel();
        let small = move |()| tell.send(*done_before.lock()).unwrap();
        each(&desk, (vec![()], GRAIN), small, |_: Vec<()>| {});
        drop(go);
        // The job that was at work already, and the turn of the large one that came first.
        assert_eq!(told.recv(), Ok(2 * GRAIN));
    }

    #[test]
    fn jobs_that_nobody_waits_for_have_the_turns_of_one_call() {
        let desk = Desk::new("test", threads(1)).unwrap();
        let (begin, begun) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        desk.run(move || {
            begin.send(()).unwrap();
            let _waits = gone.recv();
        });
        begun.recv().unwrap();
        let done_before = Arc::new(Mutex::new(0));
        for _ in 0..1000 {
            let count = Arc::clone(&done_before);
            desk.run_unawaited(move || *count.lock() += 1);
        }
        let (tell, told) = mpsc::channel();
        desk.run(move || tell.send(*done_before.lock()).unwrap());
        drop(go);
        assert_eq!(told.recv(), Ok(1));
    }

    #[test]
    fn what_came_of_items_whose_others_broke_is_dropped() {
        struct Came(u32, mpsc::Sender<u32>);
        impl Drop for Came {
            fn drop(&mut self) {
                self.1.send(self.0).unwrap();
            }
        }
        for (threads, grain, begins) in [(4, 1, 3), (1, 3, 2)] {
            let desk = Desk::new("test", self::threads(threads)).unwrap();
            let (undo, undone) = mpsc::channel();
            let (begin, begun) = mpsc::channel();
            let work = move |item: u32| {
                begin.send(()).unwrap();
                assert!(item < 2, "one that breaks");
                Came(item, undo.clone())
            };
            let done = |_: Vec<Came>| panic!("not all is done");
            each(&desk, (vec![1, 7, 0], grain), work, done);
            desk.end(clock::now() + Duration::from_secs(60));
            assert_eq!(begun.iter().count(), begins);
            assert_eq!(undone.iter().count(), begins - 1);
        }
    }
}
