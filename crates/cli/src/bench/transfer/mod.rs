//! `kvdepot bench transfer`: batches between two processes, against plain sockets.
//!
//! `target` is the other process, with an engine and the `plain` sockets that are measured against;
//! `near` moves bytes between its memory and this one's. The others have their metrics.

mod drive;
mod first;
mod messages;
mod near;
mod plain;
mod plan;
mod register;
mod shared;
mod submit;
mod table;
mod target;
mod trips;

use std::ffi::OsStr;

use super::media::Region;
use super::report::Report;
use crate::args::Transfer;
use crate::error::Error;
use crate::output::Output;
use kvdepot_transfer::Config;
use near::{Near, Streams};
use plan::Plan;
use table::Movers;
use target::Target;

pub(super) fn cases(args: &Transfer) -> usize {
    let plan = Plan::new(args);
    let others = [
        plan.wants_any(&trips::METRICS),
        plan.wants(first::METRIC),
        plan.wants(submit::METRIC),
        plan.wants(register::METRIC),
    ];
    let others = others.into_iter().filter(|wanted| *wanted).count();
    let batches = plan.wants_any(&table::METRICS);
    let messages = plan.wants(messages::METRIC);
    let shared = plan.wants(shared::METRIC);
    let count = |wanted, count| if wanted { count } else { 0 };
    others
        + count(batches, plan.batches.len())
        + count(shared, plan.batches.len())
        + count(messages, plan.messages.len())
}

pub(super) fn child(bytes: u64, args: &Transfer, output: &mut Output) -> Result<i32, Error> {
    target::child(bytes, args, output)
}

pub(super) fn drive(
    bytes: u64,
    args: &Transfer,
    program: &OsStr,
    output: &mut Output,
) -> Result<i32, Error> {
    drive::run(bytes, args, program, output)
}

pub(super) fn run(args: &Transfer, program: &OsStr, report: &mut Report<'_>) -> Result<(), Error> {
    let plan = Plan::new(args);
    plan.check()?;
    let batches = plan.batches.iter().map(plan::Batch::bytes);
    let most = batches.max().unwrap_or_default().max(floor(&plan));
    let target = Target::start(program, most, &plan)?;
    let memory = Region::filled(most as usize)?;
    let plain = Streams::new(2, memory.whole(), &target)?;
    let near = |config| Near::new(config, memory.whole(), &target);
    let (ours, plan_off) = (near(plan.config())?, near(plan.config_off())?);
    let summed = near(Config {
        checksum: true,
        ..plan.config()
    })?;
    let movers = Movers {
        target: &target,
        plain: &plain,
        near: &ours,
        summed: &summed,
        plan_off: &plan_off,
    };
    if plan.wants_any(&table::METRICS) {
        for batch in plan.batches.iter().copied() {
            table::run(&plan, batch, &movers, report)?;
            report.case_done(&format!("{} pieces of {} bytes", batch.chunks, batch.chunk));
        }
    }
    if plan.wants(shared::METRIC) {
        let copies = shared::Copies::new(memory.whole())?;
        let near = near(plan.config_shared())?;
        for batch in plan.batches.iter().copied() {
            shared::run(&plan, batch, (&near, &plain, &copies), report)?;
            report.case_done(&format!("{} pieces in shared memory", batch.chunks));
        }
    }
    if plan.wants(messages::METRIC) {
        for bytes in plan.messages.iter().copied() {
            messages::run(&plan, bytes, &movers, report)?;
            report.case_done(&format!("messages of {bytes} bytes"));
        }
    }
    if plan.wants_any(&trips::METRICS) {
        trips::run(&plan, &movers, &near(plan.config_shared())?, report)?;
        report.case_done("round trips");
    }
    if plan.wants(first::METRIC) {
        first::run(&plan, &movers, report)?;
        report.case_done("first bytes");
    }
    if plan.wants(submit::METRIC) {
        submit::run(&plan, &movers, report)?;
        report.case_done("requests that are submitted");
    }
    if plan.wants(register::METRIC) {
        register::run(&plan, memory.whole(), &plain, &target, report)?;
        report.case_done("ranges that are registered");
    }
    Ok(())
}

/// Bytes that what is measured needs beside batches.
fn floor(plan: &Plan) -> u64 {
    let of = |metric, bytes| if plan.wants(metric) { bytes } else { 0 };
    let messages = plan.messages.iter().copied().max().unwrap_or_default();
    [
        of(register::METRIC, register::BYTES),
        of(first::METRIC, first::BATCH.bytes()),
        of(messages::METRIC, messages.max(messages::BYTES)),
        of(submit::METRIC, submit::ALL),
        of(trips::METRICS[0], trips::ALL),
        of(trips::METRICS[1], trips::ALL),
    ]
    .into_iter()
    .fold(1, u64::max)
}
