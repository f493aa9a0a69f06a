//! The socket's conversation, byte by byte: a client that says what no honest one would.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use kvdepot_store::{Key, NamespaceId};

use super::PATIENCE;

/// Of the protocol.
pub const VERSION: u32 = 11;

/// Bytes of an answer to a request to attach, but for its media.
pub const WELCOME: usize = 68;

/// Verbs by their numbers.
pub const CONTAINS: u16 = 2;
pub const PIN: u16 = 5;
pub const RESERVE: u16 = 8;
pub const COMMIT: u16 = 9;
pub const ABORT: u16 = 10;
pub const CLEAR: u16 = 12;
pub const BLOCKS: u16 = 18;
pub const PUT: u16 = 32;
pub const GET: u16 = 33;
pub const GOODBYE: u16 = 35;
pub const PREFETCH: u16 = 41;
pub const QUIET: u16 = 42;
pub const MOVE: u16 = 48;
pub const REFUSED: u16 = 50;
pub const CLOSING: u16 = 51;

/// The kind of a refusal of input, which it begins with.
pub const INPUT: u8 = 1;

/// A request to attach.
pub fn hello(version: u32, role: u32, number: u64) -> Vec<u8> {
    let mut bytes = b"KVDATTCH".to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&role.to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&0u64.to_le_bytes());
    bytes
}

/// A frame of one verb.
pub fn frame(verb: u16, number: u64, body: &[u8]) -> Vec<u8> {
    frame_with(verb, 0, number, body)
}

