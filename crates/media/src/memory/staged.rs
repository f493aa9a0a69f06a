//! Between source and destination: nothing, or a region of the staging slab.
//!
//! A lane that stages brings bytes into its region first, hashing them on the way, and takes them
//! from there to the destination. It uses no more of the region than its core's caches hold, so
//! that the second copy reads no memory. Whole blocks go through a desk that the kernel empties
//! itself, before the next block; what is less than that, or begins and ends at odd places, is
//! collected on another one.

use super::choice::WAYS;
use super::kernel::{self, Isa};

/// Where the bytes of the units in hand go first; a desk for each of them.
pub(crate) trait Stage {
    /// Whether there is anything between source and destination.
    fn is_between(&self) -> bool;

    /// Where the next bytes of `way` go.
    fn desk(&self, way: usize) -> *mut u8;

    /// How many bytes there is room for there, at least one.
    fn room(&self, way: usize) -> u64;

    /// Where whole blocks of `way` go through on their way to plain memory, [`kernel::DESK`] bytes;
    /// null when they cannot, or when earlier bytes wait at the desk.
    fn block(&self, _way: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    /// `bytes` bytes have come to the desk, whose destination is at `dst`; `ends` says that others
    /// follow for another place. `next` is read after them, null when unknown.
    ///
    /// # Safety
    ///
    /// The destination is writable, and `bytes` is at most the room there was.
    unsafe fn arrived(
        &mut self,
        way: usize,
        dst: u64,
        bytes: u64,
        ends: bool,
        streams: bool,
        next: *const u8,
    );
}

/// Nothing in between.
pub(crate) struct Direct;

impl Stage for Direct {
    fn is_between(&self) -> bool {
        false
    }

    fn desk(&self, _way: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn room(&self, _way: usize) -> u64 {
        u64::MAX
    }

    unsafe fn arrived(&mut self, _: usize, _: u64, _: u64, _: bool, _: bool, _: *const u8) {}
}

/// Bytes of a desk on the way to plain memory, so that all desks fit half of a first-level cache.
const DESK: usize = 4 << 10;

/// Desks for plain memory: what has arrived goes on at once.
pub(crate) struct Desks {
    isa: Isa,
    desks: [Desk; WAYS],
    /// Behind them, those for blocks: close together, as the kernel goes round them.
    blocks: *mut u8,
}

#[derive(Clone, Copy)]
struct Desk {
    at: *mut u8,
    used: usize,
}

impl Desks {
    /// Desks in a region of `len` bytes at `region`, at least 64 KiB.
    ///
    /// # Safety
    ///
    /// The region is writable and nobody else's for as long as this lives, and the machine has
    /// `isa`.
    pub(crate) unsafe fn new(isa: Isa, region: *mut u8, len: usize) -> Self {
        assert!(
            len >= WAYS * (DESK + kernel::DESK),
            "a region of {len} bytes"
        );
        let desk = |way| Desk {
            at: region.wrapping_add(way * DESK),
            used: 0,
        };
        Self {
            isa,
            desks: std::array::from_fn(desk),
            blocks: region.wrapping_add(WAYS * DESK),
        }
    }
}

impl Stage for Desks {
    fn is_between(&self) -> bool {
        true
    }

    fn desk(&self, way: usize) -> *mut u8 {
        let desk = self.desks[way];
        desk.at.wrapping_add(desk.used)
    }

    fn room(&self, way: usize) -> u64 {
        (DESK - self.desks[way].used) as u64
    }

    fn block(&self, way: usize) -> *mut u8 {
        match self.desks[way].used {
            0 => self.blocks.wrapping_add(way * kernel::DESK),
            _ => std::ptr::null_mut(),
        }
    }

    unsafe fn arrived(
        &mut self,
        way: usize,
        dst: u64,
        bytes: u64,
        ends: bool,
        streams: bool,
        next: *const u8,
    ) {
        let desk = &mut self.desks[way];
        // All of it belongs to one place, which began where the first of it goes.
        let begin = dst as usize - desk.used;
        desk.used += bytes as usize;
        if !ends && desk.used < DESK {
            return;
        }
        let (from, len) = (desk.at, std::mem::take(&mut desk.used));
        let to = std::ptr::with_exposed_provenance_mut(begin);
        // SAFETY: the desk holds `len` bytes for that place, which is writable by the caller's
        // promise; desks are in no destination.
        unsafe { self.isa.carry(from, to, len, streams, next) };
    }
}
