//! How much each namespace has, and which blocks left.
//!
//! What is noted costs every eviction a little, so it does not begin before somebody asks.

use std::collections::VecDeque;

use crate::key::Identity;

/// Blocks and payload bytes of a namespace.
pub(crate) type Share = (u64, u64);

/// What a namespace has, by its number.
pub(crate) fn share_of(shares: &mut Vec<Share>, namespace: u32) -> &mut Share {
    let index = namespace as usize;
    if shares.len() <= index {
        shares.resize(index + 1, (0, 0));
    }
    &mut shares[index]
}

/// Blocks that were unpublished, in that order, with their sizes.
#[derive(Debug, Default)]
pub struct Departed {
    /// Unpublished blocks with their sizes in bytes.
    pub blocks: Vec<(Identity, u64)>,
    /// True if older entries were discarded because of the limit.
    pub overflowed: bool,
}

#[derive(Default)]
pub(crate) struct Roll {
    /// By the namespace's number.
    pub(crate) shares: Vec<Share>,
    pub(crate) notes: Vec<Notes>,
    /// Whether what goes now is on another device already.
    pub(crate) moving: bool,
}

/// The removal log of one listener: unpublished blocks that it has not read yet.
#[derive(Debug)]
pub struct Notes {
    /// Number of the listener.
    pub listener: u64,
    /// Maximum number of blocks in the log; it keeps the latest ones.
    pub limit: usize,
    blocks: VecDeque<(Identity, u64)>,
    overflowed: bool,
}

impl Notes {
    /// Creates an empty log for `listener` that keeps at most `limit` entries.
    #[must_use]
    pub fn of(listener: u64, limit: usize) -> Notes {
        Notes {
            listener,
            blocks: VecDeque::new(),
            limit,
            overflowed: false,
        }
    }

    /// Adds an unpublished block with its size in bytes.
    pub fn push(&mut self, identity: Identity, bytes: u64) {
        if self.blocks.len() >= self.limit {
            self.blocks.pop_front();
            self.overflowed = true;
        }
        self.blocks.push_back((identity, bytes));
    }

    /// Returns the entries since the last call, and clears the log.
    pub fn take(&mut self) -> Departed {
        Departed {
            blocks: std::mem::take(&mut self.blocks).into(),
            overflowed: std::mem::take(&mut self.overflowed),
        }
    }

    /// Returns the entries for `listener` since its last call, and clears them.
    ///
    /// The first call of a listener starts its log, which keeps at most the last `limit` blocks.
    pub fn ask(all: &mut Vec<Notes>, listener: u64, limit: usize) -> Departed {
        let known = all.iter().position(|notes| notes.listener == listener);
        let at = known.unwrap_or_else(|| {
            all.push(Notes::of(listener, limit));
            all.len() - 1
        });
        all[at].limit = limit;
        all[at].take()
    }

    /// As if they had been noted here, too.
    pub(crate) fn join(&mut self, others: Notes) {
        self.blocks.extend(others.blocks);
        self.overflowed |= others.overflowed;
        while self.blocks.len() > self.limit {
            self.blocks.pop_front();
            self.overflowed = true;
        }
    }
}

impl Departed {
    /// Appends the blocks of another device.
    pub fn add(&mut self, other: Departed) {
        self.blocks.extend(other.blocks);
        self.overflowed |= other.overflowed;
    }
}

impl Roll {
    /// Of what namespaces have, by their numbers.
    pub(crate) fn of(shares: Vec<Share>) -> Roll {
        Roll {
            shares,
            ..Roll::default()
        }
    }

    pub(crate) fn came(&mut self, namespace: u32, bytes: u64) {
        let share = share_of(&mut self.shares, namespace);
        *share = (share.0 + 1, share.1 + bytes);
    }

    pub(crate) fn went(&mut self, namespace: u32, identity: Identity, bytes: u64) {
        if let Some(share) = self.shares.get_mut(namespace as usize) {
            *share = (share.0 - 1, share.1 - bytes);
        }
        for notes in self.notes.iter_mut().filter(|_| !self.moving) {
            notes.push(identity, bytes);
        }
    }
}
