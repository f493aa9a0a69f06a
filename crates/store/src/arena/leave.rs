//! What a device needs that is one among several, and may leave.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::Ordering;

use super::bury::{BATCH, Dying};
use super::{Arena, Cause, Refused, Token, Wanted};
use crate::index::Stage;
use crate::{Identity, NamespaceId};

/// What lies at a path, whatever the path is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    device: u64,
    inode: u64,
}

impl Inode {
    /// `None` where nothing is.
    pub(crate) fn of(path: &Path) -> Option<Inode> {
        let data = std::fs::metadata(path).ok()?;
        // One device may have several nodes.
        let is_device = data.file_type().is_char_device();
        Some(Inode {
            device: if is_device { data.rdev() } else { data.dev() },
            inode: if is_device { 0 } else { data.ino() },
        })
    }
}

/// Room of an arena that can be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) free: u64,
    /// Records that are not in use.
    pub(crate) vacant: u64,
    /// Bytes that eviction frees in one go.
    pub(crate) ahead: u64,
    /// Whether the block that asks would fit as it is; the caller says.
    pub(crate) fits: bool,
    /// When its least recently used block was used, of those that can be evicted.
    pub(crate) oldest: Option<u64>,
}

/// How a depot left a medium that only its own workers could write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parting {
    uuid: [u8; 16],
    generation: u64,
}

/// What a device is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) leaving: bool,
    pub(crate) failed: bool,
    /// Nothing is stored, pinned or being written, and nobody is at work there.
    pub(crate) empty: bool,
    pub(crate) pinned: u64,
    pub(crate) reserved: u64,
}

impl Arena {
    pub(crate) fn inode(&self) -> Option<Inode> {
        self.table.as_ref().map(|table| table.inode)
    }

    /// Whether blocks are no longer written here. The tier holds its `placing` lock.
    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::Release);
    }

    pub(crate) fn device(&self) -> Device {
        let state = self.state.lock();
        let (pinned, reserved) = (state.pinned, state.reserved.len() as u64);
        let under_way = state.set_aside + state.burials;
        Device {
            leaving: self.leaving.load(Ordering::Acquire),
            failed: self.has_failed(),
            empty: state.live.len() == 0 && pinned + reserved + under_way == 0,
            pinned,
            reserved,
        }
    }

    /// Whether the medium has lost what makes it an arena.
    fn has_failed(&self) -> bool {
        self.mapping.load().losses() > 0 && self.is_lost(0, self.opened.data)
    }

    /// What is known of a medium that this depot lets go while nobody works on it: whoever of its
    /// workers still has it has nothing to write there. `None` where others might.
    pub(crate) fn parting(&self) -> Option<Parting> {
        let table = self.table.as_ref()?;
        self.orphans().is_none().then(|| Parting {
            uuid: table.uuid,
            generation: table.superblock.lock().generation,
        })
    }

    /// Whether this depot was the last that had this medium, which it left so; its workers do not
    /// count as another's then.
    pub(crate) fn comes_back(&self, parting: &Parting) -> bool {
        let Some(table) = &self.table else {
            return false;
        };
        // Each opening begins a generation.
        let next = parting.generation + 1;
        let same = table.uuid == parting.uuid && table.superblock.lock().generation == next;
        if same && let Some(lock) = &*table.lock.lock() {
            lock.come_back();
        }
        same
    }

    /// Why nothing can be written here now, if nothing can.
    pub(crate) fn closed_to_writes(&self) -> Option<Cause> {
        if self.leaving.load(Ordering::Acquire) {
            return Some(Cause::Leaving);
        }
        self.orphans()
    }

    /// `None` where nothing can be written now.
    pub(crate) fn room(&self) -> Option<Room> {
        if self.closed_to_writes().is_some() || self.has_failed() {
            return None;
        }
        let mut state = self.state.lock();
        Some(Room {
            free: state.pool.free_bytes(),
            vacant: state.entries.vacant(),
            ahead: self.with_ahead(0),
            fits: false,
            oldest: state.entries.oldest_stamp(),
        })
    }

    /// Answers the keys that are published or being written here. The published ones are pinned,
    /// so that the rest of their prompt does not evict them, and noted in `pinned`.
    pub(crate) fn known(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        answers: &mut [Option<Refused>],
        pinned: &mut Vec<Token>,
    ) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(number) = state.namespaces.number(namespace) else {
            return;
        };
        for (wanted, answer) in blocks.iter().zip(answers) {
            if answer.is_some() {
                continue;
            }
            if let Some(slot) = state.live.get(number, &wanted.key) {
                state.entries.touch(slot, wanted.stamp);
                state.add_pin(slot);
                let token = state.place(slot).token;
                pinned.push(token);
                *answer = Some(Refused::Present(token));
            } else if let Some(slot) = state.reserved.get(number, &wanted.key) {
                *answer = Some(Refused::Reserved(state.place(slot).token));
            }
        }
    }

    /// Answers the keys that are being written here.
    pub(crate) fn reserved(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        answers: &mut [Option<Refused>],
    ) {
        let state = self.state.lock();
        if state.reserved.len() == 0 {
            return;
        }
        let Some(number) = state.namespaces.number(namespace) else {
            return;
        };
        for (wanted, answer) in blocks.iter().zip(answers) {
            if let Some(slot) = state.reserved.get(number, &wanted.key) {
                *answer = Some(Refused::Reserved(state.place(slot).token));
            }
        }
    }

    /// What is published, the block that was used last at the end.
    pub(crate) fn by_use(&self) -> Vec<Token> {
        let state = self.state.lock();
        let live = state.entries.used();
        let live = live.filter(|(_, entry)| entry.stage == Stage::Live);
        let mut live: Vec<(u64, u32)> = live.map(|(slot, entry)| (entry.stamp, slot)).collect();
        live.sort_unstable();
        let token = |(_, slot): (u64, u32)| state.place(slot).token;
        live.into_iter().map(token).collect()
    }

    /// What is published, by identity.
    pub(crate) fn identities(&self) -> Vec<(Identity, Token)> {
        let state = self.state.lock();
        let live = state.entries.used();
        let live = live.filter(|(_, entry)| entry.stage == Stage::Live);
        live.map(|(slot, _)| state.place(slot))
            .map(|place| (place.identity, place.token))
            .collect()
    }

    /// Unpublishes blocks that another device has now. Pinned ones stay where they are until the
    /// last pin ends.
    pub(crate) fn hand_over(&self, tokens: &[Token]) {
        self.drop_blocks(tokens, true);
    }

    /// As [`Arena::hand_over`], under other locks: the caller buries them when it has let go.
    pub(crate) fn disown(&self, tokens: &[Token]) -> Dying {
        let mut state = self.state.lock();
        let slots = state.live_slots(tokens);
        let mut dying = Dying::default();
        state.roll.moving = true;
        for slot in slots {
            self.unpublish(&mut state, slot, &mut dying);
        }
        state.roll.moving = false;
        dying
    }

    /// Evicts those of these blocks that nobody has pinned; how many.
    pub(crate) fn evict_these(&self, tokens: &[Token]) -> usize {
        let mut count = 0;
        for some in tokens.chunks(BATCH) {
            let mut state = self.state.lock();
            let mut slots = state.live_slots(some);
            slots.retain(|slot| state.entries.get(*slot).pins == 0);
            self.evict_blocks(&mut state, &slots);
            count += slots.len();
        }
        count
    }
}
