//! Answers that may come later: a file system or a peer takes milliseconds, and no thread of an
//! engine waits for it.
//!
//! Whoever is asked gets a [`Reply`]; whoever asks has the [`Pending`] answer. An answer comes
//! once: in the call, later, or, where a limit passes first or the reply is dropped, not at all.
//! What comes too late is given back by whoever asked, so that nothing it holds is lost.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, clock};
use kvdepot_host::fork::Origin;
use parking_lot::{Condvar, Mutex};

/// What follows an answer, or its absence.
type Then<T> = Box<dyn FnOnce(Option<T>) + Send>;

/// What becomes of an answer that nobody waits for any more.
type Back<T> = Box<dyn FnOnce(T) + Send>;

/// The asked side. Dropped without an answer, it says that there is none.
#[must_use = "dropped, it says that there is no answer"]
pub struct Reply<T>(Option<Arc<Shared<T>>>);

/// The asking side.
#[must_use = "what follows the answer is given to it"]
pub struct Pending<T>(Arc<Shared<T>>);

struct Shared<T> {
    state: Mutex<State<T>>,
    back: Mutex<Option<Back<T>>>,
}

enum State<T> {
    /// Nobody waits yet, and no answer has come.
    Asked,
    /// It has come before anybody waited.
    Answered(Option<T>),
    /// Somebody waits.
    Awaited(Then<T>),
    Over,
}

/// A question and its answer.
pub fn ask<T>() -> (Reply<T>, Pending<T>) {
    ask_or(None)
}

/// The same, where what comes too late goes `back`.
pub(super) fn ask_or<T>(back: Option<Back<T>>) -> (Reply<T>, Pending<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State::Asked),
        back: Mutex::new(back),
    });
    (Reply(Some(Arc::clone(&shared))), Pending(shared))
}

impl<T> Shared<T> {
    /// Gives the answer back where nobody waits for it any more.
    fn answer(&self, answer: Option<T>) -> Option<T> {
        let then = {
            let mut state = self.state.lock();
            match std::mem::replace(&mut *state, State::Over) {
                State::Asked => {
                    *state = State::Answered(answer);
                    return None;
                }
                State::Awaited(then) => then,
                State::Answered(_) | State::Over => return answer,
            }
        };
        then(answer);
        None
    }
}

impl<T> Reply<T> {
    /// Answers. What follows runs in this thread. False where nobody waits for it any more: the
    /// pins in it are ended, and its reservations given back.
    pub fn answer(mut self, answer: T) -> bool {
        let Some(shared) = self.0.take() else {
            return false;
        };
        let late = shared.answer(Some(answer));
        let in_time = late.is_none();
        if let Some((late, back)) = late.zip(shared.back.lock().take()) {
            back(late);
        }
        in_time
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            let _none = shared.answer(None);
        }
    }
}

impl<T: Send + 'static> Pending<T> {
    /// The answer, if it has come in the call.
    ///
    /// # Errors
    /// The question, while it has not.
    pub fn now(self) -> Result<Option<T>, Pending<T>> {
        {
            let mut state = self.0.state.lock();
            if matches!(&*state, State::Answered(_))
                && let State::Answered(answer) = std::mem::replace(&mut *state, State::Over)
            {
                return Ok(answer);
            }
        }
        Err(self)
    }

    /// Has `then` run once: with the answer, in whatever thread brings it, or with `None` where
    /// there is none, or `alarm` has waited for `limit`.
    pub fn then(
        self,
        alarm: Option<(&Alarm, Duration)>,
        then: impl FnOnce(Option<T>) + Send + 'static,
    ) {
        let answer = {
            let mut state = self.0.state.lock();
            match std::mem::replace(&mut *state, State::Over) {
                State::Answered(answer) => answer,
                State::Over => None,
                State::Asked | State::Awaited(_) => {
                    *state = State::Awaited(Box::new(then));
                    drop(state);
                    if let Some((alarm, limit)) = alarm {
                        let question: Arc<dyn Expires> = Arc::clone(&self.0) as _;
                        alarm.watch(&question, limit);
                    }
                    return;
                }
            }
        };
        then(answer);
    }

    /// Waits in this thread.
    pub fn wait(self, limit: Duration) -> Option<T> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let question = Arc::clone(&self.0);
        self.then(None, move |answer| {
            let _sent = sender.send(answer);
        });
        #[cfg(feature = "sim")]
        if let Some(schedule) = kvdepot_media::sim::current() {
            let asked: Arc<dyn Expires> = Arc::clone(&question) as _;
            schedule.after(limit, expiry(&asked));
            schedule.until(|| question.is_over());
        }
        if let Ok(answer) = receiver.recv_timeout(limit) {
            return answer;
        }
        question.expire();
        // The limit's word, or an answer that has overtaken it.
        receiver.recv().unwrap_or(None)
    }
}

