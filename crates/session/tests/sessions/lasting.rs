//! What is acknowledged outlives the process, whatever the tiers before the one that acknowledges
//! hold: nothing counts as stored for being there, no admission rule keeps a part of a session
//! back, and what a budget or a full queue refuses fails the save.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use crate::common::{PIECE, blocks, longest, of_files, restore, rows, save_with, spec, tokens};
use kvdepot_session::background::{Fit, Limits, Saver};
use kvdepot_session::{Checkpoint, Ending, Error, Reason, Sessions};
use kvdepot_store::{BlockBuffers, Buffer, Config, Outcome};
use kvdepot_testkit::bytes::content;
use serde_json::{Value, json};

const LONG: Option<Duration> = Some(Duration::from_secs(600));

/// Sessions of two tiers, of which the second acknowledges.
fn open(home: &Path, edge: &Value, own: &Value) -> Sessions {
    let mut posix = json!({"path": home.join("posix"), "capacity": "256MiB"});
    // A lookup may take longer than a machine stands still.
    let mut settings = json!({
        "socket": "off", "lanes": 1, "lookup_timeout": "60s", "cache": {"capacity": "16MiB"},
    });
    for (into, more) in [(&mut posix, edge), (&mut settings, own)] {
        let more = more.as_object().unwrap().clone();
        into.as_object_mut().unwrap().extend(more);
    }
    settings["posix"] = posix;
    let config = Config::new("Cache|Posix", &settings).unwrap();
    Sessions::open(kvdepot_service::open(&config).unwrap(), &spec("w")).unwrap()
}

fn plain(home: &Path) -> Sessions {
    open(home, &json!({}), &json!({}))
}

fn objects(count: usize) -> Vec<(String, Buffer)> {
    let logits = content(count as u64, 500);
    vec![("logits".into(), Buffer::from_vec(logits))]
}

/// The ways to save.
#[derive(Clone, Copy, Debug)]
enum Way {
    Save,
    Exact,
    Stream,
    Serialized,
    Background,
}

const WAYS: [Way; 5] = [
    Way::Save,
    Way::Exact,
    Way::Stream,
    Way::Serialized,
    Way::Background,
];

fn save(sessions: &Sessions, text: &[u32], way: Way) -> Result<(), Error> {
    save_rows(sessions, text, way, &|run| rows(text, run))
}

fn save_rows(
    sessions: &Sessions,
    text: &[u32],
    way: Way,
    rows: &dyn Fn(&Range<usize>) -> Vec<u8>,
) -> Result<(), Error> {
    let checkpoint = Checkpoint {
        tokens: text,
        text: b"",
        reason: Reason::Asked,
        context_tokens: 4096,
        objects: objects(text.len()),
        note: String::new(),
        created: 1_700_000_000,
        exact: matches!(way, Way::Exact),
    };
    let asked = |runs: &[Range<usize>]| {
        let each = runs.iter().map(|run| Buffer::from_vec(rows(run)));
        Ok(BlockBuffers::whole(each))
    };
    match way {
        Way::Save | Way::Exact => sessions.save(checkpoint, Box::new(asked)).map(drop),
        Way::Stream => {
            let mut stream = sessions.stream(text)?;
            while stream.tokens().len() < text.len() {
                let at = stream.tokens().len();
                let run = at..(at + 50).min(at + stream.room()).min(text.len());
                let chunk = Buffer::from_vec(rows(&run));
                stream.append(&text[run], &[chunk])?;
            }
            let ending = Ending {
                text: b"",
                reason: Reason::Asked,
                context_tokens: 4096,
                objects: objects(text.len()),
                note: String::new(),
                created: 1_700_000_000,
            };
            stream.commit(ending).map(drop)
        }
        Way::Serialized => {
            let size = |run: Range<usize>| rows(&run).len() as u64;
            let serialized = sessions.save_serialized(checkpoint, size, |runs, sink| {
                runs.iter().try_for_each(|run| sink.write(&rows(run)))
            });
            serialized.map(drop)
        }
        Way::Background => {
            let limits = Limits {
                memory: 1 << 20,
                pace: None,
            };
            let saver = Saver::new(sessions, limits)?;
            let fit = Fit::Piecewise(Duration::MAX);
            let mut snapshot = saver.begin(checkpoint, fit, Box::new(asked), None)?;
            snapshot.finish(LONG)?;
            snapshot.ticket().wait(LONG).map(drop)
        }
    }
}

/// Whether another process finds a session whole once this one has closed.
fn outlives(home: &Path, sessions: &Sessions, text: &[u32]) -> bool {
    sessions.depot().close();
    let other = of_files(home);
    let found = longest(&other, text).filter(|found| found.tokens == text);
    let whole = found.is_some_and(|found| restore(&other, &found) == (true, text.len()));
    other.depot().close();
    whole
}

/// Everything of a group goes in the tier that acknowledges, as for want of room there.
fn evict(home: &Path, group: &str) -> usize {
    let files = of_files(home);
    let all = files.depot().namespaces().unwrap();
    let of = all.iter().find(|one| {
        let about = one.description.as_deref().unwrap_or_default();
        about.ends_with(group)
    });
    let gone = files
        .depot()
        .namespace_by_id(of.unwrap().id)
        .clear()
        .unwrap();
    files.depot().close();
    gone
}

