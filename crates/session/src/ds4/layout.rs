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

/// Where everything lies in a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    parts: Vec<Part>,
    payload: Range<u64>,
}

impl Layout {
    /// Reads a payload's head and row counts, a few hundred bytes.
    ///
    /// # Errors
    /// A payload that is not DeepSeek V4's of a known version, that is torn, or that disagrees
    /// with the file's head; or a reader that fails.
    pub fn read(reader: &mut (impl Read + Seek), file: &Parts) -> Result<Layout, Error> {
        let payload = file.payload.clone();
        let len = payload.end.saturating_sub(payload.start);
        if len < SHAPE_LEN as u64 {
            return refuse("payload length", len, format_args!("{SHAPE_LEN} or more"));
        }
        let mut head = [0; SHAPE_LEN];
        reader.seek(SeekFrom::Start(payload.start))?;
        reader.read_exact(&mut head)?;
        let shape = Shape::decode(&head)?;
        if shape.tokens != file.head.tokens {
            let allowed = format_args!("{}, as the file's head says", file.head.tokens);
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

    /// That of a payload in this place of its file which begins so, and was [read](Layout::read)
    /// before.
    ///
    /// # Errors
    /// A beginning that is none, or a payload of another length.
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

    /// What the payload says of itself.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// All parts in their order: each begins where the one before ends, the first at 0, and the
    /// last ends where the payload does.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The ids of these of the session's tokens, up to its end.
    ///
    /// # Errors
    /// A reader that fails.
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
                let allowed = format_args!("{expected}, as {tokens} tokens make");
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
            "lengths of 64 bits",
        );
    }
    let allowed = format_args!("{}, as its shape says", lengths.join(" or "));
    refuse("payload length", len, allowed)
}
