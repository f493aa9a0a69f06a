//! A pool for many threads.

mod handle;

use crate::error::Error;
use crate::extents::{Extent, Extents, Hint};
use crate::pool::Pool;
use crate::report::Report;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::vec::Vec;

pub use handle::Handle;

/// A [`Pool`] that several threads share through a lock. Clones refer to the same pool.
///
/// The methods are those of [`Pool`]. Methods whose names end in `_owned` return a [`Handle`] that
/// frees its extents when it is dropped.
///
/// # Examples
///
/// ```
/// use kvdepot_alloc::Shared;
///
/// let pool = Shared::new(1 << 20, 4096)?;
/// let other = pool.clone();
/// let worker = std::thread::spawn(move || other.allocate(4096));
/// let extent = worker.join().unwrap()?;
/// pool.free(extent.offset)?;
/// assert_eq!(pool.free_bytes(), pool.size());
/// # Ok::<(), kvdepot_alloc::Error>(())
/// ```
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
    /// Creates a shared pool; see [`Pool::new`].
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::new`].
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

    /// Allocates `len` bytes; see [`Pool::allocate`].
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::allocate`].
    pub fn allocate(&self, len: u64) -> Result<Extent, Error> {
        self.lock().allocate(len)
    }

    /// Allocates `len` bytes near `hint`; see [`Pool::allocate_near`].
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::allocate_near`].
    pub fn allocate_near(&self, len: u64, hint: impl Into<Hint>) -> Result<Extent, Error> {
        self.lock().allocate_near(len, hint)
    }

    /// Allocates `len` bytes in at most `max_extents` extents; see [`Pool::allocate_scattered`].
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::allocate_scattered`].
    pub fn allocate_scattered(
        &self,
        len: u64,
        max_extents: usize,
        hint: impl Into<Hint>,
    ) -> Result<Extents, Error> {
        self.lock().allocate_scattered(len, max_extents, hint)
    }

    /// Allocates `len` bytes as [`Pool::allocate`], and frees them when the returned handle is
    /// dropped.
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::allocate`].
    pub fn allocate_owned(&self, len: u64) -> Result<Handle, Error> {
        let extent = self.lock().allocate(len)?;
        Ok(Handle::new(self.downgrade(), extent.into()))
    }

    /// Allocates `len` bytes as [`Pool::allocate_scattered`], and frees them when the returned
    /// handle is dropped.
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::allocate_scattered`].
    pub fn allocate_scattered_owned(
        &self,
        len: u64,
        max_extents: usize,
        hint: impl Into<Hint>,
    ) -> Result<Handle, Error> {
        let extents = self.lock().allocate_scattered(len, max_extents, hint)?;
        Ok(Handle::new(self.downgrade(), extents))
    }

    /// Frees the live extent that starts at `offset`; see [`Pool::free`].
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::free`].
    pub fn free(&self, offset: u64) -> Result<(), Error> {
        self.lock().free(offset)
    }

    /// Returns the live extent that starts at `offset`, if there is one; see [`Pool::get`].
    #[must_use]
    pub fn get(&self, offset: u64) -> Option<Extent> {
        self.lock().get(offset)
    }

    /// Returns the size of the pool in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.lock().size()
    }

    /// Returns the granule in bytes; see [`Pool::granule`].
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.lock().granule()
    }

    /// Returns the total length of all free extents in bytes. Other threads may change it at any
    /// time.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.lock().free_bytes()
    }

    /// Returns the length of the largest free extent in bytes. Other threads may change it at any
    /// time.
    #[must_use]
    pub fn largest_free_extent(&self) -> u64 {
        self.lock().largest_free_extent()
    }

    /// Returns a snapshot of the live extents, in address order.
    #[must_use]
    pub fn live_extents(&self) -> Vec<Extent> {
        self.lock().live_extents().collect()
    }

    /// Returns statistics of the pool; see [`Pool::report`].
    #[must_use]
    pub fn report(&self) -> Report {
        self.lock().report()
    }

    /// Checks the consistency of all data structures; see [`Pool::check`].
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::check`].
    pub fn check(&self) -> Result<(), &'static str> {
        self.lock().check()
    }
}
