//! The blocks of one depot, and how they come and go: so many under way at a time.

use std::collections::VecDeque;
use std::time::Instant;

use kvdepot_store::{Depot, Key, Namespace, Task};

use crate::bench::media::{Region, spec};
use crate::bench::random::Random;
use crate::error::Error;
use crate::interrupt::Interrupt;

/// Calls that are under way at a time, as far as the depth has blocks for them: a call ends with
/// its last block, and with few of them much less than the depth would be under way mostly.
const CALLS: usize = 8;

/// Bytes of a call while a store is filled.
const FILL: usize = 32 << 20;

/// A depot, with the keys of its blocks.
pub(super) struct Blocks {
    ns: Namespace,
    depot: Depot,
    random: Random,
    pub(super) keys: Vec<Key>,
    block: usize,
}

impl Blocks {
    pub(super) fn new(depot: Depot, block: usize) -> Result<Blocks, Error> {
        Ok(Blocks {
            ns: depot.namespace(&spec())?,
            depot,
            random: Random(7),
            keys: Vec::new(),
            block,
        })
    }

    pub(super) fn depot(&self) -> &Depot {
        &self.depot
    }

    pub(super) fn fill(
        &mut self,
        count: usize,
        region: &Region,
        interrupt: &Interrupt,
    ) -> Result<Vec<Key>, Error> {
        let mut all = Vec::with_capacity(count);
        let call = (FILL / self.block).max(1);
        while all.len() < count {
            interrupt.check()?;
            let keys = self.new_keys(call.min(count - all.len()));
            let slots = (all.len()..).map(|number| number % region.blocks(self.block));
            let buffers = region.buffers(self.block, slots.take(keys.len()))?;
            done(&self.ns.put(keys.clone(), buffers)?, "stored")?;
            all.extend(keys);
        }
        Ok(all)
    }

    pub(super) fn new_keys(&mut self, count: usize) -> Vec<Key> {
        (0..count).map(|_| self.random.key()).collect()
    }

    /// These are there, and are asked for in no order of the medium: nothing is a neighbour of what
    /// is asked for next.
    pub(super) fn keep(&mut self, mut all: Vec<Key>) {
        self.random.shuffle(&mut all);
        self.keys = all;
    }

    /// Gets blocks into slots of the region, `depth` of them at a time; seconds.
    pub(super) fn load(
        &self,
        keys: &[Key],
        slots: &[usize],
        region: &Region,
        depth: usize,
    ) -> Result<f64, Error> {
        let start = Instant::now();
        self.keep_going(keys, slots, depth, "got", |keys, slots| {
            let buffers = region.buffers(self.block, slots.iter().copied())?;
            Ok(self.ns.get(keys.to_vec(), buffers)?)
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Puts slots of the region as new blocks, `depth` of them at a time; seconds.
    pub(super) fn dump(
        &self,
        keys: &[Key],
        slots: &[usize],
        region: &Region,
        depth: usize,
    ) -> Result<f64, Error> {
        let start = Instant::now();
        self.keep_going(keys, slots, depth, "stored", |keys, slots| {
            let buffers = region.buffers(self.block, slots.iter().copied())?;
            Ok(self.ns.put(keys.to_vec(), buffers)?)
        })?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn keep_going(
        &self,
        keys: &[Key],
        slots: &[usize],
        depth: usize,
        what: &str,
        begin: impl Fn(&[Key], &[usize]) -> Result<Task, Error>,
    ) -> Result<(), Error> {
        let call = (depth / CALLS).max(1);
        let mut under_way: VecDeque<Task> = VecDeque::new();
        for (keys, slots) in keys.chunks(call).zip(slots.chunks(call)) {
            if under_way.len() * call >= depth
                && let Some(first) = under_way.pop_front()
            {
                done(&first, what)?;
            }
            under_way.push_back(begin(keys, slots)?);
        }
        under_way.iter().try_for_each(|task| done(task, what))
    }

    /// Removes what a dump has stored.
    pub(super) fn remove(&self, keys: &[Key]) -> Result<(), Error> {
        match self.ns.remove(keys)? {
            removed if removed == keys.len() => Ok(()),
            removed => Err(Error::Bench(format!(
                "{removed} of {} blocks were removed",
                keys.len()
            ))),
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.depot.close();
    }
}

/// Waits until all blocks of a call are there.
pub(super) fn done(task: &Task, what: &str) -> Result<(), Error> {
    let all = task.wait(None)?;
    let missing = all.iter().filter(|ok| !**ok).count();
    match missing {
        0 => Ok(()),
        _ => Err(Error::Bench(format!(
            "{missing} of {} blocks were not {what}; set KVDEPOT_LOG=warn for the reason",
            all.len()
        ))),
    }
}
