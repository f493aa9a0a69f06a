//! Groups: blocks that are of use only together.

use std::sync::Arc;

use kvdepot_arena::{Class, Error, Key, NamespaceId};
use parking_lot::Mutex;

use super::verbs::{Together, Verbs};
use crate::pipeline::Pin;

/// Blocks of a namespace that each tier keeps and evicts together.
///
/// A use of one block counts as a use of all. If eviction selects one block, the others are evicted
/// too, except pinned blocks and blocks of another group. Dropping the value ends the group; its
/// blocks stay.
///
/// A group is in the memory of the process that has the index. After a restart of that process it
/// is declared again.
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

    /// Returns the keys of the group, in the order in which they were added.
    #[must_use]
    pub fn keys(&self) -> Vec<Key> {
        self.keys.lock().clone()
    }

    /// Adds blocks that are stored, or will be.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`].
    /// * [`Error::Peer`] in a client without a server.
    /// * [`Error::Input`] if a client exceeds its limit of keys and groups.
    pub fn add(&self, keys: &[Key]) -> Result<(), Error> {
        self.together.add(keys)?;
        self.keys.lock().extend_from_slice(keys);
        Ok(())
    }

    /// Sets the eviction class of the blocks, for example [`Class::First`] for superseded ones.
    ///
    /// # Errors
    ///
    /// Those of [`Group::add`].
    pub fn set_class(&self, class: Class) -> Result<(), Error> {
        self.together.set_class(class)
    }

    /// Pins all blocks of the group, each in the first tier that has it.
    ///
    /// Returns the pins in the order of the keys. If a block is missing, returns `None` and pins no
    /// block.
    ///
    /// # Errors
    ///
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
