//! Private directories of the user: one for sockets and one for caches.
//!
//! Both have mode 0700 and belong to the effective user. A symbolic link, or a directory of another
//! user under the same name, is rejected. In `/tmp` any user can create such a directory, and its
//! owner could put a socket of its own there.
//!
//! A directory of this user that its group may enter becomes private again. Kubernetes, for
//! example, gives a volume to the group `fsGroup` at each start of a pod.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Once;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{Error, Result, limits};

/// Returns the directory for sockets, and creates it if it is missing.
///
/// It is `kvdepot` in `$XDG_RUNTIME_DIR`. If that variable does not name a directory of this user,
/// it is `/tmp/kvdepot-<uid>`. If `/tmp` cannot be written, as in a container with a read-only
/// root, it is in `/dev/shm`.
///
/// # Errors
///
/// [`Error::NotPrivate`] if the directory belongs to another user, is open to others or is a
/// symbolic link. [`Error::Path`] if it cannot be created.
pub fn runtime_dir() -> Result<PathBuf> {
    runtime_dir_in(
        env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
        [Path::new("/tmp"), Path::new("/dev/shm")],
    )
}

fn runtime_dir_in(session: Option<PathBuf>, [shared, memory]: [&Path; 2]) -> Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    // After `su` or `sudo` the variable is often still the other user's.
    let is_ours = |dir: &PathBuf| {
        dir.is_absolute() && fs::metadata(dir).is_ok_and(|at| at.is_dir() && at.uid() == user)
    };
    let own = format!("kvdepot-{user}");
    let usual = match session.filter(is_ours) {
        Some(dir) => private(dir.join("kvdepot")),
        None => private(shared.join(&own)),
    };
    usual
        .and_then(writable)
        .or_else(|error| instead(error, || private(memory.join(&own))))
}

/// Returns the directory for data that can be computed again, and creates it if it is missing.
///
/// It is `kvdepot` in `$XDG_CACHE_HOME`, or in `.cache` of the home directory. If this user can
/// write neither, it is `kvdepot-<uid>/cache` in `$TMPDIR` or `/tmp`, and kvdepot logs a warning.
///
/// # Errors
///
/// The errors of [`runtime_dir`], and [`Error::Input`] if the user has no home directory.
pub fn cache_dir() -> Result<PathBuf> {
    cache_dir_in(cache_base(), &env::temp_dir())
}

/// Returns the directory that [`cache_dir`] prefers, for data that may be missing. It is not
/// created, and this user may be unable to write it. `None` if the user has no home directory.
#[must_use]
pub fn usual_cache_dir() -> Option<PathBuf> {
    cache_base().map(|base| base.join("kvdepot"))
}

/// Returns the directory that [`cache_dir`] prefers, for data that may be missing. It is created if
/// it would be in a directory of this user. `None` if it would not, or if this user cannot write
/// it.
///
/// A process that was started with another user's `HOME` (`sudo -E`) leaves nothing there that this
/// other user cannot use.
#[must_use]
pub fn own_cache_dir() -> Option<PathBuf> {
    own_cache_dir_in(&cache_base()?, rustix::process::geteuid().as_raw())
}

fn own_cache_dir_in(base: &Path, user: u32) -> Option<PathBuf> {
    let dir = base.join("kvdepot");
    if !dir.is_dir() {
        let there = base.ancestors().find(|dir| dir.is_dir())?;
        if fs::metadata(there).ok()?.uid() != user {
            return None;
        }
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(base).ok()?;
    }
    private(dir).ok()
}

fn cache_base() -> Option<PathBuf> {
    env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute())
        .or_else(|| {
            env::home_dir()
                .filter(|home| home.is_absolute())
                .map(|home| home.join(".cache"))
        })
}

fn cache_dir_in(base: Option<PathBuf>, shared: &Path) -> Result<PathBuf> {
    let base = base.ok_or_else(|| Error::Input {
        field: "HOME",
        value: "not set".to_owned(),
        allowed: "an absolute path in HOME or in XDG_CACHE_HOME".to_owned(),
    });
    let usual = base.and_then(|base| {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&base)
            .map_err(Error::path("create the directory", &base))?;
        private(base.join("kvdepot")).and_then(writable)
    });
    let user = rustix::process::geteuid().as_raw();
    let fallback = || private(private(shared.join(format!("kvdepot-{user}")))?.join("cache"));
    usual.or_else(|error| {
        let why = error.to_string();
        let found = instead(error, fallback)?;
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            tracing::warn!(error = why, path = %found.display(),
                "no writable cache directory; default arenas are in a temporary directory and \
                 may be lost (set XDG_CACHE_HOME or dax.path)");
        });
        Ok(found)
    })
}

/// The fallback for a directory that cannot be used. One that is this user's own, and open to
/// others, is for its user to mend; and where the fallback cannot be used either, the first error
/// says most.
fn instead(error: Error, fallback: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
    if let Error::NotPrivate { path, .. } = &error {
        let user = rustix::process::geteuid().as_raw();
        if fs::symlink_metadata(path).is_ok_and(|at| at.uid() == user) {
            return Err(error);
        }
    }
    fallback().and_then(writable).map_err(|_| error)
}

/// Refuses a directory in which no files can be made: of a file system that is mounted read-only.
fn writable(path: PathBuf) -> Result<PathBuf> {
    match limits::can_make_files(&path) {
        Ok(()) => Ok(path),
        Err(error) => Err(Error::path("create files in", path)(error)),
    }
}

