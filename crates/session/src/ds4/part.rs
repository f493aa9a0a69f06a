//! The parts that a payload consists of, one behind the other. Numbers are `f32` unless it says
//! otherwise; T tokens, L layers, V vocabulary, D and I the dimensions of a row and of the index.
//!
//! | part | bytes | grows with the tokens |
//! | --- | --- | --- |
//! | `Shape` | 13 × 4, `u32` | |
//! | `Tokens` | 4 T, `u32` | a token each |
//! | `Logits` | 4 V | |
//! | `RowCounts`, then of the index | 2 × 4 L, `u32` | |
//! | each layer: `Window` | raw rows × 4 D | |
//! | a compressed one: `Rows` | ⌊T / ratio⌋ × 4 D | a row each `ratio` tokens |
//! | `State`, `Score` | 4 D c² ratio each | |
//! | one of ratio 4: `IndexRows` | ⌊T / 4⌋ × 4 I | a row each 4 tokens |
//! | `IndexState`, `IndexScore` | 4 I c² × 4 each | |
//!
//! c is 2 at ratio 4, whose groups overlap, and else 1. What does not grow belongs to one
//! checkpoint and is written anew for each: the next token's logits, the last raw rows, and the
//! compressor's unfinished groups.

use std::ops::Range;

use super::shape::{FINE, SHAPE_LEN, Shape};

/// Bytes of a number.
const NUMBER: u64 = 4;

/// Kind of a part of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Head of the payload.
    Shape,
    /// Token IDs.
    Tokens,
    /// Logits of the next token.
    Logits,
    /// Number of compressed rows of each layer, then of the rows of its index.
    RowCounts,
    /// Raw rows of the last tokens of a layer, in the order of the tokens.
    Window,
    /// Compressed rows of a layer.
    Rows,
    /// Keys and values of the group that becomes the next compressed row.
    State,
    /// Scores of that group.
    Score,
    /// Rows of a layer's index.
    IndexRows,
    /// Keys of the group that becomes the next row of the index.
    IndexState,
    /// Scores of that group.
    IndexScore,
}

/// Size of the rows of a part that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Length of a row, in bytes.
    pub len: u64,
    /// Number of tokens that a row represents.
    pub tokens: u32,
}

/// Part of a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Kind of the part.
    pub kind: Kind,
    /// Number of the layer, if the part belongs to one.
    pub layer: Option<u32>,
    /// Range in the payload, in bytes.
    pub bytes: Range<u64>,
    /// Rows of a part that grows by appending: the rows of a longer session begin with those of a
    /// shorter one. `None` for a part of one checkpoint alone.
    pub row: Option<Row>,
}

impl Part {
    /// Returns the byte range, in the payload, of the rows that these tokens of the session
    /// completed.
    ///
    /// Adjacent ranges of tokens give adjacent ranges of bytes. The result is `None` for a part of
    /// one checkpoint alone.
    #[must_use]
    pub fn rows_of(&self, tokens: Range<u32>) -> Option<Range<u64>> {
        let row = self.row?;
        let at = |token: u32| {
            let rows = u64::from(token.checked_div(row.tokens).unwrap_or(0));
            let at = self
                .bytes
                .start
                .saturating_add(rows.saturating_mul(row.len));
            at.min(self.bytes.end)
        };
        let end = at(tokens.end);
        Some(at(tokens.start).min(end)..end)
    }
}

/// All parts of a payload of this shape, if its first two layers have this ratio; `None` where
/// their lengths exceed 64 bits.
pub(super) fn parts(shape: &Shape, leading: u32) -> Option<Vec<Part>> {
    let mut list = List::default();
    let (row, index) = (shape.head_dim, shape.index_dim);
    list.push(Kind::Shape, SHAPE_LEN as u64)?;
    list.push_rows(Kind::Tokens, shape.tokens, 1, 1)?;
    list.push(Kind::Logits, numbers(shape.vocab, 1)?)?;
    list.push(Kind::RowCounts, numbers(shape.layers, 2)?)?;
    for layer in 0..shape.layers {
        list.layer = Some(layer);
        list.push(Kind::Window, numbers(row, u64::from(shape.raw_rows))?)?;
        let ratio = Shape::ratio(layer, leading);
        if ratio == 0 {
            continue;
        }
        let rows = shape.rows(ratio);
        list.push_rows(Kind::Rows, rows, row, ratio)?;
        list.push(Kind::State, numbers(row, group(ratio))?)?;
        list.push(Kind::Score, numbers(row, group(ratio))?)?;
        if ratio == FINE {
            list.push_rows(Kind::IndexRows, rows, index, ratio)?;
            list.push(Kind::IndexState, numbers(index, group(ratio))?)?;
            list.push(Kind::IndexScore, numbers(index, group(ratio))?)?;
        }
    }
    Some(list.parts)
}

