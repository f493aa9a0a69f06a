//! Packs units and spans into slices, and hands slices out at the watermark.

use crate::Error;
use crate::lane::Loads;
use crate::slice::{Limits, Piece, Ready, Slice, Unit};
use crate::span::Span;

/// A planner that packs the pieces of one batch at a time into slices.
///
/// Pieces are packed in the order of the calls. The open slice closes when the next piece does not
/// fit, so a short tail can still join it. A *unit* is never divided. A *span* that is too long for
/// one slice starts a new slice. It is cut at multiples of `slice_size` from its start, so cuts
/// have the alignment of the span.
///
/// A slice has at most `slice_size + tail_merge` bytes, unless it is a single larger unit. The
/// bytes of any two lanes differ by at most the largest slice.
///
/// [`reset`](Planner::reset) keeps all memory. A planner that has seen its largest batch no longer
/// allocates.
///
/// # Examples
///
/// ```
/// use kvdepot_plan::{Limits, Planner, Span};
///
/// let limits = Limits { slice_size: 4096, tail_merge: 0, lanes: 2, watermark: 1 };
/// let mut planner = Planner::new(limits)?;
/// let mut slices = 0;
/// for (slice, pieces) in planner.push_span(7, Span::new(0, 0, 10_000))? {
///     assert!(slice.lane < 2 && pieces[0].tag() == 7);
///     slices += 1;
/// }
/// slices += planner.finish().len();
/// assert_eq!(slices, 3);
/// # Ok::<(), kvdepot_plan::Error>(())
/// ```
#[derive(Debug)]
pub struct Planner {
    limits: Limits,
    loads: Loads,
    pieces: Vec<Piece>,
    slices: Vec<Slice>,
    /// First piece and bytes of the slice being packed.
    open_first: usize,
    open_bytes: u64,
    /// Slices handed out so far.
    submitted: usize,
    submissions: usize,
}

impl Planner {
    /// Creates a planner with an empty batch.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a limit is outside its allowed values.
    pub fn new(limits: Limits) -> Result<Planner, Error> {
        limits.check()?;
        Ok(Planner {
            limits,
            loads: Loads::new(limits.lanes),
            pieces: Vec::new(),
            slices: Vec::new(),
            open_first: 0,
            open_bytes: 0,
            submitted: 0,
            submissions: 0,
        })
    }

