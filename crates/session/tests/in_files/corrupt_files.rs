//! A session's file that was changed anywhere: it is refused, or what does not verify is said, and
//! no wrong byte passes for a right one.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use crate::parts::{Parts, checkpoint, mover, namespace};
use kvdepot_media::checksum::digest;
use kvdepot_session::Error;
use kvdepot_session::file::{SessionFile, save_file};
use kvdepot_store::Durability;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::rot::{Damage, Patient};
use kvdepot_testkit::{Rng, rounds};

const HEAD: u64 = 4096;

fn save(path: &Path, parts: &Parts) {
    let (spec, prompt) = (namespace("w"), parts.tokens());
    let (pieces, objects) = (parts.pieces(0), parts.objects(0));
    let mover = mover(true, Durability::Process);
    save_file(&mover, path, &checkpoint(&spec, &prompt), &pieces, &objects).unwrap();
}

/// What is whole of it: all, tokens of some, or nothing. What has come is right: `restore` looks.
fn look(path: &Path, parts: &Parts) -> Option<(usize, bool)> {
    let mover = mover(true, Durability::Process);
    let file = SessionFile::open(&mover, path).ok()?;
    let is_same = file.about().tokens == parts.tokens() && file.about().text == b"some text";
    assert!(is_same, "it says something else of itself");
    let (come, whole) = parts.restore(&file);
    let checked = file.verify().unwrap();
    assert_eq!(checked.missing.is_empty(), whole, "{:?}", checked.missing);
    let members = parts.pieces.len() + parts.objects.len();
    let mut all = true;
    for member in 0..members {
        all &= file.read(member, &mut |_| Ok(())).is_ok();
    }
    assert_eq!(all, whole);
    Some((come, whole))
}

#[test]
fn no_region_of_a_file_can_change_unnoticed() {
    let mut rng = Rng::for_test("corrupt_files::no_region_of_a_file_can_change_unnoticed");
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.kvs");
    let parts = Parts::new(5, &[70_000, 4096, 5 << 20, 333], &[4097, 100]);
    save(&path, &parts);
    let whole = std::fs::read(&path).unwrap();
    assert_eq!(look(&path, &parts), Some((parts.tokens().len(), true)));
    // Where members lie, and the tail.
    let (mut at, mut regions) = (HEAD, vec![(0, HEAD)]);
    for len in parts.pieces.iter().chain(&parts.objects) {
        regions.push((at, *len as u64));
        at = (at + *len as u64).next_multiple_of(4096);
    }
    regions.push((at, whole.len() as u64 - at));
    for round in 0..rounds(120) {
        let (begin, len) = regions[round as usize % regions.len()];
        let damage = [Damage::Flip, Damage::Zero, Damage::Swap][rng.below(3) as usize];
        std::fs::write(&path, &whole).unwrap();
        Patient::open(&path).damage(damage, begin, len, &mut rng);
        let seen = look(&path, &parts);
        let what = format!("{damage:?} of {len} bytes at {begin}");
        match begin {
            0 => assert_eq!(seen, None, "{what}"),
            begin if begin == at => assert_eq!(seen, None, "{what}"),
            _ => assert!(seen.is_some_and(|(_, whole)| !whole), "{what}"),
        }
    }
}

