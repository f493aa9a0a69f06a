//! The connection of a client's calls: one call at a time, each of which waits so long for its
//! answer and no longer; and what is told without waiting, which goes out between them.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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
    told: Mutex<Told>,
    /// Calls that were interrupted, and whose answers have not come yet.
    unheard: AtomicUsize,
    next: AtomicU64,
}

/// Frames that wait to be sent.
#[derive(Default)]
struct Told {
    frames: VecDeque<Vec<u8>>,
    /// Bytes of the first that have been sent.
    sent: usize,
    /// Bytes that have not.
    left: usize,
    /// The connection has ended, and what waited was taken to be told on another.
    over: bool,
}

impl Told {
    fn push(&mut self, frame: Vec<u8>) {
        self.left += frame.len();
        self.frames.push_back(frame);
    }

    fn first(&self) -> Option<&[u8]> {
        self.frames.front().map(|frame| &frame[self.sent..])
    }

    /// All that waits, in one piece.
    fn all(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.left);
        self.frames
            .iter()
            .for_each(|frame| bytes.extend_from_slice(frame));
        bytes.drain(..self.sent);
        bytes
    }

    /// So many more bytes have been sent.
    fn advance(&mut self, count: usize) {
        self.sent += count;
        self.left -= count;
        while let Some(first) = self.frames.front() {
            if first.len() > self.sent {
                break;
            }
            self.sent -= first.len();
            self.frames.pop_front();
        }
    }
}

/// What becomes of something told.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Telling {
    /// It is on its way, or waits for its turn.
    Told,
    /// It waits, but the connection is broken, or the owner has not read for too long.
    Broken,
    /// The connection has ended: this is to be told on another.
    Over(Vec<u8>),
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
        let mut bytes = self.told.lock().all();
        let told = bytes.len();
        bytes.extend_from_slice(&out.finish());
        let mut paced = Paced::new(socket, || wait.goes_on());
        let written = paced.write_all(&bytes);
        self.told.lock().advance(paced.written.min(told));
        if let Err(error) = written {
            let interrupted = paced.ended == Some(Why::Interrupted) && paced.written == 0;
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
                Ok(Some(late)) => self.hear_late(&late),
                Ok(None) => {
                    return Err(Failed {
                        error: lost("it closed the connection"),
                        broken: true,
                    });
                }
                Err(error) => {
                    let broken = paced.ended != Some(Why::Interrupted);
                    let error = paced.error(limit, || error);
                    if !broken {
                        self.unheard.fetch_add(1, Ordering::Relaxed);
                    }
                    return Err(Failed { error, broken });
                }
            }
        }
    }

    /// The answer of a call that was interrupted.
    fn hear_late(&self, late: &Frame) {
        let one_less = |unheard: usize| unheard.checked_sub(1);
        let _none = self
            .unheard
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        if let Some(back) = calls::give_back_late(late) {
            self.told.lock().push(back.finish());
        }
    }

    /// Hears answers of calls that were interrupted, if they have come: nobody else might call
    /// for long, and what they grant is somebody else's to have.
    pub(super) fn hear(&self, socket: &UnixStream) {
        if self.unheard.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Some(mut incoming) = self.calls.try_lock() else {
            return;
        };
        // No longer than the socket's own time limit.
        let mut paced = Paced::new(socket, || Err(Why::Late));
        while self.unheard.load(Ordering::Relaxed) > 0
            && let Ok(Some(late)) = incoming.next(&mut paced)
        {
            self.hear_late(&late);
        }
    }

    /// Tells without waiting, whatever the owner or another call does.
    pub(super) fn tell(&self, socket: &UnixStream, frame: Vec<u8>) -> Telling {
        let waiting = {
            let mut told = self.told.lock();
            if told.over {
                return Telling::Over(frame);
            }
            told.push(frame);
            told.left
        };
        match waiting > TOLD_MAX || self.flush(socket).is_err() {
            true => Telling::Broken,
            false => Telling::Told,
        }
    }

    /// Takes what was not told, whole: the owner does nothing about a part of a frame.
    pub(super) fn end(&self) -> Vec<Vec<u8>> {
        let over = Told {
            over: true,
            ..Told::default()
        };
        std::mem::replace(&mut *self.told.lock(), over)
            .frames
            .into()
    }

    /// Whether something waits to be told.
    pub(super) fn has_told(&self) -> bool {
        self.told.lock().left > 0
    }

    /// Sends what waits to be told, as far as that does not wait; the call that is under way does
    /// it at its end.
    ///
    /// # Errors
    /// When the connection is broken.
    pub(super) fn flush(&self, socket: &UnixStream) -> Result<(), Error> {
        while self.has_told() {
            let Some(_turn) = self.calls.try_lock() else {
                return Ok(());
            };
            let mut told = self.told.lock();
            let Some(first) = told.first() else {
                return Ok(());
            };
            let wanted = first.len();
            let sent = fds::try_send(socket, first)?;
            told.advance(sent);
            if sent < wanted {
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
