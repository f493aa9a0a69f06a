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
    /// Bytes that it was made with or has grown to: more than it has where its medium was cut.
    pub fn nominal_capacity(&self) -> u64 {
        match &self.table {
            Some(table) => table.superblock.lock().capacity,
            None => self.layout().capacity,
        }
    }

    /// Gives the arena `capacity` bytes of its medium. Space first, then the superblock, as a
    /// new generation in its older copy: a crash leaves the old size or the new one.
    ///
    /// # Errors
    /// [`Error::Input`] for a capacity below the present one or that the medium does not have.
    pub fn grow(&self, capacity: u64) -> Result<(), Error> {
        let Some(table) = &self.table else {
            return Err(Error::input("path", self.name, "a device or file"));
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
                "at least the {has} that it has: an arena does not shrink"
            ));
        }
        let medium = self.medium.load_full();
        if medium.len() < had {
            return Err(Error::Corrupt {
                path: table.path.clone(),
                reason: "it was truncated, and does not grow before it is whole again".into(),
            });
        }
        let aligned = |layout: &Layout| layout.data == superblock.data;
        if Layout::new(capacity, superblock.records)
            .filter(aligned)
            .is_none()
        {
            return refuse(
                "below 64 MiB, from where on data is aligned to huge pages: make a new arena"
                    .into(),
            );
        }
        let grown = if capacity <= medium.len() {
            Arc::clone(&medium)
        } else if medium.opened().kind() == Kind::File {
            let fail = |error| make::space_error(&table.path, capacity, error, &str::to_owned);
            Arc::new(medium.grown(capacity).map_err(fail)?)
        } else {
            return refuse(format!("at most the device's {}", size::show(medium.len())));
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
