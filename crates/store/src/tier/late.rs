//! Answers that may come later: a file system or a peer takes milliseconds, and no thread of an
//! engine waits for it.
//!
//! Whoever is asked gets a [`Reply`]; whoever asks has the [`Pending`] answer. An answer comes
//! once: in the call, later, or, where a limit passes first or the reply is dropped, not at all.
//! What comes too late goes back to who has sent it, so that nothing it holds is lost.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_arena::{Error, clock};
use parking_lot::{Condvar, Mutex};

/// What follows an answer, or its absence.
type Then<T> = Box<dyn FnOnce(Option<T>) + Send>;

/// The asked side. Dropped without an answer, it says that there is none.
#[must_use = "dropped, it says that there is no answer"]
pub struct Reply<T>(Option<Arc<Shared<T>>>);

/// The asking side.
#[must_use = "what follows the answer is given to it"]
pub struct Pending<T>(Arc<Shared<T>>);

struct Shared<T>(Mutex<State<T>>);

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
    let shared = Arc::new(Shared(Mutex::new(State::Asked)));
    (Reply(Some(Arc::clone(&shared))), Pending(shared))
}

impl<T> Shared<T> {
    /// Gives the answer back where nobody waits for it any more.
    fn answer(&self, answer: Option<T>) -> Option<T> {
        let then = {
            let mut state = self.0.lock();
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
    /// Answers. What follows runs in this thread.
    ///
    /// # Errors
    /// The answer, where nobody waits for it any more: whatever it holds is to be given back.
    pub fn answer(mut self, answer: T) -> Result<(), T> {
        let left = self.0.take().and_then(|shared| shared.answer(Some(answer)));
        left.map_or(Ok(()), Err)
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
            let mut state = self.0.0.lock();
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
            let mut state = self.0.0.lock();
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
        matches!(&*self.0.lock(), State::Over)
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

/// Ends questions whose time is over: one thread, which sleeps while nobody asks. In a simulation
/// its schedule does.
pub struct Alarm {
    clock: Arc<Clock>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Clock {
    state: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Default)]
struct Watched {
    /// The next to end first; those of equal times in any order.
    questions: BinaryHeap<Reverse<Watch>>,
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
    /// Starts its thread.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be started.
    pub fn start() -> Result<Alarm, Error> {
        let clock = Arc::new(Clock::default());
        #[cfg(feature = "sim")]
        if kvdepot_media::sim::current().is_some() {
            let thread = Mutex::default();
            return Ok(Alarm { clock, thread });
        }
        let rings = Arc::clone(&clock);
        let thread = std::thread::Builder::new()
            .name("kvdepot-alarm".into())
            .spawn(move || rings.run())
            .map_err(|source| Error::Io {
                path: "thread".into(),
                source,
            })?;
        Ok(Alarm {
            clock,
            thread: Mutex::new(Some(thread)),
        })
    }

    fn watch(&self, question: &Arc<dyn Expires>, limit: Duration) {
        #[cfg(feature = "sim")]
        if let Some(schedule) = kvdepot_media::sim::current() {
            return schedule.after(limit, expiry(question));
        }
        // Further away than clocks go: for ever.
        let Some(end) = clock::now().checked_add(limit) else {
            return;
        };
        let question = Arc::downgrade(question);
        let mut state = self.clock.state.lock();
        state.questions.push(Reverse(Watch { end, question }));
        self.clock.changed.notify_one();
    }

    /// Ends the thread. Questions that are open have no limit any more.
    pub fn stop(&self) {
        self.clock.state.lock().stop = true;
        self.clock.changed.notify_one();
        if let Some(thread) = self.thread.lock().take() {
            let _ended = thread.join();
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
        while !state.stop {
            let Some(Reverse(first)) = state.questions.peek() else {
                self.changed.wait(&mut state);
                continue;
            };
            let end = first.end;
            if end > clock::now() {
                // Answered ones stay until their time: a few tens of bytes each.
                self.changed.wait_until(&mut state, end);
                continue;
            }
            let due = state.questions.pop();
            let question = due.and_then(|Reverse(due)| due.question.upgrade());
            parking_lot::MutexGuard::unlocked(&mut state, || {
                // What follows is somebody else's code, and others wait for this thread.
                let expire = || question.iter().for_each(|question| question.expire());
                if catch_unwind(AssertUnwindSafe(expire)).is_err() {
                    tracing::error!("what follows an answer that did not come has panicked");
                }
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
        assert_eq!(reply.answer(1), Ok(()));
        assert_eq!(pending.now().ok().flatten(), Some(1));

        let (reply, pending) = ask();
        let pending = pending.now().err().unwrap();
        let waiting = std::thread::spawn(move || pending.wait(LONG));
        assert_eq!(reply.answer(2), Ok(()));
        assert_eq!(waiting.join().unwrap(), Some(2));
    }

    #[test]
    fn who_drops_the_reply_or_takes_too_long_has_not_answered() {
        let (reply, pending) = ask::<u32>();
        drop(reply);
        assert_eq!(pending.wait(LONG), None);

        let (reply, pending) = ask();
        assert_eq!(pending.wait(Duration::ZERO), None);
        assert_eq!(reply.answer(3), Err(3), "it goes back");

        let alarm = Alarm::start().unwrap();
        let (sender, receiver) = mpsc::channel();
        let (reply, pending) = ask();
        pending.then(Some((&alarm, Duration::from_millis(1))), move |answer| {
            sender.send(answer).unwrap();
        });
        assert_eq!(receiver.recv_timeout(LONG), Ok(None));
        assert_eq!(reply.answer(4), Err(4));
    }
}
