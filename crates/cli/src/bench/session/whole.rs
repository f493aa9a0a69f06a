//! States that are saved and brought back whole, beside plain files of as many bytes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvdepot_host::limits;
use kvdepot_media::{Buffer, Plain};
use kvdepot_plan::Span;
use serde_json::{Value, json};

use super::kept::{CUT, Kept};
use super::one_file::OneFile;
use super::plan::{Io, Plan};
use super::raw::{Raw, remove, staged};
use crate::bench::media::Region;
use crate::bench::plain::Crew;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;
use crate::leftovers::Scratch;

pub(super) const SAVES: [&str; 3] = [
    "save_over_raw",
    "save_over_staged",
    "disk_peak_over_payload",
];

/// What states are in, and come back into.
pub(super) struct Memory {
    pub(super) state: Region,
    pub(super) into: Region,
}

impl Memory {
    pub(super) fn new(bytes: usize) -> Result<Memory, Error> {
        Ok(Memory {
            state: Region::filled(bytes)?,
            into: Region::new(bytes)?,
        })
    }

    /// All of a state came back.
    fn check(&self, bytes: usize) -> Result<(), Error> {
        const STEP: usize = 1 << 20;
        for at in (0..bytes).step_by(STEP) {
            let of = |region: &Region| region.whole().slice(at, STEP.min(bytes - at));
            if of(&self.state)?.to_vec() != of(&self.into)?.to_vec() {
                return Err(Error::Bench(
                    "a restored state differs from the saved state".into(),
                ));
            }
        }
        Ok(())
    }
}

/// A figure without a limit.
pub(super) fn row(plan: &Plan, case: Value, metric: &'static str, value: f64) -> Row {
    Row {
        bench: "session",
        case,
        metric,
        unit: "times",
        value,
        limit: None,
        ratio: None,
        rounds: plan.rounds,
        limit_name: None,
    }
}

/// What so many bytes took, beside the best limit.
fn rate(
    row: Row,
    bytes: usize,
    seconds: &Rounds,
    name: impl Fn(usize) -> &'static str,
) -> Option<Row> {
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    let ((best, limit), ratio) = (seconds.best()?, seconds.ratio()?);
    let row = Row {
        unit: "GB/s",
        ..row
    };
    Some(row.with(rate(seconds.value()), rate(limit), ratio, Some(name(best))))
}

/// Saves of new states.
pub(super) fn save(
    plan: &Plan,
    (bytes, io): (usize, Io),
    memory: &Memory,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let scratch = Scratch::new(&plan.dir)?;
    let folder = scratch.path();
    let mut kept = Kept::open(&folder.join("depot"), io, CUT, bytes)?;
    let mut ways = Raw::ways(io, memory.state.whole())?;
    let mut again = Raw::ways(io, memory.into.whole())?;
    let base = folder.join("base");
    ways[0].write(&base, bytes)?;
    let limits = ways.len();
    let mut file = 0;
    let [stage, reads, one_file, pieces] = [0, 1, 2, 3].map(|way| limits + way);
    let one = OneFile::new(folder, io)?;
    let seconds = Rounds::run_ways(plan.rounds, limits, 4, &report.interrupt, |contender| {
        file += 1;
        let path = folder.join(format!("raw-{file}"));
        if contender < limits {
            let taken = ways[contender].write(&path, bytes)?;
            remove(&path)?;
            return Ok(taken);
        }
        if contender == stage {
            return staged((&mut ways[0], &mut again[0]), folder, bytes);
        }
        if contender == reads {
            return again[0].read(&base, bytes);
        }
        let tokens = kept.conversation(bytes / CUT.row);
        if contender == one_file {
            let taken = one.save(&tokens, CUT, &memory.state, Vec::new())?;
            remove(one.path())?;
            return Ok(taken);
        }
        let (taken, saved) = kept.save(&tokens, &memory.state, Vec::new())?;
        kept.remove(saved.id)?;
        Ok(taken)
    })?;
    for (layout, ours) in [("pieces", pieces), ("one_file", one_file)] {
        let case = json!({"bytes": bytes, "path": "direct", "io": io.name(), "layout": layout});
        if plan.wants("save_over_raw") {
            let row = row(plan, case.clone(), "save_over_raw", 0.0);
            if let Some(row) = rate(row, bytes, &seconds.of(ours), |way| ways[way].name) {
                report.row(row)?;
            }
        }
        if plan.wants("save_over_staged") {
            let (value, reading) = (seconds.quotient(stage, ours), seconds.quotient(reads, 0));
            // Both writes and the read, over one write.
            let limit = 2.0 + reading;
            let row = row(plan, case, "save_over_staged", value);
            report.row(row.with(value, limit, value / limit, Some("2 + w/r")))?;
        }
    }
    if plan.wants("disk_peak_over_payload") {
        let tokens = kept.conversation(bytes / CUT.row);
        let ours = peak(folder, || {
            kept.save(&tokens, &memory.state, Vec::new()).map(drop)
        })?;
        let single = peak(folder, || {
            let saved = one.save(&tokens, CUT, &memory.state, Vec::new());
            saved.map(drop)
        })?;
        let theirs = peak(folder, || {
            staged((&mut ways[0], &mut again[0]), folder, bytes).map(drop)
        })?;
        for (path, layout, peak) in [
            ("direct", "pieces", ours),
            ("direct", "one_file", single),
            ("staged", "one_file", theirs),
        ] {
            let value = peak as f64 / bytes as f64;
            let case = json!({"bytes": bytes, "path": path, "io": io.name(), "layout": layout});
            report.row(row(plan, case, "disk_peak_over_payload", value))?;
        }
    }
    Ok(())
}

