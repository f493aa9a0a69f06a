//! How often sessions are restored, and which of them go where room is short.

use kvdepot_session::{Checkpoint, Id, Reason, Sessions, Usage};
use kvdepot_store::{BlockBuffers, Buffer};

use crate::common::*;

fn save_as(sessions: &Sessions, tokens: &[u32], reason: Reason, created: u64) -> Id {
    let checkpoint = Checkpoint {
        tokens,
        text: b"",
        reason,
        context_tokens: 0,
        objects: Vec::new(),
        note: String::new(),
        created,
        exact: false,
    };
    let rows = |runs: &[std::ops::Range<usize>]| {
        let each = runs.iter().map(|run| Buffer::from_vec(rows(tokens, run)));
        Ok(BlockBuffers::whole(each))
    };
    sessions.save(checkpoint, Box::new(rows)).unwrap().id
}

fn usage(sessions: &Sessions, id: Id) -> Usage {
    sessions.usage(&[id]).unwrap()[0]
}

fn restore_any(sessions: &Sessions, id: Id) -> bool {
    restore(sessions, &sessions.named(id).unwrap()).0
}

#[test]
fn restores_are_counted_by_all_and_for_the_next() {
    let home = tempfile::tempdir().unwrap();
    let prompt = tokens(300, 1);
    let one = sessions(home.path());
    let (id, never) = (save(&one, &prompt).id, save(&one, &tokens(200, 3)).id);
    assert_eq!(usage(&one, id), Usage::default());
    let found = longest(&one, &prompt).unwrap();
    for _ in 0..3 {
        assert!(restore(&one, &found).0);
    }
    assert_eq!(usage(&one, id).hits, 3);
    assert!(usage(&one, id).used > 1_700_000_000);
    let depot = one.depot().clone();
    drop(one);
    depot.close();
    let (one, other) = (sessions(home.path()), sessions(home.path()));
    assert!(restore(&other, &longest(&other, &prompt).unwrap()).0);
    assert_eq!((usage(&other, id).hits, usage(&one, never).hits), (4, 0));
    // What is not whole is no use of it.
    assert_eq!(usage(&one, id).hits, 4);
    one.remove(id).unwrap();
    let again = save(&one, &prompt).id;
    assert_eq!(usage(&one, again), Usage::default());
    one.depot().close();
    other.depot().close();
}

#[test]
fn what_is_superseded_goes_first_and_then_what_saves_least_for_its_bytes() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let long = tokens(1030, 7);
    let at = |seconds: u64| 1_700_000_000 + seconds;
    let cold = save_as(&sessions, &long[..500], Reason::Cold, at(0));
    let step = save_as(&sessions, &long[..700], Reason::Continued, at(1));
    let last = save_as(&sessions, &long, Reason::Shutdown, at(2));
    // Of no use yet, but for the last: older, and restored.
    let fresh = save_as(&sessions, &tokens(400, 9)[100..], Reason::Cold, at(3));
    let used = save_as(&sessions, &tokens(400, 8)[50..350], Reason::Cold, at(4));
    assert!(restore_any(&sessions, used));

    let all = sessions.trim(u64::MAX, &[]).unwrap();
    assert_eq!((all.removed, all.bytes), (vec![], all.bytes_before));
    // One byte too many: the step on the way, whose short last piece is its own.
    let one = sessions.trim(all.bytes - 1, &[]).unwrap();
    assert_eq!(one.removed, [step]);
    let freed = one.bytes_before - one.bytes;
    assert!((1..200 * ROW as u64).contains(&freed), "{freed}");
    // Of two of the same length the one that nobody has asked for. `keep` stays.
    let two = sessions.trim(one.bytes - 1, &[cold, last]).unwrap();
    assert_eq!(two.removed, [fresh]);
    for id in [cold, last, used] {
        assert!(restore_any(&sessions, id));
    }
    let three = sessions.trim(0, &[last]).unwrap();
    assert!(three.bytes > 0 && !three.removed.contains(&last));
    assert!(restore_any(&sessions, last));
    let left: Vec<Id> = sessions.list().iter().map(|one| one.id).collect();
    assert_eq!(left, [last]);
    let none = sessions.trim(0, &[]).unwrap();
    assert_eq!((none.removed, none.bytes), (vec![last], 0));
    sessions.depot().close();
}

#[test]
fn sessions_that_share_all_of_their_bytes_go_too() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    for count in [128, 192, 256] {
        save_as(
            &sessions,
            &tokens(256, 0)[..count],
            Reason::Continued,
            count as u64,
        );
    }
    let trimmed = sessions.trim(1, &[]).unwrap();
    assert_eq!((trimmed.removed.len(), trimmed.bytes), (3, 0));
    assert!(sessions.list().is_empty());
    sessions.depot().close();
}
