//! Directories that are known by a descriptor, which can be sent to another process.
//!
//! Files are created, published and removed by plain names. They can be opened by plain names and
//! by names in subfolders (`ab/cd/name`). No call reaches anything outside the directory.
//!
//! Another process may have put anything at a name. Therefore these calls do not follow links, and
//! reject everything that is not a regular file. An open file remains the same file regardless of
//! its name.

mod folders;

pub use folders::{Seen, annotate, annotation, mark_used, mark_used_at};

use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use super::{Error, Result, fds};

/// Longest name, of every file system that is in use.
const NAME_MAX: usize = 255;

/// Attempts to find a name for a temporary file that nobody has: names are drawn, so one is enough
/// where nobody means ill.
const TEMPORARY_TRIES: usize = 16;

/// Access mode of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "files are read, or written too")]
pub enum Access {
    /// Read only.
    Read,
    /// Read and write.
    Write,
}

/// Behavior of [`Temporary::publish`] if a file has the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "it stays or it goes")]
pub enum Before {
    /// Keep the old file and publish nothing.
    Stays,
    /// Replace the old file in one step: at any moment the name refers to one of the two complete
    /// files.
    Goes,
}

/// An open directory.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
}

impl Dir {
    /// Opens the directory at `path`. Links in the path are followed, because the user chose the
    /// path.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] if the directory does not exist or may not be opened.
    pub fn open(path: &Path) -> Result<Dir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty());
        let fd = fd.map_err(Error::path("open", path))?;
        Ok(Dir { fd })
    }

    /// Creates a directory from a descriptor that another process has opened.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if the descriptor is not a directory.
    pub fn adopt(fd: OwnedFd) -> Result<Dir> {
        let stat = stat_of(&fd)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Ok(Dir { fd }),
            other => Err(Error::Input {
                field: "descriptor",
                value: format!("{other:?}"),
                allowed: "the descriptor of a directory".to_owned(),
            }),
        }
    }

    /// Returns another descriptor of the directory, for another process.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if the process has too many descriptors.
    pub fn twin(&self) -> Result<OwnedFd> {
        fds::twin(&self.fd)
    }

    /// Opens the regular file `name`, which may be in subfolders (`ab/cd/name`).
    ///
    /// Returns `None` if nothing has this name.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if a component of `name` is not a plain name, or if the path contains a
    /// link, a folder that is something else, or a file that is not regular. [`Error::Os`] if a
    /// system call fails.
    pub fn open_at(&self, name: &str, access: Access) -> Result<Option<OwnedFd>> {
        let file = self.open_seen(name, access, false)?;
        Ok(file.map(|(file, _)| file))
    }

    /// Opens the regular file `name` as [`Dir::open_at`] does, and also returns its metadata.
    ///
    /// With `direct`, the file bypasses the page cache if the file system supports that.
    ///
    /// # Errors
    ///
    /// The errors of [`Dir::open_at`].
    pub fn open_seen(
        &self,
        name: &str,
        access: Access,
        direct: bool,
    ) -> Result<Option<(OwnedFd, Seen)>> {
        let access = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        name.split('/').try_for_each(check)?;
        // A pipe that somebody has put there must not stop this.
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match direct {
            true => match self.resolve(name, flags | OFlags::DIRECT) {
                Err(Errno::INVAL) => self.resolve(name, flags),
                fd => fd,
            },
            false => self.resolve(name, flags),
        };
        let fd = match fd {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP | Errno::XDEV | Errno::ISDIR | Errno::NOTDIR | Errno::NXIO) => {
                return Err(other(name));
            }
            Err(errno) => return Err(Error::os("open a file in a directory")(errno)),
        };
        match Seen::of(&fd)? {
            Some(seen) => Ok(Some((fd, seen))),
            None => Err(other(name)),
        }
    }

    /// As the kernel resolves a name without leaving the directory, where it can be told so; plain
    /// names without links, one after the other, do not leave it either way.
    fn resolve(&self, name: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        /// Kernels before 5.6 and some filters of system calls have no `openat2`.
        static IS_OLD: AtomicBool = AtomicBool::new(false);
        if !IS_OLD.load(Ordering::Relaxed) {
            let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let open = || rustix::fs::openat2(&self.fd, name, flags, Mode::empty(), beneath);
            match retry_on_intr(open) {
                // Something above was renamed meanwhile.
                Err(Errno::AGAIN) => {}
                Err(Errno::NOSYS | Errno::PERM) => IS_OLD.store(true, Ordering::Relaxed),
                other => return other,
            }
        }
        self.walk(name, flags)
    }

    fn walk(&self, name: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let (folders, name) = name.rsplit_once('/').unwrap_or(("", name));
        let folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = |at: &OwnedFd, name: &str, flags: OFlags| {
            retry_on_intr(|| rustix::fs::openat(at, name, flags, Mode::empty()))
        };
        let mut at = None;
        for name in folders.split('/').filter(|name| !name.is_empty()) {
            at = Some(open(at.as_ref().unwrap_or(&self.fd), name, folder)?);
        }
        open(at.as_ref().unwrap_or(&self.fd), name, flags)
    }

    /// Creates a temporary file with mode 0600. It is deleted when it is dropped, unless it was
    /// published.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if a system call fails.
    pub fn temporary(&self) -> Result<Temporary<'_>> {
        if let Some(file) = self.unnamed(false)? {
            return Ok(self.holds(file, None));
        }
        let mode = Mode::RUSR | Mode::WUSR;
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        for _ in 0..TEMPORARY_TRIES {
            let name = spare_name();
            match retry_on_intr(|| rustix::fs::openat(&self.fd, &*name, flags, mode)) {
                Ok(file) => return Ok(self.holds(file, Some(name))),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(Error::os("create a file in a directory")(errno)),
            }
        }
        Err(Error::os("find a free name in a directory")(Errno::EXIST))
    }

    /// Creates a file without a name, mode 0600, for reading and writing.
    ///
    /// With `direct`, the file bypasses the page cache. Returns `None` if the file system does not
    /// support such files.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if a system call fails.
    pub fn unnamed(&self, direct: bool) -> Result<Option<OwnedFd>> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
        let flags = if direct {
            flags | OFlags::DIRECT
        } else {
            flags
        };
        let mode = Mode::RUSR | Mode::WUSR;
        match retry_on_intr(|| rustix::fs::openat(&self.fd, ".", flags, mode)) {
            Ok(file) => Ok(Some(file)),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => Ok(None),
            Err(errno) => Err(Error::os("create a file in a directory")(errno)),
        }
    }

    /// Gives an open file the name `name` in this directory. Returns false if the name exists
    /// already.
    ///
    /// The call uses the descriptor, so it always links this file and no other one.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `name` is not a plain name. [`Error::Os`] if a system call fails, for
    /// example because `/proc` is missing.
    pub fn link(&self, file: impl AsFd, name: &str) -> Result<bool> {
        check(name)?;
        let own = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let link = || rustix::fs::linkat(CWD, &*own, &self.fd, name, AtFlags::SYMLINK_FOLLOW);
        match retry_on_intr(link) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(Error::os("publish a file in a directory")(errno)),
        }
    }

    fn holds(&self, file: OwnedFd, name: Option<String>) -> Temporary<'_> {
        Temporary {
            dir: self,
            file,
            name,
        }
    }

    /// Removes the file or link `name`. Returns true if there was one.
    ///
    /// Processes that have the file open can still use it.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `name` is not a plain name, [`Error::Os`] if a system call fails.
    pub fn remove(&self, name: &str) -> Result<bool> {
        check(name)?;
        self.unlink(name)
    }

    fn unlink(&self, name: &str) -> Result<bool> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(Error::os("remove a file in a directory")(errno)),
        }
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A file that other processes cannot find by a name before it is published.
#[derive(Debug)]
pub struct Temporary<'a> {
    dir: &'a Dir,
    file: OwnedFd,
    /// Where the file system knows no files without one; removed with this.
    name: Option<String>,
}

