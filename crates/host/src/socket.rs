//! Listening sockets, which forked children do not keep. Their paths: exclusive use, and removal of
//! stale sockets.
//!
//! The kernel closes a socket with its process but keeps its path. No other process can listen
//! there before the path is removed. Checks, removal and binding happen under a lock of the
//! directory, so that two owners that start together do not remove each other's socket. An owner
//! that stops removes the path only if it still refers to its own socket. A socket that the service
//! manager has bound ([`PassedSocket`]) keeps its path.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::fork::Unshared;

/// Longest wait for the directory's lock, which is held for system calls only. Whoever holds it
/// longer is stopped; two that start at once may then remove each other's sockets, but nobody
/// waits for ever.
const LOCK_MAX: Duration = Duration::from_secs(2);

/// Connections that may wait to be accepted; the system has a bound of its own.
const BACKLOG: i32 = 4096;

/// Pause between two attempts at that lock.
const PAUSE: Duration = Duration::from_millis(1);

/// The path of a socket that this process has bound; forked children do not keep it.
///
/// The socket stays open as long as this value exists. So other processes do not treat the socket
/// as stale, and the system does not reuse its inode number.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    /// Device and inode: another socket may be there by now. None of a socket that the service
    /// manager keeps.
    identity: Option<(u64, u64)>,
    is_passed: bool,
    _socket: Unshared<UnixListener>,
}

/// Descriptor of the first socket that a service manager passes (`sd_listen_fds(3)`).
const FIRST_PASSED: RawFd = 3;

/// A listening socket that the service manager has bound for this process, and keeps.
///
/// Clients that connect while no server runs wait in the queue of the socket for the next server.
#[derive(Debug)]
pub struct PassedSocket {
    listener: Unshared<UnixListener>,
    path: PathBuf,
}

impl PassedSocket {
    /// Takes the socket that the service manager passed to this process (`sd_listen_fds(3)`).
    ///
    /// Returns `None` if the service manager passed no socket to this process, or if an earlier
    /// call has taken the socket.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if the service manager passed something other than one listening
    /// Unix stream socket with a path. Otherwise the error of the system.
    pub fn take() -> io::Result<Option<PassedSocket>> {
        static IS_TAKEN: AtomicBool = AtomicBool::new(false);
        let [pid, count] = ["LISTEN_PID", "LISTEN_FDS"].map(|name| {
            let value = std::env::var(name).ok();
            value.and_then(|value| value.parse::<u32>().ok())
        });
        // The variables of a parent are for the parent.
        if pid != Some(std::process::id()) || count.is_none_or(|count| count == 0) {
            return Ok(None);
        }
        let refused = |what: &str| io::Error::new(ErrorKind::InvalidInput, what);
        if count != Some(1) {
            return Err(refused("several descriptors"));
        }
        if IS_TAKEN.swap(true, Ordering::SeqCst) {
            return Ok(None);
        }
        // SAFETY: a system call without pointers.
        if unsafe { libc::fcntl(FIRST_PASSED, libc::F_GETFD) } < 0 {
            return Err(refused("no open descriptor"));
        }
        // SAFETY: the service manager opened this descriptor for this process, and the flag lets
        // one call take it.
        let passed = unsafe { OwnedFd::from_raw_fd(FIRST_PASSED) };
        let is_listening = rustix::net::sockopt::socket_acceptconn(&passed).unwrap_or(false);
        if !is_listening {
            return Err(refused("a descriptor that is not a listening socket"));
        }
        // Registered under another number, which no child keeps.
        let listener = Unshared::open(|| passed.try_clone().map(UnixListener::from))?;
        drop(passed);
        let address = listener.local_addr()?;
        match address.as_pathname().filter(|path| path.is_absolute()) {
            Some(path) => Ok(Some(PassedSocket {
                path: path.to_owned(),
                listener,
            })),
            None => Err(refused("a socket without a path")),
        }
    }

    /// Returns the path at which the socket listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the socket like [`listen`], and the permission bits of its path.
    ///
    /// # Errors
    ///
    /// The error of the system.
    pub fn into_bound(self) -> io::Result<(Unshared<UnixListener>, Bound, u32)> {
        let mode = fs::metadata(&self.path)?.mode() & 0o777;
        let bound = Bound {
            path: self.path,
            identity: None,
            is_passed: true,
            _socket: Unshared::open(|| self.listener.try_clone())?,
        };
        Ok((self.listener, bound, mode))
    }
}