/// A question whose time can be over.
trait Expires: Send + Sync {
    fn expire(&self);
    /// Whether it has its answer, or will have none.
    #[cfg(feature = "sim")]
    fn is_over(&self) -> bool;
}

impl<T: Send> Expires for Shared<T> {
    fn expire(&self) {
        let _none = self.answer(None);
    }

    #[cfg(feature = "sim")]
    fn is_over(&self) -> bool {
        matches!(&*self.state.lock(), State::Over)
    }
}

/// Ends a question; false where it had ended.
#[cfg(feature = "sim")]
fn expiry(question: &Arc<dyn Expires>) -> impl FnOnce() -> bool + Send + 'static {
    let question = Arc::downgrade(question);
    move || {
        let question = question.upgrade().filter(|question| !question.is_over());
        question.map(|question| question.expire()).is_some()
    }
}

/// Threads for what follows the answers that did not come. It is others' code and may take its
/// time, so the clock hands it on.
const HANDS: usize = 4;

/// The longest limit that is told from none.
const LIMIT_MOST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Ends questions whose time is over, by threads that sleep while nobody asks. In a simulation its
/// schedule does.
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
    /// Those whose time is over.
    due: VecDeque<Arc<dyn Expires>>,
    /// Nobody waits any more.
    hurries: bool,
    stop: bool,
}

struct Watch {
    end: Instant,
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
                    path: "thread".into(),
                    source,
                })?;
            alarm.threads.lock().push(thread);
        }
        Ok(alarm)
    }

    fn watch(&self, question: &Arc<dyn Expires>, limit: Duration) {
        #[cfg(feature = "sim")]
        if let Some(schedule) = kvdepot_media::sim::current() {
            return schedule.after(limit, expiry(question));
        }
        // No further away than clocks go: a close ends it by that.
        let end = clock::now() + limit.min(LIMIT_MOST);
        let mut state = self.clock.state.lock();
        if state.hurries {
            drop(state);
            return question.expire();
        }
        let question = Arc::downgrade(question);
        // It sleeps until the first of them ends.
        let first = state.questions.peek();
        let is_first = first.is_none_or(|Reverse(first)| end < first.end);
        state.questions.push(Reverse(Watch { end, question }));
        if is_first {
            self.clock.changed.notify_one();
        }
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
            let due = state.questions.pop();
            if let Some(question) = due.and_then(|Reverse(due)| due.question.upgrade()) {
                state.due.push_back(question);
                self.over.notify_one();
            }
        }
        self.over.notify_all();
    }

    fn lend_a_hand(&self) {
        let mut state = self.state.lock();
        loop {
            let Some(question) = state.due.pop_front() else {
                if state.stop && state.questions.is_empty() {
                    return;
                }
                self.over.wait(&mut state);
                continue;
            };
            parking_lot::MutexGuard::unlocked(&mut state, || {
                if catch_unwind(AssertUnwindSafe(|| question.expire())).is_err() {
                    tracing::error!("what follows an answer that did not come has panicked");
                }
                drop(question);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_answer_comes_once_whenever_it_comes() {
        let (reply, pending) = ask();
        assert!(reply.answer(1));
        assert_eq!(pending.now().ok().flatten(), Some(1));

        let (reply, pending) = ask();
        let pending = pending.now().err().unwrap();
        let waiting = std::thread::spawn(move || pending.wait(LONG));
        assert!(reply.answer(2));
        assert_eq!(waiting.join().unwrap(), Some(2));
    }

    #[test]
    fn who_drops_the_reply_or_takes_too_long_has_not_answered() {
        let (reply, pending) = ask::<u32>();
        drop(reply);
        assert_eq!(pending.wait(LONG), None);

        let (back, late) = mpsc::channel();
        let (reply, pending) = ask_or(Some(Box::new(move |answer| back.send(answer).unwrap())));
        assert_eq!(pending.wait(Duration::ZERO), None);
        assert!(!reply.answer(3));
        assert_eq!(late.try_recv(), Ok(3), "it goes back");

        let alarm = Alarm::start().unwrap();
        let (sender, receiver) = mpsc::channel();
        let (reply, pending) = ask();
        pending.then(Some((&alarm, Duration::from_millis(1))), move |answer| {
            sender.send(answer).unwrap();
        });
        assert_eq!(receiver.recv_timeout(LONG), Ok(None));
        assert!(!reply.answer(4));
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
