//! `kvdepot bench churn`: what a depot writes, serves and promotes that is smaller than what passes
//! by.
//!
//! Histories of prompts, as an engine would have them: it asks for the blocks that it does not have
//! itself, takes what is there, and stores the whole prompt. The limit is exact least recently used
//! order over as many blocks, which stores everything.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use kvdepot_host::cpu::process_time;
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, Namespace};
use serde_json::{Value, json};

use super::media::spec;
use super::random::Random;
use super::report::{Report, Row};
use super::rounds::median;
use super::trace;
use crate::args::Churn;
use crate::error::Error;
use crate::leftovers::Scratch;

/// Payload of a block.
const BLOCK: u64 = 4096;

/// The made-up prompts: so many, over so many prefixes that they share.
const PROMPTS: u64 = 54;
const PREFIXES: u64 = 24;
/// Blocks of a prefix, and of what follows it: with 16 tokens each some 2,400 tokens.
const HALF: u64 = 75;
/// Hundredths of what the prompts need together that each tier holds.
const CACHE: u64 = 17;
const DAX: u64 = 58;

/// How often prompts are asked for: all alike, or by their rank to this power, with which exact
/// least recently used order serves the 87 % of the tokens that it served in vLLM.
const ORDERS: [(&str, f64); 2] = [("uniform", 0.0), ("skewed", 1.14)];

/// Blocks of a call, and calls, that the time of an admission is measured with.
const CALL: u64 = 128;
const CALLS: u64 = 600;

/// Hundredths of what an unlimited cache serves that the least recently used order serves of a
/// trace, with the capacities that are measured.
const SHARES: [u64; 3] = [40, 60, 80];

/// Whether the engine has a cache of its own that all prompts fit into, or none.
const ENGINES: [(&str, bool); 2] = [("large", true), ("none", false)];

/// What is stored, by the name of the option `admission`.
const POLICIES: [(&str, &str); 2] = [("lru", "all"), ("learned", "learned")];

pub(super) fn cases(args: &Churn) -> usize {
    match args.trace {
        Some(_) => SHARES.len() * POLICIES.len(),
        None => ENGINES.len() * ORDERS.len() * POLICIES.len() + 1,
    }
}

pub(super) fn run(args: &Churn, report: &mut Report<'_>) -> Result<(), Error> {
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new(&dir)?;
    match &args.trace {
        Some(path) => replay(path, scratch.path(), report),
        None => prompts(args, scratch.path(), report),
    }
}

/// The prompts again and again, in random order.
fn prompts(args: &Churn, dir: &Path, report: &mut Report<'_>) -> Result<(), Error> {
    let requests = args.requests.unwrap_or(if args.quick { 300 } else { 3277 });
    if requests == 0 {
        return Err(Error::Usage {
            field: "--requests",
            value: "0".into(),
            allowed: "1 or more".into(),
        });
    }
    let all: Vec<Vec<u64>> = (0..PROMPTS)
        .map(|prompt| {
            let (prefix, own) = (prompt % PREFIXES, PREFIXES + prompt);
            let blocks = |at: u64| at * HALF..(at + 1) * HALF;
            blocks(prefix).chain(blocks(own)).collect()
        })
        .collect();
    let blocks = (PREFIXES + PROMPTS) * HALF;
    for (order, power) in ORDERS {
        let history = draw(&all, requests, power);
        for (name, large) in ENGINES {
            for (policy, admission) in POLICIES {
                let settings = json!({
                    "admission": admission, "cache": {"capacity": blocks * CACHE / 100 * BLOCK},
                });
                let churned = churn(dir, settings, blocks * DAX / 100, &history, large, report)?;
                let case = json!({
                    "engine_cache": name, "order": order, "policy": policy, "requests": requests,
                });
                churned.rows(&case, large, report)?;
                report.case_done(name);
            }
        }
    }
    let calls = if args.quick { CALLS / 10 } else { CALLS };
    admission(dir, calls, report)?;
    report.case_done("admission");
    Ok(())
}

/// So many of these prompts, the first ones more often.
fn draw(all: &[Vec<u64>], requests: usize, power: f64) -> Vec<&[u64]> {
    let mut random = Random(23);
    let mut sum = 0.0;
    let weights = (1..=all.len()).map(|rank| {
        sum += (rank as f64).powf(-power);
        sum
    });
    let ends: Vec<f64> = weights.collect();
    let one = |_| {
        let at = random.below(1 << 32) as f64 / (1_u64 << 32) as f64 * sum;
        let drawn = ends.partition_point(|end| *end <= at).min(all.len() - 1);
        all[drawn].as_slice()
    };
    (0..requests).map(one).collect()
}