/// Most bytes of the disk that something takes while it runs.
fn peak(folder: &Path, run: impl FnOnce() -> Result<(), Error>) -> Result<u64, Error> {
    let before = limits::disk_free(folder)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let look = scope.spawn(|| {
            let mut least = before;
            while !over.load(Ordering::Relaxed) {
                least = least.min(limits::disk_free(folder).unwrap_or(least));
                std::thread::sleep(Duration::from_millis(1));
            }
            least.min(limits::disk_free(folder).unwrap_or(least))
        });
        let ran = run();
        over.store(true, Ordering::Relaxed);
        let least = look
            .join()
            .map_err(|_| Error::Bench("the polling thread panicked".into()))?;
        ran.map(|()| before.saturating_sub(least))
    })
}

/// A state that comes back from the disk.
pub(super) fn restore(
    plan: &Plan,
    (bytes, io): (usize, Io),
    memory: &Memory,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let scratch = Scratch::new(&plan.dir)?;
    let mut kept = Kept::open(&scratch.path().join("depot"), io, CUT, bytes)?;
    let tokens = kept.conversation(bytes / CUT.row);
    kept.save(&tokens, &memory.state, Vec::new())?;
    let one = OneFile::new(scratch.path(), io)?;
    one.save(&tokens, CUT, &memory.state, Vec::new())?;
    // Both past the page cache and through an empty one: the faster is the limit.
    let mut ways = Raw::ways(Io::Fsync, memory.into.whole())?;
    let base = scratch.path().join("base");
    Raw::ways(Io::Direct, memory.state.whole())?[0].write(&base, bytes)?;
    let limits = ways.len();
    let seconds = Rounds::run_ways(plan.rounds, limits, 2, &report.interrupt, |contender| {
        kept.cool()?;
        for path in [&*base, one.path()] {
            let file = std::fs::File::open(path).map_err(Error::io(path))?;
            kvdepot_media::file::plain::cool(&file, 0)?;
        }
        match ways.get_mut(contender) {
            Some(way) => way.read(&base, bytes),
            None if contender == limits => one.restore(&memory.into),
            None => kept.restore(&tokens, &memory.into),
        }
    })?;
    memory.check(bytes)?;
    for (layout, ours) in [("pieces", limits + 1), ("one_file", limits)] {
        let case = json!({"bytes": bytes, "path": "direct", "io": io.name(), "layout": layout});
        let row = row(plan, case, "restore_over_raw", 0.0);
        if let Some(row) = rate(row, bytes, &seconds.of(ours), |way| ways[way].name) {
            report.row(row)?;
        }
    }
    Ok(())
}

/// A state that comes back from memory: the page cache's, or a tier's.
pub(super) fn warm(
    plan: &Plan,
    bytes: usize,
    memory: &Memory,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    const COPIES: [(&str, Plain, usize); 4] = [
        ("memcpy, 1 thread", Plain::Memcpy, 1),
        ("memcpy, 2 threads", Plain::Memcpy, 2),
        ("streaming, 1 thread", Plain::Streaming, 1),
        ("streaming, 2 threads", Plain::Streaming, 2),
    ];
    let pieces: Vec<Span> = (0..bytes as u64 >> 20)
        .map(|at| Span::new(at << 20, at << 20, 1 << 20))
        .collect();
    let crews = [Crew::new(1)?, Crew::new(2)?];
    for tier in ["Posix", "Cache", "one_file"] {
        let scratch = Scratch::new(&plan.dir)?;
        let folder = scratch.path().join("depot");
        let pipeline = if tier == "Cache" {
            "Cache|Posix"
        } else {
            "Posix"
        };
        let mut kept = Kept::of(pipeline, &folder, Io::Buffered, CUT, bytes)?;
        let tokens = kept.conversation(bytes / CUT.row);
        let one = OneFile::new(scratch.path(), Io::Buffered)?;
        match tier {
            "one_file" => drop(one.save(&tokens, CUT, &memory.state, Vec::new())?),
            _ => drop(kept.save(&tokens, &memory.state, Vec::new())?),
        }
        kept.settle()?;
        let copy = |(_, way, threads): (&str, Plain, usize)| -> Result<f64, Error> {
            let (from, to): (&Buffer, &Buffer) = (memory.state.whole(), memory.into.whole());
            crews[threads - 1].copy(way, from, to, &pieces)
        };
        let limits = COPIES.len();
        let seconds = Rounds::run(
            plan.rounds,
            limits,
            &report.interrupt,
            |contender| match COPIES.get(contender) {
                Some(way) => copy(*way),
                None if tier == "one_file" => one.restore(&memory.into),
                None => kept.restore(&tokens, &memory.into),
            },
        )?;
        memory.check(bytes)?;
        let case = json!({"bytes": bytes, "path": "direct", "tier": tier});
        let row = row(plan, case, "restore_warm_over_memcpy", 0.0);
        if let Some(row) = rate(row, bytes, &seconds, |way| COPIES[way].0) {
            report.row(row)?;
        }
    }
    Ok(())
}
