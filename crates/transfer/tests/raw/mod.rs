//! Both sides of the wire, by hand: who greets as an engine does, and then says what it likes.

use std::io::{Read, Write};

/// A frame's head.
pub(crate) type Head = [u8; 40];

pub(crate) const OPEN: u8 = 1;
pub(crate) const MAP: u8 = 7;

/// A MAC of engines without a token.
fn mac(turn: u8, parts: &[&[u8]]) -> [u8; 32] {
    let key = blake3::derive_key("kvdepot transfer token 1", b"");
    let mut hasher = blake3::Hasher::new_keyed(&key);
    hasher.update(&[turn]);
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// Greets a target as this lane.
pub(crate) fn greet(socket: &mut (impl Read + Write), lane: u32) {
    let mut hello = b"kvdxfer\0\x01\0\0\0".to_vec();
    hello.extend(lane.to_le_bytes());
    hello.extend([9; 16 + 32]);
    socket.write_all(&hello).unwrap();
    let challenge: [u8; 64] = get(socket);
    assert_eq!(challenge[10..12], [0, 0], "it is welcome");
    let mine = mac(1, &[&hello, &challenge]);
    socket.write_all(&mine).unwrap();
    let theirs: [u8; 32] = get(socket);
    assert_eq!(theirs, mac(2, &[&hello, &challenge, &mine]));
}

/// Greets an initiator; `enter` is told of its lane before it is welcomed.
pub(crate) fn welcome(socket: &mut (impl Read + Write), enter: impl FnOnce(u32)) {
    let hello: [u8; 64] = get(socket);
    let mut challenge = b"kvdxfer\0\x01\0\0\0\x08\0\0\0".to_vec();
    challenge.extend([7; 16 + 32]);
    socket.write_all(&challenge).unwrap();
    let theirs: [u8; 32] = get(socket);
    assert_eq!(theirs, mac(1, &[&hello, &challenge]));
    enter(u32::from_le_bytes(hello[12..16].try_into().unwrap()));
    let mine = mac(2, &[&hello, &challenge, &theirs]);
    socket.write_all(&mine).unwrap();
}

/// So many bytes.
pub(crate) fn get<const LEN: usize>(socket: &mut impl Read) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

pub(crate) fn row(grant: u32, offset: u64, len: u32) -> [u8; 16] {
    let mut row = [0; 16];
    row[..4].copy_from_slice(&grant.to_le_bytes());
    row[4..8].copy_from_slice(&len.to_le_bytes());
    row[8..].copy_from_slice(&offset.to_le_bytes());
    row
}

/// A request.
pub(crate) fn ask(verb: u8, rows: u32, bytes: u64, first: [u8; 16]) -> Head {
    let mut head = [0; 40];
    head[0] = verb;
    head[4..8].copy_from_slice(&rows.to_le_bytes());
    head[8] = 1;
    head[16..24].copy_from_slice(&bytes.to_le_bytes());
    head[24..].copy_from_slice(&first);
    head
}

/// The answer to a request.
pub(crate) fn answer(to: &Head, status: u8, bytes: u64, first: [u8; 16]) -> Head {
    let mut head = *to;
    head[1..8].copy_from_slice(&[0, status, 0, 0, 0, 0, 0]);
    head[16..24].copy_from_slice(&bytes.to_le_bytes());
    head[24..].copy_from_slice(&first);
    head
}

/// The number of a grant in the first row.
pub(crate) fn grant(head: &Head) -> u32 {
    u32::from_le_bytes(head[24..28].try_into().unwrap())
}

/// Says that a name of 4 bytes is 4096 bytes under this number, for both.
pub(crate) fn opened(socket: &mut (impl Read + Write), to: &Head, number: u32) -> [u8; 4] {
    let name = get(socket);
    let mut said = answer(to, 0, 24, row(number, 0, 0)).to_vec();
    said.extend(4096_u64.to_le_bytes());
    said.extend(u64::MAX.to_le_bytes());
    said.extend([3, 0, 0, 0, 0, 0, 0, 0]);
    socket.write_all(&said).unwrap();
    name
}
