//! What lies at a path or behind a descriptor, and the making of new files.

use super::dax::{self, Geometry};
use crate::error::{Error, Result};
use kvdepot_host::block;
use rustix::fs::{FallocateFlags, FileType, Mode, SealFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

/// The kind of medium that backs a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Anonymous shared memory (a memfd). Closing its last descriptor frees it.
    Anonymous,
    /// A regular file.
    File,
    /// A device DAX character device: memory that is accessed without a page cache.
    Dax,
    /// A block device: a file without a file system.
    Block,
}

/// A path as it stands in errors.
pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Refuses what is no medium.
pub(super) fn check_kind(path: &Path, stat: &Stat) -> Result<()> {
    let found = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::CharacterDevice | FileType::BlockDevice => return Ok(()),
        FileType::Symlink => {
            return Err(Error::SymbolicLink {
                path: path.to_path_buf(),
            });
        }
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        _ => "of an unknown kind",
    };
    Err(Error::WrongKind {
        path: path.to_path_buf(),
        found,
    })
}

/// Refuses files that the kernel makes up as they are read: they have no length, and are not empty.
pub(super) fn check_system(path: &Path, fd: BorrowedFd<'_>) -> Result<()> {
    match rustix::fs::fstatfs(fd) {
        Ok(system) if MADE_UP.contains(&(system.f_type as u64)) => Err(Error::WrongKind {
            path: path.to_path_buf(),
            found: "a virtual file of the kernel (/proc, /sys)",
        }),
        _ => Ok(()),
    }
}

/// File systems of such files: proc, sysfs.
const MADE_UP: [u64; 2] = [0x9FA0, 0x6265_6572];

/// Refuses files of other users.
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
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Ok((Kind::Block, block_extent(fd, path)?));
    }
    let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|s| s.contains(SealFlags::SHRINK));
    let kind = if sealed { Kind::Anonymous } else { Kind::File };
    Ok((kind, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// What is read and written at a time.
const PAGE: u64 = 4096;

/// The bytes of the whole pages of a block device.
fn block_extent(fd: BorrowedFd<'_>, path: Option<&Path>) -> Result<u64> {
    let path = path.unwrap_or_else(|| Path::new("a block device"));
    let found = block::geometry(fd);
    let found = found
        .map_err(|error| Error::io("get the size of", shown(path), io::Error::other(error)))?;
    if u64::from(found.sector) > PAGE {
        return Err(Error::Sector {
            path: path.to_path_buf(),
            sector: found.sector,
        });
    }
    Ok(found.bytes / PAGE * PAGE)
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
            Err(errno) => return Err(Error::io("allocate space for", subject, errno)),
        }
    }
}

/// Whether a file is known to have all its space. Only a tmpfs counts it exactly; there asking for
/// it once more would look at every page, seconds for a large arena.
pub(super) fn has_no_holes(fd: BorrowedFd<'_>) -> bool {
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
        Err(errno) => Err(Error::io("find holes in", subject, errno)),
    };
    let mut at = 0;
    while at < len {
        let hole = seek(SeekFrom::Hole(at))?;
        at = seek(SeekFrom::Data(hole))?;
        write_zeros(fd, subject, hole, at)?;
    }
    Ok(())
}

/// File systems that know of a page that was written by a mapping before it is on the disk, and
/// tell then that it is data: ext4, XFS, Btrfs and tmpfs.
const HOLES_ARE_ZEROS: [u64; 4] = [0xEF53, 0x5846_5342, 0x9123_683E, TMPFS];
const TMPFS: u64 = 0x0102_1994;

