//! The regions of an arena: superblocks, owner page, namespace directory, record table and data.

use super::{GRANULE, record};

/// Offset of the second superblock in bytes.
pub const SUPERBLOCK_B: u64 = 4 << 10;
/// Offset of the owner page in bytes.
pub const OWNER: u64 = 8 << 10;
/// Offset of the namespace directory in bytes. The directory ends at the start of the record table.
pub const DIRECTORY: u64 = 16 << 10;
/// Offset of the record table in bytes.
pub const TABLE: u64 = 64 << 10;
/// Minimum size of an arena in bytes: its table and space for a few blocks.
pub const CAPACITY_MIN: u64 = 256 << 10;
/// Arenas from this size align their data to [`HUGE_PAGE`], so that huge pages can back it.
const HUGE_FROM: u64 = 64 << 20;
const HUGE_PAGE: u64 = 2 << 20;
/// One record for every granule of the first 4 GiB unless the configuration says otherwise, so that
/// no block is too small there: 3 % of it, and what opening reads stays below 128 MiB.
const DENSE: u64 = 4 << 30;
/// One for every 32 KiB beyond: 0.4 %. Smaller blocks evict when the table is full.
const BYTES_PER_RECORD: u64 = 32 << 10;

/// The regions of one arena, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Length of the whole arena in bytes.
    pub capacity: u64,
    /// Number of entries in the record table.
    pub records: u64,
    /// Offset of the first extent in bytes.
    pub data: u64,
}

/// Returns the minimum size in bytes of an arena with `records` records.
#[must_use]
pub fn capacity_min(records: u64) -> u64 {
    let table = TABLE.saturating_add(records.saturating_mul(record::LEN as u64));
    let with = |align: u64| {
        table
            .div_ceil(align)
            .saturating_mul(align)
            .saturating_add(GRANULE)
    };
    let small = with(GRANULE).max(CAPACITY_MIN);
    if small < HUGE_FROM {
        small
    } else {
        with(HUGE_PAGE).max(HUGE_FROM)
    }
}

impl Layout {
    /// Creates the layout of an arena of `capacity` bytes with `records` table entries.
    ///
    /// Returns `None` if there is no space left for data, or if a value is outside the limits of
    /// the format.
    #[must_use]
    pub fn new(capacity: u64, records: u64) -> Option<Layout> {
        let capacity = capacity / GRANULE * GRANULE;
        if capacity < CAPACITY_MIN || records == 0 || records > u64::from(u32::MAX) - 1 {
            return None;
        }
        let align = if capacity >= HUGE_FROM {
            HUGE_PAGE
        } else {
            GRANULE
        };
        let table_end = TABLE.checked_add(records.checked_mul(record::LEN as u64)?)?;
        let data = table_end.checked_next_multiple_of(align)?;
        (data + GRANULE <= capacity).then_some(Layout {
            capacity,
            records,
            data,
        })
    }

    /// Returns the default number of table entries for an arena of `capacity` bytes.
    #[must_use]
    pub fn default_records(capacity: u64) -> u64 {
        let dense = capacity.min(DENSE);
        (dense / GRANULE + (capacity - dense) / BYTES_PER_RECORD).clamp(16, 1 << 31)
    }

    /// Returns the number of bytes that extents can use.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        self.capacity - self.data
    }

    /// Returns the part of this layout that a medium of `len` bytes contains. A truncated medium
    /// contains less.
    #[must_use]
    pub fn on(&self, len: u64) -> Layout {
        Layout {
            capacity: self.capacity.min(len / GRANULE * GRANULE).max(self.data),
            ..*self
        }
    }

    /// Returns the offset of the record in `slot`.
    #[must_use]
    pub fn record(&self, slot: u32) -> u64 {
        TABLE + u64::from(slot) * record::LEN as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_capacity_is_the_least_that_has_a_layout() {
        for records in [
            1,
            64,
            1500,
            9000,
            500_000,
            523_700,
            523_744,
            523_776,
            600_000,
            1 << 31,
        ] {
            let least = capacity_min(records);
            assert!(Layout::new(least, records).is_some(), "{records}");
            assert_eq!(Layout::new(least - GRANULE, records), None, "{records}");
        }
    }
}
