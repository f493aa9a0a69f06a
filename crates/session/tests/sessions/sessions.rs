//! Sessions over real depots: saved, found, brought back, shared, lost, moved and removed.

use std::path::{Path, PathBuf};

use kvdepot_session::{Checkpoint, Error, Reason, Sessions, export, import, import_ds4};
use kvdepot_store::{BlockBuffers, Buffer, Key};

use crate::common::*;

#[test]
fn the_longest_session_that_a_prompt_begins_with_comes_back_whole() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    for count in [1, 63, 64, 65, 300, 1000] {
        save(&sessions, &tokens(1000, 6993 % 1000)[..count]);
    }
    let prompt = tokens(2000, 5);
    for (asked, found) in [(2000, 1000), (999, 300), (299, 65), (64, 64), (1, 1)] {
        let one = longest(&sessions, &prompt[..asked]).unwrap();
        assert_eq!(one.tokens.len(), found, "of {asked}");
        assert_eq!(restore(&sessions, &one), (true, found));
    }
    assert!(longest(&sessions, &[9, 9, 9]).is_none());
    let all = sessions.lookup(&prompt, 10).unwrap();
    let lens: Vec<usize> = all.iter().map(|one| one.tokens.len()).collect();
    assert_eq!(lens, [1000, 300, 65, 64, 63, 1]);
}

#[test]
fn what_two_conversations_begin_with_is_written_once() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let one = save(&sessions, &tokens(8192, 1)[..8192]);
    assert_eq!((one.cached_tokens, one.cache_write_tokens), (0, 8192));
    // 512 more, and the piece whose last token is another.
    let mut more = tokens(8192, 1);
    more.extend(0..512);
    let delta = save(&sessions, &more);
    assert_eq!((delta.cached_tokens, delta.cache_write_tokens), (8192, 512));
    let fresh = 512 * ROW as u64;
    // The manifest has all tokens: two or three bytes each.
    assert!(
        delta.bytes_written < fresh * 11 / 10 + 3 * 8704 + 700,
        "{delta:?}"
    );
    let other = save(&sessions, &tokens(8192, 2));
    assert_eq!(other.cache_write_tokens, PIECE);
    // The same again is there.
    let again = save(&sessions, &more);
    assert_eq!((again.id, again.cache_write_tokens), (delta.id, 0));
    assert_eq!(sessions.list().len(), 3);
}

#[test]
fn a_session_is_found_by_the_text_it_was_rendered_from() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let text = "a conversation, ".repeat(100);
    save_with(&sessions, &tokens(500, 1), &text, Vec::new()).unwrap();
    save_with(&sessions, &tokens(100, 1), &text[..300], Vec::new()).unwrap();
    let asked = format!("{text}and more");
    let found = sessions.lookup_text(asked.as_bytes(), 5).unwrap();
    let bytes: Vec<usize> = found.iter().map(|one| one.text_bytes).collect();
    assert_eq!(bytes, [text.len(), 300]);
    let found = sessions.lookup_text(&asked.as_bytes()[..301], 5).unwrap();
    assert_eq!(found.len(), 1);
    assert!(
        sessions
            .lookup_text(b"something else", 5)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn sessions_are_there_when_the_process_is_not_and_another_model_has_none() {
    let home = tempfile::tempdir().unwrap();
    let prompt = tokens(300, 1);
    {
        let sessions = sessions(home.path());
        save(&sessions, &prompt);
        sessions.depot().close();
    }
    let sessions = sessions(home.path());
    let found = longest(&sessions, &prompt).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 300));
    assert_eq!(found.context_tokens, 4096);
    let others = Sessions::open(sessions.depot().clone(), &spec("other")).unwrap();
    assert!(longest(&others, &prompt).is_none());
    sessions.depot().close();
}

