//! Where everything lies in a state.

use std::ops::Range;

use super::error::{Error, refuse};
use super::reader::Reader;
use super::shape::{Shape, TABLE_HEAD, Table};

/// First in each state.
const MAGIC: u32 = 0xaf14_3cd8;
/// Magic, sequence, streams and tokens.
const FRONT: usize = 16;
/// Bytes of a cell: position, how many sequences, and the one.
const CELL: usize = 12;
/// Whether values are transposed, and how many layers there are.
const MIDDLE: usize = 8;

/// Positions of the rows of all tokens in a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(super) shape: Shape,
    pub(super) tokens: usize,
    sequence: i32,
    /// Where the rest begins.
    attention: usize,
    rest: usize,
}

impl Layout {
    /// Reads a whole state of at least one token, with an attention.
    ///
    /// # Errors
    /// [`Error`] if the state is truncated or one of the unsupported kinds in the documentation of
    /// [the module](super).
    pub fn read(state: &[u8]) -> Result<Layout, Error> {
        let mut reader = Reader::new(state);
        reader.expect("magic", MAGIC)?;
        let sequence = reader.signed("sequence")?;
        reader.expect("streams", 1)?;
        let tokens = reader.number("tokens")? as usize;
        if tokens == 0 || tokens > reader.left() / CELL {
            let allowed = format_args!(
                "1 to {}, limited by the size of the state",
                reader.left() / CELL
            );
            return refuse("tokens", tokens, allowed);
        }
        for token in 0..tokens {
            let position = reader.signed("position")?;
            if usize::try_from(position) != Ok(token) {
                let allowed = format_args!("{token} (positions 0 to {} in order)", tokens - 1);
                return refuse("position", position, allowed);
            }
            reader.expect("sequences of a cell", 1)?;
            let of = reader.signed("sequence of a cell")?;
            if of != sequence {
                return refuse("sequence of a cell", of, sequence);
            }
        }
        let shape = Shape::read(&mut reader, tokens)?;
        Ok(Layout {
            shape,
            tokens,
            sequence,
            attention: reader.at(),
            rest: reader.left(),
        })
    }

    /// Returns the layout of a state of the same context with `tokens` tokens, at least 1, and a
    /// rest of `rest` bytes.
    ///
    /// # Errors
    /// [`Error`] if `tokens` is 0 or exceeds the positions of a state.
    pub fn resized(&self, tokens: usize, rest: usize) -> Result<Layout, Error> {
        let most = i32::MAX as usize;
        if !(1..=most).contains(&tokens) {
            return refuse("tokens", tokens, format_args!("1 to {most}"));
        }
        let rows = self.shape.token_bytes().checked_mul(tokens);
        let heads = FRONT + CELL * tokens + MIDDLE + TABLE_HEAD * self.shape.tables().count();
        let Some(attention) = rows.and_then(|rows| rows.checked_add(heads)) else {
            return refuse(
                "tokens",
                tokens,
                "a number whose size in bytes fits into 64 bits",
            );
        };
        if attention.checked_add(rest).is_none() {
            return refuse(
                "data after the rows",
                rest,
                "a number whose size in bytes fits into 64 bits",
            );
        }
        Ok(Layout {
            shape: self.shape.clone(),
            tokens,
            attention,
            rest,
            ..*self
        })
    }

    /// Returns the same layout for the sequence with the number `sequence`.
    #[must_use]
    pub fn of_sequence(mut self, sequence: i32) -> Layout {
        self.sequence = sequence;
        self
    }

    /// Returns the shape of the layers.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of the sequence.
    #[must_use]
    pub fn sequence(&self) -> i32 {
        self.sequence
    }

    /// Returns the size of the state, in bytes.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        self.attention.saturating_add(self.rest)
    }

    /// Returns the byte range of the part that does not grow by appending. It reaches to the end of
    /// the state.
    #[must_use]
    pub fn rest(&self) -> Range<usize> {
        self.attention..self.state_bytes()
    }

    /// Returns the tables in the order of the state, each with the offset of its rows in bytes.
    pub fn tables(&self) -> impl Iterator<Item = (usize, &Table)> {
        let tables = self.shape.tables().map(|(table, _)| table);
        self.starts().zip(tables)
    }

    /// Where the rows of each table begin.
    pub(super) fn starts(&self) -> impl Iterator<Item = usize> {
        let mut at = FRONT + CELL * self.tokens + MIDDLE;
        self.shape.tables().map(move |(table, _)| {
            let start = at + TABLE_HEAD;
            at = start + table.row() * self.tokens;
            start
        })
    }

    /// Writes all bytes of a state that are neither rows nor rest.
    ///
    /// # Errors
    /// [`Error`] if `state` does not have the size of the state.
    pub fn write_head(&self, state: &mut [u8]) -> Result<(), Error> {
        self.check_state(state.len())?;
        let sequence = self.sequence.to_le_bytes();
        // Both are held against 32 bits where a layout is made.
        let tokens = (self.tokens as u32).to_le_bytes();
        let one = 1u32.to_le_bytes();
        let mut front = [MAGIC.to_le_bytes(), sequence, one, tokens].concat();
        for position in 0..self.tokens as u32 {
            front.extend([position.to_le_bytes(), one, sequence].concat());
        }
        front.extend(u32::from(self.shape.transposed).to_le_bytes());
        front.extend((self.shape.layers() as u32).to_le_bytes());
        put(state, 0, &front);
        for (start, (table, transposed)) in self.starts().zip(self.shape.tables()) {
            put(state, start - TABLE_HEAD, &table.head(transposed));
        }
        Ok(())
    }

    /// Refuses memory that is not a state's.
    pub(super) fn check_state(&self, len: usize) -> Result<(), Error> {
        match len == self.state_bytes() {
            true => Ok(()),
            false => {
                let value = format_args!("{len} bytes");
                refuse("state", value, format_args!("{}", self.state_bytes()))
            }
        }
    }
}

/// Lengths are held against each other before.
fn put(state: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(to) = state.get_mut(at..at + bytes.len()) {
        to.copy_from_slice(bytes);
    }
}
