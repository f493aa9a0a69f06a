//! What a decoder loses to a save in the background: `decode_stall_share`, `decode_stall_p999_ms`.
//!
//! The decoder is a stand-in on one thread: a step reads through more memory than caches hold, as
//! one of a model's weights does, and takes 20 ms of that alone. Between two steps a slice of the
//! state is copied, and another thread writes what was copied, at a bounded pace.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use kvdepot_session::background::{Fit, Limits, Saver, Slice, Snapshot, Ticket};
use kvdepot_session::{Checkpoint, Reason};
use kvdepot_store::BlockBuffers;
use serde_json::json;

use super::kept::{CUT, Kept, fail};
use super::plan::{Io, Plan};
use super::whole::{Memory, row};
use crate::bench::report::{Report, Row};
use crate::bench::rounds::{median, quantile};
use crate::error::Error;
use crate::leftovers::Scratch;

pub(super) const STALLS: [&str; 2] = ["decode_stall_share", "decode_stall_p999_ms"];

/// The largest state: what the targets are of.
const BYTES_MAX: usize = 1 << 30;

/// A token of a model of 50 tokens a second.
const STEP: Duration = Duration::from_millis(20);

/// Copied between two steps: about a millisecond, and a second of it is 200 MiB.
const SLICE: usize = 4 << 20;

/// All that snapshots have in memory.
const ROOM: u64 = 128 << 20;

/// Weights that a step reads: more than any cache of this machine is likely to hold.
const WEIGHTS: usize = 64 << 20;

/// At most, and in any unit.
const SHARE: f64 = 0.05;
const LATER_MS: f64 = 10.0;

/// The stand-in.
struct Decoder {
    weights: Vec<u64>,
    /// Weights of a step, which begins where the last one has ended.
    each: usize,
    at: usize,
}

impl Decoder {
    /// One whose steps take as long as they should while nothing else runs.
    fn calibrated() -> Decoder {
        let mut decoder = Decoder {
            weights: (0..(WEIGHTS / 8) as u64).collect(),
            each: 1 << 20,
            at: 0,
        };
        // The first passes meet cold memory, and a clock that is still rising.
        for _ in 0..5 {
            let each = (0..15).map(|_| decoder.step().as_secs_f64());
            let taken = median(each.collect()).max(1e-9);
            decoder.each = (decoder.each as f64 * STEP.as_secs_f64() / taken).max(1.0) as usize;
        }
        decoder
    }

    fn step(&mut self) -> Duration {
        let begun = Instant::now();
        let mut left = self.each;
        let mut sum = 0_u64;
        while left > 0 {
            let end = self.weights.len().min(self.at + left);
            let some = self.weights.get(self.at..end).unwrap_or_default();
            sum = some.iter().fold(sum, |sum, weight| {
                (sum ^ weight).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            });
            left -= some.len();
            self.at = if end == self.weights.len() { 0 } else { end };
        }
        black_box(sum);
        begun.elapsed()
    }
}

/// A state that is saved while the decoder goes on.
struct Saving<'a> {
    kept: &'a mut Kept,
    saver: &'a Saver,
    memory: &'a Memory,
    bytes: usize,
}

