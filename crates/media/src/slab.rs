//! The slab: the one pool of aligned, bounded, pinned memory that bytes go through where they
//! cannot be copied at once from where they are to where they go.
//!
//! Made when the first batch needs it, and used again by all later ones. Who needs a region for a
//! slice takes one and gives it back when nothing reads or writes it any more. A slice that finds
//! none free is queued, and no thread waits with it: whoever gives a region back hands it on, to
//! one call after the other. What one carrier has of the regions is bounded, so that others find
//! one when none of its come back.

use crate::carrier::{Carrier, Registration, SlabMemory};
use crate::error::Result;
use crate::file;
use crate::memory::{Access, Mapping};
use crate::shm::{self, Shm};
use crate::turns::Turns;
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Regions begin at pages, and have whole ones.
const REGION_ALIGN: u64 = 4096;

/// Memory cut into regions of equal length.
pub(crate) struct Slab {
    /// What was registered for carriers, which goes before the memory: one for all of a type and a
    /// registrar.
    registered: Mutex<Vec<((TypeId, usize), Registration)>>,
    /// What the memory is, where it can have a name.
    shm: Option<Arc<Shm>>,
    mapping: Arc<Mapping>,
    at: usize,
    region: usize,
    pool: Mutex<Pool>,
}

/// Regions that nobody has, who waits for one, and how many each carrier has. Who waits finds none
/// free, or its carriers have as many as they may.
struct Pool {
    free: Vec<usize>,
    /// By call and hands: those of one turn may all have a region, or none of them may.
    waiting: Turns<(Hands, Box<dyn Waits>), (usize, Hands)>,
    with: HashMap<usize, With>,
    /// The most regions that are with one carrier.
    most: usize,
}

/// What a carrier has of the regions.
struct With {
    count: usize,
    /// When it has taken the first, or given one back.
    heard: Instant,
    /// It has given none back for as long as it is waited for: nobody waits for one of its own.
    stalled: bool,
}

/// The carriers that something goes through, by their [`Carrier::hands`].
pub(crate) type Hands = [Option<usize>; 2];

/// What waits for a region.
pub(crate) trait Waits: Send {
    /// Whether nobody waits for it any more.
    fn is_cancelled(&self) -> bool;

    /// The call that it is of, by a number that no other has at the same time.
    fn call(&self) -> usize;

    /// Hands it and its region on, and does nothing else.
    fn go_on(self: Box<Self>, region: Region);
}

impl Pool {
    fn may_have(&self, hands: Hands) -> bool {
        let with = |hand: &usize| self.with.get(hand).map_or(0, |with| with.count);
        hands.iter().flatten().all(|hand| with(hand) < self.most)
    }

    /// Whether what has no region yet for `hands` gets none soon.
    fn is_stalled(&self, hands: Hands) -> bool {
        let stalled = |hand: &usize| self.with.get(hand).is_some_and(|with| with.stalled);
        hands.iter().flatten().any(stalled)
    }

    /// A region for `hands`.
    fn take(&mut self, hands: Hands) -> Option<usize> {
        let number = self.free.pop()?;
        for hand in hands.into_iter().flatten() {
            let with = self.with.entry(hand).or_insert_with(|| With {
                count: 0,
                heard: Instant::now(),
                stalled: false,
            });
            with.count += 1;
        }
        Some(number)
    }

    /// Who goes on next, with its region.
    fn next(&mut self) -> Option<(Hands, Box<dyn Waits>, usize)> {
        if self.free.is_empty() {
            return None;
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        let next = waiting.pop_if(|_, (hands, _)| self.may_have(*hands));
        self.waiting = waiting;
        let (hands, task) = next?;
        Some((hands, task, self.take(hands)?))
    }

    fn give_back(&mut self, hands: Hands, number: usize) {
        for hand in hands.into_iter().flatten() {
            if let Some(with) = self.with.get_mut(&hand) {
                with.count -= 1;
                (with.heard, with.stalled) = (Instant::now(), false);
                if with.count == 0 {
                    self.with.remove(&hand);
                }
            }
        }
        // The one used last is the one that the caches may still hold.
        self.free.push(number);
    }
}

impl Slab {
    /// Takes `len` bytes for so many regions, present from now on and kept from being swapped where
    /// the system allows that.
    pub(crate) fn new(len: u64, regions: usize) -> Result<Self> {
        // Elsewhere it would only take room in `/dev/shm`, which may be small and others'.
        let named = match file::uses_3fs() {
            true => nameable(len).ok(),
            false => None,
        };
        let (mapping, shm) = match named {
            Some((mapping, shm)) => (mapping, Some(shm)),
            None => (Mapping::anonymous("kvdepot-staging", len)?, None),
        };
        mapping.populate_write(0, len)?;
        // More than the user may lock: then it may be swapped, as everything else.
        let _locked = mapping.lock_in_memory();
        let region = len / regions as u64 / REGION_ALIGN * REGION_ALIGN;
        Ok(Self {
            at: mapping.at(0, len)?,
            mapping,
            registered: Mutex::default(),
            shm,
            region: region as usize,
            pool: Mutex::new(Pool {
                free: (0..regions).rev().collect(),
                waiting: Turns::default(),
                with: HashMap::new(),
                most: regions.saturating_sub(regions.div_ceil(4)).max(1),
            }),
        })
    }