#[test]
fn another_process_sees_what_this_one_has_saved_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let (one, other) = (sessions(home.path()), sessions(home.path()));
    let saved = save(&one, &tokens(300, 1));
    assert!(longest(&other, &tokens(300, 1)).is_none());
    other.refresh().unwrap();
    let found = longest(&other, &tokens(300, 1)).unwrap();
    assert_eq!(restore(&other, &found), (true, 300));
    other.remove(saved.id).unwrap();
    assert!(other.list().is_empty());
    // Who had it near has it until it leaves there.
    one.depot().close();
    assert!(
        Sessions::open(depot(home.path()), &spec("w"))
            .unwrap()
            .list()
            .is_empty()
    );
}

/// The files of the depot's blocks, the largest first.
fn files(home: &Path) -> Vec<PathBuf> {
    fn walk(dir: &Path, all: &mut Vec<(u64, PathBuf)>) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => walk(&path, all),
                false => all.push((entry.metadata().unwrap().len(), path)),
            }
        }
    }
    let mut all = Vec::new();
    walk(home, &mut all);
    all.sort();
    all.into_iter().rev().map(|(_, path)| path).collect()
}

#[test]
fn a_session_that_rots_is_used_no_more_and_the_next_best_is() {
    let home = tempfile::tempdir().unwrap();
    {
        let sessions = sessions(home.path());
        save(&sessions, &tokens(192, 1));
        let mut more = tokens(192, 1);
        more.extend(0..50);
        save(&sessions, &more);
        sessions.depot().close();
    }
    let mut prompt = tokens(192, 1);
    prompt.extend(0..100);
    // The rows of the last 50 tokens.
    let wanted = rows(&prompt, &(192..242));
    let held = |path: &PathBuf| {
        let bytes = std::fs::read(path).unwrap();
        bytes.windows(wanted.len()).position(|some| some == wanted)
    };
    let (path, at) = files(home.path())
        .into_iter()
        .find_map(|path| held(&path).map(|at| (path, at)))
        .unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at + 77] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let sessions = sessions(home.path());
    let all = sessions.lookup(&prompt, 2).unwrap();
    assert_eq!(all.len(), 2);
    assert_eq!(restore(&sessions, &all[0]), (false, 192));
    assert_eq!(restore(&sessions, &all[1]), (true, 192));
    // It is not tried again, and told of.
    assert_eq!(longest(&sessions, &prompt).unwrap().tokens.len(), 192);
    assert_eq!(sessions.list().iter().filter(|one| one.is_bad).count(), 1);
    // Saved again it is whole.
    save(&sessions, &prompt[..242]);
    let found = longest(&sessions, &prompt).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 242));
}

#[test]
fn what_is_removed_goes_but_for_what_others_name() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let (short, long) = (tokens(192, 1), [tokens(192, 1), tokens(300, 2)].concat());
    let (one, other) = (save(&sessions, &short), save(&sessions, &long));
    sessions.remove(other.id).unwrap();
    assert!(matches!(
        sessions.manifest(other.id),
        Err(Error::Unknown(_))
    ));
    let found = longest(&sessions, &long).unwrap();
    assert_eq!(
        (found.id, restore(&sessions, &found)),
        (one.id, (true, 192))
    );
    assert_eq!(sessions.prefix(&long).unwrap(), 192);
    sessions.remove(one.id).unwrap();
    assert_eq!(sessions.prefix(&long).unwrap(), 0);
    assert!(sessions.list().is_empty());
}

#[test]
fn a_session_goes_to_another_depot_as_a_file() {
    let (home, away) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let one = sessions(home.path());
    let saved = save(&one, &tokens(300, 1));
    let file = home.path().join("conversation.kvs");
    let bytes = export(&one, saved.id, &file).unwrap();
    assert_eq!(bytes, std::fs::metadata(&file).unwrap().len());
    let other = sessions(away.path());
    // Nothing of a file that has changed is there.
    let whole = std::fs::read(&file).unwrap();
    for at in [3, 9, 17, 40, 4096 + 7, whole.len() / 2, whole.len() - 1] {
        let mut wrong = whole.clone();
        wrong[at] ^= 1;
        let path = away.path().join("wrong.kvs");
        std::fs::write(&path, &wrong).unwrap();
        assert!(import(&other, &path).is_err(), "byte {at}");
        std::fs::write(&path, &whole[..at]).unwrap();
        assert!(import(&other, &path).is_err(), "up to {at}");
    }
    assert!(other.list().is_empty());
    assert_eq!(other.prefix(&tokens(300, 1)).unwrap(), 0);
    let imported = import(&other, &file).unwrap();
    assert_eq!((imported.id, imported.tokens), (saved.id, 300));
    let found = longest(&other, &tokens(300, 1)).unwrap();
    assert_eq!(restore(&other, &found), (true, 300));
    let strangers = Sessions::open(other.depot().clone(), &spec("other")).unwrap();
    let refused = import(&strangers, &file).unwrap_err().to_string();
    assert!(refused.contains("weights"), "{refused}");
    // Nothing is left beside it.
    let left = std::fs::read_dir(home.path()).unwrap().flatten();
    assert!(
        left.map(|one| one.file_name())
            .all(|one| !one.to_string_lossy().ends_with(".tmp"))
    );
}

