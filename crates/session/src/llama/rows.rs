//! Rows of runs of tokens: out of a state into a piece, and back.

use std::ops::Range;

use super::error::{Error, refuse};
use super::layout::Layout;

/// Bytes that are contiguous both in a state and in a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// Offset in the state, in bytes.
    pub state: usize,
    /// Offset in the piece, in bytes.
    pub piece: usize,
    /// Number of bytes.
    pub len: usize,
}

/// Iterator over the runs of a piece, in the order of the piece and without gaps.
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
    /// Returns the size of the piece with these tokens, in bytes.
    ///
    /// # Errors
    /// [`Error`] if the state does not have these tokens.
    pub fn piece_bytes(&self, tokens: Range<usize>) -> Result<usize, Error> {
        self.check_tokens(&tokens)?;
        Ok(self.shape.token_bytes() * tokens.len())
    }

    /// Returns the positions of the rows of these tokens.
    ///
    /// # Errors
    /// [`Error`] if the state does not have these tokens.
    pub fn runs(&self, tokens: Range<usize>) -> Result<Runs, Error> {
        self.check_tokens(&tokens)?;
        let tables = self.tables();
        let tables: Vec<_> = tables
            .map(|(start, table)| (start, table.unit, table.units))
            .collect();
        Ok(Runs {
            tables: tables.into_iter(),
            tokens: self.tokens,
            of: tokens,
            left: (0, 0, 0),
            piece: 0,
        })
    }

    /// Copies the rows of these tokens from a state into a piece.
    ///
    /// # Errors
    /// [`Error`] if the state does not have these tokens, or if `state` or `piece` has another
    /// size.
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

    /// Copies the rows of these tokens from a piece into a state.
    ///
    /// # Errors
    /// [`Error`] if the state does not have these tokens, or if `state` or `piece` has another
    /// size.
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

    /// Checks that a state of `state` bytes and a piece of `piece` bytes fit the layout and these
    /// tokens. After that, all runs are within both.
    ///
    /// # Errors
    /// [`Error`] if the state does not have these tokens, or if a size is another one.
    pub fn check(&self, state: usize, tokens: &Range<usize>, piece: usize) -> Result<(), Error> {
        self.check_state(state)?;
        let bytes = self.piece_bytes(tokens.clone())?;
        if piece != bytes {
            let allowed = format_args!("{bytes} bytes for tokens {tokens:?}");
            return refuse("piece", format_args!("{piece} bytes"), allowed);
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: &Range<usize>) -> Result<(), Error> {
        match tokens.start < tokens.end && tokens.end <= self.tokens {
            true => Ok(()),
            false => {
                let allowed = format_args!("a range of at least one token in 0..{}", self.tokens);
                refuse("tokens", format_args!("{tokens:?}"), allowed)
            }
        }
    }
}
