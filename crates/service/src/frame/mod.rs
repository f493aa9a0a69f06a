//! Frames: what a client and its owner say to each other once they are attached (`hello`). Each is
//! declared once (`verbs`), and so are the rows that frames hold many of (`rows`).
//!
//! A frame is a head of 16 bytes (u32 length of what follows, u16 verb, u16 status, u64 number,
//! little-endian) and its body: the fields of the declaration in their order, as postcard writes
//! them. On the *calls* connection each request is answered by one frame with its number, unless
//! its verb has no answer; on the *tasks* connection both sides speak when they have something to
//! say. An answer of status 1 is an error (`refusal`); a request of status 1 follows answers which
//! the client has all read.
//!
//! The requests that are answered count from 1, and go on counting on the connections that follow.
//! So the client can say there what it has heard (`hello`), and the owner ends what it granted in
//! answers behind that.

pub(crate) mod hello;
pub(crate) mod refusal;
pub(crate) mod rows;
pub(crate) mod verbs;

use std::io::Write;
use std::os::unix::net::UnixStream;

use kvdepot_arena::Error;
use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use refusal::{Refusal, broken};
use verbs::{Asks, Says, Verb};

/// Bytes of a frame's head.
pub(crate) const HEAD: usize = size_of::<Head>();

/// The status of a request whose client has heard all that was answered before.
pub(crate) const HEARD: u16 = 1;

/// The status of an answer that is an error.
const REFUSED: u16 = 1;

/// Longest body: a call of [`rows::KEYS_MAX`] keys with their placements, and room.
const BODY_MAX: usize = 128 << 20;

/// Room for the frames that are said most.
const USUAL: usize = 256;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Head {
    len: U32,
    verb: U16,
    status: U16,
    number: U64,
}

/// A frame as it is read.
#[derive(Clone)]
pub(crate) struct Frame {
    pub(crate) verb: Verb,
    pub(crate) status: u16,
    pub(crate) number: u64,
    pub(crate) body: Vec<u8>,
}

impl Frame {
    /// What it carries: all of it, and nothing else.
    pub(crate) fn read<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Error> {
        let (value, rest) = postcard::take_from_bytes(&self.body).map_err(|error| match error {
            postcard::Error::DeserializeUnexpectedEnd => broken("truncated frame"),
            other => broken(format!("malformed {:?} frame: {other}", self.verb)),
        })?;
        match rest.len() {
            0 => Ok(value),
            more => Err(broken(format!("{more} unexpected bytes in a frame"))),
        }
    }

    /// What is answered.
    ///
    /// # Errors
    /// The answer, where it is one.
    pub(crate) fn answer<T: Asks>(&self) -> Result<T::Answer<'_>, Error> {
        match self.status {
            0 => self.read(),
            _ => Err(self.read::<Refusal>()?.into()),
        }
    }
}

/// A frame to be sent.
pub(crate) struct Out(Vec<u8>);

impl Out {
    /// That says this; its number is still to come.
    pub(crate) fn new<T: Says>(said: &T) -> Out {
        Out::written(T::VERB, 0, 0, said)
    }

    /// That answers a frame of this number.
    pub(crate) fn answer<T: Asks>(number: u64, answer: &T::Answer<'_>) -> Out {
        Out::written(T::VERB, 0, number, answer)
    }

    /// That answers it with an error.
    pub(crate) fn refusal(verb: Verb, number: u64, error: &Error) -> Out {
        Out::written(verb, REFUSED, number, &Refusal::from(error))
    }

    fn written(verb: Verb, status: u16, number: u64, body: &impl Serialize) -> Out {
        let head = Head {
            len: 0.into(),
            verb: (verb as u16).into(),
            status: status.into(),
            number: number.into(),
        };
        let mut bytes = Vec::with_capacity(USUAL);
        bytes.extend_from_slice(head.as_bytes());
        let written = postcard::to_extend(body, bytes);
        Out(written.expect("memory takes all, and a frame knows the length of what it carries"))
    }

    pub(crate) fn number(mut self, number: u64) -> Out {
        self.head().number = number.into();
        self
    }

    pub(crate) fn status(mut self, status: u16) -> Out {
        self.head().status = status.into();
        self
    }

    fn head(&mut self) -> &mut Head {
        let head = Head::mut_from_prefix(&mut self.0);
        head.expect("each begins with one").0
    }

    /// The finished frame.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let len = self.0.len() - HEAD;
        self.head().len = (len as u32).into();
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
pub(crate) fn head(bytes: &[u8]) -> Result<(Verb, u16, u64, usize), Error> {
    let head = Head::read_from_prefix(bytes);
    let (head, _) = head.map_err(|_| broken("truncated frame"))?;
    let verb = Verb::of(head.verb.get())
        .ok_or_else(|| broken(format!("verb {} is unknown", head.verb)))?;
    let len = head.len.get() as usize;
    if len > BODY_MAX {
        return Err(broken(format!(
            "frame of {len} bytes; allowed: at most {BODY_MAX}"
        )));
    }
    Ok((verb, head.status.get(), head.number.get(), len))
}