impl Temporary<'_> {
    /// Gives the file the name `name`. Returns false if a file has this name and `before` keeps it.
    ///
    /// The call always publishes this file, also if another process has changed the temporary name.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `name` is not a plain name, [`Error::Os`] if a system call fails.
    pub fn publish(self, name: &str, before: Before) -> Result<bool> {
        if self.dir.link(&self.file, name)? {
            return Ok(true);
        }
        if before == Before::Stays {
            return Ok(false);
        }
        // A link does not replace, and a rename takes a name.
        let spare = spare_name();
        if !self.dir.link(&self.file, &spare)? {
            return Err(Error::os("find a free name in a directory")(Errno::EXIST));
        }
        let dir = &self.dir.fd;
        let renamed = retry_on_intr(|| rustix::fs::renameat(dir, &*spare, dir, name));
        if let Err(errno) = renamed {
            let _left = self.dir.unlink(&spare);
            return Err(Error::os("rename a file in a directory")(errno));
        }
        Ok(true)
    }
}

impl AsFd for Temporary<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Left behind, it is a file that nobody asks for.
            let _left = self.dir.unlink(name);
        }
    }
}

/// A name that no other process or call has chosen: another container has the same numbers of
/// processes, and a forked child the same seed.
fn spare_name() -> String {
    let pid = std::process::id();
    format!(".kvdepot-{pid}-{:016x}", RandomState::new().hash_one(pid))
}

