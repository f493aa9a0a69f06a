//! A connection as its engine has it: the TCP one, or the inner end of one that TLS protects.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_host::fork::Unshared;
use rustix::net::{Shutdown, sockopt};

use crate::tls::{Ended, Failure, Secured, Talk};

/// Pause after which a silent connection is asked whether its peer is there, between two such
/// questions, and how many go unanswered before it ends: half a minute in all, less than it takes
/// anybody to wonder.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 4);

/// What the bytes of a connection go by before it has a thread.
pub(crate) enum Way {
    Plain(Unshared<OwnedFd>),
    Tls(Box<Talk>),
}

impl AsFd for Way {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Way::Plain(socket) => socket.as_fd(),
            Way::Tls(talk) => talk.as_fd(),
        }
    }
}

/// A connection.
pub(crate) struct Line {
    socket: Unshared<OwnedFd>,
    peer: SocketAddr,
    /// Why TLS has ended it, once it has.
    ended: Option<Arc<Ended>>,
}

impl Line {
    /// One to a target.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn to(
        stream: Unshared<TcpStream>,
        target: SocketAddr,
        secured: Option<&Arc<Secured>>,
    ) -> io::Result<Line> {
        prepare(&*stream)?;
        match secured {
            Some(secured) => Line::covered(secured.to(stream, target)?, target, secured),
            None => Ok(Line::plain(stream.map(OwnedFd::from), target)),
        }
    }

    /// One that an initiator has made, and proved itself by.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn from(
        way: Way,
        initiator: SocketAddr,
        secured: Option<&Arc<Secured>>,
    ) -> io::Result<Line> {
        prepare(&way)?;
        match (way, secured) {
            (Way::Tls(talk), Some(secured)) => Line::covered(*talk, initiator, secured),
            (Way::Tls(_), None) => Err(io::ErrorKind::Unsupported.into()),
            (Way::Plain(socket), _) => {
                rustix::io::ioctl_fionbio(&socket, false)?;
                Ok(Line::plain(socket, initiator))
            }
        }
    }

    fn plain(socket: Unshared<OwnedFd>, peer: SocketAddr) -> Line {
        Line {
            socket,
            peer,
            ended: None,
        }
    }

    fn covered(talk: Talk, peer: SocketAddr, secured: &Arc<Secured>) -> io::Result<Line> {
        let (socket, ended) = secured.cover(talk)?;
        Ok(Line {
            socket,
            peer,
            ended: Some(ended),
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
        self.ended.as_ref()?.get()
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What every TCP connection has, at both ends.
fn prepare(stream: &impl AsFd) -> io::Result<()> {
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
