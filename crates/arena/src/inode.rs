//! What lies at a path, whatever the path is called.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::error::Error;
use crate::medium::Medium;

/// The identity of a file or device, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    device: u64,
    inode: u64,
}

impl Inode {
    /// Returns the identity of the object at `path`, or `None` if nothing exists there.
    pub fn of(path: &Path) -> Option<Inode> {
        Some(Inode::from(&std::fs::metadata(path).ok()?))
    }

    /// Of what is mapped from `path`, whatever that leads to now.
    pub(crate) fn behind(path: &Path, medium: &dyn Medium) -> Result<Inode, Error> {
        Ok(Inode::from(&metadata(path, medium)?))
    }
}

/// Of the file that is mapped from `path`.
pub(crate) fn metadata(path: &Path, medium: &dyn Medium) -> Result<Metadata, Error> {
    let twin = medium.opened().fd()?.try_clone_to_owned();
    let data = twin.and_then(|twin| File::from(twin).metadata());
    data.map_err(|source| Error::Io {
        path: path.into(),
        source,
    })
}

impl From<&Metadata> for Inode {
    fn from(data: &Metadata) -> Inode {
        // One device may have several nodes.
        let kind = data.file_type();
        let (device, inode) = match (kind.is_char_device(), kind.is_block_device()) {
            (true, _) => (data.rdev(), 0),
            (_, true) => (data.rdev(), u64::MAX),
            _ => (data.dev(), data.ino()),
        };
        Inode { device, inode }
    }
}