    /// Adds a unit to the batch and returns the slices that are ready.
    ///
    /// # Errors
    ///
    /// [`Error::Empty`] for a unit without bytes. [`Error::TooMany`] if the batch is full. After an
    /// error the batch is unchanged.
    pub fn push_unit(&mut self, unit: Unit) -> Result<Ready<'_>, Error> {
        if unit.bytes == 0 {
            return Err(Error::Empty {
                what: "unit",
                tag: unit.tag,
            });
        }
        self.check_room(1)?;
        if !self.fits(unit.bytes) {
            self.close();
        }
        self.add(Piece::Unit(unit));
        Ok(self.drain_at(self.limits.watermark))
    }

    /// Adds a span that may be divided to the batch, and returns the slices that are ready.
    ///
    /// `tag` is the caller's number for the movement.
    ///
    /// # Errors
    ///
    /// [`Error::Empty`] for a span without bytes. [`Error::RangeOverflow`] if the span ends outside
    /// the address space. [`Error::TooMany`] if the batch is full. After an error the batch is
    /// unchanged.
    pub fn push_span(&mut self, tag: u32, span: Span) -> Result<Ready<'_>, Error> {
        if span.len == 0 {
            return Err(Error::Empty { what: "span", tag });
        }
        span.check()?;
        self.check_room(span.len.div_ceil(self.limits.slice_size))?;
        if !self.fits(span.len) {
            self.close();
        }
        let mut rest = span;
        while rest.len > self.limits.slice_max() {
            let len = self.limits.slice_size;
            self.add(Piece::Span {
                tag,
                span: Span { len, ..rest },
            });
            self.close();
            rest = Span::new(rest.src + len, rest.dst + len, rest.len - len);
        }
        self.add(Piece::Span { tag, span: rest });
        Ok(self.drain_at(self.limits.watermark))
    }

    /// Closes the last slice and returns all slices that are left.
    ///
    /// Pieces that are added afterwards start a new slice of the same batch.
    pub fn finish(&mut self) -> Ready<'_> {
        self.close();
        self.drain_at(1)
    }

    /// Clears the batch and keeps the memory.
    ///
    /// Between lanes with equal bytes, the next batch prefers the lane after the one at which this
    /// batch started. So small batches do not all use lane 0.
    pub fn reset(&mut self) {
        self.reset_at(self.loads.first() + 1);
    }

    /// Clears the batch, keeps the memory and sets the preferred lane of the next batch.
    ///
    /// Between lanes with equal bytes, the next batch prefers lane `first`, modulo the number of
    /// lanes. This is for callers that distribute batches over lanes with several planners.
    pub fn reset_at(&mut self, first: usize) {
        self.loads.reset(self.limits.lanes, first);
        self.pieces.clear();
        self.slices.clear();
        self.open_first = 0;
        self.open_bytes = 0;
        self.submitted = 0;
        self.submissions = 0;
    }

    /// Clears the batch and sets other limits for the next one.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a limit is outside its allowed values; the batch is then unchanged.
    pub fn reset_with(&mut self, limits: Limits) -> Result<(), Error> {
        limits.check()?;
        self.limits = limits;
        self.reset();
        Ok(())
    }

    /// Returns the current limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the bytes that closed slices assign to each lane.
    pub fn lane_bytes(&self) -> &[u64] {
        self.loads.bytes()
    }

    /// Returns the number of closed slices of this batch, handed out or not.
    pub fn slice_count(&self) -> usize {
        self.slices.len()
    }

    /// Returns the number of times that slices of this batch were handed out.
    pub fn submission_count(&self) -> usize {
        self.submissions
    }

    /// Whether `bytes` can join the slice being packed, as a piece or as a tail.
    fn fits(&self, bytes: u64) -> bool {
        let Some(sum) = self.open_bytes.checked_add(bytes) else {
            return false;
        };
        let as_tail = bytes <= self.limits.tail_merge && sum <= self.limits.slice_max();
        self.open_bytes == 0 || sum <= self.limits.slice_size || as_tail
    }

    fn add(&mut self, piece: Piece) {
        self.open_bytes += piece.bytes();
        self.pieces.push(piece);
    }

    fn close(&mut self) {
        if self.open_bytes == 0 {
            return;
        }
        let bytes = self.open_bytes;
        let lane = self.loads.assign(bytes);
        let first = self.open_first as u32;
        let count = (self.pieces.len() - self.open_first) as u32;
        self.slices.push(Slice {
            lane,
            bytes,
            first,
            count,
        });
        self.open_first = self.pieces.len();
        self.open_bytes = 0;
    }

    /// Slices index pieces with 32 bits.
    fn check_room(&self, more: u64) -> Result<(), Error> {
        let count = (self.pieces.len() as u64).saturating_add(more);
        if count > u64::from(u32::MAX) {
            return Err(Error::TooMany {
                what: "pieces",
                count,
            });
        }
        Ok(())
    }

    fn drain_at(&mut self, watermark: usize) -> Ready<'_> {
        let from = self.submitted;
        if self.slices.len() - from >= watermark {
            self.submitted = self.slices.len();
            self.submissions += 1;
        }
        Ready {
            slices: &self.slices[from..self.submitted],
            pieces: &self.pieces,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        slice_size: 8,
        tail_merge: 2,
        lanes: 2,
        watermark: 1,
    };

    fn span_lens(lens: &[u64]) -> Vec<Vec<u64>> {
        let mut planner = Planner::new(LIMITS).unwrap();
        let mut slices = Vec::new();
        for (at, &len) in lens.iter().enumerate() {
            let span = Span::new(at as u64 * 1000, 0, len);
            collect(planner.push_span(0, span).unwrap(), &mut slices);
        }
        collect(planner.finish(), &mut slices);
        slices
    }

    fn unit_lens(lens: &[u64]) -> Vec<Vec<u64>> {
        let mut planner = Planner::new(LIMITS).unwrap();
        let mut slices = Vec::new();
        for &bytes in lens {
            collect(planner.push_unit(unit(bytes)).unwrap(), &mut slices);
        }
        collect(planner.finish(), &mut slices);
        slices
    }

    fn unit(bytes: u64) -> Unit {
        Unit {
            tag: 0,
            index: 0,
            first_span: 0,
            span_count: 1,
            bytes,
        }
    }

    fn collect(ready: Ready<'_>, into: &mut Vec<Vec<u64>>) {
        for (slice, pieces) in ready {
            assert_eq!(slice.bytes, pieces.iter().map(Piece::bytes).sum::<u64>());
            into.push(pieces.iter().map(Piece::bytes).collect());
        }
    }

    #[test]
    fn a_short_tail_joins_the_slice_before() {
        assert_eq!(span_lens(&[18]), [[8], [10]]);
        assert_eq!(span_lens(&[19]), [[8], [8], [3]]);
        assert_eq!(unit_lens(&[4, 4, 2, 1]), [vec![4, 4, 2], vec![1]]);
        assert_eq!(unit_lens(&[4, 4, 3]), [vec![4, 4], vec![3]]);
    }

    #[test]
    fn small_spans_share_a_slice_and_long_ones_are_cut_from_their_start() {
        assert_eq!(
            span_lens(&[3, 3, 2, 1, 30]),
            [vec![3, 3, 2, 1], vec![8], vec![8], vec![8], vec![6]]
        );
        assert_eq!(
            span_lens(&[1, 30, 2]),
            [vec![1], vec![8], vec![8], vec![8], vec![6, 2]]
        );
    }

    #[test]
    fn a_unit_is_never_divided() {
        assert_eq!(
            unit_lens(&[5, 5, 100, 1]),
            [vec![5], vec![5], vec![100], vec![1]]
        );
    }

    #[test]
    fn slices_wait_for_the_watermark() {
        let mut planner = Planner::new(Limits {
            watermark: 3,
            ..LIMITS
        })
        .unwrap();
        let handed: Vec<_> = (0..8)
            .map(|_| planner.push_unit(unit(8)).unwrap().len())
            .collect();
        assert_eq!(handed, [0, 0, 0, 3, 0, 0, 3, 0]);
        assert_eq!(planner.finish().len(), 2);
        assert!(planner.finish().is_empty());
        assert_eq!((planner.slice_count(), planner.submission_count()), (8, 3));
    }

    #[test]
    fn small_batches_go_round_the_lanes() {
        let mut planner = Planner::new(LIMITS).unwrap();
        let lanes: Vec<_> = (0..4)
            .map(|_| {
                assert!(planner.push_unit(unit(1)).unwrap().is_empty());
                let lane = planner.finish().slices()[0].lane;
                planner.reset();
                lane
            })
            .collect();
        assert_eq!(lanes, [0, 1, 0, 1]);
    }

    #[test]
    fn wrong_limits_name_the_field() {
        let refused = |limits| match Planner::new(limits) {
            Err(Error::Config { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            refused(Limits {
                slice_size: 0,
                tail_merge: 0,
                ..LIMITS
            }),
            "slice_size"
        );
        assert_eq!(
            refused(Limits {
                tail_merge: 9,
                ..LIMITS
            }),
            "tail_merge"
        );
        assert_eq!(refused(Limits { lanes: 0, ..LIMITS }), "lanes");
        assert_eq!(
            refused(Limits {
                lanes: 65_537,
                ..LIMITS
            }),
            "lanes"
        );
        assert_eq!(
            refused(Limits {
                watermark: 0,
                ..LIMITS
            }),
            "watermark"
        );
    }

    #[test]
    fn what_cannot_be_planned_leaves_the_batch_as_it_was() {
        let mut planner = Planner::new(LIMITS).unwrap();
        assert!(planner.push_span(1, Span::new(0, 0, 5)).unwrap().is_empty());
        assert!(planner.push_unit(unit(0)).is_err());
        assert!(planner.push_span(1, Span::new(0, 0, 0)).is_err());
        assert!(planner.push_span(1, Span::new(u64::MAX, 0, 1)).is_err());
        let long = Span::new(0, 0, 1 << 50);
        assert!(matches!(
            planner.push_span(1, long),
            Err(Error::TooMany { .. })
        ));
        assert!(planner.reset_with(Limits { lanes: 0, ..LIMITS }).is_err());
        assert_eq!(planner.finish().slices()[0].bytes, 5);
    }
}
