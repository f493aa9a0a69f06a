//! Answers that may come later: a file system or a peer takes milliseconds, and no thread of an
//! engine waits for it.
//!
//! Whoever is asked gets a [`Reply`]; whoever asks has the [`Pending`] answer. An answer comes
//! once: in the call, later, or, where a limit passes first or the reply is dropped, not at all.
//! What comes too late is given back by whoever asked, so that nothing it holds is lost.
//!
//! The limit of a call bounds silence: each answer that a tier reports by [`Progress`] starts it
//! again, so that a call of many requests goes on as long as they are answered. The limit of a
//! lookup bounds all of it: with [`Reply::in_parts`], the keys found by then are its answer.
//! A call that waits for its turn at threads that serve others is not met by silence ([`Pulse`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_arena::clock;
use parking_lot::Mutex;

use super::alarm::Alarm;

/// What follows an answer, or its absence.
type Then<T> = Box<dyn FnOnce(Option<T>) + Send>;

/// What becomes of an answer that nobody waits for any more.
type Back<T> = Box<dyn FnOnce(T) + Send>;

/// The answer of a question whose time is over, as far as there is one by then.
enum SoFar<T> {
    None,
    Some(Box<dyn FnOnce() -> Option<T> + Send>),
    /// A thread makes the answer of it.
    Taken,
}

impl<T> SoFar<T> {
    fn set(&mut self, answer: impl FnOnce() -> Option<T> + Send + 'static) {
        if !matches!(self, SoFar::Taken) {
            *self = SoFar::Some(Box::new(answer));
        }
    }
}

/// The answering side of a request to an asynchronous tier.
///
/// Dropping it without an answer ends the request without one.
#[must_use = "dropped, it says that there is no answer"]
pub struct Reply<T>(Option<Arc<Shared<T>>>);

/// The requesting side of a request to an asynchronous tier.
#[must_use = "what follows the answer is given to it"]
pub struct Pending<T>(Arc<Shared<T>>);

struct Shared<T> {
    state: Mutex<State<T>>,
    back: Mutex<Option<Back<T>>>,
    so_far: Mutex<SoFar<T>>,
    /// The call has waited for a resource of this process.
    waited: AtomicBool,
    /// True if the answer did not come from the tier.
    unasked: Arc<AtomicBool>,
    /// Time of the last progress.
    heard: Mutex<Option<Instant>>,
    /// That of the threads at which the call waits for its turn.
    pulse: Mutex<Option<Arc<Pulse>>>,
}

/// When threads that serve many calls have done something last: a call that waits for its turn
/// there waits for others, and not for a tier that is silent.
#[derive(Default)]
pub(super) struct Pulse(Mutex<Option<Instant>>);

impl Pulse {
    pub(super) fn beat(&self) {
        *self.0.lock() = Some(clock::now());
    }

    fn has_beaten_since(&self, then: Instant) -> bool {
        self.0.lock().is_some_and(|at| at >= then)
    }
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

/// Creates a request: the side that answers it, and the side that waits for the answer.
pub fn ask<T>() -> (Reply<T>, Pending<T>) {
    ask_or(None)
}

/// The same, where what comes too late goes `back`.
pub(super) fn ask_or<T>(back: Option<Back<T>>) -> (Reply<T>, Pending<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State::Asked),
        back: Mutex::new(back),
        so_far: Mutex::new(SoFar::None),
        waited: AtomicBool::new(false),
        unasked: Arc::default(),
        heard: Mutex::new(None),
        pulse: Mutex::new(None),
    });
    (Reply(Some(Arc::clone(&shared))), Pending(shared))
}

