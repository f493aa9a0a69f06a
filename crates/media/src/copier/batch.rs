//! A batch, as whoever submits it sees it.

use super::cargo::{Cargo, DESTINATION, Part, Route, SOURCE};
use super::shared::Shared;
use crate::buffer::Buffer;
use crate::checksum::{Checksum, Mac, MacKey, PartId};
use crate::error::{Error, Result};
use kvdepot_plan::Range;
use std::sync::Arc;

/// Parts that shall be moved together. Its memory comes from earlier batches of its copier.
#[derive(Debug)]
pub struct Batch {
    pub(super) cargo: Option<Cargo>,
    home: Arc<Shared>,
}

impl Batch {
    pub(super) fn new(cargo: Cargo, home: Arc<Shared>) -> Self {
        Self {
            cargo: Some(cargo),
            home,
        }
    }

    /// Whether `home` made this batch.
    pub(super) fn is_from(&self, home: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.home, home)
    }

    /// Adds a part: the bytes of `src`, one buffer after the other, go to those of `dst`. Returns
    /// its position in the batch; `tag` is the caller's own number for it. Each side lies at one
    /// end: memory of this process, or what one carrier reaches. Other parts may have others.
    ///
    /// Its checksum is computed on the way, and compared if one is `expected`; the bytes are moved
    /// either way. Destinations of different parts must not overlap, and no part may write what
    /// another reads: their bytes would be unspecified (the checksums tell). The batch keeps the
    /// buffers' owners until every lane and carrier has stopped and the completion has run. What
    /// goes straight to a carrier is hashed before: a source that changes meanwhile does not verify
    /// later.
    ///
    /// # Errors
    ///
    /// The batch is then as it was. [`Error::Invalid`] for a part of no bytes or of more than
    /// [`PART_LEN_MAX`], [`Error::LengthMismatch`], [`Error::ReadOnly`], [`Error::Overlap`],
    /// [`Error::BatchFull`] beyond [`PARTS_MAX`], [`Error::MixedEnds`] for a side that
    /// lies at several ends, [`Error::Unaligned`] for destinations that their carrier cannot write,
    /// [`Error::Io`] when there is no memory for the slab.
    ///
    /// [`PART_LEN_MAX`]: super::PART_LEN_MAX
    /// [`PARTS_MAX`]: super::PARTS_MAX
    pub fn part(
        &mut self,
        id: &PartId,
        src: &[Buffer],
        dst: &[Buffer],
        expected: Option<Checksum>,
        tag: u32,
    ) -> Result<usize> {
        if let Some(fixed) = dst.iter().find(|buffer| !buffer.is_writable()) {
            return Err(Error::ReadOnly { addr: fixed.addr() });
        }
        let route = Route {
            from: self.carrier_of(src)?,
            to: self.carrier_of(dst)?,
        };
        self.check_placed(dst, route)?;
        self.add_buffers(Part::new(id, expected, tag, (route, true)), src, Some(dst))
    }

    /// Adds a part that is only hashed, in place.
    ///
    /// # Errors
    ///
    /// As [`Batch::part`].
    pub fn hash_only(
        &mut self,
        id: &PartId,
        src: &[Buffer],
        expected: Option<Checksum>,
        tag: u32,
    ) -> Result<usize> {
        let route = Route {
            from: self.carrier_of(src)?,
            to: None,
        };
        self.add_buffers(Part::new(id, expected, tag, (route, false)), src, None)
    }

    /// Has the part at position `index` authenticated too: its MAC by this key is computed on the
    /// way, and compared if one is `expected`. A part whose bytes or MAC differ does not match.
    pub fn authenticate(&mut self, index: usize, key: &Arc<MacKey>, expected: Option<Mac>) {
        self.cargo().authenticate(index, key, expected);
    }

    /// Has copies in memory go through the staging slab: bytes are read into a region of it, hashed
    /// on the way, and carried from there to their destination, at any alignment.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when there is no memory for the slab, which the first batch takes.
    pub fn stage(&mut self) -> Result<()> {
        let slab = self.home.slab()?;
        let cargo = self.cargo();
        (cargo.slab, cargo.staged) = (Some(slab), true);
        Ok(())
    }

    /// Has all batches of `call` take turns with other calls as one: at lanes, regions, rings and
    /// threads. Default: each batch is a call. `call` is a number that no other call has at the
    /// same time, such as the address of what the completions hold.
    pub fn of_call(&mut self, call: usize) {
        self.cargo().call = Some(call);
    }

    /// Keeps the digests of leaves for whoever looks at what became of it
    /// ([`Done::leaves`](super::Done::leaves)).
    pub fn keep_leaves(&mut self) {
        self.cargo().keeps_leaves = true;
    }

    /// The number of parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cargo.as_ref().map_or(0, |cargo| cargo.parts.len())
    }

    /// Whether there are no parts yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of all parts together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.cargo.as_ref().map_or(0, |cargo| cargo.bytes)
    }

    /// The carrier of one side of a part; none for memory of this process.
    fn carrier_of(&mut self, side: &[Buffer]) -> Result<Option<u32>> {
        let Some(first) = side.first() else {
            return Ok(None);
        };
        let differs = |one: &&Buffer| !one.end().is(first.end());
        if let Some(other) = side.iter().find(differs) {
            return Err(Error::MixedEnds { addr: other.addr() });
        }
        if first.check_host().is_ok() {
            return Ok(None);
        }
        let home = Arc::clone(&self.home);
        self.cargo().carrier_of(first.end(), || home.slab())
    }

    /// Refuses destinations that cannot be written without what lies beside them.
    fn check_placed(&mut self, dst: &[Buffer], route: Route) -> Result<()> {
        let Some(alignment) = self.cargo().alignment(route.to) else {
            return Ok(());
        };
        for (number, buffer) in dst.iter().enumerate() {
            let (at, len) = (buffer.addr() as u64, buffer.len() as u64);
            let is_padded = number + 1 == dst.len() && buffer.is_padded();
            let len_fits = len.is_multiple_of(alignment.at) || is_padded;
            if !at.is_multiple_of(alignment.at) || !len_fits {
                let alignment = alignment.at;
                return Err(Error::Unaligned { at, len, alignment });
            }
        }
        Ok(())
    }

    fn add_buffers(&mut self, part: Part, src: &[Buffer], dst: Option<&[Buffer]>) -> Result<usize> {
        let cargo = self.cargo();
        let (mut from, mut to) = std::mem::take(&mut cargo.ranges);
        let range = |buffer: &Buffer| Range::new(buffer.addr() as u64, buffer.len() as u64);
        from.extend(src.iter().map(range));
        to.extend(dst.unwrap_or(src).iter().map(range));
        let added = cargo.add(part, &from, &to);
        from.clear();
        to.clear();
        cargo.ranges = (from, to);
        let index = added?;
        for buffer in src {
            cargo.hold_once(buffer.owner(), SOURCE);
        }
        for buffer in dst.unwrap_or(&[]) {
            cargo.hold_once(buffer.owner(), DESTINATION);
        }
        Ok(index)
    }

    /// Only `submit` takes it away, together with the batch.
    fn cargo(&mut self) -> &mut Cargo {
        self.cargo.get_or_insert_default()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(cargo) = self.cargo.take() {
            self.home.recycle(cargo);
        }
    }
}
