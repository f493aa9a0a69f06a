//! Wire format between two engines, as bytes, without sockets and clocks. `docs/design/transfer.md`
//! describes it.

mod greeting;

pub(crate) use greeting::{Challenge, Greeting, Hello, Key, MAC, Proof, Turn};

use kvdepot_media::checksum::digest;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of all of it.
pub(crate) const VERSION: u16 = 1;

/// Bytes of a frame's head, its first row among them.
pub(crate) const HEAD: usize = size_of::<Head>();

/// Bytes of a row.
pub(crate) const ROW: usize = size_of::<Row>();

/// Bytes of a checksum.
pub(crate) const SUM: usize = 16;

/// Most rows of a frame: with head and checksum they are what one call to the kernel takes, 1,024
/// ranges of memory.
pub(crate) const ROWS_MAX: usize = 1000;

/// Most bytes of a frame, and of a call.
pub(crate) const BYTES_MAX: u64 = 64 << 20;

/// Most bytes of a name.
pub(crate) const NAME_MAX: usize = 1024;

/// Most bytes of a Join: ends of eight devices.
const JOIN_MAX: u64 = 8 * 64;

/// The flag of a frame whose bytes are followed by their checksum, or that wants it of its answer.
/// In a request another one, of head and rows, is in front of the bytes.
const SUMMED: u8 = 1;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// For the grant of a name.
    Open = 1,
    /// For the bytes of rows.
    Read = 2,
    /// That bytes go to rows.
    Write = 3,
    /// That a grant's number is forgotten.
    Close = 4,
    /// For an answer.
    Ping = 5,
    /// Whatever the user of the engine asks.
    Call = 6,
    /// A neighbour: for the memory of a name.
    Map = 7,
    /// A neighbour: it has let go of that.
    Unmap = 8,
    /// To a neighbour: that it lets go.
    Withdraw = 9,
    /// That devices of both are connected, and those that were before are not.
    Join = 10,
    /// For a grant's memory as devices of the target know it.
    Expose = 11,
}

impl Verb {
    fn of(number: u8) -> Option<Verb> {
        use Verb::{Call, Close, Expose, Join, Map, Open, Ping, Read, Unmap, Withdraw, Write};
        [
            Open, Read, Write, Close, Ping, Call, Map, Unmap, Withdraw, Join, Expose,
        ]
        .into_iter()
        .find(|verb| *verb as u8 == number)
    }
}

/// What an answer says of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// It was done.
    Done = 0,
    /// No such name or grant.
    Unknown = 1,
    /// A row reaches beyond its grant.
    Range = 2,
    /// The grant does not allow it.
    Rights = 3,
    /// What arrived does not match its checksum.
    Checksum = 4,
    /// It could not be done.
    Failed = 5,
    /// The target ends.
    Closing = 6,
}

impl Status {
    fn of(number: u16) -> Option<Status> {
        use Status::{Checksum, Closing, Done, Failed, Range, Rights, Unknown};
        [Done, Unknown, Range, Rights, Checksum, Failed, Closing]
            .into_iter()
            .find(|status| *status as u16 == number)
    }
}

/// A frame breaks a rule of the page: its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed frame: {0}")]
pub(crate) struct Malformed(pub(crate) &'static str);

/// A range of a grant.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Row {
    pub(crate) grant: U32,
    pub(crate) len: U32,
    pub(crate) offset: U64,
}

impl Row {
    /// This range of this grant.
    pub(crate) fn new(grant: u32, offset: u64, len: u32) -> Row {
        Row {
            grant: grant.into(),
            len: len.into(),
            offset: offset.into(),
        }
    }
}

/// A frame's head.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Head {
    verb: u8,
    flags: u8,
    status: U16,
    rows: U32,
    pub(crate) number: U64,
    pub(crate) bytes: U64,
    /// The first row; of an answer what it says beside its bytes.
    pub(crate) first: Row,
}

impl Head {
    /// Of a request.
    pub(crate) fn request(verb: Verb, rows: usize, number: u64, bytes: u64, summed: bool) -> Head {
        Head {
            verb: verb as u8,
            flags: if summed { SUMMED } else { 0 },
            status: 0.into(),
            rows: (rows as u32).into(),
            number: number.into(),
            bytes: bytes.into(),
            first: Row::default(),
        }
    }