impl Saving<'_> {
    fn begin(&mut self) -> Result<Snapshot, Error> {
        let tokens = self.kept.conversation(self.bytes / CUT.row);
        let checkpoint = Checkpoint {
            tokens: &tokens,
            text: &[],
            reason: Reason::Continued,
            context_tokens: 0,
            objects: Vec::new(),
            note: String::new(),
            created: 0,
            exact: false,
        };
        let state = self.memory.state.whole();
        let rows = |runs: &[Range<usize>]| {
            let slice = |run: &Range<usize>| state.slice(run.start * CUT.row, run.len() * CUT.row);
            let each = runs.iter().map(slice).collect::<Result<Vec<_>, _>>();
            Ok(BlockBuffers::whole(
                each.map_err(kvdepot_store::Error::from)?,
            ))
        };
        let fit = Fit::Piecewise(Duration::ZERO);
        let begun = self.saver.begin(checkpoint, fit, Box::new(rows), None);
        begun.map_err(fail)
    }

    /// Decodes until the state is saved: the milliseconds of each step, with what stands between it
    /// and the next.
    fn run(&mut self, decoder: &mut Decoder) -> Result<Vec<f64>, Error> {
        let mut steps = Vec::new();
        let mut snapshot: Option<Snapshot> = None;
        let mut ticket: Option<Ticket> = None;
        loop {
            let begun = Instant::now();
            decoder.step();
            match &mut snapshot {
                // It is the engine's own thread that begins a save.
                None => {
                    let taken = self.begin()?;
                    ticket = Some(taken.ticket());
                    snapshot = Some(taken);
                }
                Some(snapshot) => {
                    let slice = slice_of(self.bytes) as u64;
                    snapshot.step(Slice::Bytes(slice)).map_err(fail)?;
                }
            }
            steps.push(begun.elapsed().as_secs_f64() * 1e3);
            if let Some(ticket) = ticket.as_ref().filter(|one| one.progress().is_over) {
                let saved = ticket.wait(Some(Duration::ZERO)).map_err(fail)?;
                self.kept.remove(saved.id)?;
                return Ok(steps);
            }
        }
    }
}

/// A state that is smaller is copied in as many steps, as far as that makes sense.
fn slice_of(bytes: usize) -> usize {
    (bytes / 64).clamp(1 << 20, SLICE)
}

fn alone(decoder: &mut Decoder, count: usize) -> Vec<f64> {
    let each = (0..count).map(|_| decoder.step().as_secs_f64() * 1e3);
    each.collect()
}

/// Runs of a decoder with and without a save beside it, in turns.
pub(super) fn run(
    plan: &Plan,
    io: Io,
    memory: &Memory,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let bytes = plan.largest().min(BYTES_MAX);
    let scratch = Scratch::new(&plan.dir)?;
    let mut kept = Kept::open(&scratch.path().join("depot"), io, CUT, bytes)?;
    // A quarter more than is copied, so that writing keeps up.
    let copied = slice_of(bytes) as f64 / STEP.as_secs_f64();
    let pace = (copied * 1.25) as u64;
    let limits = Limits {
        memory: ROOM,
        pace: Some(pace),
    };
    let saver = Saver::new(&kept.sessions, limits).map_err(fail)?;
    let mut decoder = Decoder::calibrated();
    let (mut shares, mut with, mut without) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=plan.rounds {
        report.interrupt.check()?;
        let mut saving = Saving {
            kept: &mut kept,
            saver: &saver,
            memory,
            bytes,
        };
        // As many steps each; who goes first takes turns, but that the count has to be known.
        let before = (round % 2 == 1 && !with.is_empty()).then(|| with.len() / (round - 1).max(1));
        let first = before.map(|count| alone(&mut decoder, count));
        let saved = saving.run(&mut decoder)?;
        let free = first.unwrap_or_else(|| alone(&mut decoder, saved.len()));
        if round == 0 {
            continue;
        }
        let mean = |steps: &[f64]| steps.iter().sum::<f64>() / steps.len() as f64;
        shares.push(1.0 - mean(&free) / mean(&saved));
        with.extend(saved);
        without.extend(free);
    }
    saver.close(None).map_err(fail)?;
    let case = || {
        json!({
            "bytes": bytes, "io": io.name(), "slice": slice_of(bytes), "pace": pace,
        })
    };
    let share = median(shares);
    let of = |metric, unit, value: f64, limit: f64| Row {
        unit,
        ..row(plan, case(), metric, 0.0).with(
            value,
            limit,
            limit / value.max(f64::MIN_POSITIVE),
            Some("the target"),
        )
    };
    let later = quantile(&mut with.clone(), 0.999) - quantile(&mut without, 0.999);
    for row in [
        of(STALLS[0], "share", share, SHARE),
        of(STALLS[1], "ms", later, LATER_MS),
    ] {
        if plan.wants(row.metric) {
            report.row(row)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_as_many_weights_wherever_it_begins() {
        let mut decoder = Decoder {
            weights: vec![1; 10],
            each: 25,
            at: 7,
        };
        decoder.step();
        assert_eq!(decoder.at, 2);
        decoder.each = 8;
        decoder.step();
        assert_eq!(decoder.at, 0);
    }
}
