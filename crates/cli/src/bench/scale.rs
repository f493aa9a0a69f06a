//! `kvdepot bench scale`: what an arena of very many blocks costs.
//!
//! The arena is a file of blocks of 4 KiB that nobody writes. One process fills it and says what
//! its index takes; another one opens it and measures the rest, so that neither counts what the
//! other's memory was used for before.

mod puts;
mod waits;

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_alloc::{Extent, Pool};
use kvdepot_store::format::record;
use kvdepot_store::{Config, Depot, Key, Namespace};
use serde_json::{Value, json};

use super::index::{bare, is_in};
use super::media::check_blocks;
use super::media::spec;
use super::random::Random;
use super::reopen::this_command;
use super::report::{Report, Row};
use super::rounds::median;
use crate::args::{Scale, Task};
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::leftovers::Scratch;
use crate::output::Output;

/// Payload of each block, which nobody touches.
const BLOCK: u64 = 4096;
/// Keys of a lookup.
const BATCH: usize = 256;
/// Blocks on a page of a listing.
const PAGE: usize = 4096;
/// Most blocks of the arena that is added: a second one as large as the largest takes a disk of its
/// own.
const ADDED: usize = 1_000_000;
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// How long each number of threads looks up, in each round.
const SPELL: Duration = Duration::from_millis(400);

fn sizes(args: &Scale) -> Vec<usize> {
    match (args.blocks.as_slice(), args.quick) {
        ([], true) => vec![1 << 16],
        ([], false) => vec![1_000_000, 10_000_000],
        (blocks, _) => blocks.to_vec(),
    }
}

/// Three processes for each size, and what puts gain from threads.
pub(super) fn cases(args: &Scale) -> usize {
    3 * sizes(args).len() + puts::cases()
}

pub(super) fn run(args: &Scale, program: &OsStr, report: &mut Report<'_>) -> Result<(), Error> {
    let rounds = rounds(args);
    let sizes = sizes(args);
    if rounds == 0 || sizes.iter().any(|blocks| *blocks < 2 * PAGE) {
        return Err(Error::Usage {
            field: "--blocks, --rounds",
            value: sizes.into_iter().min().unwrap_or(0).min(rounds).to_string(),
            allowed: format!("at least {} blocks and 1 round", 2 * PAGE),
        });
    }
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    for blocks in sizes.iter().filter(|_| !args.puts) {
        check_blocks(&dir, *blocks, *blocks.min(&ADDED), BLOCK)?;
    }
    puts::run(args.dir.as_deref(), (args.quick, rounds), report)?;
    if args.puts {
        return Ok(());
    }
    for blocks in sizes {
        let scratch = Scratch::new(&dir)?;
        for (task, name) in [
            (Task::Fill, "fill"),
            (Task::Beside, "beside"),
            (Task::Measure, "measure"),
        ] {
            let figures = figures(program, scratch.path(), name, blocks, rounds, report)?;
            for figure in figures.iter().filter(|_| task != Task::Beside) {
                report.row(row(figure, blocks, rounds)?)?;
            }
            report.case_done(name);
        }
    }
    Ok(())
}

fn rounds(args: &Scale) -> usize {
    args.rounds.unwrap_or(if args.quick { 2 } else { 5 })
}

/// What a process of ours measures.
fn figures(
    program: &OsStr,
    dir: &Path,
    task: &str,
    blocks: usize,
    rounds: usize,
    report: &Report<'_>,
) -> Result<Vec<Value>, Error> {
    let program = this_command(program);
    let (blocks, rounds) = (blocks.to_string(), rounds.to_string());
    let args = [
        "bench", "scale", "--blocks", &blocks, "--rounds", &rounds, "--task", task, "--child",
    ];
    let mut child = Command::new(&program)
        .args(args)
        .arg(dir)
        // What is freed goes back to the system, and is not counted as anything's.
        .env("MALLOC_MMAP_THRESHOLD_", "131072")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(Error::io(program))?;
    // A Ctrl-C reaches the whole group.
    let said = child.stdout.take().map(std::io::read_to_string);
    let ended = child.wait().map_err(Error::io("a benchmark process"))?;
    report.interrupt.check()?;
    let said = said
        .transpose()
        .map_err(Error::io("a benchmark process"))?
        .filter(|_| ended.success())
        .ok_or_else(|| Error::Bench(format!("the process for {task} ended early")))?;
    let lines = said.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().map_err(|error| {
        Error::Bench(format!(
            "unexpected output of the process for {task}: {error}"
        ))
    })
}

