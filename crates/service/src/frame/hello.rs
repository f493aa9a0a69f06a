//! The attach protocol: one request, one answer with descriptors. For a mover silence follows, and
//! the connection stays open so that either side notices the other's end; a client goes on with
//! frames.
//!
//! Fixed rows, little-endian, as they are declared here: a request is a [`Request`], an answer a
//! [`Start`] and, where its status is 0, an [`Offer`] and a [`MediumRow`] for each medium; else the
//! status is the length of a message. The first descriptor is the roster's, those of the media
//! come in their order. What any version says begins with [`MAGIC`] and its number.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use kvdepot_arena::Error;
use kvdepot_host::fds;
use kvdepot_host::fork::{LentFd, LockFd};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::frame::refusal::broken;

pub(crate) const MAGIC: [u8; 8] = *b"KVDATTCH";
pub(crate) const VERSION: u32 = 11;
/// Bytes of a request.
pub(crate) const REQUEST: usize = size_of::<Request>();
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
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) session: u64,
    /// Of the client that attached; 0 for a mover.
    pub(crate) client: u64,
    /// Its byte in the roster; 0 for a mover.
    pub(crate) seat: u64,
    pub(crate) slice_size: u64,
    /// What the owner's configuration says.
    pub(crate) lanes: Option<usize>,
    /// What a client may have under way.
    pub(crate) limits: Limits,
}

/// How much a client may have asked for that is not done yet: the owner says it, and both keep to
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Keys of tasks.
    pub(crate) keys: usize,
    pub(crate) tasks: usize,
    /// Calls about devices.
    pub(crate) slow: usize,
}

/// One of the owner's media: numbered in the order of appearance, and never again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Medium {
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    pub(crate) len: u64,
    /// Whether no later owner uses its room while the asking process has it mapped.
    pub(crate) held: bool,
}

/// What the descriptor of a medium is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes that can be mapped.
    Mapped,
    /// A directory, in whose files the blocks of a tier lie, which are opened past the page cache
    /// or not.
    Directory { direct: bool },
    /// Bytes that are read and written by calls.
    Called,
    /// A file with the name of a tier, a new line, and the key to its door, `len` bytes in all.
    Door,
    /// Bytes that can be mapped, of which the owner's tier has more elsewhere: to be read.
    Shown,
}

/// What a process that attaches says.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Request {
    head: Start,
    /// For a client's tasks its own, for its calls that of the client which this process was until
    /// its connection broke, and is again; else 0.
    number: U64,
    /// The number of the last call whose answer such a client has heard, else 0: what later answers
    /// have granted is nobody's.
    heard: U64,
}

/// What either side says first. Of a request, `what` is the role: 0 reads, 1 writes, 2 a client's
/// calls, 3 its tasks; of an answer its status.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Start {
    magic: [u8; 8],
    version: U32,
    what: U32,
}

/// [`Terms`], and how many media follow. `lanes` is 0 where nobody has chosen.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Offer {
    session: U64,
    client: U64,
    seat: U64,
    slice_size: U64,
    lanes: U32,
    keys: U32,
    tasks: U32,
    slow: U32,
    media: U32,
}

/// A [`Medium`]. `held` is 1 when nobody gives its room to other blocks while the asking process
/// has it mapped; `kind` is 0 for what is mapped, 1 for a directory, whose `len` is 1 where its
/// files are opened past the page cache, 2 for what is read and written by calls, 3 for a door, and
/// 4 for what is mapped to be read.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MediumRow {
    number: U32,
    kind: U16,
    held: U16,
    len: U64,
}

impl From<&Medium> for MediumRow {
    fn from(medium: &Medium) -> MediumRow {
        let (kind, len) = match medium.kind {
            Kind::Mapped => (0u16, medium.len),
            Kind::Directory { direct } => (1, direct.into()),
            Kind::Called => (2, medium.len),
            Kind::Door => (3, medium.len),
            Kind::Shown => (4, medium.len),
        };
        MediumRow {
            number: medium.number.into(),
            kind: kind.into(),
            held: u16::from(medium.held).into(),
            len: len.into(),
        }
    }
}

impl TryFrom<&MediumRow> for Medium {
    type Error = Error;

    fn try_from(row: &MediumRow) -> Result<Medium, Error> {
        let kind = match row.kind.get() {
            0 => Kind::Mapped,
            1 => Kind::Directory {
                direct: row.len.get() == 1,
            },
            2 => Kind::Called,
            3 => Kind::Door,
            4 => Kind::Shown,
            other => return Err(broken(format!("a medium of kind {other} is unknown"))),
        };
        Ok(Medium {
            number: row.number.get(),
            kind,
            len: row.len.get(),
            held: row.held.get() == 1,
        })
    }
}

/// What the attaching process got, its descriptors kept from its children.
pub(crate) struct Welcome {
    pub(crate) terms: Terms,
    pub(crate) roster: LockFd,
    pub(crate) media: Vec<(Medium, LockFd)>,
}

fn io(what: &str) -> impl Fn(std::io::Error) -> Error + '_ {
    move |error| broken(format!("{what}: {error}"))
}

impl Start {
    fn new(what: u32) -> Start {
        Start {
            magic: MAGIC,
            version: VERSION.into(),
            what: what.into(),
        }
    }

    fn check(&self) -> Result<(), Error> {
        if self.magic != MAGIC {
            return Err(broken("the other process does not use kvdepot's protocol"));
        }
        match self.version.get() {
            VERSION => Ok(()),
            other => Err(broken(format!(
                "the other process uses protocol version {other}, this release uses {VERSION}; use \
                 the same release on both sides"
            ))),
        }
    }
}

