//! `kvdepot bench session`: saving and bringing back conversations, beside plain files and beside
//! the old way to save.
//!
//! `raw` is a plain program, and the old way; `kept` a depot of sessions, `one_file` a file of one.
//! `whole` moves all of a state, `growing` saves one again and again, `lookup` finds one among
//! many, and `stall` saves one while a decoder goes on.

mod growing;
mod kept;
mod lookup;
mod one_file;
mod plan;
mod raw;
mod stall;
mod whole;

use super::report::Report;
use crate::args::Sessions;
use crate::error::Error;
use plan::{Io, Plan};
use whole::Memory;

pub(super) fn cases(args: &Sessions) -> usize {
    let plan = Plan::new(args);
    let each = |metrics: &[&str], count: usize| if plan.wants_any(metrics) { count } else { 0 };
    let (sizes, ios) = (plan.bytes.len(), plan.ios.len());
    each(&whole::SAVES, sizes * ios)
        + each(&["restore_over_raw"], sizes * restored(&plan).count())
        + each(&["restore_warm_over_memcpy"], sizes)
        + each(&["write_amplification"], 1)
        + each(&growing::SERIES, 1)
        + each(&stall::STALLS, 1)
        + each(&["lookup_us"], 1)
}

/// How states come back: it does not matter how they were made to last.
fn restored(plan: &Plan) -> impl Iterator<Item = Io> + '_ {
    let ios = plan.ios.iter().copied();
    ios.filter(|io| *io != Io::Fsync)
}

pub(super) fn run(args: &Sessions, report: &mut Report<'_>) -> Result<(), Error> {
    let plan = Plan::new(args);
    plan.check()?;
    if plan.wants("lookup_us") {
        lookup::run(&plan, report)?;
        report.case_done("lookups");
    }
    let memory = Memory::new(plan.largest())?;
    for bytes in plan.bytes.iter().copied() {
        if plan.wants_any(&whole::SAVES) {
            for io in plan.ios.iter().copied() {
                whole::save(&plan, (bytes, io), &memory, report)?;
                report.case_done(&format!("saves of {bytes} bytes, {}", io.name()));
            }
        }
        if plan.wants("restore_over_raw") {
            for io in restored(&plan) {
                whole::restore(&plan, (bytes, io), &memory, report)?;
                report.case_done(&format!("restores of {bytes} bytes, {}", io.name()));
            }
        }
        if plan.wants("restore_warm_over_memcpy") {
            whole::warm(&plan, bytes, &memory, report)?;
            report.case_done(&format!("{bytes} bytes from memory"));
        }
    }
    let io = plan.ios.last().copied().unwrap_or(Io::Direct);
    if plan.wants("write_amplification") {
        growing::amplification(&plan, io, &memory, report)?;
        report.case_done("bytes written by saves");
    }
    if plan.wants_any(&growing::SERIES) {
        growing::checkpoints(&plan, io, &memory, report)?;
        report.case_done("a series of checkpoints");
    }
    if plan.wants_any(&stall::STALLS) {
        stall::run(&plan, io, &memory, report)?;
        report.case_done("a decoder during saves");
    }
    Ok(())
}
