//! What lies at a path or behind a descriptor, and the making of new files.

use super::dax::{self, Geometry};
use super::mapping::Kind;
use crate::error::{Error, Result};
use rustix::fs::{FallocateFlags, FileType, Mode, SealFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

/// A path as it stands in errors.
pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Refuses what cannot be mapped.
pub(super) fn check_kind(path: &Path, stat: &Stat) -> Result<()> {
    let found = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::CharacterDevice => return Ok(()),
        FileType::Symlink => {
            return Err(Error::SymbolicLink {
                path: path.to_path_buf(),
            });
        }
        FileType::Directory => "a directory",
        FileType::BlockDevice => "a block device",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        _ => "of an unknown kind",
    };
    Err(Error::WrongKind {
        path: path.to_path_buf(),
        found,
    })
}

/// Refuses files of other users, and those that others may write.
pub(super) fn check_owner(path: &Path, stat: &Stat) -> Result<()> {
    let expected = rustix::process::geteuid().as_raw();
    if stat.st_uid != expected {
        let path = path.to_path_buf();
        return Err(Error::ForeignOwner {
            path,
            owner: stat.st_uid,
            expected,
        });
    }
    if stat.st_mode & 0o022 != 0 {
        return Err(Error::OpenMode {
            path: path.to_path_buf(),
            mode: stat.st_mode & 0o7777,
        });
    }
    Ok(())
}

/// The kind and the length of what `fd` refers to.
pub(super) fn extent_of(fd: &OwnedFd, stat: &Stat, path: Option<&Path>) -> Result<(Kind, u64)> {
    if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice {
        let device = path.unwrap_or_else(|| Path::new("a character device"));
        let Geometry { size, align } = dax::probe(Path::new("/sys"), device, stat.st_rdev)?;
        return Ok((Kind::Dax, size / align * align));
    }
    let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|s| s.contains(SealFlags::SHRINK));
    let kind = if sealed { Kind::Anonymous } else { Kind::File };
    Ok((kind, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// Gives the file its length, with its space.
pub(super) fn allocate(fd: &OwnedFd, path: &Path, len: u64) -> Result<()> {
    loop {
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            // The file system cannot allocate ahead: only written bytes have their space for sure.
            Err(Errno::OPNOTSUPP) => return write_zeros(fd, path, len),
            Err(errno) => return Err(Error::io("allocate the space of", shown(path), errno)),
        }
    }
}

fn write_zeros(fd: &OwnedFd, path: &Path, len: u64) -> Result<()> {
    let zeros = vec![0; 1 << 20];
    let mut at = 0;
    while at < len {
        let now = (len - at).min(zeros.len() as u64) as usize;
        match rustix::io::pwrite(fd, &zeros[..now], at) {
            Ok(written) => at += written as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("allocate the space of", shown(path), errno)),
        }
    }
    Ok(())
}

/// Makes a new file's length and name survive a power cut, and its mode what it shall be.
pub(super) fn sync_new(fd: &OwnedFd, path: &Path) -> Result<()> {
    let fail = |errno: Errno| Error::io("sync", shown(path), errno);
    rustix::fs::fchmod(fd, Mode::RUSR | Mode::WUSR).map_err(fail)?;
    rustix::fs::fsync(fd).map_err(fail)?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(parent)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| Error::io("sync the directory of", shown(path), error))
}