    /// Makes the slab known to a carrier, unless it is.
    pub(crate) fn register(&self, carrier: &Arc<dyn Carrier>) {
        let any: &dyn Any = &**carrier;
        let whose = (any.type_id(), carrier.registrar());
        let mut registered = self
            .registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if registered.iter().all(|(known, _)| *known != whose) {
            // SAFETY: what is registered goes before the mapping.
            let memory =
                unsafe { SlabMemory::new(self.at, self.mapping.len() as usize, self.shm.clone()) };
            let new = Arc::clone(carrier).register(&memory);
            registered.extend(new.map(|new| (whose, new)));
        }
    }

    /// A free region for `task`, which goes through `hands`. Where there is none, it is queued, and
    /// goes on by whoever gives a region back; what is cancelled is dropped.
    pub(crate) fn take<T: Waits + 'static>(
        self: &Arc<Self>,
        task: T,
        hands: Hands,
    ) -> Option<(T, Region)> {
        let mut pool = self.pool();
        if pool.may_have(hands)
            && let Some(number) = pool.take(hands)
        {
            return Some((task, self.region(hands, number)));
        }
        // Under the lock: whoever cancels looks at what waits afterwards.
        if !task.is_cancelled() && !pool.is_stalled(hands) {
            pool.waiting
                .push((task.call(), hands), (hands, Box::new(task)));
            return None;
        }
        drop(pool);
        drop(task);
        None
    }

    /// Lets go of what waits and is cancelled.
    pub(crate) fn drop_cancelled(&self) {
        let cancelled = self.pool().waiting.extract(|(_, task)| task.is_cancelled());
        drop(cancelled);
    }

    /// A region has not come back for so long. Where none has of that carrier's, what waits for
    /// one is let go.
    fn is_late(&self, hands: Hands, patience: Duration) {
        let stalled = {
            let mut pool = self.pool();
            for hand in hands.into_iter().flatten() {
                if let Some(with) = pool.with.get_mut(&hand) {
                    with.stalled |= with.heard.elapsed() >= patience;
                }
            }
            let mut waiting = std::mem::take(&mut pool.waiting);
            let stalled = waiting.extract(|(hands, _)| pool.is_stalled(*hands));
            pool.waiting = waiting;
            stalled
        };
        drop(stalled);
    }

    fn region(self: &Arc<Self>, hands: Hands, number: usize) -> Region {
        Region {
            slab: Arc::clone(self),
            hands,
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

/// Memory that can have a name, all of it present.
fn nameable(len: u64) -> Result<(Arc<Mapping>, Arc<Shm>)> {
    let mapping = Mapping::nameable(shm::FOLDER, len)?;
    mapping.populate_write(0, len)?;
    mapping.take_space()?;
    let shm = Shm::new(mapping.try_clone_fd(Access::ReadWrite)?)?;
    Ok((mapping, shm))
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
    hands: Hands,
    number: usize,
}

impl Region {
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.slab.at + self.number * self.slab.region)
    }

    /// Its carriers have been waited for so long.
    pub(crate) fn is_late(&self, patience: Duration) {
        self.slab.is_late(self.hands, patience);
    }

    /// Its length in bytes, a multiple of 4096.
    pub(crate) fn len(&self) -> usize {
        self.slab.region
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let mut pool = self.slab.pool();
        pool.give_back(self.hands, self.number);
        // It may have been with two carriers, each of which somebody waits for.
        while let Some((hands, task, number)) = pool.next() {
            drop(pool);
            task.go_on(self.slab.region(hands, number));
            pool = self.slab.pool();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory files")]
    fn memory_that_its_folder_has_no_room_for_is_refused_before_it_is_touched() {
        let found = rustix::fs::statvfs(shm::FOLDER).unwrap();
        // Of one without a limit there is no such length.
        if found.f_blocks > 0 {
            let room = found.f_blocks * found.f_frsize;
            let mapping = Mapping::nameable(shm::FOLDER, room + (1 << 30)).unwrap();
            assert!(mapping.take_space().unwrap_err().is_no_space());
        }
        let (mapping, _) = nameable(3 << 20).unwrap();
        mapping.take_space().unwrap();
        // What never was populated.
        let mapping = Mapping::nameable(shm::FOLDER, 3 << 20).unwrap();
        mapping.take_space().unwrap();
        let fd = mapping.try_clone_fd(Access::ReadWrite).unwrap();
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks * 512, 3 << 20);
    }
}
