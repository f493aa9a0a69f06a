//! Sessions that are saved, saved again, moved and removed while others do so: what was
//! acknowledged is there, whole and to the bit, until something replaces it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{blocks, longest, of_files, restore, save, save_with, sessions, spec, tokens};
use kvdepot_session::{Checkpoint, Error, Reason, Saved, Sessions, export, import};
use kvdepot_store::{BlockBuffers, Buffer, NamespaceSpec};
use kvdepot_testkit::bytes::content;

/// Saves a state each byte of which is `fill`; `during` runs once its rows are asked for.
fn fill(
    sessions: &Sessions,
    tokens: &[u32],
    fill: u8,
    exact: bool,
    during: impl FnOnce(),
) -> Result<Saved, Error> {
    let checkpoint = Checkpoint {
        tokens,
        text: b"",
        reason: Reason::Asked,
        context_tokens: 0,
        objects: Vec::new(),
        note: format!("of {fill}"),
        created: 1,
        exact,
    };
    sessions.save(
        checkpoint,
        Box::new(|runs| {
            during();
            let each = runs
                .iter()
                .map(|run| Buffer::from_vec(vec![fill; run.len() * 100]));
            Ok(BlockBuffers::whole(each))
        }),
    )
}

/// All bytes of the longest session of a prompt; None where it does not come back.
fn bytes(sessions: &Sessions, tokens: &[u32]) -> Option<Vec<u8>> {
    let found = longest(sessions, tokens)?;
    let each = found.pieces.iter();
    let buffers: Vec<Buffer> = each
        .map(|(_, len)| Buffer::from_vec(vec![0; *len as usize]))
        .collect();
    let rows = BlockBuffers::whole(buffers.clone());
    let restored = sessions
        .restore(&found, rows, BlockBuffers::default())
        .unwrap();
    restored
        .whole
        .then(|| buffers.iter().flat_map(Buffer::to_vec).collect())
}

#[test]
fn a_session_is_there_all_the_while_it_is_saved_again() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let prompt = tokens(200, 1);
    save(&sessions, &prompt);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (sessions, prompt, over) = (&sessions, &prompt, &over);
            scope.spawn(move || {
                for round in 0..100 {
                    let text = format!("of thread {thread} in round {round}");
                    let objects = vec![("logits".into(), Buffer::from_vec(content(200, 500)))];
                    save_with(sessions, prompt, &text, objects).unwrap();
                    assert!(longest(sessions, prompt).is_some());
                }
                over.store(true, Ordering::Relaxed);
            });
        }
        while !over.load(Ordering::Relaxed) {
            assert!(longest(&sessions, &prompt).is_some());
        }
    });
    let found = longest(&sessions, &prompt).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 200));
    // What is found by its text has that text.
    for thread in 0..2 {
        for round in 0..100 {
            let text = format!("of thread {thread} in round {round}");
            let found = sessions.lookup_text(text.as_bytes(), 3).unwrap();
            assert!(found.iter().all(|one| one.text_bytes == text.len()));
            assert!(round == 99 || found.is_empty(), "{text}");
        }
    }
    sessions.refresh().unwrap();
    assert!(sessions.list().len() <= 2);
}

#[test]
fn the_later_of_two_processes_is_what_is_found() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let prompt = tokens(200, 1);
    save_with(&one, &prompt, "one", Vec::new()).unwrap();
    save_with(&other, &prompt, "two", Vec::new()).unwrap();
    assert_eq!(other.lookup_text(b"two more", 1).unwrap().len(), 1);
    assert!(other.lookup_text(b"one more", 1).unwrap().is_empty());
    one.refresh().unwrap();
    let again = save_with(&one, &prompt, "three", Vec::new()).unwrap();
    assert_eq!(one.list().len(), 1);
    assert_eq!(one.list()[0].id, again.id);
    // What the other knows is there no more.
    assert!(longest(&other, &prompt).is_none());
    other.refresh().unwrap();
    assert_eq!(longest(&other, &prompt).unwrap().id, again.id);
}

#[test]
fn what_goes_meanwhile_fails_the_save() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let base = fill(&one, &tokens(128, 1), 1, false, || ()).unwrap();
    other.refresh().unwrap();
    let longer = [tokens(128, 1), tokens(100, 2)].concat();
    let failed = fill(&one, &longer, 1, false, || other.remove(base.id).unwrap());
    assert!(matches!(failed, Err(Error::NotStored { .. })), "{failed:?}");
    assert!(longest(&one, &longer).is_none());
    one.refresh().unwrap();
    assert!(one.list().is_empty());
    // What was stored behind what went is there.
    let saved = fill(&one, &longer, 1, false, || ()).unwrap();
    assert_eq!((saved.cached_tokens, saved.cache_write_tokens), (100, 128));
    assert!(bytes(&one, &longer) == Some(vec![1; 22_800]));
}

