//! `kill -9` at the boundary of each step of a save, a stream, a save in the background and a
//! removal: there is a session or none, older ones are whole, and nothing is left that a sweep does
//! not find.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{PIECE, blocks, longest, of_files, restore, rows, save, save_with, tokens};
use kvdepot_session::background::{Fit, Limits, Saver};
use kvdepot_session::{Checkpoint, Ending, Reason, Sessions};
use kvdepot_store::{BlockBuffers, Buffer};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{self, Child};
use tracing::field::{Field, Visit};
use tracing::span;

const NAME: &str = "crash_steps::a_kill_at_each_step_leaves_a_session_or_none";

/// What is done, in a depot with an older session.
const DEEDS: [&str; 5] = ["save", "again", "stream", "background", "remove"];

static COUNTS: AtomicBool = AtomicBool::new(false);
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Ends this process at a step.
struct Listens {
    last: u64,
}

#[derive(Default)]
struct Said(String);

impl Visit for Said {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "step" {
            self.0 = format!("{value:?}");
        }
    }
}

impl tracing::Subscriber for Listens {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        about.target() == "kvdepot_session::step"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        if !COUNTS.load(Ordering::Relaxed) {
            return;
        }
        let mut said = Said::default();
        event.record(&mut said);
        child::say(&format!("step {}", said.0.trim_matches('"')));
        if STEPS.fetch_add(1, Ordering::Relaxed) + 1 == self.last {
            child::say("there");
            child::sleep_until_killed();
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn older() -> Vec<u32> {
    tokens(3 * PIECE + 20, 1)
}

/// Shares three pieces with the older one, and has three more.
fn newer() -> Vec<u32> {
    [older()[..3 * PIECE].to_vec(), tokens(2 * PIECE + 30, 2)].concat()
}

fn logits(count: usize) -> Vec<(String, Buffer)> {
    let bytes = content(count as u64, 500);
    vec![("logits".into(), Buffer::from_vec(bytes))]
}

fn stream(sessions: &Sessions, text: &[u32]) {
    let mut stream = sessions.stream(text).unwrap();
    for at in (stream.tokens().len()..text.len()).step_by(50) {
        let run = at..(at + 50).min(text.len());
        let some = Buffer::from_vec(rows(text, &run));
        stream.append(&text[run], &[some]).unwrap();
    }
    let ending = Ending {
        text: b"",
        reason: Reason::Asked,
        context_tokens: 0,
        objects: logits(text.len()),
        note: String::new(),
        created: 1,
    };
    stream.commit(ending).unwrap();
}

fn background(sessions: &Sessions, text: &[u32]) {
    let limits = Limits {
        memory: 1 << 20,
        pace: None,
    };
    let saver = Saver::new(sessions, limits).unwrap();
    let checkpoint = Checkpoint {
        tokens: text,
        text: b"",
        reason: Reason::Asked,
        context_tokens: 0,
        objects: logits(text.len()),
        note: String::new(),
        created: 1,
        exact: false,
    };
    let asked = Box::new(|runs: &[std::ops::Range<usize>]| {
        let each = runs.iter().map(|run| Buffer::from_vec(rows(text, run)));
        Ok(BlockBuffers::whole(each))
    });
    let fit = Fit::Whole(Duration::ZERO);
    let mut snapshot = saver.begin(checkpoint, fit, asked, None).unwrap();
    snapshot.finish(None).unwrap();
    snapshot.ticket().wait(None).unwrap();
}

fn writer() {
    let last = child::value("last").parse().unwrap();
    tracing::subscriber::set_global_default(Listens { last }).unwrap();
    let sessions = of_files(Path::new(&child::value("home")));
    save(&sessions, &older());
    let deed = child::value("deed");
    if matches!(&deed[..], "again" | "remove") {
        let objects = vec![("before".into(), Buffer::from_vec(vec![7; 900]))];
        save_with(&sessions, &newer(), "before", objects).unwrap();
    }
    COUNTS.store(true, Ordering::Relaxed);
    match &deed[..] {
        "stream" => stream(&sessions, &newer()),
        "background" => background(&sessions, &newer()),
        "remove" => sessions
            .remove(longest(&sessions, &newer()).unwrap().id)
            .unwrap(),
        _ => {
            save(&sessions, &newer());
        }
    }
    child::say("done");
    child::sleep_until_killed();
}

/// The steps that were heard up to there; none where all was done before.
fn killed_at(deed: &str, last: u64, home: &Path) -> Option<Vec<String>> {
    let last = last.to_string();
    let values = [
        ("home", home.to_str().unwrap()),
        ("deed", deed),
        ("last", &last),
    ];
    let mut writer = Child::start(NAME, "writer", &values);
    let mut steps = Vec::new();
    let is_there = loop {
        let line = writer.line().expect("the child has ended");
        match line.strip_prefix("step ") {
            Some(step) => steps.push(step.to_owned()),
            None => break line == "there",
        }
    };
    writer.kill();
    is_there.then_some(steps)
}

fn check(deed: &str, steps: &[String], home: &Path) {
    let sessions = of_files(home);
    let has = |step: &str| steps.iter().any(|one| one == step);
    // What was there before is, but for what is replaced or removed.
    let found = longest(&sessions, &older()).unwrap();
    assert_eq!(restore(&sessions, &found), (true, older().len()));
    let new: Vec<_> = sessions.lookup(&newer(), 4).unwrap();
    let new: Vec<_> = new.iter().filter(|one| one.tokens == newer()).collect();
    let of_before = |one: &&&kvdepot_session::Found| one.text() == b"before";
    let before = new.iter().filter(of_before).count();
    let now = new.len() - before;
    match deed {
        "remove" => assert_eq!((before, now), (0, 0), "{steps:?}"),
        _ => assert_eq!(now, usize::from(has("the manifest is stored")), "{steps:?}"),
    }
    if deed == "again" {
        let is_gone = has("replaced manifests are removed");
        assert_eq!(before, usize::from(!is_gone), "{steps:?}");
    }
    for found in new.iter().filter(|one| !of_before(one)) {
        assert_eq!(restore(&sessions, found), (true, newer().len()));
    }
    // What no session names is found, and gone, temporaries too; what they name is not.
    sessions.sweep().unwrap();
    for found in sessions.lookup(&newer(), 4).unwrap() {
        assert!(sessions.verify(found.id).unwrap().missing.is_empty());
    }
    for listed in sessions.list() {
        assert!(sessions.verify(listed.id).unwrap().missing.is_empty());
        sessions.remove(listed.id).unwrap();
    }
    assert_eq!(blocks(home), 0, "{deed} up to {steps:?}");
    sessions.depot().close();
}

#[test]
fn a_kill_at_each_step_leaves_a_session_or_none() {
    if child::role().is_some() {
        return writer();
    }
    let mut seen = Vec::new();
    for deed in DEEDS {
        for last in 1.. {
            let home = tempfile::tempdir().unwrap();
            let Some(steps) = killed_at(deed, last, home.path()) else {
                break;
            };
            check(deed, &steps, home.path());
            seen.push(format!("{deed}: {}", steps.last().unwrap()));
        }
    }
    // Each step of each deed was heard of.
    for (deed, steps) in [
        ("save", 4),
        ("again", 5),
        ("stream", 6),
        ("background", 6),
        ("remove", 2),
    ] {
        let heard = seen.iter().filter(|one| one.starts_with(deed)).count();
        assert!(heard >= steps, "{deed}: {seen:?}");
    }
}