/// Listens at `path` with the permission bits `mode`, and replaces a stale socket.
///
/// # Errors
///
/// [`ErrorKind::AddrInUse`] if another process listens there, or if the path is something else.
/// Otherwise the error of the system.
pub fn listen(path: &Path, mode: u32) -> io::Result<(Unshared<UnixListener>, Bound)> {
    let _lock = lock_directory_of(path);
    if is_deserted(path) {
        fs::remove_file(path)?;
    }
    let socket = unbound(AddressFamily::UNIX)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let listener = socket.map(UnixListener::from);
    let bound = Bound {
        path: path.to_owned(),
        identity: identity(path),
        is_passed: false,
        _socket: Unshared::open(|| listener.try_clone())?,
    };
    // Before anybody can connect.
    let protected = fs::set_permissions(path, fs::Permissions::from_mode(mode));
    let listens = || rustix::net::listen(&listener, BACKLOG).map_err(io::Error::from);
    match protected.and_then(|()| listens()) {
        Ok(()) => Ok((listener, bound)),
        Err(error) => {
            bound.unlink();
            Err(error)
        }
    }
}

/// Listens at the TCP address `address`; with port 0, the system selects a free port.
///
/// # Errors
///
/// [`ErrorKind::AddrInUse`] if another process listens there. Otherwise the error of the system.
pub fn listen_tcp(address: SocketAddr) -> io::Result<Unshared<TcpListener>> {
    let socket = unbound(match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    })?;
    // A server that has just ended leaves connections that the system still waits for.
    set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.map(TcpListener::from))
}

/// A stream socket without an address. It is bound once no child has a duplicate, because a second
/// attempt to bind another socket would fail.
fn unbound(family: AddressFamily) -> io::Result<Unshared<OwnedFd>> {
    Unshared::open(|| {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None);
        socket.map_err(io::Error::from)
    })
}

impl Bound {
    /// Returns the path at which the socket listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the service manager has bound the socket and keeps it.
    ///
    /// To shut down such a socket would end it for every later server, too.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        self.is_passed
    }

    /// Removes the path, unless it belongs to another socket now, or to the service manager.
    pub fn remove(&self) {
        let _lock = lock_directory_of(&self.path);
        self.unlink();
    }

    fn unlink(&self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            // Somebody else may have removed it just now, or the directory is not ours any more.
            let _gone = fs::remove_file(&self.path);
        }
    }
}

/// Returns true if `path` is a stale socket: no process has it open. It is false if that cannot be
/// determined.
#[must_use]
pub fn is_deserted(path: &Path) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|at| at.file_type().is_socket());
    // A socket of another kind than it listens with is refused as such by a living one, which
    // learns nothing of it; so it need not be disturbed, nor waited for where it is stopped.
    is_socket
        && UnixDatagram::unbound()
            .and_then(|probe| probe.connect(path))
            .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// Removes a stale socket. Returns false if the socket is in use or does not exist.
///
/// # Errors
///
/// The error of the system if the socket cannot be removed.
pub fn remove_deserted(path: &Path) -> io::Result<bool> {
    let _lock = lock_directory_of(path);
    if !is_deserted(path) {
        return Ok(false);
    }
    fs::remove_file(path).map(|()| true)
}

/// Returns the stale sockets in `directory` whose names end in `.sock`, sorted by name.
#[must_use]
pub fn deserted(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let is_ours = |path: &PathBuf| path.extension().is_some_and(|name| name == "sock");
    let mut found: Vec<PathBuf> = paths
        .filter(is_ours)
        .filter(|path| is_deserted(path))
        .collect();
    found.sort();
    found
}

/// Removes the stale sockets in `directory` (see [`deserted`]). Returns the number of removed
/// sockets.
pub fn sweep(directory: &Path) -> usize {
    let removed = deserted(directory)
        .into_iter()
        .filter(|path| remove_deserted(path).unwrap_or(false));
    removed.count()
}

/// Removes the file `beside` of a socket in the same directory if nothing exists at `path`, the
/// socket's path. The directory lock keeps others from binding.
pub fn remove_beside(path: &Path, beside: &Path) {
    let _lock = lock_directory_of(path);
    if path.symlink_metadata().is_err() {
        // Somebody else may have removed it just now.
        let _gone = fs::remove_file(beside);
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let at = fs::symlink_metadata(path).ok()?;
    at.file_type().is_socket().then(|| (at.dev(), at.ino()))
}

/// A directory whose sockets no other process binds or removes.
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // A child that was forked since then has the descriptor too, and would keep the lock.
        let _closed_at_least = self.0.unlock();
    }
}

