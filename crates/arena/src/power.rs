//! Power cuts: what was written and not synced is there, torn, or not, in any order. A medium holds
//! back what was written since the last sync of its pages; at any write or sync the power fails,
//! and what is left is opened.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvdepot_alloc::Hint;
use kvdepot_media::checksum::{self, PartId};
use kvdepot_testkit::bytes::{content, is_content};
use kvdepot_testkit::{Rng, rounds};
use parking_lot::Mutex;

use crate::body::Arena;
use crate::index::Uses;
use crate::key::{Key, NamespaceId};
use crate::medium::Shared;
use crate::medium::watched::{Watched, Watcher};
use crate::options::{Access, Durability, Options};
use crate::parts;
use crate::place::{Place, Wanted};

const NAMESPACE: NamespaceId = NamespaceId([4; 16]);
const CAPACITY: u64 = 512 << 10;
const RECORDS: u64 = 40;
/// What a device writes whole.
const SECTOR: usize = 512;
const PAGE: u64 = 4096;

/// What the power leaves, as far as it is known.
struct Held {
    /// What is synced.
    durable: Vec<u8>,
    pending: Vec<(u64, Vec<u8>)>,
    rng: Rng,
    arena: Weak<Arena>,
    acknowledged: HashSet<u64>,
    removing: HashSet<u64>,
    removed: HashSet<u64>,
    cuts: Vec<Cut>,
}

/// A power cut: the medium afterwards, the blocks that must be there, and those that must not.
struct Cut {
    image: Vec<u8>,
    must: Vec<u64>,
    gone: HashSet<u64>,
}

impl Held {
    fn wrote(&mut self, at: u64, bytes: &[u8]) {
        self.pending.push((at, bytes.to_vec()));
        self.may_fail();
    }