fn row(figure: &Value, blocks: usize, rounds: usize) -> Result<Row, Error> {
    const METRICS: [(&str, &str); 9] = [
        ("bytes_per_block", "bytes"),
        ("peak_bytes_per_block", "bytes"),
        ("open_s", "s"),
        ("lookups_over_table", "ratio"),
        ("wait_ms", "ms"),
        ("wait_over_unlocked_ms", "ms"),
        ("lock_hold_ms", "ms"),
        ("add_device_s", "s"),
        ("blocks_page_ms", "ms"),
    ];
    let known = METRICS.iter().find(|(name, _)| figure["metric"] == *name);
    let (Some((metric, unit)), Some(value)) = (known, figure["value"].as_f64()) else {
        return Err(Error::Bench(format!("unexpected result {figure}")));
    };
    let mut case = figure["case"].clone();
    case["blocks"] = blocks.into();
    Ok(Row {
        bench: "scale",
        case,
        metric,
        unit,
        value,
        limit: None,
        ratio: None,
        rounds,
        limit_name: None,
    })
}

/// Says what was measured, a line each.
struct Said<'a>(&'a mut Output);

impl Said<'_> {
    fn figure(&mut self, metric: &str, case: Value, value: f64) -> Result<(), Error> {
        let figure = json!({"metric": metric, "case": case, "value": value});
        self.0.line(&figure.to_string())?;
        self.0.flush()
    }
}

/// The process that does one task.
pub(super) fn child(dir: &Path, args: &Scale, output: &mut Output) -> Result<i32, Error> {
    let blocks = sizes(args).first().copied().unwrap_or_default();
    let (arena, beside) = (dir.join("arena"), dir.join("beside"));
    let mut said = Said(output);
    match args.task {
        Some(Task::Fill) => fill(&arena, blocks, 13, &mut said)?,
        Some(Task::Beside) => fill(&beside, blocks.min(ADDED), 17, &mut said)?,
        _ => measure(&arena, &beside, blocks, rounds(args), &mut said)?,
    }
    Ok(crate::status::OK)
}

fn keys(blocks: usize, seed: u64) -> Vec<Key> {
    let mut random = Random(seed);
    (0..blocks).map(|_| random.key()).collect()
}

fn open(path: &Path, blocks: usize, durability: &str) -> Result<Depot, Error> {
    let records = blocks as u64 + 1024;
    let capacity = records * record::LEN as u64 + blocks as u64 * BLOCK + (4 << 20);
    let settings = json!({
        "lanes": 1, "socket": "off",
        "dax": {
            "path": path, "capacity": capacity / BLOCK * BLOCK, "records": records,
            "durability": durability,
        },
    });
    Ok(kvdepot_service::open(&Config::new("Dax", &settings)?)?)
}

fn fill(path: &Path, blocks: usize, seed: u64, said: &mut Said<'_>) -> Result<(), Error> {
    let keys = keys(blocks, seed);
    let [_, allocator] = allocator(blocks)?;
    let interrupt = Interrupt::catch()?;
    let before = anonymous()?;
    let depot = open(path, blocks, "process")?;
    super::index::publish(&depot.namespace(&spec())?, &keys, &interrupt)?;
    let bytes = anonymous()?.saturating_sub(before + allocator);
    said.figure(
        "bytes_per_block",
        json!({"after": "filling"}),
        bytes as f64 / blocks as f64,
    )?;
    depot.close();
    Ok(())
}

fn measure(
    path: &Path,
    beside: &Path,
    blocks: usize,
    rounds: usize,
    said: &mut Said<'_>,
) -> Result<(), Error> {
    let [allocator, _] = allocator(blocks)?;
    let mut times = Vec::new();
    let (mut most, mut depot) = (0, None);
    for _ in 0..rounds {
        drop(depot.take());
        let before = anonymous()?;
        let (opened, peak, seconds) = watched(|| open(path, blocks, "process"))?;
        times.push(seconds);
        if most == 0 {
            // Later ones find what the first one gave back to its allocator.
            most = peak.saturating_sub(before + allocator);
            let bytes = anonymous()?.saturating_sub(before + allocator) as f64;
            let case = json!({"after": "opening"});
            said.figure("bytes_per_block", case, bytes / blocks as f64)?;
        }
        depot = Some(opened);
    }
    let Some(depot) = depot else { return Ok(()) };
    said.figure(
        "peak_bytes_per_block",
        json!({}),
        most as f64 / blocks as f64,
    )?;
    said.figure("open_s", json!({}), median(times))?;
    let ns = depot.namespace(&spec())?;
    let mut keys = keys(blocks, 13);
    Random(29).shuffle(&mut keys);
    lookups(&ns, &keys, rounds, said)?;
    said.figure("blocks_page_ms", json!({}), longest_page(&ns)? * 1e3)?;
    waits::measure(&depot, &ns, &keys, said)?;
    depot.close();
    let depot = open(path, blocks, "power")?;
    let case = json!({"op": "put", "durability": "power"});
    let ns = depot.namespace(&spec())?;
    waits::hold(case, said, || waits::Puts::new(37).put(&ns, waits::HELD))?;
    depot.close();
    let depot = open(path, blocks, "process")?;
    let ns = depot.namespace(&spec())?;
    let start = Instant::now();
    waits::hold(json!({"op": "add_device"}), said, || {
        Ok(depot.add_device(beside, None).map(drop)?)
    })?;
    let (case, seconds) = (json!({"added": blocks.min(ADDED)}), start.elapsed());
    said.figure("add_device_s", case, seconds.as_secs_f64())?;
    waits::hold(json!({"op": "blocks"}), said, || {
        longest_page(&ns).map(drop)
    })?;
    waits::hold(json!({"op": "clear"}), said, || Ok(ns.clear().map(drop)?))?;
    depot.close();
    Ok(())
}

