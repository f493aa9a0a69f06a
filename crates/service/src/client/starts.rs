//! Tasks of a client, and how long one is waited for.

use std::time::Duration;

use kvdepot_arena::patience::{SLICE, Wait, Why};
use kvdepot_arena::{Error, Key, NamespaceId};
use kvdepot_store::{BlockBuffers, GetOptions, Journal, Op, Outcome, Task};

use crate::client::Client;
use crate::client::link::Call;
use crate::frame::verbs::Says;

impl Client {
    pub(super) fn start(
        &self,
        (op, options, after): (Op, GetOptions, Option<Key>),
        id: NamespaceId,
        keys: Vec<Key>,
        buffers: BlockBuffers,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        buffers.check(keys.len(), op == Op::Get)?;
        let bytes = (0..keys.len()).map(|index| buffers.bytes(index)).sum();
        let journal = Journal::dispatched(op.name(), keys.len(), bytes);
        let task = Task::new(keys.len(), journal);
        match self.dial.link() {
            Some(link) => {
                if options.staged {
                    link.mover.copier.make_slab()?;
                }
                let call = Call::new((op, options, after), id, keys, buffers, task.clone(), pass);
                link.start(call);
            }
            None if op == Op::Put => {
                self.stores.drop_put();
                task.abandon(Outcome::Dropped);
            }
            None => task.abandon(Outcome::Miss),
        }
        Ok(task)
    }
}

impl Client {
    /// Starts a task without bytes.
    pub(super) fn start_plain(
        &self,
        name: &'static str,
        asked: &impl Says,
        id: NamespaceId,
        keys: usize,
    ) -> Result<Task, Error> {
        let pass = self.gate.enter()?;
        let task = Task::new(keys, Journal::dispatched(name, keys, 0));
        task.release(keys);
        match self.dial.link() {
            Some(link) => link.start_plain(asked, id, keys, &task, pass),
            None => task.abandon(Outcome::Miss),
        }
        Ok(task)
    }

    /// Waits so long for a lookup: what is not known then counts as missing.
    pub(super) fn wait_for(&self, lookup: &Task, limit: Duration) -> Result<Vec<bool>, Error> {
        let wait = Wait::new(limit);
        while let Err(error) = lookup.wait(Some(SLICE)) {
            match (error, wait.goes_on()) {
                (Error::Timeout { .. }, Ok(())) => {}
                (Error::Timeout { .. }, Err(Why::Late)) => break,
                (Error::Timeout { .. }, Err(Why::Interrupted)) => return Err(Error::Interrupted),
                (error, _) => return Err(error),
            }
        }
        let found = lookup.outcomes().into_iter();
        Ok(found.map(|outcome| outcome == Outcome::Done).collect())
    }
}
