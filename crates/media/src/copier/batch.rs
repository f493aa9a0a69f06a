//! A batch, as whoever submits it sees it.

use super::cargo::{Cargo, DESTINATION, Part, SOURCE};
use super::shared::Shared;
use crate::buffer::Buffer;
use crate::checksum::{Checksum, PartId};
use crate::cuda::Device;
use crate::error::{Error, Result};
use crate::slab::Slab;
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
    /// its position in the batch; `tag` is the caller's own number for it.
    ///
    /// Its checksum is computed on the way, and compared if one is `expected`; the bytes are moved
    /// either way. Destinations of different parts must not overlap, and no part may write what
    /// another reads: their bytes would be unspecified (the checksums tell). The batch keeps the
    /// buffers' owners until every lane has stopped and the completion has run.
    ///
    /// # Errors
    ///
    /// The batch is then as it was. [`Error::Invalid`] for a part of no bytes or of more than
    /// [`PART_LEN_MAX`], [`Error::LengthMismatch`], [`Error::ReadOnly`], [`Error::Overlap`],
    /// [`Error::BatchFull`] beyond [`PARTS_MAX`], [`Error::OnDevice`] for sources on a device and
    /// destinations that are not all in the same one's memory.
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
        let device = self.device_of(dst)?;
        let index = self.add_buffers(Part::new(id, expected, tag, true), src, Some(dst))?;
        if let Some((slab, device)) = device {
            let cargo = self.cargo();
            (cargo.slab, cargo.device) = (Some(slab), Some(device));
        }
        Ok(index)
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
        self.add_buffers(Part::new(id, expected, tag, false), src, None)
    }

    /// Has all parts go through the staging slab: bytes are read into a region of it, hashed on the
    /// way, and carried from there to their destination, at any alignment.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when there is no memory for the slab, which the first batch takes.
    pub fn stage(&mut self) -> Result<()> {
        self.cargo().slab = Some(self.home.slab()?);
        Ok(())
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

    /// The device that `dst` belongs to, if it is one's, and the slab, pinned for it.
    fn device_of(&self, dst: &[Buffer]) -> Result<Option<(Arc<Slab>, Arc<Device>)>> {
        let first = dst.first().and_then(Buffer::device);
        let known = match self.cargo.as_ref().filter(|cargo| cargo.copies) {
            Some(cargo) => cargo.device.as_ref(),
            None => first,
        };
        let differs = |one: &&Buffer| one.device().map(Arc::as_ptr) != known.map(Arc::as_ptr);
        if let Some(other) = dst.iter().find(differs) {
            return Err(Error::OnDevice { addr: other.addr() });
        }
        let Some(device) = first else {
            return Ok(None);
        };
        let slab = self.home.slab()?;
        slab.pin_for(device);
        Ok(Some((slab, Arc::clone(device))))
    }

    fn add_buffers(&mut self, part: Part, src: &[Buffer], dst: Option<&[Buffer]>) -> Result<usize> {
        src.iter().try_for_each(Buffer::check_host)?;
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
