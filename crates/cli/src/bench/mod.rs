//! `kvdepot bench`: this machine's limits, what kvdepot reaches, and the ratio.

mod alloc;
mod churn;
mod cluster;
mod cuda;
mod files;
mod index;
mod media;
mod memory;
mod plain;
mod pressure;
mod random;
mod reopen;
mod report;
mod restore;
mod rounds;
mod scale;
mod session;
mod trace;
mod transfer;

use std::ffi::OsStr;

use crate::args::Bench;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, Progress};
use report::Report;

pub(crate) fn run(args: &Bench, program: &OsStr, output: &mut Output) -> Result<i32, Error> {
    if let Bench::Reopen(args) = args
        && let Some(arena) = &args.child
    {
        return reopen::child(arena, args, output);
    }
    if let Bench::Restore(args) = args
        && let Some(socket) = &args.child
    {
        return restore::child(socket, args, output);
    }
    if let Bench::Scale(args) = args
        && let Some(dir) = &args.child
    {
        return scale::child(dir, args, output);
    }
    if let Bench::Transfer(args) = args {
        if let Some(bytes) = args.child {
            return transfer::child(bytes, args, output);
        }
        if let Some(bytes) = args.drive {
            return transfer::drive(bytes, args, program, output);
        }
    }
    let (name, cases) = match args {
        Bench::Memory(args) => ("bench memory", memory::cases(args)),
        Bench::Restore(args) => ("bench restore", restore::cases(args)),
        Bench::Alloc(args) => ("bench alloc", alloc::cases(args)),
        Bench::Churn(args) => ("bench churn", churn::cases(args)),
        Bench::Cluster(_) => ("bench cluster", cluster::CASES),
        Bench::Cuda(args) => ("bench cuda", cuda::cases(args)),
        Bench::Files(args) => ("bench files", files::cases(args)),
        Bench::Index(_) => ("bench index", index::CASES),
        Bench::Pressure(args) => ("bench pressure", pressure::cases(args)),
        Bench::Reopen(_) => ("bench reopen", reopen::CASES),
        Bench::Scale(args) => ("bench scale", scale::cases(args)),
        Bench::Session(args) => ("bench session", session::cases(args)),
        Bench::Transfer(args) => ("bench transfer", transfer::cases(args)),
    };
    let mut report = Report {
        output,
        interrupt: Interrupt::catch()?,
        progress: Progress::steps(name, cases as u64),
        rows: Vec::new(),
    };
    let result = match args {
        Bench::Memory(args) => memory::run(args, &mut report),
        Bench::Restore(args) => restore::run(args, program, &mut report),
        Bench::Alloc(args) => alloc::run(args, &mut report),
        Bench::Churn(args) => churn::run(args, &mut report),
        Bench::Cluster(args) => cluster::run(args, &mut report),
        Bench::Cuda(args) => cuda::run(args, &mut report),
        Bench::Files(args) => files::run(args, &mut report),
        Bench::Index(args) => index::run(args, &mut report),
        Bench::Pressure(args) => pressure::run(args, &mut report),
        Bench::Reopen(args) => reopen::run(args, program, &mut report),
        Bench::Scale(args) => scale::run(args, program, &mut report),
        Bench::Session(args) => session::run(args, &mut report),
        Bench::Transfer(args) => transfer::run(args, program, &mut report),
    };
    report.finish()?;
    result.map(|()| crate::status::OK)
}
