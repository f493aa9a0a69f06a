//! A session's file of what is all in memory.

use std::path::Path;
use std::sync::Arc;

use kvdepot_store::{BlockBuffers, Buffer};

use super::checkpoint::{FileCheckpoint, FileSaved};
use super::mover::FileMover;
use super::write::SessionWriter;
use crate::error::Error;

/// Saves a session as the file `path`, from memory and without copies.
///
/// `pieces` has one block of buffers per piece, or none for a state that is not cut by tokens.
/// `objects` has names and contents. A file with the name `path` is replaced when the new one is
/// complete. [`SessionFile`](super::SessionFile) has an example.
///
/// # Errors
/// [`Error::Input`] if an argument is not allowed, before any byte is moved, and [`Error::Io`] or
/// [`Error::Depot`] if the file cannot be written. Then no new file remains, and an earlier one is
/// unchanged.
pub fn save_file(
    mover: &Arc<FileMover>,
    path: &Path,
    checkpoint: &FileCheckpoint<'_>,
    pieces: &BlockBuffers,
    objects: &[(String, Buffer)],
) -> Result<FileSaved, Error> {
    let mut writer = SessionWriter::new(mover, path, checkpoint, None)?;
    writer.put_all(pieces, objects)?;
    writer.finish()
}
