//! Edges: what is between two neighbouring tiers.

use std::sync::Arc;

use super::budget::Budget;
use crate::tier::Stage;

/// Batches that are under way at once to a tier that may answer late. To arenas one: the lanes are
/// busy with it.
const BATCHES_LATE: usize = 4;

/// What is between a tier and the next one. Its queue is in the ledger.
pub(crate) struct Edge {
    /// Bytes of the nearer tier that may wait for the other.
    pub(crate) budget: Arc<Budget>,
    /// Batches under way at once.
    pub(super) batches: usize,
}

impl Edge {
    /// Those of a pipeline. `depth` is of the first; of the others each takes at most a quarter of
    /// its tier.
    pub(crate) fn all(tiers: &[Stage], depth: Option<u64>) -> Vec<Edge> {
        let pairs = tiers.iter().zip(tiers.iter().skip(1)).enumerate();
        let edge = |(at, (near, far)): (usize, (&Stage, &Stage))| {
            let depth = match at {
                0 => depth.unwrap_or_else(|| near.block_max() / 2),
                _ => near.block_max() / 4,
            };
            Edge {
                budget: Budget::new(depth),
                batches: far.apart().map_or(1, |_| BATCHES_LATE),
            }
        };
        pairs.map(edge).collect()
    }
}
