//! Moves batches of parts with persistent threads, checksums fused into the copy.
//!
//! A batch is planned in the thread that submits it, and its first slices move while the rest is
//! still being planned; a small one that thread moves itself. Whatever happens to a lane, every
//! part of a batch gets an outcome or a failure, the completion runs exactly once, and no buffer
//! is let go before all lanes have stopped.

mod area;
mod batch;
mod cargo;
mod config;
mod outcome;
mod patience;
mod shared;
mod trip;

pub use batch::Batch;
pub use cargo::{PART_LEN_MAX, PARTS_MAX};
pub use config::CopierConfig;
pub use outcome::{Done, Outcome};

use crate::copy_kernel::CopyKernel;
use crate::cuda::keep_context;
use crate::error::{Error, Result};
use crate::memory::mover::Mover;
use kvdepot_host::cpu;
use kvdepot_host::fork::Origin;
use kvdepot_plan::{Join, Waiter};
use shared::{Flight, Shared, lock};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The lanes' stacks: they call nothing deep, and completions run on them as well.
const STACK_BYTES: usize = 1 << 20;

/// A group of copy threads ("lanes") that moves batches of parts and computes their checksums.
/// Dropping it closes it.
#[derive(Debug)]
pub struct Copier {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Copier {
    /// Starts the copy threads.
    ///
    /// The threads have the names `kvdepot-lane-N`. They may run on every processor that the
    /// control group of this process allows, regardless of the affinity of the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an invalid configuration, [`Error::Io`] if a thread cannot be
    /// started.
    pub fn new(config: CopierConfig) -> Result<Self> {
        config.check()?;
        let mover = Mover {
            kernel: config.kernel,
            stream_min: config.stream_min,
        };
        let origin = Origin::here();
        let origin =
            origin.map_err(|e| Error::io("start", "copy threads", std::io::Error::other(e)))?;
        let shared = Arc::new(Shared::new(config, mover, origin));
        let copier = Self {
            shared,
            threads: Mutex::new(Vec::new()),
        };
        for lane in 0..copier.shared.threads() {
            let shared = Arc::clone(&copier.shared);
            let name = format!("kvdepot-lane-{lane}");
            let spawned = std::thread::Builder::new()
                .name(name)
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    // Pinned lanes still work, only slower; there is nobody to tell.
                    drop(cpu::reset_affinity());
                    cpu::be_nice(shared.config.nice);
                    keep_context();
                    shared.queues.run(lane, shared.config.spin);
                });
            // On failure, dropping `copier` ends those that run.
            let thread = spawned.map_err(|error| Error::io("start", "a copy thread", error))?;
            lock(&copier.threads).push(thread);
        }
        Ok(copier)
    }

    /// Creates an empty batch for this copier.
    #[must_use]
    pub fn batch(&self) -> Batch {
        Batch::new(self.shared.spare(), Arc::clone(&self.shared))
    }

    /// Allocates the staging buffer, unless it exists already.
    ///
    /// # Errors
    ///
    /// The errors of [`Batch::stage`].
    pub fn make_slab(&self) -> Result<()> {
        self.shared.slab().map(drop)
    }

    /// Submits a batch to the copy threads and returns a ticket to wait for it.
    ///
    /// `on_done` runs once, when no copy thread uses the buffers any longer. It runs in the thread
    /// that finishes last: a copy thread or the calling one. Afterwards the buffers are released,
    /// and then the ticket is done. `on_done` must not wait for the ticket. A panic in it is caught
    /// and has no other effect.
    ///
    /// On a closed copier, or in a forked child, every part fails with
    /// [`Failure::Closed`](crate::Failure::Closed).
    pub fn submit(
        &self,
        mut batch: Batch,
        on_done: impl FnOnce(&mut Done<'_>) + Send + 'static,
    ) -> Ticket {
        debug_assert!(
            batch.is_from(&self.shared),
            "a batch belongs to the copier that made it"
        );
        let mut cargo = batch.cargo.take().unwrap_or_default();
        cargo.prepare();
        let flight = Flight::new(cargo, &self.shared);
        // After it was counted: `close` sets the flag before it looks at the count.
        let refused = self.shared.is_closed();
        let join = Join::new(flight, move |flight, ending| {
            flight.end(ending, refused, on_done)
        });
        let waiter = join.waiter();
        if !refused {
            self.shared.start(&join);
        }
        drop(join);
        Ticket {
            waiter,
            shared: Arc::clone(&self.shared),
        }
    }

    /// Returns the configuration of the copier.
    #[must_use]
    pub fn config(&self) -> &CopierConfig {
        &self.shared.config
    }

    /// Returns the kernel that moves leaves of `len` bytes.
    #[must_use]
    pub fn kernel(&self, len: u64) -> CopyKernel {
        self.shared.queues.mover().kernel(len)
    }

    /// Stops waiting for I/O backends, and starts no further copies.
    ///
    /// Copy threads skip slices, and backends may skip requests, that they have not started; the
    /// parts of these fail with [`Failure::Cancelled`](crate::Failure::Cancelled). Requests in
    /// progress still keep the buffers of their batch until the backend reports them.
    pub fn give_up(&self) {
        self.shared.give_up();
    }

    /// Rejects further batches, waits for those in flight, and ends the copy threads.
    ///
    /// Called from a completion, the method returns immediately, and the copy threads end after the
    /// last batch.
    pub fn close(&self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.stop_if_idle();
        let threads = std::mem::take(&mut *lock(&self.threads));
        let current = std::thread::current().id();
        // A forked child has no lanes, and a lane cannot wait for itself.
        let foreign = !self.shared.origin.is_here();
        let is_ours = |thread: &JoinHandle<()>| thread.thread().id() == current;
        if foreign || threads.iter().any(is_ours) || self.shared.watch.is_here() {
            return;
        }
        for thread in threads {
            // A lane catches what its tasks throw; there is no result to look at.
            drop(thread.join());
        }
        // Behind the last batch: nothing is waited for any more.
        self.shared.watch.end();
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.close();
    }
}

