//! The inside of a payload, so that a session can be cut by tokens: which bytes grow with the
//! tokens, and which belong to one checkpoint. The parts are drawn at [`super::part`].
//!
//! A payload does not say which of its layers are compressed, and how: that is the model's. Two
//! models are known, DeepSeek V4 Flash, whose first two layers are not compressed, and Pro, whose
//! first two are like the odd ones. Their lengths differ for every shape, so the length of the
//! payload tells which it is; the row counts must agree. Anything else is refused here, and
//! remains good as opaque bytes.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use super::error::{Error, refuse};
use super::file::Parts;
use super::part::{Kind, Part, parts};
use super::shape::{COARSE, FINE, SHAPE_LEN, Shape};

/// Bytes of a token id or a row count.
const ID: u64 = 4;
/// Ids read at once: 64 KiB.
const IDS_AT_ONCE: usize = 16 * 1024;

/// Positions of all parts of a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    parts: Vec<Part>,
    payload: Range<u64>,
}

impl Layout {
    /// Reads the head and the row counts of a payload, a few hundred bytes.
    ///
    /// # Errors
    /// [`Error::Format`] if the payload is not a known version of DeepSeek V4, is truncated, or
    /// contradicts the head of the file, and [`Error::Io`] if the reader fails.
    pub fn read(reader: &mut (impl Read + Seek), file: &Parts) -> Result<Layout, Error> {
        let payload = file.payload.clone();
        let len = payload.end.saturating_sub(payload.start);
        if len < SHAPE_LEN as u64 {
            return refuse(
                "payload length",
                len,
                format_args!("{SHAPE_LEN} bytes or more"),
            );
        }
        let mut head = [0; SHAPE_LEN];
        reader.seek(SeekFrom::Start(payload.start))?;
        reader.read_exact(&mut head)?;
        let shape = Shape::decode(&head)?;
        if shape.tokens != file.head.tokens {
            let allowed = format_args!("{}, the number in the file's head", file.head.tokens);
            return refuse("payload's tokens", shape.tokens, allowed);
        }
        let (leading, parts) = of_length(&shape, len)?;
        let layout = Layout {
            shape,
            parts,
            payload,
        };
        layout.check_rows(reader, leading)?;
        Ok(layout)
    }

    /// Returns the layout of a payload that was [read](Layout::read) before, from its first bytes
    /// and its range in the file.
    ///
    /// # Errors
    /// [`Error::Format`] if `head` is invalid, or the payload has another length.
    pub fn known(head: &[u8; SHAPE_LEN], payload: Range<u64>) -> Result<Layout, Error> {
        let shape = Shape::decode(head)?;
        let len = payload.end.saturating_sub(payload.start);
        let (_, parts) = of_length(&shape, len)?;
        Ok(Layout {
            shape,
            parts,
            payload,
        })
    }

    /// Returns the head of the payload.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns all parts in order. Each part begins at the end of the previous one; the first
    /// begins at 0, and the last ends with the payload.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Reads the IDs of a range of the session's tokens. A range beyond the end is cut.
    ///
    /// # Errors
    /// [`Error::Io`] if the reader fails.
    pub fn read_tokens(
        &self,
        reader: &mut (impl Read + Seek),
        tokens: Range<u32>,
    ) -> Result<Vec<u32>, Error> {
        let Some(bytes) = self
            .find(Kind::Tokens)
            .and_then(|part| part.rows_of(tokens))
        else {
            return Ok(Vec::new());
        };
        self.read_numbers(reader, bytes)
    }

    fn find(&self, kind: Kind) -> Option<&Part> {
        self.parts.iter().find(|part| part.kind == kind)
    }

    /// Refuses row counts that are not those of the tokens: the parts would lie elsewhere.
    fn check_rows(&self, reader: &mut (impl Read + Seek), leading: u32) -> Result<(), Error> {
        let Some(part) = self.find(Kind::RowCounts) else {
            return Ok(());
        };
        let counts = self.read_numbers(reader, part.bytes.clone())?;
        let ratio = |layer| Shape::ratio(layer, leading);
        let layers = 0..self.shape.layers;
        let rows = layers
            .clone()
            .map(|layer| ("rows of a layer", ratio(layer)));
        let index = layers.map(|layer| match ratio(layer) {
            FINE => ("index rows of a layer", FINE),
            _ => ("index rows of a layer", 0),
        });
        for (&count, (field, ratio)) in counts.iter().zip(rows.chain(index)) {
            let expected = self.shape.rows(ratio);
            if count != expected {
                let tokens = self.shape.tokens;
                let allowed = format_args!("{expected}, the number for {tokens} tokens");
                return refuse(field, count, allowed);
            }
        }
        Ok(())
    }

    /// Numbers of the payload, whose length is known to be the file's: memory follows the bytes
    /// that are there.
    fn read_numbers(
        &self,
        reader: &mut (impl Read + Seek),
        bytes: Range<u64>,
    ) -> Result<Vec<u32>, Error> {
        reader.seek(SeekFrom::Start(
            self.payload.start.saturating_add(bytes.start),
        ))?;
        let mut left = (bytes.end.saturating_sub(bytes.start) / ID) as usize;
        let mut numbers = Vec::new();
        let mut buffer = vec![[0; ID as usize]; left.min(IDS_AT_ONCE)];
        while left > 0 {
            buffer.truncate(left);
            reader.read_exact(buffer.as_flattened_mut())?;
            numbers.extend(buffer.iter().copied().map(u32::from_le_bytes));
            left -= buffer.len();
        }
        Ok(numbers)
    }
}

/// The model whose payload of this shape has this length: the ratio of its first two layers, and
/// its parts.
fn of_length(shape: &Shape, len: u64) -> Result<(u32, Vec<Part>), Error> {
    let mut lengths = Vec::new();
    for leading in [0, COARSE] {
        let Some(parts) = parts(shape, leading) else {
            continue;
        };
        let end = parts.last().map_or(0, |part| part.bytes.end);
        if end == len {
            return Ok((leading, parts));
        }
        lengths.push(end.to_string());
    }
    if lengths.is_empty() {
        return refuse(
            "payload's shape",
            format_args!("{shape:?}"),
            "a shape whose size fits into 64 bits",
        );
    }
    let allowed = format_args!("{}, the length for its shape", lengths.join(" or "));
    refuse("payload length", len, allowed)
}
