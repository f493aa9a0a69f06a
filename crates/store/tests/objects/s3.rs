//! The tier `S3` over a real server: objects that several processes share.

use std::fs;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;

use crate::bucket::{LEN, Server, Trouble};
use crate::common::{self, PATIENCE, get, has, keys, namespace, namespace_of, put};
use hyper::Method;
use kvdepot_arena::format::file_header::{self, FileHeader};
use kvdepot_arena::parts;
use kvdepot_media::{Buffer, checksum};
use kvdepot_store::Outcome;
use serde_json::json;

#[test]
fn blocks_live_in_objects_alone_and_behind_others_and_outlive_the_depot() {
    for pipeline in ["S3", "Cache|S3", "Dax|S3"] {
        let server = Server::start();
        let all: Vec<u64> = (0..40).collect();
        let depot = server.open_with(pipeline, &json!({}));
        let ns = namespace(&depot);
        assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "{pipeline}");
        assert!(put(&ns, &all, LEN).iter().all(|ok| *ok), "again");
        assert!(depot.drain(PATIENCE));
        assert!(has(&ns, &all, LEN), "{pipeline}");
        assert_eq!(ns.prefix(&keys(0..50)).unwrap(), 40);
        depot.close();
        assert_eq!(server.objects().len(), 40, "{pipeline}");
        let depot = server.open_with(pipeline, &json!({}));
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
        assert_eq!(server.objects().len(), 0);
    }
}

#[test]
fn a_large_block_goes_in_pieces_and_comes_back_in_several() {
    const LONG: usize = (21 << 20) + 5;
    let server = Server::start();
    let depot = server.open_with("S3", &json!({"capacity": "1GiB"}));
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], LONG), [true; 2]);
    let pieces = server.seen();
    let pieces = pieces.iter().filter(|line| line.starts_with("PUT")).count();
    assert!(pieces >= 6, "{pieces} requests");
    assert!(has(&ns, &[1, 2], LONG));
    depot.close();
    let depot = server.open();
    assert!(has(&namespace(&depot), &[1], LONG));
    assert_eq!(server.objects().len(), 2);
    depot.close();
}

/// However many are got at a time.
#[test]
fn a_block_of_a_slice_is_one_request() {
    const SLICE: usize = 4 << 20;
    let server = Server::start();
    let depot = server.open_with("S3", &json!({"capacity": "1GiB"}));
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2, 3], SLICE), [true; 3]);
    server.seen();
    assert!(has(&ns, &[1, 2, 3], SLICE));
    let asked = server.seen();
    let gets = asked.iter().filter(|line| line.starts_with("GET")).count();
    assert_eq!(gets, 3, "{asked:#?}");
    depot.close();
}

#[test]
fn an_object_says_what_it_is_as_a_file_of_posix_does() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[7], LEN), [true]);
    let objects = server.objects();
    let bytes = fs::read(&objects[0]).unwrap();
    let header = FileHeader::decode(bytes[..file_header::LEN].try_into().unwrap()).unwrap();
    assert_eq!((header.len, header.parts), (LEN as u64, 1));
    assert_eq!(bytes.len(), file_header::LEN + LEN);
    assert_eq!(header.identity.key, common::key(7));
    let content = Buffer::from_vec(bytes[file_header::LEN..].to_vec());
    assert_eq!(content.to_vec(), common::block(7, LEN).to_vec());
    // Without its attributes, as other tools leave it, it is read all the same.
    depot.close();
    let folder = server.path();
    for file in fs::read_dir(folder).unwrap().map(|file| file.unwrap()) {
        let name = file.file_name().into_string().unwrap();
        if name.ends_with(".json") {
            fs::remove_file(file.path()).unwrap();
        }
    }
    let depot = server.open();
    assert!(has(&namespace(&depot), &[7], LEN));
    depot.close();
}