/// A handle to wait for a submitted batch. Dropping it does not affect the batch.
#[derive(Clone, Debug)]
pub struct Ticket {
    waiter: Waiter,
    shared: Arc<Shared>,
}

impl Ticket {
    /// Waits until the completion has run and the buffers are released.
    ///
    /// Returns false if `timeout` expires first; the batch then continues. `None` waits without a
    /// limit.
    ///
    /// # Panics
    ///
    /// In a simulation, if every copy thread is idle and the batch has not ended.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        #[cfg(feature = "sim")]
        if let Some(schedule) = &self.shared.schedule {
            let ended = schedule.until(|| self.waiter.is_done());
            assert!(ended, "somebody waits for a batch that no lane has");
            return true;
        }
        let start = Instant::now();
        let left = || timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        // The last slices are often microseconds away, sleeping and waking costs many of them.
        while start.elapsed() < self.shared.config.spin {
            if self.waiter.is_done() {
                return true;
            }
            std::hint::spin_loop();
        }
        self.waiter.wait(left())
    }

    /// Returns true if the completion has run and the buffers are released.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.waiter.is_done()
    }

    /// Requests that the copy threads skip work that they have not started.
    ///
    /// Incomplete parts fail with [`Failure::Cancelled`](crate::Failure::Cancelled). The completion
    /// still runs.
    pub fn cancel(&self) {
        self.waiter.cancel();
        self.shared.drop_cancelled();
    }
}

#[cfg(any(test, feature = "testing"))]
impl Copier {
    /// How many regions of the slab nobody has.
    pub(crate) fn free_regions(&self) -> usize {
        self.shared.slab().map_or(0, |slab| slab.free())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Buffer, Owner};
    use crate::checksum::{self, PartId};
    use crate::error::Failure;
    use crate::memory::{Mapping, fault};
    use std::sync::mpsc;

    fn copier(kernel: Option<CopyKernel>) -> Copier {
        let config = CopierConfig {
            lanes: 2,
            // These tests are about lanes.
            inline_max: 0,
            kernel,
            ..CopierConfig::default()
        };
        Copier::new(config).unwrap()
    }

    type Moved = std::result::Result<Outcome, Failure>;

    /// Parts of many lengths, from one buffer to another.
    fn run(copier: &Copier, lens: &[usize]) -> (Vec<Moved>, bool) {
        let total = lens.iter().sum();
        let content: Vec<u8> = (0..total).map(|i| (i * 131 + i / 251) as u8).collect();
        let (src, dst) = (
            Buffer::from_vec(content.clone()),
            Buffer::from_vec(vec![0; total]),
        );
        let mut batch = copier.batch();
        let mut at = 0;
        for (number, &len) in lens.iter().enumerate() {
            let id = PartId::whole([1; 16], [number as u8; 32]);
            let expected = checksum::of(&id, &content[at..at + len]);
            let (from, to) = (src.slice(at, len).unwrap(), dst.slice(at, len).unwrap());
            batch
                .part(&id, &[from], &[to], Some(expected), number as u32)
                .unwrap();
            at += len;
        }
        let (sender, receiver) = mpsc::channel();
        let ticket = copier.submit(batch, move |done| {
            sender
                .send(done.parts().map(|(_, part)| part).collect())
                .unwrap();
        });
        assert!(
            ticket.wait(Some(Duration::from_secs(60))),
            "the batch hangs"
        );
        (receiver.recv().unwrap(), dst.to_vec() == content)
    }

