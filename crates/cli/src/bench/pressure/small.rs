//! Latency of small calls while another thread makes large ones.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_store::Key;
use serde_json::json;

use super::calls;
use super::store::{BLOCK, Memory, Store, is_of_files, row};
use crate::args::Pressure;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::quantile;
use crate::error::Error;
use crate::leftovers::Scratch;

/// Operations of the large calls.
pub(super) const BESIDE: [&str; 4] = ["get", "put", "lookup", "reserve"];

/// Operations of the small calls.
const OPS: [&str; 4] = ["get", "put", "lookup", "stats"];

/// Time for which small calls run beside one kind of large call.
const SPELL: Duration = Duration::from_secs(4);

/// Blocks that small gets ask for.
const SMALL: usize = 256;

pub(super) fn run(
    args: &Pressure,
    dir: &Path,
    tier: &str,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let count: u64 = match (args.quick, is_of_files(tier)) {
        (true, _) => 10_000,
        (false, true) => 25_000,
        (false, false) => 100_000,
    };
    let spell = if args.quick { SPELL / 8 } else { SPELL };
    let plain = match is_of_files(tier) {
        true => Some(plain_reads(dir, count, spell)?),
        false => None,
    };
    for beside in BESIDE {
        report.interrupt.check()?;
        // Large enough that the large puts evict only each other's blocks.
        let store = Store::new(dir, tier, 4 * count, "all")?;
        let mut random = Random(37);
        let mut keys = |count: u64| (0..count).map(|_| random.key()).collect::<Vec<Key>>();
        let (large, small) = (keys(count), keys(SMALL as u64));
        let memory = Memory::new(count as usize)?;
        store.put(None, &large, &memory.payload)?;
        store.put(None, &small, &memory.payload)?;
        store.drain()?;
        let stop = AtomicBool::new(false);
        let taken = thread::scope(|scope| {
            let calls = scope.spawn(|| {
                let mut random = Random(41);
                while !stop.load(Ordering::Relaxed) {
                    let new: Vec<Key> = (0..count).map(|_| random.key()).collect();
                    match beside {
                        "get" => {
                            let buffers = memory.buffers(large.len())?;
                            store.ns.get(large.clone(), buffers)?.wait(None)?;
                        }
                        "put" => store.put(None, &new, &memory.payload)?,
                        "lookup" => drop(store.ns.contains(&large)?),
                        _ => calls::reserve(&store.ns, &new)?,
                    }
                }
                Ok::<(), Error>(())
            });
            let taken = small_calls(&store, &small, spell);
            stop.store(true, Ordering::Relaxed);
            let ran = calls
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            ran.and(taken)
        })?;
        for (op, mut times) in OPS.iter().zip(taken) {
            let case = json!({"tier": tier, "beside": beside, "keys": count, "op": op});
            let value = quantile(&mut times, 0.99) * 1e3;
            let row = Row {
                rounds: times.len(),
                ..row("small_p99_ms", "ms", case, value)
            };
            report.row(match plain {
                Some(plain) => {
                    row.with(value, plain * 1e3, plain * 1e3 / value, Some("plain read"))
                }
                None => row,
            })?;
        }
        report.case_done(tier);
    }
    Ok(())
}

/// Seconds of each small call, one of each kind after the other.
fn small_calls(store: &Store, keys: &[Key], spell: Duration) -> Result<[Vec<f64>; 4], Error> {
    let memory = Memory::new(1)?;
    let mut random = Random(43);
    let mut taken: [Vec<f64>; 4] = Default::default();
    let start = Instant::now();
    while start.elapsed() < spell {
        let key = keys[random.below(keys.len() as u64) as usize];
        for (op, times) in OPS.iter().zip(&mut taken) {
            let begun = Instant::now();
            small_call(store, op, (key, random.key()), &memory)?;
            times.push(begun.elapsed().as_secs_f64());
        }
    }
    Ok(taken)
}

fn small_call(
    store: &Store,
    op: &str,
    (stored, new): (Key, Key),
    memory: &Memory,
) -> Result<(), Error> {
    let ns = &store.ns;
    match op {
        "get" => drop(ns.get(vec![stored], memory.buffers(1)?)?.wait(None)?),
        "put" => store.put(None, &[new], &memory.payload)?,
        "lookup" => drop(ns.contains(&[stored])?),
        _ => drop(store.depot.stats()),
    }
    Ok(())
}

/// Returns the same quantile of a plain program's reads of 4 KiB, in seconds, while two threads
/// write files of a block and its header.
fn plain_reads(dir: &Path, count: u64, spell: Duration) -> Result<f64, Error> {
    let scratch = Scratch::new(dir)?;
    let dir = scratch.path();
    let read = dir.join("read");
    fs::write(&read, vec![7; SMALL * BLOCK]).map_err(Error::io(&read))?;
    let file = fs::File::open(&read).map_err(Error::io(&read))?;
    let stop = AtomicBool::new(false);
    let write = |thread: u64| -> Result<(), Error> {
        let bytes = vec![7; 2 * BLOCK];
        for number in (0..count).cycle() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let path = dir.join(format!("{thread}-{number}"));
            fs::write(&path, &bytes).map_err(Error::io(&path))?;
        }
        Ok(())
    };
    let mut times = thread::scope(|scope| {
        let writers = [0, 1].map(|thread| scope.spawn(move || write(thread)));
        let (mut times, mut page, start) = (Vec::new(), vec![0; BLOCK], Instant::now());
        let mut random = Random(47);
        let mut read = || -> Result<(), Error> {
            while start.elapsed() < spell {
                let begun = Instant::now();
                let at = random.below(SMALL as u64) * BLOCK as u64;
                file.read_exact_at(&mut page, at)
                    .map_err(Error::io("read"))?;
                times.push(begun.elapsed().as_secs_f64());
            }
            Ok(())
        };
        let ran = read();
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writer
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        ran.map(|()| times)
    })?;
    Ok(quantile(&mut times, 0.99))
}
