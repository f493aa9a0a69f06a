//! One contiguous medium with its allocator, index and record table.
//!
//! Guarantees: a block is visible once its record is whole on the medium, and never before;
//! extents are reused only after the record that named them is invalid there; recovery from the
//! table alone finds exactly the blocks that were visible. The arena knows nothing of copies:
//! whoever reserved an extent fills it, then commits.
//!
//! Lookups, pins and uses take the index's own locks. The lock that is here is the writers': it is
//! held for index work alone: not while a payload moves, and not while the medium is written or
//! synced. What a call does there in the meantime is its own: a reservation that it
//! commits, a block that it buries, room that it has set aside.

mod bury;
mod create;
mod erase;
mod evict;
mod fill;
mod grow;
mod leave;
mod lost;
mod new;
mod open;
mod orphans;
mod owner_lock;
mod publish;
mod recover;
mod reserve;
mod reserved;
mod roll;
mod serve;
mod space;
mod take;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use kvdepot_alloc::Pool;
use kvdepot_media::Mapping;
use kvdepot_media::checksum::Checksum;
use parking_lot::{Condvar, Mutex};

use crate::config::Durability;
use crate::format::GRANULE;
use crate::format::layout::Layout;
use crate::format::record::{Packed, Record, State as RecordState};
use crate::format::superblock::Superblock;
use crate::held;
use crate::index::{Entry, Index, Order, Records, Reservations};
use crate::{Identity, Key, NamespaceId};

pub(crate) use create::{Promised, default_capacity};
pub use create::{UNFINISHED, erase_unfinished};
pub use erase::erase;
pub(crate) use leave::{Device, Inode, Parting, Room};
use open::Fresh;
pub(crate) use open::{dead_superblocks, default_path, read_directory, read_superblock};
use orphans::Orphans;
use owner_lock::OwnerLock;
pub(crate) use owner_lock::{orphans_of, read_owner};
pub use recover::Opening;
pub(crate) use recover::{is_inside, judge, survey};
pub(crate) use reserve::{Cause, Full, Refused};
pub(crate) use reserved::Reserved;
use roll::Roll;
pub(crate) use roll::{Departed, Legacy};
pub(crate) use space::Space;

/// Names one reservation or pin: the slot may be reused, the device's sequences never are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Token {
    /// The arena's number in its depot.
    pub(crate) device: u32,
    pub(crate) slot: u32,
    pub(crate) sequence: u64,
}

/// Where a block's bytes are inside an arena, and how to know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) token: Token,
    pub(crate) identity: Identity,
    pub(crate) extents: Packed,
    pub(crate) len: u64,
    pub(crate) parts: u16,
    pub(crate) checksum: Checksum,
    /// When it was used last, in the depot's count of uses.
    pub(crate) stamp: u64,
}

/// A block that wants room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) key: Key,
    /// Payload bytes.
    pub(crate) len: u64,
    pub(crate) parts: u16,
    /// This use of it.
    pub(crate) stamp: u64,
    /// Whether it is copied from another tier or device.
    pub(crate) copy: bool,
    /// Whether others may be evicted for it.
    pub(crate) evict: bool,
}

impl Wanted {
    /// Payload bytes as the arena rounds them, if they are not far too many.
    pub(crate) fn room(&self) -> u64 {
        self.len
            .checked_next_multiple_of(GRANULE)
            .unwrap_or(self.len)
    }
}

/// A medium with its allocator, index and, where it outlives the process, its record table.
pub(crate) struct Arena {
    name: &'static str,
    /// Which arena of its depot it is, in the order of their appearance.
    number: u32,
    /// Another one after a growth: the old one lives as long as somebody reads or writes by it.
    mapping: ArcSwap<Mapping>,
    /// As it was opened.
    opened: Layout,
    capacity: AtomicU64,
    /// Whether blocks are no longer written here.
    leaving: AtomicBool,
    durability: Durability,
    /// `None` for memory that dies with the process.
    table: Option<Table>,
    index: Index,
    /// Held by whoever changes what the index holds.
    state: held::Mutex<State>,
    /// A burial has ended.
    burial: Condvar,
    /// Whether little room is left where others had to go before.
    low: AtomicBool,
    counters: Counters,
    /// What statistics say once it is closed.
    last: OnceLock<TierStats>,
}

/// What makes an arena outlive its process.
struct Table {
    path: PathBuf,
    /// Whether this opening chose its size, for want of another.
    sized: bool,
    uuid: [u8; 16],
    inode: Inode,
    /// There while the depot that made the file may still fail to open. Before the lock, which
    /// is held when the file goes.
    fresh: Mutex<Option<Fresh>>,
    /// The newest copy on the medium; held while the arena grows.
    superblock: Mutex<Superblock>,
    /// `None` once released by a close.
    lock: Mutex<Option<OwnerLock>>,
    orphans: Orphans,
}

