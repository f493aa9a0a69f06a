//! Saves in the background: nothing waits for them, their memory is bounded, and what they save is
//! what a save at once does.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::common::{PIECE, ROW, blocks, longest, of_files, restore, rows, save, sessions, tokens};
use kvdepot_session::background::{Fit, Limits, OnEnd, Saver, Slice, Snapshot};
use kvdepot_session::policy::{Origin, Policy, Prompt, Settings};
use kvdepot_session::{Checkpoint, Error, Reason, Sessions};
use kvdepot_store::{BlockBuffers, Buffer};
use kvdepot_testkit::Rng;
use kvdepot_testkit::bytes::content;

const ROOM: Limits = Limits {
    memory: 64 << 20,
    pace: None,
};

const NOW: Fit = Fit::Whole(Duration::ZERO);

const LONG: Option<Duration> = Some(Duration::from_secs(60));

fn checkpoint(text: &[u32]) -> Checkpoint<'_> {
    let logits = Buffer::from_vec(content(text.len() as u64, 500));
    Checkpoint {
        tokens: text,
        text: b"",
        reason: Reason::Continued,
        context_tokens: 4096,
        objects: vec![("logits".into(), logits)],
        note: String::new(),
        created: 1_700_000_000,
        exact: false,
    }
}

fn begin_with(
    saver: &Saver,
    text: &[u32],
    fit: Fit,
    on_end: Option<OnEnd>,
) -> Result<Snapshot, Error> {
    let asked = Box::new(|runs: &[std::ops::Range<usize>]| {
        let each = runs.iter().map(|run| Buffer::from_vec(rows(text, run)));
        Ok(BlockBuffers::whole(each))
    });
    saver.begin(checkpoint(text), fit, asked, on_end)
}

fn begin(saver: &Saver, text: &[u32]) -> Snapshot {
    let patient = Fit::Piecewise(Duration::from_secs(60));
    begin_with(saver, text, patient, None).unwrap()
}

fn is_whole(sessions: &Sessions, text: &[u32]) -> bool {
    let found = longest(sessions, text).filter(|found| found.tokens == text);
    found.is_some_and(|found| restore(sessions, &found) == (true, text.len()))
}

#[test]
fn what_is_copied_in_slices_is_the_session_that_a_save_makes() {
    let mut rng =
        Rng::for_test("background::what_is_copied_in_slices_is_the_session_that_a_save_makes");
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let saver = Saver::new(&sessions, ROOM).unwrap();
    let mut text = Vec::new();
    for _ in 0..10 {
        let before = text.len() - text.len() % PIECE;
        text.extend((0..1 + rng.below(500)).map(|_| rng.below(1000) as u32));
        let mut snapshot = begin(&saver, &text);
        let all = ((text.len() - before) * ROW) as u64;
        assert_eq!(snapshot.left(), all);
        let mut copied = 0;
        while snapshot.left() > 0 {
            let slice = match rng.once_in(2) {
                true => Slice::Bytes(1 + rng.below(9000)),
                false => Slice::Time(Duration::from_micros(rng.below(20))),
            };
            let step = snapshot.step(slice).unwrap();
            if let Slice::Bytes(most) = slice {
                assert!(step.copied <= most);
            }
            copied += step.copied;
            assert_eq!((step.left, step.is_full), (all - copied, false));
        }
        let saved = snapshot.ticket().wait(LONG).unwrap();
        let count = text.len();
        assert_eq!(
            (saved.cached_tokens, saved.cache_write_tokens),
            (before, count - before)
        );
        let progress = snapshot.ticket().progress();
        assert_eq!((progress.copied, progress.written), (all, all));
        assert!(progress.is_over && is_whole(&sessions, &text));
        assert_eq!(saver.memory_used(), 0);
    }
    // The same at once, and what is there already.
    let saved = saver
        .save(checkpoint(&text), Box::new(|_| unreachable!()), None)
        .unwrap();
    assert_eq!(saved.cache_write_tokens, 0);
}