/// Rows of a compressor's state: two overlapping groups of rows of twice the width at ratio 4.
fn group(ratio: u32) -> u64 {
    let overlap = if ratio == FINE { 2 } else { 1 };
    u64::from(ratio) * overlap * overlap
}

/// Bytes of `rows` rows of `dim` numbers.
fn numbers(dim: u32, rows: u64) -> Option<u64> {
    (u64::from(dim) * NUMBER).checked_mul(rows)
}

/// Parts, each where the one before ends.
#[derive(Default)]
struct List {
    parts: Vec<Part>,
    layer: Option<u32>,
    end: u64,
}

impl List {
    fn push(&mut self, kind: Kind, len: u64) -> Option<()> {
        self.add(kind, len, None)
    }

    fn push_rows(&mut self, kind: Kind, rows: u32, dim: u32, tokens: u32) -> Option<()> {
        let len = numbers(dim, 1)?;
        self.add(
            kind,
            len.checked_mul(u64::from(rows))?,
            Some(Row { len, tokens }),
        )
    }

    fn add(&mut self, kind: Kind, len: u64, row: Option<Row>) -> Option<()> {
        let start = self.end;
        self.end = start.checked_add(len)?;
        self.parts.push(Part {
            kind,
            layer: self.layer,
            bytes: start..self.end,
            row,
        });
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// DeepSeek V4 Flash.
    fn flash(tokens: u32) -> Shape {
        Shape {
            version: 2,
            context: 100_000,
            prefill: 4096,
            ring: 8192,
            window: 128,
            rows_max: 25_000,
            tokens,
            layers: 43,
            head_dim: 512,
            index_dim: 128,
            vocab: 129_280,
            raw_rows: tokens.min(128),
        }
    }

    fn len(tokens: u32) -> u64 {
        parts(&flash(tokens), 0).unwrap().last().unwrap().bytes.end
    }

    #[test]
    fn lengths_are_those_that_were_measured() {
        // 13.8 KB a token and 23 MiB.
        assert_eq!((len(12_800) - len(1_280)) / 11_520, 13_764);
        let fixed = len(12_800) - 12_800 * 13_764;
        assert_eq!((fixed as f64 / (1 << 20) as f64).round(), 23.0);
    }

    #[test]
    fn a_part_is_cut_where_its_rows_are_complete() {
        let rows = |kind: Kind, layer: u32, tokens| {
            let all = parts(&flash(1000), 0).unwrap();
            let is_it = |part: &&Part| part.kind == kind && part.layer == Some(layer);
            let part = all.iter().find(is_it).unwrap();
            let range = part.rows_of(tokens)?;
            Some((range.start - part.bytes.start, range.end - part.bytes.start))
        };
        assert_eq!(rows(Kind::Rows, 2, 0..3), Some((0, 0)));
        assert_eq!(rows(Kind::Rows, 2, 3..8), Some((0, 4096)));
        assert_eq!(rows(Kind::IndexRows, 2, 4..8), Some((512, 1024)));
        assert_eq!(rows(Kind::Rows, 3, 0..1000), Some((0, 7 * 2048)));
        assert_eq!(rows(Kind::Rows, 3, 0..u32::MAX), Some((0, 7 * 2048)));
        assert_eq!(rows(Kind::Window, 3, 0..1000), None);
    }

    #[test]
    fn lengths_beyond_64_bits_are_none() {
        let huge = Shape {
            tokens: u32::MAX,
            raw_rows: u32::MAX,
            head_dim: u32::MAX,
            ..flash(1)
        };
        assert_eq!(parts(&huge, 0), None);
    }
}
