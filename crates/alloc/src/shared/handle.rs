//! An allocation that frees itself.

use super::WeakShared;
use crate::error::Error;
use crate::extents::Extents;

/// The extents of one allocation of a [`crate::Shared`] pool, freed when dropped. It does not keep
/// the pool alive: dropped after the pool, it does nothing.
///
/// While a handle owns an extent, nobody else may free it by its offset: the pool would notice when
/// the handle frees it again, unless that offset had been allocated anew by then.
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

    /// The extents, in payload order. They stay this handle's.
    #[must_use]
    pub const fn extents(&self) -> &Extents {
        &self.extents
    }

    /// Whether the pool still exists; its extents mean nothing once it does not.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.pool.upgrade().is_some()
    }

    /// Frees the extents now, and says what a drop cannot say.
    ///
    /// # Errors
    ///
    /// [`Error::NotLive`] for the first extent that was freed by its offset behind the handle's
    /// back; the others are freed.
    pub fn free(mut self) -> Result<(), Error> {
        self.release()
    }

    /// Keeps the extents live and gives up their ownership: from now on they are freed by offset.
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
