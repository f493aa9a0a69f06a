//! Tasks: what a put or get answers at once, and its outcomes later.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::gate::FORKED;
use kvdepot_arena::{Error, clock};
use kvdepot_host::Condvar;
use kvdepot_host::fork;
use parking_lot::Mutex;

use crate::journal::{Journal, Stages};

/// Outcome of one key of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The outcome is not known yet.
    Pending,
    /// A get copied the bytes, or a put is acknowledged.
    Done,
    /// A get found no such block.
    Miss,
    /// The bytes failed verification, and the block was unpublished.
    Corrupt,
    /// The buffer of a get has another length than the block.
    Length,
    /// A put found no free space, and eviction could not free enough.
    Full,
    /// A put was dropped because the write-back queue is full (`overload: drop`), because the lower
    /// tier could not take the block, or because a copy failed.
    Dropped,
    /// An admission policy rejected the block of a put.
    ///
    /// * `admission: learned`: storing it would evict others, and it was evicted unread before or
    ///   follows such a block in its prompt.
    /// * `admission: second`: this was its first access, and a lower tier acknowledges puts. The
    ///   block stays in the upper tier.
    Declined,
    /// The depot was closed before the block was stored in the tier that acknowledges, or before a
    /// prefetch had brought it.
    Closed,
}

impl Outcome {
    /// Returns the name of the reason in `task.errors`, or `None` for success.
    #[must_use]
    pub fn reason(self) -> Option<&'static str> {
        match self {
            Outcome::Done => None,
            Outcome::Pending => Some("pending"),
            Outcome::Miss => Some("miss"),
            Outcome::Corrupt => Some("corrupt"),
            Outcome::Length => Some("length"),
            Outcome::Full => Some("full"),
            Outcome::Dropped => Some("dropped"),
            Outcome::Declined => Some("declined"),
            Outcome::Closed => Some("closed"),
        }
    }
}

/// A put, get, lookup or prefetch in progress.
///
/// A put has two milestones: first kvdepot no longer uses the caller's buffers
/// ([`Task::wait_released`]), then every block has its outcome ([`Task::wait`]). Dropping a task
/// does not cancel it; kvdepot holds the buffers until the copies have stopped. Clones share the
/// task.
///
/// # Examples
///
/// ```
/// use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, NamespaceSpec, Outcome};
/// use serde_json::json;
///
/// let config = Config::new("Cache", &json!({"cache": {"capacity": "1MiB"}}))?;
/// let depot = Depot::open(&config)?;
/// # let spec = NamespaceSpec {
/// #     model: "m".into(),
/// #     dtype: "bfloat16".into(),
/// #     block_tokens: 16,
/// #     ..NamespaceSpec::default()
/// # };
/// let blocks = depot.namespace(&spec)?;
/// let block = Buffer::from_vec(vec![7; 4096]);
/// let task = blocks.put(vec![Key([1; 32])], BlockBuffers::whole([block]))?;
///
/// task.wait_released(None)?; // The caller may overwrite its memory.
/// assert_eq!(task.wait(None)?, [true]); // The block is acknowledged.
/// assert_eq!(task.outcomes(), [Outcome::Done]);
/// # Ok::<(), kvdepot_store::Error>(())
/// ```
#[derive(Clone)]
pub struct Task {
    shared: Arc<Shared>,
}

/// Callback for each change of a task, in order.
///
/// The arguments are the keys that have received their outcomes, and the number of keys whose
/// buffers are released. It runs under the lock of the task and must not block.
pub type Mirror = Box<dyn Fn(&[(usize, Outcome)], usize) + Send + Sync>;

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Of the process whose lanes work on it.
    epoch: u64,
    journal: Journal,
    stages: Stages,
    mirror: Option<Mirror>,
}

struct State {
    outcomes: Vec<Outcome>,
    /// Keys without an outcome.
    pending: usize,
    /// Keys whose buffers may still be touched.
    held: usize,
    /// Called once it is done.
    on_done: Vec<OnDone>,
}

type OnDone = Box<dyn FnOnce() + Send>;

impl Task {
    /// Creates a task in progress for `keys` keys.
    pub fn new(keys: usize, journal: Journal) -> Task {
        Task::with_mirror(keys, journal, None)
    }

