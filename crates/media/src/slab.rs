//! The slab: the one pool of aligned, bounded, pinned memory that bytes go through where they
//! cannot be copied at once from where they are to where they go.
//!
//! Made when the first batch needs it, and used again by all later ones. Who needs a region for a
//! slice takes one and gives it back when nothing reads or writes it any more. A slice that finds
//! none free is queued, and no thread waits with it: whoever gives a region back hands it on.

use crate::carrier::{Carrier, Registration, SlabMemory};
use crate::error::Result;
use crate::memory::Mapping;
use std::any::{Any, TypeId};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Regions begin at pages, and have whole ones.
const REGION_ALIGN: u64 = 4096;

/// Memory cut into regions of equal length.
pub(crate) struct Slab {
    /// What was registered for carriers, which goes before the memory: one for all of a type.
    registered: Mutex<Vec<(TypeId, Registration)>>,
    mapping: Arc<Mapping>,
    at: usize,
    region: usize,
    pool: Mutex<Pool>,
}

/// Regions that nobody has, and who waits for one: one of the two is empty.
struct Pool {
    free: Vec<usize>,
    waiting: VecDeque<Waiter>,
}

type Waiter = Box<dyn FnOnce(Region) + Send>;

impl Slab {
    /// Takes `len` bytes for so many regions, present from now on and kept from being swapped where
    /// the system allows that.
    pub(crate) fn new(len: u64, regions: usize) -> Result<Self> {
        let mapping = Mapping::anonymous("kvdepot-staging", len)?;
        mapping.populate_write(0, len)?;
        // More than the user may lock: then it may be swapped, as everything else.
        let _locked = mapping.lock_in_memory();
        let region = len / regions as u64 / REGION_ALIGN * REGION_ALIGN;
        Ok(Self {
            at: mapping.at(0, len)?,
            mapping,
            registered: Mutex::default(),
            region: region as usize,
            pool: Mutex::new(Pool {
                free: (0..regions).rev().collect(),
                waiting: VecDeque::new(),
            }),
        })
    }

    /// Makes the slab known to a carrier, unless it is.
    pub(crate) fn register(&self, carrier: &Arc<dyn Carrier>) {
        let any: &dyn Any = &**carrier;
        let kind = any.type_id();
        let mut registered = self
            .registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if registered.iter().all(|(known, _)| *known != kind) {
            // SAFETY: what is registered goes before the mapping.
            let memory = unsafe { SlabMemory::new(self.at, self.mapping.len() as usize) };
            let new = Arc::clone(carrier).register(&memory);
            registered.extend(new.map(|new| (kind, new)));
        }
    }

    /// A free region for `task`. Where there is none, `task` is queued, and `later` is called with
    /// it by whoever gives a region back; it must only hand both on.
    pub(crate) fn take<T: Send + 'static>(
        self: &Arc<Self>,
        task: T,
        later: fn(T, Region),
    ) -> Option<(T, Region)> {
        let mut pool = self.pool();
        if let Some(number) = pool.free.pop() {
            return Some((task, self.region(number)));
        }
        let waiter = move |region| later(task, region);
        pool.waiting.push_back(Box::new(waiter));
        None
    }

    fn region(self: &Arc<Self>, number: usize) -> Region {
        Region {
            slab: Arc::clone(self),
            number,
        }
    }

    /// How many regions nobody has.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn free(&self) -> usize {
        self.pool().free.len()
    }

    /// No code that runs under this lock can panic half way, so poison means nothing.
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Slab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slab")
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

/// A region that nobody else uses. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Region {
    slab: Arc<Slab>,
    number: usize,
}

impl Region {
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.slab.at + self.number * self.slab.region)
    }

    /// Its length in bytes, a multiple of 4096.
    pub(crate) fn len(&self) -> usize {
        self.slab.region
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let waiter = {
            let mut pool = self.slab.pool();
            let waiter = pool.waiting.pop_front();
            if waiter.is_none() {
                // The one used last is the one that the caches may still hold.
                pool.free.push(self.number);
            }
            waiter
        };
        if let Some(waiter) = waiter {
            waiter(self.slab.region(self.number));
        }
    }
}
