//! Lookups as tasks: who asks a tier that may answer late need not wait for it.

use std::sync::Arc;

use kvdepot_arena::gate::Pass;
use kvdepot_arena::{Error, Key, NamespaceId};

use super::Core;
use super::lookup::run;
use crate::journal::Journal;
use crate::task::{Mirror, Outcome, Task};
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
    /// Looks up which blocks are stored in some tier, without waiting for asynchronous tiers.
    ///
    /// A stored block receives the outcome `Done` as soon as it is found; the others receive `Miss`
    /// at the end. If the in-process tiers have all blocks, or there is no other tier, the task is
    /// done immediately.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn lookup(
        self: &Arc<Core>,
        id: NamespaceId,
        keys: &[Key],
        mirror: Option<Mirror>,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        self.asked(id, keys);
        Ok(self.look_up(pass, id, keys, mirror))
    }

    pub(super) fn look_up(
        self: &Arc<Core>,
        pass: Pass,
        id: NamespaceId,
        keys: &[Key],
        mirror: Option<Mirror>,
    ) -> Task {
        let journal = Journal::dispatched("lookup", keys.len(), 0);
        let task = Task::with_mirror(keys.len(), journal, mirror);
        // There are no buffers to hold.
        task.release(keys.len());
        let lookup = Lookup {
            core: Arc::clone(self),
            namespace: id,
            keys: keys.to_vec(),
            task: task.clone(),
            _pass: pass,
        };
        let found = self.stored(id, keys);
        lookup.say(found.iter().enumerate().filter(|(_, found)| **found));
        lookup.ask(0, found);
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
    /// Those that were found now.
    fn say<'a>(&self, found: impl Iterator<Item = (usize, &'a bool)>) {
        let found: Vec<_> = found.map(|(index, _)| (index, Outcome::Done)).collect();
        self.task.acknowledge_all(&found);
    }

    /// Asks the tiers from `tier` on for what was not found.
    fn ask(self, tier: usize, mut found: Vec<bool>) {
        let core = Arc::clone(&self.core);
        let Some((at, apart, missing)) = core.next_apart(tier, &found) else {
            core.note_found(self.namespace, &self.keys, run(&found));
            let missing = (0..found.len()).filter(|index| !found[*index]);
            let missing: Vec<_> = missing.map(|index| (index, Outcome::Miss)).collect();
            return self.task.acknowledge_all(&missing);
        };
        let keys: Vec<Key> = missing.iter().map(|index| self.keys[*index]).collect();
        apart.probe(self.namespace, &keys).then(move |there| {
            let there = there.unwrap_or_default();
            let there = missing.iter().copied().zip(&there);
            self.say(there.clone().filter(|(_, there)| **there));
            there.for_each(|(index, there)| found[index] = *there);
            self.ask(at + 1, found);
        });
    }
}
