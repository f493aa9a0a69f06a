//! The loop that all allocators are driven by: allocate; while that fails free something and try
//! again. It is compiled once for each allocator and each way of recording, so that nothing is in
//! the way of what is timed.

use super::lru::Lru;
use crate::bench::random::Random;
use crate::error::Error;
use crate::interrupt::Interrupt;

/// Objects between two looks for Ctrl-C.
const CHUNK: usize = 4096;

/// An allocator under measurement.
pub(super) trait Contender {
    /// What frees an allocation: as little as the allocator lets its user keep.
    type Held: Copy;

    /// None while there is no room.
    fn allocate(&mut self, len: u64) -> Option<Self::Held>;

    fn free(&mut self, held: Self::Held);

    /// In how many pieces an allocation is.
    fn pieces(_: Self::Held) -> usize {
        1
    }

    /// There is no room, and the driver has nothing to free: whether others will free something.
    fn wait(&mut self) -> bool {
        false
    }
}

/// Which live object goes next.
pub(super) trait Order<T> {
    fn insert(&mut self, object: T);

    /// What happens to live objects before each allocation.
    fn use_some(&mut self, random: &mut Random);

    fn take(&mut self, random: &mut Random) -> Option<T>;
}

/// Any of them, with equal chances.
pub(super) struct AnyOf<T>(Vec<T>);

impl<T> Default for AnyOf<T> {
    fn default() -> AnyOf<T> {
        AnyOf(Vec::new())
    }
}

impl<T> Order<T> for AnyOf<T> {
    fn insert(&mut self, object: T) {
        self.0.push(object);
    }

    fn use_some(&mut self, _: &mut Random) {}

    fn take(&mut self, random: &mut Random) -> Option<T> {
        if self.0.is_empty() {
            return None;
        }
        let index = random.below(self.0.len() as u64) as usize;
        Some(self.0.swap_remove(index))
    }
}

/// The one that was used longest ago; before every second allocation one of all is used.
pub(super) struct LeastRecent<T>(Lru<T>);

impl<T> Default for LeastRecent<T> {
    fn default() -> LeastRecent<T> {
        LeastRecent(Lru::default())
    }
}

impl<T: Copy> Order<T> for LeastRecent<T> {
    fn insert(&mut self, object: T) {
        self.0.insert(object);
    }

    fn use_some(&mut self, random: &mut Random) {
        let slots = self.0.slots() as u64;
        if slots > 0 && random.below(2) == 0 {
            self.0.touch(random.below(slots) as u32);
        }
    }

    fn take(&mut self, _: &mut Random) -> Option<T> {
        self.0.take_oldest()
    }
}

/// A rule by which objects are freed, over objects of any kind.
pub(super) trait Frees {
    type Order<T: Copy>: Order<T> + Default;
}

pub(super) struct AtRandom;

impl Frees for AtRandom {
    type Order<T: Copy> = AnyOf<T>;
}

pub(super) struct Oldest;

impl Frees for Oldest {
    type Order<T: Copy> = LeastRecent<T>;
}

/// What is written down after each object.
pub(super) trait Record {
    /// What has to be remembered of each live object.
    type Kept: Copy;

    fn allocated(&mut self, bytes: u64, pieces: impl Fn() -> usize) -> Self::Kept;

    fn freed(&mut self, kept: Self::Kept);

    /// Forgets what was recorded so far, not what is live.
    fn restart(&mut self) {}
}

/// Nothing; what is timed.
pub(super) struct Silent;

impl Record for Silent {
    type Kept = ();

    fn allocated(&mut self, _: u64, _: impl Fn() -> usize) {}

    fn freed(&mut self, (): ()) {}
}

/// The live bytes after each object, and the pieces of all.
#[derive(Default)]
pub(super) struct Watch {
    live: u64,
    pub(super) samples: Vec<u64>,
    pub(super) pieces: usize,
}

impl Record for Watch {
    type Kept = u64;

    fn allocated(&mut self, bytes: u64, pieces: impl Fn() -> usize) -> u64 {
        self.live += bytes;
        self.samples.push(self.live);
        self.pieces += pieces();
        bytes
    }

    fn freed(&mut self, bytes: u64) {
        self.live -= bytes;
    }

    fn restart(&mut self) {
        self.samples.clear();
        self.pieces = 0;
    }
}

/// A live object: what frees its allocations, and what is remembered of it.
type Object<C, R, const PARTS: usize> = ([<C as Contender>::Held; PARTS], <R as Record>::Kept);

/// An allocator with its live objects of `PARTS` allocations each.
pub(super) struct Driver<'a, C: Contender, R: Record, F: Frees, S, const PARTS: usize> {
    pub(super) contender: C,
    pub(super) record: R,
    order: F::Order<Object<C, R, PARTS>>,
    /// The lengths of the next object.
    sizes: S,
    random: Random,
    interrupt: &'a Interrupt,
}

impl<'a, C, R, F, S, const PARTS: usize> Driver<'a, C, R, F, S, PARTS>
where
    C: Contender,
    R: Record,
    F: Frees,
    S: FnMut(&mut Random) -> [u64; PARTS],
{
    pub(super) fn new(
        contender: C,
        record: R,
        sizes: S,
        seed: u64,
        interrupt: &'a Interrupt,
    ) -> Self {
        Driver {
            contender,
            record,
            order: Default::default(),
            sizes,
            random: Random(seed),
            interrupt,
        }
    }

    /// Allocates as many objects as have `bytes` together.
    pub(super) fn fill(&mut self, bytes: u64) -> Result<(), Error> {
        let mut asked = 0;
        for count in 0.. {
            if count % CHUNK == 0 {
                self.interrupt.check()?;
            }
            let lens = (self.sizes)(&mut self.random);
            asked += lens.iter().sum::<u64>();
            if asked > bytes {
                break;
            }
            self.object(lens)?;
        }
        Ok(())
    }

    /// Allocates `count` objects.
    pub(super) fn churn(&mut self, count: usize) -> Result<(), Error> {
        for start in (0..count).step_by(CHUNK) {
            self.interrupt.check()?;
            for _ in start..count.min(start + CHUNK) {
                let lens = (self.sizes)(&mut self.random);
                self.order.use_some(&mut self.random);
                self.object(lens)?;
            }
        }
        Ok(())
    }

    /// Frees all live objects.
    pub(super) fn empty(&mut self) {
        while let Some((held, kept)) = self.order.take(&mut self.random) {
            held.into_iter().for_each(|held| self.contender.free(held));
            self.record.freed(kept);
        }
    }

    #[inline]
    fn object(&mut self, lens: [u64; PARTS]) -> Result<(), Error> {
        let mut held = [self.part(lens[0])?; PARTS];
        for (held, len) in held.iter_mut().zip(lens).skip(1) {
            *held = self.part(len)?;
        }
        let pieces = || held.iter().map(|held| C::pieces(*held)).sum();
        let kept = self.record.allocated(lens.iter().sum(), pieces);
        self.order.insert((held, kept));
        Ok(())
    }

    #[inline]
    fn part(&mut self, len: u64) -> Result<C::Held, Error> {
        loop {
            if let Some(held) = self.contender.allocate(len) {
                return Ok(held);
            }
            if let Some((held, kept)) = self.order.take(&mut self.random) {
                held.into_iter().for_each(|held| self.contender.free(held));
                self.record.freed(kept);
            } else if !self.contender.wait() {
                return Err(Error::Bench(format!(
                    "an allocation of {len} bytes does not fit into an empty pool"
                )));
            }
        }
    }
}
