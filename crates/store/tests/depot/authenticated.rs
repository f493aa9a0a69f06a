//! Blocks of a directory that others may write: with a key, nobody without it makes one verify.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::common::{PATIENCE, eventually, get, has, key, namespace, put, start_put};
use crate::folder::{at_rest, files};
use kvdepot_arena::format::file_header::{self, FileHeader, LEN};
use kvdepot_arena::format::file_note::{self, FileNote};
use kvdepot_arena::{Identity, parts};
use kvdepot_host::dir::annotate;
use kvdepot_media::{Mac, MacKey, checksum};
use kvdepot_store::{BlockBuffers, Config, Depot, Error, Namespace, NamespaceSpec, Outcome};
use kvdepot_testkit::bytes::content;
use serde_json::json;

/// Several leaves, the last one short.
const LONG: usize = (2 << 20) + 777;

fn keys_in(dir: &Path, name: &str, digit: char) -> PathBuf {
    let path = dir.join(name);
    let key: String = std::iter::repeat_n(digit, 64).collect();
    fs::write(&path, format!("- {key}\nours {key}\n")).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path
}

fn try_open(pipeline: &str, dir: &Path, keys: Option<&Path>) -> Result<Depot, Error> {
    let mut settings = json!({
        "socket": "off",
        "lanes": 2,
        "lookup_timeout": "60s",
    });
    if pipeline.contains("Posix") {
        settings["posix"] = json!({"path": dir.join("posix"), "capacity": "64MiB"});
    }
    if pipeline.contains("Cache") {
        settings["cache"] = json!({"capacity": "16MiB"});
    }
    if let Some(keys) = keys {
        settings["mac_key_file"] = json!(keys);
    }
    Depot::open(&Config::new(pipeline, &settings)?)
}

fn open(pipeline: &str, dir: &Path, keys: Option<&Path>) -> Depot {
    try_open(pipeline, dir, keys).unwrap()
}

fn corrupt(depot: &Depot) -> u64 {
    depot.stats().tiers.last().unwrap().corrupt_blocks
}

fn said<T>(refused: Result<T, Error>) -> String {
    refused.err().unwrap().to_string()
}

fn salted(depot: &Depot, salt: &str) -> Result<Namespace, Error> {
    depot.namespace(&NamespaceSpec {
        model: "m".into(),
        dtype: "float32".into(),
        block_tokens: 16,
        salt: Some(salt.into()),
        ..NamespaceSpec::default()
    })
}

/// The only file, what it says, and its MACs.
fn only(dir: &Path) -> (PathBuf, FileHeader, Vec<Mac>) {
    let found = files(dir);
    let [path] = &found[..] else {
        panic!("{found:?}");
    };
    let bytes = fs::read(path).unwrap();
    let page = bytes.first_chunk::<LEN>().unwrap();
    let header = FileHeader::decode(page).unwrap();
    (path.clone(), header, file_header::macs(page))
}

/// Writes another block's bytes into a file, with all that does not take a key.
fn forge(path: &Path, identity: Identity, bytes: &[u8], macs: &[Mac], noted: bool) {
    let sum = checksum::of(&parts::part_id(&identity, 0, 1), bytes);
    let header = FileHeader {
        identity,
        len: bytes.len() as u64,
        parts: 1,
        checksum: sum,
        created: 0,
    };
    let note = FileNote {
        len: header.len,
        parts: 1,
        checksum: sum,
        mac: macs.first().copied(),
    };
    let file = fs::File::options().write(true).open(path).unwrap();
    let zeros = [0; file_note::LEN];
    let note = if noted { note.encode(&identity) } else { zeros };
    let _where_it_is_kept = annotate(&file, file_note::NAME, &note);
    file.write_all_at(&header.encode(macs, &[]), 0).unwrap();
    file.write_all_at(bytes, LEN as u64).unwrap();
}

#[test]
fn what_has_the_key_finds_what_others_with_it_have_stored() {
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let keys = keys_in(dir.path(), "keys", '7');
        let all: Vec<u64> = (0..9).collect();
        let depot = open(pipeline, dir.path(), Some(&keys));
        let ns = namespace(&depot);
        assert_eq!(put(&ns, &all, LONG), [true; 9], "{pipeline}");
        assert!(has(&ns, &all, LONG));
        assert!(depot.drain(PATIENCE));
        depot.close();
        let depot = open(pipeline, dir.path(), Some(&keys));
        let ns = namespace(&depot);
        assert!(has(&ns, &all, LONG), "{pipeline}, opened again");
        assert!(has(&ns, &all, LONG), "{pipeline}, promoted");
        assert_eq!(corrupt(&depot), 0);
        depot.close();
        // Who trusts the medium reads them too.
        let depot = open(pipeline, dir.path(), None);
        assert!(has(&namespace(&depot), &all, LONG), "{pipeline}, without");
        depot.close();
    }
}