impl<T> Shared<T> {
    /// Gives the answer back where nobody waits for it any more.
    fn answer(&self, answer: Option<T>) -> Option<T> {
        let so_far = std::mem::replace(&mut *self.so_far.lock(), SoFar::Taken);
        drop(so_far);
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

    /// The same, where an answer that is too late goes back.
    fn answer_or_back(&self, answer: T) -> bool {
        let late = self.answer(Some(answer));
        let in_time = late.is_none();
        if let Some((late, back)) = late.zip(self.back.lock().take()) {
            back(late);
        }
        in_time
    }
}

impl<T> Reply<T> {
    /// Answers the request. The continuation of the request runs on this thread.
    ///
    /// Returns false if the request has already ended. The pins and reservations in the answer are
    /// then released.
    pub fn answer(mut self, answer: T) -> bool {
        self.0
            .take()
            .is_some_and(|shared| shared.answer_or_back(answer))
    }
}

impl<T: Send + 'static> Reply<T> {
    /// Answers with the result of `make`, unless the time limit has already used the parts so far.
    pub fn answer_parts(mut self, make: impl FnOnce() -> T) -> bool {
        let Some(shared) = self.0.take() else {
            return false;
        };
        let so_far = std::mem::replace(&mut *shared.so_far.lock(), SoFar::Taken);
        match so_far {
            SoFar::Taken => false,
            SoFar::None | SoFar::Some(_) => shared.answer_or_back(make()),
        }
    }

    /// Returns the handle by which a tier reports that it still receives answers.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress(self.0.clone().map(|shared| shared as _))
    }

    /// Collects `count` parts of an answer as they arrive.
    ///
    /// At the time limit, `told` makes the answer from the parts so far, if there is at least one.
    pub fn in_parts<P: Send + 'static>(
        &self,
        count: usize,
        told: impl FnOnce(Vec<Option<P>>) -> T + Send + 'static,
    ) -> Parts<P> {
        let parts = Parts(Arc::new(Mutex::new((0..count).map(|_| None).collect())));
        if let Some(shared) = &self.0 {
            let (so_far, waited) = (parts.clone(), shared.waited.load(Ordering::Relaxed));
            let pulse = shared
                .pulse
                .lock()
                .clone()
                .map(|pulse| (pulse, clock::now()));
            let unasked = Arc::clone(&shared.unasked);
            let so_far = move || {
                let found = so_far.take();
                let has_some = found.iter().any(Option::is_some);
                let others = pulse.is_some_and(|(pulse, then)| pulse.has_beaten_since(then));
                unasked.store(!has_some && !others, Ordering::Relaxed);
                (has_some || waited || others).then(|| told(found))
            };
            shared.so_far.lock().set(so_far);
        }
        parts
    }

    /// The call waits for its turn at threads with that pulse, which is progress as long as it
    /// beats, until the call [begins](Progress::begins).
    pub(super) fn in_turn(&self, pulse: &Arc<Pulse>) {
        if let Some(shared) = &self.0 {
            *shared.pulse.lock() = Some(Arc::clone(pulse));
        }
    }

    /// Records that the request waits for a resource of this process.
    ///
    /// If it still waits at its time limit, the result of `refusal` is the answer. The tier then
    /// counts neither as unresponsive nor as responding.
    pub fn waits(&self, refusal: impl FnOnce() -> T + Send + 'static) {
        if let Some(shared) = &self.0 {
            shared.waited.store(true, Ordering::Relaxed);
            let unasked = Arc::clone(&shared.unasked);
            shared.so_far.lock().set(move || {
                unasked.store(true, Ordering::Relaxed);
                Some(refusal())
            });
        }
    }

    /// Records that the answer comes from memory of this process, so that the answer neither opens
    /// nor closes the tier's circuit breaker.
    pub fn asks_nobody(&self) {
        if let Some(shared) = &self.0 {
            shared.unasked.store(true, Ordering::Relaxed);
        }
    }

    /// Records that the request has received the resource that it waited for.
    ///
    /// Its time limit starts again, except that of a lookup.
    pub fn begins(&self) {
        if let Some(shared) = &self.0 {
            let mut so_far = shared.so_far.lock();
            let refusal = match &*so_far {
                SoFar::Some(_) => std::mem::replace(&mut *so_far, SoFar::None),
                SoFar::None | SoFar::Taken => SoFar::None,
            };
            drop(so_far);
            drop(refusal);
            shared.hear(clock::now());
        }
    }
}

/// Reports progress of a request. Its time limit counts from the last report.
#[derive(Clone)]
pub struct Progress(Option<Arc<dyn Expires>>);

