//! What a planner takes in and gives out.

use crate::Error;
use crate::span::Span;

/// How a planner cuts and groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of a slice, tail aside. A unit larger than this is a slice of its own.
    pub slice_size: u64,
    /// A remainder of at most this many bytes joins the slice before it instead of becoming a
    /// slice. From 0 (never) to `slice_size`.
    pub tail_merge: u64,
    /// Lanes that slices are given to, numbered from 0; 1 to 65,536.
    pub lanes: usize,
    /// Slices, over all lanes, that must be ready before they are handed out; 1 or more.
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

/// Bytes that one lane must move as a whole, because they are hashed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Unit {
    /// The caller's name for the movement that the unit belongs to.
    pub tag: u32,
    /// Number of the unit in its movement, from 0.
    pub index: u32,
    /// First of the unit's spans in the caller's span table.
    pub first_span: u32,
    /// How many spans it has.
    pub span_count: u32,
    /// Bytes in those spans.
    pub bytes: u64,
}

impl Unit {
    /// The unit's spans in `table`, the one that [`zip_units`](crate::zip_units) appended to;
    /// `None` when the table does not hold them.
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
    /// A span, or what one slice takes of it.
    Span {
        /// The caller's name for the movement that the span belongs to.
        tag: u32,
        /// What to move.
        span: Span,
    },
}

impl Piece {
    /// Bytes to move.
    pub fn bytes(&self) -> u64 {
        match self {
            Piece::Unit(unit) => unit.bytes,
            Piece::Span { span, .. } => span.len,
        }
    }

    /// The caller's name for the movement that the piece belongs to.
    pub fn tag(&self) -> u32 {
        match self {
            Piece::Unit(unit) => unit.tag,
            Piece::Span { tag, .. } => *tag,
        }
    }
}

/// What one lane is asked to do at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// The lane, below [`Limits::lanes`].
    pub lane: usize,
    /// Bytes in all pieces.
    pub bytes: u64,
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// Slices to submit now: none below the watermark. Iterating gives each slice with its pieces.
#[derive(Debug, Clone, Copy)]
#[must_use = "slices that are not submitted are lost: they are handed out once"]
pub struct Ready<'a> {
    pub(crate) slices: &'a [Slice],
    pub(crate) pieces: &'a [Piece],
}

impl<'a> Ready<'a> {
    /// The slices, in the order they were planned.
    pub fn slices(&self) -> &'a [Slice] {
        self.slices
    }

    /// How many slices there are.
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// Whether there is nothing to submit now.
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// Each slice with its pieces, in the order they were planned.
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

/// Iterator over [`Ready`].
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
