//! Where everything lies in a state.

use std::ops::Range;

use super::error::{Error, refuse};
use super::reader::Reader;
use super::shape::{Shape, TABLE_HEAD};

/// First in each state.
const MAGIC: u32 = 0xaf14_3cd8;
/// Magic, sequence, streams and tokens.
const FRONT: usize = 16;
/// Bytes of a cell: position, how many sequences, and the one.
const CELL: usize = 12;
/// Whether values are transposed, and how many layers there are.
const MIDDLE: usize = 8;

/// A state of some tokens: where their rows lie in it.
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
    /// Reads a whole state, of one token or more, with an attention.
    ///
    /// # Errors
    /// What the module says is refused, and a state that is torn.
    pub fn read(state: &[u8]) -> Result<Layout, Error> {
        let mut reader = Reader::new(state);
        reader.expect("magic", MAGIC)?;
        let sequence = reader.signed("sequence")?;
        reader.expect("streams", 1)?;
        let tokens = reader.number("tokens")? as usize;
        if tokens == 0 || tokens > reader.left() / CELL {
            let allowed = format_args!("1 to {}, whose cells fit", reader.left() / CELL);
            return refuse("tokens", tokens, allowed);
        }
        for token in 0..tokens {
            let position = reader.signed("position")?;
            if usize::try_from(position) != Ok(token) {
                let allowed = format_args!("{token}: 0 to {} in this order", tokens - 1);
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

    /// That of a state of another number of tokens, 1 or more, with a rest of so many bytes, of
    /// the same context.
    ///
    /// # Errors
    /// No tokens, or more than a state has positions for.
    pub fn resized(&self, tokens: usize, rest: usize) -> Result<Layout, Error> {
        let most = i32::MAX as usize;
        if !(1..=most).contains(&tokens) {
            return refuse("tokens", tokens, format_args!("1 to {most}"));
        }
        let rows = self.shape.token_bytes().checked_mul(tokens);
        let heads = FRONT + CELL * tokens + MIDDLE + TABLE_HEAD * self.shape.tables().count();
        let Some(attention) = rows.and_then(|rows| rows.checked_add(heads)) else {
            return refuse("tokens", tokens, "what 64 bits can count the bytes of");
        };
        if attention.checked_add(rest).is_none() {
            return refuse("rest", rest, "what 64 bits can count the bytes of");
        }
        Ok(Layout {
            shape: self.shape.clone(),
            tokens,
            attention,
            rest,
            ..*self
        })
    }

    /// The same of another sequence.
    #[must_use]
    pub fn of_sequence(mut self, sequence: i32) -> Layout {
        self.sequence = sequence;
        self
    }

    /// Its layers.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of its sequence.
    #[must_use]
    pub fn sequence(&self) -> i32 {
        self.sequence
    }

    /// Bytes of the state.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        self.attention.saturating_add(self.rest)
    }

    /// Where the part that does not grow by appending lies, to the state's end.
    #[must_use]
    pub fn rest(&self) -> Range<usize> {
        self.attention..self.state_bytes()
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

    /// Writes all of a state that is neither rows nor rest.
    ///
    /// # Errors
    /// Memory of another length than the state's.
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
