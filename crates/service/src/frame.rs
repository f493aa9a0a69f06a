//! Frames: what a client and its owner say to each other once they are attached.
//!
//! Little-endian. A frame is a head of 16 bytes (u32 length of what follows, u16 verb, u16 status,
//! u64 number) and its body. On the *calls* connection each request is answered by one frame with
//! its number, unless its verb has no answer; on the *tasks* connection both sides speak when they
//! have something to say. Statuses: 0 well, else a kind of error with its texts in the body; a
//! request that follows answers which the client has all read has 1.
//!
//! The requests that are answered count from 1, and go on counting on the connections that follow.
//! So the client can say there what it has heard (`wire`), and the owner ends what it granted in
//! answers behind that.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use kvdepot_arena::format::record::Packed;
use kvdepot_arena::{Error, Identity, Key, NamespaceId, Place, Token};
use kvdepot_media::Checksum;
use kvdepot_store::Cursor;

const HEAD: usize = 16;

/// The status of a request whose client has heard all that was answered before.
pub(crate) const HEARD: u16 = 1;

/// Longest body: a call of [`KEYS_MAX`] keys with their placements, and room.
const BODY_MAX: usize = 128 << 20;

/// Most keys of one call: those of a prompt of millions of tokens. It bounds what the owner does,
/// and keeps in memory, for one call of one client.
pub(crate) const KEYS_MAX: usize = 1 << 20;

/// What a frame asks or tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Verb {
    // Calls.
    Namespace = 1,
    Contains = 2,
    Prefix = 3,
    Nearest = 4,
    Pin = 5,
    /// No answer.
    Unpin = 6,
    Discard = 7,
    Reserve = 8,
    Commit = 9,
    /// No answer.
    Abort = 10,
    Remove = 11,
    Clear = 12,
    KeepContiguous = 13,
    Stats = 14,
    Drain = 15,
    About = 16,
    Namespaces = 17,
    Blocks = 18,
    Gone = 19,
    // Tasks, from the client.
    Put = 32,
    Get = 33,
    /// What became of the moves that were asked for.
    Moved = 34,
    /// The client's lanes have stopped for good: nothing of it is held any more. Answered by the
    /// same, and the end of the connection.
    Goodbye = 35,
    Prefetch = 41,
    /// The lanes of the connections that this one follows have stopped.
    Quiet = 42,
    /// Answered at once by the same, so that either side knows that the other is there.
    Ping = 43,
    // Calls that may take long: asked and answered on the connection of the tasks.
    Devices = 36,
    AddDevice = 37,
    DrainDevice = 38,
    RemoveDevice = 39,
    GrowDevice = 40,
    // Tasks, from the owner.
    /// Move these blocks.
    Move = 48,
    /// A step of a task.
    Step = 49,
    /// A task was refused.
    Refused = 50,
    /// The owner closes: no new tasks.
    Closing = 51,
    /// The medium of this number is the owner's no more.
    Removed = 52,
}

impl Verb {
    /// Whether it is a call of the connection of the tasks.
    pub(crate) fn is_slow(self) -> bool {
        (Verb::Devices as u16..=Verb::GrowDevice as u16).contains(&(self as u16))
    }
}

const VERBS: [Verb; 36] = [
    Verb::Namespace,
    Verb::Contains,
    Verb::Prefix,
    Verb::Nearest,
    Verb::Pin,
    Verb::Unpin,
    Verb::Discard,
    Verb::Reserve,
    Verb::Commit,
    Verb::Abort,
    Verb::Remove,
    Verb::Clear,
    Verb::KeepContiguous,
    Verb::Stats,
    Verb::Drain,
    Verb::About,
    Verb::Namespaces,
    Verb::Blocks,
    Verb::Gone,
    Verb::Put,
    Verb::Get,
    Verb::Moved,
    Verb::Goodbye,
    Verb::Prefetch,
    Verb::Quiet,
    Verb::Ping,
    Verb::Devices,
    Verb::AddDevice,
    Verb::DrainDevice,
    Verb::RemoveDevice,
    Verb::GrowDevice,
    Verb::Move,
    Verb::Step,
    Verb::Refused,
    Verb::Closing,
    Verb::Removed,
];

/// A frame as it is read.
pub(crate) struct Frame {
    pub(crate) verb: Verb,
    pub(crate) status: u16,
    pub(crate) number: u64,
    pub(crate) body: Vec<u8>,
}

fn broken(what: impl Into<String>) -> Error {
    Error::Peer {
        socket: String::new(),
        reason: what.into(),
    }
}

/// A frame being written; it grows by what is pushed.
pub(crate) struct Out(Vec<u8>);