#[test]
fn the_engine_goes_on_with_its_memory_once_it_was_copied() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let slow = Limits {
        pace: Some(200_000),
        ..ROOM
    };
    let saver = Saver::new(&sessions, slow).unwrap();
    let text = tokens(640, 1);
    let memory = Buffer::from_vec(rows(&text, &(0..640)));
    let logits = Buffer::from_vec(content(640, 500));
    let mut at = checkpoint(&text);
    at.objects = vec![("logits".into(), logits.clone())];
    let lent = memory.clone();
    let asked = Box::new(move |runs: &[std::ops::Range<usize>]| {
        let slice = |run: &std::ops::Range<usize>| lent.slice(run.start * ROW, run.len() * ROW);
        Ok(BlockBuffers::whole(
            runs.iter().map(|run| slice(run).unwrap()),
        ))
    });
    let mut snapshot = saver.begin(at, NOW, asked, None).unwrap();
    // Objects change with each token.
    logits.write_at(0, &[0; 500]).unwrap();
    snapshot.finish(None).unwrap();
    memory.write_at(0, &vec![0; 64_000]).unwrap();
    assert!(!snapshot.ticket().progress().is_over, "it is paced");
    snapshot.ticket().wait(LONG).unwrap();
    assert!(is_whole(&sessions, &text));
}

#[test]
fn snapshots_have_no_more_memory_than_they_may() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    // Two pieces and some, and the objects of two.
    let memory = (2 * PIECE * ROW + 2000) as u64;
    let limits = Limits {
        memory,
        pace: Some(1_000_000),
    };
    let saver = Saver::new(&sessions, limits).unwrap();
    let (long, short) = (tokens(40 * PIECE, 1), [7_u32; 100]);
    let mut snapshot = begin(&saver, &long);
    let mut most = 0;
    let mut full = 0;
    while snapshot.left() > 0 {
        let step = snapshot.step(Slice::Bytes(1 << 30)).unwrap();
        full += u64::from(step.is_full);
        most = most.max(saver.memory_used());
        assert!(saver.memory_used() <= memory);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(full > 0 && most > (PIECE * ROW) as u64);
    // All at once it is refused, also where it would wait.
    for fit in [NOW, Fit::Whole(Duration::from_secs(60))] {
        let other = tokens(40 * PIECE, 2)
            .into_iter()
            .map(|token| token + 1)
            .collect::<Vec<_>>();
        let refused = begin_with(&saver, &other, fit, None).err().unwrap();
        assert!(matches!(refused, Error::NoRoom { .. }), "{refused}");
    }
    // One that has its room waits, or is refused, while another has it.
    let ticket = snapshot.ticket();
    ticket.wait(LONG).unwrap();
    let mut first = begin_with(&saver, &short, NOW, None).unwrap();
    let second = begin_with(&saver, &[8; 100], NOW, None);
    assert!(matches!(second, Err(Error::NoRoom { .. })));
    let soon = begin_with(
        &saver,
        &[8; 100],
        Fit::Whole(Duration::from_millis(10)),
        None,
    );
    assert!(matches!(soon, Err(Error::NoRoom { .. })));
    first.finish(None).unwrap();
    let mut second = begin_with(&saver, &[8; 100], Fit::Whole(Duration::from_secs(60)), None);
    second.as_mut().unwrap().finish(None).unwrap();
    saver.flush(LONG).unwrap();
    assert!(is_whole(&sessions, &short) && is_whole(&sessions, &[8; 100]));
    assert!(is_whole(&sessions, &long));
}

#[test]
fn a_save_is_paced_until_somebody_waits_for_its_end() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let slow = Limits {
        pace: Some(1000),
        ..ROOM
    };
    let saver = Saver::new(&sessions, slow).unwrap();
    let text = tokens(1000, 1);
    let mut snapshot = begin(&saver, &text);
    snapshot.finish(None).unwrap();
    // A hundred seconds by its pace.
    let late = snapshot.ticket().wait(Some(Duration::from_millis(50)));
    assert!(matches!(
        late,
        Err(Error::Depot(kvdepot_store::Error::Timeout { .. }))
    ));
    let begun = Instant::now();
    saver.flush(LONG).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(50));
    assert!(is_whole(&sessions, &text));
    // As does the end.
    let longer = [text, tokens(900, 2)].concat();
    begin(&saver, &longer).finish(None).unwrap();
    saver.close(LONG).unwrap();
    assert!(is_whole(&sessions, &longer));
    assert!(begin_with(&saver, &longer, NOW, None).is_err());
    saver.close(LONG).unwrap();
}

