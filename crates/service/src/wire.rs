//! The attach protocol: one request, one answer with descriptors. For a mover silence follows, and
//! the connection stays open so that either side notices the other's end; a client goes on with
//! frames (`frame`).
//!
//! Little-endian. Request: magic `KVDATTCH`, u32 version, u32 role (0 reads, 1 writes, 2 a
//! client's calls, 3 its tasks), u64 number (for a client's tasks its own; for its calls that of
//! the client which this process was until its connection broke, and is again; else 0), u64 number
//! of the last call whose answer such a client has heard (else 0): what later answers have granted
//! is nobody's.
//! Answer: magic, u32 version, u32 status (0: media follow; else u32 length of a message),
//! u64 session, u64 client's number, u64 its seat, u64 slice size, u32 lanes (0 where nobody has
//! chosen), u32 media, then for each: u32 number, u32 whether its room is held (1: nobody gives it
//! to other blocks while the asking process has the medium mapped), u64 length. The first
//! descriptor is the roster's (`roster`), those of the media come in their order.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use kvdepot_arena::Error;
use kvdepot_host::fds;
use kvdepot_host::fork::{LentFd, LockFd};
use kvdepot_store::placement::MEDIA_MAX;

pub(crate) const MAGIC: [u8; 8] = *b"KVDATTCH";
pub(crate) const VERSION: u32 = 5;
/// Bytes of a request.
pub(crate) const REQUEST: usize = 32;
/// Longest refusal.
const MESSAGE_MAX: usize = 4096;

/// What the attaching process will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Read,
    Write,
    /// A client: a depot in another process, which calls.
    Client(Former),
    /// The second connection of the client with this number.
    Tasks(u64),
}

/// Who a client was before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Former {
    /// 0 for one that is new.
    pub(crate) number: u64,
    /// Its last call whose answer it has heard.
    pub(crate) heard: u64,
}

impl Role {
    pub(crate) fn writes(self) -> bool {
        matches!(self, Role::Write | Role::Client(_))
    }
}

/// Whom the attaching process works for, and how.
pub(crate) struct Terms {
    pub(crate) session: u64,
    /// Of the client that attached; 0 for a mover.
    pub(crate) client: u64,
    /// Its byte in the roster; 0 for a mover.
    pub(crate) seat: u64,
    pub(crate) slice_size: u64,
    /// What the owner's configuration says.
    pub(crate) lanes: Option<usize>,
}

/// One of the owner's media: numbered in the order of appearance, and never again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Medium {
    pub(crate) number: u32,
    pub(crate) len: u64,
    /// Whether no later owner uses its room while the asking process has it mapped.
    pub(crate) held: bool,
}

/// What the attaching process got, its descriptors kept from its children.
pub(crate) struct Welcome {
    pub(crate) terms: Terms,
    pub(crate) roster: LockFd,
    pub(crate) media: Vec<(Medium, LockFd)>,
}

fn peer(reason: impl Into<String>) -> Error {
    Error::Peer {
        socket: String::new(),
        reason: reason.into(),
    }
}

fn io(what: &str) -> impl Fn(std::io::Error) -> Error + '_ {
    move |error| peer(format!("{what}: {error}"))
}

pub(crate) fn send_request(mut socket: &UnixStream, role: Role) -> Result<(), Error> {
    let (role, number, heard) = match role {
        Role::Read => (0u32, 0, 0),
        Role::Write => (1, 0, 0),
        Role::Client(Former { number, heard }) => (2, number, heard),
        Role::Tasks(number) => (3, number, 0),
    };
    let mut bytes = [0; REQUEST];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&role.to_le_bytes());
    bytes[16..24].copy_from_slice(&number.to_le_bytes());
    bytes[24..].copy_from_slice(&heard.to_le_bytes());
    socket.write_all(&bytes).map_err(io("could not ask"))
}

