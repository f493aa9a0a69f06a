//! One tier of a pipeline.

use std::sync::Arc;

use kvdepot_arena::{NamespaceId, Place, TierStats};

use super::apart::{Answer, Apart};
use super::arenas::Arenas;
use super::contract::Ends;

/// A tier, by how it is asked.
pub(crate) enum Stage {
    /// Its index is here, and answers at once.
    Here(Arenas),
    /// It may answer late.
    Apart(Apart),
}

impl Stage {
    pub(crate) fn here(&self) -> Option<&Arenas> {
        match self {
            Stage::Here(arenas) => Some(arenas),
            Stage::Apart(_) => None,
        }
    }

    pub(crate) fn apart(&self) -> Option<&Apart> {
        match self {
            Stage::Here(_) => None,
            Stage::Apart(apart) => Some(apart),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Stage::Here(arenas) => arenas.name(),
            Stage::Apart(apart) => apart.tier().name(),
        }
    }

    /// Whether what it holds outlives the process.
    pub(crate) fn lasts(&self) -> bool {
        match self {
            Stage::Here(arenas) => arenas.lasts(),
            Stage::Apart(apart) => apart.tier().lasts(),
        }
    }

    /// Bytes of the largest block that fits.
    pub(crate) fn block_max(&self) -> u64 {
        match self {
            Stage::Here(arenas) => arenas.block_max(),
            Stage::Apart(apart) => apart.tier().block_max(),
        }
    }

    pub(crate) fn stats(&self) -> TierStats {
        match self {
            Stage::Here(arenas) => arenas.stats(),
            Stage::Apart(apart) => apart.stats(),
        }
    }

    /// Where what is pinned or reserved lies.
    pub(crate) fn ends(&self) -> Arc<dyn Ends> {
        match self {
            Stage::Here(arenas) => arenas.devices(),
            Stage::Apart(apart) => apart.tier().ends(),
        }
    }

    /// Ends pins.
    pub(crate) fn unpin<'a>(&self, places: impl Iterator<Item = &'a Place>) {
        match self {
            Stage::Here(arenas) => arenas.unpin(places.map(|place| place.token)),
            Stage::Apart(apart) => apart.unpin(&places.copied().collect::<Vec<_>>()),
        }
    }

    /// Unpublishes pinned blocks that did not verify; how many. Who has found that out says so, and
    /// ends the pins, behind the answer: a put that comes then is none of a block that goes.
    pub(crate) fn discard(&self, places: &[Place]) -> Answer<usize> {
        match self {
            Stage::Here(arenas) => {
                let tokens: Vec<_> = places.iter().map(|place| place.token).collect();
                Answer::Now(Some(arenas.discard(&tokens)))
            }
            Stage::Apart(apart) => apart.discard(places),
        }
    }

    /// As [`Stage::discard`], and ends the pins. Waits for the answer.
    pub(crate) fn discard_and_unpin(&self, places: &[Place]) {
        if !places.is_empty() {
            let _or_not = self.discard(places).wait();
            self.unpin(places.iter());
        }
    }

    pub(crate) fn describe(&self, id: NamespaceId, description: &str) {
        match self {
            Stage::Here(arenas) => arenas.describe(id, description),
            Stage::Apart(apart) => apart.tier().describe(id, description),
        }
    }

    pub(crate) fn close(&self) {
        match self {
            Stage::Here(arenas) => arenas.close(),
            Stage::Apart(apart) => apart.close(),
        }
    }
}
