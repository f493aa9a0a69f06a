//! What waits to be written to a connection: whoever has something to say never waits for a peer
//! that does not read. What waits is bounded; the connection of a peer that reads too little for
//! that ends, as if the peer had broken it.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use kvdepot_host::Condvar;
use kvdepot_host::fds;
use parking_lot::Mutex;

use crate::frame::Out;

/// Most bytes that wait: what the tasks of a client may ask for (`credit`) comes to less, so one
/// that is only slow, or stopped for a while, never meets it.
const WAITING_MAX: usize = 192 << 20;

/// The frames for one connection, in order.
pub(crate) struct Outbox {
    limit: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Frames, one behind the other; the first may have begun.
    waiting: Vec<u8>,
    /// Bytes that the writer has taken and that are not written yet.
    writing: usize,
    ended: bool,
}

impl Default for Outbox {
    fn default() -> Outbox {
        Outbox::new(WAITING_MAX)
    }
}

impl Outbox {
    fn new(limit: usize) -> Outbox {
        Outbox {
            limit,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Writes a frame at once where the connection takes it, and leaves the rest to the writer.
    pub(crate) fn send(&self, socket: &UnixStream, frame: Out) {
        let bytes = frame.finish();
        let mut state = self.state.lock();
        if state.ended {
            return;
        }
        let mut written = 0;
        if state.waiting.is_empty() && state.writing == 0 {
            // A failure is the reader's to notice: it sees the end of the connection.
            written = fds::try_send(socket, &bytes).unwrap_or(0);
            if written == bytes.len() {
                return;
            }
        }
        let rest = &bytes[written..];
        if state.waiting.len() + state.writing + rest.len() > self.limit {
            let limit = self.limit;
            tracing::warn!(
                limit,
                "process at the other end of the socket does not read; closing the connection"
            );
            state.ended = true;
            state.waiting = Vec::new();
            // Both ends see it, and the writer, which is waiting for the peer.
            let _shut = socket.shutdown(Shutdown::Both);
        } else {
            state.waiting.extend_from_slice(rest);
        }
        self.changed.notify_all();
    }

    /// Writes what waits until the end; what the writer's thread does.
    pub(crate) fn run(&self, mut socket: &UnixStream) {
        let mut state = self.state.lock();
        loop {
            if state.waiting.is_empty() {
                if state.ended {
                    return;
                }
                self.changed.wait(&mut state);
                continue;
            }
            let bytes = std::mem::take(&mut state.waiting);
            state.writing = bytes.len();
            drop(state);
            let written = socket.write_all(&bytes);
            drop(bytes);
            state = self.state.lock();
            state.writing = 0;
            if written.is_err() {
                state.ended = true;
                state.waiting = Vec::new();
            }
            self.changed.notify_all();
        }
    }

    /// Takes nothing more, and lets the writer end once everything is written.
    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::verbs::GrowDevice;
    use crate::line::incoming::Incoming;

    fn text(number: u64) -> Out {
        let path = &"x".repeat(50_000);
        Out::new(&GrowDevice { path, capacity: 7 }).number(number)
    }

    #[test]
    fn a_peer_that_reads_late_gets_every_frame_in_order() {
        let (here, there) = UnixStream::pair().unwrap();
        let outbox = Outbox::default();
        std::thread::scope(|scope| {
            scope.spawn(|| outbox.run(&here));
            (0..100).for_each(|number| outbox.send(&here, text(number)));
            let mut incoming = Incoming::default();
            for number in 0..100 {
                let frame = incoming.next(&there).unwrap().unwrap();
                assert_eq!((frame.number, frame.body.len()), (number, 50_004));
            }
            outbox.end();
        });
    }

    #[test]
    fn a_peer_that_does_not_read_loses_its_connection_and_costs_no_more_than_the_limit() {
        let (here, there) = UnixStream::pair().unwrap();
        let outbox = Outbox::new(1 << 20);
        std::thread::scope(|scope| {
            scope.spawn(|| outbox.run(&here));
            for number in 0..200 {
                outbox.send(&here, text(number));
                let state = outbox.state.lock();
                assert!(state.waiting.len() + state.writing <= 1 << 20);
            }
            // The writer has ended too, though nobody read a byte.
        });
        assert!(outbox.state.lock().ended);
        let mut incoming = Incoming::default();
        while let Ok(Some(_)) = incoming.next(&there) {}
    }
}
