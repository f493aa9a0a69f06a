//! An allocation that frees itself.

use super::WeakShared;
use crate::error::Error;
use crate::extents::Extents;

/// The extents of one allocation from a [`crate::Shared`] pool. Dropping the handle frees them.
///
/// A handle does not keep the pool alive. If it is dropped after the pool, nothing happens.
///
/// While a handle owns an extent, no other code may free that extent by its offset. The handle's
/// own free then usually fails with [`Error::NotLive`]. If the offset was allocated again before,
/// the handle frees that newer allocation without an error.
///
/// # Examples
///
/// ```
/// use kvdepot_alloc::Shared;
///
/// let pool = Shared::new(1 << 20, 4096)?;
/// let handle = pool.allocate_owned(10_000)?;
/// assert_eq!(handle.extents().bytes(), 12_288);
/// drop(handle);
/// assert_eq!(pool.free_bytes(), pool.size());
/// # Ok::<(), kvdepot_alloc::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the extents are freed when the handle is dropped"]
pub struct Handle {
    pool: WeakShared,
    extents: Extents,
}

impl Handle {
    pub(crate) const fn new(pool: WeakShared, extents: Extents) -> Self {
        Self { pool, extents }
    }

    /// Returns the extents, in payload order. The handle still owns them.
    #[must_use]
    pub const fn extents(&self) -> &Extents {
        &self.extents
    }

    /// Returns true while the pool exists. Afterwards the extents have no meaning.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.pool.upgrade().is_some()
    }

    /// Frees the extents now and reports an error, which dropping the handle cannot do.
    ///
    /// # Errors
    ///
    /// [`Error::NotLive`] for the first extent that other code has freed by its offset; all other
    /// extents are freed.
    pub fn free(mut self) -> Result<(), Error> {
        self.release()
    }

    /// Returns the extents and gives up their ownership. They stay live until they are freed by
    /// offset.
    #[must_use]
    pub fn into_extents(mut self) -> Extents {
        core::mem::take(&mut self.extents)
    }

    fn release(&mut self) -> Result<(), Error> {
        let extents = core::mem::take(&mut self.extents);
        let Some(pool) = self.pool.upgrade() else {
            return Ok(());
        };
        let mut result = Ok(());
        for extent in &extents {
            let freed = pool.free(extent.offset);
            result = result.and(freed);
        }
        result
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // An error means that an extent is free already, which is all that is wanted here.
        let _freed_already = self.release();
    }
}
