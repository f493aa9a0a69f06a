//! Gets of callers whose lanes do not reach all tiers: what only those have comes into the near
//! tier first, and is served from there.

use std::ops::Range;
use std::sync::Arc;

use kvdepot_arena::Key;

use super::Get;
use crate::pipeline::loads::Joining;
use crate::pipeline::prefetch::Which;
use crate::task::Outcome;

impl Get {
    /// Whether a key that no tier has which the caller reaches may come near: each does so once, so
    /// that a block that does not verify there is not fetched for ever.
    pub(super) fn may_bring(&self, index: usize) -> bool {
        self.lies_beyond && !self.brought.lock().contains(&index)
    }

    /// Serves keys that no tier has which the caller reaches: what comes near, and as it comes,
    /// where not all of it finds room on its way at once.
    pub(super) fn bring_each(self: &Arc<Get>, indices: Vec<usize>) {
        let (bring, over): (Vec<_>, Vec<_>) = indices
            .into_iter()
            .partition(|index| self.may_bring(*index));
        self.miss(over.into_iter().map(|index| (index, Outcome::Miss)));
        if bring.is_empty() {
            return;
        }
        let get = Arc::clone(self);
        self.fetch(bring, Which::Each, move |came, again| {
            let (near, rest) = get.pin(0, &came);
            get.serve(0, near, None);
            get.miss(rest.into_iter().map(|index| (index, Outcome::Miss)));
            if !again.is_empty() {
                get.bring_each(again);
            }
        });
    }

    /// Goes on with a step of consecutive hits, whose first key without one is the first of `rest`,
    /// when what follows has come near. It holds nothing meanwhile.
    pub(super) fn bring_hits(self: &Arc<Get>, step: Range<usize>, rest: Vec<usize>) {
        let get = Arc::clone(self);
        self.fetch(rest, Which::Prefix, move |_, _| {
            let end = step.end;
            let found = get.find_hits(step, Joining::Never);
            get.go_on(found, end);
        });
    }

    /// Has keys brought near from wherever they are; then `then` runs with those that have come, or
    /// never will, and with those that had no room on their way while others came.
    fn fetch(
        self: &Arc<Get>,
        indices: Vec<usize>,
        which: Which,
        then: impl FnOnce(Vec<usize>, Vec<usize>) + Send + 'static,
    ) {
        let keys: Vec<Key> = indices.iter().map(|index| self.keys[*index]).collect();
        let get = Arc::clone(self);
        let over = move |outcomes: Vec<Outcome>| {
            let goes_on = outcomes.contains(&Outcome::Done);
            let mut each = outcomes.into_iter();
            let (again, came): (Vec<_>, Vec<_>) = indices
                .into_iter()
                .partition(|_| goes_on && each.next() == Some(Outcome::Dropped));
            get.brought.lock().extend(&came);
            then(came, again);
        };
        match self.core.bring_near(self.namespace, &keys, which) {
            Ok(task) => {
                let ended = task.clone();
                task.on_done(move || over(ended.outcomes()));
            }
            // All closes.
            Err(_) => over(Vec::new()),
        }
    }
}
