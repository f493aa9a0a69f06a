//! Finished tasks, in the order in which they finished, behind one descriptor that can be polled.
//!
//! For engines that submit and poll: no thread waits for a task. A task that is done enters its
//! number into a queue and signals.

use std::os::fd::RawFd;
use std::sync::Arc;

use kvdepot_arena::Error;
use kvdepot_host::event::Event;
use parking_lot::Mutex;

use crate::Task;

/// Queue of the numbers of finished tasks, with one descriptor to poll.
///
/// Engines that submit and poll use it instead of a thread that waits for each task. The queue has
/// the order in which the tasks finished. Clones share the queue.
///
/// # Examples
///
/// ```
/// use kvdepot_store::{Completions, Config, Depot, Key, NamespaceSpec};
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
///
/// let completions = Completions::new()?;
/// // An event loop polls this descriptor together with its others.
/// assert!(completions.fd().is_some());
/// let task = blocks.lookup(&[Key([1; 32])])?;
/// completions.watch(&task, 7);
/// assert_eq!(completions.drain(true), [7]);
/// assert_eq!(task.wait(None)?, [false]);
/// # Ok::<(), kvdepot_store::Error>(())
/// ```
#[derive(Clone)]
pub struct Completions {
    queue: Arc<Mutex<Queue>>,
}

struct Queue {
    done: Vec<u64>,
    /// `None` once closed.
    event: Option<Event>,
}

impl Completions {
    /// Creates an empty queue.
    ///
    /// # Errors
    ///
    /// [`Error::Host`] if the process has no free descriptor.
    pub fn new() -> Result<Completions, Error> {
        let event = Some(Event::new()?);
        let done = Vec::new();
        Ok(Completions {
            queue: Arc::new(Mutex::new(Queue { done, event })),
        })
    }

    /// Returns the descriptor to poll, or `None` after [`Completions::close`].
    ///
    /// The descriptor is readable while the queue has numbers.
    #[must_use]
    pub fn fd(&self) -> Option<RawFd> {
        self.queue.lock().event.as_ref().map(Event::fd)
    }

    /// Adds `number` to the queue when `task` is done.
    pub fn watch(&self, task: &Task, number: u64) {
        let completions = self.clone();
        task.on_done(move || completions.enter(number));
    }

    /// Adds `number` to the queue immediately.
    pub fn enter(&self, number: u64) {
        let mut queue = self.queue.lock();
        let queue = &mut *queue;
        if let Some(event) = &queue.event {
            queue.done.push(number);
            event.signal();
        }
    }

    /// Removes all numbers from the queue and returns them.
    ///
    /// If `clear` is true, the descriptor is unreadable until the next number arrives. If it is
    /// false, the caller clears the descriptor.
    #[must_use]
    pub fn drain(&self, clear: bool) -> Vec<u64> {
        let mut queue = self.queue.lock();
        if let Some(event) = queue.event.as_ref().filter(|_| clear) {
            event.clear();
        }
        std::mem::take(&mut queue.done)
    }

    /// Closes the descriptor and empties the queue.
    ///
    /// Tasks that finish later are ignored.
    pub fn close(&self) {
        let mut queue = self.queue.lock();
        queue.event = None;
        queue.done.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outcome;
    use crate::journal::Journal;

    #[test]
    fn tasks_come_in_the_order_in_which_they_end() {
        let completions = Completions::new().unwrap();
        let tasks = [0, 1].map(|number| {
            let task = Task::new(1, Journal::dispatched("get", 1, 0));
            completions.watch(&task, number);
            task
        });
        assert!(completions.drain(true).is_empty());
        tasks[1].settle([(0, Outcome::Miss)]);
        completions.enter(7);
        tasks[0].settle([(0, Outcome::Done)]);
        assert_eq!(completions.drain(true), [1, 7, 0]);
    }

    #[test]
    fn what_ends_after_the_close_is_forgotten() {
        let completions = Completions::new().unwrap();
        let task = Task::new(1, Journal::dispatched("get", 1, 0));
        completions.watch(&task, 0);
        completions.close();
        assert_eq!(completions.fd(), None);
        task.settle([(0, Outcome::Done)]);
        assert!(completions.drain(true).is_empty());
    }
}