/// What it costs a put that blocks are judged: the same puts into two full arenas, side by side. In
/// processor time of all threads, as each of them waits for a lane, and for other programs.
fn admission(dir: &Path, calls: u64, report: &mut Report<'_>) -> Result<(), Error> {
    let blocks = 32 * CALL;
    let open = |admission: &str| -> Result<(Depot, Namespace), Error> {
        let dax = json!({
            "path": dir.join(admission), "capacity": blocks * (BLOCK + 128) + (4 << 20),
            "records": blocks,
        });
        let settings = json!({"admission": admission, "socket": "off", "lanes": 1, "dax": dax});
        let depot = kvdepot_service::open(&Config::new("Dax", &settings)?)?;
        let ns = depot.namespace(&spec())?;
        Ok((depot, ns))
    };
    let both = [open("all")?, open("learned")?];
    let memory = Buffer::from_vec(vec![7; (CALL * BLOCK) as usize]);
    let mut beyond = Vec::new();
    for call in 0..calls + 32 {
        report.interrupt.check()?;
        let keys: Vec<Key> = (call * CALL..(call + 1) * CALL).map(key).collect();
        let mut spent = [0.0; 2];
        let order = if call % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            let buffers = pieces(&memory, keys.len())?;
            let keys = keys.clone();
            let before = process_time();
            both[which].1.put(keys, buffers)?.wait(None)?;
            spent[which] = (process_time() - before).as_secs_f64();
        }
        // Those before fill the arenas.
        if call >= 32 {
            beyond.push((spent[1] - spent[0]) * 1e9 / CALL as f64);
        }
    }
    both.iter().for_each(|(depot, _)| depot.close());
    for path in ["all", "learned"].map(|name| dir.join(name)) {
        std::fs::remove_file(&path).map_err(Error::io(&path))?;
    }
    report.row(Row {
        bench: "churn",
        case: json!({"policy": "learned", "blocks": CALL}),
        metric: "admission",
        unit: "ns",
        value: median(beyond),
        limit: None,
        ratio: None,
        rounds: calls as usize,
        limit_name: None,
    })
}

/// The requests of a trace, in a tier of several sizes.
fn replay(path: &Path, dir: &Path, report: &mut Report<'_>) -> Result<(), Error> {
    let prompts = trace::read(path)?;
    let history: Vec<&[u64]> = prompts.iter().map(|prompt| &prompt.blocks[..]).collect();
    let unlimited = Lru::replay(u64::MAX, &history, false);
    for share in SHARES {
        let serves =
            |blocks: u64| Lru::replay(blocks, &history, false).hits * 100 >= unlimited.hits * share;
        let (mut below, mut enough) = (0, unlimited.stored);
        // To a hundredth.
        while enough - below > 1 + enough / 100 {
            report.interrupt.check()?;
            let middle = (below + enough) / 2;
            match serves(middle) {
                true => enough = middle,
                false => below = middle,
            }
        }
        for (policy, admission) in POLICIES {
            let settings = json!({"admission": admission});
            let churned = churn(dir, settings, enough, &history, false, report)?;
            let case = json!({
                "engine_cache": "none", "policy": policy, "lru_share": share as f64 / 100.0,
                "blocks": churned.capacity / BLOCK,
            });
            churned.rows(&case, false, report)?;
            report.case_done(&format!("{share} %"));
        }
    }
    Ok(())
}

/// What a history came to.
struct Churned {
    /// Bytes of the far tier.
    capacity: u64,
    wanted: u64,
    hits: u64,
    /// Bytes written to the far tier.
    stored: u64,
    promoted: u64,
    near_hits: u64,
    far_hits: u64,
    lru: Lru,
}

impl Churned {
    fn rows(&self, case: &Value, large: bool, report: &mut Report<'_>) -> Result<(), Error> {
        let row = |metric, unit, value: f64, limit: Option<f64>| Row {
            bench: "churn",
            case: case.clone(),
            metric,
            unit,
            value,
            limit,
            ratio: limit
                .filter(|limit| *limit > 0.0)
                .map(|limit| value / limit),
            rounds: 1,
            limit_name: limit.map(|_| "exact LRU"),
        };
        let capacity = self.capacity as f64;
        let lru = (self.lru.stored * BLOCK) as f64 / capacity;
        report.row(row(
            "stored_over_capacity",
            "",
            self.stored as f64 / capacity,
            Some(lru),
        ))?;
        if large {
            return Ok(());
        }
        let wanted = self.wanted as f64;
        report.row(row(
            "token_hit_rate",
            "",
            self.hits as f64 / wanted,
            Some(self.lru.hits as f64 / wanted),
        ))?;
        if self.far_hits > 0 && case.get("lru_share").is_none() {
            let promoted = self.promoted as f64 / self.far_hits as f64;
            report.row(row("promoted_over_hit", "", promoted, None))?;
            let near = self.near_hits as f64 / (self.near_hits + self.far_hits) as f64;
            report.row(row("near_over_hit", "", near, None))?;
        }
        Ok(())
    }
}

