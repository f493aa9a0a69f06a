//! Unix sockets at the paths that options name.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use kvdepot_arena::Error;
use kvdepot_host::fork::Unshared;
use kvdepot_host::socket::{self, Bound};
use kvdepot_host::{dirs, limits};

/// Rejects a path of option `field` that is too long, or at which something other than a socket
/// exists, which is not removed.
pub(crate) fn check(field: &str, path: &Path) -> Result<(), Error> {
    let len = path.as_os_str().len();
    if len > 107 {
        let allowed = format!(
            "an absolute path of at most 107 bytes (limit of Unix sockets); this path has {len}"
        );
        return Err(Error::config(field, path.display(), allowed));
    }
    match path.symlink_metadata() {
        Ok(at) if !at.file_type().is_socket() => Err(Error::config(
            field,
            path.display(),
            "a path that does not exist, or a socket without a server",
        )),
        _ => Ok(()),
    }
}

/// Returns the runtime directory, which is made when it is missing, if `path` is in it. Other
/// directories are their users' own affair.
pub(crate) fn runtime_of(path: &Path) -> Option<&Path> {
    let is_likely = |dir: &&Path| dir.to_string_lossy().contains("kvdepot");
    let dir = path.parent().filter(is_likely)?;
    dirs::runtime_dir()
        .is_ok_and(|ours| ours == dir)
        .then_some(dir)
}

/// Rejects a path whose directory is missing, or contains device nodes. The runtime directory is
/// made when it is missing.
pub(crate) fn check_directory(field: &str, path: &Path) -> Result<(), Error> {
    if runtime_of(path).is_some() {
        return Ok(());
    }
    let refuse = |allowed: &str| Err(Error::config(field, path.display(), allowed));
    match path.parent() {
        Some(parent) if limits::is_of_devices(parent) => refuse("a path outside /dev"),
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
            refuse("a path in an existing, writable directory")
        }
        _ => Ok(()),
    }
}

/// Listens at a path of option `field`, and replaces a stale socket there.
pub(crate) fn listen(
    field: &str,
    path: &Path,
    mode: u32,
) -> Result<(Unshared<UnixListener>, Bound), Error> {
    check(field, path)?;
    socket::listen(path, mode).map_err(|source| {
        let allowed = match source.kind() {
            io::ErrorKind::AddrInUse => "a path on which no other server listens".to_owned(),
            _ => format!("a path in an existing, writable directory ({source})"),
        };
        Error::config(field, path.display(), allowed)
    })
}
