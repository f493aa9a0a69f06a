//! Bytes that are not what was written: blocks that do not verify are no answers, whichever way the
//! medium is read, and what is left is served.

use std::time::Duration;

use crate::common::raw::Raw;
use crate::common::{ACCESSES, Open, Site, key};
use kvdepot_arena::{Access, Arena, Error, Options};
use kvdepot_testkit::bytes::is_content;
use kvdepot_testkit::rot::{DAMAGES, Damage, Patient};
use kvdepot_testkit::{Rng, rounds};

const BLOCKS: u64 = 12;

fn filled(access: Access) -> (Site, Raw) {
    let site = Site::new(access, 2 << 20, 64);
    let blocks: Vec<(u64, usize)> = (1..=BLOCKS)
        .map(|one| (one, one as usize * 10_000))
        .collect();
    assert_eq!(site.open().put(&blocks).len(), blocks.len());
    let raw = Raw::open(&site.path());
    (site, raw)
}

/// The numbers of the blocks whose bytes are right; none may be delivered wrong.
fn right(open: &Open) -> Vec<u64> {
    let is_right = |number: &u64| {
        let bytes = open.get(*number);
        let wrong = bytes.as_ref().filter(|bytes| !is_content(*number, bytes));
        assert!(wrong.is_none(), "wrong bytes of {number}");
        bytes.is_some()
    };
    (1..=BLOCKS).filter(is_right).collect()
}

fn refusal(path: &std::path::Path, options: &Options) -> Error {
    let named = ("Dax", 0);
    let opened = Arena::open(named, path, options, &str::to_owned, Duration::ZERO);
    opened.err().unwrap()
}

#[test]
fn damaged_payloads_are_no_answers() {
    let mut rng = Rng::for_test("corrupt::damaged_payloads_are_no_answers");
    for access in ACCESSES {
        for _ in 0..rounds(4) {
            for damage in DAMAGES {
                let (site, raw) = filled(access);
                let victim = rng.between(1, BLOCKS);
                let (_, record) = raw.live(&key(victim)).unwrap();
                let (at, len) = record.extents.iter().next().unwrap();
                raw.file.damage(damage, at, len.min(record.len), &mut rng);
                let wanted: Vec<u64> = (1..=BLOCKS).filter(|one| *one != victim).collect();
                assert_eq!(right(&site.open()), wanted, "{access:?} {damage:?}");
            }
        }
    }
}

#[test]
fn damaged_records_cost_their_blocks_alone() {
    let mut rng = Rng::for_test("corrupt::damaged_records_cost_their_blocks_alone");
    for access in ACCESSES {
        for _ in 0..rounds(6) {
            let (site, raw) = filled(access);
            let victim = rng.between(1, BLOCKS);
            let (slot, _) = raw.live(&key(victim)).unwrap();
            raw.file
                .damage(Damage::Flip, raw.layout.record(slot), 120, &mut rng);
            let open = site.open();
            assert_eq!((open.opening.blocks, open.opening.damaged), (BLOCKS - 1, 1));
            assert!(!open.has(victim));
            assert_eq!(right(&open).len() as u64, BLOCKS - 1);
            drop(open);
            assert_eq!(site.open().opening.damaged, 0, "it was mended");
        }
    }
}

#[test]
fn one_superblock_is_enough_and_none_is_refused() {
    for access in ACCESSES {
        for copy in [0, 4096] {
            let (site, raw) = filled(access);
            raw.file.write(copy + 40, &[0xA5; 8]);
            assert_eq!(right(&site.open()).len() as u64, BLOCKS);
            for copy in [0, 4096] {
                raw.file.write(copy + 40, &[0xA5; 8]);
            }
            let error = refusal(&site.path(), &site.options);
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}

#[test]
fn a_file_that_is_cut_off_serves_what_is_left() {
    for access in ACCESSES {
        let (site, raw) = filled(access);
        let mut ends: Vec<u64> = (1..=BLOCKS)
            .filter_map(|one| raw.live(&key(one)))
            .flat_map(|(_, record)| record.extents.iter().collect::<Vec<_>>())
            .map(|(at, len)| at + len)
            .collect();
        ends.sort_unstable();
        let cut = ends[7] - 4096 / 2;
        // Under the open arena, and before the next one.
        let open = site.open();
        Patient::open(&site.path()).truncate(cut);
        let left = right(&open);
        assert!((3..BLOCKS as usize).contains(&left.len()), "{left:?}");
        drop(open);
        let options = Options {
            capacity: None,
            ..site.options.clone()
        };
        let open = Open::at(&site.path(), &options);
        assert_eq!(right(&open), left, "{access:?}");
        drop(open);
        Patient::open(&site.path()).truncate(70_000);
        let error = refusal(&site.path(), &site.options);
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

#[test]
fn a_device_that_is_no_file_is_refused_without_addresses() {
    let options = Options {
        access: Access::Direct,
        ..Options::default()
    };
    let error = refusal(std::path::Path::new("/dev/null"), &options);
    assert!(error.to_string().contains("/dev/null"), "{error}");
}
