//! The caller's memory, one block a key, each in one or many pieces.

use kvdepot_arena::Error;
use kvdepot_media::{Buffer, PART_LEN_MAX, first_overlap};

/// Memory of the caller for one call: for each key, the pieces of its payload in order.
///
/// A put gathers the payload of a key from its pieces, and a get scatters the payload into them.
///
/// # Examples
///
/// ```
/// use kvdepot_store::{BlockBuffers, Buffer};
///
/// // One block in two pieces, for example the keys and the values of a layer.
/// let memory = Buffer::from_vec(vec![0; 8192]);
/// let mut buffers = BlockBuffers::default();
/// buffers.push([memory.slice(4096, 4096)?, memory.slice(0, 4096)?]);
/// assert_eq!((buffers.len(), buffers.bytes(0)), (1, 8192));
/// buffers.check(1, true)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct BlockBuffers {
    pieces: Vec<Buffer>,
    /// `ends[i]` is one past the last piece of key `i`.
    ends: Vec<usize>,
    /// `lens[i]` is the payload length of key `i`, in bytes.
    lens: Vec<u64>,
}

impl BlockBuffers {
    /// Creates buffers with one piece per key, in the order of the keys.
    #[must_use]
    pub fn whole(buffers: impl IntoIterator<Item = Buffer>) -> BlockBuffers {
        let mut blocks = BlockBuffers::default();
        for buffer in buffers {
            blocks.push([buffer]);
        }
        blocks
    }

    /// Adds the pieces of the next key, in payload order.
    pub fn push(&mut self, pieces: impl IntoIterator<Item = Buffer>) {
        let before = self.pieces.len();
        self.pieces.extend(pieces);
        let lens = self.pieces[before..].iter().map(|piece| piece.len() as u64);
        self.lens.push(lens.fold(0, u64::saturating_add));
        self.ends.push(self.pieces.len());
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns true if there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the pieces of key `index`, in payload order.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`BlockBuffers::len`].
    #[must_use]
    pub fn pieces(&self, index: usize) -> &[Buffer] {
        let begin = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.pieces[begin..self.ends[index]]
    }

    /// Returns the payload length of key `index`, in bytes.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`BlockBuffers::len`].
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

    /// Checks the buffers for a call of `keys` keys.
    ///
    /// `written` is true if the call writes into the buffers, as a get does.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] in each of these cases:
    ///
    /// * The number of blocks in the buffers differs from `keys`.
    /// * A block has 0 bytes, or more than [`PART_LEN_MAX`] bytes.
    /// * The pieces are on different devices, or on a device and in memory of this process.
    /// * `written` is true, and a piece is read-only or two pieces overlap.
    pub fn check(&self, keys: usize, written: bool) -> Result<(), Error> {
        if self.len() != keys {
            return Err(Error::input(
                "buffers",
                format!("{} buffers for {keys} keys", self.len()),
                "one buffer per key",
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
                format!("at most {PART_LEN_MAX} bytes per block"),
            ));
        }
        let device = |piece: &Buffer| piece.device().map(|device| device.ordinal());
        let first = self.pieces.first().and_then(device);
        let foreign = |index: &usize| self.pieces(*index).iter().any(|one| device(one) != first);
        if let Some(index) = (0..self.len()).find(foreign) {
            return Err(Error::input(
                format!("buffers[{index}]"),
                "memory of a different device than the first buffer",
                "buffers that are all on one device or all in host memory",
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
                    "overlapping destinations at {:#x}",
                    self.pieces[one].addr().max(self.pieces[other].addr())
                ),
                "destinations that do not overlap",
            )),
            None => Ok(()),
        }
    }
}