impl Progress {
    /// Records that a part of the answer has arrived.
    pub fn made(&self) {
        if let Some(question) = &self.0 {
            question.hear(clock::now());
        }
    }

    /// The call has its turn: from now on what others are served is no progress of it.
    pub(super) fn begins(&self) {
        if let Some(question) = &self.0 {
            question.begin();
        }
    }

    /// Returns true while the caller waits for the rest.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.0.as_ref().is_some_and(|question| !question.is_over())
    }
}

/// Parts of an answer.
pub struct Parts<P>(Arc<Mutex<Vec<Option<P>>>>);

impl<P> Clone for Parts<P> {
    fn clone(&self) -> Parts<P> {
        Parts(Arc::clone(&self.0))
    }
}

impl<P> Parts<P> {
    /// Adds part number `at`. The part is dropped if all parts have been taken.
    pub fn note(&self, at: usize, part: P) {
        let late = match self.0.lock().get_mut(at) {
            Some(place) => place.replace(part),
            None => Some(part),
        };
        drop(late);
    }

    /// Takes all parts that have arrived. A second call returns no parts.
    #[must_use]
    pub fn take(&self) -> Vec<Option<P>> {
        std::mem::take(&mut *self.0.lock())
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
    /// The flag of an answer that did not come from the tier; valid after the answer.
    pub(super) fn unasked(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0.unasked)
    }

    /// Returns the answer, if the tier gave it during the call.
    ///
    /// # Errors
    ///
    /// The request, if it is still in progress.
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

    /// Calls `then` once, with the answer or with `None`.
    ///
    /// It runs on the thread that answers. `None` means that the request ended without an answer,
    /// or that `alarm` has waited for `limit`.
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

    /// As the clock sees it.
    #[cfg(test)]
    pub(super) fn question(&self) -> Arc<dyn Expires> {
        Arc::clone(&self.0) as _
    }

    /// Waits on this thread for the answer, for at most `limit` without progress.
    pub fn wait(self, limit: Duration) -> Option<T> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let question = Arc::clone(&self.0);
        self.then(None, move |answer| {
            let _sent = sender.send(answer);
        });
        #[cfg(feature = "sim")]
        if let Some(schedule) = kvdepot_media::sim::current() {
            let asked: Arc<dyn Expires> = Arc::clone(&question) as _;
            schedule.after(limit, expiry(&asked, limit));
            schedule.until(|| question.is_over());
        }
        let mut left = limit;
        loop {
            if let Ok(answer) = receiver.recv_timeout(left) {
                return answer;
            }
            match question.goes_on(limit) {
                Some(end) => left = end.saturating_duration_since(clock::now()),
                None => break,
            }
        }
        question.expire();
        // The limit's word, or an answer that has overtaken it.
        receiver.recv().unwrap_or(None)
    }
}

/// A question whose time can be over.
pub(super) trait Expires: Send + Sync {
    fn expire(&self);
    /// There is progress.
    fn hear(&self, now: Instant);
    /// It does not wait for its turn any more.
    fn begin(&self);
    /// Returns the time of the next check, if there was progress within `limit`.
    fn goes_on(&self, limit: Duration) -> Option<Instant>;
    /// Whether it has its answer, or will have none.
    fn is_over(&self) -> bool;
}

impl<T: Send> Expires for Shared<T> {
    fn expire(&self) {
        let so_far = std::mem::replace(&mut *self.so_far.lock(), SoFar::Taken);
        let found = match so_far {
            // The thread that has taken it answers.
            SoFar::Taken => return,
            SoFar::None => None,
            SoFar::Some(so_far) => so_far(),
        };
        match found {
            Some(found) => {
                self.answer_or_back(found);
            }
            None => {
                let _none = self.answer(None);
            }
        }
    }

    fn hear(&self, now: Instant) {
        *self.heard.lock() = Some(now);
    }

    fn begin(&self) {
        let waited = self.pulse.lock().take();
        if waited.is_some() {
            self.hear(clock::now());
        }
    }

