//! Growing while serving. The record table stays as it is: growth is room for larger blocks, not
//! for more of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_media::Kind;

use crate::body::Arena;
use crate::error::Error;
use crate::format::GRANULE;
use crate::format::layout::Layout;
use crate::format::superblock::Superblock;
use crate::head::advance;
use crate::{make, size};

impl Arena {
    /// Returns the capacity in bytes from the superblock. It exceeds the present one if the medium
    /// was truncated.
    pub fn nominal_capacity(&self) -> u64 {
        match &self.table {
            Some(table) => table.superblock.lock().capacity,
            None => self.layout().capacity,
        }
    }

    /// Grows the arena to `capacity` bytes of its medium.
    ///
    /// First the space is allocated. Then the superblock is written as a new generation in its
    /// older copy. After a crash the arena has either the old or the new size.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] for a capacity below the present one, or above that of the medium.
    pub fn grow(&self, capacity: u64) -> Result<(), Error> {
        let Some(table) = &self.table else {
            return Err(Error::input(
                "path",
                self.name,
                "an arena on a device or in a file",
            ));
        };
        let mut superblock = table.superblock.lock();
        let refuse = |allowed: String| Err(Error::input("capacity", size::show(capacity), allowed));
        let (had, capacity) = (superblock.capacity, capacity / GRANULE * GRANULE);
        if capacity == had {
            return Ok(());
        }
        if capacity < had {
            let has = size::show(had);
            return refuse(format!(
                "at least {has}, its present size: an arena cannot shrink"
            ));
        }
        let medium = self.medium.load_full();
        if medium.len() < had {
            return Err(Error::Corrupt {
                path: table.path.clone(),
                reason: "the arena is truncated and cannot grow; restore its full size first"
                    .into(),
            });
        }
        let aligned = |layout: &Layout| layout.data == superblock.data;
        if Layout::new(capacity, superblock.records)
            .filter(aligned)
            .is_none()
        {
            return refuse(
                "less than 64 MiB for this arena, whose data is not aligned to huge pages; create \
                 a new arena for more"
                    .into(),
            );
        }
        let grown = if capacity <= medium.len() {
            Arc::clone(&medium)
        } else if medium.opened().kind() == Kind::File {
            let fail = |error| make::space_error(&table.path, capacity, error, &str::to_owned);
            Arc::new(medium.grown(capacity).map_err(fail)?)
        } else {
            return refuse(format!(
                "at most {}, the size of the device",
                size::show(medium.len())
            ));
        };
        let next = Superblock {
            capacity,
            ..superblock.clone()
        };
        let next = advance(grown.as_ref().as_ref(), next)?;
        *superblock = next;
        let mut state = self.state.lock();
        let fail =
            |error: kvdepot_alloc::Error| Error::input("capacity", capacity, error.to_string());
        let data_len = capacity - superblock.data;
        state.pool.grow(data_len).map_err(fail)?;
        if !Arc::ptr_eq(&grown, &medium) {
            self.medium.store(grown);
        }
        self.capacity.store(capacity, Ordering::Relaxed);
        Ok(())
    }
}
