//! Devices that are added, drained, removed and grown.

use std::time::Duration;

use kvdepot_store::{DrainTo, Error};

use crate::world::{Law, World, law};

impl World {
    /// Whoever may ask for devices: the owner, and clients of the same user.
    fn device_door(&self) -> kvdepot_store::Depot {
        let doors = self.doors() as u64;
        let door = match doors > 1 && self.nested.get() == 0 {
            true => self.rng.borrow_mut().below(doors) as usize,
            false => 0,
        };
        if door > 0 {
            self.door("device verb by a client");
        }
        self.at(door)
    }

    fn path(&self, device: u8) -> Option<usize> {
        let media = self.media.borrow();
        (!media.is_empty()).then(|| usize::from(device) % media.len())
    }

    pub(super) fn add(&self, device: u8) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("add device");
        let medium = self.media.borrow()[at].clone();
        let door = self.device_door();
        let wanted = if medium.path.exists() { 0 } else { medium.kib };
        let added = self.with_room(wanted << 10, || {
            let answer = door.add_device(&medium.path, Some(medium.kib << 10));
            answer.map(drop)
        });
        if !added.map_err(|error| format!("add_device: {error}"))? {
            return Ok(());
        }
        self.media.borrow_mut()[at].present = true;
        self.media.borrow_mut()[at].read();
        Ok(())
    }

    pub(super) fn drain_device(&self, device: u8, others: bool) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("drain device");
        self.may_evict();
        self.cause.borrow_mut().moves = true;
        let path = self.media.borrow()[at].path.clone();
        let present = self.media.borrow()[at].present;
        let to = if others {
            DrainTo::Others
        } else {
            DrainTo::Nowhere
        };
        let (now, faults) = (self.now(), self.faults());
        // Where nobody else is at work it is known what there is to move.
        let known = self.is_scheduled() && self.is_single() && self.all_is_free();
        let here = {
            let seen = self.seen.borrow();
            let here: Vec<_> = seen.far.values().filter(|far| far.medium == at).collect();
            let sound = !here.iter().any(|far| self.is_rotten(far));
            (known && sound).then_some(here.len() as u64)
        };
        match self.device_door().drain_device(&path, to, Duration::ZERO) {
            Ok(drained) => {
                law!(present, "a device that is not there was drained");
                let went = drained.moved_blocks + drained.evicted_blocks;
                let alone = self.faults() == faults && self.now() == now;
                law!(
                    !alone || here.is_none_or(|here| here == went),
                    "{drained:?} from a device with {here:?} blocks"
                );
            }
            Err(Error::Busy {
                pinned, reserved, ..
            }) => {
                let free = self.all_is_free();
                // What a lane did not move is still there.
                let failed = self.faults() > faults;
                law!(
                    !free || failed || !self.is_single(),
                    "a drain found {pinned} blocks pinned and {reserved} reserved, by nobody"
                );
            }
            Err(Error::Input { .. }) => {}
            Err(error) => return Err(format!("drain_device: {error}")),
        }
        Ok(())
    }

    pub(super) fn remove_device(&self, device: u8, force: bool) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("remove device");
        if force {
            self.may_evict();
            self.cause.borrow_mut().moves = true;
        }
        let path = self.media.borrow()[at].path.clone();
        match self
            .device_door()
            .remove_device(&path, force, Duration::ZERO)
        {
            Ok(()) => {
                let far = |far: &crate::world::Far| far.medium == at;
                let empty = !self.seen.borrow().far.values().any(far);
                law!(
                    empty || force || self.nested.get() > 0,
                    "a device with blocks was removed"
                );
                self.media.borrow_mut()[at].present = false;
                self.media.borrow_mut()[at].read();
            }
            Err(Error::Input { .. } | Error::Busy { .. }) => {}
            Err(error) => return Err(format!("remove_device: {error}")),
        }
        Ok(())
    }

    pub(super) fn grow(&self, device: u8, kib: u16) -> Law {
        let Some(at) = self.path(device) else {
            return Ok(());
        };
        self.door("grow device");
        let medium = self.media.borrow()[at].clone();
        let door = self.device_door();
        let more = u64::from(kib);
        let kib = medium.kib + more;
        if !medium.present {
            let answer = door.grow_device(&medium.path, kib << 10);
            let refused = matches!(answer, Err(Error::Input { .. }));
            law!(refused, "a device that is not there grew: {answer:?}");
            return Ok(());
        }
        if medium.is_cut() {
            let (answer, before) = (door.grow_device(&medium.path, kib << 10), self.files()?);
            let text = answer.err().map(|error| error.to_string());
            law!(
                text.as_ref().is_some_and(|text| text.contains("truncated"))
                    && self.files()? == before,
                "a device that was cut grew: {text:?}"
            );
            return Ok(());
        }
        let grown = self.with_room(more << 10, || door.grow_device(&medium.path, kib << 10));
        if grown.map_err(|error| format!("grow_device: {error}"))? {
            self.media.borrow_mut()[at].kib = kib;
            self.media.borrow_mut()[at].read();
        }
        Ok(())
    }
}
