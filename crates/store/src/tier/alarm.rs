//! Time-outs of requests to asynchronous tiers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, clock};
use kvdepot_host::Condvar;
use kvdepot_host::fork::Origin;
use parking_lot::Mutex;

use super::late::Expires;
#[cfg(feature = "sim")]
use super::late::expiry;

/// Threads for what follows the answers that did not come. It is others' code and may take its
/// time, so the clock hands it on.
const HANDS: usize = 4;

/// The longest limit that is told from none.
const LIMIT_MOST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Ends requests that have timed out, on threads of its own. In a simulation the schedule does
/// this.
pub struct Alarm {
    clock: Arc<Clock>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    origin: Origin,
}

#[derive(Default)]
struct Clock {
    state: Mutex<Watched>,
    changed: Condvar,
    /// There is something for a hand.
    over: Condvar,
}

#[derive(Default)]
struct Watched {
    /// The next to end first; those of equal times in any order.
    questions: BinaryHeap<Reverse<Watch>>,
    /// Those whose time is over, and what other threads have handed over.
    due: VecDeque<Due>,
    /// The depot closes: all requests end now.
    hurries: bool,
    stop: bool,
}

/// Work for a hand.
enum Due {
    Over(Arc<dyn Expires>),
    Job(Box<dyn FnOnce() + Send>),
}

struct Watch {
    end: Instant,
    limit: Duration,
    question: Weak<dyn Expires>,
}

impl PartialEq for Watch {
    fn eq(&self, other: &Watch) -> bool {
        self.end == other.end
    }
}

impl Eq for Watch {}

impl PartialOrd for Watch {
    fn partial_cmp(&self, other: &Watch) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Watch {
    fn cmp(&self, other: &Watch) -> std::cmp::Ordering {
        self.end.cmp(&other.end)
    }
}

impl Alarm {
    /// Starts its threads.
    ///
    /// # Errors
    /// [`Error::Io`] when one cannot be started, [`Error::Media`] when forks cannot be noticed.
    pub fn start() -> Result<Alarm, Error> {
        let alarm = Alarm {
            clock: Arc::default(),
            threads: Mutex::default(),
            origin: Origin::here()?,
        };
        #[cfg(feature = "sim")]
        if kvdepot_media::sim::current().is_some() {
            return Ok(alarm);
        }
        for number in 0..=HANDS {
            let clock = Arc::clone(&alarm.clock);
            let run = move || match number {
                0 => clock.run(),
                _ => clock.lend_a_hand(),
            };
            // On failure, dropping `alarm` ends those that run.
            let thread = std::thread::Builder::new()
                .name("kvdepot-alarm".into())
                .spawn(run)
                .map_err(|source| Error::Io {
                    path: "cannot start a thread".into(),
                    source,
                })?;
            alarm.threads.lock().push(thread);
        }
        Ok(alarm)
    }

    pub(super) fn watch(&self, question: &Arc<dyn Expires>, limit: Duration) {
        #[cfg(feature = "sim")]
        if let Some(schedule) = kvdepot_media::sim::current() {
            return schedule.after(limit, expiry(question, limit));
        }
        // No further away than clocks go: a close ends it by that.
        let limit = limit.min(LIMIT_MOST);
        let end = clock::now() + limit;
        let mut state = self.clock.state.lock();
        if state.hurries {
            drop(state);
            return question.expire();
        }
        let question = Arc::downgrade(question);
        // It sleeps until the first of them ends.
        let first = state.questions.peek();
        let is_first = first.is_none_or(|Reverse(first)| end < first.end);
        let watch = Watch {
            end,
            limit,
            question,
        };
        state.questions.push(Reverse(watch));
        if is_first {
            self.clock.changed.notify_one();
        }
    }

    /// Runs `job` in a thread of its own soon: the caller may hold locks that the job takes.
    pub(super) fn hand_over(&self, job: Box<dyn FnOnce() + Send>) {
        #[cfg(feature = "sim")]
        if let Some(schedule) = kvdepot_media::sim::current() {
            let run = move || {
                job();
                true
            };
            return schedule.after(Duration::ZERO, run);
        }
        let mut state = self.clock.state.lock();
        if state.stop {
            // Its threads may have ended, and so have all calls.
            drop(state);
            return job();
        }
        state.due.push_back(Due::Job(job));
        self.clock.over.notify_one();
    }

    /// Ends all questions that have a limit, and those that are still to come.
    pub fn hurry(&self) {
        self.clock.state.lock().hurries = true;
        self.clock.changed.notify_one();
    }

