//! `hung_over_cache`: hits of blocks in `Cache` with a stage behind it that answers nothing, over
//! the same with `Cache` alone.

use std::time::Instant;

use kvdepot_store::{Key, Task};
use serde_json::{Value, json};

use super::blocks::done;
use super::commit::micros;
use super::hot::Hot;
use super::plan::{HUNG, Plan, RINGS};
use crate::bench::media::Region;
use crate::bench::random::Random;
use crate::bench::report::Report;
use crate::bench::rounds::{Rounds, median};
use crate::error::Error;
use crate::leftovers::Scratch;

/// Blocks that are hit, in turns; all of them are on their way to the stage, too.
const BLOCKS: usize = 64;
/// Hits of a round.
const HITS: usize = 512;
/// Rounds for each of the others: they are short.
const TIMES: usize = 3;

/// Behind `Cache` a 3FS whose library loses what it is told, as its double can.
pub(super) fn rings(plan: &Plan, region: &Region, report: &mut Report<'_>) -> Result<(), Error> {
    let scratch = Scratch::new(plan.dir_of(RINGS))?;
    let mut section = json!({"path": scratch.path().join("tier"), "capacity": "1GiB"});
    if let Some(library) = &plan.library {
        section["library"] = json!(library);
    }
    run(plan, RINGS, &section, region, report)
}

/// Behind `Cache` a server that takes connections, and says nothing.
#[cfg(feature = "s3")]
pub(super) fn objects(plan: &Plan, region: &Region, report: &mut Report<'_>) -> Result<(), Error> {
    // The system accepts, and nobody reads.
    let silent = std::net::TcpListener::bind("127.0.0.1:0")?;
    let scratch = Scratch::new(&plan.dir)?;
    let credentials = scratch.path().join("credentials");
    let text = "aws_access_key_id = nobody\naws_secret_access_key = nothing\n";
    std::fs::write(&credentials, text).map_err(Error::io(&credentials))?;
    let section = json!({
        "url": "s3://bucket/kv", "endpoint": format!("http://{}", silent.local_addr()?),
        "region": "us-east-1", "allow_http": true, "capacity": "1GiB", "credentials": credentials,
    });
    run(plan, super::plan::OBJECTS, &section, region, report)
}

fn run(
    plan: &Plan,
    stage: &str,
    section: &Value,
    region: &Region,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let rounds = plan.rounds * TIMES;
    let pipeline = format!("Cache|{stage}");
    for block in plan.blocks.iter().copied() {
        report.interrupt.check()?;
        let count = region.blocks(block).min(BLOCKS);
        let name = stage.to_lowercase();
        let alone = Hot::open("Cache", None, (block, count), region)?;
        let hung = Hot::open(&pipeline, Some((&name, section)), (block, count), region)?;
        let mut asking = Asking::new(block)?;
        let mut slowest = [Vec::new(), Vec::new()];
        let seconds = Rounds::run(rounds, 1, &report.interrupt, |contender| {
            let hot = [&alone, &hung][contender];
            asking.ask(hot)?;
            let mut hits = hits(hot, block, region)?;
            hits.sort_unstable_by(f64::total_cmp);
            slowest[contender].push(hits[hits.len() * 99 / 100]);
            Ok(median(hits))
        })?;
        // Where the stage hangs, its time-out ends the put; a slow one stores it.
        if done(&hung.put, "stored").is_ok() {
            return Err(Error::Bench(format!(
                "{stage} responded, but must hang for this benchmark"
            )));
        }
        let mut slowest = slowest.each_ref().map(|each| each.iter().copied());
        let slowest = Rounds::run(rounds, 1, &report.interrupt, |contender| {
            Ok(slowest[contender].next().unwrap_or_default())
        })?;
        for (of, seconds) in [("median", &seconds), ("p99", &slowest)] {
            let case = json!({"pipeline": pipeline, "block": block, "hits": of});
            report.row(micros(case, HUNG, seconds, rounds, "Cache alone"))?;
        }
    }
    Ok(())
}

/// Looks up and gets one block after the other; seconds of each.
fn hits(hot: &Hot, block: usize, region: &Region) -> Result<Vec<f64>, Error> {
    let hit = |slot: usize| {
        let key = hot.keys[slot];
        let buffers = region.buffers(block, slot..slot + 1)?;
        let start = Instant::now();
        if hot.ns.contains(&[key])? != [true] {
            return Err(Error::Bench("a block is not in Cache".into()));
        }
        done(&hot.ns.get(vec![key], buffers)?, "got")?;
        Ok(start.elapsed().as_secs_f64())
    };
    (0..HITS).map(|at| hit(at % hot.keys.len())).collect()
}

/// Gets of what is nowhere: the stage is asked for each, unless it is left alone.
struct Asking {
    random: Random,
    region: Region,
    block: usize,
    under_way: Vec<Task>,
}

impl Asking {
    fn new(block: usize) -> Result<Asking, Error> {
        Ok(Asking {
            random: Random(41),
            region: Region::new(block.max(2 << 20))?,
            block,
            under_way: Vec::new(),
        })
    }

    fn ask(&mut self, hot: &Hot) -> Result<(), Error> {
        let key: Key = self.random.key();
        let into = self.region.buffers(self.block, 0..1)?;
        self.under_way.retain(|task| !task.is_done());
        self.under_way.push(hot.ns.get(vec![key], into)?);
        Ok(())
    }
}