#[test]
fn what_is_exact_comes_back_to_the_bit_whoever_was_first() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let prompt = tokens(200, 1);
    let meanwhile = || {
        fill(&sessions, &prompt, 2, false, || ()).unwrap();
    };
    let saved = fill(&sessions, &prompt, 1, true, meanwhile).unwrap();
    assert_eq!((saved.cached_tokens, saved.cache_write_tokens), (0, 200));
    assert!(bytes(&sessions, &prompt) == Some(vec![1; 20_000]));
    let again = fill(&sessions, &prompt, 1, true, || ()).unwrap();
    assert_eq!((again.cached_tokens, again.bytes_written), (200, 0));
    assert_eq!(again.id, saved.id);
    // As a file it stays so, where others are, and where none are.
    let file = home.path().join("exact.kvs");
    export(&sessions, saved.id, &file).unwrap();
    for others in [true, false] {
        let away = tempfile::tempdir().unwrap();
        let there = of_files(away.path());
        if others {
            fill(&there, &prompt, 3, false, || ()).unwrap();
        }
        import(&there, &file).unwrap();
        assert!(bytes(&there, &prompt) == Some(vec![1; 20_000]));
    }
}

#[test]
fn what_is_exact_is_never_made_of_what_others_have_saved_since() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let prompt = tokens(192, 1);
    fill(&one, &prompt, 1, true, || ()).unwrap();
    // Its pieces go, as for want of room, and another computes the same tokens in other steps.
    let all = one.depot().namespaces().unwrap();
    let is_pieces = |about: &Option<String>| {
        let about = about.as_deref().unwrap_or_default();
        about.contains("group=session pieces")
    };
    let pieces = all.iter().find(|one| is_pieces(&one.description));
    let pieces = one.depot().namespace_by_id(pieces.unwrap().id);
    assert_eq!(pieces.clear().unwrap(), 3);
    let longer = [&prompt[..], &tokens(64, 2)].concat();
    fill(&other, &longer, 2, false, || ()).unwrap();
    for sessions in [&one, &other] {
        sessions.refresh().unwrap();
        assert!(bytes(sessions, &prompt).is_none());
    }
    fill(&one, &prompt, 1, true, || ()).unwrap();
    assert!(bytes(&one, &prompt) == Some(vec![1; 19_200]));
    assert!(bytes(&one, &longer) == Some(vec![2; 25_600]));
}

#[test]
fn a_removal_leaves_what_others_have_saved_since() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let base = fill(&one, &tokens(128, 1), 1, false, || ()).unwrap();
    other.refresh().unwrap();
    let longer = [tokens(128, 1), tokens(100, 2)].concat();
    fill(&other, &longer, 1, false, || ()).unwrap();
    one.remove(base.id).unwrap();
    assert!(bytes(&one, &longer) == Some(vec![1; 22_800]));
}

#[test]
fn what_is_replaced_leaves_what_others_have_saved_since() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let prompt = tokens(192, 1);
    let longer = [&prompt[..], &tokens(64, 2)].concat();
    fill(&one, &prompt, 1, false, || ()).unwrap();
    fill(&other, &longer, 1, false, || ()).unwrap();
    // It begins with pieces that `one` has no more use for, and knows of no other use of.
    fill(&one, &prompt, 2, true, || ()).unwrap();
    for sessions in [&one, &other] {
        sessions.refresh().unwrap();
        assert!(bytes(sessions, &longer) == Some(vec![1; 25_600]));
        assert!(bytes(sessions, &prompt) == Some(vec![2; 19_200]));
        sessions.depot().close();
    }
}

#[test]
fn nothing_is_left_of_what_was_replaced() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let prompt = tokens(100, 1);
    for round in 0..5 {
        let objects = vec![("logits".into(), Buffer::from_vec(content(round, 5000)))];
        save_with(&sessions, &prompt, "", objects).unwrap();
        assert_eq!(blocks(home.path()), 4, "two pieces, an object, a manifest");
    }
    fill(&sessions, &prompt, 7, true, || ()).unwrap();
    // The rows of before are nobody's any more, but for whoever saves these tokens.
    let id = longest(&sessions, &prompt).unwrap().id;
    sessions.remove(id).unwrap();
    assert_eq!(sessions.prefix(&prompt).unwrap(), 0);
    assert_eq!(blocks(home.path()), 0);
}

#[test]
fn what_no_manifest_has_room_for_is_refused_before_rows_are_asked_for() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let one = |at: u32| (at.to_string(), Buffer::from_vec(vec![1]));
    let twice = vec![one(1), one(1)];
    for objects in [(0..4097).map(one).collect(), twice] {
        let refused = save_with(&sessions, &tokens(100, 1), "", objects).unwrap_err();
        assert!(matches!(refused, Error::Input { .. }), "{refused}");
    }
    assert_eq!(sessions.prefix(&tokens(100, 1)).unwrap(), 0);
    assert!(matches!(sessions.find(""), Err(Error::Input { .. })));
    // Nor does a device become a file.
    let saved = save(&sessions, &tokens(100, 1));
    let refused = export(&sessions, saved.id, Path::new("/dev/null")).unwrap_err();
    assert!(matches!(refused, Error::Input { .. }), "{refused}");
}

