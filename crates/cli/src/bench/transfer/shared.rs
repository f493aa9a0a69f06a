//! `over_memcpy`: batches over shared memory, against the best plain copy of as many bytes.

use kvdepot_media::{Buffer, Plain};
use kvdepot_plan::Span;

use super::near::{Layout, Near, Streams};
use super::plan::{Batch, Plan};
use crate::bench::media::Region;
use crate::bench::plain::Crew;
use crate::bench::report::{Report, Row};
use crate::bench::rounds::Rounds;
use crate::error::Error;

pub(super) const METRIC: &str = "over_memcpy";

/// Bytes of a piece of those copies that need their pieces aligned.
const ALIGNED: u64 = 1 << 20;

/// The plain copies, with the place of their crew.
const LIMITS: [(&str, Plain, usize); 6] = [
    ("memcpy, 1 thread", Plain::Memcpy, 0),
    ("memcpy, 2 threads", Plain::Memcpy, 1),
    ("streaming in large pieces, 1 thread", Plain::Streaming, 0),
    ("streaming in large pieces, 2 threads", Plain::Streaming, 1),
    (
        "streaming-halves in large pieces, 1 thread",
        Plain::StreamingHalves,
        0,
    ),
    (
        "streaming-halves in large pieces, 2 threads",
        Plain::StreamingHalves,
        1,
    ),
];

/// Memory that is copied to by one thread or by two.
pub(super) struct Copies {
    from: Buffer,
    to: Region,
    crews: [Crew; 2],
}

impl Copies {
    pub(super) fn new(from: &Buffer) -> Result<Copies, Error> {
        Ok(Copies {
            from: from.clone(),
            to: Region::new(from.len())?,
            crews: [Crew::new(1)?, Crew::new(2)?],
        })
    }

    /// Copies the same pieces, or as many bytes in large ones; seconds.
    fn run(&self, limit: usize, layout: &Layout) -> Result<f64, Error> {
        let (_, way, crew) = LIMITS[limit];
        let pieces: Vec<Span> = match way {
            Plain::Memcpy => {
                let piece =
                    |&(here, there): &(u64, u64)| Span::new(here, there, layout.batch.chunk);
                layout.pieces.iter().map(piece).collect()
            }
            _ => {
                // The last is shorter.
                let bytes = layout.batch.bytes();
                let piece = |number| {
                    let at = number * ALIGNED;
                    Span::new(at, at, ALIGNED.min(bytes - at))
                };
                (0..bytes.div_ceil(ALIGNED)).map(piece).collect()
            }
        };
        self.crews[crew].copy(way, &self.from, self.to.whole(), &pieces)
    }
}

pub(super) fn run(
    plan: &Plan,
    batch: Batch,
    (near, plain, copies): (&Near, &Streams, &Copies),
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let layout = Layout::new(batch);
    for op in plan.ops.iter().copied() {
        let times =
            Rounds::run(
                plan.rounds,
                LIMITS.len(),
                &report.interrupt,
                |contender| match contender {
                    ours if ours == LIMITS.len() => near.batch(op, &layout),
                    limit => copies.run(limit, &layout),
                },
            )?;
        near.check(&layout, plain)?;
        let mut case = plan.case(op, batch.bytes(), batch.chunks);
        case["transport"] = "shared".into();
        let best = times.best();
        report.row(Row {
            bench: "transfer",
            case,
            metric: METRIC,
            unit: "GB/s",
            value: batch.gigabytes() / times.value(),
            limit: best.map(|(_, seconds)| batch.gigabytes() / seconds),
            ratio: times.ratio(),
            rounds: plan.rounds,
            limit_name: best.map(|(best, _)| LIMITS[best].0),
        })?;
    }
    Ok(())
}
