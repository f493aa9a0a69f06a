//! A directory of sessions' files: found by what a prompt begins with, within its capacity, shared
//! by processes.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::parts::{PIECE, Parts, checkpoint, mover, names, namespace};
use kvdepot_session::Error;
use kvdepot_session::file::{
    FileCheckpoint, FileOptions, FilesSpec, Member, SessionFile, SessionFiles, files_of, save_file,
};
use kvdepot_store::{BlockBuffers, Buffer, Durability};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::log::Log;
use kvdepot_testkit::rot::Patient;

const ROOMY: u64 = 1 << 30;
const LOCK: &str = ".kvdepot-sessions.lock";

fn open_with(dir: &Path, weights: &str, capacity: u64, evicts: bool) -> SessionFiles {
    let spec = FilesSpec {
        namespace: namespace(weights),
        capacity,
        evicts,
        options: FileOptions::default(),
    };
    SessionFiles::open(dir, spec).unwrap()
}

fn open(dir: &Path) -> SessionFiles {
    open_with(dir, "w", ROOMY, true)
}

/// The first so many tokens of a conversation.
fn said(conversation: u32, count: usize) -> Vec<u32> {
    let each = (0..count as u32).map(|at| at * 7 % 1000);
    std::iter::once(conversation)
        .chain(each)
        .take(count)
        .collect()
}

/// Pieces of 1000 bytes for these tokens.
fn parts_of(tokens: &[u32]) -> Parts {
    let pieces = vec![1000; tokens.len().div_ceil(PIECE)];
    Parts::new(
        u64::from(tokens[0]) * 10_000 + tokens.len() as u64,
        &pieces,
        &[5000],
    )
}

fn save(files: &SessionFiles, tokens: &[u32]) -> kvdepot_session::file::FileSaved {
    try_save(files, tokens).unwrap()
}

fn try_save(
    files: &SessionFiles,
    tokens: &[u32],
) -> Result<kvdepot_session::file::FileSaved, Error> {
    let (spec, parts) = (namespace("w"), parts_of(tokens));
    files.save(
        &checkpoint(&spec, tokens),
        &parts.pieces(0),
        &parts.objects(0),
    )
}

fn found(files: &SessionFiles, prompt: &[u32]) -> Vec<usize> {
    let found = files.lookup(prompt, 10).unwrap();
    found.iter().map(|file| file.about().tokens.len()).collect()
}

/// Brings the longest one back, which is right; its tokens.
fn longest(files: &SessionFiles, prompt: &[u32]) -> usize {
    let file = files.lookup(prompt, 1).unwrap().pop().unwrap();
    let tokens = file.about().tokens.clone();
    assert_eq!(parts_of(&tokens).restore(&file), (tokens.len(), true));
    tokens.len()
}

#[test]
fn the_longest_beginning_is_found_by_tokens_and_by_text_also_by_another_process() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("made");
    let files = open(&dir);
    // Behind full pieces of the index and between them.
    for count in [1, 100, 256, 300, 512, 700] {
        let saved = save(&files, &said(1, count));
        assert_eq!(saved.cache_write_tokens, count);
    }
    save(&files, &said(2, 300));
    for files in [&files, &open(&dir)] {
        let prompt = [said(1, 512), vec![77; 9]].concat();
        assert_eq!(found(files, &prompt), [512, 300, 256, 100, 1]);
        assert_eq!(found(files, &said(1, 99)), [1]);
        assert_eq!(found(files, &said(3, 99)), [0; 0]);
        assert_eq!(longest(files, &said(1, 5000)), 700);
        // All were rendered from the same text.
        let text = files.lookup_text(b"some text and more", 10).unwrap();
        assert_eq!(text.len(), 7);
        assert!(files.lookup_text(b"some tex", 10).unwrap().is_empty());
        assert_eq!(files.list().len(), 7);
    }
    // Of other weights there are none, and they are in the directory.
    let others = open_with(&dir, "other", ROOMY, true);
    assert_eq!(others.list(), []);
    let refused = try_save(&others, &said(1, 5)).unwrap_err().to_string();
    assert!(refused.contains("namespace"), "{refused}");
    assert_eq!(files_of(files.mover(), &dir).unwrap().len(), 7);
}