#[test]
fn what_is_given_up_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let text = tokens(1000, 1);
    save(&sessions, &text[..100]);
    // The first time that it comes back is counted, beside it.
    assert!(is_whole(&sessions, &text[..100]));
    let kept = blocks(home.path());
    for way in 0..3 {
        let saver = Saver::new(&sessions, ROOM).unwrap();
        let mut snapshot = begin(&saver, &text);
        snapshot.step(Slice::Bytes(40_000)).unwrap();
        while snapshot.ticket().progress().written == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(blocks(home.path()) > kept);
        let ticket = snapshot.ticket();
        match way {
            0 => drop(snapshot),
            1 => drop(saver),
            _ => {
                saver.close(LONG).unwrap();
                let failed = snapshot.step(Slice::Bytes(1)).unwrap_err();
                assert!(failed.to_string().contains("cancelled"));
            }
        }
        let failed = ticket.wait(LONG).unwrap_err();
        assert!(matches!(&failed, Error::Background(why) if matches!(**why, Error::Cancelled)));
        assert_eq!(blocks(home.path()), kept);
        assert!(is_whole(&sessions, &text[..100]));
    }
}

#[test]
fn a_save_that_fails_is_told_and_the_policy_lets_it_be_tried_again() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let saver = Saver::new(&sessions, ROOM).unwrap();
    let settings = Settings {
        min_tokens: 10,
        write_budget_hour: Some(100 << 20),
        ..Settings::default()
    };
    let policy = Arc::new(Mutex::new(Policy::new(settings).unwrap()));
    let now = || Duration::from_secs(1_800_000_000);
    let text = tokens(1000, 1);
    let prompt = Prompt {
        tokens: 1000,
        origin: Origin::Empty,
        anchor: None,
    };
    policy.lock().unwrap().start(0, &prompt);
    let told = Arc::new(AtomicU64::new(0));
    for fails in [true, false] {
        let granted = policy
            .lock()
            .unwrap()
            .switch(0, 1000, now())
            .save()
            .unwrap();
        let before = policy.lock().unwrap().bytes_left(now());
        let (policy_too, told_too) = (Arc::clone(&policy), Arc::clone(&told));
        let on_end: OnEnd = Box::new(move |saved, bytes| {
            let mut policy = policy_too.lock().unwrap();
            match saved {
                Ok(_) => policy.saved(granted.id, bytes, now()).unwrap(),
                Err(_) => policy.failed(granted.id, bytes, now()).unwrap(),
            }
            told_too.fetch_add(1, Ordering::Relaxed);
        });
        let mut snapshot = begin_with(&saver, &text, NOW, Some(on_end)).unwrap();
        if fails {
            // Pieces that are there when the save begins, and are not at its end.
            snapshot.step(Slice::Bytes(90_000)).unwrap();
            while snapshot.ticket().progress().written < 80_000 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let other = of_files(home.path());
            assert!(other.sweep().unwrap() > 0);
        }
        snapshot.finish(None).unwrap();
        let ended = snapshot.ticket().wait(LONG);
        assert_eq!(ended.is_err(), fails, "{ended:?}");
        assert_eq!(sessions.list().is_empty(), fails);
        // What was granted and not written is given back.
        assert!(policy.lock().unwrap().bytes_left(now()) > before);
    }
    assert_eq!(told.load(Ordering::Relaxed), 2);
    assert!(is_whole(&sessions, &text));
}

#[test]
fn several_engines_save_at_once() {
    let home = tempfile::tempdir().unwrap();
    let sessions = sessions(home.path());
    let limits = Limits {
        memory: 200_000,
        pace: None,
    };
    let saver = Saver::new(&sessions, limits).unwrap();
    let (done, all) = mpsc::channel();
    std::thread::scope(|scope| {
        for engine in 0..4_u32 {
            let (saver, done) = (&saver, done.clone());
            scope.spawn(move || {
                for round in 1..6_u32 {
                    let text: Vec<u32> = (0..round * 200).map(|at| at + engine * 9000).collect();
                    let mut snapshot = begin(saver, &text);
                    while snapshot.step(Slice::Bytes(10_000)).unwrap().left > 0 {
                        std::thread::yield_now();
                    }
                    done.send((snapshot.ticket(), text)).unwrap();
                }
            });
        }
    });
    drop(done);
    for (ticket, text) in all {
        ticket.wait(LONG).unwrap();
        assert!(is_whole(&sessions, &text));
    }
    assert_eq!(saver.memory_used(), 0);
}