struct State {
    pool: Pool,
    records: Records,
    order: Order,
    reserved: Reservations,
    /// Slots that bear each namespace, by its number.
    borne: Vec<u32>,
    /// The next sequence's counter; the generation is its high 24 bits.
    sequence: u64,
    live_bytes: u64,
    /// Slots of blocks that are out of the index and still pinned: copies of them may be under
    /// way, also after the block has moved to another device.
    lingering: HashSet<u32>,
    /// Burials that calls are at, and how many have ended.
    burials: u64,
    buried: u64,
    /// How often room is set aside for blocks that are not reserved yet.
    set_aside: u64,
    /// Bytes and slots of what is free, or will be, that are spoken for: by those who evict for
    /// themselves, until they have taken them.
    promised: (u64, u64),
    /// Holes that are being made: all that is free is spoken for, lest somebody fill one.
    digs: u64,
    /// Whether blocks had to be evicted for others.
    pressed: bool,
    /// Extents that are not used again, because the medium failed under them.
    lost: Vec<(u64, u64)>,
    /// How often it had failed when that was looked for in what is free.
    losses: u64,
    /// Such a look that is under way: how often it had failed when it began, and where it is.
    carving: Option<(u64, u32)>,
    /// Namespaces in the medium's directory, and its entries without one, the first one last.
    described: HashSet<NamespaceId>,
    undescribed: Vec<u32>,
    /// Namespaces whose blocks may not be scattered.
    contiguous: HashSet<u32>,
    roll: Roll,
}

/// What an arena counts; read by statistics only.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) evicted_blocks: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
    pub(crate) corrupt_blocks: AtomicU64,
    pub(crate) lost_bytes: AtomicU64,
    pub(crate) full: AtomicU64,
    pub(crate) stored_blocks: AtomicU64,
    pub(crate) stored_bytes: AtomicU64,
}

/// An arena's fill, for people and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct TierStats {
    /// The tier's name.
    pub tier: String,
    /// Bytes of data it can hold.
    pub capacity_bytes: u64,
    /// Bytes of payload published.
    pub live_bytes: u64,
    /// Bytes not allocated.
    pub free_bytes: u64,
    /// The longest free extent.
    pub largest_free_bytes: u64,
    /// Blocks published.
    pub blocks: u64,
    /// Blocks that the record table can hold.
    pub blocks_max: u64,
    /// Blocks pinned by readers.
    pub pinned_blocks: u64,
    /// Blocks being written.
    pub reserved_blocks: u64,
    /// Blocks evicted since it was opened.
    pub evicted_blocks: u64,
    /// Bytes evicted since it was opened.
    pub evicted_bytes: u64,
    /// Blocks that did not verify.
    pub corrupt_blocks: u64,
    /// Bytes of extents that are not used again, because the medium failed under them.
    pub lost_bytes: u64,
    /// Reservations refused for lack of room.
    pub full: u64,
    /// Blocks published since it was opened.
    pub stored_blocks: u64,
    /// Bytes published since it was opened.
    pub stored_bytes: u64,
}

impl TierStats {
    /// What was counted, without what is there now: it stays when a device goes.
    pub(crate) fn counted(self) -> TierStats {
        TierStats {
            tier: self.tier,
            evicted_blocks: self.evicted_blocks,
            evicted_bytes: self.evicted_bytes,
            corrupt_blocks: self.corrupt_blocks,
            lost_bytes: self.lost_bytes,
            full: self.full,
            stored_blocks: self.stored_blocks,
            stored_bytes: self.stored_bytes,
            ..TierStats::default()
        }
    }

    /// Those of two devices as one.
    pub(crate) fn plus(self, other: TierStats) -> TierStats {
        TierStats {
            tier: self.tier,
            capacity_bytes: self.capacity_bytes + other.capacity_bytes,
            live_bytes: self.live_bytes + other.live_bytes,
            free_bytes: self.free_bytes + other.free_bytes,
            largest_free_bytes: self.largest_free_bytes.max(other.largest_free_bytes),
            blocks: self.blocks + other.blocks,
            blocks_max: self.blocks_max + other.blocks_max,
            pinned_blocks: self.pinned_blocks + other.pinned_blocks,
            reserved_blocks: self.reserved_blocks + other.reserved_blocks,
            evicted_blocks: self.evicted_blocks + other.evicted_blocks,
            evicted_bytes: self.evicted_bytes + other.evicted_bytes,
            corrupt_blocks: self.corrupt_blocks + other.corrupt_blocks,
            lost_bytes: self.lost_bytes + other.lost_bytes,
            full: self.full + other.full,
            stored_blocks: self.stored_blocks + other.stored_blocks,
            stored_bytes: self.stored_bytes + other.stored_bytes,
        }
    }
}

