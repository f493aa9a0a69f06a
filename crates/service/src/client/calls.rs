//! The connection of a client's calls: one call at a time, each of which waits so long for its
//! answer and no longer; and what is told without waiting, which goes out between them.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_arena::patience::{SLICE, Wait, Why};
use kvdepot_host::fds;
use parking_lot::{Mutex, MutexGuard};

use crate::frame::refusal::broken as lost;
use crate::frame::rows::{NameRow, Rows, marked};
use crate::frame::verbs::{Abort, Grant, Unpin, Verb};
use crate::frame::{Frame, HEARD, Out};
use crate::line::incoming::Incoming;

/// Most bytes that wait to be told to an owner that does not read: unpins of half a million blocks.
const TOLD_MAX: usize = 16 << 20;

pub(crate) struct Line {
    /// Held by the call that is under way.
    calls: Mutex<Incoming>,
    /// Taken with `calls` held, or for a moment; nobody who has it waits for the connection, so
    /// what has been sent and heard is known whenever the line ends.
    state: Mutex<State>,
}

/// How far the calls of a process have come; it passes from one line to the next, which goes on
/// counting.
#[derive(Clone, Copy, Default)]
pub(crate) struct Said {
    /// The last one that was sent.
    pub(crate) asked: u64,
    /// The last one whose answer has come: they come in order.
    pub(crate) heard: u64,
}

struct State {
    said: Said,
    /// Frames without an answer that were not sent yet, the first perhaps in part.
    told: VecDeque<Vec<u8>>,
    /// Bytes of the first that have been sent.
    sent: usize,
    /// Bytes that have not, of all of them.
    left: usize,
    /// A part of a call's frame was sent: whatever follows would be read as its rest.
    torn: bool,
    /// What waited was taken to be told on another line, and so was what has been heard.
    over: bool,
}

impl State {
    fn push(&mut self, frame: Vec<u8>) {
        self.left += frame.len();
        self.told.push_back(frame);
    }

    /// Sends what waits to be told, as far as that does not wait; whether nothing is left.
    fn tell(&mut self, socket: &UnixStream) -> Result<bool, Error> {
        if self.torn {
            return Err(lost("the connection failed while a call was being sent"));
        }
        while let Some(first) = self.told.front() {
            let (len, rest) = (first.len(), &first[self.sent..]);
            let count = fds::try_send(socket, rest).map_err(|error| lost(error.to_string()))?;
            self.sent += count;
            self.left -= count;
            if self.sent < len {
                return Ok(false);
            }
            self.sent = 0;
            self.told.pop_front();
        }
        Ok(true)
    }

    /// Sends more of a call's frame, of which `sent` bytes are, behind what waits to be told, as
    /// far as that does not wait; whether that was all.
    fn ask(&mut self, socket: &UnixStream, frame: &[u8], sent: &mut usize) -> Result<bool, Failed> {
        if self.over {
            return Err(over());
        }
        if *sent == 0 && !self.tell(socket).map_err(broken)? {
            return Ok(false);
        }
        let count = fds::try_send(socket, &frame[*sent..]);
        *sent += count.map_err(|error| broken(lost(error.to_string())))?;
        self.torn = (1..frame.len()).contains(sent);
        let whole = *sent == frame.len();
        self.said.asked += u64::from(whole);
        Ok(whole)
    }

    /// An answer has come. False when it is too late: the owner has been told, or will be, that it
    /// was not heard.
    fn hear(&mut self, answer: &Frame) -> bool {
        if !self.over {
            let Said { asked, heard } = self.said;
            self.said.heard = answer.number.clamp(heard, asked);
        }
        !self.over
    }
}

/// What becomes of something told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Telling {
    /// It is on its way, or waits for its turn.
    Told,
    /// It waits, but the connection is broken, or the owner has not read for too long.
    Broken,
    /// The connection has ended: this is to be told on another.
    Over(Vec<u8>),
}

/// A call without an answer.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// No other call can follow on this connection.
    pub(crate) broken: bool,
}

impl Line {
    /// Follows a line on which so many calls were sent. What was not heard of them is settled when
    /// the owner learns of this one.
    pub(crate) fn new(asked: u64) -> Line {
        Line {
            calls: Mutex::default(),
            state: Mutex::new(State {
                said: Said {
                    asked,
                    heard: asked,
                },
                told: VecDeque::new(),
                sent: 0,
                left: 0,
                torn: false,
                over: false,
            }),
        }
    }