/// Creates the directory with mode 0700 if it is missing, and checks that only this user can access
/// it.
///
/// Returns its path.
///
/// # Errors
///
/// The errors of [`runtime_dir`].
pub fn private(path: impl Into<PathBuf>) -> Result<PathBuf> {
    let path = path.into();
    match fs::DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(Error::path("create the directory", path)(error)),
    }
    let refused = |reason: String| Error::NotPrivate {
        path: path.clone(),
        reason,
    };
    // Opened once and then examined: the name could mean something else at a second look.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let dir = match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(dir) => dir,
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(refused(
                "it is a symbolic link or not a directory; remove it".to_owned(),
            ));
        }
        Err(errno @ Errno::ACCESS) => return Err(refused(errno.to_string())),
        Err(errno) => return Err(Error::path("open the directory", path)(errno)),
    };
    let stat = rustix::fs::fstat(&dir).map_err(Error::path("examine", &path))?;
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        return Err(refused(format!(
            "it belongs to uid {}, not to uid {user}",
            stat.st_uid
        )));
    }
    let mode = stat.st_mode & 0o777;
    if mode & 0o077 == 0 {
        return Ok(path);
    }
    if mode & 0o007 != 0 || rustix::fs::fchmod(&dir, Mode::RWXU).is_err() {
        return Err(refused(format!(
            "its mode is {mode:03o}; set it to 700 (chmod 700)"
        )));
    }
    tracing::warn!(path = %path.display(), before = format!("{mode:03o}"),
        "directory was accessible to its group; mode changed to 0700 (a pod with fsGroup changes \
         the mode at each start)");
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn nothing_is_made_in_the_home_of_another_user() {
        let home = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let base = home.path().join(".cache");
        assert_eq!(own_cache_dir_in(&base, user + 1), None);
        assert!(!base.exists());
        let made = own_cache_dir_in(&base, user).unwrap();
        assert_eq!(made, base.join("kvdepot"));
        assert_eq!((mode_of(&base), mode_of(&made)), (0o700, 0o700));
        assert_eq!(own_cache_dir_in(&base, user), Some(made));
    }

    #[test]
    fn a_missing_directory_is_made_for_the_user_alone_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let made = private(root.path().join("kvdepot")).unwrap();
        assert_eq!(mode_of(&made), 0o700);
        assert_eq!(private(&made).unwrap(), made);
    }

    #[test]
    fn a_directory_open_to_its_group_becomes_private_and_one_open_to_others_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = private(root.path().join("kvdepot")).unwrap();
        // As the `fsGroup` of a pod leaves it.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2770)).unwrap();
        assert_eq!(private(&path).unwrap(), path);
        assert_eq!(mode_of(&path), 0o700);
        fs::remove_dir(&path).unwrap();
        for mode in [0o701, 0o755, 0o777] {
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = private(&path).unwrap_err();
            assert!(
                matches!(&error, Error::NotPrivate { .. }),
                "{mode:o}: {error}"
            );
            assert!(
                error.to_string().contains(&format!("{mode:03o}")),
                "{error}"
            );
            fs::remove_dir(&path).unwrap();
        }
    }

    #[test]
    fn a_symbolic_link_and_a_file_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let target = private(root.path().join("target")).unwrap();
        let link = root.path().join("link");
        symlink(target, &link).unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [link, file] {
            let error = private(&path).unwrap_err();
            assert!(matches!(&error, Error::NotPrivate { .. }), "{error}");
        }
    }

    #[test]
    fn a_missing_parent_is_named() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("absent/kvdepot");
        let error = private(&path).unwrap_err();
        assert_eq!(error.io_kind(), Some(io::ErrorKind::NotFound));
        assert!(error.to_string().contains("absent/kvdepot"), "{error}");
    }

    #[test]
    fn the_session_directory_is_used_when_it_is_ours() {
        let session = tempfile::tempdir().unwrap();
        let shared = tempfile::tempdir().unwrap();
        let shared = [shared.path(), Path::new("/nowhere")];
        let found = runtime_dir_in(Some(session.path().to_owned()), shared).unwrap();
        assert_eq!(found, session.path().join("kvdepot"));
    }

    #[test]
    fn without_a_session_directory_the_shared_one_is_named_after_the_user() {
        let shared = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let expected = shared.path().join(format!("kvdepot-{user}"));
        let absent = shared.path().join("absent");
        for session in [None, Some(PathBuf::from("relative")), Some(absent)] {
            let shared = [shared.path(), Path::new("/nowhere")];
            assert_eq!(runtime_dir_in(session, shared).unwrap(), expected);
        }
    }

    #[test]
    fn where_the_usual_directories_cannot_be_made_another_is_used_or_the_first_is_named() {
        let root = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let own = root.path().join(format!("kvdepot-{user}"));
        // A file, and what lies below one, cannot be a directory, whoever asks.
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let nowhere = file.join("below");
        for base in [None, Some(file.clone()), Some(nowhere.clone())] {
            let found = cache_dir_in(base, root.path()).unwrap();
            assert_eq!(found, own.join("cache"));
            assert_eq!((mode_of(&own), mode_of(&found)), (0o700, 0o700));
        }
        let found = runtime_dir_in(None, [&nowhere, root.path()]).unwrap();
        assert_eq!(found, own);
        let error = cache_dir_in(Some(nowhere.clone()), &nowhere).unwrap_err();
        assert!(error.to_string().contains("file/below"), "{error}");
        let error = runtime_dir_in(None, [&nowhere, &file]).unwrap_err();
        assert!(error.to_string().contains("file/below"), "{error}");
    }

    #[test]
    fn a_users_own_directory_that_others_may_enter_is_not_passed_over() {
        let root = tempfile::tempdir().unwrap();
        let open = root.path().join("kvdepot");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        let refused = cache_dir_in(Some(root.path().to_owned()), root.path());
        assert!(refused.unwrap_err().to_string().contains("chmod 700"));
    }
}
