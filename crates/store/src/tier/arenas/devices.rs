//! Devices come and go while the tier serves.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvdepot_arena::{Arena, Error, Inode, Opening, Options, Uses, size};

use super::{Arenas, Devices};

impl Arenas {
    /// The device at a path, whatever it is called there.
    pub(crate) fn at(&self, path: &Path) -> Option<Arc<Arena>> {
        let devices = self.devices.load();
        let inode = Inode::of(path);
        let same = |arena: &&Arc<Arena>| {
            arena.path() == Some(path) || (inode.is_some() && arena.inode() == inode)
        };
        devices.0.iter().find(same).cloned()
    }

    /// Opens a device, making it when the file is missing, and serves what it holds. One that is
    /// here already takes writes again, if it was drained. `announce` runs before it is seen.
    pub(crate) fn add(
        &self,
        path: &Path,
        settings: &Options,
        number: impl FnOnce() -> u32,
        lock_wait: Duration,
        uses: &Uses,
        announce: impl FnOnce(&Arena) -> Result<(), Error>,
    ) -> Result<Opening, Error> {
        // As the configuration has them.
        let path = &std::path::absolute(path).unwrap_or_else(|_| path.into());
        let mut partings = self.changing.lock();
        if let Some(arena) = self.at(path) {
            check_again(&arena, path, settings.capacity)?;
            self.leave(&arena, false);
            return Ok(Opening::default());
        }
        let named = (self.name, number());
        let (arena, opening) = device(named, path, settings, &str::to_owned, lock_wait, uses)?;
        partings.retain(|parting| !arena.comes_back(parting));
        announce(&arena)?;
        arena.keep();
        // While nobody sees it: that takes as long as there are blocks.
        let stored = || -> u64 {
            self.arenas()
                .iter()
                .map(|other| other.stored_blocks())
                .sum()
        };
        let before = stored();
        drop_those_of(&self.arenas(), &arena);
        let placing = self.placing.write();
        let wishes = self.wishes.lock();
        let described = wishes.described.clone();
        let groups: Vec<_> = wishes.groups.values().cloned().collect();
        let devices = self.devices.load();
        if let Some(other) = devices.0.first() {
            arena.listen_like(other);
        }
        let others = devices.0.clone();
        let mut all = others.clone();
        all.push(Arc::clone(&arena));
        self.devices.store(Arc::new(Devices(all)));
        self.tell_size();
        drop((wishes, placing));
        for group in &groups {
            group.spread(true);
            arena.join(group, 0);
        }
        if stored() != before {
            // Keys may have been stored again meanwhile.
            drop_those_of(&others, &arena);
        }
        for (namespace, text) in &described {
            arena.describe(*namespace, text);
        }
        Ok(opening)
    }

    /// Takes no more writes to a device, or takes them again. False when that is so already.
    pub(crate) fn leave(&self, arena: &Arena, leaving: bool) -> bool {
        let _placing = self.placing.write();
        let was = arena.device().leaving;
        arena.set_leaving(leaving);
        was != leaving
    }

    /// Whether another device can be written.
    pub(crate) fn has_beside(&self, arena: &Arena) -> bool {
        let devices = self.devices.load();
        let others = devices
            .0
            .iter()
            .filter(|other| other.number() != arena.number());
        others
            .map(|other| other.device())
            .any(|device| !device.leaving && !device.failed)
    }

    /// Lets an empty device go, which another depot can open then. False when it is not empty, or
    /// the last one.
    pub(crate) fn take_out(&self, arena: &Arena) -> bool {
        let mut partings = self.changing.lock();
        let parting = arena.parting();
        let _placing = self.placing.write();
        let mut wishes = self.wishes.lock();
        let mut left = self.devices.load().0.clone();
        left.retain(|other| other.number() != arena.number());
        if left.is_empty() || !arena.device().empty {
            return false;
        }
        let counted = std::mem::take(&mut wishes.counted);
        wishes.counted = arena.stats().counted().plus(counted);
        wishes.departed.inherit(arena);
        if let [only] = left.as_slice() {
            wishes.groups.values().for_each(|group| group.spread(false));
            // Nobody else is to hear of them.
            let _fallen = only.fallen();
        }
        self.devices.store(Arc::new(Devices(left)));
        self.tell_size();
        arena.close();
        partings.extend(parting);
        true
    }

    /// As [`Arena::grow`], for a device that stays meanwhile: one that is gone may have another
    /// owner.
    pub(crate) fn grow(&self, arena: &Arena, path: &Path, capacity: u64) -> Result<(), Error> {
        let _changing = self.changing.lock();
        let devices = self.devices.load();
        let mut there = devices.0.iter().map(|other| other.number());
        if !there.any(|number| number == arena.number()) {
            let allowed = "a device of this depot; this one has been removed";
            return Err(Error::input("path", path.display(), allowed));
        }
        arena.grow(capacity)?;
        self.tell_size();
        Ok(())
    }

