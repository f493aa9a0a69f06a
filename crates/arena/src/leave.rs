//! What a device needs that is one among several, and may leave.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::body::{Arena, State};
use crate::bury::BATCH;
use crate::held::TURN;
use crate::index::{Oldest, STEP, Stage};
use crate::key::{Key, NamespaceId};
use crate::place::{Token, Wanted};
use crate::refused::{Cause, Refused};

/// Room of an arena that can be written.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes not allocated.
    pub free: u64,
    /// Records that are not in use.
    pub vacant: u64,
    /// Bytes that eviction frees in one go.
    pub ahead: u64,
    /// Whether the block that asks would fit as it is; the caller says.
    pub fits: bool,
    /// When its least recently used block was used, of those that can be evicted.
    pub oldest: Option<u64>,
}

/// What a device is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Nothing is written to it any more.
    pub leaving: bool,
    /// Its medium has failed.
    pub failed: bool,
    /// Nothing is stored, pinned or being written, and nobody is at work there.
    pub empty: bool,
    /// Blocks that are pinned.
    pub pinned: u64,
    /// Blocks that are being written.
    pub reserved: u64,
}

impl Arena {
    /// Whether blocks are no longer written here. The tier holds its `placing` lock.
    pub fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::Release);
    }

    /// What it is doing.
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

    /// Blocks that were ever published here, while it has been open.
    pub fn stored_blocks(&self) -> u64 {
        self.counters.stored_blocks.load(Ordering::Relaxed)
    }

    /// Whether the medium has lost what makes it an arena.
    fn has_failed(&self) -> bool {
        self.medium.load().losses() > 0 && self.is_lost(0, self.opened.data)
    }

    /// Why nothing can be written here now, if nothing can.
    pub fn closed_to_writes(&self) -> Option<Cause> {
        if self.leaving.load(Ordering::Acquire) {
            return Some(Cause::Leaving);
        }
        self.orphans()
    }

    /// `None` where nothing can be written now.
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

    /// Answers the keys that are published or being written here. The published ones are pinned,
    /// so that the rest of their prompt does not evict them, and noted in `pinned`.
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

    /// Answers the keys that are being written here.
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
        let turns = blocks.chunks(TURN).zip(answers.chunks_mut(TURN));
        let mut state = self.state.lock();
        for (turn, (blocks, answers)) in turns.enumerate() {
            state.take_turns(turn * TURN);
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

    /// What is published, the block that was used last at the end.
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

    /// Those of this arena's published blocks that one of the others has, too; some at a time.
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

    /// Unpublishes blocks that another device has now. Pinned ones stay where they are until the
    /// last pin ends.
    pub fn hand_over(&self, tokens: &[Token]) {
        self.drop_blocks(tokens, true);
    }

    /// Evicts those of these blocks that nobody has pinned; how many.
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
