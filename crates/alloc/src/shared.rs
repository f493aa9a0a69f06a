//! A pool for many threads.

mod handle;

use crate::error::Error;
use crate::extents::{Extent, Extents, Hint};
use crate::pool::Pool;
use crate::report::Report;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::vec::Vec;

pub use handle::Handle;

/// A [`Pool`] that threads share; clones are the same pool. The verbs are the pool's own; those
/// that end in `_owned` give a [`Handle`] that frees itself.
#[derive(Debug, Clone)]
pub struct Shared {
    pool: Arc<Mutex<Pool>>,
}

/// Refers to a shared pool without keeping it alive.
#[derive(Debug, Clone)]
pub(crate) struct WeakShared(Weak<Mutex<Pool>>);

impl WeakShared {
    /// The pool, unless its last [`Shared`] is gone.
    pub(crate) fn upgrade(&self) -> Option<Shared> {
        self.0.upgrade().map(|pool| Shared { pool })
    }
}

impl From<Pool> for Shared {
    fn from(pool: Pool) -> Self {
        Self {
            pool: Arc::new(Mutex::new(pool)),
        }
    }
}

impl Shared {
    /// As [`Pool::new`].
    ///
    /// # Errors
    ///
    /// As [`Pool::new`].
    pub fn new(size: u64, granule: u64) -> Result<Self, Error> {
        Pool::new(size, granule).map(Self::from)
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        // The pool runs no code of its callers, so a panic elsewhere left it whole.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn downgrade(&self) -> WeakShared {
        WeakShared(Arc::downgrade(&self.pool))
    }

    /// As [`Pool::allocate`].
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate`].
    pub fn allocate(&self, len: u64) -> Result<Extent, Error> {
        self.lock().allocate(len)
    }

    /// As [`Pool::allocate_near`].
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate_near`].
    pub fn allocate_near(&self, len: u64, hint: impl Into<Hint>) -> Result<Extent, Error> {
        self.lock().allocate_near(len, hint)
    }

    /// As [`Pool::allocate_scattered`].
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate_scattered`].
    pub fn allocate_scattered(
        &self,
        len: u64,
        max_extents: usize,
        hint: impl Into<Hint>,
    ) -> Result<Extents, Error> {
        self.lock().allocate_scattered(len, max_extents, hint)
    }

    /// As [`Pool::allocate`], freed when the handle is dropped.
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate`].
    pub fn allocate_owned(&self, len: u64) -> Result<Handle, Error> {
        let extent = self.lock().allocate(len)?;
        Ok(Handle::new(self.downgrade(), extent.into()))
    }

    /// As [`Pool::allocate_scattered`], freed when the handle is dropped.
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate_scattered`].
    pub fn allocate_scattered_owned(
        &self,
        len: u64,
        max_extents: usize,
        hint: impl Into<Hint>,
    ) -> Result<Handle, Error> {
        let extents = self.lock().allocate_scattered(len, max_extents, hint)?;
        Ok(Handle::new(self.downgrade(), extents))
    }

    /// As [`Pool::free`].
    ///
    /// # Errors
    ///
    /// As [`Pool::free`].
    pub fn free(&self, offset: u64) -> Result<(), Error> {
        self.lock().free(offset)
    }

    /// As [`Pool::get`].
    #[must_use]
    pub fn get(&self, offset: u64) -> Option<Extent> {
        self.lock().get(offset)
    }

    /// As [`Pool::size`].
    #[must_use]
    pub fn size(&self) -> u64 {
        self.lock().size()
    }

    /// As [`Pool::granule`].
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.lock().granule()
    }

    /// As [`Pool::free_bytes`]; other threads may have changed it already.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.lock().free_bytes()
    }

    /// As [`Pool::largest_free_extent`]; other threads may have changed it already.
    #[must_use]
    pub fn largest_free_extent(&self) -> u64 {
        self.lock().largest_free_extent()
    }

    /// The live extents of one moment, in address order.
    #[must_use]
    pub fn live_extents(&self) -> Vec<Extent> {
        self.lock().live_extents().collect()
    }

    /// As [`Pool::report`].
    #[must_use]
    pub fn report(&self) -> Report {
        self.lock().report()
    }

    /// As [`Pool::check`].
    ///
    /// # Errors
    ///
    /// As [`Pool::check`].
    pub fn check(&self) -> Result<(), &'static str> {
        self.lock().check()
    }
}
