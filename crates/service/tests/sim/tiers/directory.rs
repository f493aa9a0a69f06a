//! What lies in the directory of `Posix`: nothing but whole blocks that somebody has put, within
//! the capacity, and none goes for want of room that is there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kvdepot_testkit::sim::twin::Id;

use super::memory::Bytes;
use super::posix;
use super::world::World;
use crate::world::{Law, law};

/// Its capacity where it has room for all.
const ROOMY: u64 = 64 << 20;

/// Bytes of a block's file beyond its payload, with what parts are aligned to.
const MARGIN: u64 = 16 << 10;

/// What was there at the last look.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The blocks with the numbers of their files.
    files: BTreeMap<Id, u64>,
    /// How many the depots have evicted.
    evicted: u64,
    /// When that was.
    at: u64,
    /// What may be removed since, though it was asked for before.
    going: BTreeSet<Id>,
}

/// What lies in a directory now.
#[derive(Default)]
struct Found {
    files: BTreeMap<Id, u64>,
    used: u64,
}

impl World {
    fn directory(&self) -> Option<&Path> {
        let shelf = self.shelves.last()?;
        (self.shape.bytes == Bytes::Posix).then(|| shelf.path())
    }

    pub fn room(&self) -> u64 {
        match self.shape.room {
            0 => ROOMY,
            kib => kib << 10,
        }
    }

    /// Whether blocks go for want of room there.
    pub fn collects(&self) -> bool {
        self.shape.room > 0 && self.shape.bytes == Bytes::Posix
    }

    /// Somebody opens or closes it: what went meanwhile is not known.
    pub fn forget_seen(&self) {
        self.seen.borrow_mut().take();
    }

    /// Blocks that the depots that are open have evicted there.
    fn evicted(&self) -> u64 {
        let disk = self.shelves.last().and_then(|shelf| shelf.disk());
        let mine = disk.map_or(0, |disk| disk.tier.stats().evicted_blocks);
        let sharer = self.sharer.borrow().clone();
        mine + sharer.map_or(0, |depot| depot.stats().tiers[0].evicted_blocks)
    }

    pub fn within_room(&self) -> Law {
        let Some(path) = self.directory() else {
            return Ok(());
        };
        let before = self.seen.borrow().clone();
        let found = self.find(path, before.as_ref())?;
        let room = self.room();
        law!(
            found.used <= room + room / 20,
            "{} bytes lie in a directory for {room}",
            found.used
        );
        let evicted = self.evicted();
        if let Some(before) = before {
            if evicted > before.evicted {
                self.fault("collection");
            }
            self.went(&before, &found, evicted - before.evicted)?;
        }
        let may_go = |id: &Id| self.block(*id).removing > 0 || !self.is_safe(*id);
        let going = found.files.keys().copied().filter(may_go).collect();
        self.freed.set(self.nested.get() > 0 && self.freed.get());
        *self.seen.borrow_mut() = Some(Seen {
            files: found.files,
            evicted,
            at: self.now.get(),
            going,
        });
        Ok(())
    }

    /// What has gone was removed, or evicted for want of room.
    fn went(&self, before: &Seen, found: &Found, evicted: u64) -> Law {
        let unasked = |(id, _): &(&Id, &u64)| {
            let asked = self.block(**id).disturbed >= before.at || before.going.contains(*id);
            !found.files.contains_key(*id) && !asked && !self.rotted.borrow().contains(*id)
        };
        let gone: Vec<Id> = before
            .files
            .iter()
            .filter(unasked)
            .map(|(id, _)| *id)
            .collect();
        law!(
            gone.len() as u64 <= evicted,
            "{gone:?} have gone, and {evicted} blocks were evicted"
        );
        // What fails, or is answered too late, gives its room back.
        let shelf = self.shelves.last();
        let is_late = shelf.is_some_and(|shelf| shelf.mood().late > 0 || shelf.counts().1 > 0);
        let excused = self.freed.get() || !self.calm.get() || is_late;
        // One file too many goes, and room for one is made; the count is right within some percent.
        let margin = 2 * (self.shape.largest + MARGIN);
        let least = (self.room() * 86 / 100).saturating_sub(margin);
        law!(
            evicted == 0 || excused || found.used >= least,
            "{evicted} blocks were evicted, and {} bytes are left of {}",
            found.used,
            self.room()
        );
        Ok(())
    }

    /// What is published is whole.
    fn find(&self, path: &Path, before: Option<&Seen>) -> Law<Found> {
        let names = World::all_ids().map(|id| (posix::name_of(&World::identity(id)), id));
        let names: BTreeMap<String, Id> = names.collect();
        let mut found = Found::default();
        for (name, inode, bytes) in files(&path.join("blocks")) {
            found.used += bytes;
            let Some(id) = names.get(&name) else {
                return Err(format!("{name} lies there, which nobody has put"));
            };
            let same = before.and_then(|before| before.files.get(id)) == Some(&inode);
            let whole = same || self.rotted.borrow().contains(id) || {
                let identity = World::identity(*id);
                posix::read(path, &identity).is_some_and(|stored| stored.is_sound(&identity))
            };
            law!(whole, "{id:?} is published, and not whole");
            let twice = found.files.insert(*id, inode);
            law!(twice.is_none(), "{id:?} lies there twice");
        }
        let new = files(&path.join("new"));
        found.used += new.iter().map(|(_, _, bytes)| bytes).sum::<u64>();
        Ok(found)
    }
}

/// The files in the folders of a folder: their names, numbers and bytes.
fn files(path: &Path) -> Vec<(String, u64, u64)> {
    let folders = fs::read_dir(path).into_iter().flatten();
    let files = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()));
    let each = files.flatten().filter_map(|file| {
        let file = file.unwrap();
        let about = file.metadata().ok()?;
        let name = file.file_name().into_string().ok()?;
        Some((name, about.ino(), about.len().next_multiple_of(4096)))
    });
    each.collect()
}