    /// A task whose steps somebody else repeats.
    pub(crate) fn with_mirror(keys: usize, journal: Journal, mirror: Option<Mirror>) -> Task {
        let state = State {
            outcomes: vec![Outcome::Pending; keys],
            pending: keys,
            held: keys,
            on_done: Vec::new(),
        };
        Task {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                changed: Condvar::new(),
                epoch: fork::epoch(),
                journal,
                stages: Stages::default(),
                mirror,
            }),
        }
    }

    /// Waits until every key has its outcome: blocks of a put are acknowledged, buffers of a get
    /// are filled.
    ///
    /// Returns for each key whether it succeeded. `timeout` is the maximum time to wait; `None`:
    /// unlimited.
    ///
    /// # Errors
    ///
    /// * [`Error::Timeout`] after `timeout`. The task continues.
    /// * [`Error::Closed`] in a forked child, whose copy threads do not run.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Vec<bool>, Error> {
        self.wait_until("the task", timeout, State::is_done)?;
        Ok(self
            .outcomes()
            .iter()
            .map(|outcome| *outcome == Outcome::Done)
            .collect())
    }

    /// Waits until kvdepot no longer uses the caller's buffers.
    ///
    /// `timeout` is the maximum time to wait; `None`: unlimited.
    ///
    /// # Errors
    ///
    /// Those of [`Task::wait`].
    pub fn wait_released(&self, timeout: Option<Duration>) -> Result<(), Error> {
        self.wait_until("the release of the buffers", timeout, |state| {
            state.held == 0
        })
    }

    /// Returns true if every key has its outcome.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.shared.state.lock().is_done()
    }

    /// Returns the current outcome of each key.
    #[must_use]
    pub fn outcomes(&self) -> Vec<Outcome> {
        self.shared.state.lock().outcomes.clone()
    }

    /// Calls `call` when every key has its outcome.
    ///
    /// If the task is done already, `call` runs immediately. Otherwise it runs on the thread that
    /// records the last outcome, and must not block that thread.
    pub fn on_done(&self, call: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        if !state.is_done() {
            state.on_done.push(Box::new(call));
            return;
        }
        drop(state);
        call();
    }

    fn wait_until(
        &self,
        what: &'static str,
        timeout: Option<Duration>,
        reached: impl Fn(&State) -> bool,
    ) -> Result<(), Error> {
        if self.shared.epoch != fork::epoch() {
            return Err(Error::Closed(FORKED));
        }
        #[cfg(feature = "sim")]
        if let Some(schedule) = kvdepot_media::sim::current()
            && timeout != Some(Duration::ZERO)
        {
            schedule.until(|| reached(&self.shared.state.lock()));
        }
        let deadline = timeout.and_then(|timeout| clock::now().checked_add(timeout));
        let mut state = self.shared.state.lock();
        while !reached(&state) {
            match deadline {
                None => self.shared.changed.wait(&mut state),
                Some(deadline) => {
                    let late = self
                        .shared
                        .changed
                        .wait_until(&mut state, deadline)
                        .timed_out();
                    if late && !reached(&state) {
                        let seconds = timeout.map_or(0.0, |timeout| timeout.as_secs_f64());
                        return Err(Error::Timeout { what, seconds });
                    }
                }
            }
        }
        Ok(())
    }

    /// Records outcomes of keys and releases their buffers.
    pub fn settle(&self, each: impl IntoIterator<Item = (usize, Outcome)>) {
        let each: Vec<_> = each.into_iter().collect();
        self.change(&each, each.len());
    }

    /// Gives a key whose buffer was released before its outcome.
    pub(crate) fn acknowledge(&self, index: usize, outcome: Outcome) {
        self.acknowledge_all(&[(index, outcome)]);
    }

    /// As [`Task::acknowledge`], of several in one step.
    pub(crate) fn acknowledge_all(&self, each: &[(usize, Outcome)]) {
        self.change(each, 0);
    }

    /// Records that the buffers of `keys` further keys are released.
    pub fn release(&self, keys: usize) {
        self.change(&[], keys);
    }

    /// Applies a change that a [`Mirror`] received. Keys that have an outcome keep it.
    pub fn repeat(&self, settled: &[(usize, Outcome)], released: usize) {
        self.update(|state| {
            let mut known = 0;
            for (index, outcome) in settled {
                match state.outcomes.get(*index) {
                    Some(Outcome::Pending) => state.settle(*index, *outcome),
                    _ => known += 1,
                }
            }
            state.held = state.held.saturating_sub(released.saturating_sub(known));
        });
    }

    /// Ends the task: all buffers are released, and keys without an outcome receive `outcome`.
    pub fn abandon(&self, outcome: Outcome) {
        self.update(|state| {
            for index in 0..state.outcomes.len() {
                if state.outcomes[index] == Outcome::Pending {
                    state.settle(index, outcome);
                }
            }
            state.held = 0;
        });
    }

    /// Notes that blocks are handed to the lanes, from or to a tier.
    pub(crate) fn begins_at(&self, tier: &'static str, blocks: usize, bytes: u64) {
        let Shared {
            journal, stages, ..
        } = &*self.shared;
        stages.begin(journal, tier, blocks, bytes);
    }

    /// Notes that the copies of blocks have ended, so many of them well.
    pub(crate) fn ends_at(&self, tier: &'static str, done: usize) {
        self.shared.stages.end(tier, done);
    }

    fn change(&self, settled: &[(usize, Outcome)], released: usize) {
        if settled.is_empty() && released == 0 {
            return;
        }
        self.update(|state| {
            for (index, outcome) in settled {
                state.settle(*index, *outcome);
            }
            state.held -= released;
            if let Some(mirror) = &self.shared.mirror {
                mirror(settled, released);
            }
        });
    }

    fn update(&self, update: impl FnOnce(&mut State)) {
        let mut state = self.shared.state.lock();
        let (before, held) = (state.is_done(), state.held);
        update(&mut state);
        // Both milestones are reached by counting down to zero.
        if state.held == 0 {
            self.shared.changed.notify_all();
            if held > 0 {
                self.shared.stages.finish();
            }
        }
        if state.is_done() && !before {
            let done = state.outcomes.iter().filter(|o| **o == Outcome::Done);
            self.shared.journal.finished(done.count());
            let calls = std::mem::take(&mut state.on_done);
            // They may ask the task what became of it.
            drop(state);
            calls.into_iter().for_each(|call| call());
        }
    }
}

