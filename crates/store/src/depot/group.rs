//! Groups: blocks that are of use only together.

use std::sync::Arc;

use kvdepot_arena::{Class, Error, Key, NamespaceId};
use parking_lot::Mutex;

use super::verbs::{Together, Verbs};
use crate::pipeline::Pin;

/// Blocks of a namespace that each tier keeps and evicts as one: a use of one is a use of all, and
/// when eviction takes one, the others leave as well, but for those that are pinned, or are in
/// another group too. Dropped, it is a group no more; the blocks stay.
///
/// It is in the memory of who has the index: after a restart of that it is declared again.
#[must_use = "dropped, it is a group no more"]
pub struct Group {
    /// Ends before who is asked does.
    together: Box<dyn Together>,
    verbs: Arc<dyn Verbs>,
    id: NamespaceId,
    keys: Mutex<Vec<Key>>,
}

impl Group {
    pub(super) fn new(
        verbs: &Arc<dyn Verbs>,
        id: NamespaceId,
        keys: &[Key],
        class: Class,
    ) -> Result<Group, Error> {
        Ok(Group {
            together: verbs.group(id, keys, class)?,
            verbs: Arc::clone(verbs),
            id,
            keys: Mutex::new(keys.to_vec()),
        })
    }

    /// Its keys, in the order in which they were added.
    #[must_use]
    pub fn keys(&self) -> Vec<Key> {
        self.keys.lock().clone()
    }

    /// Adds blocks, which are there or may come.
    ///
    /// # Errors
    /// [`Error::Closed`]; in a client also [`Error::Peer`] without an owner, and [`Error::Input`]
    /// for more than it may have.
    pub fn add(&self, keys: &[Key]) -> Result<(), Error> {
        self.together.add(keys)?;
        self.keys.lock().extend_from_slice(keys);
        Ok(())
    }

    /// Gives its blocks another class: one that is superseded is of [`Class::First`].
    ///
    /// # Errors
    /// As [`Group::add`].
    pub fn set_class(&self, class: Class) -> Result<(), Error> {
        self.together.set_class(class)
    }

    /// Pins all its blocks where they are nearest, in the order of its keys; `None`, and nothing
    /// stays pinned, where one is not there.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn pin(&self) -> Result<Option<Vec<Pin>>, Error> {
        let pins = self.verbs.pin(self.id, &self.keys(), true)?;
        let count = pins.len();
        let pins: Vec<Pin> = pins.into_iter().flatten().collect();
        if pins.len() == count {
            return Ok(Some(pins));
        }
        self.verbs.unpin(&pins, false);
        Ok(None)
    }
}
