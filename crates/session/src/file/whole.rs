//! A session's file of what is all in memory.

use std::path::Path;
use std::sync::Arc;

use kvdepot_store::{BlockBuffers, Buffer};

use super::checkpoint::{FileCheckpoint, FileSaved};
use super::mover::FileMover;
use super::write::SessionWriter;
use crate::error::Error;

/// Saves a session as one file, straight from memory: its pieces, where it has any, each a block's
/// buffers, and its objects. A file that has the name is replaced once the new one is there.
///
/// # Errors
/// [`Error::Input`] before a byte moves, [`Error::Io`]. Nothing is left then, and a file that was
/// there before is there still.
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