/// What the allocator takes for so many blocks: as an opening makes it, and as it grows while they
/// come one by one.
fn allocator(blocks: usize) -> Result<[u64; 2], Error> {
    let size = (blocks as u64 + 1024) * BLOCK;
    let failed = |error: &dyn std::fmt::Display| Error::Bench(error.to_string());
    let extent = |block: u64| Extent {
        offset: block * BLOCK,
        len: BLOCK,
    };
    let extents = (0..blocks as u64).map(extent);
    let opened = Pool::rebuild(size, BLOCK, extents).map_err(|error| failed(&error))?;
    let mut filled = Pool::new(size, BLOCK).map_err(|error| failed(&error))?;
    for _ in 0..blocks {
        filled.allocate(BLOCK).map_err(|error| failed(&error))?;
    }
    Ok([opened, filled].map(|pool| pool.report().memory_bytes))
}

/// Anonymous memory of this process.
fn anonymous() -> Result<u64, Error> {
    let path = "/proc/self/statm";
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let mut fields = text.split(' ').skip(1).map(|field| field.parse().ok());
    let mut next = || fields.next().flatten().unwrap_or(0_u64);
    let (resident, of_files) = (next(), next());
    Ok((resident - of_files) * 4096)
}

/// Runs `work` while the anonymous memory is looked at: its answer, the most that was seen, and
/// seconds.
fn watched<R>(work: impl FnOnce() -> Result<R, Error>) -> Result<(R, u64, f64), Error> {
    let (done, most) = (AtomicBool::new(false), AtomicU64::new(0));
    let look = || most.fetch_max(anonymous().unwrap_or(0), Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                look();
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let start = Instant::now();
        let answer = work();
        let seconds = start.elapsed().as_secs_f64();
        done.store(true, Ordering::Release);
        look();
        Ok((answer?, most.load(Ordering::Relaxed), seconds))
    })
}

fn longest_page(ns: &Namespace) -> Result<f64, Error> {
    let (mut longest, mut from) = (0.0_f64, None);
    loop {
        let start = Instant::now();
        let page = ns.blocks_page(from, PAGE)?;
        longest = longest.max(start.elapsed().as_secs_f64());
        from = page.next;
        if from.is_none() {
            return Ok(longest);
        }
    }
}

/// What `contains` gains from more threads, over what a table that is only read gains from them.
fn lookups(ns: &Namespace, keys: &[Key], rounds: usize, said: &mut Said<'_>) -> Result<(), Error> {
    let table = bare(keys);
    let bare = |keys: &[Key]| keys.iter().filter(|key| is_in(&table, key)).count();
    let ours = |keys: &[Key]| {
        let found = ns.contains(keys).unwrap_or_default();
        found.into_iter().filter(|found| *found).count()
    };
    let mut gains = vec![Vec::new(); THREADS.len()];
    for _ in 0..rounds {
        let mut single = None;
        for (gains, threads) in gains.iter_mut().zip(THREADS) {
            let (table, here) = (rate(keys, threads, &bare)?, rate(keys, threads, &ours)?);
            let (table_alone, alone) = *single.get_or_insert((table, here));
            gains.push((here / alone) / (table / table_alone));
        }
    }
    for (gains, threads) in gains.into_iter().zip(THREADS) {
        let case = json!({"threads": threads});
        said.figure("lookups_over_table", case, median(gains))?;
    }
    Ok(())
}

/// Keys a second that so many threads find.
fn rate(
    keys: &[Key],
    threads: usize,
    find: &(impl Fn(&[Key]) -> usize + Sync),
) -> Result<f64, Error> {
    let (barrier, missing) = (Barrier::new(threads), AtomicBool::new(false));
    let worker = |thread: usize| {
        barrier.wait();
        let start = Instant::now();
        let mut found = 0;
        let share = keys.len() / threads * thread;
        for keys in keys[share..]
            .chunks(BATCH)
            .chain(keys.chunks(BATCH))
            .cycle()
        {
            let here = find(keys);
            found += here;
            if here < keys.len() {
                missing.store(true, Ordering::Relaxed);
            }
            if start.elapsed() >= SPELL {
                break;
            }
        }
        found as f64 / start.elapsed().as_secs_f64()
    };
    let sum = std::thread::scope(|scope| {
        let started = (0..threads).map(|thread| scope.spawn(move || worker(thread)));
        let started: Vec<_> = started.collect();
        let each = started
            .into_iter()
            .map(|one| one.join().unwrap_or(f64::NAN));
        each.sum()
    });
    match missing.into_inner() {
        true => Err(Error::Bench("not every block was found".into())),
        false => Ok(sum),
    }
}
