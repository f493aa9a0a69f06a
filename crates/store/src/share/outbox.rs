//! What waits to be written to a connection: whoever has something to say never waits for a peer
//! that does not read.

use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::UnixStream;

use kvdepot_media::host::fds;
use parking_lot::{Condvar, Mutex};

use super::frame::Out;

/// The frames for one connection, in order.
#[derive(Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    /// The writer has taken something that is not written yet.
    writing: bool,
    ended: bool,
}

impl Outbox {
    /// Writes a frame at once where the connection takes it, and leaves the rest to the writer.
    pub(super) fn send(&self, socket: &UnixStream, frame: Out) {
        let mut bytes = frame.finish();
        let mut state = self.state.lock();
        if state.ended {
            return;
        }
        if state.waiting.is_empty() && !state.writing {
            // A failure is the reader's to notice: it sees the end of the connection.
            let written = fds::try_send(socket, &bytes).unwrap_or(0);
            if written == bytes.len() {
                return;
            }
            bytes.drain(..written);
        }
        state.waiting.push_back(bytes);
        self.changed.notify_all();
    }

    /// Writes what waits until the end; what the writer's thread does.
    pub(super) fn run(&self, mut socket: &UnixStream) {
        let mut state = self.state.lock();
        loop {
            let Some(bytes) = state.waiting.pop_front() else {
                if state.ended {
                    return;
                }
                self.changed.wait(&mut state);
                continue;
            };
            state.writing = true;
            drop(state);
            let written = socket.write_all(&bytes);
            state = self.state.lock();
            state.writing = false;
            if written.is_err() {
                state.ended = true;
                state.waiting.clear();
            }
            self.changed.notify_all();
        }
    }

    /// Takes nothing more, and lets the writer end once everything is written.
    pub(super) fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }
}
