//! Parts of a session, some at a time: for who has no room for all of it.

use std::ops::Range;

use kvdepot_store::{Key, Namespace};

use crate::error::Error;
use crate::restore::Found;
use crate::store::{Sessions, read_all};

impl Sessions {
    /// The rows of these pieces of a session, None for one that is not there or does not verify.
    /// Unlike [`restore`](Sessions::restore) it marks nothing as bad.
    ///
    /// # Errors
    /// [`Error::Input`] for pieces that it does not have, and those of the depot.
    pub fn read_pieces(
        &self,
        found: &Found,
        pieces: Range<usize>,
    ) -> Result<Vec<Option<Vec<u8>>>, Error> {
        let bytes = found.manifest.piece_bytes.iter().copied();
        let all: Vec<(Key, u64)> = found.manifest.keys().into_iter().zip(bytes).collect();
        self.read_parts("pieces", &self.pieces, &all, pieces)
    }

    /// The same of its objects.
    ///
    /// # Errors
    /// Likewise.
    pub fn read_objects(
        &self,
        found: &Found,
        objects: Range<usize>,
    ) -> Result<Vec<Option<Vec<u8>>>, Error> {
        let bytes = found.objects.iter().map(|one| one.bytes);
        let all: Vec<(Key, u64)> = found
            .manifest
            .object_keys()
            .into_iter()
            .zip(bytes)
            .collect();
        self.read_parts("objects", &self.objects, &all, objects)
    }

    fn read_parts(
        &self,
        what: &str,
        from: &Namespace,
        all: &[(Key, u64)],
        some: Range<usize>,
    ) -> Result<Vec<Option<Vec<u8>>>, Error> {
        let parts = all.get(some.clone()).ok_or_else(|| {
            let allowed = format!("some of the {} that there are", all.len());
            Error::input(what, format!("{some:?}"), allowed)
        })?;
        read_all(from, parts, self.timeout)
    }
}
