//! What a device needs that is one among several, and may leave.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::body::{Arena, State};
use crate::bury::BATCH;
use crate::held::turn_len;
use crate::index::{Oldest, STEP, Stage};
use crate::key::{Key, NamespaceId};
use crate::place::{Token, Wanted};
use crate::refused::{Cause, Refused};

/// The free space of an arena that can be written.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Free space in bytes.
    pub free: u64,
    /// Number of free records.
    pub vacant: u64,
    /// Number of bytes that one eviction frees.
    pub ahead: u64,
    /// True if the requested block fits without an eviction; the caller sets it.
    pub fits: bool,
    /// Stamp of the least recently used block that can be evicted, if there is one.
    pub oldest: Option<u64>,
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// True if the device is draining: nothing is written to it.
    pub leaving: bool,
    /// True if the medium has failed.
    pub failed: bool,
    /// True if no block is stored, pinned or being written, and no operation is in progress.
    pub empty: bool,
    /// Number of pinned blocks.
    pub pinned: u64,
    /// Number of blocks that are being written.
    pub reserved: u64,
}

impl Arena {
    /// Starts (`true`) or stops draining the device: while it drains, no blocks are written to it.
    /// The tier holds its `placing` lock.
    pub fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::Release);
    }

    /// Returns the state of the device.
    pub fn device(&self) -> Device {
        let state = self.state.lock();
        let (pinned, reserved) = (self.index.pinned(), state.reserved.len());
        let under_way = state.set_aside + state.burials.count();
        Device {
            leaving: self.leaving.load(Ordering::Acquire),
            failed: self.has_failed(),
            empty: self.index.live() == 0 && pinned + reserved + under_way == 0,
            pinned,
            reserved,
        }
    }

    /// Returns the number of blocks that were published here since the arena was opened.
    pub fn stored_blocks(&self) -> u64 {
        self.counters.stored_blocks.load(Ordering::Relaxed)
    }

    /// Whether the medium has lost what makes it an arena.
    fn has_failed(&self) -> bool {
        self.medium.load().losses() > 0 && self.is_lost(0, self.opened.data)
    }

    /// Returns the reason for which nothing can be written here now, or `None` if writes are
    /// possible.
    pub fn closed_to_writes(&self) -> Option<Cause> {
        if self.leaving.load(Ordering::Acquire) {
            return Some(Cause::Leaving);
        }
        self.orphans()
    }

    /// Returns the free space, or `None` if nothing can be written now.
    pub fn room(&self) -> Option<Room> {
        if self.closed_to_writes().is_some() || self.has_failed() {
            return None;
        }
        let mut state = self.state.lock();
        let oldest = loop {
            match state.order.look(&self.index) {
                Oldest::Block(_, stamp) | Oldest::Used(_, stamp) => break Some(stamp),
                Oldest::Nothing => break None,
                Oldest::NotYet => state.give_way(),
            }
        };
        Some(Room {
            free: state.pool.free_bytes(),
            vacant: state.records.vacant(),
            ahead: self.with_ahead(0),
            fits: false,
            oldest,
        })
    }

    /// Fills `answers` for the keys that are published or being written here.
    ///
    /// Published blocks are pinned, so that the later blocks of their prompt do not evict them.
    /// Their tokens are added to `pinned`.
    pub fn known(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        answers: &mut [Option<Refused>],
        pinned: &mut Vec<Token>,
    ) {
        self.answer(namespace, blocks, answers, |blocks, answers| {
            let absent: Vec<usize> = (0..blocks.len())
                .filter(|at| answers[*at].is_none())
                .collect();
            let keys = absent.iter().map(|at| &blocks[*at].key);
            self.index.look_up(namespace, keys, |position, block| {
                if let Some(block) = block {
                    block.touch(blocks[absent[position]].stamp);
                    let token = self.place_of(block.slot, &block.entry(), namespace).token;
                    if block.pin() {
                        pinned.push(token);
                    }
                    answers[absent[position]] = Some(Refused::Present(token));
                }
                true
            });
        });
    }

    /// Fills `answers` for the keys that are being written here.
    pub fn reserved(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        answers: &mut [Option<Refused>],
    ) {
        self.answer(namespace, blocks, answers, |_, _| {});
    }

    /// Has `found` answer some blocks at a time, and then answers those that are being written
    /// here, of a key in one turn of the lock: what is being written is not published meanwhile.
    fn answer(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        answers: &mut [Option<Refused>],
        mut found: impl FnMut(&[Wanted], &mut [Option<Refused>]),
    ) {
        let turns = blocks
            .chunks(turn_len())
            .zip(answers.chunks_mut(turn_len()));
        let mut state = self.state.lock();
        for (turn, (blocks, answers)) in turns.enumerate() {
            state.take_turns(turn * turn_len());
            found(blocks, answers);
            self.reserved_in(&state, namespace, blocks, answers);
        }
    }

    fn reserved_in(
        &self,
        state: &State,
        namespace: NamespaceId,
        blocks: &[Wanted],
        answers: &mut [Option<Refused>],
    ) {
        if state.reserved.len() == 0 {
            return;
        }
        let Some(number) = self.index.number(namespace) else {
            return;
        };
        for (wanted, answer) in blocks.iter().zip(answers) {
            if let Some(slot) = state.reserved.get(number, &wanted.key) {
                *answer = Some(Refused::Reserved(self.place(slot).token));
            }
        }
    }

    /// Returns the published blocks in order of their last use, the most recent one last.
    pub fn by_use(&self) -> Vec<Token> {
        let mut live: Vec<(u64, u32, u64)> = Vec::new();
        self.index.walk(|slot, entry| {
            if entry.stage == Stage::Live {
                live.push((self.index.stamp_of(slot, &entry), slot, entry.sequence));
            }
        });
        live.sort_unstable();
        let token = |(_, slot, sequence)| Token {
            device: self.number,
            slot,
            sequence,
        };
        live.into_iter().map(token).collect()
    }

    /// Returns the published blocks of this arena that one of `others` has, too. It releases its
    /// locks from time to time.
    pub fn doubles(&self, others: &[Arc<Arena>]) -> Vec<Token> {
        let mut doubles = Vec::new();
        let mut at = Some(0);
        while let Some(from) = at {
            let mut some: Vec<(u32, u32, Key, u64)> = Vec::new();
            at = self.index.page(from, STEP, |slot, shard, local| {
                let entry = shard.entry(local);
                if entry.stage == Stage::Live {
                    some.push((entry.namespace, slot, entry.key, entry.sequence));
                }
                true
            });
            some.sort_unstable_by_key(|(namespace, ..)| *namespace);
            for some in some.chunk_by(|a, b| a.0 == b.0) {
                let keys: Vec<Key> = some.iter().map(|(_, _, key, _)| *key).collect();
                let mut found = vec![false; keys.len()];
                for other in others {
                    other.contains(self.index.id(some[0].0), &keys, &mut found);
                }
                let there = some.iter().zip(found).filter(|(_, found)| *found);
                doubles.extend(there.map(|((_, slot, _, sequence), _)| Token {
                    device: self.number,
                    slot: *slot,
                    sequence: *sequence,
                }));
            }
        }
        doubles
    }

    /// Unpublishes blocks that another device has now. Pinned blocks keep their space until their
    /// last pin is released.
    pub fn hand_over(&self, tokens: &[Token]) {
        self.drop_blocks(tokens, true);
    }

    /// Evicts those of these blocks that are not pinned. Returns the number of evicted blocks.
    pub fn evict_these(&self, tokens: &[Token]) -> usize {
        let mut count = 0;
        for some in tokens.chunks(BATCH) {
            let mut state = self.state.lock();
            let slots = self.live_slots(some).into_iter();
            let victims: Vec<_> = slots.map(|slot| (slot, None)).collect();
            count += self.evict_blocks(&mut state, &victims);
        }
        count
    }
}