#[test]
fn a_session_is_replaced_removed_and_seen_by_others() {
    let home = tempfile::tempdir().unwrap();
    let (one, two) = (open(home.path()), open(home.path()));
    let first = save(&one, &said(1, 300));
    assert_eq!(found(&two, &said(1, 300)), [0; 0]);
    two.refresh().unwrap();
    assert_eq!(found(&two, &said(1, 300)), [300]);
    // Replaced by one, it is found by the other, which does not know yet.
    let second = save(&one, &said(1, 300));
    assert_ne!(first.id, second.id);
    assert_eq!(
        names(home.path()),
        [LOCK.to_owned(), format!("{}.kvs", second.id)]
    );
    assert_eq!(longest(&two, &said(1, 300)), 300);
    assert_eq!(two.find(&second.id.to_string()[..9]).unwrap(), second.id);
    assert!(matches!(two.find("zz"), Err(Error::Unknown(_))));
    // One that is open is read still.
    let file = two.named(second.id).unwrap();
    two.remove(second.id).unwrap();
    assert_eq!(parts_of(&said(1, 300)).restore(&file), (300, true));
    assert!(matches!(two.remove(second.id), Err(Error::Unknown(_))));
    assert!(matches!(one.named(second.id), Err(Error::Unknown(_))));
    assert_eq!((found(&one, &said(1, 300)), one.list().len()), (vec![], 0));
    assert_eq!(names(home.path()), [LOCK]);
}

#[test]
fn one_that_rots_is_used_no_more_and_the_next_best_is() {
    let home = tempfile::tempdir().unwrap();
    let files = open(home.path());
    let short = save(&files, &said(1, 200));
    let long = save(&files, &said(1, 300));
    let path = home.path().join(format!("{}.kvs", long.id));
    let patient = Patient::open(&path);
    let byte = patient.read(4096 + 9, 1)[0];
    patient.write(4096 + 9, &[byte ^ 64]);
    let file = files.lookup(&said(1, 400), 1).unwrap().pop().unwrap();
    let rows = BlockBuffers::whole([1000; 5].map(|len| Buffer::from_vec(vec![0; len])));
    let objects = BlockBuffers::whole([Buffer::from_vec(vec![0; 5000])]);
    let restored = files.restore(&file, &rows, &objects).unwrap();
    assert_eq!((restored.cached_tokens, restored.whole), (0, false));
    assert_eq!(found(&files, &said(1, 400)), [200]);
    assert!(
        files
            .list()
            .iter()
            .any(|one| one.id == long.id && one.is_bad)
    );
    assert_eq!(files.verify(long.id).unwrap().missing, ["piece 0"]);
    assert!(files.verify(short.id).unwrap().missing.is_empty());
    // Repaired, and looked at again.
    patient.write(4096 + 9, &[byte]);
    files.refresh().unwrap();
    assert_eq!(found(&files, &said(1, 400)), [300, 200]);
    // Of a head that has changed the lookup itself hears.
    patient.write(0, &[0]);
    assert_eq!(found(&files, &said(1, 400)), [200]);
    assert_eq!(found(&open(home.path()), &said(1, 400)), [200]);
    // Under the name of another it is none.
    std::fs::copy(home.path().join(format!("{}.kvs", short.id)), &path).unwrap();
    assert_eq!(found(&open(home.path()), &said(1, 400)), [200]);
    files.refresh().unwrap();
    assert_eq!(found(&files, &said(1, 400)), [200]);
    assert!(matches!(files.named(long.id), Err(Error::Malformed { .. })));
}

/// Bytes of all files, with those that are being written.
fn used(dir: &Path) -> u64 {
    let look = || -> HashMap<u64, u64> {
        let entries = std::fs::read_dir(dir).unwrap();
        // What goes meanwhile has none, and what is renamed meanwhile is there twice.
        let files = entries.filter_map(|entry| entry.unwrap().metadata().ok());
        files.map(|about| (about.ino(), about.len())).collect()
    };
    // One that goes and the one that it goes for are never there at once, but in one look.
    let mut last = look();
    loop {
        let now = look();
        if now == last {
            return now.values().sum();
        }
        last = now;
    }
}

