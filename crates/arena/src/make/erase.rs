//! Removing an arena as a whole.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_media::Kind;

use crate::clock;
use crate::device;
use crate::error::Error;
use crate::format::{layout, superblock};
use crate::inode::Inode;
use crate::medium::{self, Medium, Shared};
use crate::options::Access;
use crate::owner_lock::OwnerLock;

/// Removes the arena at `path` and returns the size of its medium in bytes.
///
/// A file is deleted; on a device both superblocks are overwritten. The arena may be damaged, but
/// anything else is rejected.
///
/// # Errors
///
/// * [`Error::Locked`] if a process owns the arena.
/// * [`Error::Input`] if workers of its last owner are still running.
/// * [`Error::Corrupt`] if the path is not an arena.
/// * [`Error::Media`] and [`Error::Io`] if a system call fails.
pub fn erase(path: &Path) -> Result<u64, Error> {
    let medium = open_erasable(path)?;
    let lock = OwnerLock::acquire(path, medium.as_ref(), (clock::now(), Duration::ZERO))?;
    let used = |allowed| Error::input("path", path.display(), allowed);
    let _claim = device::claim(path, medium.as_ref(), &used)?;
    // A start that failed has removed it just now, and another may have made one there since.
    if !begins_like_an_arena(medium.as_ref())? {
        return Err(stays(path));
    }
    if !lock.alone(medium.as_ref()) {
        return Err(Error::input(
            "path",
            path.display(),
            "an arena without running workers; end the workers of its last owner first",
        ));
    }
    unmake(path, medium.as_ref())?;
    Ok(medium.len())
}

/// Checks that [`erase`] would find an arena at `path`, which may be damaged or owned.
///
/// # Errors
///
/// [`Error::Corrupt`] if the file is not an arena, [`Error::Media`] if the path cannot be an arena.
pub fn check_erasable(path: &Path) -> Result<(), Error> {
    open_erasable(path).map(drop)
}

/// Opens the medium of an arena that is to be removed.
fn open_erasable(path: &Path) -> Result<Shared, Error> {
    let is_block = path
        .metadata()
        .is_ok_and(|found| found.file_type().is_block_device());
    let access = match is_block {
        true => Access::Direct,
        false => Access::Mapped,
    };
    let medium = medium::open(path, access).map_err(|error| match error {
        kvdepot_media::Error::TooSmall { .. } => stays(path),
        other => other.into(),
    })?;
    match begins_like_an_arena(medium.as_ref())? {
        true => Ok(medium),
        false => Err(stays(path)),
    }
}

fn stays(path: &Path) -> Error {
    Error::Corrupt {
        path: path.into(),
        reason: "the content is not a kvdepot arena; nothing was removed".into(),
    }
}

/// The end of an arena whose owner this process is.
pub(crate) fn unmake(path: &Path, medium: &dyn Medium) -> Result<(), Error> {
    // A process that waits for our lock has the file open already: it must find no arena in it,
    // or it would work in a file without a name.
    let zeros = [0; superblock::LEN];
    for offset in [0, layout::SUPERBLOCK_B] {
        medium.write_at(offset, &zeros)?;
        medium.sync_one(offset, superblock::LEN as u64)?;
    }
    // Nobody who removes a file by other means asks for our lock, and what is there now may be
    // somebody else's.
    let is_there = Inode::of(path) == Some(Inode::behind(path, medium)?);
    if medium.opened().kind() == Kind::File && is_there {
        std::fs::remove_file(path).map_err(|source| Error::Io {
            path: path.into(),
            source,
        })?;
    }
    Ok(())
}

/// A file that goes again unless it is [kept](Fresh::keep), while the lock on it is held.
#[derive(Debug)]
pub(crate) struct Fresh(pub(crate) PathBuf, pub(crate) Shared);

impl Fresh {
    pub(crate) fn keep(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if self.0.as_os_str().is_empty() {
            return;
        }
        match unmake(&self.0, self.1.as_ref()) {
            Ok(()) => tracing::info!(path = %self.0.display(), "incomplete new arena removed"),
            Err(error) => tracing::warn!(%error,
                "cannot delete the incomplete file of a new arena"),
        }
    }
}

fn begins_like_an_arena(medium: &dyn Medium) -> Result<bool, Error> {
    let mut found = false;
    for offset in [0, layout::SUPERBLOCK_B] {
        let mut magic = [0; superblock::MAGIC.len()];
        if offset + magic.len() as u64 <= medium.len() {
            medium.read_at(offset, &mut magic)?;
            found |= magic == superblock::MAGIC;
        }
    }
    Ok(found)
}
