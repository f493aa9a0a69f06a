//! Media that were there before the arena: which become one unasked, which only when told to, and
//! which only when told twice.

use std::os::unix::fs::FileExt;

use crate::common::raw::Raw;
use crate::common::{Place, has, namespace, put};
use kvdepot_store::format::layout;
use kvdepot_store::{Depot, Error};

const LEN: usize = 20_000;

/// A place with a file of zeros, as `truncate` makes it.
fn truncated(len: u64) -> Place {
    let place = Place::new("Dax", "", "").without("dax", "capacity");
    let file = std::fs::File::create(place.arena()).unwrap();
    file.set_len(len).unwrap();
    place
}

/// Makes an arena with a block and closes it.
fn filled() -> Place {
    let place = Place::new("Dax", "", "4MiB");
    let depot = place.open();
    assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    place
}

fn refusal(place: &Place) -> Error {
    let before = std::fs::read(place.arena()).unwrap();
    let error = Depot::open(&place.config()).err().unwrap();
    assert!(std::fs::read(place.arena()).unwrap() == before, "touched");
    error
}

#[test]
fn a_medium_of_zeros_becomes_an_arena_unasked() {
    for setting in ["false", "true", "force"] {
        let place = truncated(4 << 20).with("dax", "format", setting);
        let depot = place.open();
        assert!(depot.opening().created);
        let said = format!("Dax 4 MiB at {}", place.arena().display());
        assert_eq!(depot.description(), said, "nobody chose its size");
        assert_eq!(put(&namespace(&depot), &[1, 2], LEN), [true; 2]);
        depot.close();
        let again = place.with("dax", "format", "false").open();
        assert!(!again.opening().created);
        assert!(has(&namespace(&again), &[1, 2], LEN));
    }
}

#[test]
fn one_byte_where_an_arena_would_have_left_it_is_enough_to_be_asked() {
    let data = Raw::open(&filled().arena()).layout.data;
    for at in [
        0,
        layout::SUPERBLOCK_B + 4095,
        layout::OWNER,
        layout::DIRECTORY + 77,
        layout::TABLE,
        data - 1,
    ] {
        let place = truncated(4 << 20);
        let file = std::fs::File::options().write(true).open(place.arena());
        file.unwrap().write_all_at(&[1], at).unwrap();
        let text = refusal(&place).to_string();
        assert!(text.contains("not a kvdepot arena"), "{at}: {text}");
        assert!(text.contains("format: true"), "{at}: {text}");
        let depot = place.with("dax", "format", true).open();
        assert!(depot.opening().created, "{at}");
        assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    }
    // What extents would hold does not matter.
    let place = truncated(4 << 20);
    let file = std::fs::File::options().write(true).open(place.arena());
    file.unwrap().write_all_at(&[1], data).unwrap();
    assert!(place.open().opening().created);
}

#[test]
fn an_arena_whose_superblocks_are_gone_is_no_new_medium() {
    let place = filled().without("dax", "capacity");
    let raw = Raw::open(&place.arena());
    raw.file.write(0, &[0; layout::TABLE as usize]);
    assert!(matches!(refusal(&place), Error::Corrupt { .. }));
    // Nor for a table that would end before its records.
    let place = place.with("dax", "records", 1);
    let raw = std::fs::File::options().write(true).open(place.arena());
    let record = std::fs::read(place.arena()).unwrap();
    let at = layout::TABLE as usize;
    let bytes = &record[at..at + 128];
    let raw = raw.unwrap();
    raw.write_all_at(&[0; 128], layout::TABLE).unwrap();
    raw.write_all_at(bytes, layout::TABLE + 64 * 128).unwrap();
    assert!(matches!(refusal(&place), Error::Corrupt { .. }));
}

#[test]
fn format_left_in_the_configuration_empties_nothing() {
    let place = Place::new("Dax", "", "4MiB").with("dax", "format", true);
    let depot = place.open();
    assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    depot.close();
    let text = refusal(&place).to_string();
    for word in ["dax.format: true", "format: force", "omit the option"] {
        assert!(text.contains(word), "{text}");
    }
    let place = place.with("dax", "format", false);
    assert!(has(&namespace(&place.open()), &[1], LEN));
    // Told twice, at each start.
    let place = place.with("dax", "format", "force");
    for _ in 0..2 {
        let depot = place.open();
        assert!(depot.opening().created && !has(&namespace(&depot), &[1], LEN));
        assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    }
}

#[test]
fn a_damaged_arena_is_made_anew_when_told_to() {
    let place = filled().with("dax", "format", true);
    let raw = Raw::open(&place.arena());
    raw.file.write(0, &[0xAA; 8192]);
    assert!(place.open().opening().created);
    // One of a later version is somebody's, and sound as far as anyone knows.
    let mut page = vec![0; 4096];
    page[..8].copy_from_slice(b"KVDEPOT\0");
    page[8] = 9;
    let sum = xxhash_rust::xxh3::xxh3_64(&page[..4088]);
    page[4088..].copy_from_slice(&sum.to_le_bytes());
    let raw = Raw::open(&place.arena());
    raw.file.write(0, &page);
    raw.file.write(layout::SUPERBLOCK_B, &page);
    assert!(refusal(&place).to_string().contains("format: force"));
}
