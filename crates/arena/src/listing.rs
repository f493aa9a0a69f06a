//! Who is there: the blocks of a namespace, how much each namespace has, and which blocks left.

use crate::body::Arena;
use crate::error::Error;
use crate::head::read_directory;
use crate::index::Stage;
use crate::key::{Key, NamespaceId};
use crate::roll::{Departed, Notes, Share};

/// The removal logs of devices that are gone, with the same limit per listener as the log of one
/// device.
#[derive(Default)]
pub struct Legacy(Vec<Notes>);

impl Legacy {
    /// Takes over the removal logs of `arena`, which no longer removes blocks.
    pub fn inherit(&mut self, arena: &Arena) {
        for notes in std::mem::take(&mut arena.state.lock().roll.notes) {
            let known = self.0.iter_mut().find(|one| one.listener == notes.listener);
            match known {
                Some(known) => known.join(notes),
                None => self.0.push(notes),
            }
        }
    }

    /// Returns the removed blocks for this listener; see [`Arena::departed`].
    pub fn departed(&mut self, listener: u64) -> Departed {
        let mut mine = self.0.extract_if(.., |one| one.listener == listener);
        mine.next()
            .map(|mut notes| notes.take())
            .unwrap_or_default()
    }
}

impl Arena {
    /// Examines `glance` slots from `slot` on and adds the published blocks of a namespace to
    /// `blocks`, with their sizes in bytes.
    ///
    /// It stops when `blocks` has `limit` entries. Returns the first slot that was not examined, or
    /// `None` after the last slot.
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

    /// Returns the number of blocks and bytes per namespace, for namespaces that have blocks here
    /// or had some recently.
    pub fn shares(&self) -> Vec<(NamespaceId, Share)> {
        let state = self.state.lock();
        let shares = &state.roll.shares;
        let share = |number: u32| shares.get(number as usize).copied().unwrap_or_default();
        let each = self.index.named().into_iter();
        each.map(|(id, number)| (id, share(number))).collect()
    }

    /// Returns the descriptions of namespaces in the arena's directory.
    ///
    /// # Errors
    ///
    /// [`Error::Media`] if the directory cannot be read.
    pub fn descriptions(&self) -> Result<Vec<(NamespaceId, String)>, Error> {
        if self.table.is_none() {
            return Ok(Vec::new());
        }
        let entries = read_directory(&***self.medium.load())?.into_iter();
        Ok(entries.map(|(_, id, text)| (id, text)).collect())
    }

    /// Returns the blocks that were unpublished since this listener's last call.
    ///
    /// The log starts with the listener's first call and keeps at most the last `limit` blocks.
    pub fn departed(&self, listener: u64, limit: usize) -> Departed {
        let mut state = self.state.lock();
        Notes::ask(&mut state.roll.notes, listener, limit)
    }

    /// Starts removal logs here for all listeners of `other`, another device of the tier.
    pub fn listen_like(&self, other: &Arena) {
        let listeners = {
            let state = other.state.lock();
            let notes = state.roll.notes.iter();
            let of = notes.map(|notes| Notes::of(notes.listener, notes.limit));
            of.collect()
        };
        self.state.lock().roll.notes = listeners;
    }

    /// Ends the removal log of this listener.
    pub fn forget_listener(&self, listener: u64) {
        let notes = &mut self.state.lock().roll.notes;
        notes.retain(|notes| notes.listener != listener);
    }
}
