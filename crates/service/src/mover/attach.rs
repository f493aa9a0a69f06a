//! How a process attaches to an owner.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_arena::patience::{SLICE, Wait, Why};
use kvdepot_host::fds;
use kvdepot_host::fork;

use crate::frame::hello::{self, Role, Welcome};

/// How long attaching waits for the owner to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Connects to an owner and asks for its media; waits at most `patience` for each of its steps.
pub(crate) fn shake_hands(
    socket: &Path,
    role: Role,
    patience: Duration,
) -> Result<(UnixStream, Welcome), Error> {
    let at = |error: Error| match error {
        Error::Peer { reason, .. } => Error::Peer {
            socket: socket.display().to_string(),
            reason,
        },
        Error::Host(error) => Error::Peer {
            socket: socket.display().to_string(),
            reason: match error.io_kind() {
                Some(ErrorKind::WouldBlock) => late(patience),
                _ => error.to_string(),
            },
        },
        other => other,
    };
    let io = |source: std::io::Error| Error::Peer {
        socket: socket.display().to_string(),
        reason: source.to_string(),
    };
    let ask = || -> Result<UnixStream, Error> {
        let stream = fds::connect(socket, patience)
            .map_err(Error::from)
            .map_err(at)?;
        stream.set_read_timeout(Some(patience)).map_err(io)?;
        stream.set_write_timeout(Some(patience)).map_err(io)?;
        hello::send_request(&stream, role).map_err(at)?;
        let wait = Wait::new(patience);
        while !fds::wait_readable(&stream, SLICE)
            .map_err(Error::from)
            .map_err(at)?
        {
            wait.goes_on().map_err(|why| match why {
                Why::Interrupted => Error::Interrupted,
                Why::Late => at(Error::Peer {
                    socket: String::new(),
                    reason: late(patience),
                }),
            })?;
        }
        Ok(stream)
    };
    // Before the moment that must be without a fork: the owner may take its time.
    let mut asked = Some(ask()?);
    // A child that this process forks must not keep the lock that comes with a descriptor. What
    // comes while another thread forks is of no use, and the owner is asked for others.
    fork::between_forks(|| {
        let stream = asked.take().map_or_else(ask, Ok)?;
        let welcome = hello::receive_welcome(&stream).map_err(at)?;
        Ok((stream, welcome))
    })
}

fn late(patience: Duration) -> String {
    format!("no response within {} s", patience.as_secs_f64())
}
