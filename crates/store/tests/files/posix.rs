//! The tier `Posix`: files that several processes share, and whatever else may lie there.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{
    self, PATIENCE, eventually, get, has, held, key, keys, namespace, namespace_of, pin_all, put,
};
use crate::folder::{LEN, ROOM, at_once, files, open, open_with, used};
use kvdepot_arena::format::file_header::{self, FileHeader};
use kvdepot_arena::inspect::{block_files, judge_file};
use kvdepot_host::dir::Dir;
use kvdepot_media::{Checksum, checksum};
use kvdepot_store::{Config, Depot, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, rounds};
use serde_json::{Value, json};

#[test]
fn blocks_live_in_files_alone_and_behind_others_and_outlive_the_depot() {
    for pipeline in ["Posix", "Cache|Posix", "Cache|Nvme|Posix", "Dax|Posix"] {
        for direct in ["auto", "false"] {
            let dir = tempfile::tempdir().unwrap();
            let all: Vec<u64> = (0..40).collect();
            let depot = open_with(pipeline, dir.path(), json!({ "direct": direct }));
            let ns = namespace(&depot);
            assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "{pipeline}");
            assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "again");
            assert!(depot.drain(PATIENCE));
            assert!(has(&ns, &all, LEN), "{pipeline}");
            assert_eq!(ns.prefix(&keys(0..50)).unwrap(), 40);
            depot.close();
            assert_eq!(files(dir.path()).len(), 40, "{pipeline}");
            let depot = open_with(pipeline, dir.path(), json!({}));
            let ns = namespace(&depot);
            assert!(has(&ns, &all, LEN), "{pipeline}, opened again");
            assert_eq!(ns.remove(&keys([1, 2, 99, 2, 1])).unwrap(), 2);
            assert_eq!(get(&ns, &[1, 3], LEN), [Outcome::Miss, Outcome::Done]);
            let mut listed: Vec<u64> = ns
                .blocks()
                .unwrap()
                .iter()
                .map(|(key, _)| common::number(key))
                .collect();
            listed.sort_unstable();
            let left: Vec<u64> = [0].into_iter().chain(3..40).collect();
            assert_eq!(listed, left, "{pipeline}");
            // One that is promoted meanwhile may count twice.
            assert!(ns.clear().unwrap() >= 38);
            depot.close();
            assert_eq!(files(dir.path()).len(), 0);
        }
    }
}

#[test]
fn blocks_of_any_length_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    let lens = [
        1,
        511,
        512,
        4095,
        4096,
        4097,
        65_536,
        1 << 20,
        (1 << 20) + 1,
        3_000_000,
    ];
    for (number, len) in (0..).zip(lens) {
        assert_eq!(put(&ns, &[number], len), [true], "{len}");
        assert!(has(&ns, &[number], len), "{len}");
    }
    assert_eq!(get(&ns, &[0], 2), [Outcome::Length]);
    depot.close();
}

#[test]
fn who_shares_the_directory_finds_what_others_have_stored_and_never_another_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (
        open(dir.path()),
        open_with("Cache|Posix", dir.path(), json!({})),
    );
    let (first, second) = (namespace(&one), namespace(&two));
    assert_eq!(put(&first, &[1, 2], LEN), [true; 2]);
    assert!(has(&second, &[1, 2], LEN));
    let other = namespace_of(&two, "another model");
    assert_eq!(get(&other, &[1], LEN), [Outcome::Miss]);
    // Both at once.
    let all: Vec<u64> = (10..40).collect();
    std::thread::scope(|scope| {
        let stored = [&first, &second].map(|ns| scope.spawn(|| put(ns, &all, LEN)));
        for stored in stored {
            assert_eq!(stored.join().unwrap(), [true; 30]);
        }
    });
    assert!(has(&first, &all, LEN) && has(&second, &all, LEN));
    assert_eq!(first.remove(&keys([1])).unwrap(), 1);
    assert_eq!(get(&namespace(&one), &[1], LEN), [Outcome::Miss]);
    one.close();
    two.close();
}