#[test]
fn several_depots_share_a_bucket_and_namespaces_never_meet() {
    let server = Server::start();
    let depots = [0; 2].map(|_| server.open());
    let [one, other] = [0, 1].map(|at: usize| namespace(&depots[at]));
    assert_eq!(put(&one, &[1, 2], LEN), [true; 2]);
    assert!(has(&other, &[1, 2], LEN));
    let stranger = namespace_of(&depots[1], "other");
    assert_eq!(get(&stranger, &[1], LEN), [Outcome::Miss]);
    assert_eq!(put(&stranger, &[1], LEN), [true]);
    assert_eq!(other.remove(&keys([1])).unwrap(), 1);
    // Whoever has looked lately believes in it, and reads a miss.
    assert_eq!(get(&one, &[1, 2], LEN), [Outcome::Miss, Outcome::Done]);
    assert!(has(&stranger, &[1], LEN));
    assert_eq!(stranger.clear().unwrap(), 1);
    assert!(has(&one, &[2], LEN));
    depots.iter().for_each(kvdepot_store::Depot::close);
}

#[test]
fn what_was_looked_for_is_read_by_one_request() {
    for len in [LEN, 4 << 20] {
        let server = Server::start();
        let depot = server.open();
        let ns = namespace(&depot);
        let all: Vec<u64> = (0..8).collect();
        assert!(put(&ns, &all, len).iter().all(|ok| *ok));
        depot.close();
        let depot = server.open();
        let ns = namespace(&depot);
        assert_eq!(ns.prefix(&keys(0..8)).unwrap(), 8);
        server.seen();
        assert!(has(&ns, &all, len));
        let blocks = server.seen();
        let blocks = blocks.iter().filter(|line| line.contains("/blocks/"));
        assert_eq!(blocks.count(), 8, "blocks of {len} bytes");
        depot.close();
    }
}

#[test]
fn settings_that_cannot_be_are_refused_by_their_names() {
    let server = Server::start();
    for (settings, field) in [
        (json!({"url": null}), "s3.url"),
        (json!({"url": "s3://bucket"}), "s3.url"),
        (json!({"capacity": null}), "s3.capacity"),
        (json!({"capacity": "1KiB"}), "s3.capacity"),
        (json!({"lifecycle": "bucket"}), "s3.capacity"),
        (json!({"allow_http": false}), "s3.endpoint"),
        (json!({"endpoint": "host"}), "s3.endpoint"),
        (json!({"requests": 1}), "s3.requests"),
        (json!({"staging": "4KiB"}), "s3.staging"),
        (json!({"credentials": "/nowhere"}), "s3.credentials"),
        (json!({"bucket": "b"}), "s3.bucket"),
    ] {
        let opened = server.try_open("S3", &settings);
        let error = opened.err().unwrap().to_string();
        assert!(error.contains(field), "{settings}: {error}");
    }
    let depot = server.open_with("S3", &json!({"capacity": null, "lifecycle": "bucket"}));
    assert_eq!(put(&namespace(&depot), &[1], LEN), [true]);
    depot.close();
}

#[test]
fn with_a_key_what_others_have_written_is_none_and_written_again() {
    // Several leaves, and several pieces.
    for len in [LEN, (17 << 20) + 5] {
        let server = Server::start();
        let keys = server.path().join("keys");
        fs::write(&keys, format!("- {}\n", "7".repeat(64))).unwrap();
        fs::set_permissions(&keys, fs::Permissions::from_mode(0o600)).unwrap();
        let keyed = || server.open_keyed("Cache|S3", &json!({"capacity": "1GiB"}), &keys);
        let depot = keyed();
        assert_eq!(put(&namespace(&depot), &[1, 2], len), [true; 2]);
        assert!(depot.drain(PATIENCE));
        depot.close();
        let depot = keyed();
        assert!(has(&namespace(&depot), &[1, 2], len));
        depot.close();
        // Who has no key reads it, and writes one without a MAC.
        let trusting = server.open_with("S3", &json!({"capacity": "1GiB"}));
        let ns = namespace(&trusting);
        assert!(has(&ns, &[1, 2], len));
        assert_eq!(ns.remove(&common::keys([1])).unwrap(), 1);
        assert_eq!(put(&ns, &[1], len), [true]);
        trusting.close();
        // A byte of another one, with all that does not take a key.
        let objects = server.objects();
        let second = objects
            .iter()
            .find(|object| server.is_of(object, 2))
            .unwrap();
        let mut bytes = fs::read(second).unwrap();
        let (page, payload) = bytes
            .split_first_chunk_mut::<{ file_header::LEN }>()
            .unwrap();
        let header = FileHeader::decode(page).unwrap();
        payload[len / 2] ^= 1;
        let checksum = checksum::of(&parts::part_id(&header.identity, 0, 1), payload);
        let forged = FileHeader { checksum, ..header };
        *page = forged.encode(&file_header::macs(page), &[]);
        server.replace(second, &bytes, None);
        let depot = keyed();
        let ns = namespace(&depot);
        let outcomes = get(&ns, &[1, 2], len);
        assert!(!outcomes.contains(&Outcome::Done), "{outcomes:?}");
        common::eventually("the end of both", || server.objects().is_empty());
        assert_eq!(put(&ns, &[1, 2], len), [true; 2]);
        assert!(depot.drain(PATIENCE));
        assert!(has(&ns, &[1, 2], len));
        depot.close();
    }
}

