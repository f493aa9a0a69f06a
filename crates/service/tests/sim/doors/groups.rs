//! Groups: what is kept and evicted as one.

use std::collections::BTreeSet;

use kvdepot_store::Class;
use kvdepot_testkit::sim::twin::Id;

use crate::world::{HeldGroup, Law, World, eventually, key, law};

/// Groups at a time.
const GROUPS: usize = 5;

fn class(number: u8) -> Class {
    [Class::First, Class::Ordinary, Class::Last][usize::from(number) % 3]
}

impl HeldGroup {
    pub fn ids(&self) -> impl Iterator<Item = Id> {
        self.keys.iter().map(|number| (self.ns, *number))
    }
}

impl World {
    pub(super) fn group(&self, door: usize, ns: u8, numbers: &[u16], of: u8) -> Law {
        self.door("group");
        if self.groups.borrow().len() == GROUPS {
            self.ungroup(of)?;
        }
        let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
        let class = class(of);
        let group = self.namespace(door, ns)?.group(&keys, class);
        let group = group.map_err(|error| format!("group: {error}"))?;
        self.groups.borrow_mut().push(HeldGroup {
            door,
            ns,
            keys: numbers.to_vec(),
            class,
            group,
        });
        self.all_grouped()
    }

    /// Nobody else ends it meanwhile.
    fn take_group(&self, group: u8) -> Option<HeldGroup> {
        let mut groups = self.groups.borrow_mut();
        let at = usize::from(group).checked_rem(groups.len())?;
        Some(groups.remove(at))
    }

    pub(super) fn regroup(&self, group: u8, numbers: &[u16], of: u8) -> Law {
        let Some(mut held) = self.take_group(group) else {
            return Ok(());
        };
        self.door("regroup");
        let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
        let class = class(of);
        let done = held
            .group
            .add(&keys)
            .and_then(|()| held.group.set_class(class));
        done.map_err(|error| format!("regroup: {error}"))?;
        held.keys.extend(numbers);
        held.class = class;
        self.groups.borrow_mut().push(held);
        self.all_grouped()
    }

    pub(super) fn pin_group(&self, group: u8) -> Law {
        let Some(held) = self.take_group(group) else {
            return Ok(());
        };
        self.door("pin group");
        let ids: Vec<Id> = held.ids().collect();
        let stamps = self.twin.borrow_mut().stamps(ids.len());
        let sound = {
            let seen = self.seen.borrow();
            let far = |id: &Id| seen.far.get(id).is_some_and(|far| self.is_rotten(far));
            !ids.iter().any(far)
        };
        self.asks(ids.iter().copied());
        let pins = held.group.pin();
        let pins = pins.map_err(|error| format!("pin group: {error}"))?;
        let all = {
            let mut twin = self.twin.borrow_mut();
            for (id, stamp) in ids.iter().zip(stamps) {
                match &pins {
                    Some(_) => twin.used(*id, stamp),
                    None => twin.maybe_used(*id, stamp),
                }
            }
            ids.iter().all(|id| twin.live(*id).is_some())
        };
        let sure = self.is_scheduled() && self.nested.get() == 0 && sound;
        match &pins {
            Some(pins) => {
                law!(all && pins.len() == ids.len(), "{ids:?} were pinned as one");
                self.namespace(held.door, held.ns)?.unpin(pins, false);
            }
            None => law!(!all || !sure, "{ids:?} are there and were not pinned"),
        }
        self.groups.borrow_mut().push(held);
        Ok(())
    }

    pub(super) fn ungroup(&self, group: u8) -> Law {
        let Some(held) = self.take_group(group) else {
            return Ok(());
        };
        self.door("ungroup");
        // Whatever was used with a block, it was used too.
        let mut twin = self.twin.borrow_mut();
        let now = twin.stamps(1)[0];
        held.ids().for_each(|id| twin.maybe_used(id, now));
        drop(twin);
        drop(held);
        self.all_grouped()
    }

    fn ids_in_groups(&self) -> BTreeSet<Id> {
        let groups = self.groups.borrow();
        groups.iter().flat_map(HeldGroup::ids).collect()
    }

    /// What is there of all groups is in them.
    fn all_grouped(&self) -> Law {
        if self.nested.get() > 0 {
            return Ok(());
        }
        let ids = self.ids_in_groups();
        let there = || {
            let tiers = self.owner().stats().tiers;
            let count: u64 = tiers.iter().map(|tier| tier.grouped_blocks).sum();
            let twin = self.twin.borrow();
            let live = ids.iter().filter(|id| twin.live(**id).is_some()).count() as u64;
            let exact = self.is_scheduled() && self.is_single();
            law!(
                count == live || count > 0 && !exact || live > 0 && !exact,
                "{count} blocks are in groups, and there are {live}"
            );
            Ok(())
        };
        // A client's word takes its time.
        match self.is_scheduled() {
            true => there(),
            false => eventually(there),
        }
    }

    /// What each group has lost by eviction it has lost as a whole, and those that go first have
    /// gone before `others` did. What is `involved` may have come or stayed for another reason.
    pub fn as_one(&self, evicted: &[Id], involved: &impl Fn(&Id) -> bool) -> Law {
        let groups = self.groups.borrow();
        let twin = self.twin.borrow();
        let of = |id: &Id| {
            groups
                .iter()
                .filter(|group| group.ids().any(|one| one == *id))
                .count()
        };
        let there = |id: &Id| twin.live(*id).is_some() && !involved(id);
        for group in groups.iter() {
            let ids: BTreeSet<Id> = group.ids().collect();
            let lost = ids.iter().find(|id| evicted.contains(id));
            let left = ids.iter().find(|id| there(id) && of(id) == 1);
            if let (Some(lost), Some(left)) = (lost, left) {
                return Err(format!(
                    "{lost:?} was evicted, and {left:?} of its group was not"
                ));
            }
            let plain = evicted.iter().find(|id| of(id) == 0);
            if let (Some(plain), Some(left), Class::First) = (plain, left, group.class) {
                return Err(format!(
                    "{plain:?} was evicted before {left:?}, which goes first"
                ));
            }
        }
        Ok(())
    }
}
