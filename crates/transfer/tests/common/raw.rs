//! An initiator of raw bytes, as the page describes it, for what no engine would say.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
    number: u64,
}

/// The head of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    pub(crate) verb: u8,
    pub(crate) flags: u8,
    pub(crate) status: u16,
    pub(crate) rows: u32,
    pub(crate) number: u64,
    pub(crate) bytes: u64,
    pub(crate) grant: u32,
    pub(crate) len: u32,
    pub(crate) offset: u64,
}

impl Head {
    pub(crate) fn new(verb: u8, rows: u32, bytes: u64) -> Head {
        Head {
            verb,
            flags: 0,
            status: 0,
            rows,
            number: 1,
            bytes,
            grant: 0,
            len: 0,
            offset: 0,
        }
    }

    /// With this first row.
    pub(crate) fn row(self, grant: u32, offset: u64, len: u32) -> Head {
        Head {
            grant,
            len,
            offset,
            ..self
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = vec![self.verb, self.flags];
        out.extend(self.status.to_le_bytes());
        out.extend(self.rows.to_le_bytes());
        out.extend(self.number.to_le_bytes());
        out.extend(self.bytes.to_le_bytes());
        out.extend(self.grant.to_le_bytes());
        out.extend(self.len.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        out
    }

    pub(crate) fn read(bytes: &[u8; 40]) -> Head {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        Head {
            verb: bytes[0],
            flags: bytes[1],
            status: u16::from_le_bytes([bytes[2], bytes[3]]),
            rows: u32_at(4),
            number: u64_at(8),
            bytes: u64_at(16),
            grant: u32_at(24),
            len: u32_at(28),
            offset: u64_at(32),
        }
    }
}

/// The first word of an initiator.
pub(crate) fn hello(lane: u32, engine: [u8; 16]) -> Vec<u8> {
    let mut hello = b"kvdxfer\0".to_vec();
    hello.extend([1, 0, 0, 0]);
    hello.extend(lane.to_le_bytes());
    hello.extend(engine);
    hello.extend([9; 32]);
    hello
}

/// The checksum of a head and its rows, or of bytes.
pub(crate) fn sum(bytes: &[u8]) -> [u8; 16] {
    kvdepot_media::checksum::digest(bytes).to_le_bytes()
}

impl Raw {
    /// Greets, with a token.
    pub(crate) fn greet(address: SocketAddr, lane: u32, engine: [u8; 16], token: &[u8]) -> Raw {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let hello = hello(lane, engine);
        stream.write_all(&hello).unwrap();
        let mut challenge = [0; 64];
        stream.read_exact(&mut challenge).unwrap();
        assert_eq!(challenge[8..12], [1, 0, 0, 0], "not greeted");
        let key = blake3::derive_key("kvdepot transfer token 1", token);
        let mac = |turn: u8, before: &[u8]| {
            let mut hasher = blake3::Hasher::new_keyed(&key);
            hasher.update(&[turn]).update(&hello).update(&challenge);
            *hasher.update(before).finalize().as_bytes()
        };
        let mine = mac(1, &[]);
        stream.write_all(&mine).unwrap();
        let mut theirs = [0; 32];
        stream.read_exact(&mut theirs).unwrap();
        assert_eq!(theirs, mac(2, &mine));
        Raw { stream, number: 0 }
    }

    /// Sends a frame.
    pub(crate) fn send(&mut self, head: Head, rest: &[u8]) {
        self.number += 1;
        let head = Head {
            number: self.number,
            ..head
        };
        self.stream.write_all(&head.bytes()).unwrap();
        self.stream.write_all(rest).unwrap();
    }

    /// Sends a frame of one row that has a checksum behind its bytes: all of it but that checksum.
    pub(crate) fn send_but_for_its_sum(&mut self, head: Head, bytes: &[u8]) {
        self.number += 1;
        let head = Head {
            flags: 1,
            number: self.number,
            ..head
        };
        let head = head.bytes();
        let frame = [&head[..], &sum(&head), bytes].concat();
        self.stream.write_all(&frame).unwrap();
    }

    /// The next answer; `None` where the connection has ended.
    pub(crate) fn answer(&mut self) -> Option<(Head, Vec<u8>)> {
        let mut head = [0; 40];
        self.stream.read_exact(&mut head).ok()?;
        let head = Head::read(&head);
        let mut rest = vec![0; head.bytes as usize];
        self.stream.read_exact(&mut rest).ok()?;
        Some((head, rest))
    }

    /// The number of what is published under a name.
    pub(crate) fn open(&mut self, name: &[u8]) -> u32 {
        self.send(Head::new(1, 0, name.len() as u64), name);
        let (head, body) = self.answer().unwrap();
        assert_eq!((head.status, body.len()), (0, 24));
        head.grant
    }
}
