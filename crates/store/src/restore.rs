//! How blocks are brought back.

use crate::buffers::BlockBuffers;
use crate::depot::Namespace;
use crate::pipeline::GetOptions;
use crate::task::Task;
use crate::{Error, Key};

impl Namespace {
    /// Brings blocks back into the caller's buffers; keys in prefix order.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves, [`Error::Closed`].
    pub fn get(&self, keys: Vec<Key>, buffers: BlockBuffers) -> Result<Task, Error> {
        self.get_with(keys, buffers, GetOptions::default())
    }

    /// As [`Namespace::get`], with options.
    ///
    /// # Errors
    /// As there, and [`Error::Media`] when there is no memory for the staging slab.
    pub fn get_with(
        &self,
        keys: Vec<Key>,
        buffers: BlockBuffers,
        options: GetOptions,
    ) -> Result<Task, Error> {
        self.core().get(self.id(), keys, buffers, options)
    }

    /// Brings the consecutive hits from the first key into the near tier, in the background;
    /// keys in prefix order. True for a key once its block is there; the rest are misses.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn prefetch(&self, keys: &[Key]) -> Result<Task, Error> {
        self.core().prefetch(self.id(), keys)
    }
}
