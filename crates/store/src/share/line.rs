//! The connection of a client's calls: one call at a time, each of which waits so long for its
//! answer and no longer; and what is told without waiting, which goes out between them.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_media::host::fds;
use parking_lot::{Mutex, MutexGuard};

use super::calls;
use super::frame::{Frame, Incoming, Out};
use crate::Error;
use crate::patience::{SLICE, Wait, Why};

/// Most bytes that wait to be told to an owner that does not read: unpins of half a million blocks.
const TOLD_MAX: usize = 16 << 20;

#[derive(Default)]
pub(super) struct Line {
    /// Held by the call that is under way.
    calls: Mutex<Incoming>,
    /// Frames without an answer that were not sent yet, the first perhaps in part. Taken with
    /// `calls` held, or for a moment.
    told: Mutex<Vec<u8>>,
    next: AtomicU64,
}

/// A call without an answer.
pub(super) struct Failed {
    pub(super) error: Error,
    /// No other call can follow on this connection.
    pub(super) broken: bool,
}

impl Line {
    /// Asks, and waits at most `limit` for the answer. A call that is interrupted leaves the
    /// connection sound: what its late answer grants is given back.
    pub(super) fn call(
        &self,
        socket: &UnixStream,
        out: Out,
        limit: Duration,
    ) -> Result<Frame, Failed> {
        let wait = Wait::new(limit);
        let mut incoming = self.turn(&wait).map_err(|why| Failed {
            error: error_of(why, limit),
            broken: false,
        })?;
        let answer = self.exchange(socket, out, limit, &wait, &mut incoming);
        drop(incoming);
        // What was told meanwhile; a connection that breaks is the next call's to notice.
        let _sent = self.flush(socket);
        answer
    }

    fn turn(&self, wait: &Wait) -> Result<MutexGuard<'_, Incoming>, Why> {
        loop {
            if let Some(incoming) = self.calls.try_lock_for(SLICE) {
                return Ok(incoming);
            }
            wait.goes_on()?;
        }
    }

    fn exchange(
        &self,
        socket: &UnixStream,
        mut out: Out,
        limit: Duration,
        wait: &Wait,
        incoming: &mut Incoming,
    ) -> Result<Frame, Failed> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        out.number(number);
        let mut bytes = std::mem::take(&mut *self.told.lock());
        let told = bytes.len();
        bytes.extend_from_slice(&out.finish());
        let mut paced = Paced::new(socket, || wait.goes_on());
        if let Err(error) = paced.write_all(&bytes) {
            let interrupted = paced.ended == Some(Why::Interrupted) && paced.written == 0;
            if interrupted {
                let mut later = self.told.lock();
                bytes.truncate(told);
                bytes.append(&mut later);
                *later = bytes;
            }
            return Err(Failed {
                error: paced.error(limit, || lost(error.to_string())),
                // Half a frame cannot be taken back.
                broken: !interrupted,
            });
        }
        loop {
            match incoming.next(&mut paced) {
                Ok(Some(frame)) if frame.number == number => return Ok(frame),
                // Of a call that was interrupted.
                Ok(Some(late)) => {
                    if let Some(back) = calls::give_back_late(&late) {
                        self.told.lock().extend_from_slice(&back.finish());
                    }
                }
                Ok(None) => {
                    return Err(Failed {
                        error: lost("it closed the connection"),
                        broken: true,
                    });
                }
                Err(error) => {
                    let broken = paced.ended != Some(Why::Interrupted);
                    let error = paced.error(limit, || error);
                    return Err(Failed { error, broken });
                }
            }
        }
    }

    /// Tells without waiting, whatever the owner or another call does.
    ///
    /// # Errors
    /// When the connection is broken, or the owner has not read for too long.
    pub(super) fn tell(&self, socket: &UnixStream, out: Out) -> Result<(), Error> {
        let waiting = {
            let mut told = self.told.lock();
            told.extend_from_slice(&out.finish());
            told.len()
        };
        if waiting > TOLD_MAX {
            return Err(lost("it does not read what it is told"));
        }
        self.flush(socket)
    }

    /// Whether something waits to be told.
    pub(super) fn has_told(&self) -> bool {
        !self.told.lock().is_empty()
    }

    /// Sends what waits to be told, as far as that does not wait; the call that is under way does
    /// it at its end.
    pub(super) fn flush(&self, socket: &UnixStream) -> Result<(), Error> {
        while self.has_told() {
            let Some(_turn) = self.calls.try_lock() else {
                return Ok(());
            };
            let mut told = self.told.lock();
            let sent = fds::try_send(socket, &told)?;
            told.drain(..sent);
            if !told.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// A connection whose reads and writes look at `pace` wherever they would wait for longer than the
/// socket's own time limit.
pub(super) struct Paced<'a, P> {
    socket: &'a UnixStream,
    pace: P,
    /// Why it has ended, if `pace` says so.
    ended: Option<Why>,
    written: usize,
}

impl<'a, P: FnMut() -> Result<(), Why>> Paced<'a, P> {
    pub(super) fn new(socket: &'a UnixStream, pace: P) -> Paced<'a, P> {
        Paced {
            socket,
            pace,
            ended: None,
            written: 0,
        }
    }

    fn again(
        &mut self,
        mut step: impl FnMut(&UnixStream) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        loop {
            match step(self.socket) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                other => return other,
            }
            if let Err(why) = (self.pace)() {
                self.ended = Some(why);
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }

    fn error(&self, limit: Duration, other: impl FnOnce() -> Error) -> Error {
        self.ended.map_or_else(other, |why| error_of(why, limit))
    }
}

impl<P: FnMut() -> Result<(), Why>> Read for Paced<'_, P> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.again(|mut socket| socket.read(bytes))
    }
}

impl<P: FnMut() -> Result<(), Why>> Write for Paced<'_, P> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.again(|mut socket| socket.write(bytes))?;
        self.written += written;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn error_of(why: Why, limit: Duration) -> Error {
    match why {
        Why::Interrupted => Error::Interrupted,
        Why::Late => lost(format!("no answer within {} s", limit.as_secs_f64())),
    }
}

fn lost(reason: impl Into<String>) -> Error {
    Error::Peer {
        socket: String::new(),
        reason: reason.into(),
    }
}
