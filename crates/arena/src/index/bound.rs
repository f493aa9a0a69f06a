//! Blocks that are in groups, by their slots: what the order of use asks for those, and nobody for
//! the others.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::shard::Shard;
use super::{Entry, Index};
use crate::group::{self, Group};
use crate::held;

/// Parts that grow by themselves, so that nobody waits for all of them to move.
const PARTS: usize = 64;

/// Slots to the groups of what is in them. Their locks are taken below those of shards, and
/// nothing is below them.
#[derive(Default)]
pub(super) struct Bound {
    parts: Vec<held::RwLock<HashMap<u32, Vec<Arc<Group>>>>>,
    count: AtomicU64,
}

impl Bound {
    pub(super) fn new() -> Bound {
        let parts = std::iter::repeat_with(held::RwLock::default);
        Bound {
            parts: parts.take(PARTS).collect(),
            count: AtomicU64::new(0),
        }
    }

    fn part(&self, slot: u32) -> &held::RwLock<HashMap<u32, Vec<Arc<Group>>>> {
        &self.parts[slot as usize % PARTS]
    }

    fn with<R>(&self, slot: u32, with: impl FnOnce(&[Arc<Group>]) -> R) -> R {
        let part = self.part(slot).read();
        with(part.get(&slot).map_or(&[], Vec::as_slice))
    }

    pub(super) fn let_go(&self) {
        for part in &self.parts {
            part.write().clear();
        }
        self.count.store(0, Ordering::Relaxed);
    }
}

/// Notes a use of the group of a block. Where it has several, nobody knows which of them was
/// used: a head that many share would make all of them as new as the newest, and each of its uses
/// be a use of each.
fn use_at(groups: &[Arc<Group>], stamp: u64) {
    if let [only] = groups {
        only.use_at(stamp);
    }
}

impl Index {
    /// Blocks that are in groups.
    pub(crate) fn in_groups(&self) -> u64 {
        self.bound.count.load(Ordering::Relaxed)
    }

    /// Puts a published block into groups that it is not in; its last use is one of all in its
    /// group, where it has one alone.
    pub(crate) fn join(&self, slot: u32, groups: &[Arc<Group>]) {
        self.read(slot, |shard, local| {
            let stamp = self.rank_of(shard, local, slot);
            let mut part = self.bound.part(slot).write();
            let known = part.entry(slot).or_default();
            if known.is_empty() {
                self.bound.count.fetch_add(1, Ordering::Relaxed);
            }
            for group in groups {
                if !known.iter().any(|one| Arc::ptr_eq(one, group)) {
                    known.push(Arc::clone(group));
                }
            }
            use_at(known, stamp);
            shard.bind(local, true);
        });
    }

    /// Takes a block out of a group: whatever was used with it, it was used too.
    pub(crate) fn part(&self, slot: u32, group: &Arc<Group>) {
        self.read(slot, |shard, local| {
            self.rank_of(shard, local, slot);
            let mut part = self.bound.part(slot).write();
            let Some(groups) = part.get_mut(&slot) else {
                return;
            };
            groups.retain(|one| !Arc::ptr_eq(one, group));
            if groups.is_empty() {
                part.remove(&slot);
                self.bound.count.fetch_sub(1, Ordering::Relaxed);
                shard.bind(local, false);
                shard.set_rank(local, group::ordinary);
            }
        });
    }

    /// Takes what is gone out of its groups, and answers them.
    pub(crate) fn loosen(&self, slot: u32) -> Vec<Arc<Group>> {
        let gone = self.bound.part(slot).write().remove(&slot);
        if gone.is_some() {
            self.bound.count.fetch_sub(1, Ordering::Relaxed);
        }
        gone.unwrap_or_default()
    }

    /// Whether all groups of a block have lost another one.
    pub(crate) fn is_left_over(&self, slot: u32) -> bool {
        self.bound.with(slot, |groups| {
            !groups.is_empty() && groups.iter().all(|group| group.is_broken())
        })
    }

    /// Notes a use of a block, and with it of all that are in its group.
    #[cold]
    pub(super) fn use_groups(&self, shard: &Shard, local: u32, slot: u32, stamp: u64) {
        self.bound.with(slot, |groups| use_at(groups, stamp));
        shard.set_rank(local, |known| group::with_class_of(stamp, known).max(known));
    }

    /// The stamp of a block by its groups, which it has from then on: the order of use takes what
    /// is below its bound for listed.
    pub(crate) fn ranked(&self, slot: u32) -> u64 {
        let stamp = self.read(slot, |shard, local| self.rank_of(shard, local, slot));
        stamp.unwrap_or(0)
    }

    /// As [`Index::ranked`], in a shard that is held.
    pub(super) fn rank_of(&self, shard: &Shard, local: u32, slot: u32) -> u64 {
        match shard.is_bound(local) {
            false => shard.stamp(local),
            true => self.bound.with(slot, |groups| {
                shard.set_rank(local, |known| group::rank(known, groups))
            }),
        }
    }

    /// As [`Index::rank_of`], of a block that was looked at.
    pub(crate) fn stamp_of(&self, slot: u32, entry: &Entry) -> u64 {
        match entry.bound {
            false => entry.stamp,
            true => self
                .bound
                .with(slot, |groups| group::rank(entry.stamp, groups)),
        }
    }
}
