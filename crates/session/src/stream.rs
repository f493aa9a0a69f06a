//! Streams: a session that is written while nobody knows yet how long it gets.
//!
//! Rows come chunk by chunk. A piece is stored once it is full, and never again; what is kept in
//! memory is the piece that is being filled, and the one before, until it is stored. Nothing is a
//! session before [`commit`](Stream::commit). A stream that is dropped removes what it has stored
//! and no session names; one that is killed leaves blocks that the next save of these tokens finds,
//! that are evicted, or that [`sweep`](crate::Sessions::sweep) removes.

use kvdepot_store::Buffer;

use crate::chain::{Cut, Link, bytes_of};
use crate::error::Error;
use crate::feed::Feed;
use crate::manifest::{PART_MAX, Reason};
use crate::save::{Checkpoint, Saved};
use crate::store::{MANIFEST_MAX, Sessions, check_size};

/// Bytes that are copied at a time into the piece that is being filled.
const COPIED: usize = 256 << 10;

/// What is told of a session at its end.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Ending<'a> {
    /// As in [`Checkpoint`].
    pub text: &'a [u8],
    /// Likewise.
    pub reason: Reason,
    /// Likewise.
    pub context_tokens: u32,
    /// Likewise.
    pub objects: Vec<(String, Buffer)>,
    /// Likewise.
    pub note: String,
    /// Likewise.
    pub created: u64,
}

/// A session that is being written.
pub struct Stream {
    /// None once something of it was lost.
    feed: Option<Feed>,
    tokens: Vec<u32>,
    cached_tokens: usize,
    piece_tokens: usize,
    /// Before the piece that is being filled.
    last: Link,
    /// Rows of that piece.
    part: Vec<u8>,
    /// Bytes of the pieces before.
    size: u64,
}

impl Sessions {
    /// Begins a session of which these tokens are known; none are needed. What of them is there, in
    /// full pieces, is part of it: [`append`](Stream::append) goes on behind
    /// [`cached_tokens`](Stream::cached_tokens), with tokens of these that are not, too.
    ///
    /// # Errors
    /// Those of the depot.
    pub fn stream(&self, known: &[u32]) -> Result<Stream, Error> {
        let cut = Cut::of_tokens(self.piece_tokens);
        let mut links = cut.boundaries(&bytes_of(known));
        let start = links.remove(0);
        let mut feed = Feed::of(self, links)?;
        let each = self.piece_tokens as usize;
        let cached_tokens = feed.cut() * each;
        Ok(Stream {
            size: feed.bytes(),
            last: feed.end().unwrap_or(start),
            feed: Some(feed),
            tokens: known[..cached_tokens].to_vec(),
            cached_tokens,
            piece_tokens: each,
            part: Vec::new(),
        })
    }
}

impl Stream {
    /// Tokens of the beginning that are there: rows are wanted from this one on.
    #[must_use]
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// All tokens so far.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens up to the end of the piece that is being filled.
    #[must_use]
    pub fn room(&self) -> usize {
        self.piece_tokens - self.tokens.len() % self.piece_tokens
    }

    /// Bytes that were stored so far, or are on their way.
    #[must_use]
    pub fn bytes_written(&self) -> u64 {
        self.feed.as_ref().map_or(0, Feed::bytes_written)
    }

    /// Adds tokens and their rows, in their order, in as many buffers as there are. A chunk that
    /// goes beyond [`room`](Stream::room) is cut, so that it needs as many bytes for each token;
    /// one that does not may be laid out in any way that the engine reads again. A piece that lies
    /// in one chunk is stored from where it lies; all else is copied. The memory is the caller's
    /// again when this returns.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves. After any other, and after none at all, nothing can be
    /// added any more, and what was stored is gone.
    pub fn append(&mut self, tokens: &[u32], rows: &[Buffer]) -> Result<(), Error> {
        let bytes = self.check(tokens, rows)?;
        let mut feed = self.feed.take().ok_or_else(lost)?;
        let taken = self.take(&mut feed, tokens, (rows, bytes));
        // What lies in the caller's memory is read until here, also where some has failed.
        let stored = feed.settle_lent();
        taken.and(stored)?;
        self.feed = Some(feed);
        Ok(())
    }

    /// Makes it a session.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves. Any other as of [`Sessions::save`]: then there is no
    /// such session, and what was stored is gone.
    pub fn commit(&mut self, ending: Ending<'_>) -> Result<Saved, Error> {
        let checkpoint = Checkpoint {
            tokens: &self.tokens,
            text: ending.text,
            reason: ending.reason,
            context_tokens: ending.context_tokens,
            objects: ending.objects,
            note: ending.note,
            created: ending.created,
            exact: false,
        };
        checkpoint.check(self.piece_tokens as u32)?;
        let mut feed = self.feed.take().ok_or_else(lost)?;
        let rest = [self.size, self.part.len() as u64];
        check_size(feed.size_max, checkpoint.sizes().chain(rest))?;
        let behind = self.tokens.len() % self.piece_tokens;
        if behind > 0 {
            let rest = &self.tokens[self.tokens.len() - behind..];
            let piece = feed.push(self.last.then(&bytes_of(rest)));
            feed.store(piece, std::mem::take(&mut self.part))?;
        }
        feed.commit(checkpoint)
    }