impl Out {
    pub(crate) fn new(verb: Verb, number: u64) -> Out {
        Out::answer(verb, 0, number)
    }

    pub(crate) fn answer(verb: Verb, status: u16, number: u64) -> Out {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(&(verb as u16).to_le_bytes());
        bytes.extend_from_slice(&status.to_le_bytes());
        bytes.extend_from_slice(&number.to_le_bytes());
        Out(bytes)
    }

    pub(crate) fn reserve(&mut self, bytes: usize) {
        self.0.reserve(bytes);
    }

    pub(crate) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn flag(&mut self, value: bool) {
        self.0.push(value.into());
    }

    pub(crate) fn word(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn long(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.word(text.len() as u32);
        self.bytes(text.as_bytes());
    }

    pub(crate) fn json(&mut self, value: &impl serde::Serialize) {
        self.text(&serde_json::to_string(value).unwrap_or_default());
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.0[8..HEAD].copy_from_slice(&number.to_le_bytes());
    }

    pub(crate) fn status(&mut self, status: u16) {
        self.0[6..8].copy_from_slice(&status.to_le_bytes());
    }

    pub(crate) fn keys(&mut self, keys: &[Key]) {
        self.word(keys.len() as u32);
        self.reserve(keys.len() * 32);
        keys.iter().for_each(|key| self.bytes(&key.0));
    }

    pub(crate) fn token(&mut self, token: Token) {
        self.word(token.device);
        self.word(token.slot);
        self.long(token.sequence);
    }

    pub(crate) fn cursor(&mut self, cursor: Cursor) {
        self.bytes(&cursor.to_bytes());
    }

    /// All of a place but its identity.
    pub(crate) fn place(&mut self, place: &Place) {
        let mut head = [0; 44];
        head[..4].copy_from_slice(&place.token.device.to_le_bytes());
        head[4..8].copy_from_slice(&place.token.slot.to_le_bytes());
        head[8..16].copy_from_slice(&place.token.sequence.to_le_bytes());
        head[16..24].copy_from_slice(&place.len.to_le_bytes());
        head[24..40].copy_from_slice(&place.checksum.0);
        head[40..42].copy_from_slice(&place.parts.to_le_bytes());
        head[42] = place.extents.count() as u8;
        self.bytes(&head);
        let extents = place.extents.0.iter().filter(|packed| **packed != 0);
        extents.for_each(|packed| self.long(*packed));
    }

    /// The finished frame.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let len = (self.0.len() - HEAD) as u32;
        self.0[..4].copy_from_slice(&len.to_le_bytes());
        self.0
    }

    pub(crate) fn send(self, mut socket: &UnixStream) -> Result<(), Error> {
        let bytes = self.finish();
        socket
            .write_all(&bytes)
            .map_err(|error| broken(error.to_string()))
    }
}

/// Verb, status, number and length of the body.
fn head(bytes: &[u8]) -> Result<(Verb, u16, u64, usize), Error> {
    let mut read = In(bytes);
    let len = read.word()? as usize;
    let verb = read.short()?;
    let status = read.short()?;
    let number = read.long()?;
    let known = VERBS.iter().find(|known| **known as u16 == verb);
    let Some(verb) = known.copied() else {
        return Err(broken(format!("verb {verb} is unknown")));
    };
    if len > BODY_MAX {
        return Err(broken(format!(
            "a frame of {len} bytes: at most {BODY_MAX} are allowed"
        )));
    }
    Ok((verb, status, number, len))
}

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

    /// Whether something has arrived that was not taken yet.
    pub(crate) fn has_more(&self) -> bool {
        self.end > self.begin
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
                return Err(broken("it ended in the middle of a frame"));
            }
            self.end += count;
        }
        Ok(true)
    }
}

/// A frame's body being read.
pub(crate) struct In<'a>(pub(crate) &'a [u8]);

