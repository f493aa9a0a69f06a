//! Directories that are private to the user: sockets in one, caches in the other.
//!
//! Both have mode 0700 and belong to the effective user. A directory that another user prepared
//! under the same name (in `/tmp` anyone can), or a symbolic link, is refused: whoever owns the
//! directory could put a socket of its own there.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{Error, Result};

/// The directory for sockets, made when it is missing: `kvdepot` in `$XDG_RUNTIME_DIR`, or
/// `/tmp/kvdepot-<uid>` where that variable names no directory of this user.
///
/// # Errors
///
/// [`Error::NotPrivate`] when it belongs to someone else, is open to others or is a symbolic link;
/// [`Error::Path`] when it cannot be made.
pub fn runtime_dir() -> Result<PathBuf> {
    runtime_dir_in(
        env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
        Path::new("/tmp"),
    )
}

fn runtime_dir_in(session: Option<PathBuf>, shared: &Path) -> Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    // After `su` or `sudo` the variable is often still the other user's.
    let is_ours = |dir: &PathBuf| {
        dir.is_absolute() && fs::metadata(dir).is_ok_and(|at| at.is_dir() && at.uid() == user)
    };
    match session.filter(is_ours) {
        Some(dir) => private(dir.join("kvdepot")),
        None => private(shared.join(format!("kvdepot-{user}"))),
    }
}

/// The directory for what can be computed again, made when it is missing: `kvdepot` in
/// `$XDG_CACHE_HOME`, or in `.cache` of the home directory.
///
/// # Errors
///
/// Those of [`runtime_dir`], and [`Error::Input`] when the user has no home directory.
pub fn cache_dir() -> Result<PathBuf> {
    let base = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute())
        .or_else(|| {
            env::home_dir()
                .filter(|home| home.is_absolute())
                .map(|home| home.join(".cache"))
        })
        .ok_or_else(|| Error::Input {
            field: "HOME",
            value: "not set".to_owned(),
            allowed: "an absolute path, here or in XDG_CACHE_HOME".to_owned(),
        })?;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&base)
        .map_err(Error::path("create the directory", &base))?;
    private(base.join("kvdepot"))
}

/// Makes the directory with mode 0700 unless it is there, and refuses it unless it is ours alone.
///
/// # Errors
///
/// Those of [`runtime_dir`].
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
                "it is a symbolic link or no directory; remove it".to_owned(),
            ));
        }
        Err(errno @ Errno::ACCESS) => return Err(refused(errno.to_string())),
        Err(errno) => return Err(Error::path("open the directory", path)(errno)),
    };
    let stat = rustix::fs::fstat(&dir).map_err(Error::path("examine", &path))?;
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        return Err(refused(format!(
            "it belongs to user {}, not to {user}",
            stat.st_uid
        )));
    }
    let mode = stat.st_mode & 0o777;
    if mode & 0o077 != 0 {
        return Err(refused(format!(
            "its mode is {mode:03o}, expected 700 (chmod 700)"
        )));
    }
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
    fn a_missing_directory_is_made_for_the_user_alone_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let made = private(root.path().join("kvdepot")).unwrap();
        assert_eq!(mode_of(&made), 0o700);
        assert_eq!(private(&made).unwrap(), made);
    }

    #[test]
    fn a_directory_open_to_others_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("kvdepot");
        for mode in [0o701, 0o720, 0o755, 0o777] {
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
        let found = runtime_dir_in(Some(session.path().to_owned()), shared.path()).unwrap();
        assert_eq!(found, session.path().join("kvdepot"));
    }

    #[test]
    fn without_a_session_directory_the_shared_one_is_named_after_the_user() {
        let shared = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let expected = shared.path().join(format!("kvdepot-{user}"));
        let absent = shared.path().join("absent");
        for session in [None, Some(PathBuf::from("relative")), Some(absent)] {
            assert_eq!(runtime_dir_in(session, shared.path()).unwrap(), expected);
        }
    }
}
