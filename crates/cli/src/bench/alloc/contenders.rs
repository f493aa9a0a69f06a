//! Kvdepot's allocator as the driver sees it, and those it is measured beside.

use std::sync::{Mutex, PoisonError};

use kvdepot_alloc::{Pool, Shared};

use super::driver::Contender;
use crate::error::Error;

/// How often a thread that finds no room and has nothing to free lets the others go first.
const PATIENCE: u32 = 1 << 20;

pub(super) fn refused(error: kvdepot_alloc::Error) -> Error {
    Error::Bench(error.to_string())
}

/// One extent for each allocation.
pub(super) struct Contiguous {
    pub(super) pool: Pool,
    /// Frees that were refused.
    pub(super) wrong: u64,
}

impl Contender for Contiguous {
    type Held = u64;

    #[inline]
    fn allocate(&mut self, len: u64) -> Option<u64> {
        self.pool.allocate(len).ok().map(|extent| extent.offset)
    }

    #[inline]
    fn free(&mut self, offset: u64) {
        self.wrong += u64::from(self.pool.free(offset).is_err());
    }
}

/// Kvdepot's allocator, for one thread.
pub(super) trait Ours: Contender + Sized {
    fn new(size: u64, granule: u64) -> Result<Self, Error>;

    fn inner(&self) -> &Contiguous;

    /// An error if a free was refused.
    fn check(&self) -> Result<(), Error> {
        check(self.inner().wrong)
    }
}

pub(super) fn check(wrong: u64) -> Result<(), Error> {
    if wrong > 0 {
        return Err(Error::Bench(format!(
            "the allocator rejected {wrong} frees"
        )));
    }
    Ok(())
}

impl Ours for Contiguous {
    fn new(size: u64, granule: u64) -> Result<Contiguous, Error> {
        let pool = Pool::new(size, granule).map_err(refused)?;
        Ok(Contiguous { pool, wrong: 0 })
    }

    fn inner(&self) -> &Contiguous {
        self
    }
}

/// Up to `PIECES` extents for each allocation.
pub(super) struct Scattered<const PIECES: usize>(Contiguous);

impl<const PIECES: usize> Ours for Scattered<PIECES> {
    fn new(size: u64, granule: u64) -> Result<Scattered<PIECES>, Error> {
        Contiguous::new(size, granule).map(Scattered)
    }

    fn inner(&self) -> &Contiguous {
        &self.0
    }
}

/// The mark for pieces that an allocation does not have.
const NO_PIECE: u64 = u64::MAX;

impl<const PIECES: usize> Contender for Scattered<PIECES> {
    type Held = [u64; PIECES];

    #[inline]
    fn allocate(&mut self, len: u64) -> Option<[u64; PIECES]> {
        let extents = self.0.pool.allocate_scattered(len, PIECES, None).ok()?;
        let mut held = [NO_PIECE; PIECES];
        for (held, extent) in held.iter_mut().zip(&extents) {
            *held = extent.offset;
        }
        Some(held)
    }

    #[inline]
    fn free(&mut self, held: [u64; PIECES]) {
        for offset in held.into_iter().take_while(|offset| *offset != NO_PIECE) {
            self.0.free(offset);
        }
    }

    fn pieces(held: [u64; PIECES]) -> usize {
        held.iter().filter(|offset| **offset != NO_PIECE).count()
    }
}

/// A pool that threads share.
pub(super) trait Common: Sync {
    fn allocate(&self, len: u64) -> Option<u64>;

    /// Whether it was live.
    fn free(&self, offset: u64) -> bool;
}

impl Common for Shared {
    #[inline]
    fn allocate(&self, len: u64) -> Option<u64> {
        Shared::allocate(self, len).ok().map(|extent| extent.offset)
    }

    #[inline]
    fn free(&self, offset: u64) -> bool {
        Shared::free(self, offset).is_ok()
    }
}

