//! A batch, as whoever submits it sees it.

use super::cargo::{Cargo, DESTINATION, Part, Route, SOURCE};
use super::shared::Shared;
use crate::buffer::Buffer;
use crate::checksum::{Checksum, Mac, MacKey, PartId};
use crate::error::{Error, Result};
use kvdepot_plan::Range;
use std::sync::Arc;

/// A group of parts that are moved together. It reuses memory from earlier batches of its copier.
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

    /// Adds a part: the concatenated bytes of `src` are copied to the concatenated `dst`.
    ///
    /// Returns the position of the part in the batch. `tag` is the caller's number for the part.
    /// All buffers of one side must be memory of this process, or belong to one I/O backend; each
    /// part can use different ones.
    ///
    /// The copy threads compute the checksum of part `id` while they copy, and compare it if there
    /// is an `expected` one. The bytes are copied in either case.
    ///
    /// Destinations of different parts must not overlap, and no part may write bytes that another
    /// part reads. Otherwise these bytes are unspecified, and the checksums detect that. The batch
    /// keeps the owners of the buffers until all copy threads and backends have stopped and the
    /// completion has run.
    ///
    /// Bytes that a backend writes directly from source memory are hashed first. If the source
    /// changes in between, a later verification fails.
    ///
    /// # Errors
    ///
    /// The batch is then unchanged.
    ///
    /// * [`Error::Invalid`] for a part without bytes, or with more than [`PART_LEN_MAX`].
    /// * [`Error::LengthMismatch`], [`Error::ReadOnly`], [`Error::Overlap`].
    /// * [`Error::BatchFull`] for more than [`PARTS_MAX`] parts.
    /// * [`Error::MixedEnds`] for a side in several locations.
    /// * [`Error::Unaligned`] for destinations that the backend cannot write.
    /// * [`Error::Io`] if there is no memory for the staging buffer.
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
    /// Returns the position of the part in the batch.
    ///
    /// # Errors
    ///
    /// The errors of [`Batch::part`].
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

    /// Authenticates the part at position `index` too: the copy threads compute its MAC with `key`.
    ///
    /// If there is an `expected` MAC, they compare it. A part whose bytes or MAC differ does not
    /// match.
    pub fn authenticate(&mut self, index: usize, key: &Arc<MacKey>, expected: Option<Mac>) {
        self.cargo().authenticate(index, key, expected);
    }

    /// Routes copies within memory through the staging buffer.
    ///
    /// The copy threads read bytes into a region, hash them on the way, and copy them from there to
    /// their destination, at any alignment.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if there is no memory for the staging buffer, which the first such batch
    /// allocates.
    pub fn stage(&mut self) -> Result<()> {
        let slab = self.home.slab()?;
        let cargo = self.cargo();
        (cargo.slab, cargo.staged) = (Some(slab), true);
        Ok(())
    }

    /// Assigns the batch to the call `call`. All batches of a call take turns with other calls as
    /// one.
    ///
    /// This concerns copy threads, staging regions, I/O rings and I/O threads. `call` must be a
    /// number that no other call uses at the same time, such as the address of an object that the
    /// completions hold. Default: each batch is a separate call.
    pub fn of_call(&mut self, call: usize) {
        self.cargo().call = Some(call);
    }

    /// Keeps the digests of the leaves, for [`Done::leaves`](super::Done::leaves).
    pub fn keep_leaves(&mut self) {
        self.cargo().keeps_leaves = true;
    }

    /// Returns the number of parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cargo.as_ref().map_or(0, |cargo| cargo.parts.len())
    }

    /// Returns true if there are no parts yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the total length of all parts in bytes.
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