#[test]
fn files_that_are_pinned_and_written_are_counted_however_they_end() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    let all: Vec<u64> = (0..20).collect();
    assert_eq!(put(&ns, &all, LEN), [true; 20]);
    let count = |expected| eventually("the counts", || held(&depot) == expected);
    count((0, 0));
    let pins = pin_all(&ns, 0..3);
    let wanted: Vec<_> = (30..36).map(|at| (key(at), vec![LEN as u64])).collect();
    let reserved: Vec<_> = ns.reserve(&wanted).unwrap().into_iter().flatten().collect();
    assert_eq!(held(&depot), (3, 6));
    ns.abort(&reserved[..2]);
    ns.remove(&keys([0, 1])).unwrap();
    count((3, 4));
    let sums = vec![vec![Checksum([7; 16])]; 2];
    assert_eq!(ns.commit(&reserved[2..4], &sums).unwrap(), [true; 2]);
    count((3, 2));
    ns.unpin(&pins, false);
    count((0, 2));
    ns.abort(&reserved[4..]);
    count((0, 0));
    depot.close();
}

#[test]
fn reserved_files_that_have_names_leave_puts_those_without() {
    let dir = tempfile::tempdir().unwrap();
    let plain = Dir::open(dir.path()).unwrap();
    if !plain.links_unnamed() || plain.unnamed(false).unwrap().is_none() {
        println!("skipped: there are no files without a name");
        return;
    }
    // It may have three of them at a time.
    let depot = open(dir.path());
    let ns = namespace(&depot);
    // With the last of their names, which are numbers.
    let reserve = |numbers: Range<u64>| {
        let wanted: Vec<_> = numbers.map(|at| (key(at), vec![LEN as u64])).collect();
        let reserved: Vec<_> = ns.reserve(&wanted).unwrap().into_iter().flatten().collect();
        let names = reserved
            .iter()
            .map(|one| &one.place_outside().unwrap().name);
        let numbers = names.map(|name| name.rsplit('/').next().unwrap().parse::<u64>().unwrap());
        (numbers.max().unwrap(), reserved)
    };
    let (before, many) = reserve(0..8);
    for number in 100..105 {
        assert_eq!(put(&ns, &[number], LEN), [true]);
    }
    let (after, one) = reserve(8..9);
    assert_eq!(after, before + 1, "puts have given names to their files");
    ns.abort(&many);
    ns.abort(&one);
    depot.close();
}

#[test]
fn what_is_not_the_block_that_its_name_says_is_a_miss_and_is_written_again() {
    type Deed = fn(&Path, &Path);
    let deeds: [(&str, Deed); 8] = [
        ("truncated", |file, _| {
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_len(8192).unwrap();
        }),
        ("empty", |file, _| fs::write(file, "").unwrap()),
        ("grown", |file, _| {
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_len(1 << 20).unwrap();
        }),
        ("zeroed", |file, _| {
            let len = fs::metadata(file).unwrap().len() as usize;
            fs::write(file, vec![0; len]).unwrap();
        }),
        ("a bit flipped", |file, _| {
            let mut bytes = fs::read(file).unwrap();
            bytes[50_000] ^= 4;
            fs::write(file, bytes).unwrap();
        }),
        ("another's", |file, other| {
            fs::copy(other, file).unwrap();
        }),
        ("a link", |file, other| {
            fs::remove_file(file).unwrap();
            symlink(other, file).unwrap();
        }),
        ("a folder", |file, _| {
            fs::remove_file(file).unwrap();
            fs::create_dir(file).unwrap();
        }),
    ];
    for (what, deed) in deeds {
        let dir = tempfile::tempdir().unwrap();
        let depot = open(dir.path());
        let ns = namespace(&depot);
        assert_eq!(put(&ns, &[1], LEN), [true]);
        let file = files(dir.path()).remove(0);
        assert_eq!(put(&ns, &[2], LEN), [true]);
        let other = files(dir.path()).into_iter().find(|other| *other != file);
        deed(&file, &other.unwrap());
        let outcome = get(&ns, &[1], LEN);
        assert!(
            matches!(outcome[..], [Outcome::Miss | Outcome::Corrupt]),
            "{what}: {outcome:?}"
        );
        assert!(has(&ns, &[2], LEN), "{what}");
        if what != "a folder" && what != "a link" {
            assert_eq!(put(&ns, &[1], LEN), [true], "{what}");
            assert!(has(&ns, &[1], LEN), "{what}");
        }
        depot.close();
    }
}

