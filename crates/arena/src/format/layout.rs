//! Where the parts of an arena lie: superblocks, owner page, namespace directory, record table,
//! data.

use super::{GRANULE, record};

/// Offset of the second superblock.
pub const SUPERBLOCK_B: u64 = 4 << 10;
/// Offset of the owner page.
pub const OWNER: u64 = 8 << 10;
/// Offset of the namespace directory, which ends where the table begins.
pub const DIRECTORY: u64 = 16 << 10;
/// Offset of the record table.
pub const TABLE: u64 = 64 << 10;
/// The smallest arena: its table, and room for a few blocks.
pub const CAPACITY_MIN: u64 = 256 << 10;
/// Arenas from this size align their data to [`HUGE_PAGE`], so that huge pages can back it.
const HUGE_FROM: u64 = 64 << 20;
const HUGE_PAGE: u64 = 2 << 20;
/// One record for every granule of the first 4 GiB unless the configuration says otherwise, so that
/// no block is too small there: 3 % of it, and what opening reads stays below 128 MiB.
const DENSE: u64 = 4 << 30;
/// One for every 32 KiB beyond: 0.4 %. Smaller blocks evict when the table is full.
const BYTES_PER_RECORD: u64 = 32 << 10;

/// The regions of one arena, in bytes from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Length of the whole arena.
    pub capacity: u64,
    /// Entries of the record table.
    pub records: u64,
    /// Where extents begin.
    pub data: u64,
}

/// The fewest bytes of an arena with so many records.
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
    /// The layout of an arena of `capacity` bytes with `records` table entries, or `None` when
    /// they leave no room for data.
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

    /// Table entries for an arena of `capacity` bytes whose configuration names none.
    #[must_use]
    pub fn default_records(capacity: u64) -> u64 {
        let dense = capacity.min(DENSE);
        (dense / GRANULE + (capacity - dense) / BYTES_PER_RECORD).clamp(16, 1 << 31)
    }

    /// Bytes that extents can use.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        self.capacity - self.data
    }

    /// The layout as far as a medium of `len` bytes has it: one that was truncated has less.
    #[must_use]
    pub fn on(&self, len: u64) -> Layout {
        Layout {
            capacity: self.capacity.min(len / GRANULE * GRANULE).max(self.data),
            ..*self
        }
    }

    /// Offset of record `slot`.
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
