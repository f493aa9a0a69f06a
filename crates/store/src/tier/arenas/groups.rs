//! Groups of a tier, on all its devices.

use std::sync::Arc;

use kvdepot_arena::{Class, Group, Key};

use super::{Arenas, Devices};

impl Arenas {
    /// Puts blocks into a group, which devices that come later are told of, too.
    pub(crate) fn join(&self, group: &Arc<Group>, keys: &[Key]) {
        let mut wishes = self.wishes.lock();
        let from = group.add(keys);
        wishes.groups.insert(name(group), Arc::clone(group));
        let devices = self.devices.load_full();
        group.spread(devices.only().is_none());
        drop(wishes);
        devices.0.iter().for_each(|arena| arena.join(group, from));
    }

    pub(crate) fn set_class(&self, group: &Arc<Group>, class: Class) {
        group.set_class(class);
        let devices = self.devices();
        devices.0.iter().for_each(|arena| arena.rank_again(group));
    }

    /// Ends a group.
    pub(crate) fn dissolve(&self, group: &Arc<Group>) {
        group.dissolve();
        // Who adds a device after this does not know it.
        self.wishes.lock().groups.remove(&name(group));
        let devices = self.devices();
        devices.0.iter().for_each(|arena| arena.part(group));
    }

    /// Has groups leave all devices that have left one. Waits for the media.
    pub(crate) fn tell_fallen(&self) {
        let devices: Arc<Devices> = self.devices();
        if devices.only().is_some() {
            return;
        }
        for arena in &devices.0 {
            for group in arena.fallen() {
                let others = devices.0.iter();
                let others = others.filter(|other| other.number() != arena.number());
                others.for_each(|other| other.let_fall(&group));
            }
        }
    }
}

fn name(group: &Arc<Group>) -> usize {
    Arc::as_ptr(group).addr()
}
