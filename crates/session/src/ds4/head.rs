//! The 48 bytes that a file begins with.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::error::{Error, refuse};

/// Length of a head, in bytes.
pub const HEAD_LEN: usize = 48;
/// First bytes of every file.
pub const MAGIC: [u8; 3] = *b"KVC";
/// The only version that ds4 has released.
pub const VERSION: u8 = 1;

/// Cause of a save by ds4. ds4 reads an unknown code as [`Reason::UNKNOWN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reason(pub u8);

impl Reason {
    /// The cause is not recorded.
    pub const UNKNOWN: Reason = Reason(0);
    /// A long first prompt reached a stable prefix.
    pub const COLD: Reason = Reason(1);
    /// Prefill or generation reached the next interval.
    pub const CONTINUED: Reason = Reason(2);
    /// Another request replaced the live session.
    pub const EVICT: Reason = Reason(3);
    /// The server ended.
    pub const SHUTDOWN: Reason = Reason(4);
    /// System prompt of the agent.
    pub const AGENT_SYSTEM: Reason = Reason(5);
    /// Session that a user told the agent to keep.
    pub const AGENT_SESSION: Reason = Reason(6);

    /// Returns the name that ds4 uses, for example `"cold"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reason::COLD => "cold",
            Reason::CONTINUED => "continued",
            Reason::EVICT => "evict",
            Reason::SHUTDOWN => "shutdown",
            Reason::AGENT_SYSTEM => "agent-system",
            Reason::AGENT_SESSION => "agent-session",
            _ => "unknown",
        }
    }
}

/// Extensions of a file beyond the plain format. Unknown bits are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flags(pub u8);

impl Flags {
    /// A map of tool calls follows the payload.
    pub const TOOL_MAP: Flags = Flags(1);
    /// The text is the view of a client of the Responses API. It may differ from the text of the
    /// tokens.
    pub const RESPONSES_VISIBLE: Flags = Flags(1 << 1);
    /// The text omits the reasoning that the tokens contain.
    pub const THINKING_VISIBLE: Flags = Flags(1 << 2);
    /// A title follows the payload, and determines the name of the file. The agent writes it.
    pub const SESSION_TITLE: Flags = Flags(1 << 3);

    /// Returns true if all bits of `bits` are set.
    #[must_use]
    pub fn contains(self, bits: Flags) -> bool {
        self.0 & bits.0 == bits.0
    }
}

/// Head of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bits per weight of the routed experts.
    pub quant_bits: u8,
    /// Cause of the save.
    pub reason: Reason,
    /// Contents of the trailer, and kind of the text.
    pub flags: Flags,
    /// Number that ds4 assigns to the model.
    pub model: u8,
    /// Number of tokens; at least one.
    pub tokens: u32,
    /// Number of times ds4 has loaded the file.
    pub hits: u32,
    /// Context size of the session, in tokens. ds4 loads the file into a context of this size or a
    /// larger one.
    pub context: u32,
    /// Revision of the payload's meaning. ds4 loads only its own revision.
    pub revision: u8,
    /// Reserved bytes. ds4 writes zeros; other values are kept.
    pub reserved: [u8; 3],
    /// Time of the save, in Unix seconds.
    pub created: u64,
    /// Time of the last load, in Unix seconds.
    pub last_used: u64,
    /// Length of the payload, in bytes.
    pub payload_len: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 3],
    version: u8,
    quant_bits: u8,
    reason: u8,
    flags: u8,
    model: u8,
    tokens: U32,
    hits: U32,
    context: U32,
    revision: u8,
    reserved: [u8; 3],
    created: U64,
    last_used: U64,
    payload_len: U64,
}

impl Head {
    /// Returns the bytes of the head as they are in a file.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_LEN] {
        transmute!(Raw {
            magic: MAGIC,
            version: VERSION,
            quant_bits: self.quant_bits,
            reason: self.reason.0,
            flags: self.flags.0,
            model: self.model,
            tokens: self.tokens.into(),
            hits: self.hits.into(),
            context: self.context.into(),
            revision: self.revision,
            reserved: self.reserved,
            created: self.created.into(),
            last_used: self.last_used.into(),
            payload_len: self.payload_len.into(),
        })
    }

    /// Reads a head.
    ///
    /// # Errors
    /// [`Error::Format`] if the magic or the version is another one, or if there are no tokens.
    pub fn decode(bytes: &[u8; HEAD_LEN]) -> Result<Head, Error> {
        let raw: &Raw = transmute_ref!(bytes);
        if raw.magic != MAGIC {
            return refuse(
                "magic",
                format_args!("{:02x?}", raw.magic),
                "KVC (4b 56 43)",
            );
        }
        if raw.version != VERSION {
            return refuse("version", raw.version, VERSION);
        }
        let head = Head {
            quant_bits: raw.quant_bits,
            reason: Reason(raw.reason),
            flags: Flags(raw.flags),
            model: raw.model,
            tokens: raw.tokens.get(),
            hits: raw.hits.get(),
            context: raw.context.get(),
            revision: raw.revision,
            reserved: raw.reserved,
            created: raw.created.get(),
            last_used: raw.last_used.get(),
            payload_len: raw.payload_len.get(),
        };
        head.check()?;
        Ok(head)
    }

    /// Refuses a head that ds4 would take for none.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.tokens == 0 {
            return refuse("tokens", 0, "1 or more");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte another one, so that swapped fields show.
    const BYTES: [u8; HEAD_LEN] = [
        b'K', b'V', b'C', 1, 4, 2, 9, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
        23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45,
        46, 47,
    ];

    #[test]
    fn each_field_is_where_ds4_has_it() {
        let head = Head::decode(&BYTES).unwrap();
        assert_eq!(head.quant_bits, 4);
        assert_eq!(head.reason.name(), "continued");
        assert!(head.flags.contains(Flags::TOOL_MAP));
        assert!(head.flags.contains(Flags::SESSION_TITLE));
        assert!(!head.flags.contains(Flags::THINKING_VISIBLE));
        assert_eq!(head.model, 7);
        assert_eq!(head.tokens, 0x0b0a_0908);
        assert_eq!(head.hits, 0x0f0e_0d0c);
        assert_eq!(head.context, 0x1312_1110);
        assert_eq!(head.revision, 20);
        assert_eq!(head.reserved, [21, 22, 23]);
        assert_eq!(head.created, 0x1f1e_1d1c_1b1a_1918);
        assert_eq!(head.last_used, 0x2726_2524_2322_2120);
        assert_eq!(head.payload_len, 0x2f2e_2d2c_2b2a_2928);
        assert_eq!(head.encode(), BYTES);
    }

    #[test]
    fn a_refusal_names_field_value_and_what_is_allowed() {
        let says = |at: usize, byte: u8| {
            let mut bytes = BYTES;
            *bytes.get_mut(at).unwrap() = byte;
            Head::decode(&bytes).unwrap_err().to_string()
        };
        assert_eq!(
            says(1, 0),
            "ds4 file: magic: [4b, 00, 43] is not allowed; allowed: KVC (4b 56 43)"
        );
        assert_eq!(
            says(3, 2),
            "ds4 file: version: 2 is not allowed; allowed: 1"
        );
    }

    #[test]
    fn a_session_without_tokens_is_none() {
        let mut bytes = BYTES;
        bytes.iter_mut().skip(8).take(4).for_each(|byte| *byte = 0);
        let error = Head::decode(&bytes).unwrap_err();
        assert_eq!(
            error.to_string(),
            "ds4 file: tokens: 0 is not allowed; allowed: 1 or more"
        );
    }
}
