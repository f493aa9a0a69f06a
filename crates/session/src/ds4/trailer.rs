//! What follows the payload. Sections stand in the order of their flags; those that are read:
//!
//! | section | bytes | what |
//! | --- | --- | --- |
//! | `TOOL_MAP` | 3 | `KTM` |
//! | | 1 | version, 1 |
//! | | 4 | entries |
//! | each entry | 4 | bytes of the id, 1 to 256 |
//! | | 4 | bytes of the call, 1 to 512 MiB |
//! | | n, m | id, and the call exactly as the model wrote it |
//! | `SESSION_TITLE` | 4 | bytes of the title |
//! | | n | title |
//!
//! The flag of the tool map may stand before no bytes at all: ds4 sets it before it knows whether
//! there is a call to write.

use super::error::{Error, refuse};
use super::head::Flags;

/// First bytes of a tool map.
const MAGIC: &[u8] = b"KTM";
/// The version of the tool map that is read.
const VERSION: u8 = 1;
/// Longest id that ds4 reads.
const ID_LEN_MAX: u32 = 256;
/// Longest call that ds4 keeps, in bytes.
const CALL_LEN_MAX: u32 = 512 * 1024 * 1024;

/// Tool call, as the model wrote it. With it, the history that a client sends back renders to the
/// same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolCall<'a> {
    /// ID that clients see.
    pub id: &'a [u8],
    /// Text of the call, exactly as the model wrote it.
    pub text: &'a [u8],
}

/// Sections of a trailer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trailer<'a> {
    /// Tool map, in the order of the file.
    pub tool_calls: Vec<ToolCall<'a>>,
    /// Title, usually UTF-8.
    pub title: Option<&'a [u8]>,
    /// Bytes after the known sections.
    pub rest: &'a [u8],
}

impl<'a> Trailer<'a> {
    /// Reads the sections that `flags` announce.
    ///
    /// # Errors
    /// [`Error::Format`] if a section does not match its flag, or exceeds the trailer.
    pub fn decode(flags: Flags, bytes: &'a [u8]) -> Result<Trailer<'a>, Error> {
        let mut trailer = Trailer {
            rest: bytes,
            ..Trailer::default()
        };
        if flags.contains(Flags::TOOL_MAP) && !bytes.is_empty() {
            trailer.tool_calls = tool_map(&mut trailer.rest)?;
        }
        if flags.contains(Flags::SESSION_TITLE) {
            let len = number("title length", &mut trailer.rest)?;
            trailer.title = Some(take("title", &mut trailer.rest, len)?);
        }
        Ok(trailer)
    }
}

fn tool_map<'a>(bytes: &mut &'a [u8]) -> Result<Vec<ToolCall<'a>>, Error> {
    let magic = take("tool map's magic", bytes, 3)?;
    if magic != MAGIC {
        return refuse(
            "tool map's magic",
            format_args!("{magic:02x?}"),
            "KTM (4b 54 4d)",
        );
    }
    let version = take("tool map's version", bytes, 1)?;
    if version != [VERSION] {
        return refuse("tool map's version", format_args!("{version:?}"), VERSION);
    }
    let count = number("tool map's entries", bytes)?;
    // Grows by what is there, not by what is announced.
    let mut calls = Vec::new();
    for _ in 0..count {
        let id_len = bounded("tool id's length", bytes, ID_LEN_MAX)?;
        let text_len = bounded("tool call's length", bytes, CALL_LEN_MAX)?;
        calls.push(ToolCall {
            id: take("tool id", bytes, id_len)?,
            text: take("tool call", bytes, text_len)?,
        });
    }
    Ok(calls)
}

/// The next number, from 1 to `max`.
fn bounded(field: &'static str, bytes: &mut &[u8], max: u32) -> Result<u32, Error> {
    let value = number(field, bytes)?;
    if value == 0 || value > max {
        return refuse(field, value, format_args!("1 to {max}"));
    }
    Ok(value)
}

/// The next number.
fn number(field: &'static str, bytes: &mut &[u8]) -> Result<u32, Error> {
    let Some((number, rest)) = bytes.split_first_chunk() else {
        return short(field, 4, bytes);
    };
    *bytes = rest;
    Ok(u32::from_le_bytes(*number))
}

/// The next bytes.
fn take<'a>(field: &'static str, bytes: &mut &'a [u8], len: u32) -> Result<&'a [u8], Error> {
    let Some((taken, rest)) = bytes.split_at_checked(len as usize) else {
        return short(field, len, bytes);
    };
    *bytes = rest;
    Ok(taken)
}

fn short<T>(field: &'static str, len: u32, left: &[u8]) -> Result<T, Error> {
    let left = left.len();
    let value = format_args!("{len} bytes");
    refuse(
        field,
        value,
        format_args!("at most {left}, the rest of the trailer"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &[u8] =
        b"KTM\x01\x02\0\0\0\x02\0\0\0\x03\0\0\0idabc\x01\0\0\0\x01\0\0\0xy\x02\0\0\0hi!";

    #[test]
    fn sections_are_read_in_the_order_of_their_flags() {
        let both = Flags(Flags::TOOL_MAP.0 | Flags::SESSION_TITLE.0);
        let trailer = Trailer::decode(both, BOTH).unwrap();
        let (first, second) = (
            ToolCall {
                id: b"id",
                text: b"abc",
            },
            ToolCall {
                id: b"x",
                text: b"y",
            },
        );
        assert_eq!(trailer.tool_calls, [first, second]);
        assert_eq!(trailer.title, Some(&b"hi"[..]));
        assert_eq!(trailer.rest, b"!");
    }

    #[test]
    fn bytes_without_a_flag_are_left_alone() {
        let trailer = Trailer::decode(Flags::RESPONSES_VISIBLE, BOTH).unwrap();
        assert!(trailer.tool_calls.is_empty());
        assert_eq!(trailer.rest, BOTH);
    }

    #[test]
    fn the_flag_of_a_tool_map_may_announce_nothing() {
        assert_eq!(
            Trailer::decode(Flags::TOOL_MAP, b"").unwrap(),
            Trailer::default()
        );
        assert!(Trailer::decode(Flags::SESSION_TITLE, b"").is_err());
    }

    #[test]
    fn every_truncation_is_refused() {
        let both = Flags(Flags::TOOL_MAP.0 | Flags::SESSION_TITLE.0);
        for len in 1..BOTH.len() - 1 {
            let cut = BOTH.get(..len).unwrap();
            assert!(Trailer::decode(both, cut).is_err(), "{len}");
        }
    }

    #[test]
    fn a_refusal_names_field_value_and_what_is_allowed() {
        let says = |bytes: &[u8]| {
            Trailer::decode(Flags::TOOL_MAP, bytes)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            says(b"KTM\x01\x01\0\0\0\0\0\0\0\x03\0\0\0abc"),
            "ds4 file: tool id's length: 0 is not allowed; allowed: 1 to 256"
        );
        assert_eq!(
            says(b"KTM\x01\x01\0\0\0\x09\0\0\0\x03\0\0\0abc"),
            "ds4 file: tool id: 9 bytes is not allowed; \
             allowed: at most 3, the rest of the trailer"
        );
    }
}
