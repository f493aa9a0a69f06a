//! The 48 bytes that a file begins with.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use super::error::{Error, refuse};

/// Bytes of a head.
pub const HEAD_LEN: usize = 48;
/// First bytes of every file.
pub const MAGIC: [u8; 3] = *b"KVC";
/// The only version that ds4 has released.
pub const VERSION: u8 = 1;

/// Why ds4 saved a session. ds4 reads a code that it does not know as [`Reason::UNKNOWN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reason(pub u8);

impl Reason {
    /// Not recorded.
    pub const UNKNOWN: Reason = Reason(0);
    /// A long first prompt came to a stable prefix.
    pub const COLD: Reason = Reason(1);
    /// Prefill or generation came to the next interval.
    pub const CONTINUED: Reason = Reason(2);
    /// Another request took the live session's place.
    pub const EVICT: Reason = Reason(3);
    /// The server ended.
    pub const SHUTDOWN: Reason = Reason(4);
    /// The agent's system prompt.
    pub const AGENT_SYSTEM: Reason = Reason(5);
    /// A session that the agent was told to keep.
    pub const AGENT_SESSION: Reason = Reason(6);

    /// ds4's word for it.
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

/// What a file has beyond the plain format. Unknown bits are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flags(pub u8);

impl Flags {
    /// A map of tool calls follows the payload.
    pub const TOOL_MAP: Flags = Flags(1);
    /// The text is what a client of the Responses API sees, not what the tokens spell.
    pub const RESPONSES_VISIBLE: Flags = Flags(1 << 1);
    /// The text leaves out the reasoning that the tokens hold.
    pub const THINKING_VISIBLE: Flags = Flags(1 << 2);
    /// The agent's title follows the payload, and names the file.
    pub const SESSION_TITLE: Flags = Flags(1 << 3);

    /// Whether all of these bits are set.
    #[must_use]
    pub fn contains(self, bits: Flags) -> bool {
        self.0 & bits.0 == bits.0
    }
}

/// What a head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bits of the routed experts' weights.
    pub quant_bits: u8,
    /// Why it was saved.
    pub reason: Reason,
    /// What is appended, and what the text is.
    pub flags: Flags,
    /// ds4's number of the model.
    pub model: u8,
    /// Tokens of the session, at least one.
    pub tokens: u32,
    /// Times ds4 has loaded the file.
    pub hits: u32,
    /// Context size of the session, in tokens: ds4 loads the file into this or a larger one.
    pub context: u32,
    /// Revision of what the payload means: ds4 loads only its own.
    pub revision: u8,
    /// Bytes that ds4 leaves zero, kept as they are.
    pub reserved: [u8; 3],
    /// Unix seconds of the saving.
    pub created: u64,
    /// Unix seconds of the last load.
    pub last_used: u64,
    /// Bytes of the payload.
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
    /// The head as it stands in the file.
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
    /// Another magic or version, or no tokens.
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
