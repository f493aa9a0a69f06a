//! A process that speaks the protocol badly, by the numbers of `docs/protocol.md`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::common::frames::{VERSION, WELCOME, rows, varint};
use crate::world::{Law, PATIENCE};

const UNPIN: u16 = 6;
const PIN: u16 = 5;
const RESERVE: u16 = 8;
const COMMIT: u16 = 9;
const ABORT: u16 = 10;
const GOODBYE: u16 = 35;

/// A client with its two connections.
pub struct Peer {
    pub calls: UnixStream,
    pub tasks: UnixStream,
}

/// A frame that is complete.
pub fn frame(verb: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(verb.to_le_bytes());
    bytes.extend(0u16.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(body);
    bytes
}

fn attach(socket: &Path, role: u32, number: u64) -> std::io::Result<(UnixStream, u64)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut hello = b"KVDATTCH".to_vec();
    hello.extend(VERSION.to_le_bytes());
    hello.extend(role.to_le_bytes());
    hello.extend(number.to_le_bytes());
    hello.extend(0u64.to_le_bytes());
    stream.write_all(&hello)?;
    let mut head = [0; WELCOME];
    stream.read_exact(&mut head)?;
    let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
    assert_eq!(
        word(12),
        0,
        "the protocol's version is another one than {VERSION}"
    );
    let client = u64::from_le_bytes(head[24..32].try_into().unwrap());
    let mut media = vec![0; 16 * word(WELCOME - 4) as usize];
    stream.read_exact(&mut media)?;
    Ok((stream, client))
}

impl Peer {
    pub fn new(socket: &Path) -> Law<Peer> {
        let attached = || {
            let (calls, client) = attach(socket, 2, 0)?;
            let (tasks, _) = attach(socket, 3, client)?;
            Ok::<_, std::io::Error>(Peer { calls, tasks })
        };
        attached().map_err(|error| format!("a peer could not attach: {error}"))
    }

    /// Sends a frame and reads its answer: status and body.
    pub fn ask(&mut self, verb: u16, body: &[u8]) -> Law<(u16, Vec<u8>)> {
        let mut asked = || {
            self.calls.write_all(&frame(verb, body))?;
            let mut head = [0; 16];
            self.calls.read_exact(&mut head)?;
            let len = u32::from_le_bytes(head[..4].try_into().unwrap());
            let mut body = vec![0; len as usize];
            self.calls.read_exact(&mut body)?;
            Ok::<_, std::io::Error>((u16::from_le_bytes([head[6], head[7]]), body))
        };
        asked().map_err(|error| format!("a peer was not answered: {error}"))
    }

    /// Reserves room for one block; its name, if there was room.
    pub fn reserve(&mut self, ns: [u8; 16], key: &[u8; 32], parts: &[u64]) -> Law<Option<Vec<u8>>> {
        let mut body = ns.to_vec();
        body.extend([0, 0]);
        body.extend(rows(key));
        body.extend(rows(&(parts.len() as u32).to_le_bytes()));
        let lens: Vec<u8> = parts.iter().flat_map(|len| len.to_le_bytes()).collect();
        body.extend(rows(&lens));
        let (_, answer) = self.ask(RESERVE, &body)?;
        Ok(named(&answer))
    }

    /// Pins one block; its name, if it is there.
    pub fn pin(&mut self, ns: [u8; 16], key: &[u8; 32]) -> Law<Option<Vec<u8>>> {
        let mut body = ns.to_vec();
        body.push(0);
        body.extend(rows(key));
        let (_, answer) = self.ask(PIN, &body)?;
        Ok(named(&answer))
    }

    /// Commits with checksums that end in the middle; the status of the answer.
    pub fn cut_commit(&mut self, name: &[u8], promised: u32) -> Law<u16> {
        let mut body = rows(name);
        body.extend(rows(&promised.to_le_bytes()));
        body.extend(varint(16 * u64::from(promised)));
        body.extend([7; 5]);
        Ok(self.ask(COMMIT, &body)?.0)
    }

    /// Aborts so many times in one breath.
    pub fn abort(&mut self, name: &[u8], times: usize) -> Law {
        self.end(ABORT, &[], name, times)
    }

    /// Unpins so many times in one breath.
    pub fn unpin(&mut self, name: &[u8], times: usize) -> Law {
        self.end(UNPIN, &[0], name, times)
    }

    fn end(&mut self, verb: u16, before: &[u8], name: &[u8], times: usize) -> Law {
        let mut body = before.to_vec();
        body.extend(rows(name));
        let all = frame(verb, &body).repeat(times);
        self.calls
            .write_all(&all)
            .map_err(|error| error.to_string())
    }

    /// Says that it touches nothing any more.
    pub fn goodbye(mut self) {
        let _said = self.tasks.write_all(&frame(GOODBYE, &[]));
        let _limit = self.tasks.set_read_timeout(Some(Duration::from_secs(5)));
        // The owner closes the connection once it has heard it.
        let mut rest = Vec::new();
        let _end = self.tasks.read_to_end(&mut rest);
    }
}

/// The tier and the token of an answer with one place.
fn named(answer: &[u8]) -> Option<Vec<u8>> {
    // One tier, and the row of one place.
    let [1, tier, 74, place @ ..] = answer else {
        return None;
    };
    let mut name = vec![tier.checked_sub(1)?];
    name.extend(place.get(..16)?);
    Some(name)
}
