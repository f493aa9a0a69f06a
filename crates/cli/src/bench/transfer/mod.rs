//! `kvdepot bench transfer`: batches between two processes, against plain sockets.
//!
//! `target` is the other process, with an engine and the `plain` sockets that are measured against;
//! `near` moves bytes between its memory and this one's; `spaces` has networks for both. The others
//! have their metrics.

mod drive;
mod first;
mod messages;
mod near;
mod plain;
mod plan;
mod register;
mod resolve;
mod shared;
mod spaces;
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
use kvdepot_media::Buffer;
use kvdepot_transfer::Config;
use near::{Near, Streams};
use plan::{Place, Plan};
use spaces::Spaces;
use table::Movers;
use target::{Site, Target};

fn plans(args: &Transfer) -> Vec<Plan> {
    // What there is to say of a network; the rest would be the same.
    let across = || {
        let several = table::METRICS.into_iter().chain(trips::METRICS);
        several.chain([messages::METRIC, resolve::METRIC]).collect()
    };
    let plan = |place| match place {
        Place::Loopback => Plan::new(args, place),
        Place::Veth => Plan::new(args, place).with_only(across()),
    };
    Place::all_of(args).into_iter().map(plan).collect()
}

pub(super) fn cases(args: &Transfer) -> usize {
    plans(args).iter().map(cases_of).sum()
}

fn cases_of(plan: &Plan) -> usize {
    let others = [
        plan.wants_any(&trips::METRICS),
        plan.wants(first::METRIC),
        plan.wants(submit::METRIC),
        plan.wants(register::METRIC),
        plan.wants(resolve::METRIC),
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
    let plans = plans(args);
    plans.iter().try_for_each(Plan::check)?;
    if plans.iter().any(|plan| plan.place == Place::Veth) {
        Spaces::check()?;
    }
    let mut all = plans.iter();
    let result = all.try_for_each(|plan| run_at_its_place(plan, program, report));
    // Ctrl-C ends the target, too, and it may be that which was noticed first.
    result.map_err(|error| report.interrupt.check().err().unwrap_or(error))
}

fn run_at_its_place(plan: &Plan, program: &OsStr, report: &mut Report<'_>) -> Result<(), Error> {
    match plan.place {
        Place::Loopback => {
            let site = Site {
                program,
                spaces: None,
            };
            run_at(plan, &site, report)
        }
        Place::Veth => {
            let spaces = Spaces::new()?;
            let _inside = spaces.enter()?;
            let site = Site {
                program,
                spaces: Some(&spaces),
            };
            run_at(plan, &site, report)
        }
    }
}

fn run_at(plan: &Plan, site: &Site<'_>, report: &mut Report<'_>) -> Result<(), Error> {
    let batches = plan.batches.iter().map(plan::Batch::bytes);
    let most = batches.max().unwrap_or_default().max(floor(plan));
    let memory = Region::filled(most as usize)?;
    run_beside_one(plan, site, memory.whole(), report)?;
    if plan.wants(resolve::METRIC) {
        resolve::run(plan, site, report)?;
        report.case_done("targets that exit during a batch");
    }
    Ok(())
}

/// All that needs no more than one target.
fn run_beside_one(
    plan: &Plan,
    site: &Site<'_>,
    memory: &Buffer,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let target = Target::start(site, memory.len() as u64, plan)?;
    let plain = Streams::new(2, memory, &target)?;
    let near = |config| Near::new(config, memory, &target);
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
            table::run(plan, batch, &movers, report)?;
            report.case_done(&format!("{} pieces of {} bytes", batch.chunks, batch.chunk));
        }
    }
    if plan.wants(shared::METRIC) {
        let copies = shared::Copies::new(memory)?;
        let near = near(plan.config_shared())?;
        for batch in plan.batches.iter().copied() {
            shared::run(plan, batch, (&near, &plain, &copies), report)?;
            report.case_done(&format!("{} pieces in shared memory", batch.chunks));
        }
    }
    if plan.wants(messages::METRIC) {
        for bytes in plan.messages.iter().copied() {
            messages::run(plan, bytes, &movers, report)?;
            report.case_done(&format!("messages of {bytes} bytes"));
        }
    }
    if plan.wants_any(&trips::METRICS) {
        // Namespaces do not see each other's sockets that memory is lent by.
        let is_near = plan.place == Place::Loopback;
        let shared = is_near.then(|| near(plan.config_shared())).transpose()?;
        trips::run(plan, &movers, shared.as_ref(), report)?;
        report.case_done("round trips");
    }
    run_rest(plan, memory, &movers, report)
}

/// What says the same whatever lies between.
fn run_rest(
    plan: &Plan,
    memory: &Buffer,
    movers: &Movers<'_>,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    if plan.wants(first::METRIC) {
        first::run(plan, movers, report)?;
        report.case_done("first bytes");
    }
    if plan.wants(submit::METRIC) {
        submit::run(plan, movers, report)?;
        report.case_done("request submission");
    }
    if plan.wants(register::METRIC) {
        register::run(plan, memory, movers.plain, movers.target, report)?;
        report.case_done("memory registration");
    }
    Ok(())
}

/// Bytes that what is measured needs beside batches.
fn floor(plan: &Plan) -> u64 {
    let of = |metric, bytes| if plan.wants(metric) { bytes } else { 0 };
    let messages = plan.messages.iter().copied().max().unwrap_or_default();
    [
        of(register::METRIC, register::BYTES),
        of(resolve::METRIC, resolve::batch(plan).bytes()),
        of(first::METRIC, first::BATCH.bytes()),
        of(messages::METRIC, messages.max(messages::BYTES)),
        of(submit::METRIC, submit::ALL),
        of(trips::METRICS[0], trips::ALL),
        of(trips::METRICS[1], trips::ALL),
    ]
    .into_iter()
    .fold(1, u64::max)
}
