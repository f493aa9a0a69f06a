//! Versions of a file that is read again after each change.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

/// Modification time, length and inode number of a file; those of a new file differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileVersion(SystemTime, u64, u64);

impl FileVersion {
    /// Returns the version of the file at `path`; `None` if its metadata cannot be read.
    #[must_use]
    pub fn of(path: &Path) -> Option<FileVersion> {
        let meta = std::fs::metadata(path).ok()?;
        Some(FileVersion(meta.modified().ok()?, meta.len(), meta.ino()))
    }
}
