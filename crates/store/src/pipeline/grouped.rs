//! Blocks that belong together, in every tier.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdepot_arena::{Class, Error, Group, Key, NamespaceId};
use parking_lot::Mutex;

use super::Core;
use crate::tier::Stage;

/// Blocks of a namespace that every tier keeps and evicts together.
///
/// Each tier does so separately. Dropping the value ends the group.
#[must_use = "dropped, it is a group no more"]
pub struct Grouped {
    core: Arc<Core>,
    id: NamespaceId,
    /// As tiers that stand apart know it.
    number: u64,
    /// What each tier of arenas has of it.
    here: Vec<Arc<Group>>,
    /// Held while the tiers are told, so that all of them hear the same last.
    class: Mutex<Class>,
}

impl Core {
    /// Declares a group: every tier keeps and evicts these blocks together.
    ///
    /// The blocks may be stored already, or later.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn group(
        self: &Arc<Core>,
        id: NamespaceId,
        keys: &[Key],
        class: Class,
    ) -> Result<Grouped, Error> {
        let _pass = self.gate.enter()?;
        let here = self.arenas().map(|_| Arc::new(Group::new(id, class)));
        let grouped = Grouped {
            here: here.collect(),
            core: Arc::clone(self),
            id,
            number: self.next_group.fetch_add(1, Ordering::Relaxed),
            class: Mutex::new(class),
        };
        grouped.add(keys)?;
        Ok(grouped)
    }
}

impl Grouped {
    /// Adds blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn add(&self, keys: &[Key]) -> Result<(), Error> {
        let _pass = self.core.gate.enter()?;
        let class = self.class.lock();
        for ((_, arenas), group) in self.core.arenas().zip(&self.here) {
            arenas.join(group, keys);
        }
        self.tell(keys, Some(*class));
        Ok(())
    }

    /// Sets the eviction class of the blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`].
    pub fn set_class(&self, class: Class) -> Result<(), Error> {
        let _pass = self.core.gate.enter()?;
        let mut known = self.class.lock();
        *known = class;
        for ((_, arenas), group) in self.core.arenas().zip(&self.here) {
            arenas.set_class(group, class);
        }
        self.tell(&[], Some(class));
        Ok(())
    }

    fn tell(&self, keys: &[Key], class: Option<Class>) {
        for apart in self.core.tiers.iter().filter_map(Stage::apart) {
            apart.tier().group(self.number, self.id, keys, class);
        }
    }
}

impl Drop for Grouped {
    fn drop(&mut self) {
        // What a closed depot had has gone with it.
        let Ok(_pass) = self.core.gate.enter() else {
            return;
        };
        for ((_, arenas), group) in self.core.arenas().zip(&self.here) {
            arenas.dissolve(group);
        }
        self.tell(&[], None);
    }
}