/// As [`frame`], with a status.
pub fn frame_with(verb: u16, status: u16, number: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&verb.to_le_bytes());
    bytes.extend_from_slice(&status.to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// A number as postcard writes it: seven bits a byte, lowest first.
pub fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// Reads a [`varint`] off the front.
pub fn take_varint(bytes: &mut &[u8]) -> u64 {
    let len = 1 + bytes.iter().take_while(|byte| **byte > 0x7f).count();
    let (now, rest) = bytes.split_at(len);
    *bytes = rest;
    let low_first = now.iter().rev();
    low_first.fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
}

/// Rows, behind how many bytes they have.
pub fn rows(rows: &[u8]) -> Vec<u8> {
    [varint(rows.len() as u64), rows.to_vec()].concat()
}

/// A namespace's digest, what follows it, and keys.
pub fn with_keys(id: NamespaceId, between: &[u8], keys: &[Key]) -> Vec<u8> {
    let keys: Vec<u8> = keys.iter().flat_map(|key| key.0).collect();
    [&id.0[..], between, &rows(&keys)].concat()
}

/// What reserves one block of one part, which follows none.
pub fn reserve(id: NamespaceId, key: Key, len: u64) -> Vec<u8> {
    let parts = [rows(&1u32.to_le_bytes()), rows(&len.to_le_bytes())].concat();
    [with_keys(id, &[0, 0], &[key]), parts].concat()
}

/// The name of the block in an answer that grants one, in the first tier.
pub fn granted(answer: &[u8]) -> Vec<u8> {
    assert_eq!(answer[..3], [1, 1, 74], "no grant");
    [&[0], &answer[3..19]].concat()
}

/// A put of blocks of one length.
pub fn put(number: u64, id: NamespaceId, keys: &[Key], len: u64) -> Vec<u8> {
    let lens = len.to_le_bytes().repeat(keys.len());
    let body = [with_keys(id, &[0], keys), rows(&lens)].concat();
    frame(PUT, number, &body)
}

pub fn get(number: u64, id: NamespaceId, keys: &[Key], len: u64) -> Vec<u8> {
    get_of(number, 0, id, keys, len)
}

pub fn get_prefix(number: u64, id: NamespaceId, keys: &[Key], len: u64) -> Vec<u8> {
    get_of(number, 1, id, keys, len)
}

fn get_of(number: u64, prefix: u8, id: NamespaceId, keys: &[Key], len: u64) -> Vec<u8> {
    let lens = len.to_le_bytes().repeat(keys.len());
    let body = [with_keys(id, &[prefix], keys), rows(&lens)].concat();
    frame(GET, number, &body)
}

/// The next frame: verb, status, number and body; `None` when the connection has ended.
pub fn read_frame(mut socket: &UnixStream) -> Option<(u16, u16, u64, Vec<u8>)> {
    let mut head = [0; 16];
    socket.read_exact(&mut head).ok()?;
    let short = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    let len = u32::from_le_bytes(head[..4].try_into().unwrap());
    let mut body = vec![0; len as usize];
    socket.read_exact(&mut body).ok()?;
    let number = u64::from_le_bytes(head[8..].try_into().unwrap());
    Some((short(4), short(6), number, body))
}

/// Both connections of a client.
pub struct Bare {
    pub calls: UnixStream,
    pub tasks: UnixStream,
    pub number: u64,
}

impl Bare {
    pub fn attach(socket: &Path, former: u64) -> Bare {
        Bare::attach_again(socket, former, 0)
    }

    /// As one that has heard the answer to call `heard`, and none behind it.
    pub fn attach_again(socket: &Path, former: u64, heard: u64) -> Bare {
        Bare::of(socket, Bare::first_half(socket, former, heard))
    }

    /// With the connection for tasks beside the one for calls.
    pub fn of(socket: &Path, (calls, number): (UnixStream, u64)) -> Bare {
        let tasks = Bare::second_half(socket, number).expect("the owner ended the connection");
        Bare {
            calls,
            tasks,
            number,
        }
    }

    /// The connection for calls, and the number of the client.
    pub fn first_half(socket: &Path, former: u64, heard: u64) -> (UnixStream, u64) {
        Bare::try_first_half(socket, former, heard).unwrap_or_else(|refusal| panic!("{refusal}"))
    }

    /// The same, or the owner's refusal.
    pub fn try_first_half(
        socket: &Path,
        former: u64,
        heard: u64,
    ) -> Result<(UnixStream, u64), String> {
        let mut calls = UnixStream::connect(socket).unwrap();
        calls.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut request = hello(VERSION, 2, former);
        request[24..].copy_from_slice(&heard.to_le_bytes());
        calls.write_all(&request).unwrap();
        let mut welcome = [0; WELCOME];
        calls.read_exact(&mut welcome).unwrap();
        if welcome[12..16] != [0; 4] {
            // Its text, whose length stands there.
            let mut text = welcome[16..].to_vec();
            let _end = calls.read_to_end(&mut text);
            return Err(String::from_utf8_lossy(&text).into_owned());
        }
        let number = u64::from_le_bytes(welcome[24..32].try_into().unwrap());
        let media = u32::from_le_bytes(welcome[WELCOME - 4..].try_into().unwrap());
        calls.read_exact(&mut vec![0; media as usize * 16]).unwrap();
        Ok((calls, number))
    }

    /// The connection for tasks; none where the owner ends it.
    pub fn second_half(socket: &Path, number: u64) -> Option<UnixStream> {
        let mut tasks = UnixStream::connect(socket).unwrap();
        tasks.set_read_timeout(Some(PATIENCE)).unwrap();
        tasks.write_all(&hello(VERSION, 3, number)).unwrap();
        // Its welcome names no media, and a refusal is shorter or has another status.
        let mut welcome = [0; WELCOME];
        tasks.read_exact(&mut welcome).ok()?;
        (welcome[12..16] == [0; 4]).then_some(tasks)
    }

    /// Status and body of the answer to a call.
    pub fn ask(&mut self, verb: u16, body: &[u8]) -> (u16, Vec<u8>) {
        self.calls.write_all(&frame(verb, 0, body)).unwrap();
        let mut head = [0; 16];
        self.calls.read_exact(&mut head).unwrap();
        let len = u32::from_le_bytes(head[..4].try_into().unwrap());
        let mut body = vec![0; len as usize];
        self.calls.read_exact(&mut body).unwrap();
        (u16::from_le_bytes(head[6..8].try_into().unwrap()), body)
    }

    /// The name of a reservation of one block of one part.
    pub fn reserve(&mut self, id: NamespaceId, key: Key, len: u64) -> Vec<u8> {
        let (status, answer) = self.ask(RESERVE, &reserve(id, key, len));
        assert_eq!(status, 0, "no reservation");
        granted(&answer)
    }
}

/// Ends this process's connections to a socket, as nobody does who means well.
#[allow(unsafe_code, reason = "asks about descriptors that others have opened")]
pub fn break_connections(path: &Path) {
    let path = path.as_os_str().as_encoded_bytes();
    for fd in 3..1000 {
        let mut address = [0u8; 128];
        let mut len = address.len() as libc::socklen_t;
        // SAFETY: the address has room for as much as is said; both calls refuse what is no
        // socket.
        let named = unsafe { libc::getpeername(fd, address.as_mut_ptr().cast(), &raw mut len) };
        if named == 0 && address[2..].starts_with(path) {
            // SAFETY: as above.
            unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
        }
    }
}