#[test]
fn a_file_is_judged_by_its_header_where_its_attribute_is_gone_or_anothers() {
    const NAME: &str = "user.kvdepot";
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    let file = files(dir.path()).remove(0);
    assert_eq!(put(&ns, &[2], LEN), [true]);
    let other = files(dir.path()).into_iter().find(|other| *other != file);
    let note = |path: &Path| {
        let mut note = [0; 64];
        let len = rustix::fs::getxattr(path, NAME, &mut note[..]);
        len.map(|len| note[..len].to_vec())
    };
    // A file system that keeps none has the header read for each.
    if let Ok(others) = note(&other.unwrap()) {
        let set = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&file, NAME, &others, set).unwrap();
        assert_eq!(get(&ns, &[1], LEN), [Outcome::Done]);
        rustix::fs::removexattr(&file, NAME).unwrap();
    }
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Done]);
    let header = fs::File::options().write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&header, &[0; 4096], 0).unwrap();
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    depot.close();
}

#[test]
fn a_directory_holds_its_capacity_whoever_stores() {
    const CAPACITY: u64 = 16 << 20;
    let dir = tempfile::tempdir().unwrap();
    let small = json!({"capacity": CAPACITY});
    let depots: Vec<Depot> = (0..3)
        .map(|_| open_with("Posix", dir.path(), small.clone()))
        .collect();
    let path = dir.path();
    std::thread::scope(|scope| {
        let writers = (0u64..).zip(&depots).map(|(writer, depot)| {
            scope.spawn(move || {
                let ns = namespace(depot);
                let mut stored = 0;
                for call in 0..40 {
                    let first = writer * 10_000 + call * 8;
                    let numbers: Vec<u64> = (first..first + 8).collect();
                    stored += put(&ns, &numbers, LEN).iter().filter(|ok| **ok).count();
                    // What comes and goes while it is counted may be counted too.
                    let counted = at_once(path);
                    assert!(counted <= CAPACITY * 105 / 100, "{counted} bytes");
                }
                stored
            })
        });
        let writers: Vec<_> = writers.collect();
        let stored: usize = writers.into_iter().map(|one| one.join().unwrap()).sum();
        assert!(stored as u64 * ROOM > CAPACITY, "{stored} were stored");
    });
    let full = used(path);
    assert!(full >= CAPACITY * 80 / 100, "{full} of {CAPACITY}");
    assert!(
        depots[0].stats().tiers[0].evicted_blocks > 0
            || depots[1].stats().tiers[0].evicted_blocks > 0
            || depots[2].stats().tiers[0].evicted_blocks > 0
    );
    depots.iter().for_each(Depot::close);
    assert_eq!(fs::read_dir(path.join("posix/new")).unwrap().count(), 0);
}

#[test]
fn what_every_request_reads_is_there_while_the_directory_turns_over() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Posix", dir.path(), json!({"capacity": "4MiB"}));
    let ns = namespace(&depot);
    let head = [0, 1];
    assert_eq!(put(&ns, &head, LEN), [true; 2]);
    // Three times what the directory holds.
    for number in 10..170 {
        eventually("a put", || put(&ns, &[number], LEN) == [true]);
        assert!(has(&ns, &head, LEN), "lost after {number}");
    }
    let evicted = depot.stats().tiers[0].evicted_blocks;
    assert!(evicted > 80, "{evicted}");
    depot.close();
}

