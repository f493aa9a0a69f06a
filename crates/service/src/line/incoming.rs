//! What comes over a connection, cut into frames.

use std::io::Read;

use kvdepot_arena::Error;

use crate::frame::refusal::broken;
use crate::frame::{Frame, HEAD, head};

/// The frames of a connection that one thread at a time reads, whole ones in one system call, in
/// memory that is used again.
#[derive(Default)]
pub(crate) struct Incoming {
    memory: Vec<u8>,
    /// What has arrived and was not taken yet.
    begin: usize,
    end: usize,
}

/// Room for the frames of most calls.
const ROOM: usize = 64 << 10;

impl Incoming {
    /// The next frame; `None` at the connection's orderly end. After an error of the reader the
    /// next call goes on where this one stopped.
    pub(crate) fn next(&mut self, mut socket: impl Read) -> Result<Option<Frame>, Error> {
        if !self.fill(&mut socket, HEAD)? {
            return Ok(None);
        }
        let (verb, status, number, len) = head(&self.memory[self.begin..self.end])?;
        if !self.fill(&mut socket, HEAD + len)? {
            return Ok(None);
        }
        let body = self.take(HEAD + len);
        Ok(Some(Frame {
            verb,
            status,
            number,
            body,
        }))
    }

    /// The body of the first frame, which has so many bytes with its head and is there.
    fn take(&mut self, len: usize) -> Vec<u8> {
        let end = self.begin + len;
        if self.memory.len() <= ROOM {
            let body = self.memory[self.begin + HEAD..end].to_vec();
            self.begin = end;
            return body;
        }
        // A long frame takes its memory along: what it needed is not kept for the next one.
        let rest = self.memory[end..self.end].to_vec();
        let mut body = std::mem::take(&mut self.memory);
        body.truncate(end);
        body.drain(..self.begin + HEAD);
        (self.begin, self.end) = (0, rest.len());
        self.memory = rest;
        body
    }

    /// Waits until so many bytes are there; false when the connection ended before the first.
    fn fill(&mut self, socket: &mut impl Read, len: usize) -> Result<bool, Error> {
        if self.end - self.begin >= len {
            return Ok(true);
        }
        self.memory.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        while self.end < len {
            if self.end == self.memory.len() {
                // Room grows with what has come: a head alone can claim anything.
                let more = (2 * self.end).clamp(ROOM, len.max(ROOM));
                self.memory.resize(more, 0);
            }
            let count = match socket.read(&mut self.memory[self.end..]) {
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(error.to_string())),
            };
            if count == 0 && self.end == 0 {
                return Ok(false);
            }
            if count == 0 {
                return Err(broken("the connection was closed in the middle of a frame"));
            }
            self.end += count;
        }
        Ok(true)
    }
}
