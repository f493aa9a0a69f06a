//! Session files of ds4 (`.kv`), read and written byte for byte, so that users can move sessions
//! between ds4 and kvdepot.
//!
//! All numbers are little-endian.
//!
//! | offset | bytes | content |
//! | --- | --- | --- |
//! | 0 | 3 | `KVC` |
//! | 3 | 1 | version, 1 |
//! | 4 | 1 | bits of the routed experts' weights: 2 or 4; other models write other values |
//! | 5 | 1 | cause of the save: [`Reason`] |
//! | 6 | 1 | extensions: [`Flags`] |
//! | 7 | 1 | model, 0 for Flash and in old files |
//! | 8 | 4 | number of tokens |
//! | 12 | 4 | hits |
//! | 16 | 4 | context size, in tokens |
//! | 20 | 1 | revision of the payload's meaning, 0 in old files |
//! | 21 | 3 | reserved |
//! | 24 | 8 | time of creation, Unix seconds |
//! | 32 | 8 | time of the last use, Unix seconds |
//! | 40 | 8 | length of the payload, in bytes |
//! | 48 | 4 | length of the text, in bytes |
//! | 52 | n | rendered text |
//! | 52 + n | p | payload: [`Layout`]; absent in a session that ds4's agent has stripped |
//! | 52 + n + p | to the end | trailer: [`Trailer`] |
//!
//! The name of a file is the SHA-1 of its text ([`name_of`]). ds4's agent names its own sessions by
//! title and creation time ([`titled_name_of`]). The format has no checksums, so that a flipped bit
//! in the payload stays undetected.
//!
//! # Guarantees
//! * A file that [`parse`] accepts is reproduced by [`write()`] to the last byte, including unknown
//!   flags, reserved bytes and trailers.
//! * No input causes a panic in this module.
//! * Memory does not grow with the payload, which is read as a stream. Lengths are checked against
//!   the length of the file.
//!
//! # Source of the format
//! The format follows the public repository antirez/ds4: head, name and trailer in
//! `ds4_kvstore.[ch]`, `ds4_server.c` and `ds4_agent.c`, the payload in the README and in `ds4.c`.
//! The lengths agree with measured files: 13.8 KB per token and 23 MiB.
//!
//! Version 2 of the file, compressed and with checksums, was proposed twice, and is rejected.
//! Payloads of models other than DeepSeek V4, and payload versions from 3 on, pass through as
//! opaque bytes.
//!
//! # Examples
//! ```
//! use std::io::Cursor;
//!
//! use kvdepot_session::ds4::{Flags, Head, Reason, parse, write};
//!
//! let head = Head {
//!     quant_bits: 2,
//!     reason: Reason::COLD,
//!     flags: Flags(0),
//!     model: 0,
//!     tokens: 3,
//!     hits: 0,
//!     context: 4096,
//!     revision: 0,
//!     reserved: [0; 3],
//!     created: 1_700_000_000,
//!     last_used: 1_700_000_000,
//!     payload_len: 4,
//! };
//! let mut file = Vec::new();
//! write(&mut file, &head, b"some text", &b"data"[..], &b""[..])?;
//! let mut reader = Cursor::new(file);
//! let parts = parse(&mut reader)?;
//! assert_eq!((parts.head, parts.payload.clone()), (head, 61..65));
//! assert_eq!(parts.read_text(&mut reader)?, b"some text");
//! # Ok::<_, kvdepot_session::ds4::Error>(())
//! ```
#![deny(clippy::indexing_slicing)]

mod error;
mod file;
mod head;
mod layout;
mod name;
mod part;
mod shape;
mod trailer;

pub use error::Error;
pub use file::{Parts, Section, TEXT_AT, parse, write};
pub use head::{Flags, HEAD_LEN, Head, MAGIC, Reason, VERSION};
pub use layout::Layout;
pub use name::{is_name, name_of, titled_name_of};
pub use part::{Kind, Part, Row};
pub use shape::{LAYERS_MAX, PAYLOAD_MAGIC, PAYLOAD_VERSIONS, SHAPE_LEN, Shape};
pub use trailer::{ToolCall, Trailer};
