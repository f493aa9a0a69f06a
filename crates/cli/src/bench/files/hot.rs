//! `hot_through_pipeline`: gets of blocks that are all in `Cache`, with `Posix` behind it and
//! without.

use std::time::Instant;

use kvdepot_store::{Config, Depot, Key, Namespace};
use serde_json::json;

use super::blocks::done;
use super::plan::Plan;
use crate::bench::media::{Region, spec};
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;
use crate::leftovers::Scratch;

/// Rounds for each of the others: they are short.
const TIMES: usize = 3;

/// A depot whose `Cache` has all blocks.
struct Hot {
    depot: Depot,
    ns: Namespace,
    keys: Vec<Key>,
}

impl Hot {
    fn new(
        pipeline: &str,
        scratch: &Scratch,
        block: usize,
        plan: &Plan,
        region: &Region,
    ) -> Result<Hot, Error> {
        // With room to spare: nothing is evicted.
        let capacity = 2 * plan.batch + (4 << 20);
        let mut settings = json!({"socket": "off", "cache": {"capacity": capacity}});
        if pipeline != "Cache" {
            let path = scratch.path().join(format!("tier-{block}"));
            let capacity = 4 * plan.batch + (1 << 30);
            settings["posix"] = json!({"path": path, "capacity": capacity});
        }
        let depot = kvdepot_service::open(&Config::new(pipeline, &settings)?)?;
        let ns = depot.namespace(&spec())?;
        let mut random = Random(37);
        let count = region.blocks(block);
        let keys: Vec<Key> = (0..count).map(|_| random.key()).collect();
        done(
            &ns.put(keys.clone(), region.buffers(block, 0..count)?)?,
            "stored",
        )?;
        let hot = Hot { depot, ns, keys };
        let near = hot.ns.nearest(&hot.keys)?;
        match near.iter().all(|tier| *tier == Some("Cache")) {
            true => Ok(hot),
            false => Err(Error::Bench("not all blocks are in Cache".into())),
        }
    }
}

impl Drop for Hot {
    fn drop(&mut self) {
        self.depot.close();
    }
}

pub(super) fn run(plan: &Plan, region: &Region, report: &mut Report<'_>) -> Result<(), Error> {
    let rounds = plan.rounds * TIMES;
    let scratch = Scratch::new(&plan.dir)?;
    for block in plan.blocks.iter().copied() {
        report.interrupt.check()?;
        let depot = |pipeline| Hot::new(pipeline, &scratch, block, plan, region);
        let both = [depot("Cache")?, depot("Cache|Posix")?];
        let seconds = Rounds::run(rounds, 1, &report.interrupt, |contender| {
            let Hot { ns, keys, .. } = &both[contender];
            let buffers = region.buffers(block, 0..keys.len())?;
            let start = Instant::now();
            done(&ns.get(keys.clone(), buffers)?, "got")?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let bytes = (region.blocks(block) * block) as f64;
        report.row(Row {
            bench: "files",
            case: json!({"pipeline": "Cache|Posix", "block": block}),
            metric: "hot_through_pipeline",
            unit: "GB/s",
            value: bytes / seconds.value() / 1e9,
            limit: seconds.best().map(|(_, seconds)| bytes / seconds / 1e9),
            ratio: seconds.ratio(),
            rounds,
            limit_name: Some("Cache alone"),
        })?;
    }
    Ok(())
}
