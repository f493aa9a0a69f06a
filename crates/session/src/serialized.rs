//! Saves by a serializer: rows whose size is known, and which come chunk by chunk.

use std::io;
use std::ops::Range;

use crate::chain::{Cut, bytes_of};
use crate::error::Error;
use crate::feed::Feed;
use crate::manifest::PART_MAX;
use crate::save::{Checkpoint, Saved};
use crate::store::Sessions;

/// Writer for a serializer of known size, which [`Sessions::save_serialized`] passes to it.
///
/// The serializer writes the rows of the requested runs in sequence. A piece is stored when it is
/// full, and at most two pieces are in memory.
pub struct Sink {
    feed: Feed,
    /// Pieces that are wanted, and their bytes.
    wanted: Vec<(usize, u64)>,
    /// The one that is being filled.
    at: usize,
    part: Vec<u8>,
    predicted: u64,
    written: u64,
    /// Why nothing more is taken.
    failed: Option<Error>,
}

impl Sessions {
    /// Saves a checkpoint whose rows a serializer writes in chunks of any size.
    ///
    /// * `size` returns the size of the rows of a run of tokens, in bytes.
    /// * `serialize` is called once, with the runs whose rows are missing, and must write exactly
    ///   the predicted bytes. If no row is missing, it is not called.
    ///
    /// # Errors
    /// * [`Error::Predicted`] if `serialize` writes more or fewer bytes.
    /// * Errors of `serialize`, and those of [`save`](Sessions::save).
    ///
    /// After an error, the parts that were stored are removed, except those that a session names.
    pub fn save_serialized(
        &self,
        checkpoint: Checkpoint<'_>,
        size: impl Fn(Range<usize>) -> u64,
        serialize: impl FnOnce(&[Range<usize>], &mut Sink) -> Result<(), Error>,
    ) -> Result<Saved, Error> {
        let why = "false; exact sessions cannot be saved with a serializer";
        checkpoint.check_any(self.piece_tokens, why)?;
        let (count, each) = (checkpoint.tokens.len(), self.piece_tokens as usize);
        let links = Cut::of_tokens(self.piece_tokens).links(&bytes_of(checkpoint.tokens));
        let feed = Feed::of(self, links)?;
        let missing = feed.missing();
        if missing.is_empty() {
            return feed.commit(checkpoint);
        }
        let run = |piece: &usize| piece * each..((piece + 1) * each).min(count);
        let runs: Vec<Range<usize>> = missing.iter().map(run).collect();
        let sizes = runs.iter().cloned().map(size);
        let wanted: Vec<(usize, u64)> = missing.into_iter().zip(sizes).collect();
        let wrong = wanted.iter().find(|(_, len)| !(1..=PART_MAX).contains(len));
        if let Some((piece, len)) = wrong {
            let field = format!("size({:?})", run(piece));
            return Err(Error::input(
                field,
                format!("{len} bytes"),
                "1 byte to 1GiB",
            ));
        }
        let sizes = wanted.iter().map(|(_, len)| *len);
        feed.check_size(sizes.chain(checkpoint.sizes()))?;
        let mut sink = Sink {
            feed,
            predicted: wanted.iter().map(|(_, len)| len).sum(),
            wanted,
            at: 0,
            part: Vec::new(),
            written: 0,
            failed: None,
        };
        let serialized = serialize(&runs, &mut sink);
        if let Some(error) = sink.failed.take() {
            return Err(error);
        }
        serialized?;
        if sink.left() > 0 {
            return Err(sink.unlike());
        }
        sink.feed.commit(checkpoint)
    }
}

impl Sink {
    /// Returns the number of predicted bytes that are not written yet.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.predicted.saturating_sub(self.written)
    }

    /// Adds the next bytes of the rows.
    ///
    /// # Errors
    /// [`Error::Input`] if more bytes arrive than predicted, or a piece cannot be stored. The save
    /// has then failed, regardless of the result of the serializer.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.failed.is_some() {
            return Err(Error::input(
                "sink",
                "bytes after an error",
                "no bytes after the first error",
            ));
        }
        let taken = self.take(bytes);
        match taken {
            Ok(()) => Ok(()),
            Err(error) => {
                let said = format!("a write that failed ({error})");
                self.failed = Some(error);
                Err(Error::input(
                    "bytes",
                    said,
                    "as many bytes as predicted, in pieces that the depot stores",
                ))
            }
        }
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        self.written += bytes.len() as u64;
        if self.written > self.predicted {
            return Err(self.unlike());
        }
        while let Some((piece, len)) = self.wanted.get(self.at).copied()
            && !bytes.is_empty()
        {
            let len = len as usize;
            if self.part.is_empty() {
                self.part.reserve_exact(len);
            }
            let (some, rest) = bytes.split_at(bytes.len().min(len - self.part.len()));
            self.part.extend_from_slice(some);
            bytes = rest;
            if self.part.len() == len {
                self.feed.store(piece, std::mem::take(&mut self.part))?;
                self.at += 1;
            }
        }
        Ok(())
    }

    fn unlike(&self) -> Error {
        Error::Predicted {
            predicted: self.predicted,
            written: self.written,
        }
    }
}

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = Sink::write(self, bytes);
        taken.map(|()| bytes.len()).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