#[test]
fn what_is_no_file_is_refused_and_not_waited_for() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let pipe = home.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    for path in [home.path(), &pipe] {
        for refused in [import(&sessions, path), import_ds4(&sessions, path)] {
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("a regular file"), "{refused}");
        }
    }
}

#[test]
fn all_of_a_session_can_be_looked_at() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let saved = save(&sessions, &tokens(300, 1));
    let checked = sessions.verify(saved.id).unwrap();
    assert_eq!((checked.blocks, checked.bytes), (6, 300 * ROW as u64 + 500));
    assert!(checked.missing.is_empty());
    let name = saved.id.to_string();
    assert_eq!(sessions.find(&name[..8]).unwrap(), saved.id);
    assert!(matches!(sessions.find("zz"), Err(Error::Unknown(_))));
}

#[test]
fn a_save_that_goes_wrong_leaves_no_session() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let prompt = tokens(300, 1);
    let checkpoint = || Checkpoint {
        tokens: &prompt,
        text: b"",
        reason: Reason::Cold,
        context_tokens: 0,
        objects: Vec::new(),
        note: String::new(),
        created: 0,
        exact: false,
    };
    let few = sessions.save(
        checkpoint(),
        Box::new(|_| Ok(BlockBuffers::whole([Buffer::from_vec(vec![1; 10])]))),
    );
    assert!(few.unwrap_err().to_string().contains("rows"));
    let failed = sessions.save(
        checkpoint(),
        Box::new(|_| Err(Error::Unknown("the engine's own trouble".into()))),
    );
    assert!(failed.is_err());
    let none = save_with(&sessions, &[], "", Vec::new());
    assert!(none.unwrap_err().to_string().contains("tokens"));
    assert!(sessions.list().is_empty());
    assert!(longest(&sessions, &prompt).is_none());
}

#[test]
fn a_session_of_another_version_keeps_what_it_may_name_until_it_is_removed() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let text = tokens(100, 1);
    save(&sessions, &text);
    let all = sessions.depot().namespaces().unwrap();
    let put = |group: &str, key: u8, bytes: &[u8]| {
        let of = all.iter().find(|one| {
            let about = one.description.as_deref().unwrap_or_default();
            about.ends_with(group)
        });
        let space = sessions.depot().namespace_by_id(of.unwrap().id);
        let block = BlockBuffers::whole([Buffer::from_vec(bytes.to_vec())]);
        let task = space.put(vec![Key([key; 32])], block).unwrap();
        assert_eq!(task.wait(None).unwrap(), [true]);
    };
    // What a save has left that was killed, or a part of that session.
    put("session pieces", 8, &[0; 500]);
    put("session manifests", 9, b"kvsessn\x02 of tomorrow");
    assert_eq!(sessions.sweep().unwrap(), 0);
    assert_eq!(sessions.list().len(), 1);
    let other = sessions.find("0909").unwrap();
    sessions.remove(other).unwrap();
    assert!(matches!(sessions.find("0909"), Err(Error::Unknown(_))));
    assert_eq!(sessions.sweep().unwrap(), 1);
    let found = longest(&sessions, &text).unwrap();
    assert_eq!(restore(&sessions, &found), (true, 100));
}