#[test]
fn what_another_process_has_used_since_the_last_mark_stays() {
    const OLD: u64 = 20;
    const DAY: u64 = 24 * 3600;
    let dir = tempfile::tempdir().unwrap();
    let open = || open_with("Posix", dir.path(), json!({"capacity": "4MiB"}));
    let depot = open();
    let old: Vec<u64> = (0..OLD).collect();
    assert_eq!(put(&namespace(&depot), &old, LEN), [true; OLD as usize]);
    depot.close();
    // A day ago, the first one first: longer than uses go unmarked.
    let now = std::time::SystemTime::now();
    for path in files(dir.path()) {
        let mut options = fs::File::options();
        let file = options.read(true).write(true).open(path).unwrap();
        let mut header = [0; 4096];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut header, 0).unwrap();
        let header = FileHeader::decode(&header).unwrap();
        let age = Duration::from_secs(DAY - common::number(&header.identity.key));
        file.set_modified(now - age).unwrap();
    }
    // Each knows its own uses, as two processes do.
    let (reader, writer) = (open(), open());
    assert!(has(&namespace(&reader), &[0], LEN));
    // Some of the old ones have to go, and not all.
    let ns = namespace(&writer);
    for number in 100..142 {
        eventually("a put", || put(&ns, &[number], LEN) == [true]);
    }
    assert!(has(&ns, &[0], LEN));
    assert_eq!(get(&ns, &[1], LEN), [Outcome::Miss]);
    reader.close();
    writer.close();
}

#[test]
fn a_head_whose_use_another_process_has_marked_stays_as_long_as_its_tail() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Posix", dir.path(), json!({"capacity": "4MiB"}));
    let ns = namespace(&depot);
    let file = |number| {
        let name = key(number).to_string();
        let is_its = |path: &PathBuf| path.to_str().unwrap().contains(&name);
        files(dir.path()).into_iter().find(is_its).unwrap()
    };
    assert_eq!(put(&ns, &[0, 1], LEN), [true; 2]);
    for number in 10..15 {
        assert_eq!(put(&ns, &[number], LEN), [true]);
    }
    // That all of it is used is known here alone, and of the head to others too.
    assert!(has(&ns, &[0, 1], LEN));
    let [head, tail] = [0, 1].map(file);
    let marked = fs::File::options().write(true).open(&head).unwrap();
    marked.set_modified(std::time::SystemTime::now()).unwrap();
    let mut others = 100..200;
    while head.exists() {
        let number = others.next().unwrap();
        eventually("a put", || put(&ns, &[number], LEN) == [true]);
    }
    assert!(!tail.exists(), "its head was evicted first");
    depot.close();
}

#[test]
fn what_a_process_has_left_behind_is_swept() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    let new = dir.path().join("posix/new");
    let mine = fs::read_dir(&new).unwrap().next().unwrap().unwrap();
    let name = mine.file_name().into_string().unwrap();
    depot.close();
    let (boot, _) = name.split_once('-').unwrap();
    for (name, age) in [(format!("{boot}-1-1"), 60), (format!("{boot}-1-2"), 0)] {
        let left = new.join(name);
        fs::create_dir(&left).unwrap();
        fs::write(left.join("0"), vec![0; 1 << 20]).unwrap();
        let alive = fs::File::create(left.join("alive")).unwrap();
        let then = std::time::SystemTime::now() - Duration::from_secs(age);
        alive.set_modified(then).unwrap();
    }
    let depot = open(dir.path());
    eventually("the sweep", || fs::read_dir(&new).unwrap().count() == 2);
    assert!(
        new.join(format!("{boot}-1-2")).exists(),
        "it may be starting"
    );
    assert!(has(&namespace(&depot), &[1], LEN));
    depot.close();
}

