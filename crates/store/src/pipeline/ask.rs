//! Lookups as tasks: who asks a tier that may answer late need not wait for it.

use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::{Error, Key, NamespaceId};

use super::Core;
use crate::journal::Journal;
use crate::task::{Outcome, Task};
use crate::tier::Apart;

/// A lookup that has not heard from all tiers.
struct Lookup {
    core: Arc<Core>,
    namespace: NamespaceId,
    keys: Vec<Key>,
    task: Task,
    _pass: Pass,
}

impl Core {
    /// Asks which blocks are stored in some tier: `Done` for those that are, `Miss` for the others.
    /// Where the tiers of arenas have all, or there is no other, the task is done at once.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn lookup(self: &Arc<Core>, id: NamespaceId, keys: &[Key]) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        self.asked(id, keys);
        Ok(self.look_up(pass, id, keys))
    }

    pub(super) fn look_up(self: &Arc<Core>, pass: Pass, id: NamespaceId, keys: &[Key]) -> Task {
        let task = Task::new(keys.len(), Journal::dispatched("lookup", keys.len(), 0));
        // There are no buffers to hold.
        task.release(keys.len());
        let lookup = Lookup {
            core: Arc::clone(self),
            namespace: id,
            keys: keys.to_vec(),
            task: task.clone(),
            _pass: pass,
        };
        lookup.ask(0, self.stored(id, keys));
        task
    }
}

impl Core {
    /// The first tier from `tier` on that may answer late, and what it is to be asked for; `None`
    /// where all is found, or there is none.
    pub(super) fn next_apart(
        &self,
        tier: usize,
        found: &[bool],
    ) -> Option<(usize, &Apart, Vec<usize>)> {
        let missing: Vec<usize> = (0..found.len()).filter(|at| !found[*at]).collect();
        let mut late = self.tiers.iter().enumerate().skip(tier);
        let next = late.find_map(|(at, tier)| Some((at, tier.apart()?)));
        let (at, apart) = next.filter(|_| !missing.is_empty())?;
        Some((at, apart, missing))
    }
}

impl Lookup {
    /// Asks the tiers from `tier` on for what was not found.
    fn ask(self, tier: usize, mut found: Vec<bool>) {
        let core = Arc::clone(&self.core);
        let Some((at, apart, missing)) = core.next_apart(tier, &found) else {
            for (index, found) in found.into_iter().enumerate() {
                let outcome = if found { Outcome::Done } else { Outcome::Miss };
                self.task.acknowledge(index, outcome);
            }
            return;
        };
        let keys: Vec<Key> = missing.iter().map(|index| self.keys[*index]).collect();
        apart.probe(self.namespace, &keys).then(move |there| {
            let there = missing.into_iter().zip(there.unwrap_or_default());
            there.for_each(|(index, there)| found[index] = there);
            self.ask(at + 1, found);
        });
    }
}
