//! Folders of a directory, each known by a descriptor of its own: files are made in one and moved
//! to another without a link being followed on the way.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, FsWord, Mode, OFlags, RenameFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use super::{Dir, check, spare_name};
use crate::{Error, Result};

/// File systems, as they name themselves.
const EXT: FsWord = 0xEF53;
const XFS: FsWord = 0x5846_5342;
const TMPFS: FsWord = 0x0102_1994;

/// A folder is its user's alone, as the files in it are.
const PRIVATE: Mode = Mode::RWXU;

/// Metadata of a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Seen {
    /// Inode number in its file system.
    pub inode: u64,
    /// Length in bytes.
    pub len: u64,
    /// Time of the last change or of the last use mark, in nanoseconds of the file system's clock.
    pub changed: i128,
    /// User ID of the owner.
    pub owner: u32,
}

impl Seen {
    fn new(stat: &Stat) -> Option<Seen> {
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        is_file.then_some(Seen {
            inode: stat.st_ino,
            len: stat.st_size as u64,
            changed: changed(stat),
            owner: stat.st_uid,
        })
    }

    /// Returns the metadata of an open file, or `None` if it is not a regular file.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system call fails.
    pub fn of(fd: impl AsFd) -> Result<Option<Seen>> {
        let stat = rustix::fs::fstat(fd).map_err(Error::os("examine a file"))?;
        Ok(Seen::new(&stat))
    }
}

fn changed(stat: &Stat) -> i128 {
    i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec)
}

/// Marks an open file as used now, by its file system's clock.
///
/// # Errors
///
/// [`Error::Os`] if the system call fails.
pub fn mark_used(fd: impl AsFd) -> Result<()> {
    let (now, same) = (rustix::fs::UTIME_NOW, rustix::fs::UTIME_OMIT);
    let at = |tv_nsec| rustix::fs::Timespec { tv_sec: 0, tv_nsec };
    let times = rustix::fs::Timestamps {
        last_access: at(same),
        last_modification: at(now),
    };
    rustix::fs::futimens(fd, &times).map_err(Error::os("set the access time of a file"))
}

/// Marks an open file as used at the time `nanos`, in nanoseconds since 1970.
///
/// # Errors
///
/// [`Error::Os`] if the system call fails, for example because the file belongs to another user.
pub fn mark_used_at(fd: impl AsFd, nanos: i64) -> Result<()> {
    rustix::fs::futimens(fd, &used_at(nanos)).map_err(Error::os("set the access time of a file"))
}

fn used_at(nanos: i64) -> rustix::fs::Timestamps {
    rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_OMIT,
        },
        last_modification: rustix::fs::Timespec {
            tv_sec: nanos.div_euclid(1_000_000_000),
            tv_nsec: nanos.rem_euclid(1_000_000_000),
        },
    }
}

/// Stores a few bytes in the extended attribute `name` of an open file.
///
/// Returns false if the file system does not store them.
pub fn annotate(fd: impl AsFd, name: &str, bytes: &[u8]) -> bool {
    rustix::fs::fsetxattr(fd, name, bytes, rustix::fs::XattrFlags::empty()).is_ok()
}

/// Returns the bytes that [`annotate`] stored in the attribute `name`.
///
/// Returns `None` if there is no such attribute, or if it does not have exactly `LEN` bytes.
pub fn annotation<const LEN: usize>(fd: impl AsFd, name: &str) -> Option<[u8; LEN]> {
    let mut bytes = [0; LEN];
    match rustix::fs::fgetxattr(fd, name, &mut bytes[..]) {
        Ok(len) if len == LEN => Some(bytes),
        _ => None,
    }
}

