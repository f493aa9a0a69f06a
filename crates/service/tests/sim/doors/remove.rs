//! What is removed by its key, or with its namespace.

use std::collections::BTreeSet;

use kvdepot_testkit::sim::twin::Id;

use crate::world::{Law, World, key, law};

impl World {
    pub(super) fn remove(&self, door: usize, ns: u8, numbers: &[u16]) -> Law {
        self.door("remove");
        let namespace = self.namespace(door, ns)?;
        let ids: BTreeSet<Id> = numbers.iter().map(|number| (ns, *number)).collect();
        let there = ids
            .iter()
            .filter(|id| self.twin.borrow().live(**id).is_some())
            .count();
        self.cause.borrow_mut().removed.extend(&ids);
        self.asks(ids.iter().copied());
        // Where the step repeats numbers, some are given twice, and count once.
        let again = ids.iter().take(numbers.len() - ids.len());
        let keys = ids.iter().chain(again).map(|(_, number)| key(*number));
        let keys: Vec<_> = keys.collect();
        let removed = namespace.remove(&keys).map_err(|error| error.to_string())?;
        let fewer = !self.is_scheduled() && removed < there;
        law!(
            removed == there || fewer,
            "{removed} of {there} blocks were removed"
        );
        for id in &ids {
            let found = namespace
                .contains(&[key(id.1)])
                .map_err(|error| error.to_string())?;
            law!(!found[0], "{id:?} was removed and is there");
        }
        Ok(())
    }

    pub(super) fn clear(&self, door: usize, ns: u8) -> Law {
        self.door("clear");
        let namespace = self.namespace(door, ns)?;
        let there: Vec<Id> = {
            let twin = self.twin.borrow();
            twin.all_live()
                .map(|(id, _)| id)
                .filter(|id| id.0 == ns)
                .collect()
        };
        let stored: BTreeSet<Id> = {
            let seen = self.seen.borrow();
            let all = seen.near.iter().chain(seen.far.keys());
            all.filter(|id| id.0 == ns).copied().collect()
        };
        self.cause.borrow_mut().removed.extend(there);
        self.unread.borrow_mut().clear();
        let cleared = namespace.clear().map_err(|error| error.to_string())?;
        law!(
            cleared == stored.len() || self.nested.get() > 0 || !self.is_scheduled(),
            "{cleared} blocks were cleared of {stored:?}"
        );
        Ok(())
    }
}
