//! What one way to a medium has written the other one reads, and an arena that is not mapped needs
//! no address.

use crate::common::{self, ACCESSES, Open, Site, is_mapped};
use kvdepot_arena::inspect::Inspection;
use kvdepot_arena::{Access, Durability, Options};
use kvdepot_testkit::rot::Patient;

const LENS: [usize; 6] = [1, 100, 4096, 4097, 70_000, 300_001];

fn blocks() -> Vec<(u64, usize)> {
    (1..).zip(LENS).collect()
}

#[test]
fn either_access_opens_what_the_other_one_wrote() {
    for (first, second) in [(0, 1), (1, 0)] {
        for durability in [Durability::Process, Durability::Power] {
            let mut site = Site::new(ACCESSES[first], 4 << 20, 200);
            site.options.durability = durability;
            let open = site.open();
            open.arena.describe(common::NAMESPACE, "model=one");
            assert_eq!(open.put(&blocks()).len(), LENS.len());
            assert_eq!(open.remove(3), 1);
            let generation = open.opening;
            drop(open);
            site.options.access = ACCESSES[second];
            let open = site.open();
            assert_eq!(
                (open.opening.blocks, open.opening.damaged),
                (5, 0),
                "{generation:?}"
            );
            for (number, _) in blocks() {
                assert_eq!(open.serves(number), number != 3, "{number}");
            }
            assert_eq!(open.arena.descriptions().unwrap()[0].1, "model=one");
            assert_eq!(open.put(&[(3, 5000), (9, 8192)]), [3, 9]);
            drop(open);
            // And the tools, which map it.
            let inspection = Inspection::open(&site.path()).unwrap();
            let (found, damaged) = inspection.blocks().unwrap();
            assert_eq!((found.len(), damaged.len()), (7, 0));
            site.options.access = ACCESSES[first];
            let open = site.open();
            assert!(
                [1, 2, 3, 4, 5, 6, 9]
                    .into_iter()
                    .all(|one| open.serves(one))
            );
            open.assert_at_rest();
        }
    }
}

#[test]
fn both_accesses_leave_the_same_bytes() {
    let tables = ACCESSES.map(|access| {
        let site = Site::new(access, 1 << 20, 64);
        let open = site.open();
        open.put(&blocks()[..4]);
        open.remove(2);
        let (layout, path) = (open.arena.layout(), site.path());
        drop(open);
        let patient = Patient::open(&path);
        let created = |slot: u32| patient.read(layout.record(slot) + 4, 4);
        // All but what differs by the time and the arena: state, extents, key, length, checksum.
        let records = (0..64).map(|slot| {
            let bytes = patient.read(layout.record(slot), 120);
            assert!(
                bytes[0] == 0 || created(slot) != [0; 4],
                "when it was stored"
            );
            [&bytes[..4], &bytes[8..]].concat()
        });
        let records: Vec<Vec<u8>> = records.collect();
        (records, patient.len())
    });
    assert!(tables[0] == tables[1]);
}

#[test]
fn an_arena_without_addresses_is_never_mapped_and_grows() {
    for access in ACCESSES {
        let site = Site::new(access, 1 << 20, 64);
        let open = site.open();
        assert_eq!(is_mapped(&site.path()), access == Access::Mapped);
        assert_eq!(open.arena.mapping().is_ok(), access == Access::Mapped);
        assert_eq!(open.put(&[(1, 50_000)]), [1]);
        assert!(
            open.put(&[(2, 1 << 20)]).is_empty(),
            "larger than all of it"
        );
        open.arena.grow(3 << 20).unwrap();
        assert_eq!(open.put(&[(2, 1 << 20)]), [2]);
        assert_eq!(is_mapped(&site.path()), access == Access::Mapped);
        drop(open);
        let options = Options {
            capacity: None,
            ..site.options.clone()
        };
        let open = Open::at(&site.path(), &options);
        assert!(open.serves(1) && open.serves(2));
        assert_eq!(open.arena.nominal_capacity(), 3 << 20);
    }
}

#[test]
fn a_full_arena_evicts_and_a_table_of_one_page_is_written_by_many() {
    for access in ACCESSES {
        for durability in [Durability::Process, Durability::Power] {
            let mut site = Site::new(access, 2 << 20, 32);
            site.options.durability = durability;
            let open = site.open();
            std::thread::scope(|scope| {
                for thread in 0..4_u64 {
                    let open = &open;
                    scope.spawn(move || {
                        for turn in 0..40 {
                            let number = 1 + thread * 1000 + turn;
                            let stored = open.put(&[(number, 3000), (number + 500, 9000)]);
                            assert_eq!(stored, [number, number + 500]);
                            if turn % 5 == 0 {
                                open.remove(number);
                            }
                        }
                    });
                }
            });
            open.assert_at_rest();
            assert!(open.arena.stats().evicted_blocks > 100);
            let there: Vec<u64> = (0..5000).filter(|number| open.serves(*number)).collect();
            drop(open);
            let open = site.open();
            assert_eq!((open.opening.damaged, open.opening.outranked), (0, 0));
            let again: Vec<u64> = (0..5000).filter(|number| open.serves(*number)).collect();
            assert_eq!(there, again, "{access:?} {durability:?}");
            assert!(there.len() > 8);
        }
    }
}