impl Common for Mutex<Pool> {
    #[inline]
    fn allocate(&self, len: u64) -> Option<u64> {
        let mut pool = self.lock().unwrap_or_else(PoisonError::into_inner);
        pool.allocate(len).ok().map(|extent| extent.offset)
    }

    #[inline]
    fn free(&self, offset: u64) -> bool {
        let mut pool = self.lock().unwrap_or_else(PoisonError::into_inner);
        pool.free(offset).is_ok()
    }
}

/// One thread's view of a common pool.
pub(super) struct OneOf<'a, P> {
    pool: &'a P,
    pub(super) wrong: u64,
    patience: u32,
}

impl<'a, P> OneOf<'a, P> {
    pub(super) fn new(pool: &'a P) -> OneOf<'a, P> {
        OneOf {
            pool,
            wrong: 0,
            patience: PATIENCE,
        }
    }
}

impl<P: Common> Contender for OneOf<'_, P> {
    type Held = u64;

    #[inline]
    fn allocate(&mut self, len: u64) -> Option<u64> {
        self.pool.allocate(len)
    }

    #[inline]
    fn free(&mut self, offset: u64) {
        self.wrong += u64::from(!self.pool.free(offset));
    }

    fn wait(&mut self) -> bool {
        self.patience -= 1;
        std::thread::yield_now();
        self.patience > 0
    }
}

#[cfg(feature = "peers")]
pub(super) use with_peers::{BestFit, Reference};
#[cfg(not(feature = "peers"))]
pub(super) use without_peers::{BestFit, Reference};

/// Whether this build measures other allocators too.
pub(super) const PEERS: bool = cfg!(feature = "peers");

#[cfg(feature = "peers")]
mod with_peers {
    use super::{Contender, Error};

    /// The allocator that others use.
    pub(crate) struct Reference(kvdepot_peers::Reference);

    impl Reference {
        pub(crate) fn new(size: u64, live: u64) -> Result<Reference, Error> {
            kvdepot_peers::Reference::new(size, live)
                .map(Reference)
                .ok_or_else(|| {
                    Error::Bench(format!(
                        "the reference allocator does not support pools of {size} bytes"
                    ))
                })
        }
    }

    impl Contender for Reference {
        type Held = kvdepot_peers::Held;

        #[inline]
        fn allocate(&mut self, len: u64) -> Option<Self::Held> {
            self.0.allocate(len)
        }

        #[inline]
        fn free(&mut self, held: Self::Held) {
            self.0.free(held);
        }
    }

    /// Exact best fit.
    pub(crate) struct BestFit(kvdepot_peers::BestFit);

    impl BestFit {
        pub(crate) fn new(size: u64) -> BestFit {
            BestFit(kvdepot_peers::BestFit::new(size))
        }
    }

    impl Contender for BestFit {
        type Held = (u64, u64);

        fn allocate(&mut self, len: u64) -> Option<(u64, u64)> {
            self.0.allocate(len).map(|start| (start, len))
        }

        fn free(&mut self, (start, len): (u64, u64)) {
            self.0.free(start, len);
        }
    }
}

/// Nobody has these: [`PEERS`] is asked before they are made.
#[cfg(not(feature = "peers"))]
mod without_peers {
    use super::{Contender, Error};

    pub(crate) struct Reference;

    impl Reference {
        pub(crate) fn new(_: u64, _: u64) -> Result<Reference, Error> {
            Err(Error::Bench(
                "this build does not include other allocators".into(),
            ))
        }
    }

    impl Contender for Reference {
        type Held = ();

        fn allocate(&mut self, _: u64) -> Option<()> {
            None
        }

        fn free(&mut self, (): ()) {}
    }

    pub(crate) struct BestFit;

    impl BestFit {
        pub(crate) fn new(_: u64) -> BestFit {
            BestFit
        }
    }

    impl Contender for BestFit {
        type Held = ();

        fn allocate(&mut self, _: u64) -> Option<()> {
            None
        }

        fn free(&mut self, (): ()) {}
    }
}
