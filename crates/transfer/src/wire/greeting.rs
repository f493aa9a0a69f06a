//! How a connection begins: who is there, and the proof that both have the same token.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Malformed, VERSION};

/// What the bytes of a greeting begin with.
const MAGIC: [u8; 8] = *b"kvdxfer\0";

/// What the key is derived for, so that the token can serve nothing else.
const CONTEXT: &str = "kvdepot transfer token 1";

/// Bytes of a MAC.
pub(crate) const MAC: usize = 32;

/// What a token proves itself with.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// Of a token, which may be empty.
    pub(crate) fn of(token: &[u8]) -> Key {
        Key(blake3::derive_key(CONTEXT, token))
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The first word of an initiator.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Hello {
    magic: [u8; 8],
    version: U16,
    zero: U16,
    pub(crate) lane: U32,
    pub(crate) engine: [u8; 16],
    nonce: [u8; 32],
}

impl Hello {
    /// Of this lane of this engine.
    pub(crate) fn new(lane: u32, engine: [u8; 16], nonce: [u8; 32]) -> Hello {
        Hello {
            magic: MAGIC,
            version: VERSION.into(),
            zero: 0.into(),
            lane: lane.into(),
            engine,
            nonce,
        }
    }

    /// What it is answered with.
    pub(crate) fn greet(&self) -> Result<Greeting, Malformed> {
        match (self.magic, self.version.get()) {
            (MAGIC, VERSION) if self.zero.get() == 0 => Ok(Greeting::GoOn),
            (MAGIC, version) if version != VERSION => Ok(Greeting::OtherVersion),
            _ => Err(Malformed("not a greeting of a transfer engine")),
        }
    }
}

/// What a target thinks of a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    GoOn = 0,
    OtherVersion = 1,
    TooMany = 2,
    Closing = 3,
}

/// What a target answers.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Challenge {
    magic: [u8; 8],
    version: U16,
    greeting: U16,
    /// Requests that may be unanswered.
    pub(crate) credit: U32,
    pub(crate) engine: [u8; 16],
    nonce: [u8; 32],
}

impl Challenge {
    /// Of this engine.
    pub(crate) fn new(
        greeting: Greeting,
        credit: u32,
        engine: [u8; 16],
        nonce: [u8; 32],
    ) -> Challenge {
        Challenge {
            magic: MAGIC,
            version: VERSION.into(),
            greeting: (greeting as u16).into(),
            credit: credit.into(),
            engine,
            nonce,
        }
    }

    /// Why a target does not want the connection, where it says so.
    pub(crate) fn refusal(&self) -> Result<Option<String>, Malformed> {
        if self.magic != MAGIC {
            return Err(Malformed("not a greeting of a transfer engine"));
        }
        let said = match self.greeting.get() {
            0 if self.version.get() == VERSION && self.credit.get() > 0 => return Ok(None),
            1 => format!(
                "it uses protocol version {}, this release uses {VERSION}; use the same release on \
                 both hosts",
                self.version.get()
            ),
            2 => "it has too many connections".to_owned(),
            3 => "it is closing".to_owned(),
            _ => return Err(Malformed("unknown greeting")),
        };
        Ok(Some(said))
    }
}

/// Whose MAC it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Turn {
    Initiator = 1,
    Target = 2,
}

/// What both sides prove to each other.
pub(crate) struct Proof<'a> {
    pub(crate) key: &'a Key,
    pub(crate) hello: &'a Hello,
    pub(crate) challenge: &'a Challenge,
}

impl Proof<'_> {
    /// The MAC of a side; the target's is of the initiator's, too.
    pub(crate) fn mac(&self, turn: Turn, before: &[u8]) -> [u8; MAC] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key.0);
        hasher.update(&[turn as u8]);
        hasher.update(self.hello.as_bytes());
        hasher.update(self.challenge.as_bytes());
        hasher.update(before);
        *hasher.finalize().as_bytes()
    }

    /// Whether it is what the other side sent, in a time that does not depend on it.
    pub(crate) fn proves(&self, turn: Turn, before: &[u8], mac: [u8; MAC]) -> bool {
        blake3::Hash::from_bytes(self.mac(turn, before)) == blake3::Hash::from_bytes(mac)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_the_token_the_turn_and_both_nonces() {
        let (key, other) = (Key::of(b"secret"), Key::of(b"other"));
        let hello = Hello::new(3, [1; 16], [2; 32]);
        let challenge = Challenge::new(Greeting::GoOn, 9, [4; 16], [5; 32]);
        let proof = Proof {
            key: &key,
            hello: &hello,
            challenge: &challenge,
        };
        let mac = proof.mac(Turn::Initiator, &[]);
        assert!(proof.proves(Turn::Initiator, &[], mac));
        assert!(!proof.proves(Turn::Target, &[], mac));
        assert!(!proof.proves(Turn::Initiator, b"x", mac));
        let strange = Proof {
            key: &other,
            ..proof
        };
        assert!(!strange.proves(Turn::Initiator, &[], mac));
        let again = Hello::new(3, [1; 16], [3; 32]);
        let replayed = Proof {
            key: &key,
            hello: &again,
            challenge: &challenge,
        };
        assert!(!replayed.proves(Turn::Initiator, &[], mac));
    }

    #[test]
    fn a_greeting_has_the_bytes_of_the_page() {
        let hello = Hello::new(0x0102, [7; 16], [9; 32]);
        let mut page = b"kvdxfer\0".to_vec();
        page.extend([1, 0, 0, 0, 2, 1, 0, 0]);
        page.extend([7; 16]);
        page.extend([9; 32]);
        assert_eq!(hello.as_bytes(), page);
        assert_eq!(hello.greet(), Ok(Greeting::GoOn));
        let other = Hello {
            version: 2.into(),
            ..hello
        };
        assert_eq!(other.greet(), Ok(Greeting::OtherVersion));
        assert!(
            Hello {
                magic: [0; 8],
                ..hello
            }
            .greet()
            .is_err()
        );
        let challenge = Challenge::new(Greeting::TooMany, 9, [4; 16], [5; 32]);
        assert!(challenge.refusal().unwrap().unwrap().contains("too many"));
        assert_eq!(
            Challenge::new(Greeting::GoOn, 9, [4; 16], [5; 32]).refusal(),
            Ok(None)
        );
    }
}
