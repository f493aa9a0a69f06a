//! HTTP server of a depot: metrics, statistics and health checks.
//!
//! One thread with a runtime of its own serves all connections (`server`), and forked children keep
//! none of its sockets (`socket`). `answer` checks a request and returns its page, `tokens` has the
//! tokens of requests, `limits` the bounds of connections, and `source` the data of the depot.
//! `discovery` publishes the port if the system has selected it.

mod answer;
mod discovery;
mod limits;
mod server;
mod socket;
mod source;
mod tokens;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use kvdepot_arena::Error;
use kvdepot_host::cpu;
use kvdepot_host::fork::{Origin, Unshared};
use kvdepot_host::socket::{Bound, listen_tcp};
use kvdepot_store::Config;
use kvdepot_store::config::{HttpAddress, HttpConfig};
use parking_lot::Mutex;
use tokio::runtime::Builder;

use crate::socket_path;
use answer::Site;
pub(crate) use discovery::sweep;
use limits::Limits;
use socket::{Listener, Stream};
pub(crate) use source::Source;
use tokens::Tokens;

/// A running HTTP server. It ends when the value is dropped, except in a forked child.
pub(crate) struct Http {
    address: String,
    running: Mutex<Option<Running>>,
}

/// Resources that end with the server.
struct Running {
    thread: Option<JoinHandle<()>>,
    /// Ends the thread's wait for connections.
    waker: Unshared<UnixStream>,
    /// The path, if the server listens at one.
    bound: Option<Bound>,
    /// The file with the address, if the system has selected the port.
    discovery: Option<PathBuf>,
    origin: Origin,
}

/// A socket that listens.
struct Listening {
    listener: Listener,
    address: String,
    bound: Option<Bound>,
    /// True if the system has selected the port.
    is_selected: bool,
}

impl Http {
    /// Rejects an address or a file of tokens that cannot be used, without listening.
    pub(crate) fn check(address: &HttpAddress, config: &HttpConfig) -> Result<(), Error> {
        if let HttpAddress::Unix(path) = address {
            socket_path::check("http", path)?;
            socket_path::check_directory("http", path)?;
        }
        let tokens = config.token_file.as_deref().map(Tokens::open);
        tokens.transpose().map(drop)
    }

    /// Serves `source` at `address`. `socket` is the socket of the depot.
    pub(crate) fn start(
        address: &HttpAddress,
        config: &Config,
        socket: &Path,
        source: Box<dyn Source>,
    ) -> Result<Http, Error> {
        Http::start_with(Limits::here(), address, config, socket, source)
    }

    fn start_with(
        limits: Limits,
        address: &HttpAddress,
        config: &Config,
        socket: &Path,
        source: Box<dyn Source>,
    ) -> Result<Http, Error> {
        let io = |source| Error::Io {
            path: format!("http: {address}").into(),
            source,
        };
        let tokens = config.http.token_file.as_deref().map(Tokens::open);
        let site = Site::new(source, tokens.transpose()?, config.http.hosts.clone());
        let (waker, woken) = Unshared::pair().map_err(io)?;
        let origin = Origin::here()?;
        let listening = Listening::at(address, config.socket_mode)?;
        // If a later step fails, its drop removes the path.
        let mut running = Running {
            thread: None,
            waker,
            bound: listening.bound,
            discovery: None,
            origin,
        };
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(io)?;
        let (listener, woken) = {
            let _entered = runtime.enter();
            let listener = listening.listener.watched().map_err(io)?;
            (listener, Stream::Unix(woken).watched().map_err(io)?)
        };
        let serve = move || {
            runtime.block_on(server::run(listener, woken, Arc::new(site), limits));
        };
        running.thread = Some(cpu::spawn("kvdepot-http", serve).map_err(io)?);
        if listening.is_selected {
            let file = discovery::path_for(socket);
            discovery::publish(&file, &listening.address).map_err(|source| Error::Io {
                path: file.clone(),
                source,
            })?;
            running.discovery = Some(file);
        }
        let address = listening.address;
        tracing::info!(address, "HTTP server started");
        Ok(Http {
            address,
            running: Mutex::new(Some(running)),
        })
    }

    /// Removes the address that a killed server has left next to its socket.
    pub(crate) fn forget(socket: &Path) {
        discovery::remove(&discovery::path_for(socket));
    }

