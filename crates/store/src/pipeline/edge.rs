//! Edges: what is between two neighbouring tiers, and which blocks go over it.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_arena::{Identity, Key, NamespaceId};
use parking_lot::RwLock;

use super::budget::Budget;
use super::spending::{Spending, Spent};
use crate::chances::UNKNOWN;
use crate::config::{Config, Touch};
use crate::ghosts::Ghosts;
use crate::tier::{Apart, Stage};

/// Batches that are under way at once to a tier that may answer late. To arenas one: the lanes are
/// busy with it.
const BATCHES_LATE: usize = 4;

/// What is between a tier and the next one. Its queue is in the ledger.
pub(crate) struct Edge {
    /// Bytes of the nearer tier that may wait for the other.
    pub(crate) budget: Arc<Budget>,
    /// Batches under way at once.
    pub(super) batches: usize,
    /// What was touched in the nearer tier, *done* once it has gone on; `None` where the first
    /// touch is enough. Twice as many blocks as that tier may have.
    touched: Option<Ghosts>,
    /// Bytes of the blocks that go over it.
    lens: RangeInclusive<u64>,
    spending: Spending,
    declined: AtomicU64,
    saved: Arc<Saved>,
}

/// Namespaces whose blocks no admission rule declines.
#[derive(Default)]
pub(crate) struct Saved(RwLock<HashSet<NamespaceId>>);

/// Namespaces that are noted, at most: 16 bytes of each.
const SAVED_MAX: usize = 1 << 16;

impl Saved {
    /// Notes one.
    pub(super) fn note(&self, id: NamespaceId) {
        let mut noted = self.0.write();
        if noted.len() < SAVED_MAX {
            noted.insert(id);
        }
    }

    /// Whether it is one.
    pub(super) fn has(&self, id: NamespaceId) -> bool {
        self.0.read().contains(&id)
    }
}

/// Why a block stays in the nearer tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stays {
    /// It was touched for the first time, or has not the size: nobody expects it to be there.
    Barred,
    /// No more may be written now.
    Kept,
}

impl Edge {
    /// Those of a pipeline. The queue's depth is an option of the first; of the others each takes
    /// at most a quarter of its tier.
    pub(crate) fn all(tiers: &[Stage], config: &Config, saved: &Arc<Saved>) -> Vec<Edge> {
        let pairs = tiers.iter().zip(tiers.iter().skip(1)).enumerate();
        let edge = |(at, (near, far)): (usize, (&Stage, &Stage))| {
            let depth = match at {
                0 => config.write_back_depth,
                _ => Some(near.block_max() / 4),
            };
            let into = config.edges.get(far.name()).copied().unwrap_or_default();
            let stats = near.stats();
            // Of a tier that does not say what it may have, many are remembered.
            let or = |said: u64, most: u64| if said > 0 { said } else { most };
            let (blocks, bytes) = (
                or(stats.blocks_max, 1 << 20),
                or(stats.capacity_bytes, 1 << 40),
            );
            let touched = || Ghosts::new(blocks, bytes);
            let depth = depth.unwrap_or_else(|| near.block_max() / 2);
            // Each is pinned in the nearer tier: calls find pins beside them.
            let pinned = near.apart().map_or(usize::MAX, Apart::write_back_max);
            Edge {
                budget: Budget::new(depth, pinned as u64),
                batches: far.apart().map_or(1, |_| BATCHES_LATE),
                touched: (into.admission == Touch::Second).then(touched),
                lens: into.block_min..=into.block_max,
                spending: Spending::new(into.write_budget_hour, into.write_budget_day),
                declined: AtomicU64::new(0),
                saved: Arc::clone(saved),
            }
        };
        pairs.map(edge).collect()
    }

    /// Whether it takes blocks at their second touch only.
    pub(super) fn is_for_touched(&self) -> bool {
        self.touched.is_some()
    }

    /// Whether a block goes on that has come to the nearer tier. A first touch is noted; that the
    /// block has gone on is noted once it is in the queue.
    pub(super) fn admits(&self, identity: &Identity, len: u64) -> Result<Spent, Stays> {
        let is_barred = self.bars(identity, len);
        self.note(identity, len, false);
        let spent = match is_barred {
            true => Err(Stays::Barred),
            false => self.spending.take(len).ok_or(Stays::Kept),
        };
        spent.inspect_err(|_| self.declines())
    }

    /// Whether a block would stay in the nearer tier now.
    pub(super) fn keeps(&self, identity: &Identity, len: u64) -> Option<Stays> {
        if self.bars(identity, len) {
            return Some(Stays::Barred);
        }
        (!self.spending.allows(len)).then_some(Stays::Kept)
    }

    /// Whether a block that was touched often enough may go on; it is written then.
    pub(super) fn lets_touched(&self, len: u64) -> Option<Spent> {
        let fits = self.lens.contains(&len);
        fits.then(|| self.spending.take(len)).flatten()
    }

    /// The same of a block that passes the nearer tier by, and needs no queue. It is
    /// [spent](Edge::spend) when the other tier has made room for it.
    pub(super) fn lets_by(&self, identity: &Identity, len: u64) -> Result<(), Stays> {
        let kept = self.keeps(identity, len);
        self.note(identity, len, kept.is_none());
        kept.map_or(Ok(()), Err).inspect_err(|_| self.declines())
    }

    /// Takes what may be written for a block that passes the nearer tier by: others may have taken
    /// it since that was let by.
    pub(super) fn spend(&self, len: u64) -> Option<Spent> {
        self.spending.take(len)
    }

    /// Whether what goes over it is counted.
    pub(super) fn is_bounded(&self) -> bool {
        self.spending.is_bounded()
    }

    /// Counts a block that does not go on.
    pub(super) fn declines(&self) {
        self.declined.fetch_add(1, Ordering::Relaxed);
    }

    fn bars(&self, identity: &Identity, len: u64) -> bool {
        let is_barred = self.is_first(identity) || !self.lens.contains(&len);
        is_barred && !self.saved.has(identity.namespace)
    }

    /// Whether a touch of this block is the first one, and not enough.
    fn is_first(&self, identity: &Identity) -> bool {
        let touched = self.touched.as_ref();
        touched.is_some_and(|touched| touched.noted(identity.namespace, &identity.key).is_none())
    }

    /// Notes that a block of the nearer tier was touched, and whether it has gone on.
    pub(super) fn note(&self, identity: &Identity, len: u64, gone_on: bool) {
        if let Some(touched) = &self.touched {
            touched.offered(identity.namespace, &identity.key, len, UNKNOWN, gone_on);
        }
    }

    /// Those of these blocks that were touched, and have not gone on.
    pub(super) fn stayed(&self, id: NamespaceId, keys: &[Key]) -> Vec<Key> {
        let Some(touched) = &self.touched else {
            return Vec::new();
        };
        let stayed = keys.iter().copied();
        stayed
            .filter(|key| touched.noted(id, key) == Some(false))
            .collect()
    }

    /// Forgets blocks that were removed.
    pub(super) fn forget(&self, id: NamespaceId, keys: &[Key]) {
        if let Some(touched) = &self.touched {
            keys.iter().for_each(|key| {
                touched.take(id, key);
            });
        }
    }

    /// Forgets all.
    pub(super) fn forget_all(&self) {
        self.touched.iter().for_each(Ghosts::clear);
    }

    /// How often a block did not go on.
    pub(super) fn declined(&self) -> u64 {
        self.declined.load(Ordering::Relaxed)
    }
}
