//! `resolve_ms`: until when each request of a batch has an outcome, whose target was killed, or
//! stopped, in its middle; those that are said to be done have been moved.

use std::time::{Duration, Instant};

use kvdepot_media::Buffer;
use kvdepot_transfer::{Op, Options, Status, Task};

use super::first;
use super::near::{Layout, Near, Streams};
use super::plan::{Batch, Plan};
use super::target::{Site, Target};
use crate::bench::media::Region;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::median;
use crate::error::Error;
use crate::interrupt::Interrupt;

pub(super) const METRIC: &str = "resolve_ms";

/// The time of a batch, and how much later its last request may have an outcome.
const TIMEOUT: Duration = Duration::from_millis(500);
const BEYOND: Duration = Duration::from_millis(100);
/// How much later that is no figure any more.
const PATIENCE: Duration = Duration::from_secs(10);

/// A batch of fewer pieces is not caught in its middle.
const LEAST: usize = 1000;
/// How often a batch that was over too soon is moved again.
const TRIES: usize = 10;

/// What becomes of the target.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Killed,
    Stopped,
}

impl End {
    fn word(self) -> &'static str {
        match self {
            End::Killed => "killed",
            End::Stopped => "stopped",
        }
    }
}

/// The largest batch of the plan that has enough pieces.
pub(super) fn batch(plan: &Plan) -> Batch {
    let many = plan.batches.iter().filter(|batch| batch.chunks >= LEAST);
    many.copied()
        .max_by_key(|batch| (batch.bytes(), batch.chunks))
        .unwrap_or(first::BATCH)
}

/// What all rounds have.
struct Ground<'a> {
    plan: &'a Plan,
    site: &'a Site<'a>,
    layout: Layout,
    /// Bytes that are known.
    known: Region,
    /// Memory for what comes.
    into: Region,
}

pub(super) fn run(plan: &Plan, site: &Site<'_>, report: &mut Report<'_>) -> Result<(), Error> {
    let layout = Layout::new(batch(plan));
    let bytes = layout.batch.bytes() as usize;
    let ground = Ground {
        plan,
        site,
        layout,
        known: Region::filled(bytes)?,
        into: Region::new(bytes)?,
    };
    let limit = (TIMEOUT + BEYOND).as_secs_f64() * 1e3;
    for op in plan.ops.iter().copied() {
        for end in [End::Killed, End::Stopped] {
            let mut all = Vec::new();
            for round in 0..=plan.rounds {
                let milliseconds = ground.round(op, end, &report.interrupt)? * 1e3;
                if round > 0 {
                    all.push(milliseconds);
                }
            }
            let batch = ground.layout.batch;
            let mut case = plan.case(op, batch.bytes(), batch.chunks);
            case["what"] = end.word().into();
            case["timeout_ms"] = (TIMEOUT.as_millis() as u64).into();
            let ratios = all.iter().map(|milliseconds| limit / milliseconds);
            report.row(Row {
                bench: "transfer",
                case,
                metric: METRIC,
                unit: "ms",
                ratio: Some(median(ratios.collect())),
                value: median(all),
                limit: Some(limit),
                rounds: plan.rounds,
                limit_name: Some("its timeout and 100 ms"),
            })?;
        }
    }
    Ok(())
}

impl Ground<'_> {
    /// Seconds until all of a batch has an outcome, whose target ends in its middle: each round has
    /// one of its own.
    fn round(&self, op: Op, end: End, interrupt: &Interrupt) -> Result<f64, Error> {
        for _ in 0..TRIES {
            interrupt.check()?;
            if let Some(seconds) = self.attempt(op, end)? {
                return Ok(seconds);
            }
        }
        let pieces = self.layout.batch.chunks;
        Err(Error::Bench(format!(
            "a batch of {pieces} pieces ended before its target was {}: use more pieces, or fewer \
             if they need more than {} ms",
            end.word(),
            TIMEOUT.as_millis()
        )))
    }

    /// The same; none where the batch was over before.
    fn attempt(&self, op: Op, end: End) -> Result<Option<f64>, Error> {
        let (batch, into) = (self.layout.batch, self.into.whole());
        let target = Target::start(self.site, batch.bytes(), self.plan)?;
        let plain = Streams::new(1, into, &target)?;
        let memory = match op {
            Op::Write => self.known.whole(),
            Op::Read => {
                // What was there before would look as if it had been moved.
                wipe(into)?;
                Streams::new(1, self.known.whole(), &target)?.whole(Op::Write, batch.bytes(), 1)?;
                into
            }
        };
        let near = Near::new(self.plan.config(), memory, &target)?;
        let requests = near.requests(op, batch.chunk, &self.layout.pieces);
        let options = Options {
            timeout: TIMEOUT,
            ..Options::default()
        };
        let start = Instant::now();
        let task = near.engine.submit(requests, options)?;
        if !is_half_way(&task) {
            return Ok(None);
        }
        let stopped = match end {
            End::Killed => target.kill().map(|()| None)?,
            End::Stopped => Some(target.stop()?),
        };
        let is_over = task.wait(Some(TIMEOUT + PATIENCE));
        let seconds = start.elapsed().as_secs_f64();
        if !is_over || task.statuses().any(|status| status == Status::Pending) {
            let what = end.word();
            return Err(Error::Bench(format!(
                "requests to a target that was {what} are still pending"
            )));
        }
        if task.is_done() {
            return Ok(None);
        }
        drop(stopped);
        match (op, end) {
            (Op::Read, _) => self.check(&task, |(here, there)| (here, there))?,
            (Op::Write, End::Stopped) => {
                plain.whole(Op::Read, batch.bytes(), 1)?;
                self.check(&task, |(here, there)| (there, here))?;
            }
            // Its memory has gone with it.
            (Op::Write, End::Killed) => {}
        }
        Ok(Some(seconds))
    }

    /// Refuses a request that is said to be done and is not: its bytes have come to the first of
    /// the two offsets, and were known at the other one.
    fn check(&self, task: &Task, ends: impl Fn((u64, u64)) -> (u64, u64)) -> Result<(), Error> {
        let len = self.layout.batch.chunk as usize;
        for (piece, status) in self.layout.pieces.iter().zip(task.statuses()) {
            let (came, known) = ends(*piece);
            if status == Status::Done
                && self.into.whole().slice(came as usize, len)?.to_vec()
                    != self.known.whole().slice(known as usize, len)?.to_vec()
            {
                return Err(Error::Bench(
                    "a request was reported as done, but its bytes did not arrive".into(),
                ));
            }
        }
        Ok(())
    }
}

/// Waits until a part of a batch is done; whether the rest is not.
fn is_half_way(task: &Task) -> bool {
    loop {
        let over = task.is_over();
        let moved = task.statuses().filter(|status| *status == Status::Done);
        if moved.count() * 4 >= task.len() || over {
            return !over;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn wipe(memory: &Buffer) -> Result<(), Error> {
    let zeros = vec![0; 1 << 20];
    for at in (0..memory.len()).step_by(zeros.len()) {
        memory.write_at(at, &zeros[..zeros.len().min(memory.len() - at)])?;
    }
    Ok(())
}