impl State {
    fn is_done(&self) -> bool {
        self.pending == 0 && self.held == 0
    }

    fn settle(&mut self, index: usize, outcome: Outcome) {
        debug_assert_eq!(self.outcomes[index], Outcome::Pending);
        self.outcomes[index] = outcome;
        self.pending -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_comes_before_acknowledgement() {
        let task = Task::new(2, Journal::dispatched("put", 2, 0));
        task.release(2);
        task.wait_released(Some(Duration::ZERO)).unwrap();
        assert!(matches!(
            task.wait(Some(Duration::ZERO)),
            Err(Error::Timeout { .. })
        ));
        task.acknowledge(0, Outcome::Done);
        task.acknowledge(1, Outcome::Full);
        assert_eq!(task.wait(None).unwrap(), [true, false]);
        assert_eq!(task.outcomes()[1].reason(), Some("full"));
    }

    #[test]
    fn whoever_asked_is_called_once_when_the_last_key_has_its_outcome() {
        use std::sync::atomic::AtomicU32;
        use std::sync::atomic::Ordering::Relaxed;
        let task = Task::new(2, Journal::dispatched("get", 2, 0));
        let calls = Arc::new(AtomicU32::new(0));
        let ask = || {
            let (calls, task) = (Arc::clone(&calls), task.clone());
            task.clone().on_done(move || {
                assert!(task.is_done());
                calls.fetch_add(1, Relaxed);
            });
        };
        ask();
        task.settle([(0, Outcome::Done)]);
        assert_eq!(calls.load(Relaxed), 0);
        task.settle([(1, Outcome::Miss)]);
        assert_eq!(calls.load(Relaxed), 1);
        ask();
        assert_eq!(calls.load(Relaxed), 2);
    }
}