    /// Ends all questions, and then the threads.
    pub fn stop(&self) {
        {
            let mut state = self.clock.state.lock();
            (state.hurries, state.stop) = (true, true);
        }
        self.clock.changed.notify_one();
        // A forked child has none of them.
        if self.origin.is_here() {
            for thread in self.threads.lock().drain(..) {
                let _ended = thread.join();
            }
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Clock {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            let Some(Reverse(first)) = state.questions.peek() else {
                if state.stop {
                    break;
                }
                self.changed.wait(&mut state);
                continue;
            };
            let end = first.end;
            if end > clock::now() && !state.hurries {
                // Answered ones stay until their time: a few tens of bytes each.
                self.changed.wait_until(&mut state, end);
                continue;
            }
            let Some(Reverse(mut watch)) = state.questions.pop() else {
                continue;
            };
            let Some(question) = watch.question.upgrade() else {
                continue;
            };
            let again = question.goes_on(watch.limit);
            if let Some(end) = again.filter(|_| !state.hurries) {
                watch.end = end;
                state.questions.push(Reverse(watch));
                continue;
            }
            state.due.push_back(Due::Over(question));
            self.over.notify_one();
        }
        self.over.notify_all();
    }

    fn lend_a_hand(&self) {
        let mut state = self.state.lock();
        loop {
            let Some(due) = state.due.pop_front() else {
                if state.stop && state.questions.is_empty() {
                    return;
                }
                self.over.wait(&mut state);
                continue;
            };
            parking_lot::MutexGuard::unlocked(&mut state, || {
                let run = || match due {
                    Due::Over(question) => question.expire(),
                    Due::Job(job) => job(),
                };
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    tracing::error!(
                        "internal error: completion handler of a request panicked; the request \
                         failed"
                    );
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::late::{Pending, ask};
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_limit_is_counted_from_the_last_progress() {
        let (reply, pending) = ask();
        let progress = reply.progress();
        let question = pending.question();
        assert_eq!(question.goes_on(LONG), None, "nothing was said");
        progress.made();
        assert!(question.goes_on(LONG).is_some());
        assert_eq!(question.goes_on(Duration::ZERO), None);

        // By the clock that ends questions: it looks again as long as there is progress.
        let clock = Clock::default();
        let watch = Watch {
            end: clock::now(),
            limit: LONG,
            question: Arc::downgrade(&question),
        };
        clock.state.lock().questions.push(Reverse(watch));
        let (sender, receiver) = mpsc::channel();
        pending.then(None, move |answer| sender.send(answer).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| clock.run());
            while clock.state.lock().questions.peek().unwrap().0.end <= clock::now() {
                std::thread::yield_now();
            }
            assert!(clock.state.lock().due.is_empty());
            assert!(progress.is_wanted());
            {
                let mut state = clock.state.lock();
                (state.hurries, state.stop) = (true, true);
            }
            clock.changed.notify_one();
        });
        match clock.state.lock().due.pop_front() {
            Some(Due::Over(question)) => question.expire(),
            _ => panic!("its time is over"),
        }
        assert_eq!(receiver.recv(), Ok(None));
        assert!(!progress.is_wanted() && !reply.answer(5));
    }

    #[test]
    fn what_follows_one_answer_that_did_not_come_delays_no_other() {
        let alarm = Alarm::start().unwrap();
        let (sender, receiver) = mpsc::channel();
        let (heard, hears) = mpsc::channel();
        let (first, second) = (ask::<u32>(), ask::<u32>());
        first.1.then(Some((&alarm, Duration::ZERO)), move |_| {
            heard.send(receiver.recv_timeout(LONG)).unwrap();
        });
        second
            .1
            .then(Some((&alarm, Duration::from_millis(1))), move |_| {
                sender.send(()).unwrap();
            });
        assert_eq!(hears.recv().unwrap(), Ok(()));
    }

    #[test]
    fn who_hurries_ends_what_is_asked_and_what_will_be() {
        let alarm = Alarm::start().unwrap();
        let (sender, receiver) = mpsc::channel();
        let then = |pending: Pending<u32>| {
            let sender = sender.clone();
            pending.then(Some((&alarm, 1000 * LONG)), move |answer| {
                sender.send(answer).unwrap();
            });
        };
        let (before, after) = (ask(), ask());
        then(before.1);
        alarm.hurry();
        assert_eq!(receiver.recv_timeout(LONG), Ok(None));
        then(after.1);
        assert_eq!(receiver.recv_timeout(LONG), Ok(None));
    }
}
