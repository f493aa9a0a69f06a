//! What lies at a path or behind a descriptor, and the making of new files.

use super::dax::{self, Geometry};
use crate::error::{Error, Result};
use rustix::fs::{FallocateFlags, FileType, Mode, SealFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

/// What lies under a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Anonymous shared memory (a memfd); gone with the last descriptor.
    Anonymous,
    /// A regular file.
    File,
    /// A device DAX character device: memory without a page cache in between.
    Dax,
}

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
pub(super) fn extent_of(
    fd: BorrowedFd<'_>,
    stat: &Stat,
    path: Option<&Path>,
) -> Result<(Kind, u64)> {
    if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice {
        let device = path.unwrap_or_else(|| Path::new("a character device"));
        let Geometry { size, align } = dax::probe(Path::new("/sys"), device, stat.st_rdev)?;
        return Ok((Kind::Dax, size / align * align));
    }
    let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|s| s.contains(SealFlags::SHRINK));
    let kind = if sealed { Kind::Anonymous } else { Kind::File };
    Ok((kind, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// What parts of a device DAX can be mapped by themselves.
pub(super) fn alignment_of(fd: BorrowedFd<'_>, subject: &str) -> Result<usize> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| Error::io("stat", subject, errno))?;
    let geometry = dax::probe(Path::new("/sys"), Path::new(subject), stat.st_rdev)?;
    Ok(geometry.align as usize)
}

/// Gives the first `len` bytes of a file their space; where the file system cannot do that ahead,
/// `instead` does: only written bytes have their space for sure.
pub(super) fn allocate(
    fd: BorrowedFd<'_>,
    subject: &str,
    len: u64,
    instead: impl Fn(BorrowedFd<'_>, &str, u64) -> Result<()>,
) -> Result<()> {
    loop {
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP) => return instead(fd, subject, len),
            Err(errno) => return Err(Error::io("allocate the space of", subject, errno)),
        }
    }
}

/// Whether a file is known to have all its space. Only a tmpfs counts it exactly; there asking for
/// it once more would look at every page, seconds for a large arena.
pub(super) fn has_no_holes(fd: BorrowedFd<'_>) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    let exact = rustix::fs::fstatfs(fd).is_ok_and(|system| system.f_type as u64 == TMPFS);
    exact && rustix::fs::fstat(fd).is_ok_and(|file| file.st_blocks * 512 >= file.st_size)
}

/// Writes zeros where the first `len` bytes of a file have no space, as far as its file system
/// tells. Nothing is lost by it: that is what holes hold.
pub(super) fn fill_holes(fd: BorrowedFd<'_>, subject: &str, len: u64) -> Result<()> {
    let seek = |whence| match rustix::fs::seek(fd, whence) {
        Ok(at) => Ok(at.min(len)),
        // No data behind the last hole.
        Err(Errno::NXIO) => Ok(len),
        Err(errno) => Err(Error::io("look for holes in", subject, errno)),
    };
    let mut at = 0;
    while at < len {
        let hole = seek(SeekFrom::Hole(at))?;
        at = seek(SeekFrom::Data(hole))?;
        write_zeros(fd, subject, hole, at)?;
    }
    Ok(())
}

pub(super) fn write_zeros(fd: BorrowedFd<'_>, subject: &str, begin: u64, end: u64) -> Result<()> {
    let zeros = vec![0; 1 << 20];
    let mut at = begin;
    while at < end {
        let now = (end - at).min(zeros.len() as u64) as usize;
        match rustix::io::pwrite(fd, &zeros[..now], at) {
            Ok(written) => at += written as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("allocate the space of", subject, errno)),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    #[cfg_attr(miri, ignore = "Miri's files have no holes")]
    fn holes_are_filled_and_what_is_between_them_stays() {
        let file = tempfile::tempfile().unwrap();
        let pieces = [(300_000, 5_u8), (900_000, 7)];
        file.set_len(2_000_000).unwrap();
        for (at, byte) in pieces {
            file.write_all_at(&[byte; 5000], at).unwrap();
        }
        let before = file.metadata().unwrap().blocks();
        fill_holes(file.as_fd(), "file", 1_000_000).unwrap();
        let mut bytes = vec![9; 2_000_000];
        file.read_exact_at(&mut bytes, 0).unwrap();
        for (at, byte) in pieces {
            assert_eq!(bytes[at as usize..][..5000], [byte; 5000]);
            bytes[at as usize..][..5000].fill(0);
        }
        assert!(bytes.iter().all(|byte| *byte == 0));
        let blocks = file.metadata().unwrap().blocks();
        assert!(
            before * 512 < 100_000 && blocks * 512 >= 1_000_000,
            "{before} {blocks}"
        );
        assert!(blocks * 512 < 1_500_000, "and nothing behind");
        assert_eq!(file.metadata().unwrap().len(), 2_000_000);
    }
}