/// Lets a history happen to a depot of so many blocks far, and with a `cache` of blocks near.
fn churn(
    dir: &Path,
    mut settings: Value,
    far: u64,
    history: &[&[u64]],
    large: bool,
    report: &Report<'_>,
) -> Result<Churned, Error> {
    let path = dir.join("arena");
    // Its table, and what aligning the data takes.
    let capacity = far * (BLOCK + 128) + (4 << 20);
    let capacity = capacity / BLOCK * BLOCK;
    settings["socket"] = "off".into();
    settings["dax"] = json!({"path": path, "capacity": capacity, "records": far.max(1)});
    let pipeline = match settings.get("cache") {
        Some(_) => "Cache|Dax",
        None => "Dax",
    };
    let depot = kvdepot_service::open(&Config::new(pipeline, &settings)?)?;
    let ns = depot.namespace(&spec())?;
    let longest = history.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
    let memory = Buffer::from_vec(vec![7; longest * BLOCK as usize]);
    let mut engine = HashSet::new();
    let (mut wanted, mut hits) = (0, 0);
    for prompt in history {
        report.interrupt.check()?;
        let keys: Vec<Key> = prompt.iter().map(|number| key(*number)).collect();
        let has = match large {
            true => prompt.iter().take_while(|at| engine.contains(*at)).count(),
            false => 0,
        };
        wanted += (keys.len() - has) as u64;
        hits += restore(&ns, &keys[has..], &memory)? as u64;
        engine.extend(prompt.iter().copied());
        let buffers = pieces(&memory, keys.len())?;
        ns.put(keys, buffers)?.wait(None)?;
    }
    let stats = depot.stats();
    depot.close();
    std::fs::remove_file(&path).map_err(Error::io(&path))?;
    let tier = stats.tiers.last();
    let (stored, records) = tier.map_or((0, 0), |tier| (tier.stored_bytes, tier.blocks_max));
    Ok(Churned {
        capacity: records * BLOCK,
        wanted,
        hits,
        stored,
        promoted: stats.promoted_bytes,
        near_hits: stats.hit_bytes.first().copied().unwrap_or(0),
        far_hits: stats.hit_bytes.last().copied().unwrap_or(0),
        lru: Lru::replay(records, history, large),
    })
}

/// Gets the first of these blocks, as many as there are without a gap.
fn restore(ns: &Namespace, keys: &[Key], memory: &Buffer) -> Result<usize, Error> {
    if keys.is_empty() {
        return Ok(0);
    }
    let there = ns.prefix(keys)?;
    let buffers = pieces(memory, there)?;
    let got = ns.get(keys[..there].to_vec(), buffers)?.wait(None)?;
    Ok(got.into_iter().take_while(|got| *got).count())
}

fn pieces(memory: &Buffer, count: usize) -> Result<BlockBuffers, Error> {
    let mut buffers = BlockBuffers::default();
    for at in 0..count {
        let piece = memory.slice(at * BLOCK as usize, BLOCK as usize);
        buffers.push([piece.map_err(kvdepot_store::Error::from)?]);
    }
    Ok(buffers)
}

fn key(number: u64) -> Key {
    Random(number).key()
}

/// A cache that stores everything, and lets go what was used longest ago.
#[derive(Default)]
struct Lru {
    stamps: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    clock: u64,
    hits: u64,
    stored: u64,
}

impl Lru {
    fn replay(blocks: u64, history: &[&[u64]], large: bool) -> Lru {
        let mut lru = Lru::default();
        let mut engine = HashSet::new();
        for prompt in history {
            let has = prompt.iter().take_while(|at| engine.contains(*at));
            let has = if large { has.count() } else { 0 };
            let there = prompt[has..].iter();
            let there = there.take_while(|at| lru.stamps.contains_key(at)).count();
            lru.hits += there as u64;
            if large {
                engine.extend(prompt.iter().copied());
            }
            // A prompt's tail is older than its head.
            for number in prompt.iter().rev() {
                lru.clock += 1;
                match lru.stamps.insert(*number, lru.clock) {
                    Some(stamp) => drop(lru.order.remove(&stamp)),
                    None => lru.stored += 1,
                }
                lru.order.insert(lru.clock, *number);
            }
            while lru.stamps.len() as u64 > blocks
                && let Some((_, number)) = lru.order.pop_first()
            {
                lru.stamps.remove(&number);
            }
        }
        lru
    }
}
