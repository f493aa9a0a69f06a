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

/// Description of a session at the end of a [`Stream`].
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Ending<'a> {
    /// Rendered text of the tokens, like [`Checkpoint::text`].
    pub text: &'a [u8],
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Size of the engine's context, in tokens.
    pub context_tokens: u32,
    /// Names and contents of the parts that do not grow with the tokens, 1 byte to 1 GiB each.
    pub objects: Vec<(String, Buffer)>,
    /// Note of the engine or its user.
    pub note: String,
    /// Time of the checkpoint, in Unix seconds.
    pub created: u64,
}

/// Save of a session whose length is not known yet.
///
/// Rows arrive in chunks. A piece is stored when it is full; in memory are the piece that is being
/// filled, and the previous one until it is stored. The session exists after
/// [`commit`](Stream::commit).
///
/// If a stream is dropped, its stored parts are removed, except those that a session names. If the
/// process is killed, they remain as blocks: the next save of these tokens finds them, or they are
/// evicted, or [`sweep`](Sessions::sweep) removes them.
///
/// # Examples
/// ```
/// use kvdepot_session::{Ending, Reason, Sessions, Spec};
/// use kvdepot_store::{Buffer, Config, Depot, NamespaceSpec};
///
/// # let dir = tempfile::tempdir()?;
/// # let posix = serde_json::json!({"path": dir.path(), "capacity": "64MiB"});
/// # let config = Config::new("Posix", &serde_json::json!({"socket": "off", "posix": posix}))?;
/// # let spec = Spec::new(NamespaceSpec {
/// #     model: "m".into(),
/// #     dtype: "f16".into(),
/// #     block_tokens: 256,
/// #     ..NamespaceSpec::default()
/// # });
/// # let depot = Depot::open(&config)?;
/// let sessions = Sessions::open(depot, &spec)?; // 256 tokens per piece
/// let mut stream = sessions.stream(&[])?;
/// for first in (0..1000).step_by(10) {
///     let tokens: Vec<u32> = (first..first + 10).collect();
///     stream.append(&tokens, &[Buffer::from_vec(vec![7; 1000])])?; // 100 bytes per token
/// }
/// let saved = stream.commit(Ending {
///     text: b"",
///     reason: Reason::Continued,
///     context_tokens: 4096,
///     objects: Vec::new(),
///     note: String::new(),
///     created: 1_700_000_000,
/// })?;
/// assert_eq!(saved.cache_write_tokens, 1000);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
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
    /// Begins a session of unknown length.
    ///
    /// `known` are the tokens that are known already, or an empty slice. Full pieces of these
    /// tokens that are already stored become part of the session. [`append`](Stream::append) then
    /// continues after [`cached_tokens`](Stream::cached_tokens), beginning with the rest of
    /// `known`.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails.
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
    /// Returns the number of leading tokens that were already stored; rows are needed from this
    /// token on.
    #[must_use]
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// Returns all tokens so far.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the number of tokens that the current piece can still take.
    #[must_use]
    pub fn room(&self) -> usize {
        self.piece_tokens - self.tokens.len() % self.piece_tokens
    }

    /// Returns the number of bytes that were stored or are being stored.
    #[must_use]
    pub fn bytes_written(&self) -> u64 {
        self.feed.as_ref().map_or(0, Feed::bytes_written)
    }

    /// Adds tokens and their rows.
    ///
    /// `rows` are the buffers of the rows in the order of `tokens`; any number of buffers is
    /// allowed. A chunk of more than [`room`](Stream::room) tokens is split, and must have the same
    /// number of bytes for each token. A smaller chunk may have any layout that the engine can read
    /// again.
    ///
    /// A piece that is in one chunk is stored without a copy. All other rows are copied. The caller
    /// may reuse the memory when this call returns.
    ///
    /// # Errors
    /// [`Error::Input`] if an argument is not allowed, before any byte is moved. If the session
    /// becomes too large for the depot, or after any other error, the stream has ended, and its
    /// stored parts are removed.
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

    /// Stores the rest, and creates the session.
    ///
    /// # Errors
    /// [`Error::Input`] if a field of `ending` is not allowed, before any byte is moved. If the
    /// session is too large for the depot, or after any other error as of [`Sessions::save`], the
    /// session does not exist, and its stored parts are removed.
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

    /// Ends the stream without a session, and removes its stored parts, except those that a session
    /// names.
    ///
    /// Dropping a stream does this too, but cannot report errors.
    ///
    /// # Errors
    /// [`Error::Depot`] if the depot fails. Parts that could not be removed remain as ordinary
    /// blocks.
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
            return Err(Error::input("tokens", "none", "at least one token"));
        }
        if let Some(at) = rows.iter().position(|some| !some.is_memory()) {
            let allowed = "host memory";
            return Err(Error::input(
                format!("rows[{at}]"),
                "device memory",
                allowed,
            ));
        }
        let (bytes, count) = (rows.iter().map(Buffer::len).sum::<usize>(), tokens.len());
        if bytes == 0 {
            return Err(Error::input(
                "rows",
                "0 bytes",
                "the rows of all given tokens",
            ));
        }
        let said = || format!("{bytes} bytes for {count} tokens");
        let is_cut = count > self.room();
        if is_cut && !bytes.is_multiple_of(count) {
            let allowed = format!(
                "the same number of bytes per token, because only {} of the tokens fit into the \
                 current piece",
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
            return Err(Error::input("rows", said(), "at most 1GiB per piece"));
        }
        let (all, pieces) = (
            self.tokens.len() + count,
            (self.tokens.len() + count) / self.piece_tokens,
        );
        if (5 * all + 48 * pieces + 4096) as u64 > MANIFEST_MAX {
            let allowed = "a session whose manifest has at most 256MiB";
            return Err(Error::input("tokens", format!("{all} in total"), allowed));
        }
        Ok(bytes)
    }
}

fn lost() -> Error {
    Error::input("stream", "an ended stream", "an open stream")
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