    /// Returns the address, as in the option `http`, with the port at which the server listens.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Ends the server. A second call does nothing.
    pub(crate) fn stop(&self) {
        let running = self.running.lock().take();
        drop(running);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The thread and the names are those of the parent.
        if !self.origin.is_here() {
            return;
        }
        self.discovery
            .as_deref()
            .into_iter()
            .for_each(discovery::remove);
        let _woken = self.waker.shutdown(Shutdown::Both);
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("internal error: HTTP thread panicked; metrics were not served");
        }
        self.bound.iter().for_each(Bound::remove);
    }
}

impl Listening {
    fn at(address: &HttpAddress, mode: u32) -> Result<Listening, Error> {
        match address {
            HttpAddress::Tcp(at) => {
                let refuse = |source: io::Error| {
                    let allowed =
                        format!("an address at which no other program listens ({source})");
                    Error::config("http", address, allowed)
                };
                let listener = listen_tcp(*at).map_err(refuse)?;
                let own = listener.local_addr().map_err(refuse)?;
                Ok(Listening {
                    listener: Listener::Tcp(listener),
                    address: own.to_string(),
                    bound: None,
                    is_selected: at.port() == 0,
                })
            }
            HttpAddress::Unix(path) => {
                let (listener, bound) = socket_path::listen("http", path, mode)?;
                Ok(Listening {
                    listener: Listener::Unix(listener),
                    address: address.to_string(),
                    bound: Some(bound),
                    is_selected: false,
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    use serde_json::json;

    use super::source::double::Double;
    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(20);
    const REQUEST: &str = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";

    fn limits() -> Limits {
        Limits {
            connections: 8,
            head: LONG,
            idle: LONG,
            end: SHORT,
        }
    }

    /// A server at a port that the system has selected, and its directory.
    fn serve(limits: Limits) -> (Http, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let config = Config::new("Cache", &json!({ "http": "127.0.0.1:0" })).unwrap();
        let address = config.http.address.clone().unwrap();
        let depot = Box::new(Arc::new(Double::default()));
        let socket = dir.path().join("s");
        let http = Http::start_with(limits, &address, &config, &socket, depot);
        (http.unwrap(), dir)
    }

    fn connect(http: &Http) -> TcpStream {
        let stream = TcpStream::connect(http.address()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    /// Sends a request, and returns true if its response has come.
    fn ask(mut stream: &TcpStream) -> bool {
        // The other end may be closed.
        let _sent = stream.write_all(REQUEST.as_bytes());
        let mut response = Vec::new();
        let mut byte = [0];
        while !response.ends_with(b"ok\n") {
            match stream.read(&mut byte) {
                Ok(1) => response.extend(byte),
                _ => return false,
            }
        }
        response.starts_with(b"HTTP/1.1 200 OK\r\n")
    }

    /// Waits until the server ends a connection.
    fn has_ended(mut stream: &TcpStream) -> bool {
        match stream.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    #[test]
    fn a_head_that_does_not_end_in_time_ends_its_connection() {
        let (http, _dir) = serve(Limits {
            head: SHORT,
            ..limits()
        });
        for begun in ["", "G", &REQUEST[..REQUEST.len() - 1]] {
            let slow = connect(&http);
            let _sent = (&slow).write_all(begun.as_bytes());
            assert!(has_ended(&slow), "{begun:?}");
        }
    }

    #[test]
    fn an_idle_connection_ends_after_a_while() {
        let (http, _dir) = serve(Limits {
            idle: SHORT,
            ..limits()
        });
        let idle = connect(&http);
        assert!(ask(&idle) && has_ended(&idle));
    }

    #[test]
    fn of_too_many_connections_the_one_without_progress_for_longest_ends() {
        let (http, _dir) = serve(Limits {
            connections: 2,
            ..limits()
        });
        let (first, second) = (connect(&http), connect(&http));
        assert!(ask(&second) && ask(&first));
        let third = connect(&http);
        assert!(has_ended(&second));
        assert!(ask(&third) && ask(&first));
    }

    #[test]
    fn a_stop_ends_the_connections_and_removes_the_address() {
        let (http, dir) = serve(limits());
        let file = dir.path().join("s.http");
        let address = std::fs::read_to_string(&file).unwrap();
        assert_eq!(address.trim_end(), http.address());
        let (idle, silent, slow) = (connect(&http), connect(&http), connect(&http));
        (&slow).write_all(&REQUEST.as_bytes()[..9]).unwrap();
        // Accepted after the others.
        assert!(ask(&idle) && ask(&connect(&http)));
        http.stop();
        for connection in [&idle, &silent, &slow] {
            assert!(has_ended(connection));
        }
        assert!(!file.exists());
        let refused = TcpStream::connect(http.address()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        http.stop();
    }
}
