//! The owner's end of the socket.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_media::host::{dirs, peer};
use parking_lot::Mutex;

use super::wire::{self, Role, Terms};
use crate::Error;
use crate::arena::Arena;
use crate::config::{Config, Socket};

/// How long a process that connects may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// Pause before accepting is tried again, where the system refuses it: out of descriptors, say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Hands out the media's descriptors until it is stopped.
pub(crate) struct Server {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    /// The listening socket once more, to end its accept.
    listener: UnixStream,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Owner {
    tiers: Vec<Arc<Arena>>,
    terms: Terms,
    stop: Arc<AtomicBool>,
    /// Open as long as this process serves, so that movers notice its end.
    connections: Mutex<Vec<UnixStream>>,
}

impl Server {
    /// Listens where the configuration says; `None` when it says `off`.
    pub(crate) fn start(
        config: &Config,
        tiers: &[Arc<Arena>],
        session: u64,
    ) -> Result<Option<Server>, Error> {
        let path = match &config.socket {
            Socket::Off => return Ok(None),
            Socket::At(path) => path.clone(),
            Socket::Auto => dirs::runtime_dir()?.join(format!("{session:016x}.sock")),
        };
        let terms = Terms {
            session,
            lanes: config.lanes,
            slice_size: config.slice_size,
        };
        let listener = listen(&path)?;
        let twin = listener.try_clone().map_err(|source| Error::Io {
            path: path.clone(),
            source,
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let owner = Owner {
            tiers: tiers.to_vec(),
            terms,
            stop: Arc::clone(&stop),
            connections: Mutex::new(Vec::new()),
        };
        let thread = std::thread::Builder::new()
            .name("kvdepot-share".into())
            .spawn(move || owner.run(&listener))
            .map_err(|source| Error::Io {
                path: path.clone(),
                source,
            })?;
        Ok(Some(Server {
            path,
            stop,
            listener: OwnedFd::from(twin).into(),
            thread: Mutex::new(Some(thread)),
        }))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Stops listening and removes the socket. Stopping twice does nothing.
    pub(crate) fn stop(&self) {
        let Some(thread) = self.thread.lock().take() else {
            return;
        };
        self.stop.store(true, Ordering::SeqCst);
        // Ends the accept, whatever has become of the path.
        let _ended = self.listener.shutdown(Shutdown::Both);
        if thread.join().is_err() {
            tracing::error!("the socket's thread panicked");
        }
        let _gone = std::fs::remove_file(&self.path);
    }
}

/// Binds with mode 0600. A socket that nobody listens on any more is replaced.
fn listen(path: &Path) -> Result<UnixListener, Error> {
    let error = |source: std::io::Error| {
        let allowed = format!("a path in a directory that exists and can be written ({source})");
        Error::config("socket", path.display(), allowed)
    };
    if path.as_os_str().len() > 107 {
        return Err(Error::config(
            "socket",
            path.display(),
            "a path of at most 107 bytes (a limit of Unix sockets)",
        ));
    }
    if UnixStream::connect(path).is_err() {
        // Nobody answers: the owner that bound it is dead, or there is none.
        let is_socket = std::fs::symlink_metadata(path)
            .is_ok_and(|data| std::os::unix::fs::FileTypeExt::is_socket(&data.file_type()));
        if is_socket {
            std::fs::remove_file(path).map_err(error)?;
        }
    }
    let listener = UnixListener::bind(path).map_err(error)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(error)?;
    Ok(listener)
}

impl Owner {
    fn run(&self, listener: &UnixListener) {
        let mut failing = None;
        for socket in listener.incoming() {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let socket = match socket {
                Ok(socket) => socket,
                Err(error) => {
                    // Whoever wants to attach still stands in line: once is enough.
                    if failing.replace(error.kind()) != Some(error.kind()) {
                        tracing::warn!(%error, "no process can attach");
                    }
                    std::thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            failing = None;
            match self.serve(&socket) {
                Ok(()) => {
                    let mut connections = self.connections.lock();
                    connections.retain(is_open);
                    connections.push(socket);
                }
                Err(error) => tracing::warn!(%error, "a process could not attach"),
            }
        }
    }

    fn serve(&self, socket: &UnixStream) -> Result<(), Error> {
        let limit = |source| Error::Io {
            path: "socket".into(),
            source,
        };
        socket.set_read_timeout(Some(PATIENCE)).map_err(limit)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(limit)?;
        let credentials = peer::credentials(socket)?;
        let own = peer::own_uid();
        if credentials.uid != own {
            let reason = format!("uid {} may not attach, only uid {own}", credentials.uid);
            wire::send_refusal(socket, &reason)?;
            return Err(Error::Peer {
                socket: "(peer)".into(),
                reason,
            });
        }
        let role = wire::receive_request(socket).inspect_err(|error| {
            let _told = wire::send_refusal(socket, &error.to_string());
        })?;
        let media = self
            .tiers
            .iter()
            .map(|tier| Ok((tier.mapping().len(), tier.descriptor(role == Role::Write)?)))
            .collect::<Result<Vec<_>, Error>>()?;
        wire::send_welcome(socket, &self.terms, &media)?;
        tracing::debug!(pid = credentials.pid, ?role, "a process attached");
        Ok(())
    }
}

/// Whether the other end still has its connection.
fn is_open(mut socket: &UnixStream) -> bool {
    use std::io::Read;
    if socket.set_nonblocking(true).is_err() {
        return false;
    }
    let mut byte = [0];
    match socket.read(&mut byte) {
        Ok(count) => count > 0,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}
