//! Ranges of the arena: one, or the few that make one scattered allocation.

use core::{fmt, ops::Deref};

/// Maximum size of a pool in bytes. The sum of an offset and a length never overflows below it.
pub const MAX_SIZE: u64 = 1 << 63;

/// Maximum number of extents in one allocation.
///
/// More extents improve utilization by less than one percent on random sizes. With 8, the extents
/// of an allocation occupy two cache lines.
pub const MAX_EXTENTS: usize = 8;

/// A contiguous range of the arena, in bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Extent {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes. Extents that a pool hands out have a multiple of the granule.
    pub len: u64,
}

impl Extent {
    /// Returns the offset of the first byte after the extent.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// A preferred position for an allocation, so that data that is read together is adjacent.
///
/// A hint changes only the position of an allocation. It does not decide whether the allocation
/// succeeds.
///
/// # Examples
///
/// ```
/// use kvdepot_alloc::{Hint, Pool};
///
/// let mut pool = Pool::new(1 << 20, 4096)?;
/// let first = pool.allocate_near(4096, Hint { behind: None, followed_by: 8192 })?;
/// // An offset is a hint: directly after the extent that starts there.
/// let second = pool.allocate_near(4096, first.offset)?;
/// assert_eq!(second.offset, first.end());
/// # Ok::<(), kvdepot_alloc::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hint {
    /// Start offset of a live extent, in bytes. The allocation directly follows this extent if free
    /// space is there. Any other offset has no effect.
    pub behind: Option<u64>,
    /// Number of bytes that later calls will allocate directly after this allocation.
    ///
    /// It applies if the space after [`behind`](Hint::behind) is not available. Then the pool
    /// chooses a free extent that also fits these bytes, or otherwise the largest one.
    pub followed_by: u64,
}

impl From<u64> for Hint {
    fn from(behind: u64) -> Self {
        Some(behind).into()
    }
}

impl From<Option<u64>> for Hint {
    fn from(behind: Option<u64>) -> Self {
        Self {
            behind,
            followed_by: 0,
        }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.offset, self.len)
    }
}

/// The extents of one allocation, in payload order. The list is stored without a heap allocation
/// and derefs to a slice.
#[derive(Clone, Copy, Default)]
pub struct Extents {
    items: [Extent; MAX_EXTENTS],
    count: u8,
}

impl Extents {
    /// An empty list.
    pub(crate) const fn new() -> Self {
        Self {
            items: [Extent { offset: 0, len: 0 }; MAX_EXTENTS],
            count: 0,
        }
    }

    /// Appends an extent. The callers' limit is [`MAX_EXTENTS`].
    pub(crate) const fn push(&mut self, extent: Extent) {
        self.items[self.count as usize] = extent;
        self.count += 1;
    }

    /// Gives all extents another unit.
    pub(crate) fn shift(&mut self, bits: u32) {
        for extent in &mut self.items[..usize::from(self.count)] {
            *extent = Extent {
                offset: extent.offset << bits,
                len: extent.len << bits,
            };
        }
    }

    /// The extents in address order, before there are more.
    pub(crate) fn sort(&mut self) {
        let items = &mut self.items[..usize::from(self.count)];
        for end in 1..items.len() {
            let mut at = end;
            while at > 0 && items[at - 1].offset > items[at].offset {
                items.swap(at - 1, at);
                at -= 1;
            }
        }
    }

    /// Returns the extents as a slice, in payload order.
    #[must_use]
    pub fn as_slice(&self) -> &[Extent] {
        &self.items[..usize::from(self.count)]
    }

    /// Returns the total length of all extents in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.as_slice().iter().map(|extent| extent.len).sum()
    }
}

impl From<Extent> for Extents {
    fn from(extent: Extent) -> Self {
        let mut extents = Self::new();
        extents.push(extent);
        extents
    }
}

impl Deref for Extents {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        self.as_slice()
    }
}

impl<'a> IntoIterator for &'a Extents {
    type Item = &'a Extent;
    type IntoIter = core::slice::Iter<'a, Extent>;

    fn into_iter(self) -> Self::IntoIter {
        self.as_slice().iter()
    }
}

impl PartialEq for Extents {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Extents {}

impl fmt::Debug for Extents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}
