//! Blocks that another host was asked to lend, and what waits for its answer.

use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::remote::Remote;

/// What follows the answer.
type Then = Box<dyn FnOnce() + Send>;

/// What was asked for.
pub(super) struct Loan {
    lent: OnceLock<Vec<Option<Remote>>>,
    /// None once it is known.
    waiting: Mutex<Option<Vec<Then>>>,
}

impl Loan {
    pub(super) fn new() -> Loan {
        Loan {
            lent: OnceLock::new(),
            waiting: Mutex::new(Some(Vec::new())),
        }
    }

    pub(super) fn is_known(&self) -> bool {
        self.lent.get().is_some()
    }

    /// One of the blocks, if it is known and was lent.
    pub(super) fn remote(&self, at: usize) -> Option<&Remote> {
        self.lent.get()?.get(at)?.as_ref()
    }

    /// The host has answered, or will not: nothing is lent then.
    pub(super) fn answer(&self, lent: Vec<Option<Remote>>) {
        let _once = self.lent.set(lent);
        let waiting = self.waiting.lock().take();
        waiting.into_iter().flatten().for_each(|then| then());
    }

    /// Has something done once that is so; at once where it is.
    pub(super) fn when_known(&self, then: Then) {
        let mut waiting = self.waiting.lock();
        match &mut *waiting {
            Some(waiting) => waiting.push(then),
            None => {
                drop(waiting);
                then();
            }
        }
    }
}