#[test]
fn who_is_told_of_an_end_may_panic() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let saver = Saver::new(&sessions, ROOM).unwrap();
    for round in 1..3 {
        let text = tokens(100, round);
        let told: OnEnd = Box::new(|_, _| panic!("a policy that fails"));
        let mut snapshot = begin_with(&saver, &text, NOW, Some(told)).unwrap();
        snapshot.finish(LONG).unwrap();
        snapshot.ticket().wait(LONG).unwrap();
        assert!(is_whole(&sessions, &text));
    }
    saver.close(LONG).unwrap();
}

#[test]
fn no_two_snapshots_wait_for_the_room_of_each_others_objects() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    // A piece, and the objects of one; those of two leave none for a piece.
    let memory = (PIECE * ROW + 900) as u64;
    let saver = Saver::new(&sessions, Limits { memory, pace: None }).unwrap();
    let (one, other) = (tokens(300, 1), vec![7; 300]);
    let mut first = begin(&saver, &one);
    let soon = Fit::Piecewise(Duration::from_millis(10));
    let refused = begin_with(&saver, &other, soon, None);
    let came = first.finish(Some(Duration::from_secs(10)));
    came.unwrap();
    assert!(matches!(refused, Err(Error::NoRoom { .. })));
    // It waits until the first has ended.
    begin(&saver, &other).finish(LONG).unwrap();
    saver.close(LONG).unwrap();
    assert!(is_whole(&sessions, &one) && is_whole(&sessions, &other));
}

#[test]
fn buffers_without_bytes_hold_up_no_save() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let saver = Saver::new(&sessions, ROOM).unwrap();
    let text = tokens(150, 1);
    let none = || Buffer::from_vec(Vec::new());
    let asked = Box::new(|runs: &[std::ops::Range<usize>]| {
        let mut blocks = BlockBuffers::default();
        for run in runs {
            let rows = Buffer::from_vec(rows(&text, run));
            blocks.push([none(), rows, none(), none()]);
        }
        Ok(blocks)
    });
    let mut snapshot = saver.begin(checkpoint(&text), NOW, asked, None).unwrap();
    snapshot.finish(None).unwrap();
    // All that was copied whole has ended.
    saver.close(None).unwrap();
    assert!(snapshot.ticket().progress().is_over && is_whole(&sessions, &text));
}

#[test]
fn a_save_that_is_refused_at_its_beginning_is_told() {
    let home = tempfile::tempdir().unwrap();
    let sessions = of_files(home.path());
    let limits = Limits {
        memory: 8000,
        pace: None,
    };
    let saver = Saver::new(&sessions, limits).unwrap();
    let text = tokens(150, 1);
    let told = Arc::new(Mutex::new(Vec::new()));
    let on_end = || -> OnEnd {
        let told = Arc::clone(&told);
        Box::new(move |saved, bytes| {
            told.lock().unwrap().push((saved.is_ok(), bytes));
        })
    };
    let refusals: [&dyn Fn() -> Result<Snapshot, Error>; 5] = [
        // No tokens, no rows, rows that the engine does not have, no room.
        &|| begin_with(&saver, &[], NOW, Some(on_end())),
        &|| {
            let none = Box::new(|_: &[std::ops::Range<usize>]| Ok(BlockBuffers::default()));
            saver.begin(checkpoint(&text), NOW, none, Some(on_end()))
        },
        &|| {
            let fails = Box::new(|_: &[std::ops::Range<usize>]| Err(Error::Cancelled));
            saver.begin(checkpoint(&text), NOW, fails, Some(on_end()))
        },
        &|| begin_with(&saver, &text, Fit::Whole(Duration::ZERO), Some(on_end())),
        &|| {
            saver.cancel();
            begin_with(&saver, &text, NOW, Some(on_end()))
        },
    ];
    for (number, refuse) in refusals.iter().enumerate() {
        assert!(refuse().is_err());
        assert_eq!(*told.lock().unwrap(), vec![(false, 0); number + 1]);
    }
}
