//! Block devices: size, users and exclusive use.

use std::fmt;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags, SeekFrom};
use rustix::io::Errno;

use super::{Error, Result};
use crate::fds;
use crate::fork::LockFd;

/// Size of a block device and of its smallest unit of I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// Size of the device in bytes.
    pub bytes: u64,
    /// Size of a logical block in bytes.
    pub sector: u32,
}

/// Returns the geometry of the block device that `fd` refers to.
///
/// The call moves the file position to the end of the device.
///
/// # Errors
///
/// [`Error::Os`] if the system call fails, for example because `fd` is not a block device.
pub fn geometry(fd: impl AsFd) -> Result<Geometry> {
    let sector = rustix::fs::ioctl_blksszget(&fd)
        .map_err(Error::os("get the block size of a block device"))?;
    // As `BLKGETSIZE64`; nobody uses a medium's position.
    let bytes = rustix::fs::seek(&fd, SeekFrom::End(0));
    let bytes = bytes.map_err(Error::os("get the size of a block device"))?;
    Ok(Geometry { bytes, sector })
}

/// Claims a block device exclusively, as a mounted file system does.
///
/// While the returned descriptor is open, no other process can mount or claim the device, or
/// anything that uses a part of it. Returns `None` if another process has claimed it.
///
/// # Errors
///
/// [`Error::Os`] if the system call fails, and the errors of [`LockFd::open`].
pub fn claim(fd: impl AsFd) -> Result<Option<LockFd>> {
    let flags = OFlags::RDWR | OFlags::EXCL;
    match LockFd::open(|| fds::reopen_with(fd.as_fd(), flags)) {
        Ok(claim) => Ok(Some(claim)),
        Err(Error::Os { source, .. }) if is_busy(&source) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_busy(error: &std::io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::BUSY)
}

/// The users of a block device that the system reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Uses {
    /// Name of the device in the system, such as `nvme0n1`; empty if sysfs does not list it.
    pub name: String,
    /// Names of its partitions.
    pub partitions: Vec<String>,
    /// Names of devices that are built on it: RAID, LVM, encryption.
    pub holders: Vec<String>,
    /// Paths at which it is mounted.
    pub mounts: Vec<PathBuf>,
    /// True if the device is used as swap space.
    pub swap: bool,
}

impl Uses {
    /// Returns true if sysfs lists the device. Otherwise its users are unknown.
    #[must_use]
    pub fn is_known(&self) -> bool {
        !self.name.is_empty()
    }

    /// Returns true if the device is mounted, used as swap space, or part of another device.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.swap || !(self.holders.is_empty() && self.mounts.is_empty())
    }
}

/// Who uses it, behind "it is".
impl fmt::Display for Uses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        let mounts: Vec<String> = self
            .mounts
            .iter()
            .map(|at| at.display().to_string())
            .collect();
        if !mounts.is_empty() {
            words.push(format!("mounted at {}", mounts.join(", ")));
        }
        if !self.holders.is_empty() {
            words.push(format!("part of {}", self.holders.join(", ")));
        }
        if self.swap {
            words.push("used as swap".to_owned());
        }
        if words.is_empty() {
            words.push("opened exclusively by another program".to_owned());
        }
        f.write_str(&words.join(", "))
    }
}

/// Returns the users of the block device that `fd` refers to.
///
/// # Errors
///
/// [`Error::Os`] if the system call fails, [`Error::Input`] if `fd` is not a block device.
pub fn uses(fd: impl AsFd) -> Result<Uses> {
    let (major, minor) = number_of(fd.as_fd())?;
    let entry = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    Ok(uses_of(&fs::canonicalize(&entry).unwrap_or(entry)))
}

fn number_of(fd: BorrowedFd<'_>) -> Result<(u32, u32)> {
    let stat = rustix::fs::fstat(fd).map_err(Error::os("examine a descriptor"))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => {
            let number = stat.st_rdev;
            Ok((rustix::fs::major(number), rustix::fs::minor(number)))
        }
        other => Err(Error::Input {
            field: "descriptor",
            value: format!("{other:?}"),
            allowed: "a block device".to_owned(),
        }),
    }
}

/// Returns the users of the block device whose sysfs folder is `entry`, for example a folder in
/// `/sys/class/block`.
///
/// It works as [`uses`].
#[must_use]
pub fn uses_of(entry: &Path) -> Uses {
    let number = fs::read_to_string(entry.join("dev")).unwrap_or_default();
    let number = number.trim_end();
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let is_it = |path: &str| {
        let device = fs::metadata(path).map(|at| at.rdev()).unwrap_or(0);
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        format!("{major}:{minor}") == number
    };
    let swaps = read("/proc/swaps");
    let mut paths = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split(' ').next());
    let swap = paths.any(is_it);
    let names = |folder: PathBuf, is_it: &dyn Fn(&Path) -> bool| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let found = entries.filter(|entry| is_it(&entry.path()));
        let mut names: Vec<String> = found
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    Uses {
        name: match entry.join("size").exists() {
            true => entry
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            false => String::new(),
        },
        partitions: names(entry.to_owned(), &|path| path.join("partition").exists()),
        holders: names(entry.join("holders"), &|_| true),
        mounts: mounts_of(&read("/proc/self/mountinfo"), number),
        swap,
    }
}

/// The mount points of a device in `/proc/self/mountinfo`.
fn mounts_of(mountinfo: &str, number: &str) -> Vec<PathBuf> {
    let each = mountinfo.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(2);
        let (device, _root, at) = (fields.next()?, fields.next()?, fields.next()?);
        (device == number).then(|| PathBuf::from(at.replace("\\040", " ")))
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_uses_a_device_is_named() {
        let root = tempfile::tempdir().unwrap();
        let disk = root.path().join("block/sdx");
        for folder in ["sdx1", "sdx2", "holders/dm-3", "queue"] {
            fs::create_dir_all(disk.join(folder)).unwrap();
        }
        for file in ["size", "sdx1/partition", "sdx2/partition"] {
            fs::write(disk.join(file), "1\n").unwrap();
        }
        let mut found = uses_of(&disk);
        assert!(found.is_known() && found.is_used());
        assert_eq!(found.partitions, ["sdx1", "sdx2"]);
        assert_eq!(found.to_string(), "part of dm-3");
        found.holders.clear();
        assert!(!found.is_used());
        assert!(!uses_of(&root.path().join("none")).is_known());
    }

    #[test]
    fn mounts_are_found_by_the_devices_number() {
        let info = "22 1 253:0 / / rw - ext4 /dev/root rw\n\
                    30 22 253:1 /sub /mnt/a\\040b rw - ext4 /dev/x rw\n\
                    31 22 0:253 / /mnt/1 rw - tmpfs t rw\n";
        assert_eq!(mounts_of(info, "253:1"), [PathBuf::from("/mnt/a b")]);
        assert_eq!(mounts_of(info, "253:0"), [PathBuf::from("/")]);
        assert!(mounts_of(info, "253:2").is_empty());
    }

    #[test]
    fn a_file_is_no_block_device() {
        let file = tempfile::tempfile().unwrap();
        assert!(uses(&file).is_err() && geometry(&file).is_err());
    }
}
