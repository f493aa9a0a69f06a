//! Parts of a session, some at a time: for who has no room for all of it.

use std::ops::Range;

use kvdepot_store::{Key, Namespace};

use crate::error::Error;
use crate::restore::Found;
use crate::store::{Sessions, read_all};

impl Sessions {
    /// Reads the rows of some pieces of a session, for callers without enough memory for the whole
    /// session.
    ///
    /// `pieces` is a range of indices into [`Found::pieces`]. The result has one entry per index:
    /// the rows, or `None` if the piece is missing or fails checksum verification. In contrast to
    /// [`restore`](Sessions::restore), this call does not mark the session as damaged.
    ///
    /// # Errors
    /// [`Error::Input`] if the session has fewer pieces, and [`Error::Depot`] if the depot fails.
    pub fn read_pieces(
        &self,
        found: &Found,
        pieces: Range<usize>,
    ) -> Result<Vec<Option<Vec<u8>>>, Error> {
        let bytes = found.manifest.piece_bytes.iter().copied();
        let all: Vec<(Key, u64)> = found.manifest.keys().into_iter().zip(bytes).collect();
        self.read_parts("pieces", &self.pieces, &all, pieces)
    }

    /// Reads some objects of a session.
    ///
    /// `objects` is a range of indices into [`Found::objects`]. The result has one entry per index:
    /// the bytes, or `None` if the object is missing or fails checksum verification.
    ///
    /// # Errors
    /// [`Error::Input`] if the session has fewer objects, and [`Error::Depot`] if the depot fails.
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
            let allowed = format!("a range within the {} that exist", all.len());
            Error::input(what, format!("{some:?}"), allowed)
        })?;
        read_all(from, parts, self.timeout)
    }
}