/// What a request asks for, from as much of it as has come; `None` when that is not all.
pub(crate) fn read_request(bytes: &[u8]) -> Result<Option<Role>, Error> {
    let Some((head, rest)) = bytes.split_first_chunk::<16>() else {
        return Ok(None);
    };
    // As soon as it is there: other versions may have shorter requests.
    check_head(head)?;
    let Some((rest, _)) = rest.split_first_chunk::<16>() else {
        return Ok(None);
    };
    let long = |at: usize| u64::from(word(rest, at)) | u64::from(word(rest, at + 4)) << 32;
    let (number, heard) = (long(0), long(8));
    match word(head, 12) {
        0 => Ok(Some(Role::Read)),
        1 => Ok(Some(Role::Write)),
        2 => Ok(Some(Role::Client(Former { number, heard }))),
        3 => Ok(Some(Role::Tasks(number))),
        role => Err(peer(format!(
            "role {role} is unknown: allowed are 0 (read), 1 (write), 2 (calls) and 3 (tasks)"
        ))),
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn check_head(bytes: &[u8; 16]) -> Result<(), Error> {
    if bytes[..8] != MAGIC {
        return Err(peer("it does not speak kvdepot's protocol"));
    }
    match word(bytes, 8) {
        VERSION => Ok(()),
        other => Err(peer(format!(
            "it speaks protocol version {other}, this release speaks {VERSION}: use the same \
             release on both sides"
        ))),
    }
}

pub(crate) fn send_welcome(
    socket: &UnixStream,
    terms: &Terms,
    roster: OwnedFd,
    media: &[(Medium, LentFd)],
) -> Result<(), Error> {
    let mut bytes = head(0);
    bytes.extend_from_slice(&terms.session.to_le_bytes());
    bytes.extend_from_slice(&terms.client.to_le_bytes());
    bytes.extend_from_slice(&terms.seat.to_le_bytes());
    bytes.extend_from_slice(&terms.slice_size.to_le_bytes());
    bytes.extend_from_slice(&(terms.lanes.unwrap_or(0) as u32).to_le_bytes());
    bytes.extend_from_slice(&(media.len() as u32).to_le_bytes());
    for (medium, _) in media {
        bytes.extend_from_slice(&medium.number.to_le_bytes());
        bytes.extend_from_slice(&u32::from(medium.held).to_le_bytes());
        bytes.extend_from_slice(&medium.len.to_le_bytes());
    }
    let mut descriptors = vec![roster.as_fd()];
    for (_, fd) in media {
        descriptors.push(fd.fd()?);
    }
    Ok(fds::send(socket, &bytes, &descriptors)?)
}

pub(crate) fn send_refusal(mut socket: &UnixStream, reason: &str) -> Result<(), Error> {
    let message = &reason.as_bytes()[..reason.len().min(MESSAGE_MAX)];
    let mut bytes = head(message.len() as u32);
    bytes.extend_from_slice(message);
    socket.write_all(&bytes).map_err(io("could not answer"))
}

fn head(status: u32) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&status.to_le_bytes());
    bytes
}

/// Within [`fork::between_forks`](kvdepot_host::fork::between_forks).
pub(crate) fn receive_welcome(socket: &UnixStream) -> Result<Welcome, Error> {
    let mut incoming = Incoming {
        socket,
        bytes: Vec::new(),
        fds: Vec::new(),
    };
    let mut start = [0; 16];
    start.copy_from_slice(incoming.take(0, 16)?);
    check_head(&start)?;
    let status = word(&start, 12) as usize;
    if status > 0 {
        let message = incoming.take(16, status.min(MESSAGE_MAX))?;
        return Err(peer(format!(
            "refused: {}",
            String::from_utf8_lossy(message)
        )));
    }
    let fixed = incoming.take(16, 40)?;
    let long = |at: usize| u64::from(word(fixed, at)) | u64::from(word(fixed, at + 4)) << 32;
    let terms = Terms {
        session: long(0),
        client: long(8),
        seat: long(16),
        slice_size: long(24),
        lanes: Some(word(fixed, 32) as usize).filter(|lanes| *lanes > 0),
    };
    let count = word(fixed, 36) as usize;
    if count > MEDIA_MAX {
        return Err(peer(format!(
            "it offers {count} media, at most {MEDIA_MAX} are allowed"
        )));
    }
    let (entries, _) = incoming.take(56, count * 16)?.as_chunks::<16>();
    let half = |entry: &[u8; 16], at: usize| {
        u64::from_le_bytes(entry[at..at + 8].try_into().unwrap_or_default())
    };
    let medium = |entry| Medium {
        number: half(entry, 0) as u32,
        len: half(entry, 8),
        held: half(entry, 0) >> 32 == 1,
    };
    let known: Vec<Medium> = entries.iter().map(medium).collect();
    if incoming.fds.len() != 1 + count {
        return Err(peer(format!(
            "{} descriptors came for the roster and {count} media",
            incoming.fds.len()
        )));
    }
    let kept = incoming.fds.into_iter().map(LockFd::adopt);
    let mut kept = kept.collect::<Result<Vec<_>, _>>()?;
    let roster = kept.remove(0);
    Ok(Welcome {
        terms,
        roster,
        media: known.into_iter().zip(kept).collect(),
    })
}

/// Bytes as they arrive, with the descriptors that come along.
struct Incoming<'a> {
    socket: &'a UnixStream,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Incoming<'_> {
    fn take(&mut self, at: usize, len: usize) -> Result<&[u8], Error> {
        while self.bytes.len() < at + len {
            // No more than belongs to the answer: what follows are frames.
            let mut chunk = [0; 512];
            let wanted = (at + len - self.bytes.len()).min(chunk.len());
            let (count, fds) = fds::recv(self.socket, &mut chunk[..wanted])?;
            if count == 0 {
                return Err(peer("it closed the connection"));
            }
            self.bytes.extend_from_slice(&chunk[..count]);
            self.fds.extend(fds);
        }
        Ok(&self.bytes[at..at + len])
    }
}