impl Arena {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn mapping(&self) -> Arc<Mapping> {
        self.mapping.load_full()
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout {
            capacity: self.capacity.load(Ordering::Relaxed),
            ..self.opened
        }
    }

    pub(crate) fn path(&self) -> Option<&Path> {
        self.table.as_ref().map(|table| table.path.as_path())
    }

    /// Whether it was made with a share of the free disk.
    pub(crate) fn is_a_share(&self) -> bool {
        self.table.as_ref().is_some_and(|table| table.sized)
    }

    pub(crate) fn stats(&self) -> TierStats {
        if let Some(last) = self.last.get() {
            return last.clone();
        }
        let state = self.state.lock();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TierStats {
            tier: self.name.to_owned(),
            capacity_bytes: self.layout().data_len(),
            live_bytes: state.live_bytes,
            free_bytes: state.pool.free_bytes(),
            largest_free_bytes: state.pool.largest_free_extent(),
            blocks: self.index.live(),
            blocks_max: self.layout().records,
            pinned_blocks: self.index.pinned(),
            reserved_blocks: state.reserved.len(),
            evicted_blocks: read(&self.counters.evicted_blocks),
            evicted_bytes: read(&self.counters.evicted_bytes),
            corrupt_blocks: read(&self.counters.corrupt_blocks),
            lost_bytes: read(&self.counters.lost_bytes),
            full: read(&self.counters.full),
            stored_blocks: read(&self.counters.stored_blocks),
            stored_bytes: read(&self.counters.stored_bytes),
        }
    }

    /// Whether blocks of this arena shall outlive a power cut.
    fn is_durable(&self) -> bool {
        self.durability == Durability::Power && self.table.is_some()
    }

    /// Whether the medium has failed under any of these bytes.
    fn is_lost(&self, offset: u64, len: u64) -> bool {
        self.mapping.load().is_lost(offset, len).unwrap_or(true)
    }
}

impl Arena {
    fn identity(&self, entry: &Entry) -> Identity {
        Identity {
            namespace: self.index.id(entry.namespace),
            key: entry.key,
        }
    }

    /// The record of a block that was reserved at that time.
    fn record(&self, entry: &Entry, state: RecordState, created: u32) -> Record {
        Record {
            state,
            parts: entry.parts,
            created,
            sequence: entry.sequence,
            identity: self.identity(entry),
            extents: entry.extents,
            len: entry.len,
            checksum: entry.checksum,
        }
    }

    fn place(&self, slot: u32) -> Place {
        let entry = self.index.get(slot);
        self.place_of(slot, &entry, self.index.id(entry.namespace))
    }

    fn place_of(&self, slot: u32, entry: &Entry, namespace: NamespaceId) -> Place {
        Place {
            token: Token {
                device: self.number,
                slot,
                sequence: entry.sequence,
            },
            identity: Identity {
                namespace,
                key: entry.key,
            },
            extents: entry.extents,
            len: entry.len,
            parts: entry.parts,
            checksum: entry.checksum,
            stamp: entry.stamp,
        }
    }

    /// The entry that a token of this arena names, while it does.
    fn named(&self, token: Token) -> Option<Entry> {
        let entry = self.index.check(token.slot, token.sequence);
        entry.filter(|_| token.device == self.number)
    }
}

impl State {
    fn bear(&mut self, namespace: u32) {
        let index = namespace as usize;
        if self.borne.len() <= index {
            self.borne.resize(index + 1, 0);
        }
        self.borne[index] += 1;
    }

    /// Bytes and slots that are free, and that nobody is promised.
    fn unpromised(&self) -> (u64, u64) {
        let (bytes, slots) = (self.pool.free_bytes(), self.records.vacant());
        let (promised_bytes, promised_slots) = self.promised;
        match self.digs {
            0 => (
                bytes.saturating_sub(promised_bytes),
                slots.saturating_sub(promised_slots),
            ),
            _ => (0, 0),
        }
    }

    /// Whether there is room for a block that nobody is promised.
    fn is_free(&self, room: u64) -> bool {
        let (bytes, slots) = self.unpromised();
        bytes >= room && slots > 0
    }

    /// Promises bytes and slots to who evicts for them.
    fn promise(&mut self, (bytes, slots): (u64, u64)) {
        self.promised = (self.promised.0 + bytes, self.promised.1 + slots);
    }

    /// Ends a promise: whoever was given it takes them now.
    fn keep_promise(&mut self, (bytes, slots): (u64, u64)) {
        self.promised = (self.promised.0 - bytes, self.promised.1 - slots);
    }

    /// Whether any slot bears a namespace's number.
    fn bears(&self, namespace: u32) -> bool {
        let borne = self.borne.get(namespace as usize);
        borne.is_some_and(|slots| *slots > 0)
    }
}
