//! Time of a call, by its number of keys.

use std::path::Path;
use std::time::Instant;

use kvdepot_store::{Key, Namespace};
use serde_json::json;

use super::store::{BLOCK, Memory, Store, is_of_files, row};
use crate::args::Pressure;
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;

const ROUNDS: usize = 3;

/// Keys of the calls.
pub(super) fn keys(args: &Pressure, tier: &str) -> &'static [u64] {
    match (args.quick, is_of_files(tier)) {
        (true, _) => &[1000, 4000],
        (false, true) => &[1000, 4000, 16_000],
        (false, false) => &[1000, 16_000, 64_000, 256_000],
    }
}

pub(super) fn run(
    args: &Pressure,
    dir: &Path,
    tier: &str,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    for count in keys(args, tier) {
        let mut times: Vec<(&str, Vec<f64>)> = Vec::new();
        for round in 0..ROUNDS {
            report.interrupt.check()?;
            for (at, (op, seconds)) in measure(dir, tier, *count, round)?.into_iter().enumerate() {
                match times.get_mut(at) {
                    Some((_, all)) => all.push(seconds),
                    None => times.push((op, vec![seconds])),
                }
            }
        }
        for (op, seconds) in times {
            let case = json!({"tier": tier, "op": op, "keys": count});
            report.row(Row {
                rounds: ROUNDS,
                ..row("call_ms", "ms", case, median(seconds) * 1e3)
            })?;
        }
        report.case_done(tier);
    }
    Ok(())
}

/// Seconds of one call of each kind.
fn measure(
    dir: &Path,
    tier: &str,
    count: u64,
    round: usize,
) -> Result<Vec<(&'static str, f64)>, Error> {
    let mut random = Random(31 + round as u64);
    let mut keys = || (0..count).map(|_| random.key()).collect::<Vec<Key>>();
    let memory = Memory::new(count as usize)?;
    let mut times = Vec::new();
    let mut time = |op, run: &mut dyn FnMut() -> Result<(), Error>| -> Result<(), Error> {
        let start = Instant::now();
        run()?;
        times.push((op, start.elapsed().as_secs_f64()));
        Ok(())
    };
    // The directory keeps a part of its capacity free.
    let store = Store::new(dir, tier, count + count / 4 + 64, "all")?;
    let all = keys();
    time("put", &mut || store.put(None, &all, &memory.payload))?;
    store.drain()?;
    time("lookup", &mut || Ok(store.ns.contains(&all).map(drop)?))?;
    time("get", &mut || {
        let buffers = memory.buffers(all.len())?;
        store.ns.get(all.clone(), buffers)?.wait(None)?;
        Ok(())
    })?;
    time("remove", &mut || Ok(store.ns.remove(&all).map(drop)?))?;
    let others = keys();
    time("reserve", &mut || reserve(&store.ns, &others))?;
    // Capacity for an eighth of the keys.
    let full = Store::new(dir, tier, count / 8 + 64, "all")?;
    time("put_beyond", &mut || {
        full.put(None, &others, &memory.payload)
    })?;
    Ok(times)
}

/// Reserves space for blocks, and aborts the reservations.
pub(super) fn reserve(ns: &Namespace, keys: &[Key]) -> Result<(), Error> {
    let blocks: Vec<(Key, Vec<u64>)> = keys.iter().map(|key| (*key, vec![BLOCK as u64])).collect();
    let reservations: Vec<_> = ns.reserve(&blocks)?.into_iter().flatten().collect();
    ns.abort(&reservations);
    Ok(())
}