impl Dir {
    /// Opens the folder `name`. Returns `None` if nothing has this name.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `name` is not a plain name. [`Error::Os`] if it is a link or not a
    /// folder, and if a system call fails.
    pub fn folder(&self, name: &str) -> Result<Option<Dir>> {
        check(name)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match retry_on_intr(|| rustix::fs::openat(&self.fd, name, flags, Mode::empty())) {
            Ok(fd) => Ok(Some(Dir { fd })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(Error::os("open a directory")(errno)),
        }
    }

    /// Opens the folder `name` and creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// The errors of [`Dir::folder`].
    pub fn make_folder(&self, name: &str) -> Result<Dir> {
        loop {
            if let Some(folder) = self.folder(name)? {
                return Ok(folder);
            }
            match rustix::fs::mkdirat(&self.fd, name, PRIVATE) {
                // Somebody else has made it meanwhile, or will have removed it before it is opened.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(Error::os("create a directory")(errno)),
            }
        }
    }

    /// Creates the file `name`, mode 0600, for reading and writing.
    ///
    /// With `direct`, the file bypasses the page cache if the file system supports that.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `name` is not a plain name. [`Error::Os`] if the name exists or a system
    /// call fails.
    pub fn create(&self, name: &str, direct: bool) -> Result<OwnedFd> {
        check(name)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let open = |more: OFlags| {
            retry_on_intr(|| {
                rustix::fs::openat(&self.fd, name, flags | OFlags::CLOEXEC | more, mode)
            })
        };
        let made = match direct {
            true => match open(OFlags::DIRECT) {
                // The file is made before the refusal, on some file systems.
                Err(Errno::INVAL) => {
                    self.unlink(name)?;
                    open(OFlags::empty())
                }
                made => made,
            },
            false => open(OFlags::empty()),
        };
        made.map_err(Error::os("create a file"))
    }

    /// Returns true if files on this file system can bypass the page cache. The call creates and
    /// removes a file to find out.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if a system call fails.
    pub fn takes_direct(&self) -> Result<bool> {
        let name = spare_name();
        let file = self.create(&name, true)?;
        let flags = rustix::fs::fcntl_getfl(&file);
        self.unlink(&name)?;
        Ok(flags.is_ok_and(|flags| flags.contains(OFlags::DIRECT)))
    }

    /// Returns true if anything has the name `name`, which may be in subfolders.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system call fails.
    pub fn has(&self, name: &str) -> Result<bool> {
        Ok(self.owner_of(name)?.is_some())
    }

    /// Returns the user ID of the owner of `name`, which may be in subfolders.
    ///
    /// Returns `None` if nothing has this name. Links in the folders of the path are followed; a
    /// caller that opens the file must check for them.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system call fails.
    pub fn owner_of(&self, name: &str) -> Result<Option<u32>> {
        let look = || rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        match retry_on_intr(look) {
            Ok(stat) => Ok(Some(stat.st_uid)),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(Error::os("look up a file")(errno)),
        }
    }

    /// Returns the user ID of the owner of the directory.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system call fails.
    pub fn owner(&self) -> Result<u32> {
        let stat = rustix::fs::fstat(&self.fd).map_err(Error::os("examine a directory"))?;
        Ok(stat.st_uid)
    }

    /// Moves the file `name` to `folder` under the name `new`, and replaces a file of that name in
    /// one step.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if a name is not a plain name, [`Error::Os`] if the system call fails.
    pub fn move_to(&self, name: &str, folder: &Dir, new: &str) -> Result<()> {
        check(name)?;
        check(new)?;
        retry_on_intr(|| rustix::fs::renameat(&self.fd, name, &folder.fd, new))
            .map_err(Error::os("move a file"))
    }

    /// Moves the file `name` to `folder` under the name `new`, which must not exist there.
    ///
    /// Returns false if `new` exists, if `name` does not exist, or if the file system does not
    /// support such a move.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if a name is not a plain name, [`Error::Os`] if the system call fails.
    pub fn move_to_new(&self, name: &str, folder: &Dir, new: &str) -> Result<bool> {
        self.rename(name, folder, new, RenameFlags::NOREPLACE)
    }

    /// Exchanges the file `name` with the file `other` in `folder`, in one step.
    ///
    /// Returns false if one of them does not exist, or if the file system does not support an
    /// exchange.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if a name is not a plain name, [`Error::Os`] if the system call fails.
    pub fn exchange(&self, name: &str, folder: &Dir, other: &str) -> Result<bool> {
        self.rename(name, folder, other, RenameFlags::EXCHANGE)
    }

    fn rename(&self, name: &str, folder: &Dir, new: &str, how: RenameFlags) -> Result<bool> {
        check(name)?;
        check(new)?;
        let moved =
            retry_on_intr(|| rustix::fs::renameat_with(&self.fd, name, &folder.fd, new, how));
        match moved {
            Ok(()) => Ok(true),
            // A name that is not there is told by whoever asks for it next.
            Err(Errno::EXIST | Errno::NOENT | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                Ok(false)
            }
            Err(errno) => Err(Error::os("move a file")(errno)),
        }
    }

    /// Returns true if the directory was removed while it was open, by this host or by another one.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        match rustix::fs::fstat(&self.fd) {
            Ok(stat) => stat.st_nlink == 0,
            Err(errno) => errno == Errno::STALE,
        }
    }

    /// Returns the time at which a name in the directory was last created or removed, in
    /// nanoseconds of the file system's clock.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system call fails.
    pub fn changed(&self) -> Result<i128> {
        let stat = rustix::fs::fstat(&self.fd).map_err(Error::os("examine a directory"))?;
        Ok(changed(&stat))
    }

    /// Removes the empty folder `name`. Returns true if it no longer exists, false if it is not
    /// empty.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `name` is not a plain name, [`Error::Os`] if the system call fails.
    pub fn remove_folder(&self, name: &str) -> Result<bool> {
        check(name)?;
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(true),
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(errno) => Err(Error::os("remove a directory")(errno)),
        }
    }

    /// Returns the metadata of the regular file `name`.
    ///
    /// Returns `None` if nothing has this name, or if it is not a regular file.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `name` is not a plain name, [`Error::Os`] if the system call fails.
    pub fn look(&self, name: &str) -> Result<Option<Seen>> {
        check(name)?;
        let look = || rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        match retry_on_intr(look) {
            Ok(stat) => Ok(Seen::new(&stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(Error::os("look up a file")(errno)),
        }
    }

    /// Marks the file `name` as used at the time `nanos`, in nanoseconds since 1970; see
    /// [`mark_used_at`].
    ///
    /// # Errors
    ///
    /// The errors of [`mark_used_at`], and [`Error::Input`] if `name` is not a plain name.
    pub fn mark_used_at(&self, name: &str, nanos: i64) -> Result<()> {
        check(name)?;
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let marked = rustix::fs::utimensat(&self.fd, name, &used_at(nanos), flags);
        marked.map_err(Error::os("set the access time of a file"))
    }

    /// Returns the names in the directory, in any order, without `.` and `..`.
    ///
    /// Names that are created or removed during the call may or may not be included.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if a system call fails.
    pub fn names(&self) -> Result<Vec<String>> {
        let list = Error::os("list a directory");
        let entries = rustix::fs::Dir::read_from(&self.fd).map_err(list)?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::os("list a directory"))?;
            // No name of ours is anything else.
            if let Ok(name) = entry.file_name().to_str()
                && !matches!(name, "." | "..")
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Makes the names in the directory durable.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system call fails.
    pub fn sync(&self) -> Result<()> {
        match retry_on_intr(|| rustix::fs::fsync(&self.fd)) {
            // The file system knows no such thing, and keeps names by itself.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(errno) => Err(Error::os("sync a directory")(errno)),
        }
    }

    /// Returns true if files without a name are cheap on this file system.
    ///
    /// The list contains file systems on which such a file costs no more than another one and gets
    /// a name immediately. On ZFS, for example, giving a name waits for the whole pool.
    #[must_use]
    pub fn links_unnamed(&self) -> bool {
        let found = rustix::fs::fstatfs(&self.fd);
        found.is_ok_and(|found| [EXT, XFS, TMPFS].contains(&found.f_type))
    }

    /// Returns the size of the directory's file system in bytes, used and free.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the system call fails.
    pub fn file_system_bytes(&self) -> Result<u64> {
        let about = retry_on_intr(|| rustix::fs::fstatvfs(&self.fd));
        let about = about.map_err(Error::os("get the size of a file system"))?;
        Ok(about.f_blocks.saturating_mul(about.f_frsize))
    }

    /// Returns true if another host or process may serve the file system, so that calls may hang.
    ///
    /// It is false only for file systems that are known to be local.
    #[must_use]
    pub fn may_be_far(&self) -> bool {
        /// The others: btrfs, overlay, F2FS, ZFS.
        const HERE: [FsWord; 7] = [
            EXT,
            XFS,
            0x9123_683E,
            TMPFS,
            0x794C_7630,
            0xF2F5_2010,
            0x2FC1_2FC1,
        ];
        let found = rustix::fs::fstatfs(&self.fd);
        found.map_or(true, |found| !HERE.contains(&found.f_type))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_is_made_in_one_folder_and_moved_to_another() {
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        assert!(dir.folder("a").unwrap().is_none());
        let (a, b) = (dir.make_folder("a").unwrap(), dir.make_folder("b").unwrap());
        drop(a.create("new", true).unwrap());
        assert!(a.create("new", false).is_err(), "it is there");
        fs::write(root.path().join("b/name"), "before").unwrap();
        a.move_to("new", &b, "name").unwrap();
        assert_eq!(fs::read(root.path().join("b/name")).unwrap(), b"");
        assert!(dir.has("b/name").unwrap() && !dir.has("a/new").unwrap());
        assert!(!dir.has("none/name").unwrap() && !dir.has("b/name/name").unwrap());
        assert_eq!(b.names().unwrap(), ["name"]);
        drop(a.create("other", false).unwrap());
        assert!(
            !a.exchange("other", &b, "none").unwrap(),
            "nothing is there"
        );
        assert!(!a.move_to_new("other", &b, "name").unwrap(), "it is taken");
        fs::write(root.path().join("b/name"), "before").unwrap();
        assert!(a.exchange("other", &b, "name").unwrap());
        assert_eq!(fs::read(root.path().join("a/other")).unwrap(), b"before");
        assert!(a.move_to_new("other", &b, "third").unwrap());
        b.remove("third").unwrap();
        assert!(!dir.remove_folder("b").unwrap(), "it has a file");
        assert!(!a.is_removed() && a.takes_direct().is_ok());
        assert_eq!(a.names().unwrap().len(), 0, "nothing of it is left");
        assert!(dir.remove_folder("a").unwrap() && dir.remove_folder("a").unwrap());
        assert!(a.is_removed());
        b.sync().unwrap();
    }

    #[test]
    fn a_link_is_no_folder() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        symlink("a", root.path().join("link")).unwrap();
        let dir = Dir::open(root.path()).unwrap();
        assert!(dir.folder("link").is_err() && dir.make_folder("link").is_err());
        assert!(dir.folder("../a").is_err());
    }
}
