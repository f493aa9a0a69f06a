//! Pieces that are stored one after another, long before a manifest names them: of a stream, of a
//! serializer, of a background save. What comes to nothing is removed again.

use kvdepot_store::{BlockBuffers, Buffer, Task};

use crate::chain::Link;
use crate::error::Error;
use crate::save::{Checkpoint, Held, Pieces, Saved, Written, step};
use crate::store::{Sessions, check_size};
use crate::upkeep::Parts;

/// The pieces of a session that does not exist yet.
pub(crate) struct Feed {
    pub(crate) sessions: Sessions,
    links: Vec<Link>,
    pieces: Pieces,
    written: Written,
    /// What was there stays until the manifest names it, where a tier can hold it.
    held: Held,
    /// What is being stored of memory of its own, and its bytes.
    owned: Option<(Task, u64)>,
    /// The same of the caller's memory.
    lent: Vec<(Task, u64)>,
    /// Bytes that the session may have.
    pub(crate) size_max: u64,
    is_over: bool,
}

impl Feed {
    pub(crate) fn new(sessions: &Sessions) -> Feed {
        let space = sessions.pieces.clone();
        Feed {
            sessions: sessions.clone(),
            links: Vec::new(),
            pieces: Pieces::default(),
            written: Written::default(),
            held: Held {
                space,
                pins: Vec::new(),
            },
            owned: None,
            lent: Vec::new(),
            size_max: sessions.size_max(),
            is_over: false,
        }
    }

    /// One for all pieces of these links, of which some may be there.
    pub(crate) fn of(sessions: &Sessions, links: Vec<Link>) -> Result<Feed, Error> {
        let mut feed = Feed::new(sessions);
        feed.pieces.keys = links.iter().map(|link| link.key()).collect();
        feed.links = links;
        (feed.pieces.bytes, feed.held) = sessions.there(&feed.pieces.keys)?;
        Ok(feed)
    }

    /// Refuses a session that has these bytes of pieces that are missing, and of other parts,
    /// beside what is there: no tier could keep it whole.
    pub(crate) fn check_size(&self, more: impl Iterator<Item = u64>) -> Result<(), Error> {
        let there = self.pieces.bytes.iter().copied();
        check_size(self.size_max, there.chain(more))
    }

    /// Bytes of all pieces that are there.
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.bytes.iter().sum()
    }

    /// The last link.
    pub(crate) fn end(&self) -> Option<Link> {
        self.links.last().copied()
    }

    /// Pieces that are not there.
    pub(crate) fn missing(&self) -> Vec<usize> {
        self.pieces.missing()
    }

    /// Bytes that were stored.
    pub(crate) fn bytes_written(&self) -> u64 {
        self.written.bytes
    }

    /// Keeps only the pieces before the first that is not there; how many.
    pub(crate) fn cut(&mut self) -> usize {
        let there = self.pieces.bytes.iter().take_while(|bytes| **bytes > 0);
        let count = there.count();
        self.links.truncate(count);
        self.pieces.keys.truncate(count);
        self.pieces.bytes.truncate(count);
        count
    }

    /// Another piece behind the last one; its number.
    pub(crate) fn push(&mut self, link: Link) -> usize {
        self.links.push(link);
        self.pieces.keys.push(link.key());
        self.pieces.bytes.push(0);
        self.links.len() - 1
    }

    /// Begins to store a piece, unless it is there by now. The one before is stored when this
    /// returns: no more than one such piece is kept in memory.
    pub(crate) fn store(&mut self, piece: usize, rows: Vec<u8>) -> Result<(), Error> {
        self.settle()?;
        self.owned = self.begin(piece, [Buffer::from_vec(rows)])?;
        Ok(())
    }

    /// The same of a piece in the caller's memory, which is read until
    /// [`settle`](Feed::settle) returns.
    pub(crate) fn store_lent(&mut self, piece: usize, rows: Vec<Buffer>) -> Result<(), Error> {
        let begun = self.begin(piece, rows)?;
        self.lent.extend(begun);
        Ok(())
    }

    fn begin(
        &mut self,
        piece: usize,
        rows: impl IntoIterator<Item = Buffer>,
    ) -> Result<Option<(Task, u64)>, Error> {
        let key = self.pieces.keys[piece];
        let (there, mut held) = self.sessions.there(&[key])?;
        if let Some(there) = there.into_iter().find(|bytes| *bytes > 0) {
            self.pieces.bytes[piece] = there;
            self.held.pins.append(&mut held.pins);
            return Ok(None);
        }
        let mut block = BlockBuffers::default();
        block.push(rows);
        let bytes = block.bytes(0);
        self.written.pieces.insert(piece);
        self.written.bytes += bytes;
        self.pieces.bytes[piece] = bytes;
        Ok(Some((self.sessions.pieces.put(vec![key], block)?, bytes)))
    }

    /// Waits until all is stored that was begun.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        let lent = self.settle_lent();
        let owned = match self.owned.take() {
            Some(begun) => self.stored(begun),
            None => Ok(()),
        };
        lent.and(owned)
    }

    /// Waits until nobody reads the caller's memory.
    pub(crate) fn settle_lent(&mut self) -> Result<(), Error> {
        let mut all = Ok(());
        for begun in std::mem::take(&mut self.lent) {
            let stored = self.stored(begun);
            all = all.and(stored);
        }
        all
    }

    fn stored(&self, (task, bytes): (Task, u64)) -> Result<(), Error> {
        self.sessions.stored("a piece", &task, bytes)?;
        step("a piece is stored");
        Ok(())
    }

    /// Makes it a session, in place of those of the same tokens.
    pub(crate) fn commit(mut self, checkpoint: Checkpoint<'_>) -> Result<Saved, Error> {
        self.settle()?;
        let before = self.sessions.index.read().same(checkpoint.tokens);
        let end = self
            .end()
            .ok_or_else(|| Error::input("tokens", "none", "at least one token"))?;
        let pieces = std::mem::take(&mut self.pieces);
        let keys = pieces.keys.clone();
        let saved = self
            .sessions
            .commit(checkpoint, end, pieces, &mut self.written, &before);
        self.pieces.keys = keys;
        self.is_over = saved.is_ok();
        saved
    }

    /// Removes what was stored and no session names.
    pub(crate) fn undo(mut self) -> Result<(), Error> {
        self.end_unnamed()
    }

    fn end_unnamed(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.is_over, true) {
            return Ok(());
        }
        // What was not stored is no matter now.
        let _stored = self.settle();
        let pieces = self.written.pieces.iter();
        let pieces = pieces.filter_map(|at| self.pieces.keys.get(*at).copied());
        let parts = Parts {
            pieces: pieces.collect(),
            objects: self.written.objects.iter().copied().collect(),
        };
        match self.links.first() {
            Some(first) => self.sessions.undo(*first, parts),
            None => Ok(()),
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        if let Err(error) = self.end_unnamed() {
            tracing::warn!(%error,
                "cannot delete the blocks of a failed save; the next sweep deletes the blocks");
        }
    }
}