    /// Notes that this is the last tier of its pipeline.
    pub(crate) fn set_last(&self) {
        let devices = self.arenas();
        devices
            .iter()
            .for_each(|arena| arena.set_last(&devices, &self.prompts));
    }

    /// Tells the devices of a last tier how large it is now.
    fn tell_size(&self) {
        if self.arenas().iter().any(|arena| arena.is_last()) {
            self.set_last();
        }
    }

    /// Says that blocks are about to leave one device for another, so that lookups that have
    /// missed both look again.
    pub(crate) fn moving(&self) {
        self.moves.fetch_add(1, Ordering::AcqRel);
    }

    /// Leaves each key on one device: one that was being moved when its process died is on two.
    pub(crate) fn drop_doubles(&self) {
        let devices = self.devices.load();
        for index in 1..devices.0.len() {
            let arena = &devices.0[index];
            drop_those_of(&devices.0[..index], arena);
        }
    }
}

/// Drops those blocks of a device that others have.
fn drop_those_of(others: &[Arc<Arena>], arena: &Arena) {
    if others.is_empty() {
        return;
    }
    let doubles = arena.doubles(others);
    if !doubles.is_empty() {
        let path = arena.path().map(|path| path.display().to_string());
        tracing::info!(
            path,
            blocks = doubles.len(),
            "removed duplicate blocks of another device"
        );
    }
    arena.hand_over(&doubles);
}

/// Adding a device again asks for what there is.
fn check_again(arena: &Arena, path: &Path, capacity: Option<u64>) -> Result<(), Error> {
    if let Some(known) = arena.path().filter(|known| *known != path) {
        let allowed = format!(
            "a medium that is not in this depot; it is already open as {}",
            known.display()
        );
        return Err(Error::input("path", path.display(), allowed));
    }
    // As an opening compares.
    let has = arena.nominal_capacity();
    match capacity {
        Some(asked)
            if asked / kvdepot_arena::format::GRANULE * kvdepot_arena::format::GRANULE != has =>
        {
            let allowed = format!(
                "{}, the size of the existing arena (use grow_device to change it)",
                size::show(has)
            );
            Err(Error::input("capacity", size::show(asked), allowed))
        }
        _ => Ok(()),
    }
}

/// Opens one device of the tier of that name, with its number.
fn device(
    named: (&'static str, u32),
    path: &Path,
    settings: &Options,
    field: &impl Fn(&str) -> String,
    lock_wait: Duration,
    uses: &Uses,
) -> Result<(Arc<Arena>, Opening), Error> {
    let (mut arena, opening) = Arena::open(named, path, settings, field, lock_wait)?;
    arena.rank(uses);
    Ok((Arc::new(arena), opening))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use kvdepot_arena::{Class, Group, Key, NamespaceId, Wanted};
    use kvdepot_media::Checksum;

    use super::*;

    fn two(paths: &[PathBuf; 2]) -> Arenas {
        let settings = Options {
            capacity: Some(1 << 20),
            ..Options::default()
        };
        let uses = Uses::default();
        let open = |(number, path): (u32, &PathBuf)| {
            let wait = Duration::ZERO;
            let opened = device(
                ("Dax", number),
                path,
                &settings,
                &str::to_owned,
                wait,
                &uses,
            );
            let (arena, _) = opened.unwrap();
            arena.keep();
            arena
        };
        Arenas::new("Dax", (0..).zip(paths).map(open).collect())
    }

    #[test]
    fn a_device_that_was_removed_does_not_grow_under_its_next_owner() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        let tier = two(&paths);
        let arena = tier.at(&paths[1]).unwrap();
        tier.grow(&arena, &paths[1], 2 << 20).unwrap();
        assert!(tier.take_out(&arena));
        let before = std::fs::read(&paths[1]).unwrap();
        let refused = tier.grow(&arena, &paths[1], 3 << 20).unwrap_err();
        assert!(
            refused.to_string().contains("has been removed"),
            "{refused}"
        );
        assert!(std::fs::read(&paths[1]).unwrap() == before);
    }

    #[test]
    fn a_device_that_is_the_last_one_keeps_no_word_of_groups_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        let tier = two(&paths);
        let (namespace, key) = (NamespaceId([1; 16]), Key([1; 32]));
        let group = Arc::new(Group::new(namespace, Class::Ordinary));
        tier.join(&group, &[key]);
        assert!(tier.take_out(&tier.at(&paths[1]).unwrap()));
        let arena = tier.at(&paths[0]).unwrap();
        let wanted = Wanted {
            key,
            len: 4096,
            parts: 1,
            stamp: 0,
            copy: false,
            evict: true,
        };
        let mut made = arena.reserve(namespace, &[wanted]).unwrap();
        let token = made.pop().unwrap().ok().unwrap().hand_out().token;
        let stored = arena.commit(&[(token, Checksum([0; 16]))], false);
        assert_eq!((stored, arena.evict_these(&[token])), (vec![true], 1));
        tier.dissolve(&group);
        assert_eq!(Arc::strong_count(&group), 1);
    }
}