#[test]
fn a_bucket_says_what_it_has_and_what_has_gone() {
    let server = Server::start();
    let depot = server.open();
    let (ns, other) = (namespace(&depot), namespace_of(&depot, "other"));
    assert_eq!(put(&ns, &[1, 2, 3], LEN), [true; 3]);
    assert_eq!(put(&other, &[1], LEN), [true]);
    let none = depot.gone(10).unwrap();
    assert!(none.blocks.is_empty());
    assert_eq!(ns.remove(&keys([2])).unwrap(), 1);
    let gone = depot.gone(10).unwrap().blocks;
    let gone: Vec<_> = gone.iter().map(|(name, len)| (name.key, *len)).collect();
    assert_eq!(gone, [(common::key(2), LEN as u64)]);
    depot.close();
    // Nobody but the bucket knows it now.
    let depot = server.open();
    let usage = || {
        let mut all = depot.namespaces().unwrap();
        all.sort_by_key(|one| one.blocks);
        let described = all.iter().all(|one| one.description.is_some());
        let counts = all.iter().map(|one| (one.blocks, one.bytes)).collect();
        (described, counts)
    };
    let expected: Vec<_> = [1, 2].map(|blocks| (blocks, blocks * LEN as u64)).into();
    // What they are is written in the background.
    common::eventually("what namespaces are", || {
        usage() == (true, expected.clone())
    });
    assert_eq!(depot.namespaces().unwrap().len(), 2);
    depot.close();
}

#[test]
fn a_prefix_may_have_any_letters() {
    let server = Server::start();
    let settings = json!({"url": "s3://bucket/~me/a%20b", "capacity": "1MiB"});
    let depot = server.open_with("S3", &settings);
    let ns = namespace(&depot);
    for number in 0..40 {
        common::eventually("room", || put(&ns, &[number], LEN) == [true]);
        let objects = server.deref().objects("~me/a%20b/blocks");
        let used = objects
            .iter()
            .map(|one| fs::metadata(one).map_or(0, |one| one.len()));
        let used: u64 = used.sum();
        assert!(used <= 1 << 20, "{used} bytes");
    }
    depot.close();
}

#[test]
fn a_clear_that_has_failed_says_so() {
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1, 2], LEN), [true; 2]);
    let trouble = Trouble::Answer(503, "SlowDown");
    server.trouble(Some(Method::POST), "", usize::MAX, trouble);
    ns.clear().unwrap_err();
    assert_eq!(server.objects().len(), 2);
    server.calm();
    assert_eq!(ns.clear().unwrap(), 2);
    depot.close();
}

/// Also in a tier that it would go on from.
#[test]
fn what_is_removed_while_it_is_published_is_not_pinned() {
    let server = Server::start();
    let mut settings = json!({"lanes": 2, "socket": "off", "s3": server.settings()});
    settings["posix"] = json!({
        "path": server.path().join("posix"), "capacity": "64MiB", "durability": "power",
    });
    let config = kvdepot_store::Config::new("Posix|S3", &settings).unwrap();
    let depot = kvdepot_store::Depot::open(&config).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (ns, over) = (namespace(&depot), &over);
            scope.spawn(move || {
                for round in 0..150 {
                    put(&ns, &[thread * 1000 + round], 5000);
                }
                over.store(true, std::sync::atomic::Ordering::Relaxed);
            });
        }
        for _ in 0..2 {
            let (ns, over) = (namespace(&depot), &over);
            scope.spawn(move || {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    // A busy machine may not answer one in its time, and it says so.
                    let _cleared = ns.clear();
                }
            });
        }
    });
    assert!(depot.drain(PATIENCE));
    common::eventually("the end of all pins", || {
        depot
            .stats()
            .tiers
            .iter()
            .all(|tier| tier.pinned_blocks == 0)
    });
    depot.close();
}
