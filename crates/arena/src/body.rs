//! An arena: a medium with its allocator, index and record table.
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

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use kvdepot_alloc::Pool;
use kvdepot_host::Condvar;
use kvdepot_media::{Buffer, Mapping};
use parking_lot::Mutex;

use crate::error::Error;
use crate::format::layout::Layout;
use crate::format::record::{Record, State as RecordState};
use crate::format::superblock::Superblock;
use crate::group::{Groups, ordinary};
use crate::held;
use crate::index::{Entry, Index, Order, Records, Reservations};
use crate::inode::Inode;
use crate::key::{Identity, NamespaceId};
use crate::last_tier::LastTier;
use crate::make::Fresh;
use crate::medium::Shared;
use crate::options::Durability;
use crate::orphans::Orphans;
use crate::owner_lock::OwnerLock;
use crate::parts::{self, Part};
use crate::place::{Place, Token};
use crate::roll::Roll;
use crate::stats::{Counters, TierStats};
use crate::turnover::{EvictionLimit, Turnover};
use crate::under_way::UnderWay;

/// A medium with its allocator, its index and, if it survives the process, its record table.
pub struct Arena {
    pub(crate) name: &'static str,
    /// Which arena of its depot it is, in the order of their appearance.
    pub(crate) number: u32,
    /// Another one after a growth: the old one lives as long as somebody reads or writes by it.
    pub(crate) medium: ArcSwap<Shared>,
    /// As it was opened.
    pub(crate) opened: Layout,
    pub(crate) capacity: AtomicU64,
    /// Whether blocks are no longer written here.
    pub(crate) leaving: AtomicBool,
    /// Of the last tier of a pipeline: no other tier has the blocks it evicts.
    pub(crate) last_tier: LastTier,
    pub(crate) durability: Durability,
    /// `None` for memory that dies with the process.
    pub(crate) table: Option<Table>,
    pub(crate) index: Index,
    /// Held by whoever changes what the index holds.
    pub(crate) state: held::Mutex<State>,
    /// A burial or a commit has ended.
    pub(crate) burial: Condvar,
    /// Whether little room is left where others had to go before.
    pub(crate) low: AtomicBool,
    pub(crate) counters: Counters,
    /// What statistics say once it is closed.
    pub(crate) last: OnceLock<TierStats>,
}

/// What makes an arena outlive its process.
pub(crate) struct Table {
    pub(crate) path: PathBuf,
    /// Whether this opening chose its size, for want of another.
    pub(crate) sized: bool,
    pub(crate) uuid: [u8; 16],
    pub(crate) inode: Inode,
    /// There while the depot that made the file may still fail to open. Before the lock, which
    /// is held when the file goes.
    pub(crate) fresh: Mutex<Option<Fresh>>,
    /// The newest copy on the medium; held while the arena grows.
    pub(crate) superblock: Mutex<Superblock>,
    /// `None` once released by a close.
    pub(crate) lock: Mutex<Option<OwnerLock>>,
    /// Held while a namespace is described, and by a close before it releases the lock.
    pub(crate) describing: Mutex<()>,
    pub(crate) orphans: Orphans,
}

pub(crate) struct State {
    pub(crate) pool: Pool,
    pub(crate) records: Records,
    pub(crate) order: Order,
    pub(crate) reserved: Reservations,
    /// Slots that bear each namespace, by its number.
    pub(crate) borne: Vec<u32>,
    /// The next sequence's counter; the generation is its high 24 bits.
    pub(crate) sequence: u64,
    pub(crate) live_bytes: u64,
    /// Slots of blocks that are out of the index and still pinned: copies of them may be under
    /// way, also after the block has moved to another device.
    pub(crate) lingering: HashSet<u32>,
    /// Calls that bury blocks.
    pub(crate) burials: UnderWay,
    /// Calls that write the records of blocks they publish.
    pub(crate) commits: UnderWay,
    /// How often room is set aside for blocks that are not reserved yet.
    pub(crate) set_aside: u64,
    /// Bytes and slots of what is free, or will be, that are spoken for: by those who evict for
    /// themselves, until they have taken them.
    pub(crate) promised: (u64, u64),
    /// Holes that are being made: all that is free is spoken for, lest somebody fill one.
    pub(crate) digs: u64,
    /// Calls that list again what they have chosen in vain.
    pub(crate) relisting: u64,
    /// Limit of eviction ahead of need; `None` until a block needed an eviction.
    pub(crate) need: Option<EvictionLimit>,
    /// Extents that are not used again, because the medium failed under them.
    pub(crate) lost: Vec<(u64, u64)>,
    /// How often it had failed when that was looked for in what is free.
    pub(crate) losses: u64,
    /// Such a look that is under way: how often it had failed when it began, and where it is.
    pub(crate) carving: Option<(u64, u32)>,
    /// Namespaces in the medium's directory, and its entries without one, the first one last.
    pub(crate) described: HashSet<NamespaceId>,
    pub(crate) undescribed: Vec<u32>,
    pub(crate) roll: Roll,
    pub(crate) groups: Groups,
    pub(crate) turnover: Turnover,
}

impl Arena {
    /// Returns the name of the tier.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the number of this arena in its depot.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the present mapping of the medium.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if the medium is not mapped.
    pub fn mapping(&self) -> Result<Arc<Mapping>, Error> {
        let mapped = self.medium.load().mapping().map(Arc::clone);
        mapped.ok_or_else(|| {
            Error::input(
                "access",
                "direct",
                "mapped (only a mapped medium has addresses)",
            )
        })
    }