/// What a file holds between two offsets but for its holes, as (begin, end); all of it where the
/// file system might not know. A tmpfs looks at every page up to the next hole, also far behind
/// `end`, so that a file without any is not asked.
pub(super) fn data(fd: BorrowedFd<'_>, begin: u64, end: u64) -> Vec<(u64, u64)> {
    if has_no_holes(fd) {
        return vec![(begin, end)];
    }
    let is_known = rustix::fs::fstatfs(fd)
        .is_ok_and(|system| HOLES_ARE_ZEROS.contains(&(system.f_type as u64 & 0xFFFF_FFFF)));
    let (true, Ok(file)) = (is_known, rustix::fs::fstat(fd)) else {
        return vec![(begin, end)];
    };
    let mut ranges = Vec::new();
    // What was cut off is no hole: whoever reads it learns that it is gone.
    let cut = (file.st_size as u64).clamp(begin, end);
    let mut at = begin;
    while at < end {
        let data = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
            Ok(data) => data.clamp(at, end),
            // No data behind the last hole.
            Err(Errno::NXIO) => cut.max(at),
            Err(_) => at,
        };
        if data == end {
            break;
        }
        let hole = rustix::fs::seek(fd, SeekFrom::Hole(data));
        let hole = hole.map_or(end, |hole| hole.clamp(data + 1, end));
        let hole = if hole < cut { hole } else { end };
        ranges.push((data, hole));
        at = hole;
    }
    ranges
}

pub(super) fn write_zeros(fd: BorrowedFd<'_>, subject: &str, begin: u64, end: u64) -> Result<()> {
    let zeros = vec![0; 1 << 20];
    let mut at = begin;
    while at < end {
        let now = (end - at).min(zeros.len() as u64) as usize;
        match rustix::io::pwrite(fd, &zeros[..now], at) {
            Ok(written) => at += written as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("allocate space for", subject, errno)),
        }
    }
    Ok(())
}

/// Makes a file longer that has `had` bytes. What fails half way gives back what it has got: on a
/// full disk ext4 hands out all that is left before it says so, and writing does too.
pub(super) fn lengthen<T>(
    fd: BorrowedFd<'_>,
    subject: &str,
    had: u64,
    extend: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let extended = extend();
    if extended.is_err() {
        rustix::fs::ftruncate(fd, had)
            .map_err(|errno| Error::io("release the space of", subject, errno))?;
    }
    extended
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

    #[test]
    #[cfg_attr(miri, ignore = "Miri's files have no holes")]
    fn what_is_written_between_holes_is_data_also_by_a_mapping() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("medium");
        let file = File::create_new(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&[5; 5000], 8 << 20).unwrap();
        drop(file);
        let mapping = crate::Mapping::open(&path, crate::Access::ReadWrite).unwrap();
        mapping.write_from(40 << 20, &[7; 100]).unwrap();
        for allocated in [false, true] {
            let ranges = mapping.written(1 << 20, 60 << 20).unwrap();
            let has = |at: u64| {
                ranges
                    .iter()
                    .any(|(begin, len)| (*begin..begin + len).contains(&at))
            };
            assert!(
                has(8 << 20) && has((8 << 20) + 4999) && has(40 << 20),
                "{ranges:?}"
            );
            let inside = |(begin, len): &(u64, u64)| *begin >= 1 << 20 && begin + len <= 61 << 20;
            assert!(ranges.iter().all(inside), "{ranges:?}");
            let fd = mapping.fd().unwrap();
            let knows = rustix::fs::fstatfs(fd)
                .is_ok_and(|system| HOLES_ARE_ZEROS.contains(&(system.f_type as u64)));
            let bytes: u64 = ranges.iter().map(|(_, len)| len).sum();
            assert_eq!(bytes < 32 << 20, knows, "{ranges:?}");
            if !allocated && has_no_holes(fd) {
                break;
            }
            mapping.allocate(64 << 20).unwrap();
            if rustix::fs::fstatfs(fd).is_ok_and(|system| system.f_type as u64 == TMPFS) {
                break;
            }
        }
    }

    #[test]
    fn a_file_that_could_not_be_made_longer_is_as_long_as_it_was() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 5000], 0).unwrap();
        let full = lengthen(file.as_fd(), "file", 5000, || {
            write_zeros(file.as_fd(), "file", 5000, 3_000_000)?;
            Err::<(), _>(Error::io("allocate space for", "file", Errno::NOSPC))
        });
        assert!(full.unwrap_err().is_no_space());
        assert_eq!(file.metadata().unwrap().len(), 5000);
        assert!(file.metadata().unwrap().blocks() * 512 < 100_000);
        lengthen(file.as_fd(), "file", 5000, || {
            write_zeros(file.as_fd(), "file", 5000, 6000)
        })
        .unwrap();
        assert_eq!(file.metadata().unwrap().len(), 6000);
    }
}
