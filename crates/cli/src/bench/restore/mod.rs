//! `kvdepot bench restore`: blocks brought back from the Dax tier.
//!
//! Each metric has a module. Those that compare copies are figures of the same runs, which `cells`
//! times; the others are of depots that this process serves (`served`).

mod cells;
mod cpu;
mod first_hit;
mod pin;
mod processes;
mod served;
mod staged;
mod throughput;

use std::ffi::OsStr;
use std::path::Path;

use serde_json::json;

use super::media::in_memory;
use super::report::Report;
use crate::args::Restore;
use crate::error::Error;
use crate::output::Output;
use cells::{Cell, Machine};

const COUNTS: [usize; 3] = [64, 256, 1024];
const SIZES: [u64; 5] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const ORDERS: [&str; 3] = ["adjacent", "shuffled", "gapped"];
const WORKERS: [usize; 3] = [1, 2, 4];

/// Bytes that are copied before any of them is copied again: many times what the caches hold.
const COLD: u64 = 256 << 20;

/// Most bytes of a call.
const CALL_MAX: usize = 1 << 30;

/// What is measured.
struct Plan {
    cells: Vec<Cell>,
    rounds: usize,
}

impl Plan {
    fn new(args: &Restore) -> Plan {
        fn or<T: Clone>(given: &[T], quick: Option<&[T]>, all: &[T]) -> Vec<T> {
            match given {
                [] => quick.unwrap_or(all).to_vec(),
                given => given.to_vec(),
            }
        }
        let quick = args.quick;
        let counts = or(&args.counts, quick.then_some(&[256]), &COUNTS);
        let sizes = or(&args.sizes, quick.then_some(&[64 << 10, 1 << 20]), &SIZES);
        let workers = or(&args.workers, quick.then_some(&[1, 2]), &WORKERS);
        let orders = or(&args.orders, None, &ORDERS.map(str::to_owned));
        let mut cells = Vec::new();
        for workers in workers {
            for block in sizes.iter().map(|size| *size as usize) {
                let fits = |blocks: &usize| blocks.saturating_mul(block) <= CALL_MAX;
                for blocks in counts.iter().copied().filter(fits) {
                    for order in &orders {
                        cells.push(Cell {
                            blocks,
                            block,
                            order: order.clone(),
                            workers,
                        });
                    }
                }
            }
        }
        Plan {
            cells,
            rounds: args.rounds.unwrap_or(if quick { 3 } else { 5 }),
        }
    }

    fn check(&self, args: &Restore) -> Result<(), Error> {
        let refuse = |field, value: String, allowed: &str| {
            Err(Error::Usage {
                field,
                value,
                allowed: allowed.into(),
            })
        };
        if let Some(size) = args.sizes.iter().find(|size| **size % 4096 != 0) {
            return refuse("--block", size.to_string(), "a multiple of 4096");
        }
        if self.rounds == 0 {
            return refuse("--rounds", "0".into(), "1 or more");
        }
        if self.cells.is_empty() {
            let value = format!("{:?} and {:?}", args.counts, args.sizes);
            return refuse(
                "--blocks, --block",
                value,
                "block counts and sizes with at most 1 GiB per call",
            );
        }
        Ok(())
    }
}

fn wanted(args: &Restore, metric: &str) -> bool {
    args.metrics.is_empty() || args.metrics.iter().any(|name| name == metric)
}

pub(super) fn cases(args: &Restore) -> usize {
    Plan::new(args).cells.len()
}

pub(super) fn child(socket: &Path, args: &Restore, output: &mut Output) -> Result<i32, Error> {
    processes::child(socket, args, output)
}

pub(super) fn run(args: &Restore, program: &OsStr, report: &mut Report<'_>) -> Result<(), Error> {
    let plan = Plan::new(args);
    plan.check(args)?;
    let dir = in_memory(args.dir.as_deref());
    if COPIES.iter().any(|metric| wanted(args, metric)) {
        copies(args, &plan, dir, report)?;
    }
    if wanted(args, "processes_over_one") {
        processes::run(dir, program, plan.rounds, report)?;
    }
    if wanted(args, "first_hit") {
        first_hit::run(dir, args.quick, plan.rounds, report)?;
    }
    if wanted(args, "pin_over_echo") {
        pin::run(dir, plan.rounds, report)?;
    }
    Ok(())
}

/// The metrics that are figures of the same runs.
const COPIES: [&str; 3] = ["throughput", "staged_over_direct", "cpu_over_copy"];

fn copies(args: &Restore, plan: &Plan, dir: &Path, report: &mut Report<'_>) -> Result<(), Error> {
    let cold = args.cold.unwrap_or(COLD) as usize;
    let mut machine = Machine::new(dir, &plan.cells, cold)?;
    for cell in &plan.cells {
        let runs = machine.measure(cell, plan.rounds, report)?;
        let mut rows = Vec::new();
        if wanted(args, "throughput") {
            rows.extend(throughput::rows(cell, &runs));
        }
        if wanted(args, "staged_over_direct") {
            rows.push(staged::row(cell, &runs));
        }
        if wanted(args, "cpu_over_copy") {
            rows.extend(cpu::rows(cell, &runs));
        }
        rows.into_iter().try_for_each(|row| report.row(row))?;
        report.case_done(&cell.name());
    }
    Ok(())
}

impl Cell {
    fn case(&self) -> serde_json::Value {
        json!({
            "blocks": self.blocks, "block": self.block, "order": self.order,
            "workers": self.workers,
        })
    }

    fn case_with(&self, mode: &str) -> serde_json::Value {
        let mut case = self.case();
        case["mode"] = mode.into();
        case
    }

    fn name(&self) -> String {
        let Cell {
            blocks,
            block,
            order,
            workers,
        } = self;
        format!("{blocks} {order} blocks of {block} bytes, {workers} workers")
    }
}
