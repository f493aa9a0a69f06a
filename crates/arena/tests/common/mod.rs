//! An arena with a copier, and nothing above: each test runs once for each way to the medium.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    clippy::unwrap_used,
    reason = "no test uses all of it, and each fails by panicking"
)]

pub mod raw;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_alloc::Hint;
use kvdepot_arena::inspect::{Inspection, Verified};
use kvdepot_arena::{
    Access, Arena, Key, NamespaceId, Opening, Options, Place, Reserved, Token, Uses, Wanted, parts,
};
use kvdepot_media::checksum::Checksum;
use kvdepot_media::{Buffer, Copier, CopierConfig};
use kvdepot_testkit::bytes::content;
use tempfile::TempDir;

pub const NAMESPACE: NamespaceId = NamespaceId([7; 16]);

/// How a medium can be read and written.
pub const ACCESSES: [Access; 2] = [Access::Mapped, Access::Direct];

pub fn key(number: u64) -> Key {
    let mut key = [3; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

pub fn number(key: &Key) -> u64 {
    u64::from_le_bytes(key.0[..8].try_into().unwrap())
}

/// A directory for an arena that is not there yet.
pub struct Site {
    dir: TempDir,
    pub options: Options,
}

impl Site {
    pub fn new(access: Access, capacity: u64, records: u64) -> Site {
        Site {
            dir: tempfile::tempdir().unwrap(),
            options: Options {
                capacity: Some(capacity),
                records: Some(records),
                access,
                ..Options::default()
            },
        }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("arena")
    }

    /// The arena with the copier that its blocks are moved by.
    pub fn open(&self) -> Open {
        Open::at(&self.path(), &self.options)
    }
}

/// An arena that is open.
pub struct Open {
    pub arena: Arc<Arena>,
    pub opening: Opening,
    copier: Copier,
    uses: Uses,
}

impl Open {
    pub fn at(path: &Path, options: &Options) -> Open {
        let wait = Duration::from_secs(10);
        let opened = Arena::open(("Dax", 0), path, options, &str::to_owned, wait);
        let (mut arena, opening) = opened.unwrap();
        let uses = Uses::default();
        arena.rank(&uses);
        arena.keep();
        let mut config = CopierConfig::default();
        config.lanes = 1;
        Open {
            arena: Arc::new(arena),
            opening,
            copier: Copier::new(config).unwrap(),
            uses,
        }
    }

    /// Room for blocks of these numbers and lengths, of those that are not there and find some.
    pub fn reserve(&self, blocks: &[(u64, usize)]) -> Vec<Reserved> {
        let stamps = self.uses.asked();
        let wanted = |(at, (number, len)): (usize, &(u64, usize))| Wanted {
            key: key(*number),
            len: *len as u64,
            parts: 1,
            stamp: stamps.of(at),
            copy: false,
            evict: true,
        };
        let wanted: Vec<Wanted> = blocks.iter().enumerate().map(wanted).collect();
        let answers = self.arena.reserve(NAMESPACE, &wanted).unwrap_or_else(|| {
            let make = |wanted: &Wanted| {
                let space = self.arena.make_space(NAMESPACE, wanted, Hint::default());
                space.ok().map(|space| (*wanted, space))
            };
            let spaces = wanted.iter().filter_map(make).collect();
            self.arena.reserve_in(NAMESPACE, spaces)
        });
        answers.into_iter().filter_map(Result::ok).collect()
    }

    /// Moves the content of blocks into their places, and answers their checksums.
    pub fn fill(&self, places: &[Place]) -> Vec<(Token, Checksum)> {
        let mut batch = self.copier.batch();
        for (tag, place) in places.iter().enumerate() {
            let bytes = content(number(&place.identity.key), place.len as usize);
            let mut to = Vec::new();
            self.arena.buffers(place, 0..place.len, &mut to).unwrap();
            let id = parts::part_id(&place.identity, 0, 1);
            let from = [Buffer::from_vec(bytes)];
            batch.part(&id, &from, &to, None, tag as u32).unwrap();
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        let ticket = self.copier.submit(batch, move |done| {
            sender.send(done.parts().collect::<Vec<_>>()).unwrap();
        });
        assert!(ticket.wait(None));
        let mut filled = Vec::new();
        for (tag, part) in receiver.recv().unwrap() {
            filled.push((places[tag as usize].token, part.unwrap().checksum));
        }
        filled
    }

    /// Stores blocks; the numbers of those that are committed.
    pub fn put(&self, blocks: &[(u64, usize)]) -> Vec<u64> {
        let reserved = self.reserve(blocks);
        let places: Vec<Place> = reserved.into_iter().map(|mut one| one.hand_out()).collect();
        let filled = self.fill(&places);
        let committed = self.arena.commit(&filled, false);
        let of = |token: Token| places.iter().find(|place| place.token == token).unwrap();
        let kept = filled.iter().zip(committed).filter(|(_, kept)| *kept);
        kept.map(|((token, _), _)| number(&of(*token).identity.key))
            .collect()
    }

    pub fn has(&self, number: u64) -> bool {
        let mut found = [false];
        self.arena.contains(NAMESPACE, &[key(number)], &mut found);
        found[0]
    }

    pub fn remove(&self, number: u64) -> usize {
        self.arena.remove(NAMESPACE, &[key(number)])
    }

    /// The bytes of a block, unless it is a miss or does not verify.
    pub fn get(&self, number: u64) -> Option<Vec<u8>> {
        let (mut found, mut place) = ([false], None);
        let pinned = |_, at: Place| place = Some(at);
        let stamps = self.uses.asked();
        self.arena.pin(
            NAMESPACE,
            &[key(number)],
            &mut found,
            |at| stamps.of(at),
            pinned,
        );
        let place = place?;
        let to = Buffer::from_vec(vec![0; place.len as usize]);
        let mut from = Vec::new();
        let asked = self.arena.buffers(&place, 0..place.len, &mut from);
        let moved = asked.map(|()| {
            let mut batch = self.copier.batch();
            let id = parts::part_id(&place.identity, 0, 1);
            let expected = Some(place.checksum);
            batch
                .part(&id, &from, std::slice::from_ref(&to), expected, 0)
                .unwrap();
            let (sender, receiver) = std::sync::mpsc::channel();
            let ticket = self.copier.submit(batch, move |done| {
                sender.send(done.is_clean()).unwrap();
            });
            assert!(ticket.wait(None));
            receiver.recv().unwrap()
        });
        self.arena.unpin([place.token].into_iter());
        moved.unwrap_or(false).then(|| to.to_vec())
    }

    /// Whether a block is there, whole and right; false for a miss, and nothing else is allowed.
    pub fn serves(&self, number: u64) -> bool {
        let there = self.has(number);
        let bytes = self.get(number);
        assert_eq!(bytes.is_some(), there, "block {number} does not verify");
        let right = |bytes: Vec<u8>| assert!(bytes == content(number, bytes.len()), "{number}");
        bytes.map(right).is_some()
    }

    /// What is there without being a block is nothing.
    pub fn assert_at_rest(&self) {
        let stats = self.arena.stats();
        assert_eq!((stats.pinned_blocks, stats.reserved_blocks), (0, 0));
    }
}

/// Whether a medium is mapped in this process.
pub fn is_mapped(path: &Path) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .any(|line| line.ends_with(path.to_str().unwrap()))
}

/// Reads an arena as the tools do.
pub fn verify(path: &Path) -> Verified {
    let copier = Copier::new(CopierConfig::default()).unwrap();
    let inspection = Inspection::open(path).unwrap();
    inspection.verify(&copier, |_, _| true).unwrap()
}
