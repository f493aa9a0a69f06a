//! What neighbours say to each other, and how descriptors come with it.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use kvdepot_host::fork::Unshared;
use kvdepot_host::{fds, peer};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::{HEAD, Head};

/// How a grant's memory is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// By mapping what came with the answer.
    Mapping = 1,
    /// At addresses of the target's process.
    Process = 2,
}

impl Reach {
    pub(super) fn of(number: u32) -> Option<Reach> {
        [Reach::Mapping, Reach::Process]
            .into_iter()
            .find(|reach| *reach as u32 == number)
    }
}

/// How many ranges follow, and how they are reached.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Lead {
    pub(super) len: U64,
    pub(super) reach: U32,
    pub(super) rights: U32,
}

/// A range of a grant's memory, in their order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Place {
    /// Where it begins: in the descriptor's medium, or in the process.
    pub(super) at: U64,
    pub(super) len: U64,
    /// Bytes of that medium.
    pub(super) medium: U64,
    /// Which of the descriptors.
    pub(super) descriptor: U32,
    pub(super) zero: U32,
}

/// The name of an engine's socket for neighbours, which ends with its process.
fn name(engine: [u8; 16]) -> String {
    let number = u128::from_le_bytes(engine);
    format!("kvdepot-transfer-{number:032x}")
}

/// The address at which an engine listens for neighbours.
pub(super) fn address(engine: [u8; 16]) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name(engine))
}

/// Connects to an engine of this host. A stranger may listen under its name, so this waits for no
/// answer.
pub(super) fn connect(engine: [u8; 16]) -> io::Result<Unshared<UnixStream>> {
    let connect = || fds::connect_abstract(name(engine).as_bytes());
    Unshared::open(connect).map_err(io::Error::other)
}

/// Whether the other end is a process of this user, who may reach this one's memory in any case.
pub(super) fn is_ours(socket: impl AsFd) -> bool {
    let uid = rustix::process::geteuid().as_raw();
    peer::credentials(socket).is_ok_and(|other| other.pid != 0 && other.uid == uid)
}

/// The process at the other end.
pub(super) fn process(socket: &UnixStream) -> Option<i32> {
    let other = peer::credentials(socket).ok()?;
    i32::try_from(other.pid).ok().filter(|pid| *pid != 0)
}

/// Sends a head and its bytes, with descriptors.
pub(super) fn send(
    socket: &UnixStream,
    head: &Head,
    body: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut bytes = head.as_bytes().to_vec();
    bytes.extend_from_slice(body);
    fds::send(socket, &bytes, descriptors).map_err(io::Error::other)
}

/// Receives a head, and the descriptors that came with it.
pub(super) fn receive_head(socket: &UnixStream) -> io::Result<(Head, Vec<OwnedFd>)> {
    let mut bytes = [0; HEAD];
    let descriptors = fill(socket, &mut bytes)?;
    Ok((Head::read(&bytes), descriptors))
}

/// Receives what nobody wants any more, until the other end has ended.
pub(super) fn drain(socket: &UnixStream) {
    let mut bytes = [0; 4096];
    let mut socket = socket;
    loop {
        match socket.read(&mut bytes) {
            Ok(count) if count > 0 => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

/// Receives all of these bytes.
pub(super) fn fill(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let (mut got, mut descriptors) = (0, Vec::new());
    while got < bytes.len() {
        let (count, more) = fds::recv(socket, &mut bytes[got..]).map_err(io::Error::other)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        got += count;
        descriptors.extend(more);
    }
    Ok(descriptors)
}
