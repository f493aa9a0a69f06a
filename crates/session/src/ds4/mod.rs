//! ds4's session files (`.kv`), read and written byte for byte, so that its users can move in and
//! out. All numbers are little-endian.
//!
//! | at | bytes | what |
//! | --- | --- | --- |
//! | 0 | 3 | `KVC` |
//! | 3 | 1 | version, 1 |
//! | 4 | 1 | bits of the routed experts' weights: 2 or 4, other models write others |
//! | 5 | 1 | why it was saved: [`Reason`] |
//! | 6 | 1 | extensions: [`Flags`] |
//! | 7 | 1 | model, 0 for Flash and in old files |
//! | 8 | 4 | tokens |
//! | 12 | 4 | hits |
//! | 16 | 4 | context size, tokens |
//! | 20 | 1 | revision of what the payload means, 0 in old files |
//! | 21 | 3 | reserved |
//! | 24 | 8 | created, Unix seconds |
//! | 32 | 8 | last used, Unix seconds |
//! | 40 | 8 | bytes of the payload |
//! | 48 | 4 | bytes of the text |
//! | 52 | n | rendered text |
//! | 52 + n | p | payload: [`Layout`]; none in a session that ds4's agent has stripped |
//! | 52 + n + p | to the end | trailer: [`Trailer`] |
//!
//! The name of a file is the SHA-1 of its text ([`name_of`]); ds4's agent names its own sessions by
//! title and creation time ([`titled_name_of`]). Nothing in the format is checksummed: a flipped
//! bit of the payload reads like any other.
//!
//! **Guarantees.** What [`parse`] accepts, [`write()`] reproduces to the last byte, unknown flags,
//! reserved bytes and trailers included. No bytes make anything here panic. Memory does not grow
//! with the payload: it is only ever positions and a stream. Lengths are held against the file's.
//!
//! **Where this is from.** Facts read in the public repository antirez/ds4: header, name and
//! trailer in `ds4_kvstore.[ch]`, `ds4_server.c` and `ds4_agent.c`; the payload in the README and
//! in `ds4.c`. The lengths agree with measured files, 13.8 KB a token and 23 MiB. Version 2 of
//! the file has been proposed twice, compressed and checksummed, and is refused. Payloads of models
//! other than DeepSeek V4, and payload versions from 3 up, pass through as opaque bytes.
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
