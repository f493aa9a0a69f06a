//! Sockets of the HTTP server, which forked children do not keep.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hyper::rt;
use kvdepot_host::fds;
use kvdepot_host::fork::Unshared;
use tokio::io::unix::AsyncFd;

use super::limits::Progress;

/// Most bytes of one read.
const READ_MAX: usize = 4096;

/// A listening socket.
pub(super) enum Listener {
    Tcp(Unshared<TcpListener>),
    Unix(Unshared<UnixListener>),
}

/// One end of a connection.
pub(super) enum Stream {
    Tcp(Unshared<TcpStream>),
    Unix(Unshared<UnixStream>),
}

impl Listener {
    /// Accepts a connection without waiting.
    pub(super) fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Listener::Tcp(listener) => {
                let stream = Unshared::open(|| listener.accept().map(|(stream, _)| stream))?;
                // Or else the end of each response may wait for the peer.
                let _slower = stream.set_nodelay(true);
                Stream::Tcp(stream)
            }
            Listener::Unix(listener) => Stream::Unix(Unshared::open(|| {
                listener.accept().map(|(stream, _)| stream)
            })?),
        })
    }

    /// Has the runtime of the calling thread wait for connections.
    pub(super) fn watched(self) -> io::Result<AsyncFd<Listener>> {
        match &self {
            Listener::Tcp(listener) => listener.set_nonblocking(true)?,
            Listener::Unix(listener) => listener.set_nonblocking(true)?,
        }
        watched(self)
    }

    /// Ends the listening, also for duplicates: a child that another thread is starting has one
    /// until it is its own program.
    pub(super) fn end(self) {
        let _ended = match self {
            Listener::Tcp(listener) => {
                let socket = listener.map(|socket| TcpStream::from(OwnedFd::from(socket)));
                socket.shutdown(Shutdown::Both)
            }
            Listener::Unix(listener) => {
                let socket = listener.map(|socket| UnixStream::from(OwnedFd::from(socket)));
                socket.shutdown(Shutdown::Both)
            }
        };
    }
}

impl Stream {
    /// Has the runtime of the calling thread wait for bytes.
    pub(super) fn watched(self) -> io::Result<AsyncFd<Stream>> {
        match &self {
            Stream::Tcp(stream) => stream.set_nonblocking(true)?,
            Stream::Unix(stream) => stream.set_nonblocking(true)?,
        }
        watched(self)
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&**stream).read(bytes),
            Stream::Unix(stream) => (&**stream).read(bytes),
        }
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&**stream).write(bytes),
            // Without a signal if the peer has closed its end.
            Stream::Unix(stream) => match fds::try_send(stream, bytes)? {
                0 if !bytes.is_empty() => Err(ErrorKind::WouldBlock.into()),
                sent => Ok(sent),
            },
        }
    }

    fn shutdown(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Listener::Tcp(listener) => listener.as_raw_fd(),
            Listener::Unix(listener) => listener.as_raw_fd(),
        }
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Stream::Tcp(stream) => stream.as_raw_fd(),
            Stream::Unix(stream) => stream.as_raw_fd(),
        }
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe; these sockets have one descriptor, and close it when they \
              are dropped"
)]
fn watched<T: AsRawFd>(socket: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::new(socket)
}

/// A connection as hyper reads and writes it.
pub(super) struct Connection {
    pub(super) stream: AsyncFd<Stream>,
    pub(super) progress: Arc<Progress>,
}

impl rt::Read for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut into: rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; READ_MAX];
        let most = into.remaining().min(READ_MAX);
        let count = loop {
            let mut ready = ready!(self.stream.poll_read_ready(cx))?;
            if let Ok(read) = ready.try_io(|stream| stream.get_ref().read(&mut bytes[..most])) {
                break read?;
            }
        };
        if count > 0 {
            self.progress.received();
        }
        into.put_slice(&bytes[..count]);
        Poll::Ready(Ok(()))
    }
}

impl rt::Write for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.stream.poll_write_ready(cx))?;
            if let Ok(written) = ready.try_io(|stream| stream.get_ref().write(bytes)) {
                return Poll::Ready(written);
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.get_ref().shutdown())
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use kvdepot_host::socket::listen_tcp;

    use super::*;

    #[test]
    fn a_port_is_free_after_the_end_although_a_duplicate_is_open() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = listen_tcp(any).unwrap();
        let address = listener.local_addr().unwrap();
        let duplicate = listener.try_clone().unwrap();
        Listener::Tcp(listener).end();
        listen_tcp(address).unwrap();
        drop(duplicate);
    }
}