#[test]
fn all_that_is_there_stays_within_the_capacity_and_what_was_not_used_goes() {
    let home = tempfile::tempdir().unwrap();
    let files = open(home.path());
    let one = save(&files, &said(1, 60)).bytes_written;
    // Room for three.
    let files = open_with(home.path(), "w", 3 * one + 100, true);
    let mut ids = vec![files.list()[0].id];
    for conversation in 2..=3 {
        ids.push(save(&files, &said(conversation, 60)).id);
    }
    // The first was used last.
    for (second, id) in [(2, ids[0]), (0, ids[1]), (1, ids[2])] {
        let path = home.path().join(format!("{id}.kvs"));
        let when = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1000 + second);
        std::fs::File::open(&path)
            .unwrap()
            .set_modified(when)
            .unwrap();
    }
    save(&files, &said(4, 60));
    assert!(used(home.path()) <= 3 * one + 100);
    files.refresh().unwrap();
    let is_there = |conversation| !found(&files, &said(conversation, 60)).is_empty();
    assert_eq!([1, 2, 3, 4].map(is_there), [true, false, true, true]);
    // A restore uses.
    let file = files.lookup(&said(3, 60), 1).unwrap().pop().unwrap();
    let (rows, objects) = (
        BlockBuffers::whole([Buffer::from_vec(vec![0; 1000])]),
        BlockBuffers::whole([Buffer::from_vec(vec![0; 5000])]),
    );
    assert!(files.restore(&file, &rows, &objects).unwrap().whole);
    save(&files, &said(5, 60));
    files.refresh().unwrap();
    let is_there = |conversation| !found(&files, &said(conversation, 60)).is_empty();
    assert_eq!([1, 3, 4, 5].map(is_there), [false, true, true, true]);

    // What can never fit is refused, and nothing goes for it.
    let before = names(home.path());
    let large = Parts::new(9, &[4 * one as usize], &[]);
    let (spec, prompt) = (namespace("w"), large.tokens());
    let refused = files.save(&checkpoint(&spec, &prompt), &large.pieces(0), &[]);
    assert!(refused.unwrap_err().to_string().contains("capacity"));
    assert_eq!(names(home.path()), before);
    // Nor does anything where nothing may.
    let strict = open_with(home.path(), "w", 3 * one + 100, false);
    let refused = try_save(&strict, &said(6, 60)).unwrap_err().to_string();
    assert!(refused.contains("capacity"), "{refused}");
    assert_eq!(names(home.path()), before);
    // What strangers have put there counts.
    std::fs::write(home.path().join("stranger"), vec![1; 3 * one as usize]).unwrap();
    assert!(try_save(&files, &said(6, 60)).is_err());
    assert!(home.path().join("stranger").exists());
}

#[test]
fn a_stream_of_unknown_length_gets_its_space_bit_by_bit_and_no_more_than_there_is() {
    let home = tempfile::tempdir().unwrap();
    let files = open_with(home.path(), "w", 100 << 20, true);
    let (spec, prompt) = (namespace("w"), said(1, 10));
    let checkpoint: FileCheckpoint<'_> = checkpoint(&spec, &prompt);
    let mebibyte = vec![7; 1 << 20];
    let stream = |count: usize| {
        files.write(&checkpoint, None, |writer| {
            writer.begin(Member::Object("state".into()))?;
            for _ in 0..count {
                writer.write(&mebibyte)?;
                assert!(used(home.path()) <= 100 << 20);
            }
            writer.end().map(drop)
        })
    };
    let saved = stream(10).unwrap();
    assert!(saved.bytes_written < 11 << 20);
    assert_eq!(used(home.path()), saved.bytes_written);
    let failed = stream(200).unwrap_err().to_string();
    assert!(failed.contains("capacity"), "{failed}");
    assert!(
        names(home.path())
            .iter()
            .all(|name| !name.ends_with(".tmp"))
    );
}

#[test]
fn nothing_goes_for_space_that_a_stream_does_not_need() {
    let home = tempfile::tempdir().unwrap();
    let files = open_with(home.path(), "w", 32 << 20, true);
    let spec = namespace("w");
    for conversation in 0..3 {
        let prompt = said(conversation, 10);
        let stream = files.write(&checkpoint(&spec, &prompt), None, |writer| {
            writer.begin(Member::Object("state".into()))?;
            writer.write(&vec![7; 9 << 20])?;
            writer.end().map(drop)
        });
        stream.unwrap();
    }
    assert_eq!(files.list().len(), 3);
    files.refresh().unwrap();
    assert_eq!(files.list().len(), 3);
}

#[test]
fn files_are_copied_in_and_out() {
    let (home, away) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (files, others) = (open(home.path()), open(away.path()));
    let saved = save(&files, &said(1, 300));
    let out = home.path().join("conversation.session");
    assert_eq!(files.export(saved.id, &out).unwrap(), saved.bytes_written);
    let inside = home.path().join(format!("{}.kvs", saved.id));
    assert!(std::fs::read(&out).unwrap() == std::fs::read(inside).unwrap());
    assert_eq!(others.import(&out).unwrap(), saved.id);
    assert_eq!(longest(&others, &said(1, 300)), 300);
    // What has changed is not copied.
    let patient = Patient::open(&out);
    let byte = patient.read(5000, 1)[0];
    patient.write(5000, &[byte ^ 1]);
    let third = tempfile::tempdir().unwrap();
    let refused = open(third.path()).import(&out).unwrap_err().to_string();
    assert!(refused.contains("fails checksum verification"), "{refused}");
    let copy = third.path().join("copy");
    let mover = mover(true, Durability::Process);
    assert!(
        SessionFile::open(&mover, &out)
            .unwrap()
            .copy_to(&copy)
            .is_err()
    );
    assert_eq!(names(third.path()), [LOCK]);
    // Nor one of other weights.
    let spec = namespace("other");
    let (parts, prompt) = (Parts::new(1, &[10], &[]), said(0, 3));
    save_file(
        &mover,
        &out,
        &checkpoint(&spec, &prompt),
        &parts.pieces(0),
        &[],
    )
    .unwrap();
    assert!(
        others
            .import(&out)
            .unwrap_err()
            .to_string()
            .contains("weights")
    );
}

