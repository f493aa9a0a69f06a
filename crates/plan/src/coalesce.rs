//! From gather and scatter lists to spans, neighbours joined.

use crate::Error;
use crate::slice::Unit;
use crate::span::{Range, Span, total};

/// Appends to `out` the spans that move the bytes of `src`, in order, to those of `dst`.
///
/// Returns the number of bytes that these spans move. Ranges that are adjacent on both sides become
/// one span; empty ranges are skipped. The call never changes or extends spans that were in `out`
/// before, so one table serves many movements.
///
/// # Errors
///
/// [`Error::LengthMismatch`], [`Error::RangeOverflow`] and [`Error::TotalOverflow`]; `out` is then
/// unchanged.
///
/// # Examples
///
/// ```
/// use kvdepot_plan::{Range, Span, zip};
///
/// let mut spans = Vec::new();
/// let bytes = zip(&[Range::new(0, 8)], &[Range::new(64, 4), Range::new(96, 4)], &mut spans)?;
/// assert_eq!(bytes, 8);
/// assert_eq!(spans, [Span::new(0, 64, 4), Span::new(4, 96, 4)]);
/// # Ok::<(), kvdepot_plan::Error>(())
/// ```
pub fn zip(src: &[Range], dst: &[Range], out: &mut Vec<Span>) -> Result<u64, Error> {
    let bytes = equal_totals(src, dst)?;
    Weave::new(src, dst).run(bytes, out);
    Ok(bytes)
}

/// Appends spans to `out` as [`zip`] does, and divides the movement into units of `unit_size`
/// bytes.
///
/// Each *unit* has spans of its own: the entries `first_span..first_span + span_count` of `out`.
/// The call appends the units of movement `tag` to `units`, in order. Each unit has `unit_size`
/// bytes; the last one may be shorter. Returns the number of bytes that the spans move.
///
/// # Errors
///
/// The errors of [`zip`]. [`Error::Config`] for a `unit_size` of zero. [`Error::TooMany`] if `out`
/// would exceed 32-bit indices. After an error both tables are unchanged.
pub fn zip_units(
    tag: u32,
    src: &[Range],
    dst: &[Range],
    unit_size: u64,
    out: &mut Vec<Span>,
    units: &mut Vec<Unit>,
) -> Result<u64, Error> {
    if unit_size == 0 {
        return Err(Error::Config {
            field: "unit_size",
            value: 0,
            allowed: "1 byte or more",
        });
    }
    let bytes = equal_totals(src, dst)?;
    // Each step of the weave ends a source range, a destination range or a unit.
    let count = [src.len() as u64, dst.len() as u64, out.len() as u64]
        .iter()
        .fold(bytes.div_ceil(unit_size), |sum, n| sum.saturating_add(*n));
    if count > u64::from(u32::MAX) {
        return Err(Error::TooMany {
            what: "spans",
            count,
        });
    }
    let mut weave = Weave::new(src, dst);
    let mut left = bytes;
    let mut index = 0;
    while left > 0 {
        let bytes = left.min(unit_size);
        let first_span = out.len() as u32;
        weave.run(bytes, out);
        let span_count = out.len() as u32 - first_span;
        units.push(Unit {
            tag,
            index,
            first_span,
            span_count,
            bytes,
        });
        index += 1;
        left -= bytes;
    }
    Ok(bytes)
}

/// The side of a span by which [`coalesce`] sorts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a span has two sides")]
pub enum Side {
    /// Sort by source address: reads from a medium become sequential.
    Src,
    /// Sort by destination address: writes to a medium become sequential.
    Dst,
}

/// Sorts `spans` by one side and joins spans that are adjacent on both sides, in place.
///
/// The call removes empty spans and allocates no memory. The order of the moves changes, so
/// destinations must not overlap each other; sources may.
///
/// # Errors
///
/// [`Error::RangeOverflow`] if a span ends outside the address space; `spans` is then unchanged.
pub fn coalesce(spans: &mut Vec<Span>, by: Side) -> Result<(), Error> {
    spans.iter().try_for_each(Span::check)?;
    spans.retain(|span| span.len > 0);
    match by {
        Side::Src => spans.sort_unstable_by_key(|span| (span.src, span.dst)),
        Side::Dst => spans.sort_unstable_by_key(|span| (span.dst, span.src)),
    }
    spans.dedup_by(|next, kept| {
        let joins = kept.continues_in(next);
        if joins {
            kept.len += next.len;
        }
        joins
    });
    Ok(())
}

fn equal_totals(src: &[Range], dst: &[Range]) -> Result<u64, Error> {
    let (src, dst) = (total(src)?, total(dst)?);
    if src != dst {
        return Err(Error::LengthMismatch { src, dst });
    }
    Ok(src)
}

/// Walks both lists at once. Its callers have checked that neither list ends early.
struct Weave<'a> {
    src: Cursor<'a>,
    dst: Cursor<'a>,
}