    fn goes_on(&self, limit: Duration) -> Option<Instant> {
        if !matches!(*self.so_far.lock(), SoFar::None) {
            // Its parts are the answer.
            return None;
        }
        let pulse = self.pulse.lock().clone();
        let others = pulse.and_then(|pulse| *pulse.0.lock());
        let end = (*self.heard.lock()).max(others)?.checked_add(limit)?;
        (end > clock::now()).then_some(end)
    }

    fn is_over(&self) -> bool {
        matches!(&*self.state.lock(), State::Over)
    }
}

/// Ends a question at its limit, unless there was progress: then the limit starts again. Returns
/// false if the question does not end.
#[cfg(feature = "sim")]
pub(super) fn expiry(
    question: &Arc<dyn Expires>,
    limit: Duration,
) -> Box<dyn FnOnce() -> bool + Send> {
    let question = Arc::downgrade(question);
    Box::new(move || {
        let question = question.upgrade().filter(|question| !question.is_over());
        let Some(question) = question else {
            return false;
        };
        let schedule = kvdepot_media::sim::current();
        match question.goes_on(limit).zip(schedule) {
            Some((end, schedule)) => {
                let left = end.saturating_duration_since(clock::now());
                schedule.after(left, expiry(&question, limit));
                false
            }
            None => {
                question.expire();
                true
            }
        }
    })
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
    fn a_call_that_waits_for_its_turn_is_met_by_silence_only_where_nobody_is_served() {
        let pulse = Arc::<Pulse>::default();
        let (reply, pending) = ask::<u32>();
        let (question, progress) = (pending.question(), reply.progress());
        reply.in_turn(&pulse);
        assert_eq!(question.goes_on(LONG), None, "nobody is served");
        pulse.beat();
        assert!(question.goes_on(LONG).is_some());
        progress.begins();
        let end = question.goes_on(LONG);
        assert!(end.is_some());
        pulse.beat();
        assert_eq!(
            question.goes_on(LONG),
            end,
            "what others are served is no progress of it"
        );

        for served in [false, true] {
            let pulse = Arc::<Pulse>::default();
            let (reply, pending) = ask();
            reply.in_turn(&pulse);
            let _parts = reply.in_parts(2, |found: Vec<Option<u32>>| found);
            if served {
                pulse.beat();
            }
            let answer = pending.wait(Duration::ZERO);
            assert_eq!(answer, served.then(|| vec![None, None]));
        }
    }

    #[test]
    fn what_was_found_by_the_limit_is_the_answer() {
        let told = |found: Vec<Option<u32>>| found;
        let (reply, pending) = ask();
        let parts = reply.in_parts(3, told);
        parts.note(1, 7);
        assert_eq!(
            pending.wait(Duration::ZERO),
            Some(vec![None, Some(7), None])
        );
        parts.note(2, 8);
        assert!(parts.take().is_empty() && !reply.answer(Vec::new()));

        let (reply, pending) = ask();
        let parts = reply.in_parts(3, told);
        assert_eq!(pending.wait(Duration::ZERO), None, "nothing was found");
        drop((parts, reply));
    }

    #[test]
    fn the_limit_and_the_last_part_make_one_answer() {
        // The limit has taken the parts, and still makes the answer of them.
        let (going_on, goes_on) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let (reply, pending) = ask();
        let parts = reply.in_parts(1, move |found: Vec<Option<u32>>| {
            begun.send(()).unwrap();
            goes_on.recv().unwrap();
            found
        });
        parts.note(0, 7);
        let waiting = std::thread::spawn(move || pending.wait(Duration::ZERO));
        begins.recv().unwrap();
        assert!(!reply.answer_parts(|| parts.take()));
        going_on.send(()).unwrap();
        assert_eq!(waiting.join().unwrap(), Some(vec![Some(7)]));

        // The last part has come, and the limit passes while the answer is made.
        let (reply, pending) = ask();
        let parts = reply.in_parts(1, |found: Vec<Option<u32>>| found);
        parts.note(0, 8);
        let question = pending.question();
        assert!(reply.answer_parts(|| {
            question.expire();
            parts.take()
        }));
        assert_eq!(pending.wait(LONG), Some(vec![Some(8)]));
    }
}