#[test]
fn what_only_a_nearer_tier_has_is_written_again() {
    for way in WAYS {
        for group in ["session pieces", "session objects", "session manifests"] {
            let home = tempfile::tempdir().unwrap();
            let text = tokens(3 * PIECE + 10, 1);
            let sessions = plain(home.path());
            save(&sessions, &text[..2 * PIECE], way).unwrap();
            save(&sessions, &text, way).unwrap();
            assert!(evict(home.path(), group) > 0);
            // It is in memory still.
            assert!(longest(&sessions, &text).is_some());
            save(&sessions, &text, way).unwrap();
            let lasts = outlives(home.path(), &sessions, &text);
            assert!(lasts, "{way:?}, without {group}");
        }
    }
}

#[test]
fn no_admission_rule_keeps_a_part_of_a_session_back() {
    let edges = [
        json!({"admission": "second"}),
        json!({"block_min": "1MiB"}),
        json!({"block_max": "4KiB"}),
    ];
    for way in WAYS {
        for edge in &edges {
            let home = tempfile::tempdir().unwrap();
            let text = tokens(3 * PIECE + 10, 1);
            let sessions = open(home.path(), edge, &json!({}));
            save(&sessions, &text, way).unwrap();
            let lasts = outlives(home.path(), &sessions, &text);
            assert!(lasts, "{way:?} with {edge}");
        }
    }
}

#[test]
fn a_budget_that_refuses_a_piece_fails_the_save_each_time() {
    for way in WAYS {
        let home = tempfile::tempdir().unwrap();
        let text = tokens(3 * PIECE + 10, 1);
        let edge = json!({"write_budget_hour": "15KB"});
        let sessions = open(home.path(), &edge, &json!({}));
        for _ in 0..3 {
            let refused = save(&sessions, &text, way).unwrap_err();
            let why = match &refused {
                Error::Background(why) => why,
                other => other,
            };
            let declined = matches!(why, Error::NotStored { outcome, .. }
                if *outcome == Outcome::Declined);
            assert!(declined, "{way:?}: {refused}");
        }
        assert!(sessions.list().is_empty());
        assert!(!outlives(home.path(), &sessions, &text));
    }
}

#[test]
fn what_a_full_queue_drops_fails_the_save() {
    let own = json!({"overload": "drop", "write_back_depth": "16KiB"});
    let home = tempfile::tempdir().unwrap();
    let sessions = open(home.path(), &json!({}), &own);
    let (mut acknowledged, mut dropped) = (Vec::new(), 0);
    for last in 0..20 {
        let text: Vec<u32> = (0..4 * PIECE as u32).map(|at| at + 1000 * last).collect();
        // Twice, as whoever is refused tries again.
        for way in [Way::Save, Way::Stream] {
            match save(&sessions, &text, way) {
                Ok(()) => acknowledged.push(text.clone()),
                Err(Error::NotStored { outcome, .. }) => {
                    assert_eq!(outcome, Outcome::Dropped);
                    dropped += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(dropped > 0, "the queue was never full");
    sessions.depot().close();
    let other = of_files(home.path());
    for text in &acknowledged {
        let found = longest(&other, text).filter(|found| found.tokens == *text);
        assert!(found.is_some_and(|found| restore(&other, &found).0));
    }
    other.depot().close();
}

#[test]
fn a_file_that_comes_in_is_written_where_it_lasts() {
    let home = tempfile::tempdir().unwrap();
    let text = tokens(3 * PIECE + 10, 1);
    let sessions = plain(home.path());
    let saved = save_with(&sessions, &text, "", objects(text.len())).unwrap();
    let file = home.path().join("one.kvs");
    kvdepot_session::export(&sessions, saved.id, &file).unwrap();
    for group in ["session pieces", "session objects", "session manifests"] {
        evict(home.path(), group);
    }
    kvdepot_session::import(&sessions, &file).unwrap();
    assert!(outlives(home.path(), &sessions, &text));
}

#[test]
fn what_no_tier_can_keep_is_refused_before_a_byte_is_written() {
    for way in WAYS {
        let home = tempfile::tempdir().unwrap();
        let small = json!({"capacity": "8MiB"});
        let sessions = open(home.path(), &small, &json!({}));
        let other = tokens(3 * PIECE, 1);
        save(&sessions, &other, Way::Save).unwrap();
        let before = blocks(home.path());
        // Twelve pieces of 640 KiB: more than nine tenths of the directory.
        let text: Vec<u32> = (5000..5000 + 12 * PIECE as u32).collect();
        let rows = |run: &Range<usize>| vec![7; run.len() * 10_240];
        let refused = save_rows(&sessions, &text, way, &rows).unwrap_err();
        assert!(matches!(refused, Error::Input { .. }), "{way:?}: {refused}");
        // How long a stream gets nobody knows before it is that long.
        if !matches!(way, Way::Stream) {
            assert!(sessions.depot().drain(Duration::MAX));
            assert_eq!(blocks(home.path()), before, "{way:?}");
            assert!(outlives(home.path(), &sessions, &other), "{way:?}");
        }
        sessions.depot().close();
    }
}

#[test]
fn a_session_of_a_quarter_of_a_full_directory_is_saved() {
    let home = tempfile::tempdir().unwrap();
    let sessions = open(home.path(), &json!({"capacity": "8MiB"}), &json!({}));
    let save = |seed: u32, pieces: usize| {
        let text: Vec<u32> = (0..pieces * PIECE)
            .map(|at| seed << 16 | at as u32)
            .collect();
        let rows = |run: &Range<usize>| vec![seed as u8; run.len() * (64 << 10) / PIECE];
        save_rows(&sessions, &text, Way::Save, &rows)
    };
    (1..40).for_each(|seed| save(seed, 4).unwrap());
    assert!(save(40, 32).is_ok());
}