    #[test]
    fn every_kernel_moves_the_same_bytes() {
        let lens: &[usize] = match cfg!(miri) {
            true => &[1, 240, 241, 4096, 5000],
            false => &[
                1,
                63,
                240,
                241,
                4096,
                65_536,
                70_001,
                (1 << 20) - 1,
                (1 << 20) + 1,
                3 << 20,
            ],
        };
        for kernel in CopyKernel::all() {
            let copier = copier(Some(kernel));
            assert_eq!(copier.kernel(1), kernel);
            let (outcomes, same) = run(&copier, lens);
            assert!(same, "{kernel:?}");
            assert!(
                outcomes
                    .iter()
                    .all(|part| part.unwrap().matches == Some(true)),
                "{kernel:?}"
            );
        }
    }

    #[test]
    fn a_panicking_lane_fails_its_parts_and_goes_on() {
        let copier = copier(None);
        // The panic strikes the unit of this length, the second leaf of the first part, whichever
        // lane has it. (Under Miri there is no time for whole leaves.)
        let (leaf, odd) = if cfg!(miri) {
            (0, 1001)
        } else {
            (1 << 20, (1 << 20) - 77)
        };
        let lens = [leaf + odd, leaf + 3000, 4096];
        let outcomes = {
            let _fault = fault::panic_at(odd as u64);
            run(&copier, &lens).0
        };
        assert_eq!(outcomes[0], Err(Failure::LanePanicked));
        assert!(outcomes.iter().all(|part| match part {
            Ok(outcome) => outcome.matches == Some(true),
            Err(failure) => *failure == Failure::LanePanicked,
        }));
        for _ in 0..if cfg!(miri) { 2 } else { 20 } {
            let (outcomes, same) = run(&copier, &lens);
            assert!(
                same && outcomes.iter().all(Moved::is_ok),
                "the lanes survived"
            );
        }
    }

    #[test]
    fn what_no_lane_has_begun_is_not_copied_once_the_copier_gives_up() {
        let copier = copier(None);
        let (outcomes, same) = run(&copier, &[400, 5000]);
        assert!(same && outcomes.iter().all(Moved::is_ok));
        copier.give_up();
        let (outcomes, same) = run(&copier, &[400, 5000]);
        assert_eq!(outcomes, [Err(Failure::Cancelled); 2]);
        assert!(!same);
    }

    #[test]
    fn memory_of_a_batch_is_used_again() {
        let copier = copier(None);
        for _ in 0..3 {
            run(&copier, &[400; 100]);
        }
        let [cargos, planners] = copier.shared.spares();
        assert_eq!((cargos, planners), (1, 1));
        assert!(copier.shared.spare().footprint() > 100 * size_of::<u64>());
    }

    /// Overwrites what it guards when it is let go.
    struct Guarded(Arc<Mapping>);

    impl Drop for Guarded {
        fn drop(&mut self) {
            let zeros = vec![0; self.0.len() as usize];
            self.0.write_from(0, &zeros).unwrap();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory files, which a slab is made of")]
    fn a_failing_region_lets_no_buffer_go_that_another_one_writes() {
        // Odd, so that the other tests' parts are never hit.
        let (whole, odd) = (1 << 20, 333_333);
        let config = CopierConfig {
            lanes: 4,
            inline_max: 0,
            staging_slab: Some(256 << 10),
            staging_regions: Some(4),
            ..CopierConfig::default()
        };
        let copier = Copier::new(config).unwrap();
        for _ in 0..10 {
            let memory = Mapping::anonymous("guarded", 16 * whole).unwrap();
            let guard: Owner = Arc::new(Guarded(Arc::clone(&memory)));
            let mut batch = copier.batch();
            batch.stage().unwrap();
            for number in 0..16 {
                let len = if number == 0 { odd } else { whole };
                let from = Buffer::from_vec(vec![7; len as usize]);
                let at = memory.at(number * whole, len).unwrap();
                // SAFETY: the mapping outlives the batch.
                let to = unsafe { Buffer::from_raw(at, len as usize, true, Arc::clone(&guard)) };
                let id = PartId::whole([1; 16], [number as u8; 32]);
                batch.part(&id, &[from], &[to], None, 0).unwrap();
            }
            drop(guard);
            let (sender, receiver) = mpsc::channel();
            let fault = fault::panic_at(odd);
            let ticket = copier.submit(batch, move |done| {
                let parts = done.parts().map(|(_, part)| part.map(drop));
                sender.send(parts.collect::<Vec<_>>()).unwrap();
            });
            assert!(ticket.wait(None));
            drop(fault);
            let parts = receiver.recv().unwrap();
            assert_eq!(parts[0], Err(Failure::LanePanicked));
            assert!(
                parts.iter().any(|part| part.is_ok()),
                "the other lanes go on"
            );
            // Whoever wrote after the buffers were let go left sevens.
            let mut after = vec![1; 16 * whole as usize];
            memory.read_into(0, &mut after).unwrap();
            assert!(after.iter().all(|byte| *byte == 0));
        }
        assert_eq!(copier.free_regions(), 4, "every region is back");
    }
}
