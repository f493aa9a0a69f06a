//! The caller's memory, one block a key, each in one or many pieces.

use kvdepot_arena::Error;
use kvdepot_media::{Buffer, PART_LEN_MAX, first_overlap};

/// Caller's buffers of a call: for each key the pieces that its payload is gathered from or
/// scattered to, in payload order.
#[derive(Clone, Default)]
pub struct BlockBuffers {
    pieces: Vec<Buffer>,
    /// `ends[i]` is one past the last piece of key `i`.
    ends: Vec<usize>,
    /// `lens[i]` is the payload length of key `i`, in bytes.
    lens: Vec<u64>,
}

impl BlockBuffers {
    /// One buffer a key.
    #[must_use]
    pub fn whole(buffers: impl IntoIterator<Item = Buffer>) -> BlockBuffers {
        let mut blocks = BlockBuffers::default();
        for buffer in buffers {
            blocks.push([buffer]);
        }
        blocks
    }

    /// Adds the next key's pieces.
    pub fn push(&mut self, pieces: impl IntoIterator<Item = Buffer>) {
        let before = self.pieces.len();
        self.pieces.extend(pieces);
        let lens = self.pieces[before..].iter().map(|piece| piece.len() as u64);
        self.lens.push(lens.fold(0, u64::saturating_add));
        self.ends.push(self.pieces.len());
    }

    /// How many keys they are for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The pieces of key `index`.
    #[must_use]
    pub fn pieces(&self, index: usize) -> &[Buffer] {
        let begin = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.pieces[begin..self.ends[index]]
    }

    /// Payload bytes of key `index`.
    #[must_use]
    pub fn bytes(&self, index: usize) -> u64 {
        self.lens[index]
    }

    /// Whether they are memory of a device.
    pub(crate) fn on_device(&self) -> bool {
        self.pieces
            .first()
            .is_some_and(|piece| piece.device().is_some())
    }

    /// Refuses buffers that do not fit the keys, are empty or too long, or (for destinations) are
    /// read-only or overlap.
    pub fn check(&self, keys: usize, written: bool) -> Result<(), Error> {
        if self.len() != keys {
            return Err(Error::input(
                "buffers",
                format!("{} for {keys} keys", self.len()),
                "one buffer a key",
            ));
        }
        if let Some(index) = (0..self.len()).find(|index| self.bytes(*index) == 0) {
            return Err(Error::input(
                format!("buffers[{index}]"),
                "0 bytes",
                "at least one byte",
            ));
        }
        if let Some(index) = (0..self.len()).find(|index| self.bytes(*index) > PART_LEN_MAX) {
            return Err(Error::input(
                format!("buffers[{index}]"),
                format!("{} bytes", self.bytes(index)),
                format!("at most {PART_LEN_MAX} bytes a block"),
            ));
        }
        let device = |piece: &Buffer| piece.device().map(|device| device.ordinal());
        let first = self.pieces.first().and_then(device);
        let foreign = |index: &usize| self.pieces(*index).iter().any(|one| device(one) != first);
        if let Some(index) = (0..self.len()).find(foreign) {
            return Err(Error::input(
                format!("buffers[{index}]"),
                "memory of another device than this process's or the first buffer's",
                "all on one device, or all in this process's memory",
            ));
        }
        if !written {
            return Ok(());
        }
        if let Some(index) = (0..self.len())
            .find(|index| self.pieces(*index).iter().any(|piece| !piece.is_writable()))
        {
            return Err(Error::input(
                format!("buffers[{index}]"),
                "read-only memory",
                "writable memory",
            ));
        }
        match first_overlap(&self.pieces) {
            Some((one, other)) => Err(Error::input(
                "buffers",
                format!(
                    "two destinations that share the byte at {:#x}",
                    self.pieces[one].addr().max(self.pieces[other].addr())
                ),
                "destinations that do not overlap",
            )),
            None => Ok(()),
        }
    }
}
