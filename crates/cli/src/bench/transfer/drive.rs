//! Moves batches over TCP as lines tell it, for who measures kvdepot beside others: each line is an
//! op, the bytes of a piece, how many pieces, and whether slices are under checksums; the answer is
//! seconds, and processor seconds of both processes.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::stdin;

use kvdepot_transfer::{Config, Op};

use super::near::{Layout, Near, Streams};
use super::plan::{Batch, Place, Plan, word};
use super::target::{Site, Target};
use crate::args::Transfer;
use crate::bench::media::Region;
use crate::error::Error;
use crate::output::Output;

/// What a line says.
struct Line {
    op: Op,
    batch: Batch,
    is_summed: bool,
}

impl Line {
    fn read(line: &str) -> Option<Line> {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        let op = [Op::Read, Op::Write]
            .into_iter()
            .find(|op| word(*op) == name)?;
        let chunk = words.next()?.parse().ok()?;
        let chunks = words.next()?.parse().ok()?;
        let is_summed = words.next()? == "on";
        Some(Line {
            op,
            batch: Batch { chunks, chunk },
            is_summed,
        })
    }
}

pub(super) fn run(
    bytes: u64,
    args: &Transfer,
    program: &OsStr,
    output: &mut Output,
) -> Result<i32, Error> {
    let plan = Plan::new(args, Place::Loopback);
    let site = Site {
        program,
        spaces: None,
    };
    let target = Target::start(&site, bytes, &plan)?;
    let memory = Region::filled(bytes as usize)?;
    let plain = Streams::new(1, memory.whole(), &target)?;
    let near = |checksum| {
        let config = Config {
            checksum,
            ..plan.config()
        };
        Near::new(config, memory.whole(), &target)
    };
    let (bare, summed) = (near(false)?, near(true)?);
    output.line("ready")?;
    output.flush()?;
    let mut layouts: HashMap<(usize, u64), Layout> = HashMap::new();
    for line in stdin().lines() {
        let line = line?;
        let told = Line::read(&line).filter(|told| told.batch.bytes() <= bytes);
        let told = told.ok_or_else(|| Error::Bench(format!("unknown request {line:?}")))?;
        let key = (told.batch.chunks, told.batch.chunk);
        let layout = layouts
            .entry(key)
            .or_insert_with(|| Layout::new(told.batch));
        let near = if told.is_summed { &summed } else { &bare };
        let before = target.processor_seconds()?;
        let seconds = near.batch(told.op, layout)?;
        let spent = target.processor_seconds()? - before;
        near.check(layout, &plain)?;
        output.line(&format!("{seconds} {spent}"))?;
        output.flush()?;
    }
    Ok(crate::status::OK)
}
