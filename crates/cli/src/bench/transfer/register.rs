//! `register_s`: very many ranges that a process registers one by one and publishes under one name,
//! and the first transfer to it.

use std::time::Instant;

use kvdepot_media::Buffer;
use kvdepot_transfer::{Config, Engine, Op, Options, Request};

use super::near::{Streams, done};
use super::plan::Plan;
use super::target::{RANGE, RANGES, Target};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;

pub(super) const METRIC: &str = "register_s";

const COUNT: usize = 100_000;
/// Bytes of memory that they are ranges of.
pub(super) const BYTES: u64 = (2 * COUNT * RANGE) as u64;

pub(super) fn run(
    plan: &Plan,
    memory: &Buffer,
    plain: &Streams,
    target: &Target,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let (mut all, mut firsts) = (Vec::new(), Vec::new());
    for round in 0..=plan.rounds {
        report.interrupt.check()?;
        let seconds: f64 = target.register(COUNT)?.iter().sum();
        let first = first(plan, memory, plain, target)?;
        if round > 0 {
            all.push(seconds);
            firsts.push(first);
        }
    }
    for (what, seconds) in [("register", all), ("first transfer", firsts)] {
        let mut case = plan.case(Op::Write, (COUNT * RANGE) as u64, COUNT);
        case["op"] = what.into();
        report.row(Row {
            bench: "transfer",
            case,
            metric: METRIC,
            unit: "s",
            value: median(seconds),
            limit: None,
            ratio: None,
            rounds: plan.rounds,
            limit_name: None,
        })?;
    }
    Ok(())
}

/// Seconds until an engine that has just started has written to the last range.
fn first(plan: &Plan, memory: &Buffer, plain: &Streams, target: &Target) -> Result<f64, Error> {
    let engine = Engine::start(Config {
        listen: None,
        ..plan.config()
    })?;
    let _registered = engine.register(std::slice::from_ref(memory))?;
    let start = Instant::now();
    let remote = engine.open(target.engine, RANGES)?;
    let request = Request {
        op: Op::Write,
        local: memory.addr() as u64,
        remote: &remote,
        offset: ((COUNT - 1) * RANGE) as u64,
        len: RANGE as u64,
    };
    let task = engine.submit([request].into_iter(), Options::default())?;
    let _over = task.wait(None);
    let seconds = start.elapsed().as_secs_f64();
    done(&task)?;
    plain.is_there(memory, 0, 2 * (COUNT - 1) * RANGE, RANGE)?;
    Ok(seconds)
}
