//! What is asked of a queue pair, and what it answers.

use super::abi::Sge;
use super::error::Failure;
use super::region::{Piece, Region};
use std::sync::Arc;
use std::vec::Drain;

/// Which way a slice goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// From the peer to here.
    Read,
    /// From here to the peer.
    Write,
}

/// Where a slice lies at the peer: from there on, as many bytes as its pieces have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    /// The address of the first byte in the peer's process.
    pub(crate) addr: u64,
    /// The key of its region.
    pub(crate) rkey: u32,
}

/// What became of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    /// The caller's number of it.
    pub(crate) id: u64,
    /// Whether all of it was carried.
    pub(crate) ended: Result<(), Failure>,
}

/// Slices that are not posted yet, in order: each is one work request.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) works: Vec<Work>,
    /// Those of all works, one after the other; `regions` has the region of each.
    pub(super) sges: Vec<Sge>,
    regions: Vec<Arc<Region>>,
}

#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) id: u64,
    pub(super) op: Op,
    pub(super) remote: Remote,
    pub(super) pieces: usize,
}

impl Chain {
    pub(super) fn push(&mut self, id: u64, op: Op, remote: Remote, pieces: &[Piece]) {
        self.works.push(Work {
            id,
            op,
            remote,
            pieces: pieces.len(),
        });
        self.sges
            .extend(pieces.iter().map(|piece| piece.sge.clone()));
        let regions = pieces.iter().map(|piece| Arc::clone(&piece.region));
        self.regions.extend(regions);
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.works.len()
    }

    /// Takes the first `count` away, with the regions of all their pieces.
    pub(super) fn take(&mut self, count: usize) -> (Drain<'_, Work>, Drain<'_, Arc<Region>>) {
        let pieces: usize = self.works[..count].iter().map(|work| work.pieces).sum();
        self.sges.drain(..pieces);
        (self.works.drain(..count), self.regions.drain(..pieces))
    }
}
