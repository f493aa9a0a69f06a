//! Rows of runs of tokens: out of a state into a piece, and back.

use std::ops::Range;

use super::error::{Error, refuse};
use super::layout::Layout;

/// Bytes that lie together, both in a state and in a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// Where they begin in the state.
    pub state: usize,
    /// Where they begin in the piece.
    pub piece: usize,
    /// How many they are.
    pub len: usize,
}

/// The runs of a piece, in its order: they follow each other without a gap.
#[derive(Clone, Debug)]
pub struct Runs {
    /// Of each table: where it begins, bytes that lie together of a token, and how many of these.
    tables: std::vec::IntoIter<(usize, usize, usize)>,
    tokens: usize,
    of: Range<usize>,
    /// The table that is under way, from its next unit on.
    left: (usize, usize, usize),
    piece: usize,
}

impl Iterator for Runs {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        while self.left.2 == 0 {
            self.left = self.tables.next()?;
        }
        let (start, unit, units) = self.left;
        self.left = (start + unit * self.tokens, unit, units - 1);
        let run = Run {
            state: start + unit * self.of.start,
            piece: self.piece,
            len: unit * self.of.len(),
        };
        self.piece += run.len;
        Some(run)
    }
}

impl Layout {
    /// Bytes of a piece of these tokens.
    ///
    /// # Errors
    /// Tokens that the state does not have.
    pub fn piece_bytes(&self, tokens: Range<usize>) -> Result<usize, Error> {
        self.check_tokens(&tokens)?;
        Ok(self.shape.token_bytes() * tokens.len())
    }

    /// Where the rows of these tokens lie.
    ///
    /// # Errors
    /// Tokens that the state does not have.
    pub fn runs(&self, tokens: Range<usize>) -> Result<Runs, Error> {
        self.check_tokens(&tokens)?;
        let tables = self.starts().zip(self.shape.tables());
        let tables: Vec<_> = tables
            .map(|(start, (table, _))| (start, table.unit, table.units))
            .collect();
        Ok(Runs {
            tables: tables.into_iter(),
            tokens: self.tokens,
            of: tokens,
            left: (0, 0, 0),
            piece: 0,
        })
    }

    /// Takes the rows of these tokens out of a state.
    ///
    /// # Errors
    /// Tokens that the state does not have, and memory of another length than its or the piece's.
    pub fn gather(
        &self,
        state: &[u8],
        tokens: Range<usize>,
        piece: &mut [u8],
    ) -> Result<(), Error> {
        self.check(state.len(), &tokens, piece.len())?;
        for run in self.runs(tokens)? {
            let from = state.get(run.state..run.state + run.len);
            let to = piece.get_mut(run.piece..run.piece + run.len);
            if let (Some(from), Some(to)) = (from, to) {
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }

    /// Puts the rows of these tokens into a state.
    ///
    /// # Errors
    /// As [`Layout::gather`].
    pub fn scatter(
        &self,
        piece: &[u8],
        tokens: Range<usize>,
        state: &mut [u8],
    ) -> Result<(), Error> {
        self.check(state.len(), &tokens, piece.len())?;
        for run in self.runs(tokens)? {
            let from = piece.get(run.piece..run.piece + run.len);
            let to = state.get_mut(run.state..run.state + run.len);
            if let (Some(from), Some(to)) = (from, to) {
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }

    /// Refuses memory and tokens that do not fit: behind this, all runs are inside of both.
    ///
    /// # Errors
    /// As [`Layout::gather`].
    pub fn check(&self, state: usize, tokens: &Range<usize>, piece: usize) -> Result<(), Error> {
        self.check_state(state)?;
        let bytes = self.piece_bytes(tokens.clone())?;
        if piece != bytes {
            let allowed = format_args!("{bytes}, of tokens {tokens:?}");
            return refuse("piece", format_args!("{piece} bytes"), allowed);
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: &Range<usize>) -> Result<(), Error> {
        match tokens.start < tokens.end && tokens.end <= self.tokens {
            true => Ok(()),
            false => {
                let allowed = format_args!("one or more of 0..{}", self.tokens);
                refuse("tokens", format_args!("{tokens:?}"), allowed)
            }
        }
    }
}
