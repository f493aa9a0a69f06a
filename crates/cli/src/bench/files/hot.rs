//! `hot_through_pipeline`: gets of blocks that are all in `Cache`, with `Posix` behind it and
//! without.

use std::time::Instant;

use kvdepot_store::{Config, Depot, Key, Namespace, Task};
use serde_json::{Value, json};

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

/// A depot whose `Cache` has all blocks, which may be on their way to a stage behind it.
pub(super) struct Hot {
    depot: Depot,
    pub(super) ns: Namespace,
    pub(super) keys: Vec<Key>,
    pub(super) put: Task,
}

impl Hot {
    /// With so many blocks, and the section of the stage if there is one.
    pub(super) fn open(
        pipeline: &str,
        stage: Option<(&str, &Value)>,
        (block, count): (usize, usize),
        region: &Region,
    ) -> Result<Hot, Error> {
        // With room to spare: nothing is evicted.
        let capacity = 2 * region.whole().len() + (4 << 20);
        // A stage that hangs has not got what was put, and never will.
        let mut settings = json!({
            "socket": "off", "close_timeout": "100ms", "cache": {"capacity": capacity},
        });
        if let Some((name, section)) = stage {
            settings[name] = section.clone();
        }
        let depot = kvdepot_service::open(&Config::new(pipeline, &settings)?)?;
        let ns = depot.namespace(&spec())?;
        let mut random = Random(37);
        let keys: Vec<Key> = (0..count).map(|_| random.key()).collect();
        let put = ns.put(keys.clone(), region.buffers(block, 0..count)?)?;
        put.wait_released(None)?;
        let hot = Hot {
            depot,
            ns,
            keys,
            put,
        };
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
        let path = scratch.path().join(format!("tier-{block}"));
        let posix = json!({"path": path, "capacity": 4 * plan.batch + (1 << 30)});
        let of = (block, region.blocks(block));
        let both = [
            Hot::open("Cache", None, of, region)?,
            Hot::open("Cache|Posix", Some(("posix", &posix)), of, region)?,
        ];
        both.iter().try_for_each(|hot| done(&hot.put, "stored"))?;
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