    /// Asks, and waits at most `limit` for the answer. A call that is interrupted leaves the
    /// connection sound: what its late answer grants is given back.
    pub(crate) fn call(
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
        out: Out,
        limit: Duration,
        wait: &Wait,
        incoming: &mut Incoming,
    ) -> Result<Frame, Failed> {
        let number = self.ask(socket, out, limit, wait)?;
        let mut paced = Paced::new(socket, || wait.goes_on());
        loop {
            match incoming.next(&mut paced) {
                Ok(Some(frame)) if frame.number == number => {
                    return match self.state.lock().hear(&frame) || !grants(&frame) {
                        true => Ok(frame),
                        false => Err(over()),
                    };
                }
                // Of a call that was interrupted.
                Ok(Some(late)) => self.hear_late(&late),
                Ok(None) => return Err(broken(lost("it closed the connection"))),
                Err(error) => {
                    return Err(Failed {
                        error: paced.error(limit, || error),
                        broken: paced.ended != Some(Why::Interrupted),
                    });
                }
            }
        }
    }

    /// Sends a call, with `calls` held; its number.
    fn ask(
        &self,
        socket: &UnixStream,
        out: Out,
        limit: Duration,
        wait: &Wait,
    ) -> Result<u64, Failed> {
        let Said { asked, heard } = self.state.lock().said;
        let number = asked + 1;
        let status = match heard == asked {
            true => HEARD,
            false => 0,
        };
        let frame = out.number(number).status(status).finish();
        let mut sent = 0;
        loop {
            if self.state.lock().ask(socket, &frame, &mut sent)? {
                return Ok(number);
            }
            let ready = fds::wait_writable(socket, SLICE);
            if ready.map_err(|error| broken(lost(error.to_string())))? {
                continue;
            }
            wait.goes_on().map_err(|why| Failed {
                error: error_of(why, limit),
                // Half a frame cannot be taken back.
                broken: why == Why::Late || sent > 0,
            })?;
        }
    }

    /// The answer of a call that was interrupted.
    fn hear_late(&self, late: &Frame) {
        let mut state = self.state.lock();
        if state.hear(late)
            && let Some(back) = give_back_late(late)
        {
            state.push(back.finish());
        }
    }

    /// Whether a call was interrupted whose answer has not come, or one is under way.
    fn awaits(&self) -> bool {
        let Said { asked, heard } = self.state.lock().said;
        heard < asked
    }

    /// Hears answers of calls that were interrupted, if they have come: nobody else might call
    /// for long, and what they grant is somebody else's to have.
    pub(crate) fn hear(&self, socket: &UnixStream) {
        if !self.awaits() {
            return;
        }
        let Some(mut incoming) = self.calls.try_lock() else {
            return;
        };
        // No longer than the socket's own time limit.
        let mut paced = Paced::new(socket, || Err(Why::Late));
        while self.awaits()
            && let Ok(Some(late)) = incoming.next(&mut paced)
        {
            self.hear_late(&late);
        }
    }

    /// Tells without waiting, whatever the owner or another call does.
    pub(crate) fn tell(&self, socket: &UnixStream, frame: Vec<u8>) -> Telling {
        let waiting = {
            let mut state = self.state.lock();
            if state.over {
                return Telling::Over(frame);
            }
            state.push(frame);
            state.left
        };
        match waiting > TOLD_MAX || self.flush(socket).is_err() {
            true => Telling::Broken,
            false => Telling::Told,
        }
    }

    /// Ends the line: what was not told, and how far the calls have come. A frame that was sent in
    /// part is among them, because its owner does nothing about a part; one that was sent whole is
    /// not, because it reads what has reached it, however the connection ends.
    pub(crate) fn end(&self) -> (Vec<Vec<u8>>, Said) {
        let mut state = self.state.lock();
        state.over = true;
        (state.sent, state.left) = (0, 0);
        (std::mem::take(&mut state.told).into(), state.said)
    }

    /// Whether something waits to be told.
    pub(crate) fn has_told(&self) -> bool {
        self.state.lock().left > 0
    }