    /// Of the answer to a request.
    pub(crate) fn answer(&self, status: Status, bytes: u64) -> Head {
        Head {
            status: (status as u16).into(),
            rows: 0.into(),
            bytes: bytes.into(),
            first: Row::default(),
            ..*self
        }
    }

    /// The same with this first row.
    pub(crate) fn with(mut self, first: Row) -> Head {
        self.first = first;
        self
    }

    /// From its bytes.
    pub(crate) fn read(bytes: &[u8; HEAD]) -> Head {
        zerocopy::transmute!(*bytes)
    }

    /// Whether a checksum follows the bytes, or is wanted of the answer.
    pub(crate) fn is_summed(&self) -> bool {
        self.flags & SUMMED != 0
    }

    /// A request, as far as its head says.
    pub(crate) fn asks(&self) -> Result<Asked, Malformed> {
        let verb = Verb::of(self.verb).ok_or(Malformed("an unknown verb"))?;
        let (rows, bytes) = (self.rows.get() as usize, self.bytes.get());
        let flags = match verb {
            Verb::Read | Verb::Write => SUMMED,
            _ => 0,
        };
        if self.flags & !flags != 0 || self.status.get() != 0 {
            return Err(Malformed("unexpected flags or status in a request"));
        }
        let fits = match verb {
            Verb::Read => (1..=ROWS_MAX).contains(&rows) && bytes == 0,
            Verb::Write => (1..=ROWS_MAX).contains(&rows) && bytes <= BYTES_MAX,
            Verb::Close => rows == 1 && bytes == 0,
            Verb::Ping => rows == 0 && bytes == 0,
            Verb::Open => rows == 0 && (1..=NAME_MAX as u64).contains(&bytes),
            Verb::Call => rows == 0 && bytes <= BYTES_MAX,
            Verb::Join => rows == 0 && bytes <= JOIN_MAX,
            Verb::Expose => rows == 1 && bytes == 0,
            // Those come over a socket of this host.
            Verb::Map | Verb::Unmap | Verb::Withdraw => false,
        };
        match fits {
            true => Ok(Asked { verb, rows, bytes }),
            false => Err(Malformed("unexpected rows or bytes for the verb")),
        }
    }

    /// What a neighbour asks.
    pub(crate) fn asks_neighbour(&self) -> Result<Asked, Malformed> {
        let verb = Verb::of(self.verb).ok_or(Malformed("an unknown verb"))?;
        let (rows, bytes) = (self.rows.get() as usize, self.bytes.get());
        let fits = match verb {
            Verb::Map => rows == 0 && (1..=NAME_MAX as u64).contains(&bytes),
            Verb::Unmap => rows == 1 && bytes == 0,
            _ => false,
        };
        match fits && self.flags == 0 && self.status.get() == 0 {
            true => Ok(Asked { verb, rows, bytes }),
            false => Err(Malformed("unexpected request on a local connection")),
        }
    }

    /// Whether a neighbour is to let go of what is in its first row.
    pub(crate) fn withdraws(&self) -> bool {
        self.verb == Verb::Withdraw as u8
    }

    /// An answer to the request of this verb and number, for which so many bytes were expected.
    pub(crate) fn answers(
        &self,
        verb: Verb,
        number: u64,
        most: Bytes,
    ) -> Result<Status, Malformed> {
        let status = Status::of(self.status.get()).ok_or(Malformed("an unknown status"))?;
        if self.verb != verb as u8 || self.number.get() != number {
            return Err(Malformed("response to a different request"));
        }
        let bytes = self.bytes.get();
        let fits = match (status, most) {
            (Status::Done, Bytes::Just(just)) => bytes == just,
            (Status::Done, Bytes::Upto(most)) => bytes <= most,
            _ => bytes == 0,
        };
        match fits {
            true => Ok(status),
            false => Err(Malformed("response of unexpected length")),
        }
    }
}

/// How many bytes an answer has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bytes {
    Just(u64),
    Upto(u64),
}