#[test]
fn holes_cuts_and_pages_from_elsewhere_do_not_verify() {
    let mut rng = Rng::for_test("corrupt_files::holes_cuts_and_pages_from_elsewhere_do_not_verify");
    let home = tempfile::tempdir().unwrap();
    let (path, other) = (home.path().join("a.kvs"), home.path().join("b.kvs"));
    // Two files of one session: each verifies alone.
    let parts = Parts::new(6, &[9 << 20, 9 << 20], &[]);
    save(&path, &parts);
    save(&other, &parts);
    let whole = std::fs::read(&path).unwrap();
    let len = whole.len() as u64;
    for _ in 0..rounds(20) {
        std::fs::write(&path, &whole).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let at = HEAD + rng.below(4000) * 4096;
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            at,
            4096,
        )
        .unwrap();
        assert!(
            look(&path, &parts).is_some_and(|(_, whole)| !whole),
            "a hole at {at}"
        );
    }
    for cut in [
        0,
        1,
        7,
        11,
        100,
        HEAD - 1,
        HEAD,
        HEAD + 1,
        len / 2,
        len - 4096,
        len - 1,
    ] {
        std::fs::write(&path, &whole[..cut as usize]).unwrap();
        assert_eq!(look(&path, &parts), None, "up to {cut}");
    }
    std::fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    assert_eq!(look(&path, &parts), None, "a byte more");
    // A chunk in the place of another, of the same bytes where they come from another piece.
    let patient = |path: &Path| Patient::open(path);
    let chunk = 4 << 20;
    std::fs::write(&path, &whole).unwrap();
    let (one, two) = (
        patient(&path).read(HEAD, chunk),
        patient(&path).read(HEAD + chunk as u64, chunk),
    );
    patient(&path).write(HEAD, &two);
    patient(&path).write(HEAD + chunk as u64, &one);
    assert_eq!(
        look(&path, &parts),
        Some((0, false)),
        "two chunks have changed places"
    );
    // The head and the tail of the other file: the same bytes under another key.
    let (mut mixed, theirs) = (whole, std::fs::read(&other).unwrap());
    mixed[..HEAD as usize].copy_from_slice(&theirs[..HEAD as usize]);
    std::fs::write(&path, &mixed).unwrap();
    assert_eq!(look(&path, &parts), None, "the head of another");
    let tail = len as usize - 4096;
    mixed[tail..].copy_from_slice(&theirs[tail..]);
    std::fs::write(&path, &mixed).unwrap();
    // Its checksums too: then all of it is the other's.
    assert_eq!(look(&path, &parts), Some((parts.tokens().len(), true)));
}

#[test]
fn a_file_that_changes_while_it_is_open_does_not_verify() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("a.kvs");
    let parts = Parts::new(7, &[100_000, 100_000], &[5000]);
    save(&path, &parts);
    let mover = mover(true, Durability::Process);
    let file = SessionFile::open(&mover, &path).unwrap();
    assert_eq!(parts.restore(&file), (96, true));
    let patient = Patient::open(&path);
    let second = HEAD + 100_000_u64.next_multiple_of(4096);
    let byte = patient.read(second + 5, 1)[0];
    patient.write(second + 5, &[byte ^ 1]);
    assert_eq!(parts.restore(&file), (64, false));
    assert_eq!(file.verify().unwrap().missing, ["piece 1"]);
    patient.write(second + 5, &[byte]);
    assert_eq!(parts.restore(&file), (96, true));
    // What was cut off is not there.
    patient.truncate(second + 50);
    assert_eq!(parts.restore(&file), (64, false));
    patient.truncate(0);
    assert_eq!(parts.restore(&file), (0, false));
}

/// A file that has nothing but a head, whose lengths are what it says: the rest is a hole.
fn hollow(path: &Path, about: u64, chunks: u64) {
    let tail = HEAD;
    let len = (tail + about + 16 * chunks).next_multiple_of(4096);
    let mut page = b"kvsessar".to_vec();
    page.extend(2_u32.to_le_bytes());
    page.extend((4_u32 << 20).to_le_bytes());
    for number in [len, tail, about, chunks] {
        page.extend(number.to_le_bytes());
    }
    page.extend([7; 64]);
    page.resize(HEAD as usize - 16, 0);
    page.extend(digest(&page).to_le_bytes());
    std::fs::write(path, page).unwrap();
    OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(len)
        .unwrap();
}

/// The most memory that this process has had, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

#[test]
fn a_file_with_a_hole_takes_no_memory_whatever_it_claims() {
    let name = "corrupt_files::a_file_with_a_hole_takes_no_memory_whatever_it_claims";
    if child::role().is_some() {
        let home = PathBuf::from(child::value("home"));
        let mover = mover(false, Durability::Process);
        let before = peak();
        for file in ["table.kvs", "about.kvs"] {
            let refused = SessionFile::open(&mover, &home.join(file));
            assert!(
                matches!(refused, Err(Error::Malformed { .. })),
                "{refused:?}"
            );
        }
        return child::say(&format!("grown {}", peak() - before));
    }
    let home = tempfile::tempdir().unwrap();
    hollow(&home.path().join("table.kvs"), 256 << 20, 256 << 20);
    hollow(&home.path().join("about.kvs"), 256 << 20, 0);
    let values = [("home", home.path().to_str().unwrap())];
    let mut reader = Child::start(name, "reader", &values);
    let grown = reader.line().unwrap();
    let grown: u64 = grown.trim_start_matches("grown ").parse().unwrap();
    assert!(grown < 64 << 10, "{grown} KiB");
}