    /// Sends what waits to be told, as far as that does not wait; the call that is under way does
    /// it at its end.
    ///
    /// # Errors
    /// When the connection is broken.
    pub(crate) fn flush(&self, socket: &UnixStream) -> Result<(), Error> {
        while self.has_told() {
            let Some(_turn) = self.calls.try_lock() else {
                return Ok(());
            };
            if !self.state.lock().tell(socket)? {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// A connection whose reads look at `pace` wherever they would wait for longer than the socket's
/// own time limit.
pub(crate) struct Paced<'a, P> {
    socket: &'a UnixStream,
    pace: P,
    /// Why it has ended, if `pace` says so.
    ended: Option<Why>,
}

impl<'a, P: FnMut() -> Result<(), Why>> Paced<'a, P> {
    pub(crate) fn new(socket: &'a UnixStream, pace: P) -> Paced<'a, P> {
        Paced {
            socket,
            pace,
            ended: None,
        }
    }

    fn error(&self, limit: Duration, other: impl FnOnce() -> Error) -> Error {
        self.ended.map_or_else(other, |why| error_of(why, limit))
    }
}

impl<P: FnMut() -> Result<(), Why>> Read for Paced<'_, P> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.socket.read(bytes) {
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
}

fn error_of(why: Why, limit: Duration) -> Error {
    match why {
        Why::Interrupted => Error::Interrupted,
        Why::Late => lost(format!("no response within {} s", limit.as_secs_f64())),
    }
}

/// Whether an answer may grant something.
fn grants(answer: &Frame) -> bool {
    answer.status == 0 && matches!(answer.verb, Verb::Pin | Verb::Reserve)
}

/// What gives back that which a late answer grants: nobody waits for it any more.
fn give_back_late(answer: &Frame) -> Option<Out> {
    if !grants(answer) {
        return None;
    }
    let grant: Grant<'_> = answer.read().ok()?;
    let tiers = grant.tiers.iter().filter_map(|mark| marked(*mark));
    let names = tiers.zip(grant.places.iter());
    let names: Rows<'_, NameRow> = names
        .map(|(tier, place)| (tier, place.token()).into())
        .collect();
    (!names.is_empty()).then(|| match answer.verb {
        Verb::Pin => Out::new(&Unpin {
            served: false,
            names,
        }),
        _ => Out::new(&Abort { names }),
    })
}

fn broken(error: Error) -> Failed {
    Failed {
        error,
        broken: true,
    }
}

/// Of a call that came too late for its line.
fn over() -> Failed {
    Failed {
        error: lost("the connection has ended"),
        broken: false,
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::NamespaceId;
    use kvdepot_arena::patience::interruptible;

    use super::*;
    use crate::frame::rows::{Files, Keys};
    use crate::frame::verbs::{AddDevice, GrowDevice, Pin, Prefix, Reserve};

    const LIMIT: Duration = Duration::from_secs(20);
    /// More than a socket takes.
    const LONG: usize = 4 << 20;

    fn pair() -> (UnixStream, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(SLICE)).unwrap();
        there.set_read_timeout(Some(LIMIT)).unwrap();
        (here, there)
    }

    fn told(number: u64, len: usize) -> Vec<u8> {
        let path = &"x".repeat(len);
        let capacity = None;
        Out::new(&AddDevice { path, capacity })
            .number(number)
            .finish()
    }

    fn call(len: usize) -> Out {
        let path = &"x".repeat(len);
        Out::new(&GrowDevice { path, capacity: 7 })
    }

    /// The frames that come whole.
    fn whole(there: &UnixStream) -> Vec<(Verb, u64)> {
        let mut incoming = Incoming::default();
        let next = || incoming.next(there).ok().flatten();
        let frames = std::iter::from_fn(next);
        frames.map(|frame| (frame.verb, frame.number)).collect()
    }

    #[test]
    fn nothing_follows_a_call_that_was_sent_in_part_and_what_was_told_is_left() {
        let ((here, mut there), line) = (pair(), Line::new(0));
        let asked = interruptible(|| true, || line.call(&here, call(LONG), LIMIT));
        assert!(asked.is_err_and(|failed| failed.broken));
        // The owner reads what there is, so that there is room for more.
        there.set_read_timeout(Some(SLICE)).unwrap();
        let read = std::io::copy(&mut there, &mut std::io::sink());
        assert!(read.is_err(), "it waits for the rest");
        assert_eq!(line.tell(&here, told(5, 10)), Telling::Broken);
        assert!(
            line.call(&here, call(10), LIMIT)
                .is_err_and(|failed| failed.broken)
        );
        let mut more = [0; 1];
        assert!(there.read(&mut more).is_err(), "something followed");
        let (untold, said) = line.end();
        assert_eq!(untold, [told(5, 10)]);
        assert_eq!((said.asked, said.heard), (0, 0), "a part is no call");
        assert_eq!(line.tell(&here, told(6, 10)), Telling::Over(told(6, 10)));
    }

    #[test]
    fn what_is_told_is_told_once_wherever_its_line_ends() {
        for round in 0..20 {
            let ((here, there), line) = (pair(), Line::new(0));
            (0..3000).for_each(|number| {
                assert_eq!(line.tell(&here, told(number, 500)), Telling::Told);
            });
            let (untold, frames) = std::thread::scope(|scope| {
                // It has to tell all of that first, and the owner reads only now.
                scope.spawn(|| {
                    let _late = line.call(&here, call(10), Duration::from_millis(30));
                    here.shutdown(std::net::Shutdown::Both).unwrap();
                });
                let frames = scope.spawn(|| whole(&there));
                std::thread::sleep(Duration::from_micros(round * 300));
                let (untold, _) = line.end();
                (untold, frames.join().unwrap())
            });
            let numbers = frames.iter().filter(|(verb, _)| *verb == Verb::AddDevice);
            let numbers = numbers.map(|(_, number)| *number);
            let of = |frame: &Vec<u8>| u64::from_le_bytes(frame[8..16].try_into().unwrap());
            let told: Vec<u64> = numbers.chain(untold.iter().map(of)).collect();
            assert_eq!(told, (0..3000).collect::<Vec<_>>(), "round {round}");
        }
    }

    #[test]
    fn a_call_that_is_interrupted_behind_what_is_told_leaves_its_line_sound() {
        let ((here, there), line) = (pair(), Line::new(0));
        let frames = 2 * LONG / 1000;
        (0..frames).for_each(|number| {
            assert_eq!(line.tell(&here, told(number as u64, 1000)), Telling::Told);
        });
        let asked = interruptible(|| true, || line.call(&here, call(10), LIMIT));
        assert!(asked.is_err_and(|failed| !failed.broken));
        std::thread::scope(|scope| {
            let read = scope.spawn(|| whole(&there));
            while line.has_told() {
                line.flush(&here).unwrap();
            }
            here.shutdown(std::net::Shutdown::Both).unwrap();
            let read = read.join().unwrap();
            assert_eq!(read.len(), frames, "and no call");
        });
    }

    #[test]
    fn no_answer_is_heard_behind_the_end_of_its_line() {
        let (namespace, keys) = (NamespaceId([0; 16]), || Keys::from(&[][..]));
        let (parts, lens) = (|| Rows::from(&[][..]), Rows::from(&[][..]));
        let pin = Pin {
            namespace,
            prefix: false,
            keys: keys(),
        };
        let reserve = Reserve {
            namespace,
            after: None,
            no_room: 0,
            keys: keys(),
            parts: parts(),
            lens,
        };
        let prefix = Prefix {
            namespace,
            keys: keys(),
        };
        for (verb, out, heard) in [
            (Verb::Pin, Out::new(&pin), false),
            (Verb::Reserve, Out::new(&reserve), false),
            (Verb::Prefix, Out::new(&prefix), true),
        ] {
            let ((here, there), line) = (pair(), Line::new(6));
            let said = std::thread::scope(|scope| {
                let call = scope.spawn(|| line.call(&here, out, LIMIT));
                let asked = Incoming::default().next(&there).unwrap().unwrap();
                assert_eq!((asked.verb, asked.number, asked.status), (verb, 7, HEARD));
                let (_, said) = line.end();
                let grant = Grant {
                    tiers: Rows::from(&[][..]),
                    places: Rows::from(&[][..]),
                    files: Files::default(),
                };
                let answer = match verb {
                    Verb::Pin => Out::answer::<Pin<'_>>(7, &grant),
                    Verb::Reserve => Out::answer::<Reserve<'_>>(7, &grant),
                    _ => Out::answer::<Prefix<'_>>(7, &0),
                };
                answer.send(&there).unwrap();
                let answer = call.join().unwrap();
                assert_eq!(answer.is_ok(), heard);
                assert!(answer.err().is_none_or(|failed| !failed.broken));
                said
            });
            assert_eq!((said.asked, said.heard), (7, 6));
            assert_eq!(line.end().1.heard, 6);
        }
    }
}