/// One process at a time binds and removes sockets of a directory. `None` where that cannot be
/// had: see [`LOCK_MAX`].
fn lock_directory_of(path: &Path) -> Option<Locked> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let file = File::open(directory).ok()?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Some(Locked(file)),
            Err(fs::TryLockError::WouldBlock) if begun.elapsed() < LOCK_MAX => {
                std::thread::sleep(PAUSE);
            }
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

    use super::*;

    fn leave_behind(path: &Path) {
        drop(UnixListener::bind(path).unwrap());
    }

    #[test]
    fn a_socket_that_nobody_has_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        leave_behind(&path);
        assert!(is_deserted(&path));
        let (_listener, bound) = listen(&path, 0o640).unwrap();
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert!(!is_deserted(&path) && !remove_deserted(&path).unwrap());
        let again = listen(&path, 0o600).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AddrInUse);
        UnixStream::connect(&path).unwrap();
        bound.remove();
        assert!(!path.exists());
    }

    #[test]
    fn whoever_stops_does_not_remove_its_successors_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let (first, bound) = listen(&path, 0o600).unwrap();
        // Still its own, although it does not listen any more.
        drop(first);
        assert!(listen(&path, 0o600).is_err());
        fs::remove_file(&path).unwrap();
        let (_next, successor) = listen(&path, 0o600).unwrap();
        bound.remove();
        UnixStream::connect(&path).unwrap();
        successor.remove();
        assert!(!path.exists());
    }

    #[test]
    fn of_many_that_start_at_one_path_exactly_one_listens_there() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..50 {
            let path = dir.path().join(format!("{round}.sock"));
            leave_behind(&path);
            let start = std::sync::Barrier::new(4);
            let listen = || {
                start.wait();
                listen(&path, 0o600).ok()
            };
            let won: Vec<(Unshared<UnixListener>, Bound)> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(listen)).collect();
                let each = threads.into_iter().map(|thread| thread.join().unwrap());
                each.flatten().collect()
            });
            assert_eq!(won.len(), 1, "round {round}");
            // And it is the one that is found.
            let caller = UnixStream::connect(&path).unwrap();
            won[0].0.set_nonblocking(true).unwrap();
            won[0].0.accept().unwrap();
            drop(caller);
        }
    }

    #[test]
    fn a_port_has_one_listener_and_is_free_again_after_it() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = listen_tcp(any).unwrap();
        let address = listener.local_addr().unwrap();
        assert_ne!(address.port(), 0);
        let again = listen_tcp(address).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AddrInUse);
        let caller = std::net::TcpStream::connect(address).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        // The system waits for the rest of this connection.
        drop((accepted, listener));
        drop(caller);
        listen_tcp(address).unwrap();
    }

    #[test]
    fn what_the_dead_left_is_swept_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["1.sock", "2.sock", "other"] {
            leave_behind(&at(name));
        }
        fs::write(at("file.sock"), "").unwrap();
        let (living, _bound) = listen(&at("3.sock"), 0o600).unwrap();
        assert_eq!(deserted(dir.path()), [at("1.sock"), at("2.sock")]);
        assert_eq!(sweep(dir.path()), 2);
        assert_eq!(sweep(dir.path()), 0);
        for name in ["other", "file.sock", "3.sock"] {
            assert!(at(name).symlink_metadata().is_ok(), "{name}");
        }
        // Nobody was disturbed.
        living.set_nonblocking(true).unwrap();
        assert!(living.accept().is_err());
    }

    #[test]
    fn a_child_does_not_keep_the_lock_of_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let lock = lock_directory_of(&path);
        assert!(lock.is_some());
        // SAFETY: the child makes a system call and nothing else.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: it takes nothing.
                unsafe { libc::pause() };
            }
        }
        drop(lock);
        let again = lock_directory_of(&path);
        let child = Pid::from_raw(child).unwrap();
        kill_process(child, Signal::KILL).unwrap();
        waitpid(Some(child), WaitOptions::empty()).unwrap();
        assert!(again.is_some(), "the child has it");
    }
}