pub(crate) fn send_request(mut socket: &UnixStream, role: Role) -> Result<(), Error> {
    let (role, number, heard) = match role {
        Role::Read => (0, 0, 0),
        Role::Write => (1, 0, 0),
        Role::Client(Former { number, heard }) => (2, number, heard),
        Role::Tasks(number) => (3, number, 0),
    };
    let request = Request {
        head: Start::new(role),
        number: number.into(),
        heard: heard.into(),
    };
    socket
        .write_all(request.as_bytes())
        .map_err(io("cannot send the request"))
}

/// What a request asks for, from as much of it as has come; `None` when that is not all.
pub(crate) fn read_request(bytes: &[u8]) -> Result<Option<Role>, Error> {
    let Ok((head, _)) = Start::ref_from_prefix(bytes) else {
        return Ok(None);
    };
    // As soon as it is there: other versions may have shorter requests.
    head.check()?;
    let Ok(Request {
        head,
        number,
        heard,
    }) = Request::ref_from_bytes(bytes)
    else {
        return Ok(None);
    };
    let (number, heard) = (number.get(), heard.get());
    match head.what.get() {
        0 => Ok(Some(Role::Read)),
        1 => Ok(Some(Role::Write)),
        2 => Ok(Some(Role::Client(Former { number, heard }))),
        3 => Ok(Some(Role::Tasks(number))),
        role => Err(broken(format!(
            "role {role} is unknown; allowed: 0 (read), 1 (write), 2 (calls) and 3 (tasks)"
        ))),
    }
}

pub(crate) fn send_welcome(
    socket: &UnixStream,
    terms: &Terms,
    roster: &LentFd,
    media: &[(Medium, LentFd)],
) -> Result<(), Error> {
    let Limits { keys, tasks, slow } = terms.limits;
    let offer = Offer {
        session: terms.session.into(),
        client: terms.client.into(),
        seat: terms.seat.into(),
        slice_size: terms.slice_size.into(),
        lanes: (terms.lanes.unwrap_or(0) as u32).into(),
        keys: (keys as u32).into(),
        tasks: (tasks as u32).into(),
        slow: (slow as u32).into(),
        media: (media.len() as u32).into(),
    };
    let mut bytes = [Start::new(0).as_bytes(), offer.as_bytes()].concat();
    let mut descriptors = vec![roster.fd()?];
    for (medium, fd) in media {
        bytes.extend_from_slice(MediumRow::from(medium).as_bytes());
        descriptors.push(fd.fd()?);
    }
    Ok(fds::send(socket, &bytes, &descriptors)?)
}

pub(crate) fn send_refusal(mut socket: &UnixStream, reason: &str) -> Result<(), Error> {
    let message = &reason.as_bytes()[..reason.len().min(MESSAGE_MAX)];
    let head = Start::new(message.len() as u32);
    let bytes = [head.as_bytes(), message].concat();
    socket
        .write_all(&bytes)
        .map_err(io("cannot send the response"))
}

/// Within [`fork::between_forks`](kvdepot_host::fork::between_forks).
pub(crate) fn receive_welcome(socket: &UnixStream) -> Result<Welcome, Error> {
    let mut incoming = Incoming {
        socket,
        fds: Vec::new(),
    };
    let head: Start = incoming.row()?;
    head.check()?;
    let status = head.what.get() as usize;
    if status > 0 {
        let message = incoming.take(status.min(MESSAGE_MAX))?;
        let message = String::from_utf8_lossy(&message);
        return Err(broken(format!(
            "the server rejected the request: {message}"
        )));
    }
    let offer: Offer = incoming.row()?;
    let count = offer.media.get() as usize;
    if count >= fds::DESCRIPTORS_MAX {
        return Err(broken(format!(
            "it offers {count} media; allowed: at most {}",
            fds::DESCRIPTORS_MAX - 1
        )));
    }
    let known = (0..count).map(|_| Medium::try_from(&incoming.row::<MediumRow>()?));
    let known = known.collect::<Result<Vec<Medium>, Error>>()?;
    if incoming.fds.len() != 1 + count {
        return Err(broken(format!(
            "received {} descriptors for the roster and {count} media",
            incoming.fds.len()
        )));
    }
    let kept = incoming.fds.into_iter().map(LockFd::adopt);
    let mut kept = kept.collect::<Result<Vec<_>, _>>()?;
    let roster = kept.remove(0);
    Ok(Welcome {
        terms: offer.terms(),
        roster,
        media: known.into_iter().zip(kept).collect(),
    })
}

impl Offer {
    fn terms(&self) -> Terms {
        Terms {
            session: self.session.get(),
            client: self.client.get(),
            seat: self.seat.get(),
            slice_size: self.slice_size.get(),
            lanes: Some(self.lanes.get() as usize).filter(|lanes| *lanes > 0),
            limits: Limits {
                keys: self.keys.get() as usize,
                tasks: self.tasks.get() as usize,
                slow: self.slow.get() as usize,
            },
        }
    }
}

/// Bytes as they arrive, with the descriptors that come along.
struct Incoming<'a> {
    socket: &'a UnixStream,
    fds: Vec<OwnedFd>,
}

impl Incoming<'_> {
    fn row<T: FromBytes>(&mut self) -> Result<T, Error> {
        let bytes = self.take(size_of::<T>())?;
        T::read_from_bytes(&bytes).map_err(|_| broken("truncated response"))
    }

    /// No more than belongs to the answer: what follows are frames.
    fn take(&mut self, len: usize) -> Result<Vec<u8>, Error> {
        let (mut bytes, mut at) = (vec![0; len], 0);
        while at < len {
            let (count, fds) = fds::recv(self.socket, &mut bytes[at..])?;
            if count == 0 {
                return Err(broken("it closed the connection"));
            }
            at += count;
            self.fds.extend(fds);
        }
        Ok(bytes)
    }
}
