//! What puts into one full arena gain from more threads, against what plain copies of the same
//! bytes gain from as many.
//!
//! Each put evicts, and small calls are copied by the thread that makes them: so one thread here
//! is one thread of the machine, but for what runs ahead.

use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvdepot_media::{Buffer, Pages, Plain};
use kvdepot_plan::Span;
use serde_json::json;

use crate::bench::media::{Region, Store, check_room, in_memory, target};
use crate::bench::plain::Crew;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;
use crate::leftovers::Scratch;

const BLOCK: usize = 64 << 10;
const TIER: &str = "Dax";
const THREADS: [usize; 3] = [1, 2, 8];
/// Blocks of a call: one, and as many as the calling thread copies itself.
const CALLS: [usize; 2] = [1, 4];

/// Bytes of the arena, and of what one run stores.
fn sizes(quick: bool) -> (usize, usize) {
    match quick {
        true => (64 << 20, 64 << 20),
        false => (512 << 20, 512 << 20),
    }
}

pub(super) const fn cases() -> usize {
    THREADS.len() - 1
}

pub(super) fn run(
    dir: Option<&Path>,
    (quick, rounds): (bool, usize),
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let dir = in_memory(dir);
    let (size, bytes) = sizes(quick);
    check_room(dir, size, size)?;
    let scratch = Scratch::new(dir)?;
    let mut bench = Bench {
        store: Store::open(&scratch, TIER, size, BLOCK, 2)?,
        source: Region::new(size)?,
        target: target(&scratch, TIER, Pages::Small, size)?,
        seeds: AtomicU64::new(1),
        bytes,
    };
    bench.store.fill(&bench.source, BLOCK)?;
    let times = bench.rounds(rounds, report)?;
    for (number, threads) in THREADS.into_iter().enumerate().skip(1) {
        for (call, ours) in CALLS.into_iter().zip(&times.puts) {
            let gains = times.copies.iter().zip(ours);
            let gains =
                gains.map(|(copies, puts)| (puts[0] / puts[number], copies[0] / copies[number]));
            let (ours, limits): (Vec<f64>, Vec<f64>) = gains.unzip();
            let ratios = ours.iter().zip(&limits).map(|(ours, limit)| ours / limit);
            report.row(Row {
                bench: "scale",
                case: json!({"threads": threads, "call": call}),
                metric: "puts_over_one_thread",
                unit: "ratio",
                ratio: Some(median(ratios.collect())),
                value: median(ours),
                limit: Some(median(limits)),
                rounds,
                limit_name: Some("plain copies"),
            })?;
        }
        report.case_done(&format!("puts from {threads} threads"));
    }
    for (number, threads) in THREADS.into_iter().enumerate() {
        for (call, ours) in CALLS.into_iter().zip(&times.puts) {
            let speed = |all: &[Vec<f64>]| {
                let seconds = all.iter().map(|round| round[number]).collect();
                bytes as f64 / median(seconds) / 1e9
            };
            let (value, limit) = (speed(ours), speed(&times.copies));
            report.row(Row {
                bench: "scale",
                case: json!({"threads": threads, "call": call}),
                metric: "puts",
                unit: "GB/s",
                value,
                limit: Some(limit),
                ratio: Some(value / limit),
                rounds,
                limit_name: Some("plain copies"),
            })?;
        }
    }
    Ok(())
}

struct Bench {
    store: Store,
    source: Region,
    target: Buffer,
    /// No two threads put the same keys.
    seeds: AtomicU64,
    bytes: usize,
}

/// Seconds, by round and by number of threads.
struct Times {
    copies: Vec<Vec<f64>>,
    /// By blocks of a call.
    puts: Vec<Vec<Vec<f64>>>,
}

impl Bench {
    /// One round more than that: the first one warms up.
    fn rounds(&self, rounds: usize, report: &Report<'_>) -> Result<Times, Error> {
        let crews = THREADS.map(Crew::new).into_iter();
        let crews: Vec<Crew> = crews.collect::<Result<_, _>>()?;
        let mut times = Times {
            copies: Vec::new(),
            puts: vec![Vec::new(); CALLS.len()],
        };
        for round in 0..=rounds {
            let mut copies = Vec::new();
            let mut puts = vec![Vec::new(); CALLS.len()];
            for (threads, crew) in THREADS.into_iter().zip(&crews) {
                report.interrupt.check()?;
                copies.push(self.copies(crew)?);
                for (puts, call) in puts.iter_mut().zip(CALLS) {
                    puts.push(self.puts(threads, call)?);
                }
            }
            if round > 0 {
                times.copies.push(copies);
                let each = times.puts.iter_mut().zip(puts);
                each.for_each(|(times, puts)| times.push(puts));
            }
        }
        Ok(times)
    }

    fn random(&self) -> Random {
        Random(self.seeds.fetch_add(1, Ordering::Relaxed) << 40)
    }

    /// Seconds of the best plain copies.
    fn copies(&self, crew: &Crew) -> Result<f64, Error> {
        let mut random = self.random();
        let (blocks, count) = (self.source.blocks(BLOCK), self.bytes / BLOCK);
        let mut place = || random.below(blocks as u64) * BLOCK as u64;
        let pieces = (0..count).map(|_| Span::new(place(), place(), BLOCK as u64));
        let pieces: Vec<Span> = pieces.collect();
        let mut best = f64::INFINITY;
        for way in Plain::all() {
            let seconds = crew.copy(way, self.source.whole(), &self.target, &pieces)?;
            best = best.min(seconds);
        }
        Ok(best)
    }

    /// Seconds that so many threads put for, each its share.
    fn puts(&self, threads: usize, call: usize) -> Result<f64, Error> {
        let barrier = Barrier::new(threads);
        let worker = || {
            let mut random = self.random();
            let calls = self.bytes / BLOCK / threads / call;
            barrier.wait();
            let start = Instant::now();
            for _ in 0..calls {
                self.put(&mut random, call)?;
            }
            Ok::<_, Error>((start, Instant::now()))
        };
        std::thread::scope(|scope| {
            let start = |_| {
                let named = std::thread::Builder::new().name("put".into());
                named.spawn_scoped(scope, worker)
            };
            let started = (0..threads).map(start).collect::<Result<Vec<_>, _>>();
            let ended = started
                .map_err(Error::io("cannot start a thread"))?
                .into_iter()
                .map(|one| {
                    let died = |_| Error::Bench("a put thread panicked".into());
                    one.join().map_err(died)?
                });
            let spans: Vec<(Instant, Instant)> = ended.collect::<Result<_, _>>()?;
            let first = spans.iter().map(|(start, _)| *start).min();
            let last = spans.iter().map(|(_, end)| *end).max();
            let seconds = first.zip(last).map(|(first, last)| last - first);
            Ok(seconds.unwrap_or_default().as_secs_f64())
        })
    }

    fn put(&self, random: &mut Random, call: usize) -> Result<(), Error> {
        let keys = (0..call).map(|_| random.key()).collect();
        let blocks = self.source.blocks(BLOCK) as u64;
        let from = (0..call).map(|_| random.below(blocks) as usize);
        let buffers = self.source.buffers(BLOCK, from)?;
        let stored = self.store.namespace().put(keys, buffers)?.wait(None)?;
        match stored.contains(&false) {
            true => Err(Error::Bench("a put into a full arena was rejected".into())),
            false => Ok(()),
        }
    }
}