#[test]
fn what_nobody_with_the_key_has_written_is_a_miss_and_written_again() {
    type Forgery = (&'static str, fn(&[Mac]) -> Vec<Mac>, bool);
    let forgeries: [Forgery; 4] = [
        ("its MAC", <[Mac]>::to_vec, true),
        ("its MAC, in the header alone", <[Mac]>::to_vec, false),
        ("another MAC", |_| vec![Mac([9; 16])], true),
        ("no MAC", |_| Vec::new(), true),
    ];
    for pipeline in ["Posix", "Cache|Posix"] {
        for (how, macs_of, noted) in forgeries {
            let dir = tempfile::tempdir().unwrap();
            let keys = keys_in(dir.path(), "keys", '7');
            let depot = open(pipeline, dir.path(), Some(&keys));
            assert_eq!(put(&namespace(&depot), &[1], LONG), [true]);
            assert!(depot.drain(PATIENCE));
            depot.close();
            let (path, header, macs) = only(dir.path());
            assert_eq!(macs.len(), 1);
            let other = content(2, LONG);
            forge(&path, header.identity, &other, &macs_of(&macs), noted);
            // It is one for whoever trusts the medium.
            let trusting = open("Posix", dir.path(), None);
            let room = kvdepot_store::Buffer::from_vec(vec![0; LONG]);
            let into = BlockBuffers::whole([room.clone()]);
            let task = namespace(&trusting).get(vec![key(1)], into).unwrap();
            assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true], "{how}");
            assert!(room.to_vec() == other);
            trusting.close();
            let depot = open(pipeline, dir.path(), Some(&keys));
            let ns = namespace(&depot);
            if noted && pipeline.starts_with("Cache") {
                // Brought near before anybody asks for it.
                ns.prefetch(&[key(1)])
                    .unwrap()
                    .wait(Some(PATIENCE))
                    .unwrap();
            }
            let outcome = get(&ns, &[1], LONG);
            assert!(outcome != [Outcome::Done], "{pipeline}, {how}");
            eventually("the end of what is forged", || files(dir.path()).is_empty());
            assert_eq!(corrupt(&depot), 1, "{pipeline}, {how}");
            assert_eq!(put(&ns, &[1], LONG), [true], "{pipeline}, {how}");
            assert!(has(&ns, &[1], LONG));
            assert!(depot.drain(PATIENCE));
            at_rest(&depot);
            depot.close();
        }
    }
}

/// The note has room for one MAC alone: a block of several parts is not judged by that.
#[test]
fn no_part_of_several_goes_without_its_mac() {
    const PART: usize = 5000;
    for pipeline in ["Posix", "Cache|Posix"] {
        let dir = tempfile::tempdir().unwrap();
        let keys = keys_in(dir.path(), "keys", '7');
        let depot = open(pipeline, dir.path(), Some(&keys));
        assert_eq!(put(&namespace(&depot), &[1], PART), [true]);
        assert!(depot.drain(PATIENCE));
        depot.close();
        let (path, FileHeader { identity, .. }, _) = only(dir.path());
        // Of two parts the first one is as somebody with the key has written it.
        let secret = MacKey::derive(&[0x77; 32], &identity.namespace.0);
        let lens = [PART as u64; 2];
        let (mut found, mut bytes) = (parts::blank(&lens), Vec::new());
        for (number, part) in (0..).zip(&mut found) {
            let id = parts::part_id(&identity, number, 2);
            bytes.resize(part.offset as usize, 0);
            bytes.extend(content(number.into(), PART));
            part.checksum = checksum::of(&id, &bytes[part.offset as usize..]);
        }
        let first = secret.of(&parts::part_id(&identity, 0, 2), &bytes[..PART]);
        let len = parts::payload_len(&lens);
        bytes.resize(len as usize - 2 * parts::ENTRY as usize, 0);
        bytes.extend(parts::encode(&found));
        let header = FileHeader {
            identity,
            len,
            parts: 2,
            checksum: parts::record_checksum(&identity, &found),
            created: 0,
        };
        let note = FileNote {
            len,
            parts: 2,
            checksum: header.checksum,
            mac: Some(first),
        };
        let file = fs::File::options().write(true).open(path).unwrap();
        let _where_it_is_kept = annotate(&file, file_note::NAME, &note.encode(&identity));
        file.write_all_at(&header.encode(&[first, Mac([9; 16])], &[]), 0)
            .unwrap();
        file.write_all_at(&bytes, LEN as u64).unwrap();
        let room = (LEN as u64 + len).next_multiple_of(4096);
        file.set_len(room).unwrap();
        let depot = open(pipeline, dir.path(), Some(&keys));
        let ns = namespace(&depot);
        assert_ne!(get(&ns, &[1], 2 * PART), [Outcome::Done], "{pipeline}");
        eventually("the end of what is forged", || files(dir.path()).is_empty());
        assert_eq!(corrupt(&depot), 1, "{pipeline}");
        at_rest(&depot);
        depot.close();
    }
}