impl<'a> In<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let Some((now, rest)) = self.0.split_at_checked(len) else {
            return Err(broken("a frame that ends too early"));
        };
        self.0 = rest;
        Ok(now)
    }

    fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN], Error> {
        Ok(self.bytes(LEN)?.try_into().unwrap_or([0; LEN]))
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Error> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn flag(&mut self) -> Result<bool, Error> {
        Ok(self.byte()? != 0)
    }

    pub(crate) fn short(&mut self) -> Result<u16, Error> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn word(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn long(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn checksum(&mut self) -> Result<Checksum, Error> {
        Ok(Checksum(self.array()?))
    }

    pub(crate) fn namespace(&mut self) -> Result<NamespaceId, Error> {
        Ok(NamespaceId(self.array()?))
    }

    pub(crate) fn key(&mut self) -> Result<Key, Error> {
        Ok(Key(self.array()?))
    }

    pub(crate) fn text(&mut self) -> Result<String, Error> {
        let len = self.word()? as usize;
        Ok(String::from_utf8_lossy(self.bytes(len)?).into_owned())
    }

    pub(crate) fn json<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, Error> {
        serde_json::from_str(&self.text()?).map_err(|error| broken(error.to_string()))
    }

    /// A count of things of at least `each` bytes, so that it cannot ask for more memory than the
    /// frame has bytes.
    pub(crate) fn count(&mut self, each: usize) -> Result<usize, Error> {
        let count = self.word()? as usize;
        if count.saturating_mul(each) > self.0.len() {
            return Err(broken("a frame that ends too early"));
        }
        Ok(count)
    }

    pub(crate) fn keys(&mut self) -> Result<Vec<Key>, Error> {
        let count = self.count(32)?;
        if count > KEYS_MAX {
            let allowed = format!("at most {KEYS_MAX} keys a call of a served depot");
            return Err(Error::input("keys", count, allowed));
        }
        let (keys, _) = self.bytes(count * 32)?.as_chunks::<32>();
        Ok(keys.iter().map(|key| Key(*key)).collect())
    }

    pub(crate) fn token(&mut self) -> Result<Token, Error> {
        Ok(Token {
            device: self.word()?,
            slot: self.word()?,
            sequence: self.long()?,
        })
    }

    pub(crate) fn cursor(&mut self) -> Result<Cursor, Error> {
        Ok(Cursor::from_bytes(&self.array()?))
    }

    pub(crate) fn place(&mut self, identity: Identity) -> Result<Place, Error> {
        let token = self.token()?;
        let len = self.long()?;
        let checksum = self.checksum()?;
        let parts = self.short()?;
        let count = self.short()? as usize;
        let mut extents = Packed::default();
        for packed in extents.0.iter_mut().take(count) {
            *packed = self.long()?;
        }
        // Lengths that do not fit would be copied beyond their extents.
        if count > extents.0.len() || extents.room() < len || parts == 0 {
            return Err(broken("a place whose lengths do not fit"));
        }
        Ok(Place {
            token,
            identity,
            extents,
            len,
            parts,
            checksum,
            stamp: 0,
        })
    }

    /// Everything was read.
    pub(crate) fn end(&self) -> Result<(), Error> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(broken(format!(
            "{} bytes too many in a frame",
            self.0.len()
        )))
    }
}

/// An error as an answer, told apart by kinds where a caller treats them differently.
pub(crate) fn refusal(verb: Verb, number: u64, error: &Error) -> Out {
    let (status, texts) = match error {
        Error::Input {
            field,
            value,
            allowed,
        } => (2, [field.clone(), value.clone(), allowed.clone()]),
        Error::Closed(_) => (3, Default::default()),
        Error::Full {
            tier,
            requested,
            reason,
        } => (
            4,
            [(*tier).to_owned(), requested.to_string(), reason.clone()],
        ),
        Error::Busy {
            path,
            pinned,
            reserved,
            waited_s,
        } => (
            6,
            [
                path.to_string_lossy().into_owned(),
                format!("{pinned} {reserved}"),
                waited_s.to_string(),
            ],
        ),
        Error::Config {
            field,
            value,
            allowed,
        } => (5, [field.clone(), value.clone(), allowed.clone()]),
        _ => (1, [error.to_string(), String::new(), String::new()]),
    };
    let mut out = Out::answer(verb, status, number);
    texts.iter().for_each(|text| out.text(text));
    out
}

/// The error of an answer that is one.
pub(crate) fn check(frame: &Frame) -> Result<(), Error> {
    if frame.status == 0 {
        return Ok(());
    }
    let mut read = In(&frame.body);
    let [first, second, third] = [read.text()?, read.text()?, read.text()?];
    Err(match frame.status {
        2 => Error::input(first, second, third),
        3 => Error::Closed(": its owner closes it"),
        4 => Error::Full {
            tier: tier_name(&first),
            requested: second.parse().unwrap_or_default(),
            reason: third,
        },
        5 => Error::config(first, second, third),
        6 => {
            let (pinned, reserved) = second.split_once(' ').unwrap_or_default();
            Error::Busy {
                path: first.into(),
                pinned: pinned.parse().unwrap_or_default(),
                reserved: reserved.parse().unwrap_or_default(),
                waited_s: third.parse().unwrap_or_default(),
            }
        }
        _ => broken(first),
    })
}

/// The name of a tier as this program has it.
pub(crate) fn tier_name(name: &str) -> &'static str {
    let known = ["Cache", "Dax"];
    known
        .into_iter()
        .find(|known| *known == name)
        .unwrap_or("tier")
}
