//! Who is there: the blocks of a namespace, how much each namespace has, and which blocks left.

use crate::body::Arena;
use crate::error::Error;
use crate::head::read_directory;
use crate::index::Stage;
use crate::key::{Key, NamespaceId};
use crate::roll::{Departed, Notes, Share};

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
        let entries = read_directory(&***self.medium.load())?.into_iter();
        Ok(entries.map(|(_, id, text)| (id, text)).collect())
    }

    /// The blocks unpublished since this listener's last call; noted from its first call on, at
    /// most the last `limit` of them.
    pub fn departed(&self, listener: u64, limit: usize) -> Departed {
        let mut state = self.state.lock();
        Notes::ask(&mut state.roll.notes, listener, limit)
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