/// What a request asks for, as far as its head says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) verb: Verb,
    pub(crate) rows: usize,
    pub(crate) bytes: u64,
}

/// The checksum of a head and the rows behind it. What moves to or from a wrong place is not found
/// by a checksum of its bytes.
pub(crate) fn rows_sum(head: &[u8], rows: &[u8]) -> [u8; SUM] {
    digest(&[head, rows].concat()).to_le_bytes()
}

/// The bytes of rows together, which a frame has or asks for.
pub(crate) fn total(rows: &[Row]) -> Result<u64, Malformed> {
    let bytes = rows.iter().map(|row| u64::from(row.len.get())).sum();
    match bytes {
        1..=BYTES_MAX => Ok(bytes),
        _ => Err(Malformed("rows of zero or too many bytes")),
    }
}

/// What is said of a grant when its name is opened.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Opened {
    pub(crate) len: U64,
    /// All ones: until it is withdrawn.
    pub(crate) lasts_ms: U64,
    pub(crate) rights: U32,
    pub(crate) zero: U32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_has_the_bytes_of_the_page() {
        let row = Row::new(7, 0x0102, 9);
        let head = Head::request(Verb::Write, 3, 0x0A0B, 21, true).with(row);
        let mut bytes = [0; HEAD];
        bytes.copy_from_slice(head.as_bytes());
        let mut page = vec![3, 1, 0, 0, 3, 0, 0, 0];
        page.extend([0x0B, 0x0A, 0, 0, 0, 0, 0, 0, 21, 0, 0, 0, 0, 0, 0, 0]);
        page.extend([7, 0, 0, 0, 9, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes.as_slice(), page);
        let asked = Head::read(&bytes).asks().unwrap();
        assert_eq!((asked.verb, asked.rows, asked.bytes), (Verb::Write, 3, 21));
        assert!(Head::read(&bytes).is_summed());
    }

    #[test]
    fn what_the_page_does_not_allow_is_refused() {
        let head = |verb, rows, bytes| Head::request(verb, rows, 1, bytes, false);
        assert!(head(Verb::Read, 1, 0).asks().is_ok());
        let refused = [
            head(Verb::Read, 0, 0),
            head(Verb::Read, ROWS_MAX + 1, 0),
            head(Verb::Read, 1, 1),
            head(Verb::Write, 1, BYTES_MAX + 1),
            head(Verb::Open, 0, 0),
            head(Verb::Open, 0, NAME_MAX as u64 + 1),
            head(Verb::Call, 1, 1),
            Head {
                verb: 0,
                ..head(Verb::Ping, 0, 0)
            },
            Head {
                verb: 7,
                ..head(Verb::Ping, 0, 0)
            },
            Head {
                flags: 2,
                ..head(Verb::Ping, 0, 0)
            },
            Head {
                flags: 1,
                ..head(Verb::Open, 0, 1)
            },
            Head {
                status: 1.into(),
                ..head(Verb::Ping, 0, 0)
            },
        ];
        assert!(
            refused.iter().all(|head| head.asks().is_err()),
            "{refused:?}"
        );
        let long = vec![Row::new(0, 0, u32::MAX); ROWS_MAX];
        assert!(total(&long).is_err() && total(&[Row::default()]).is_err());
    }

    #[test]
    fn an_answer_is_of_its_request() {
        let asked = Head::request(Verb::Read, 1, 5, 0, false);
        let answer = asked.answer(Status::Done, 8);
        let just = Bytes::Just(8);
        assert_eq!(answer.answers(Verb::Read, 5, just), Ok(Status::Done));
        assert!(answer.answers(Verb::Read, 6, just).is_err());
        assert!(answer.answers(Verb::Write, 5, just).is_err());
        assert!(answer.answers(Verb::Read, 5, Bytes::Just(9)).is_err());
        assert!(answer.answers(Verb::Read, 5, Bytes::Upto(7)).is_err());
        let refused = asked.answer(Status::Range, 0);
        assert_eq!(refused.answers(Verb::Read, 5, just), Ok(Status::Range));
        let strange = Head {
            status: 9.into(),
            ..refused
        };
        assert!(strange.answers(Verb::Read, 5, just).is_err());
    }
}
