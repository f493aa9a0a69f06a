//! Input and output of a planner.

use crate::Error;
use crate::span::Span;

/// Limits of a planner: the sizes of slices, the number of lanes and the watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of a slice in bytes, without a merged tail; 1 or more. A larger unit becomes a
    /// slice of its own.
    pub slice_size: u64,
    /// Maximum size in bytes of a remainder that joins the previous slice instead of becoming a
    /// slice; 0 (never) to `slice_size`.
    pub tail_merge: u64,
    /// Number of lanes, 1 to 65,536. Lanes have the numbers from 0.
    pub lanes: usize,
    /// Number of slices, over all lanes, that must be ready before they are handed out; 1 or more.
    pub watermark: usize,
}

impl Limits {
    /// Far above any machine's cores; a bound against a wrong unit in a configuration.
    const LANES_MAX: usize = 1 << 16;

    pub(crate) fn check(&self) -> Result<(), Error> {
        let Limits {
            slice_size,
            tail_merge,
            lanes,
            watermark,
        } = *self;
        let fail = |field, value, allowed| {
            Err(Error::Config {
                field,
                value,
                allowed,
            })
        };
        if slice_size == 0 {
            return fail("slice_size", slice_size, "1 or more");
        }
        if tail_merge > slice_size {
            return fail("tail_merge", tail_merge, "0 to slice_size");
        }
        if lanes == 0 || lanes > Limits::LANES_MAX {
            return fail("lanes", lanes as u64, "1 to 65536");
        }
        if watermark == 0 {
            return fail("watermark", 0, "1 or more");
        }
        Ok(())
    }

    /// Most bytes of a slice that is not a single larger unit.
    pub(crate) fn slice_max(&self) -> u64 {
        self.slice_size.saturating_add(self.tail_merge)
    }
}

/// Bytes that one lane must move together, because they have one hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Unit {
    /// The caller's number for the movement of this unit.
    pub tag: u32,
    /// Number of the unit in its movement, from 0.
    pub index: u32,
    /// Index of the unit's first span in the caller's span table.
    pub first_span: u32,
    /// Number of spans of the unit.
    pub span_count: u32,
    /// Total length of these spans in bytes.
    pub bytes: u64,
}

impl Unit {
    /// Returns the unit's spans in `table`, the table to which [`zip_units`](crate::zip_units)
    /// appended them.
    ///
    /// Returns `None` if the table does not contain them.
    pub fn spans<'a>(&self, table: &'a [Span]) -> Option<&'a [Span]> {
        let first = self.first_span as usize;
        table.get(first..first.checked_add(self.span_count as usize)?)
    }
}

/// One entry of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a lane must know how to move each kind"
)]
pub enum Piece {
    /// A whole unit.
    Unit(Unit),
    /// A span, or the part of a span that belongs to this slice.
    Span {
        /// The caller's number for the movement of this span.
        tag: u32,
        /// The bytes to move.
        span: Span,
    },
}

impl Piece {
    /// Returns the number of bytes to move.
    pub fn bytes(&self) -> u64 {
        match self {
            Piece::Unit(unit) => unit.bytes,
            Piece::Span { span, .. } => span.len,
        }
    }

    /// Returns the caller's number for the movement of this piece.
    pub fn tag(&self) -> u32 {
        match self {
            Piece::Unit(unit) => unit.tag,
            Piece::Span { tag, .. } => *tag,
        }
    }
}

/// A group of pieces that one lane receives together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Number of the lane, below [`Limits::lanes`].
    pub lane: usize,
    /// Total length of all pieces in bytes.
    pub bytes: u64,
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// The slices to submit now; empty below the watermark. Iteration returns each slice with its
/// pieces.
#[derive(Debug, Clone, Copy)]
#[must_use = "slices that are not submitted are lost: they are handed out once"]
pub struct Ready<'a> {
    pub(crate) slices: &'a [Slice],
    pub(crate) pieces: &'a [Piece],
}

impl<'a> Ready<'a> {
    /// Returns the slices, in planning order.
    pub fn slices(&self) -> &'a [Slice] {
        self.slices
    }

    /// Returns the number of slices.
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// Returns true if there are no slices to submit now.
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// Returns an iterator over the slices with their pieces, in planning order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Slice, &'a [Piece])> + use<'a> {
        self.into_iter()
    }
}

impl<'a> IntoIterator for Ready<'a> {
    type Item = (Slice, &'a [Piece]);
    type IntoIter = ReadyIter<'a>;

    fn into_iter(self) -> ReadyIter<'a> {
        ReadyIter {
            slices: self.slices.iter(),
            pieces: self.pieces,
        }
    }
}

/// An iterator over the slices of [`Ready`].
#[derive(Debug, Clone)]
pub struct ReadyIter<'a> {
    slices: core::slice::Iter<'a, Slice>,
    pieces: &'a [Piece],
}

impl<'a> Iterator for ReadyIter<'a> {
    type Item = (Slice, &'a [Piece]);

    fn next(&mut self) -> Option<Self::Item> {
        let slice = *self.slices.next()?;
        Some((
            slice,
            &self.pieces[slice.first as usize..][..slice.count as usize],
        ))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.slices.size_hint()
    }
}

impl ExactSizeIterator for ReadyIter<'_> {}
