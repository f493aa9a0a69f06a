//! `commit_us`: one block of 4 KiB, from the call until it is acknowledged.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use kvdepot_media::file::plain::{self, DIRECT, commit, publish};
use serde_json::{Value, json};

use super::blocks::done;
use super::plan::Plan;
use super::tier::{open, settings};
use crate::bench::media::{Region, spec};
use crate::bench::random::Random;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;
use crate::leftovers::Scratch;

const BLOCK: usize = 4096;
/// Commits for each round of the others: one takes microseconds.
const TIMES: usize = 20;
/// Blocks that there is room for.
const ROOM: usize = 64 << 20;

pub(super) fn run(plan: &Plan, report: &mut Report<'_>) -> Result<(), Error> {
    let rounds = plan.rounds * TIMES;
    let small = Plan {
        size: ROOM,
        batch: BLOCK,
        ..plan.clone()
    };
    for tier in plan.on_disk() {
        for durability in ["process", "power"] {
            let lasts = durability == "power";
            let scratch = Scratch::new(&plan.dir)?;
            let path = scratch.path().join("tier");
            let settings = settings(&path, tier, true, durability, &small, BLOCK);
            let depot = open(tier, &settings)?;
            let ns = depot.namespace(&spec())?;
            let region = Region::new(2 << 20)?;
            let mut random = Random(29);
            let mut plain = Plain::new(&scratch.path().join("plain"), tier == "Nvme")?;
            let seconds = Rounds::run(rounds, 1, &report.interrupt, |contender| {
                let start = Instant::now();
                match contender {
                    0 => plain.commit(lasts)?,
                    _ => {
                        let buffers = region.buffers(BLOCK, 0..1)?;
                        done(&ns.put(vec![random.key()], buffers)?, "stored")?;
                    }
                }
                Ok(start.elapsed().as_secs_f64())
            });
            depot.close();
            let seconds = seconds?;
            let case = json!({"tier": tier, "block": BLOCK, "durability": durability});
            let limit = "the same writes, renames and syncs";
            report.row(micros(case, "commit_us", &seconds, rounds, limit))?;
        }
    }
    Ok(())
}

/// A row of times, against those of `limit_name`.
pub(super) fn micros(
    case: Value,
    metric: &'static str,
    seconds: &Rounds,
    rounds: usize,
    limit_name: &'static str,
) -> Row {
    Row {
        bench: "files",
        case,
        metric,
        unit: "us",
        value: seconds.value() * 1e6,
        limit: seconds.best().map(|(_, seconds)| seconds * 1e6),
        ratio: seconds.ratio(),
        rounds,
        limit_name: Some(limit_name),
    }
}

/// What a commit writes, renames and syncs at the least.
struct Plain {
    dir: File,
    one: Option<OwnedFd>,
    next: u64,
}

impl Plain {
    fn new(path: &Path, in_one: bool) -> Result<Plain, Error> {
        std::fs::create_dir(path).map_err(Error::io(path))?;
        let one = match in_one {
            true => {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create_new(true);
                let path = path.join("blocks");
                let file = options.custom_flags(DIRECT).open(&path);
                let file = file.map_err(Error::io(&path))?;
                plain::allocate(&file, ROOM as u64)?;
                Some(file.into())
            }
            false => None,
        };
        Ok(Plain {
            dir: File::open(path).map_err(Error::io(path))?,
            one,
            next: 0,
        })
    }

    fn commit(&mut self, lasts: bool) -> Result<(), Error> {
        self.next += 1;
        if let Some(file) = &self.one {
            let at = self.next % (ROOM / BLOCK) as u64 * BLOCK as u64;
            return Ok(commit(file, at, 0, lasts)?);
        }
        let name = |text: String| CString::new(text).map_err(|e| Error::Bench(e.to_string()));
        let (new, name) = (name("new".into())?, name(self.next.to_string())?);
        Ok(publish(self.dir.as_fd(), &new, &name, lasts)?)
    }
}
