//! `kvdepot bench alloc`: how full an arena gets, and what placing a block costs.
//!
//! The workloads and the reference are those of the benchmark that the reference was published
//! with; exact best fit is the limit of utilisation. All run in the same process on the same
//! random numbers.

mod contenders;
mod driver;
mod lru;
mod plan;
mod rebuild;
mod single;
mod spans;
mod threads;
mod workloads;

use super::report::Report;
use super::trace;
use crate::args::Alloc;
use crate::error::Error;
use plan::Plan;

fn wanted(args: &Alloc, workload: &str) -> bool {
    args.workloads.is_empty() || args.workloads.iter().any(|name| name == workload)
}

/// The sizes of the uniform workload.
fn sizes(args: &Alloc) -> Vec<u64> {
    if !wanted(args, "uniform") {
        return Vec::new();
    }
    if !args.sizes.is_empty() {
        return args.sizes.clone();
    }
    let all = workloads::uniform_sizes();
    let every = if args.quick { 9 } else { 1 };
    all.into_iter().step_by(every).collect()
}

pub(super) fn cases(args: &Alloc) -> usize {
    let count = |workload, cases| if wanted(args, workload) { cases } else { 0 };
    sizes(args).len()
        + count("random", 1)
        + count("paired", 1)
        + count("trace", 1)
        + count("threads", threads::THREADS.len())
        + count("rebuild", rebuild::CASES.len())
        + count("spans", spans::TURNS.len())
}

pub(super) fn run(args: &Alloc, report: &mut Report<'_>) -> Result<(), Error> {
    let plan = Plan::new(args);
    if plan.operations == 0 || plan.rounds == 0 {
        return Err(Error::Usage {
            field: "--operations, --rounds",
            value: "0".into(),
            allowed: "1 or more".into(),
        });
    }
    if let Some(size) = args
        .sizes
        .iter()
        .find(|size| **size > workloads::UNIFORM_MAX)
    {
        return Err(Error::Usage {
            field: "--size",
            value: size.to_string(),
            allowed: format!("at most {}", workloads::UNIFORM_MAX),
        });
    }
    // First, so that a file that cannot be read is known at once.
    let requests = match wanted(args, "spans") {
        true => Some(trace::requests(args.trace.as_deref(), plan.quick)?),
        false => None,
    };
    for size in sizes(args) {
        single::measure(&workloads::uniform(size), &plan, report)?;
    }
    if wanted(args, "random") {
        single::measure(&workloads::random(), &plan, report)?;
    }
    if wanted(args, "paired") {
        single::measure(&workloads::paired(plan.quick), &plan, report)?;
    }
    if wanted(args, "trace") {
        single::measure(&workloads::trace(), &plan, report)?;
    }
    if wanted(args, "threads") {
        threads::run(&plan, report)?;
    }
    if wanted(args, "rebuild") {
        rebuild::run(&plan, report)?;
    }
    if let Some(requests) = requests {
        spans::run(&requests, report)?;
    }
    Ok(())
}