/// Saves conversations until it is done; tells each.
fn save_some() {
    let home = child::value("home");
    let files = open_with(
        Path::new(&home),
        "w",
        child::value("capacity").parse().unwrap(),
        true,
    );
    let first: u32 = child::value("first").parse().unwrap();
    for conversation in first..first + 60 {
        save(&files, &said(conversation, 60));
        assert!(used(Path::new(&home)) <= files.spec().capacity);
    }
    child::say("done");
}

#[test]
fn processes_share_a_directory_and_its_capacity() {
    let name = "session_files::processes_share_a_directory_and_its_capacity";
    if child::role().is_some() {
        return save_some();
    }
    let home = tempfile::tempdir().unwrap();
    let one = save(&open(home.path()), &said(1, 60)).bytes_written;
    let capacity = (10 * one).to_string();
    let path = home.path().to_str().unwrap();
    let mut writers: Vec<Child> = [1000, 2000, 3000]
        .map(|first: u32| {
            let first = first.to_string();
            let values = [("home", path), ("capacity", &capacity), ("first", &first)];
            Child::start(name, "writer", &values)
        })
        .into();
    let files = open_with(home.path(), "w", 10 * one, true);
    let mut seen = 0;
    while seen < 200 {
        files.refresh().unwrap();
        for listed in files.list() {
            // It may have gone for another, or is right.
            let Ok(file) = files.named(listed.id) else {
                continue;
            };
            let tokens = file.about().tokens.clone();
            assert_eq!(parts_of(&tokens).restore(&file), (60, true));
            seen += 1;
        }
        assert!(used(home.path()) <= 10 * one);
    }
    for writer in &mut writers {
        writer.expect("done");
    }
    files.refresh().unwrap();
    assert!(
        (8..=10).contains(&files.list().len()),
        "{}",
        files.list().len()
    );
}

#[test]
fn files_with_holes_take_no_other_sessions_place() {
    // A file system whose files may have so many bytes.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let files = open_with(dir.path(), "w", 1 << 20, true);
    save(&files, &said(1, 20));
    for name in ["a.kvs", "b.kvs", "c.kvs"] {
        let file = std::fs::File::create(dir.path().join(name)).unwrap();
        file.set_len(i64::MAX as u64 - 4096).unwrap();
    }
    save(&files, &said(2, 20));
    assert_eq!(found(&files, &said(1, 30)), [20]);
    assert_eq!(found(&files, &said(2, 30)), [20]);
}

/// A session of 20 tokens, and a folder under the name of the same session's one of 40.
fn with_a_folder(dir: &Path) -> (SessionFiles, kvdepot_session::Id) {
    let files = open(dir);
    save(&files, &said(1, 20));
    let id = save(&files, &said(1, 40)).id;
    let path = dir.join(format!("{id}.kvs"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    (files, id)
}

#[test]
fn a_session_whose_file_is_something_else_hides_no_other_one() {
    let dir = tempfile::tempdir().unwrap();
    let (files, id) = with_a_folder(dir.path());
    let checked = files.verify(id).unwrap();
    assert_eq!(checked.missing.len(), 1, "{:?}", checked.missing);
    files.refresh().unwrap();
    assert_eq!(found(&files, &said(1, 50)), [20]);
    // Known before it became one.
    let dir = tempfile::tempdir().unwrap();
    let (files, _) = with_a_folder(dir.path());
    assert_eq!(found(&files, &said(1, 50)), [20]);
}

#[test]
fn files_that_are_no_sessions_are_one_line_a_minute() {
    let dir = tempfile::tempdir().unwrap();
    for number in 0..20 {
        std::fs::write(dir.path().join(format!("{number}.kvs")), "strange").unwrap();
    }
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), || {
        let files = open(dir.path());
        for _ in 0..5 {
            files.refresh().unwrap();
        }
    });
    // A machine that stands still for a minute has a second line.
    let lines = log.lines_with("it is not a session file, or it is truncated");
    assert!((1..5).contains(&lines.len()), "{lines:?}");
}