#[test]
fn a_put_writes_anew_what_was_stored_without_a_key() {
    let dir = tempfile::tempdir().unwrap();
    let keys = keys_in(dir.path(), "keys", '7');
    let depot = open("Posix", dir.path(), None);
    assert_eq!(put(&namespace(&depot), &[1, 2], LONG), [true; 2]);
    depot.close();
    let depot = open("Posix", dir.path(), Some(&keys));
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LONG), [true]);
    assert_eq!(get(&ns, &[1], LONG), [Outcome::Done]);
    assert_eq!(get(&ns, &[2], LONG), [Outcome::Miss]);
    depot.close();
}

#[test]
fn blocks_of_another_key_or_name_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let [ours, theirs] = [('7', "keys"), ('8', "others")].map(|(d, n)| keys_in(dir.path(), n, d));
    let depot = open("Posix", dir.path(), Some(&theirs));
    assert_eq!(put(&namespace(&depot), &[1], LONG), [true]);
    depot.close();
    let depot = open("Posix", dir.path(), Some(&ours));
    let ns = namespace(&depot);
    assert!(get(&ns, &[1], LONG) != [Outcome::Done]);
    eventually("its end", || files(dir.path()).is_empty());
    // A whole block with its MAC, in the place of another: its header is made to fit.
    assert_eq!(put(&ns, &[1], LONG), [true]);
    let (_, first, macs) = only(dir.path());
    assert_eq!(put(&ns, &[2], LONG), [true]);
    depot.close();
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let prefix = first.identity.key.to_string();
    let second = files(dir.path()).into_iter();
    let second = second.filter(|path| !name(path).starts_with(&prefix));
    let second: Vec<PathBuf> = second.collect();
    let identity = Identity {
        key: key(2),
        ..first.identity
    };
    forge(&second[0], identity, &content(1, LONG), &macs, true);
    let depot = open("Posix", dir.path(), Some(&ours));
    let ns = namespace(&depot);
    let outcomes = get(&ns, &[1, 2], LONG);
    assert_eq!(outcomes[0], Outcome::Done);
    assert!(outcomes[1] != Outcome::Done, "{outcomes:?}");
    depot.close();
}

#[test]
fn a_salt_without_a_key_is_refused_and_a_digest_alone_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let keys = keys_in(dir.path(), "keys", '7');
    let depot = open("Cache|Posix", dir.path(), Some(&keys));
    let refused = said(salted(&depot, "theirs"));
    assert!(
        refused.contains("salt") && refused.contains("mac_key_file"),
        "{refused}"
    );
    let ns = salted(&depot, "ours").unwrap();
    assert_eq!(put(&ns, &[1], LONG), [true]);
    let id = ns.id();
    assert!(depot.drain(PATIENCE));
    depot.close();
    let depot = open("Posix", dir.path(), Some(&keys));
    let unnamed = depot.namespace_by_id(id);
    assert_eq!(get(&unnamed, &[1], LONG), [Outcome::Miss]);
    let refused = start_put(&unnamed, &[3], LONG);
    assert_eq!(refused.wait(Some(PATIENCE)).unwrap(), [false]);
    salted(&depot, "ours").unwrap();
    assert_eq!(get(&unnamed, &[1], LONG), [Outcome::Done]);
    depot.close();
}

#[test]
fn keys_where_no_tier_uses_them_and_files_that_others_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let keys = keys_in(dir.path(), "keys", '7');
    let refused = said(try_open("Cache", dir.path(), Some(&keys)));
    assert!(refused.contains("mac_key_file"), "{refused}");
    fs::set_permissions(&keys, Permissions::from_mode(0o644)).unwrap();
    let refused = said(try_open("Posix", dir.path(), Some(&keys)));
    assert!(refused.contains("0644"), "{refused}");
}