/// A file with other bytes at a place, and a sum that says so.
fn forged(whole: &[u8], at: usize) -> Vec<u8> {
    let body = whole.len() - 32;
    let mut file = whole[..body].to_vec();
    file[at] ^= 1;
    let sum = blake3::hash(&file);
    file.extend(sum.as_bytes());
    file
}

#[test]
fn a_file_is_held_against_what_it_says_of_its_parts() {
    let old = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/archives/version1.kvs");
    let whole = std::fs::read(old).unwrap();
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("one.kvs");
    // The last byte is an object's.
    std::fs::write(&file, forged(&whole, whole.len() - 33)).unwrap();
    let empty = of_files(home.path());
    let refused = import(&empty, &file).unwrap_err().to_string();
    assert!(refused.contains("an object fails"), "{refused}");
    assert!(empty.list().is_empty());
}

#[test]
fn what_is_exact_is_so_behind_a_file_too() {
    let (home, away) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (one, other) = (sessions(home.path()), of_files(away.path()));
    let prompt = tokens(100, 1);
    let exact = fill(&one, &prompt, 1, true, || ()).unwrap();
    let file = home.path().join("one.kvs");
    export(&one, exact.id, &file).unwrap();
    // Others have other rows of the same tokens there.
    fill(&other, &[&prompt[..], &[7]].concat(), 2, false, || ()).unwrap();
    assert_eq!(import(&other, &file).unwrap().id, exact.id);
    assert!(bytes(&other, &prompt) == Some(vec![1; 10_000]));
}

#[test]
fn what_was_gone_is_found_again_once_another_has_saved_it() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let prompt = tokens(128, 1);
    let saved = fill(&one, &prompt, 1, false, || ()).unwrap();
    other.refresh().unwrap();
    // Its pieces go, and its manifest stays.
    let pieces = NamespaceSpec {
        group: Some("session pieces".into()),
        ..spec("w").namespace
    };
    other.depot().namespace(&pieces).unwrap().clear().unwrap();
    // Whoever took them for there knows now.
    assert!(bytes(&one, &prompt).is_none());
    assert!(longest(&one, &prompt).is_none());
    let again = fill(&other, &prompt, 1, false, || ()).unwrap();
    assert_eq!((again.id, again.cache_write_tokens), (saved.id, 128));
    // A tier of files learns of others' files in its own time.
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        one.refresh().unwrap();
        match bytes(&one, &prompt) {
            Some(all) => break assert!(all == vec![1; 12_800]),
            None => assert!(Instant::now() < deadline, "it is not found again"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_is_given_up_takes_nothing_of_what_was_acknowledged_meanwhile() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let prompt = tokens(300, 1);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let mut stream = sessions.stream(&[]).unwrap();
                let rows = Buffer::from_vec(vec![1; 30_000]);
                // A piece that the removal below takes away while both write it is not stored.
                match stream.append(&prompt, &[rows]) {
                    Ok(()) => stream.abort().unwrap(),
                    Err(error) => assert!(matches!(error, Error::NotStored { .. }), "{error}"),
                }
            }
        });
        let mut lost = 0;
        for _ in 0..300 {
            // Who saves may find that a part has gone; who was told that it is there finds it.
            if let Ok(saved) = fill(&sessions, &prompt, 1, false, || ()) {
                lost += usize::from(bytes(&sessions, &prompt).is_none());
                sessions.remove(saved.id).unwrap();
            }
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(lost, 0, "saves that were acknowledged");
    });
}

#[test]
fn what_shares_its_beginning_with_an_exact_one_is_found_at_once() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let [exact, any] = [2, 3].map(|last| [tokens(64, 1), tokens(10, last)].concat());
    // It does not look for the pieces of any, which it would believe for a moment to be missing.
    fill(&one, &exact, 1, true, || ()).unwrap();
    fill(&other, &any, 2, false, || ()).unwrap();
    one.refresh().unwrap();
    assert!(bytes(&one, &any) == Some(vec![2; 7400]));
}

#[test]
fn what_another_has_saved_again_is_found_at_once() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (of_files(home.path()), of_files(home.path()));
    let [first, second] = [2, 3].map(|last| [tokens(64, 1), tokens(10, last)].concat());
    let base = fill(&one, &first, 1, false, || ()).unwrap();
    // It knows that the piece of both is gone.
    one.remove(base.id).unwrap();
    fill(&other, &second, 2, false, || ()).unwrap();
    one.refresh().unwrap();
    assert!(bytes(&one, &second) == Some(vec![2; 7400]));
}