#[test]
fn crash_kill9_loses_no_acknowledged_block_and_leaves_nothing_unswept() {
    const TEST: &str = "posix::crash_kill9_loses_no_acknowledged_block_and_leaves_nothing_unswept";
    // Nothing is evicted, however fast they write.
    let open = |pipeline: &str, dir: &Path| open_with(pipeline, dir, json!({"capacity": "16GiB"}));
    if let Some(role) = child::role() {
        assert_eq!(role, "writer");
        let dir = PathBuf::from(child::value("dir"));
        child::say("begins");
        let depot = open(&child::value("pipeline"), &dir);
        let ns = namespace(&depot);
        child::say("open");
        let first: u64 = child::value("first").parse().unwrap();
        for number in first.. {
            if put(&ns, &[number], LEN) == [true] {
                child::say(&format!("ack {number}"));
            }
        }
    }
    let mut rng = Rng::for_test(TEST);
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let mut acknowledged = Vec::new();
        let (kills, mut opening) = (rounds(20), 0);
        for round in 0..5 * kills {
            // Until one was killed while it opened, too.
            if round >= kills && opening > 0 {
                break;
            }
            let values = [
                ("dir", dir.path().to_str().unwrap()),
                ("pipeline", pipeline),
                ("first", &(round << 20).to_string()),
            ];
            // Two at once: they share the directory.
            let mut writers = [0, 1].map(|_| Child::start(TEST, "writer", &values));
            // While they open, or while they write.
            let (word, within, stored) = match rng.once_in(4) {
                true => ("begins", 5_000, 0),
                false => ("open", 60_000, rng.below(6)),
            };
            writers.iter_mut().for_each(|writer| writer.expect(word));
            let [one, other] = &mut writers;
            let mut said = one.wait_for("ack", stored);
            said.extend(other.wait_for("ack", stored.min(1)));
            // Short times as often as long ones.
            let within = within >> rng.below(8);
            std::thread::sleep(Duration::from_micros(rng.below(within)));
            // None outlives the other while that one is read.
            for writer in &mut writers {
                writer.kill();
            }
            said.extend(writers.iter_mut().flat_map(Child::kill_and_rest));
            let opened = said.iter().filter(|line| *line == "open").count();
            opening += u64::from(word == "begins" && opened < writers.len());
            let numbers = said.iter().filter_map(|line| line.strip_prefix("ack "));
            acknowledged.extend(numbers.map(|number| number.parse::<u64>().unwrap()));
        }
        assert!(acknowledged.len() > 10, "{} blocks", acknowledged.len());
        assert!(opening > 0, "none was killed while it opened");
        let depot = open(pipeline, dir.path());
        let ns = namespace(&depot);
        for number in &acknowledged {
            assert!(has(&ns, &[*number], LEN), "{number} is lost");
        }
        for file in files(dir.path()) {
            let header: [u8; 4096] = fs::read(file).unwrap()[..4096].try_into().unwrap();
            let header = FileHeader::decode(&header).expect("whole");
            let number = common::number(&header.identity.key);
            assert!(has(&ns, &[number], LEN), "{number}: whole or absent");
        }
        depot.close();
    }
}

#[test]
fn a_rotten_leaf_is_told_from_the_others_however_its_block_came() {
    const MIB: usize = 1 << 20;
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = json!({
            "lanes": 2, "socket": "off",
            "posix": {"path": dir.path().join("posix"), "capacity": "64MiB"},
        });
        if pipeline != "Posix" {
            settings["cache"] = json!({"capacity": "16MiB"});
        }
        let depot = Depot::open(&Config::new(pipeline, &settings).unwrap()).unwrap();
        let ns = namespace(&depot);
        let lens = [1, MIB, MIB + 1, 3 * MIB];
        for (number, len) in (0..).zip(lens) {
            assert_eq!(put(&ns, &[number], len), [true]);
        }
        assert!(depot.drain(PATIENCE));
        depot.close();
        for file in files(dir.path()) {
            let bytes = fs::read(&file).unwrap();
            let header: &[u8; 4096] = bytes.first_chunk().unwrap();
            let number = common::number(&FileHeader::decode(header).unwrap().identity.key);
            let len = lens[number as usize];
            let payload = content(number, len);
            let digests = payload.chunks(MIB).map(checksum::digest);
            let digests: Vec<u128> = digests.collect();
            assert_eq!(file_header::leaves(header), Ok(digests), "{pipeline} {len}");
            let sound = judge_file(&file, true, None).unwrap();
            assert_eq!(
                (sound.fault, sound.rotten),
                (None, vec![]),
                "{pipeline} {len}"
            );
            // The last byte.
            let mut rotten = bytes.clone();
            rotten[4096 + len - 1] ^= 1;
            fs::write(&file, rotten).unwrap();
            let bad = judge_file(&file, true, None).unwrap();
            let leaf = ((len - 1) / MIB * MIB) as u64;
            assert_eq!(bad.rotten, [(leaf, len as u64 - leaf)], "{pipeline} {len}");
            assert!(bad.fault.unwrap().contains(&format!("bytes {leaf} to")));
        }
    }
}