    /// What lies in the pages of these ranges is durable.
    fn synced(&mut self, ranges: &[(u64, u64)]) {
        self.may_fail();
        let pages: HashSet<u64> = ranges
            .iter()
            .flat_map(|(at, len)| at / PAGE..(at + len).div_ceil(PAGE))
            .collect();
        let is_synced = |(at, bytes): &mut (u64, Vec<u8>)| {
            let end = *at + bytes.len() as u64;
            (*at / PAGE..end.div_ceil(PAGE)).all(|page| pages.contains(&page))
        };
        for (at, bytes) in self.pending.extract_if(.., is_synced) {
            self.durable[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        self.may_fail();
    }

    fn may_fail(&mut self) {
        if !self.rng.once_in(12) {
            return;
        }
        let Some(arena) = self.arena.upgrade() else {
            return;
        };
        let mut image = self.durable.clone();
        let mut pending: Vec<&(u64, Vec<u8>)> = self.pending.iter().collect();
        while !pending.is_empty() {
            // In any order, and each sector or not.
            let (at, bytes) = pending.swap_remove(self.rng.below(pending.len() as u64) as usize);
            let fate = self.rng.below(3);
            let mut begin = 0;
            while begin < bytes.len() {
                let room = SECTOR - (*at as usize + begin) % SECTOR;
                let end = bytes.len().min(begin + room);
                if fate == 0 || (fate == 1 && self.rng.once_in(2)) {
                    image[*at as usize + begin..][..end - begin]
                        .copy_from_slice(&bytes[begin..end]);
                }
                begin = end;
            }
        }
        let is_there = |number: &u64| {
            let mut found = [false];
            arena.contains(NAMESPACE, &[key(*number)], &mut found);
            found[0] && !self.removing.contains(number)
        };
        let must = self.acknowledged.iter().copied().filter(is_there);
        self.cuts.push(Cut {
            image,
            must: must.collect(),
            gone: self.removed.clone(),
        });
    }
}

/// What loses power.
struct Power(Arc<Mutex<Held>>);

impl Watcher for Power {
    fn writes(&self, at: u64, bytes: &[u8]) {
        self.0.lock().wrote(at, bytes);
    }

    fn syncs(&self, ranges: &[(u64, u64)]) {
        self.0.lock().synced(ranges);
    }
}

fn key(number: u64) -> Key {
    let mut key = [1; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

fn id(number: u64) -> PartId {
    PartId {
        namespace: NAMESPACE.0,
        key: key(number).0,
        part: 0,
        parts: 1,
    }
}

fn open(path: &Path, access: Access) -> Arc<Arena> {
    let options = Options {
        capacity: Some(CAPACITY),
        records: Some(RECORDS),
        durability: Durability::Power,
        access,
        ..Options::default()
    };
    let wait = Duration::ZERO;
    let opened = Arena::open(("Dax", 0), path, &options, &str::to_owned, wait);
    let (mut arena, opening) = opened.unwrap();
    assert_eq!(opening.outranked, 0, "two records of the same bytes");
    arena.rank(&Uses::default());
    arena.keep();
    Arc::new(arena)
}

/// Stores a block as any mover would, but for its own writes to the medium.
fn put(arena: &Arc<Arena>, number: u64, len: usize) -> bool {
    let wanted = Wanted {
        key: key(number),
        len: len as u64,
        parts: 1,
        stamp: number,
        copy: false,
        evict: true,
    };
    let mut answers = arena.reserve(NAMESPACE, &[wanted]).unwrap_or_else(|| {
        let space = arena.make_space(NAMESPACE, &wanted, Hint::default());
        let space = space.into_iter().map(|space| (wanted, space));
        arena.reserve_in(NAMESPACE, space.collect())
    });
    let Some(Ok(mut reserved)) = answers.pop() else {
        return false;
    };
    let place: Place = reserved.hand_out();
    let payload = content(number, len);
    let mut rest = payload.as_slice();
    for (at, len) in parts::ranges(&place.extents, 0, place.len) {
        let (now, later) = rest.split_at(len as usize);
        arena.medium.load().write_at(at, now).unwrap();
        rest = later;
    }
    let sum = checksum::of(&id(number), &payload);
    arena.commit(&[(place.token, sum)], false) == [true]
}

fn look(cut: &Cut, path: &PathBuf, access: Access) {
    std::fs::write(path, &cut.image).unwrap();
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let arena = open(path, access);
    let mut there = HashSet::new();
    for token in arena.by_use() {
        let place = arena.pin_token(token).unwrap();
        let mut bytes = Vec::new();
        for (at, len) in parts::ranges(&place.extents, 0, place.len) {
            let mut some = vec![0; len as usize];
            arena.medium.load().read_at(at, &mut some).unwrap();
            bytes.append(&mut some);
        }
        arena.unpin([token].into_iter());
        let number = u64::from_le_bytes(place.identity.key.0[..8].try_into().unwrap());
        assert!(is_content(number, &bytes), "{number} is not whole");
        assert!(checksum::of(&id(number), &bytes) == place.checksum);
        assert!(!cut.gone.contains(&number), "{number} was removed");
        there.insert(number);
    }
    let lost: Vec<&u64> = cut.must.iter().filter(|one| !there.contains(one)).collect();
    assert_eq!(lost, [&0; 0], "acknowledged and lost");
}

#[test]
fn a_power_cut_at_any_write_loses_nothing_acknowledged_and_shows_nothing_torn() {
    let mut rng =
        Rng::for_test("a_power_cut_at_any_write_loses_nothing_acknowledged_and_shows_nothing_torn");
    let (mut cuts, mut must) = (0, 0);
    for round in 0..rounds(4) {
        let access = [Access::Mapped, Access::Direct][round as usize % 2];
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let arena = open(&path, access);
        let held = Arc::new(Mutex::new(Held {
            durable: std::fs::read(&path).unwrap(),
            pending: Vec::new(),
            rng: rng.fork(),
            arena: Arc::downgrade(&arena),
            acknowledged: HashSet::new(),
            removing: HashSet::new(),
            removed: HashSet::new(),
            cuts: Vec::new(),
        }));
        let medium = Arc::clone(&arena.medium.load_full());
        let failing: Shared = Arc::new(Watched(Shared::clone(&medium), Power(Arc::clone(&held))));
        arena.medium.store(Arc::new(failing));
        for number in 1..120 {
            let len = rng.between(1, 24_000) as usize;
            if put(&arena, number, len) {
                held.lock().acknowledged.insert(number);
            }
            if rng.once_in(4) {
                let victim = rng.between(1, number);
                held.lock().removing.insert(victim);
                if arena.remove(NAMESPACE, &[key(victim)]) == 1 {
                    held.lock().removed.insert(victim);
                }
            }
        }
        assert!(arena.stats().evicted_blocks > 10);
        drop(arena);
        let found = std::mem::take(&mut held.lock().cuts);
        for cut in &found {
            look(
                cut,
                &dir.path().join("cut"),
                *rng.pick(&[Access::Mapped, Access::Direct]),
            );
            (cuts, must) = (cuts + 1, must + cut.must.len());
        }
    }
    assert!(cuts > 40 && must > 5 * cuts, "{cuts} cuts, {must} blocks");
}