    /// Ends it without a session, and removes what it has stored and no session names. Dropping it
    /// does the same, and says nothing of what went wrong.
    ///
    /// # Errors
    /// Those of the depot: what is left are blocks like others.
    pub fn abort(&mut self) -> Result<(), Error> {
        self.feed.take().map_or(Ok(()), Feed::undo)
    }

    fn take(
        &mut self,
        feed: &mut Feed,
        tokens: &[u32],
        (rows, bytes): (&[Buffer], usize),
    ) -> Result<(), Error> {
        let each = bytes / tokens.len();
        let (mut at, mut from) = (0, 0);
        while at < tokens.len() {
            let count = self.room().min(tokens.len() - at);
            let len = match at + count == tokens.len() {
                true => bytes - from,
                false => each * count,
            };
            let some = cut(rows, from, len)?;
            self.tokens.extend_from_slice(&tokens[at..at + count]);
            (at, from) = (at + count, from + len);
            if count < self.piece_tokens {
                self.fill(&some, len / count)?;
            }
            if self.room() < self.piece_tokens {
                continue;
            }
            self.size += self.part.len().max(len) as u64;
            check_size(feed.size_max, [self.size].into_iter())?;
            let piece = &self.tokens[self.tokens.len() - self.piece_tokens..];
            self.last = self.last.then(&bytes_of(piece));
            let piece = feed.push(self.last);
            match count == self.piece_tokens {
                true => feed.store_lent(piece, some)?,
                false => feed.store(piece, std::mem::take(&mut self.part))?,
            }
        }
        Ok(())
    }

    /// Copies rows behind those of the piece that is being filled.
    fn fill(&mut self, rows: &[Buffer], token_bytes: usize) -> Result<(), Error> {
        if self.part.is_empty() {
            let piece = token_bytes.saturating_mul(self.piece_tokens);
            self.part.reserve_exact(piece.min(PART_MAX as usize));
        }
        for some in rows {
            for at in (0..some.len()).step_by(COPIED) {
                let slice = some.slice(at, COPIED.min(some.len() - at));
                let slice = slice.map_err(kvdepot_store::Error::from)?;
                self.part.extend_from_slice(&slice.to_vec());
            }
        }
        Ok(())
    }

    /// Bytes of the rows.
    fn check(&self, tokens: &[u32], rows: &[Buffer]) -> Result<usize, Error> {
        if self.feed.is_none() {
            return Err(lost());
        }
        if tokens.is_empty() {
            return Err(Error::input("tokens", "none", "at least one"));
        }
        if let Some(at) = rows.iter().position(|some| !some.is_memory()) {
            let allowed = "memory of this process";
            return Err(Error::input(format!("rows[{at}]"), "a device's", allowed));
        }
        let (bytes, count) = (rows.iter().map(Buffer::len).sum::<usize>(), tokens.len());
        if bytes == 0 {
            return Err(Error::input("rows", "0 bytes", "those of the tokens"));
        }
        let said = || format!("{bytes} bytes for {count} tokens");
        let is_cut = count > self.room();
        if is_cut && !bytes.is_multiple_of(count) {
            let allowed = format!(
                "as many for each token, beyond the {} that the piece has room for",
                self.room()
            );
            return Err(Error::input("rows", said(), allowed));
        }
        // Of the piece that is being filled, and of one that the chunk fills alone.
        let (head, each) = match is_cut {
            true => (
                bytes / count * self.room(),
                bytes / count * self.piece_tokens.min(count),
            ),
            false => (bytes, 0),
        };
        if (self.part.len() + head).max(each) as u64 > PART_MAX {
            return Err(Error::input("rows", said(), "1GiB at most in a piece"));
        }
        let (all, pieces) = (
            self.tokens.len() + count,
            (self.tokens.len() + count) / self.piece_tokens,
        );
        if (5 * all + 48 * pieces + 4096) as u64 > MANIFEST_MAX {
            let allowed = "what a manifest of 256MiB has room for";
            return Err(Error::input(
                "tokens",
                format!("{all}, all together"),
                allowed,
            ));
        }
        Ok(bytes)
    }
}

fn lost() -> Error {
    Error::input("stream", "one that has ended", "one that is open")
}

/// So many bytes of some buffers, from a place in them on.
fn cut(rows: &[Buffer], from: usize, len: usize) -> Result<Vec<Buffer>, Error> {
    let (mut before, mut left, mut some) = (from, len, Vec::new());
    for buffer in rows {
        let skipped = before.min(buffer.len());
        before -= skipped;
        let count = left.min(buffer.len() - skipped);
        left -= count;
        if count > 0 {
            let slice = buffer.slice(skipped, count);
            some.push(slice.map_err(kvdepot_store::Error::from)?);
        }
    }
    Ok(some)
}
