//! Who is there: the blocks of a namespace, how much each namespace has, and which blocks left.
//!
//! What is noted costs every eviction a little, so it does not begin before somebody asks.

use std::collections::VecDeque;

use crate::arena::Arena;
use crate::error::Error;
use crate::index::Stage;
use crate::key::{Identity, Key, NamespaceId};
use crate::open::read_directory;

/// Blocks and payload bytes of a namespace.
pub(crate) type Share = (u64, u64);

/// Blocks that were unpublished, in that order, with their bytes.
#[derive(Debug, Default)]
pub struct Departed {
    /// Blocks that have left, and the bytes of each.
    pub blocks: Vec<(Identity, u64)>,
    /// Whether there were more than could be kept.
    pub overflowed: bool,
}

#[derive(Default)]
pub(crate) struct Roll {
    /// By the namespace's number.
    shares: Vec<Share>,
    notes: Vec<Notes>,
    /// Whether what goes now is on another device already.
    pub(crate) moving: bool,
}

/// What one listener has not been told yet.
pub(crate) struct Notes {
    listener: u64,
    blocks: VecDeque<(Identity, u64)>,
    limit: usize,
    overflowed: bool,
}

impl Notes {
    fn of(listener: u64, limit: usize) -> Notes {
        Notes {
            listener,
            blocks: VecDeque::new(),
            limit,
            overflowed: false,
        }
    }

    fn take(&mut self) -> Departed {
        Departed {
            blocks: std::mem::take(&mut self.blocks).into(),
            overflowed: std::mem::take(&mut self.overflowed),
        }
    }

    /// As if they had been noted here, too.
    fn join(&mut self, others: Notes) {
        self.blocks.extend(others.blocks);
        self.overflowed |= others.overflowed;
        while self.blocks.len() > self.limit {
            self.blocks.pop_front();
            self.overflowed = true;
        }
    }
}

/// What devices that are gone had noted for their listeners, as much for each as one device keeps.
#[derive(Default)]
pub struct Legacy(Vec<Notes>);

impl Legacy {
    /// Takes what a device has noted that nothing leaves any more.
    pub fn inherit(&mut self, arena: &Arena) {
        for notes in std::mem::take(&mut arena.state.lock().roll.notes) {
            let known = self.0.iter_mut().find(|one| one.listener == notes.listener);
            match known {
                Some(known) => known.join(notes),
                None => self.0.push(notes),
            }
        }
    }

    /// As [`Arena::departed`].
    pub fn departed(&mut self, listener: u64) -> Departed {
        let mut mine = self.0.extract_if(.., |one| one.listener == listener);
        mine.next()
            .map(|mut notes| notes.take())
            .unwrap_or_default()
    }
}

impl Departed {
    /// Those of another device, too.
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
        let index = namespace as usize;
        if self.shares.len() <= index {
            self.shares.resize(index + 1, (0, 0));
        }
        let share = &mut self.shares[index];
        *share = (share.0 + 1, share.1 + bytes);
    }

    pub(crate) fn went(&mut self, namespace: u32, identity: Identity, bytes: u64) {
        if let Some(share) = self.shares.get_mut(namespace as usize) {
            *share = (share.0 - 1, share.1 - bytes);
        }
        for notes in self.notes.iter_mut().filter(|_| !self.moving) {
            if notes.blocks.len() >= notes.limit {
                notes.blocks.pop_front();
                notes.overflowed = true;
            }
            notes.blocks.push_back((identity, bytes));
        }
    }
}

impl Arena {
    /// Looks at `glance` slots from `slot` on, and adds the published blocks of a namespace among
    /// them with their bytes, until there are `limit`. The first slot that was not looked at;
    /// `None` behind the last one.
    pub fn glance(
        &self,
        namespace: NamespaceId,
        slot: u32,
        glance: u32,
        limit: usize,
        blocks: &mut Vec<(Key, u64)>,
    ) -> Option<u32> {
        self.index.page_of(namespace, slot, glance, |_, entry| {
            if entry.stage == Stage::Live {
                blocks.push((entry.key, entry.len));
            }
            blocks.len() < limit
        })
    }

    /// What each namespace has that has blocks here, or had some lately.
    pub fn shares(&self) -> Vec<(NamespaceId, Share)> {
        let state = self.state.lock();
        let shares = &state.roll.shares;
        let share = |number: u32| shares.get(number as usize).copied().unwrap_or_default();
        let each = self.index.named().into_iter();
        each.map(|(id, number)| (id, share(number))).collect()
    }

    /// What the arena's directory says of its namespaces.
    pub fn descriptions(&self) -> Result<Vec<(NamespaceId, String)>, Error> {
        if self.table.is_none() {
            return Ok(Vec::new());
        }
        let entries = read_directory(&self.mapping.load())?.into_iter();
        Ok(entries.map(|(_, id, text)| (id, text)).collect())
    }

    /// The blocks unpublished since this listener's last call; noted from its first call on, at
    /// most the last `limit` of them.
    pub fn departed(&self, listener: u64, limit: usize) -> Departed {
        let mut state = self.state.lock();
        let all = &mut state.roll.notes;
        let known = all.iter().position(|notes| notes.listener == listener);
        let at = known.unwrap_or_else(|| {
            all.push(Notes::of(listener, limit));
            all.len() - 1
        });
        let notes = &mut all[at];
        notes.limit = limit;
        notes.take()
    }

    /// Notes what leaves from now on for whoever listens to another device of the tier.
    pub fn listen_like(&self, other: &Arena) {
        let listeners = {
            let state = other.state.lock();
            let notes = state.roll.notes.iter();
            let of = notes.map(|notes| Notes::of(notes.listener, notes.limit));
            of.collect()
        };
        self.state.lock().roll.notes = listeners;
    }

    /// Notes nothing for this listener any more.
    pub fn forget_listener(&self, listener: u64) {
        let notes = &mut self.state.lock().roll.notes;
        notes.retain(|notes| notes.listener != listener);
    }
}