    /// Returns the length of the medium in bytes.
    pub fn medium_len(&self) -> u64 {
        self.medium.load().len()
    }

    /// Fills `buffers` with the range `range` of a block's payload, for a batch.
    ///
    /// The range must begin at the start of a part and finish at the end of one. A batch may fill
    /// the rest of the last page with zeros.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the medium does not have the bytes, or no longer has them.
    pub fn buffers(
        &self,
        place: &Place,
        range: Range<u64>,
        buffers: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        buffers.clear();
        let medium = self.medium.load();
        for (at, len) in parts::ranges(&place.extents, range.start, range.end - range.start) {
            buffers.push(medium.buffer(at, len)?);
        }
        // Parts begin at pages, and what is behind the last one is of no meaning.
        if let Some(last) = buffers.last_mut() {
            last.pad();
        }
        Ok(())
    }

    /// Returns the parts of a block from its part table, or `None` if the table fails verification.
    pub fn parts(&self, place: &Place) -> Option<Vec<Part>> {
        let (extents, sum) = (&place.extents, place.checksum);
        let (len, count) = (place.len, place.parts);
        let medium = self.medium.load();
        parts::read(&***medium, &place.identity, extents, len, count, sum)
    }

    /// Writes the part table of a reserved block.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the medium fails to store the table.
    pub fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        let medium = self.medium.load();
        parts::write_table(&***medium, &place.extents, place.len, found)
    }

    /// Returns the regions of the arena in its medium.
    pub fn layout(&self) -> Layout {
        Layout {
            capacity: self.capacity.load(Ordering::Relaxed),
            ..self.opened
        }
    }

    /// Returns the path of the device or file; `None` for memory that does not survive the process.
    pub fn path(&self) -> Option<&Path> {
        self.table.as_ref().map(|table| table.path.as_path())
    }

    /// Returns true if the arena was created with a default capacity, a part of the free disk
    /// space.
    pub fn is_a_share(&self) -> bool {
        self.table.as_ref().is_some_and(|table| table.sized)
    }

    /// Returns the fill level and the counters of the arena.
    pub fn stats(&self) -> TierStats {
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
            grouped_blocks: self.index.in_groups(),
            evicted_groups: read(&self.counters.evicted_groups),
            ..TierStats::default()
        }
    }

    /// Whether blocks of this arena shall outlive a power cut.
    pub(crate) fn is_durable(&self) -> bool {
        self.durability == Durability::Power && self.table.is_some()
    }

    /// Whether the medium has failed under any of these bytes.
    pub(crate) fn is_lost(&self, offset: u64, len: u64) -> bool {
        self.medium.load().is_lost(offset, len)
    }
}

impl Arena {
    pub(crate) fn identity(&self, entry: &Entry) -> Identity {
        Identity {
            namespace: self.index.id(entry.namespace),
            key: entry.key,
        }
    }

    /// The record of a block that was reserved at that time.
    pub(crate) fn record(&self, entry: &Entry, state: RecordState, created: u32) -> Record {
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

    pub(crate) fn place(&self, slot: u32) -> Place {
        let entry = self.index.get(slot);
        self.place_of(slot, &entry, self.index.id(entry.namespace))
    }

    pub(crate) fn place_of(&self, slot: u32, entry: &Entry, namespace: NamespaceId) -> Place {
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
            stamp: ordinary(entry.stamp),
        }
    }

    /// The entry that a token of this arena names, while it does.
    pub(crate) fn named(&self, token: Token) -> Option<Entry> {
        let entry = self.index.check(token.slot, token.sequence);
        entry.filter(|_| token.device == self.number)
    }
}

impl State {
    pub(crate) fn new(pool: Pool, records: u32, sequence: u64) -> State {
        State {
            pool,
            records: Records::new(records),
            order: Order::new(),
            reserved: Reservations::new(),
            borne: Vec::new(),
            sequence,
            live_bytes: 0,
            lingering: HashSet::new(),
            burials: UnderWay::default(),
            commits: UnderWay::default(),
            set_aside: 0,
            need: None,
            promised: (0, 0),
            digs: 0,
            relisting: 0,
            lost: Vec::new(),
            losses: 0,
            carving: None,
            described: HashSet::new(),
            undescribed: Vec::new(),
            roll: Roll::default(),
            groups: Groups::default(),
            turnover: Turnover::default(),
        }
    }

    pub(crate) fn bear(&mut self, namespace: u32) {
        let index = namespace as usize;
        if self.borne.len() <= index {
            self.borne.resize(index + 1, 0);
        }
        self.borne[index] += 1;
    }

    /// Bytes and slots that are free, and that nobody is promised.
    pub(crate) fn unpromised(&self) -> (u64, u64) {
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
    pub(crate) fn is_free(&self, room: u64) -> bool {
        let (bytes, slots) = self.unpromised();
        bytes >= room && slots > 0
    }

    /// Promises bytes and slots to who evicts for them.
    pub(crate) fn promise(&mut self, (bytes, slots): (u64, u64)) {
        self.promised = (self.promised.0 + bytes, self.promised.1 + slots);
    }

    /// Ends a promise: whoever was given it takes them now.
    pub(crate) fn keep_promise(&mut self, (bytes, slots): (u64, u64)) {
        self.promised = (self.promised.0 - bytes, self.promised.1 - slots);
    }

    /// Whether any slot bears a namespace's number.
    pub(crate) fn bears(&self, namespace: u32) -> bool {
        let borne = self.borne.get(namespace as usize);
        borne.is_some_and(|slots| *slots > 0)
    }
}