#[test]
fn a_block_larger_than_the_directory_costs_no_other_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open_with("Posix", dir.path(), json!({"capacity": "4MiB"}));
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    assert_eq!(put(&ns, &[3], 5 << 20), [false]);
    assert!(has(&ns, &[1, 2], LEN));
    depot.close();
}

#[test]
fn a_file_among_the_folders_hides_no_block_from_who_verifies() {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(dir.path());
    assert_eq!(put(&namespace(&depot), &[1, 2], LEN), [true; 2]);
    depot.close();
    fs::write(dir.path().join("posix/blocks/stray"), "x").unwrap();
    let found = block_files(&dir.path().join("posix")).unwrap().unwrap();
    assert_eq!(found.len(), 2);
}

#[test]
fn a_capacity_that_nobody_names_is_the_directorys_or_of_its_file_system() {
    let capacity = |path: &Path, settings: Value| {
        let config = Config::new("Posix", &json!({ "posix": settings })).unwrap();
        let depot = Depot::open(&config).unwrap();
        let said = fs::read_to_string(path.join("settings")).unwrap();
        let capacity = depot.stats().tiers[0].capacity_bytes;
        assert!(said.contains(&format!("capacity {capacity}\n")), "{said}");
        depot.close();
        capacity
    };
    let dir = tempfile::tempdir().unwrap();
    let named = dir.path().join("named");
    let settings = json!({"path": named, "capacity": "3MiB"});
    assert_eq!(capacity(&named, settings), 3 << 20);
    assert_eq!(capacity(&named, json!({ "path": named })), 3 << 20);
    let unnamed = dir.path().join("unnamed");
    let about = rustix::fs::statvfs(dir.path()).unwrap();
    let all = about.f_blocks * about.f_frsize;
    let taken = capacity(&unnamed, json!({ "path": unnamed }));
    assert!(
        taken > all / 4 * 3 && taken <= all / 5 * 4,
        "{taken} of {all}"
    );
}

#[test]
fn settings_that_cannot_be_name_the_field() {
    let refused = |posix: Value| {
        let settings = json!({ "posix": posix });
        let config = Config::new("Posix", &settings);
        let Ok(config) = config else {
            return config.unwrap_err().to_string();
        };
        // Who only asks hears the same.
        let checked = config.check().unwrap_err().to_string();
        assert_eq!(Depot::open(&config).err().unwrap().to_string(), checked);
        checked
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("posix");
    for (posix, said) in [
        (json!({"capacity": "1GiB"}), "posix.path"),
        (json!({"path": path, "capacity": "1KiB"}), "posix.capacity"),
        (
            json!({"path": path, "capacity": "1GiB", "fan_out": 5000}),
            "posix.fan_out",
        ),
        (
            json!({"path": path, "capacity": "1GiB", "direct": "maybe"}),
            "posix.direct",
        ),
        (
            json!({"path": path, "capacity": "1GiB", "capcity": 1}),
            "posix.capcity",
        ),
    ] {
        let error = refused(posix);
        assert!(error.contains(said), "{error}");
    }
}
