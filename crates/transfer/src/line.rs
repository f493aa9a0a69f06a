//! A connection as its engine has it: the TCP one, or the inner end of one that TLS protects.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_host::fork::Origin;
use rustix::net::{Shutdown, sockopt};

use crate::tls::{Ended, Failure, Secured};

/// Pause after which a silent connection is asked whether its peer is there, between two such
/// questions, and how many go unanswered before it ends: half a minute in all, less than it takes
/// anybody to wonder.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 4);

/// A connection.
pub(crate) struct Line {
    socket: OwnedFd,
    peer: SocketAddr,
    cover: Option<Cover>,
}

/// What there is of TLS.
struct Cover {
    ended: Arc<Ended>,
    origin: Origin,
}

impl Line {
    /// One to a target.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn to(
        stream: TcpStream,
        target: SocketAddr,
        secured: Option<&Arc<Secured>>,
    ) -> io::Result<Line> {
        Line::over(stream, target, secured, |secured, stream| {
            secured.to(stream, target)
        })
    }

    /// One that an initiator has made.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn from(
        stream: TcpStream,
        initiator: SocketAddr,
        secured: Option<&Arc<Secured>>,
    ) -> io::Result<Line> {
        Line::over(stream, initiator, secured, Secured::from)
    }

    fn over(
        stream: TcpStream,
        peer: SocketAddr,
        secured: Option<&Arc<Secured>>,
        cover: impl FnOnce(&Arc<Secured>, TcpStream) -> io::Result<(UnixStream, Arc<Ended>)>,
    ) -> io::Result<Line> {
        prepare(&stream)?;
        let Some(secured) = secured else {
            return Ok(Line {
                socket: stream.into(),
                peer,
                cover: None,
            });
        };
        let (inner, ended) = cover(secured, stream)?;
        let origin = secured.origin;
        Ok(Line {
            socket: inner.into(),
            peer,
            cover: Some(Cover { ended, origin }),
        })
    }

    /// Who is at the other end.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Ends it: nobody waits in it any more.
    pub(crate) fn shutdown(&self) {
        // It may be gone already, which is as good.
        let _gone = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    /// How long a call that sends may take; `None`: as long as it takes.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        let sends = sockopt::Timeout::Send;
        Ok(sockopt::set_socket_timeout(&self.socket, sends, timeout)?)
    }

    /// Why TLS has ended it, if it has.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.cover.as_ref()?.ended.get()
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // A forked process may still have it: that it is closed here would not end its thread.
        if self
            .cover
            .as_ref()
            .is_some_and(|cover| cover.origin.is_here())
        {
            self.shutdown();
        }
    }
}

/// What every TCP connection has, at both ends.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    let (idle, between, count) = KEEPALIVE;
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, between)?;
    sockopt::set_tcp_keepcnt(stream, count)?;
    let patience = idle + between * count;
    sockopt::set_tcp_user_timeout(stream, patience.as_millis() as u32)?;
    Ok(())
}
