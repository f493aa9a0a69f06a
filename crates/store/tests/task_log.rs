//! What the log says about tasks and their stages.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use common::{PATIENCE, Place, eventually, has, namespace, put};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

type Fields = BTreeMap<&'static str, String>;

/// The lines about tasks, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Fields>>>);

struct Line(Fields);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let value = format!("{value:?}");
        self.0.insert(field.name(), value.trim_matches('"').into());
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(Fields::new());
        event.record(&mut line);
        if line.0.contains_key("task") {
            assert_eq!(*event.metadata().level(), Level::DEBUG);
            self.0.lock().unwrap().push(line.0);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Log {
    /// The lines of the one operation since the last call, which have all that a line has, as
    /// their words, tiers, subtasks and what was done of them; and those of the others.
    fn of(&self, op: &str) -> (Vec<String>, Vec<Fields>) {
        let lines = std::mem::take(&mut *self.0.lock().unwrap());
        for line in &lines {
            let mut names = vec!["task", "op", "subtasks", "bytes", "process", "thread"];
            if line["message"].ends_with("finished") {
                names.extend(["ms", "done"]);
                let _ms: f64 = line["ms"].parse().unwrap();
            }
            assert!(names.iter().all(|name| line.contains_key(name)), "{line:?}");
            assert_eq!(line["process"], std::process::id().to_string());
            let task = format!("/proc/self/task/{}", line["thread"]);
            assert!(line["thread"].parse::<u32>().is_ok(), "{task}");
        }
        let (mine, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|one| one["op"] == op);
        assert!(mine.windows(2).all(|two| two[0]["task"] == two[1]["task"]));
        let word = |line: &Fields, name: &str| line.get(name).cloned().unwrap_or_default();
        let short = |line: &Fields| {
            let each = ["message", "tier", "subtasks", "done"].map(|name| word(line, name));
            each.join(" ").trim_end().to_owned()
        };
        (mine.iter().map(short).collect(), others)
    }
}

#[test]
fn a_task_and_each_stage_of_it_are_logged_twice() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let place = Place::new("Cache|Dax", "8MiB", "8MiB");
    let (all, len) = ((0..100).collect::<Vec<u64>>(), 9000);
    let depot = place.open();
    let ns = namespace(&depot);
    log.of("");
    // In three steps.
    assert_eq!(put(&ns, &all, len), [true; 100]);
    assert!(depot.drain(PATIENCE));
    depot.close();
    let (put, others) = log.of("put");
    let expect = [
        "task dispatched  100",
        "stage dispatched Cache 32",
        "stage finished Cache 100 100",
        "task finished  100 100",
    ];
    assert_eq!(put, expect);
    let sum = |lines: &[Fields], message: &str, name: &str| -> u64 {
        let those = lines.iter().filter(|line| line["message"] == message);
        let those =
            those.inspect(|line| assert_eq!((&*line["op"], &*line["tier"]), ("write_back", "Dax")));
        those.map(|line| line[name].parse::<u64>().unwrap()).sum()
    };
    assert_eq!(sum(&others, "stage dispatched", "subtasks"), 100);
    assert_eq!(sum(&others, "stage dispatched", "bytes"), 100 * len as u64);
    assert_eq!(sum(&others, "stage finished", "done"), 100);

    let depot = place.open();
    let ns = namespace(&depot);
    assert!(has(&ns, &all[..10], len));
    eventually("the promotion", || depot.stats().promoted_blocks == 10);
    let (get, others) = log.of("get");
    assert_eq!(get[1], "stage dispatched Dax 10");
    let promoted = |line: &&Fields| line["op"] == "promote" && line["tier"] == "Dax";
    assert_eq!(others.iter().filter(promoted).count(), others.len());
    assert!(has(&ns, &all, len));
    let (get, _) = log.of("get");
    let stages = get.iter().filter(|line| line.starts_with("stage"));
    let mut stages: Vec<&str> = stages.map(String::as_str).collect();
    stages.sort_unstable();
    let expect = [
        "stage dispatched Cache 10",
        "stage dispatched Dax 22",
        "stage finished Cache 10 10",
        "stage finished Dax 90 90",
    ];
    assert_eq!(stages, expect);
    assert_eq!((get.len(), &*get[5]), (6, "task finished  100 100"));
    depot.close();
}
