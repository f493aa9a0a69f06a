//! What a tier that answers late costs those who do not ask it.
//!
//! One caller gets, looks up and puts blocks of a memory tier, while others ask for blocks that are
//! not there: with a tier behind it that takes 50 ms for each answer, and without, in turns.
//! Printed are the times of the former: median and 99.9 per cent of all its calls, and the
//! difference.
//! `LATE_ROUNDS` (8) of `LATE_MS` (2000) each.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a measurement for people"
)]

#[path = "../tests/tiers/mod.rs"]
mod tiers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_store::option::{Kind, OptionSpec};
use kvdepot_store::{
    BlockBuffers, Buffer, Config, Depot, Key, Kinds, Namespace, NamespaceSpec, TierKind,
};
use serde_json::json;
use tiers::late::Mood;
use tiers::{files, late};

const DELAY: Duration = Duration::from_millis(50);
const LEN: usize = 64 << 10;
/// Blocks that are near, and how many others ask for at a time.
const NEAR: u64 = 64;
const OTHERS: u64 = 2;
/// A put comes with so many other calls: what is put goes on to the late tier.
const EACH: u64 = 100;
const CALLS: [&str; 3] = ["get", "contains", "put"];

fn number(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |value| value.parse().unwrap())
}

fn key(number: u64) -> Key {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

fn open(is_late: bool, dir: &tempfile::TempDir) -> Depot {
    const OPTIONS: &[OptionSpec] = &[OptionSpec::new("late", "path", Kind::Text, "none", "")];
    let inner = TierKind {
        name: "Late",
        options: OPTIONS,
        ..files::kind()
    };
    let mood = Arc::new(Mood::default());
    let micros = DELAY.as_micros() as u64;
    mood.delay.store(micros, Ordering::Relaxed);
    let kinds = late::kinds("Late", inner, &mood);
    let mut settings = json!({"cache": {"capacity": "256MiB"}, "overload": "drop"});
    let (pipeline, kinds) = match is_late {
        true => ("Cache|Late", kinds),
        false => ("Cache", Kinds::new()),
    };
    if is_late {
        settings["late"] = json!({"path": dir.path()});
    }
    Depot::open(&Config::with_kinds(&kinds, pipeline, &settings).unwrap()).unwrap()
}

fn put(ns: &Namespace, block: u64, bytes: &Buffer) {
    let put = ns.put(vec![key(block)], BlockBuffers::whole([bytes.clone()]));
    put.unwrap().wait_released(None).unwrap();
}

/// One call of each kind, timed; nanoseconds.
fn call(ns: &Namespace, turn: u64, bytes: &Buffer, times: &mut [Vec<u64>; 3]) {
    let block = key(turn % NEAR);
    let begun = Instant::now();
    let got = ns.get(vec![block], BlockBuffers::whole([bytes.clone()]));
    assert_eq!(got.unwrap().wait(None).unwrap(), [true]);
    let got = Instant::now();
    assert_eq!(ns.contains(&[block]).unwrap(), [true]);
    let looked = Instant::now();
    times[0].push((got - begun).as_nanos() as u64);
    times[1].push((looked - got).as_nanos() as u64);
    if turn.is_multiple_of(EACH) {
        put(ns, NEAR + turn, bytes);
        times[2].push(looked.elapsed().as_nanos() as u64);
    }
}

/// Some seconds of calls, while others ask for what is not near.
fn round(is_late: bool, span: Duration, times: &mut [Vec<u64>; 3]) {
    let dir = tempfile::tempdir().unwrap();
    let depot = open(is_late, &dir);
    let spec = NamespaceSpec {
        model: "late".into(),
        dtype: "float32".into(),
        block_tokens: 16,
        ..NamespaceSpec::default()
    };
    let ns = depot.namespace(&spec).unwrap();
    let bytes = Buffer::from_vec(vec![7; LEN]);
    (0..NEAR).for_each(|block| put(&ns, block, &bytes));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for other in 0..OTHERS {
            let (ns, over) = (&ns, &over);
            scope.spawn(move || {
                let mut block = (1 << 40) + (other << 32);
                while !over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    block += 1;
                    let into = Buffer::from_vec(vec![0; LEN]);
                    let got = ns.get(vec![key(block)], BlockBuffers::whole([into]));
                    assert_eq!(got.unwrap().wait(None).unwrap(), [false]);
                    // As often without the tier.
                    thread::sleep(DELAY.saturating_sub(begun.elapsed()));
                }
            });
        }
        let begun = Instant::now();
        let into = Buffer::from_vec(vec![0; LEN]);
        let mut turn = 0;
        while begun.elapsed() < span {
            turn += 1;
            call(&ns, turn, &into, times);
        }
        over.store(true, Ordering::Relaxed);
    });
    depot.close();
}

/// In microseconds.
fn quantile(times: &[u64], part: f64) -> f64 {
    let at = (times.len() as f64 * part) as usize;
    times[at.min(times.len() - 1)] as f64 / 1000.0
}

fn main() {
    let (rounds, span) = (number("LATE_ROUNDS", 8), number("LATE_MS", 2000));
    let mut all: [[Vec<u64>; 3]; 2] = Default::default();
    for turn in 0..2 * rounds {
        // Each kind is first as often as the other.
        let is_late = (turn + turn / 2) % 2 == 1;
        let times = &mut all[usize::from(is_late)];
        round(is_late, Duration::from_millis(span), times);
    }
    let [mut without, mut with] = all;
    println!("call      calls  median us, without and with  p99.9 us, without and with  more, us");
    for (at, name) in CALLS.iter().enumerate() {
        without[at].sort_unstable();
        with[at].sort_unstable();
        let (one, other) = (&without[at], &with[at]);
        let [a, b, c, d] = [(one, 0.5), (other, 0.5), (one, 0.999), (other, 0.999)]
            .map(|(times, part)| quantile(times, part));
        let (calls, more) = (other.len(), d - c);
        println!("{name:9} {calls:5}  {a:13.1} {b:13.1}  {c:12.1} {d:13.1}  {more:8.1}");
    }
}
