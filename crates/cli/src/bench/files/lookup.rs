//! `lookup_hit`, `lookup_miss` and `lookup_filter`: how much longer it takes to ask the tier
//! `Posix` for 256 keys than to ask the directory by a system call for each.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

use kvdepot_media::file::plain::is_there;
use kvdepot_store::{Config, Key, Namespace};
use serde_json::json;

use super::blocks::done;
use super::plan::Plan;
use crate::bench::media::{Region, spec};
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;
use crate::leftovers::Scratch;

pub(super) const METRICS: [&str; 3] = ["lookup_hit", "lookup_miss", "lookup_filter"];

const KEYS: usize = 256;
const BLOCK: usize = 4096;
/// Batches of keys for each round of the others: each is asked for once.
const TIMES: usize = 5;

/// The same keys by name and by key.
struct Batch {
    keys: Vec<Key>,
    names: Vec<CString>,
}

pub(super) fn run(plan: &Plan, report: &mut Report<'_>) -> Result<(), Error> {
    let rounds = plan.rounds * TIMES;
    let scratch = Scratch::new(&plan.dir)?;
    let path = scratch.path().join("tier");
    let mut random = Random(31);
    let mut keys = |count: usize| -> Vec<Key> { (0..count).map(|_| random.key()).collect() };
    let hits: Vec<Vec<Key>> = (0..=rounds).map(|_| keys(KEYS)).collect();
    let misses: Vec<Vec<Key>> = (0..=rounds).map(|_| keys(KEYS)).collect();
    // One folder: all names are known then, of what is there and of what is not.
    let settings = json!({
        "socket": "off", "lock_wait": "0s",
        "posix": {"path": &path, "capacity": "4GiB", "fan_out": 1},
    });
    let open = || Ok::<_, Error>(kvdepot_service::open(&Config::new("Posix", &settings)?)?);
    let region = Region::new(2 << 20)?;
    let depot = open()?;
    let ns = depot.namespace(&spec())?;
    for keys in &hits {
        report.interrupt.check()?;
        let buffers = region.buffers(BLOCK, (0..KEYS).map(|slot| slot % 512))?;
        done(&ns.put(keys.clone(), buffers)?, "stored")?;
    }
    depot.close();
    let dir = File::open(&path).map_err(Error::io(&path))?;
    let hits = named(&path, &hits)?;
    let misses = unnamed(&hits[0], misses)?;
    // The system has looked at all of them once.
    for batch in hits.iter().chain(&misses) {
        raw(&dir, batch)?;
    }
    let depot = open()?;
    let ns = depot.namespace(&spec())?;
    let mut beyond = [Vec::new(), Vec::new()];
    let mut filter = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        report.interrupt.check()?;
        for (number, batches) in [&hits, &misses].into_iter().enumerate() {
            let (batch, found) = (&batches[round], number == 0);
            let plain_first = round % 2 == 0;
            let before = plain_first.then(|| raw(&dir, batch)).transpose()?;
            let ours = ask(&ns, &batch.keys, found)?;
            let known = ask(&ns, &batch.keys, found)?;
            let plain = before.map_or_else(|| raw(&dir, batch), Ok)?;
            if round > 0 {
                beyond[number].push((ours - plain) * 1e9 / KEYS as f64);
                filter[number].push(known * 1e9 / KEYS as f64);
            }
        }
    }
    depot.close();
    let row = |metric, answer, values: &[f64]| Row {
        bench: "files",
        case: json!({"tier": "Posix", "keys": KEYS, "answer": answer}),
        metric,
        unit: "ns",
        value: median(values.to_vec()),
        limit: None,
        ratio: None,
        rounds,
        limit_name: None,
    };
    for (answer, metric, values) in [
        ("hit", "lookup_hit", &beyond[0]),
        ("miss", "lookup_miss", &beyond[1]),
        ("hit", "lookup_filter", &filter[0]),
        ("miss", "lookup_filter", &filter[1]),
    ] {
        if plan.wants(metric) {
            report.row(row(metric, answer, values))?;
        }
    }
    Ok(())
}

/// Asks the depot; seconds.
fn ask(ns: &Namespace, keys: &[Key], found: bool) -> Result<f64, Error> {
    let start = Instant::now();
    let answers = ns.contains(keys)?;
    let seconds = start.elapsed().as_secs_f64();
    match answers.iter().all(|answer| *answer == found) {
        true => Ok(seconds),
        false => Err(Error::Bench("a lookup returned a wrong result".into())),
    }
}

/// Asks the directory; seconds.
fn raw(dir: &File, batch: &Batch) -> Result<f64, Error> {
    let start = Instant::now();
    for name in &batch.names {
        std::hint::black_box(is_there(dir.as_fd(), CStr::as_ref(name))?);
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Names as the tier has given them.
fn named(path: &Path, batches: &[Vec<Key>]) -> Result<Vec<Batch>, Error> {
    let blocks = path.join("blocks");
    let mut found = HashMap::new();
    for folder in std::fs::read_dir(&blocks).map_err(Error::io(&blocks))? {
        let folder = folder.map_err(Error::io(&blocks))?;
        let within = folder.file_name().to_string_lossy().into_owned();
        for file in std::fs::read_dir(folder.path()).map_err(Error::io(&blocks))? {
            let file = file.map_err(Error::io(&blocks))?;
            let name = file.file_name().to_string_lossy().into_owned();
            let key = name.split('-').next().unwrap_or_default().to_owned();
            found.insert(key, format!("blocks/{within}/{name}"));
        }
    }
    let text = |key: &Key| {
        let name = found.get(&key.to_string());
        let name = name.ok_or_else(|| Error::Bench("a block has no file".into()))?;
        CString::new(name.as_str()).map_err(|error| Error::Bench(error.to_string()))
    };
    let batch = |keys: &Vec<Key>| {
        let names: Result<Vec<CString>, Error> = keys.iter().map(text).collect();
        Ok(Batch {
            keys: keys.clone(),
            names: names?,
        })
    };
    batches.iter().map(batch).collect()
}

/// The names that the tier would give to blocks that are not there.
fn unnamed(named: &Batch, batches: Vec<Vec<Key>>) -> Result<Vec<Batch>, Error> {
    let one = named.names.first();
    let one = one.map(|name| name.to_string_lossy().into_owned());
    let one = one.unwrap_or_default();
    let (folder, name) = one.rsplit_once('/').unwrap_or_default();
    let (_, namespace) = name.split_once('-').unwrap_or_default();
    let text = |key: &Key| {
        let name = format!("{folder}/{key}-{namespace}");
        CString::new(name).map_err(|error| Error::Bench(error.to_string()))
    };
    let batch = |keys: Vec<Key>| {
        let names: Result<Vec<CString>, Error> = keys.iter().map(text).collect();
        Ok(Batch {
            names: names?,
            keys,
        })
    };
    batches.into_iter().map(batch).collect()
}