fn stat_of(fd: &OwnedFd) -> Result<Stat> {
    rustix::fs::fstat(fd).map_err(Error::os("examine a descriptor"))
}

/// Refuses what would lead elsewhere, or is no name.
fn check(name: &str) -> Result<()> {
    let is_plain = !matches!(name, "" | "." | "..")
        && name.len() <= NAME_MAX
        && !name.bytes().any(|byte| matches!(byte, b'/' | 0));
    match is_plain {
        true => Ok(()),
        false => Err(Error::Input {
            field: "name",
            value: name.to_owned(),
            allowed: format!("1 to {NAME_MAX} bytes, none of them `/` or 0, and not `.` or `..`"),
        }),
    }
}

fn other(name: &str) -> Error {
    Error::Input {
        field: "name",
        value: name.to_owned(),
        allowed: "the name of a regular file (not of a link or of another kind of file)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;

    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn text(fd: OwnedFd) -> String {
        let mut text = String::new();
        File::from(fd).read_to_string(&mut text).unwrap();
        text
    }

    fn put(dir: &Dir, name: &str, text: &str, before: Before) -> bool {
        let temporary = dir.temporary().unwrap();
        let mut file = File::from(temporary.as_fd().try_clone_to_owned().unwrap());
        file.write_all(text.as_bytes()).unwrap();
        temporary.publish(name, before).unwrap()
    }

    #[test]
    fn a_file_is_published_once_or_replaced_and_one_that_is_open_stays() {
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        assert!(dir.open_at("a", Access::Read).unwrap().is_none());
        assert!(put(&dir, "a", "one", Before::Stays));
        let first = dir.open_at("a", Access::Write).unwrap().unwrap();
        assert!(!put(&dir, "a", "two", Before::Stays));
        assert!(put(&dir, "a", "three", Before::Goes));
        assert_eq!(
            text(dir.open_at("a", Access::Read).unwrap().unwrap()),
            "three"
        );
        assert!(dir.remove("a").unwrap() && !dir.remove("a").unwrap());
        assert_eq!(text(first), "one");
        drop(dir.temporary().unwrap());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "leftovers");
    }

    #[test]
    fn names_that_lead_elsewhere_and_things_that_are_no_files_are_refused() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("secret"), "secret").unwrap();
        let inner = root.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::create_dir(inner.join("folder")).unwrap();
        symlink("../secret", inner.join("link")).unwrap();
        symlink("nowhere", inner.join("dangling")).unwrap();
        let pipe = inner.join("pipe");
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let dir = Dir::open(&inner).unwrap();
        let long = "x".repeat(256);
        let names = [
            "",
            ".",
            "..",
            "../secret",
            "/etc/passwd",
            "folder/..",
            "a\0b",
            &long,
        ];
        for name in names {
            assert!(
                matches!(dir.open_at(name, Access::Read), Err(Error::Input { .. })),
                "{name}"
            );
            assert!(dir.remove(name).is_err());
            assert!(
                dir.temporary()
                    .unwrap()
                    .publish(name, Before::Goes)
                    .is_err()
            );
        }
        for name in ["link", "dangling", "folder", "pipe"] {
            for access in [Access::Read, Access::Write] {
                let opened = dir.open_at(name, access);
                assert!(
                    matches!(opened, Err(Error::Input { .. })),
                    "{name}: {opened:?}"
                );
            }
        }
        // What is published in the place of a link takes its place, and leaves its target alone.
        assert!(!put(&dir, "link", "mine", Before::Stays));
        assert!(put(&dir, "link", "mine", Before::Goes));
        assert_eq!(
            fs::read_to_string(root.path().join("secret")).unwrap(),
            "secret"
        );
        assert!(Dir::adopt(File::open(inner.join("link")).unwrap().into()).is_err());
        assert!(Dir::adopt(File::open(&inner).unwrap().into()).is_ok());
    }

    #[test]
    fn a_file_in_folders_is_opened_and_no_link_on_the_way_to_it_is_followed() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("inner");
        fs::create_dir_all(inner.join("ab/cd")).unwrap();
        fs::write(inner.join("ab/cd/name"), "mine").unwrap();
        fs::create_dir_all(root.path().join("outside/cd")).unwrap();
        fs::write(root.path().join("outside/cd/name"), "secret").unwrap();
        symlink("../outside", inner.join("ef")).unwrap();
        symlink("ab", inner.join("gh")).unwrap();
        let dir = Dir::open(&inner).unwrap();
        let file = dir.open_at("ab/cd/name", Access::Read).unwrap();
        assert_eq!(text(file.unwrap()), "mine");
        assert!(dir.open_at("ab/xy/name", Access::Read).unwrap().is_none());
        let refused = [
            "ef/cd/name",
            "gh/cd/name",
            "ab/cd/name/x",
            "ab//name",
            "ab/../ab/cd/name",
            "ab/cd/",
        ];
        for name in refused {
            let opened = dir.open_at(name, Access::Read);
            assert!(
                matches!(opened, Err(Error::Input { .. })),
                "{name}: {opened:?}"
            );
        }
        // As on kernels without `openat2`.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
        assert_eq!(text(dir.walk("ab/cd/name", flags).unwrap()), "mine");
        for name in ["ef/cd/name", "gh/cd/name"] {
            assert!(dir.walk(name, flags).is_err(), "{name}");
        }
    }

    #[test]
    fn names_that_a_process_of_the_same_number_has_chosen_are_in_nobodys_way() {
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        for number in 0..10_000 {
            let name = format!(".kvdepot-{}-{number}", std::process::id());
            fs::write(root.path().join(name), "another container's").unwrap();
        }
        assert!(put(&dir, "a", "one", Before::Stays) && put(&dir, "a", "two", Before::Goes));
    }

    #[test]
    fn a_name_that_is_swapped_for_a_link_again_and_again_never_leads_outside() {
        let root = tempfile::tempdir().unwrap();
        let secret = root.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        let inner = root.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let dir = Dir::open(&inner).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    fs::write(inner.join("file"), "mine").unwrap();
                    fs::rename(inner.join("file"), inner.join("name")).unwrap();
                    symlink(&secret, inner.join("link")).unwrap();
                    fs::rename(inner.join("link"), inner.join("name")).unwrap();
                }
            });
            let (mut texts, mut refused) = (Vec::new(), 0);
            let begun = Instant::now();
            while (texts.len() < 200 || refused < 200) && begun.elapsed() < PATIENCE {
                match dir.open_at("name", Access::Write) {
                    Ok(file) => texts.extend(file.map(text)),
                    Err(_) => refused += 1,
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(texts.iter().all(|text| text == "mine"));
            assert!(
                texts.len() >= 200 && refused >= 200,
                "the names were not swapped"
            );
        });
        // The directory is the one that was opened, whatever has its name now.
        put(&dir, "last", "mine", Before::Stays);
        fs::rename(&inner, root.path().join("moved")).unwrap();
        symlink("/etc", &inner).unwrap();
        assert_eq!(
            text(dir.open_at("last", Access::Read).unwrap().unwrap()),
            "mine"
        );
    }

    #[test]
    fn of_many_that_publish_a_name_one_does_and_readers_see_whole_files() {
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        for round in 0..50 {
            let name = &*format!("{round}");
            let won = std::thread::scope(|scope| {
                let publish = |text: &'static str| put(&dir, name, text, Before::Stays);
                let all = ["first", "other"].map(|text| scope.spawn(move || publish(text)));
                all.map(|one| one.join().unwrap())
            });
            assert_eq!(won.iter().filter(|won| **won).count(), 1, "round {round}");
            let text = text(dir.open_at(name, Access::Read).unwrap().unwrap());
            assert_eq!(text, if won[0] { "first" } else { "other" });
        }
    }
}