impl<'a> Weave<'a> {
    fn new(src: &'a [Range], dst: &'a [Range]) -> Weave<'a> {
        Weave {
            src: Cursor::new(src),
            dst: Cursor::new(dst),
        }
    }

    /// Appends the next `bytes` bytes, as spans of their own.
    fn run(&mut self, bytes: u64, out: &mut Vec<Span>) {
        let own = out.len();
        let mut left = bytes;
        while left > 0 {
            let (src, dst) = (self.src.head(), self.dst.head());
            let len = src.len.min(dst.len).min(left);
            debug_assert!(len > 0, "both lists hold as many bytes as are asked for");
            let span = Span::new(src.addr, dst.addr, len);
            match out[own..].last_mut() {
                Some(last) if last.continues_in(&span) => last.len += len,
                _ => out.push(span),
            }
            self.src.advance(len);
            self.dst.advance(len);
            left -= len;
        }
    }
}

/// A position in a list of ranges.
struct Cursor<'a> {
    rest: &'a [Range],
    used: u64,
}

impl<'a> Cursor<'a> {
    fn new(rest: &'a [Range]) -> Cursor<'a> {
        Cursor { rest, used: 0 }
    }

    /// What is left of the current range; empty at the list's end.
    fn head(&mut self) -> Range {
        while let [first, rest @ ..] = self.rest {
            if self.used < first.len {
                return Range::new(first.addr + self.used, first.len - self.used);
            }
            self.rest = rest;
            self.used = 0;
        }
        Range::new(0, 0)
    }

    fn advance(&mut self, len: u64) {
        self.used += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_ranges_become_one_span() {
        let mut out = Vec::new();
        let src = [Range::new(100, 4), Range::new(104, 4), Range::new(200, 8)];
        let dst = [Range::new(0, 2), Range::new(2, 0), Range::new(2, 14)];
        assert_eq!(zip(&src, &dst, &mut out), Ok(16));
        assert_eq!(out, [Span::new(100, 0, 8), Span::new(200, 8, 8)]);
    }

    #[test]
    fn spans_of_an_earlier_movement_are_not_extended() {
        let mut out = vec![Span::new(0, 0, 8)];
        assert_eq!(
            zip(&[Range::new(8, 8)], &[Range::new(8, 8)], &mut out),
            Ok(8)
        );
        assert_eq!(out, [Span::new(0, 0, 8), Span::new(8, 8, 8)]);
    }

    #[test]
    fn unequal_lengths_are_refused_and_leave_the_table_alone() {
        let mut out = vec![Span::new(0, 0, 1)];
        let refused = zip(&[Range::new(0, 9)], &[Range::new(0, 8)], &mut out);
        assert_eq!(refused, Err(Error::LengthMismatch { src: 9, dst: 8 }));
        assert_eq!(out.len(), 1);
    }

    #[test]
    fn ends_beyond_the_address_space_are_refused() {
        let end = Range::new(u64::MAX, 1);
        let refused = zip(&[end], &[Range::new(0, 1)], &mut Vec::new());
        assert_eq!(
            refused,
            Err(Error::RangeOverflow {
                addr: u64::MAX,
                len: 1
            })
        );
        let half = Range::new(0, 1 << 63);
        assert_eq!(
            zip(&[half, half], &[], &mut Vec::new()),
            Err(Error::TotalOverflow)
        );
        let mut spans = vec![Span::new(1, u64::MAX, 1), Span::new(0, 0, 0)];
        assert!(coalesce(&mut spans, Side::Dst).is_err());
        assert_eq!(spans.len(), 2);
    }

    #[test]
    fn units_have_spans_of_their_own() {
        let (mut out, mut units) = (Vec::new(), Vec::new());
        let src = [Range::new(0, 10)];
        let dst = [Range::new(50, 5), Range::new(90, 5)];
        assert_eq!(zip_units(7, &src, &dst, 4, &mut out, &mut units), Ok(10));
        let seen: Vec<_> = units
            .iter()
            .map(|u| (u.tag, u.index, u.first_span, u.span_count, u.bytes))
            .collect();
        assert_eq!(seen, [(7, 0, 0, 1, 4), (7, 1, 1, 2, 4), (7, 2, 3, 1, 2)]);
        assert_eq!(
            out,
            [
                Span::new(0, 50, 4),
                Span::new(4, 54, 1),
                Span::new(5, 90, 3),
                Span::new(8, 93, 2)
            ]
        );
    }

    #[test]
    fn too_many_units_and_units_of_nothing_are_refused() {
        let (mut out, mut units) = (Vec::new(), Vec::new());
        let side = [Range::new(0, 1 << 40)];
        let refused = zip_units(0, &side, &side, 1, &mut out, &mut units);
        assert_eq!(
            refused,
            Err(Error::TooMany {
                what: "spans",
                count: (1 << 40) + 2
            })
        );
        assert!(zip_units(0, &side, &side, 0, &mut out, &mut units).is_err());
        assert!(out.is_empty() && units.is_empty());
    }

    #[test]
    fn coalescing_sorts_by_the_chosen_side() {
        let spans = vec![
            Span::new(8, 108, 8),
            Span::new(0, 100, 8),
            Span::new(16, 0, 4),
            Span::new(99, 4, 0),
        ];
        let mut by_src = spans.clone();
        assert_eq!(coalesce(&mut by_src, Side::Src), Ok(()));
        assert_eq!(by_src, [Span::new(0, 100, 16), Span::new(16, 0, 4)]);
        let mut by_dst = spans;
        assert_eq!(coalesce(&mut by_dst, Side::Dst), Ok(()));
        assert_eq!(by_dst, [Span::new(16, 0, 4), Span::new(0, 100, 16)]);
    }
}
