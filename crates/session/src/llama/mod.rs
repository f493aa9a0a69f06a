//! State of one sequence of llama.cpp, as `llama_state_seq_get_data` writes it, cut by tokens.
//!
//! All numbers are little-endian; n is the number of tokens, L the number of layers.
//!
//! | bytes | content |
//! | --- | --- |
//! | 4 | `0xaf143cd8` |
//! | 4 | number of the sequence, `i32` |
//! | | the attention: |
//! | 4 | number of streams, 1 |
//! | 4 | n |
//! | 12 n | per token: its position, the number of its sequences (1), and the sequence |
//! | 4 | 1 if values are transposed, else 0 |
//! | 4 | L |
//! | L × | keys of a layer: element type, `i32`; bytes per row, `u64`; n rows |
//! | L × | values of a layer: like the keys, or transposed as below |
//! | to the end | the rest |
//!
//! Transposed values of a layer have an element type, the bytes per element, `u32`, and the
//! elements per row, `u32`. For each element of a row, those of all n tokens follow. Values are
//! transposed if flash attention is off.
//!
//! Layers follow each other, so that the state of a shorter sequence is not a prefix of a longer
//! one's. The rows of each token are at known offsets:
//!
//! * [`Layout::gather`] copies the rows of a run of tokens into one *piece*.
//! * [`Layout::scatter`] copies a piece back.
//! * [`Layout::write_head`] writes all bytes that are neither rows nor rest.
//!
//! A piece contains, in the order of the state, the rows of its tokens in each table, and no other
//! bytes. It depends on neither the length of the sequence nor its number.
//!
//! Latent attention (MLA) has no values. The rest is the part that does not grow by appending, for
//! example the window of sliding-window layers or the state of recurrent layers. It is one object
//! of a checkpoint, and empty for models without such layers. It equals the output of
//! `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` without its first eight bytes.
//!
//! An exception are models with an index in addition to their attention, such as DeepSeek 3.2.
//! Their index is a second attention after the first one, and grows; the rest contains the whole
//! index.
//!
//! # Unsupported states
//! * Positions other than 0 to n - 1 in this order, several streams, and cells with more than one
//!   position (M-RoPE) are rejected.
//! * Truncated states are rejected. No input causes a panic in this module.
//! * A purely recurrent model has no attention, so that its state cannot be cut.
//!
//! # Source of the format
//! The format is that of llama.cpp in llama-cpp-python 0.3.36: `llama-kv-cache.cpp`,
//! `llama-kv-cache-iswa.cpp`, `llama-memory-hybrid.cpp`, `llama-memory-recurrent.cpp`. It has no
//! checksums, so that a flipped bit stays undetected.
//!
//! # Examples
//! ```
//! use kvdepot_session::llama::Layout;
//!
//! // A state of two tokens and one layer, with rows of four bytes.
//! let numbers = [0xaf14_3cd8_u32, 0, 1, 2, 0, 1, 0, 1, 1, 0, 0, 1];
//! let mut state: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
//! for rows in [[1, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4, 4]] {
//!     state.extend(0_i32.to_le_bytes());
//!     state.extend(4_u64.to_le_bytes());
//!     state.extend(rows);
//! }
//! let layout = Layout::read(&state)?;
//! let mut piece = vec![0; layout.piece_bytes(1..2)?];
//! layout.gather(&state, 1..2, &mut piece)?;
//! assert_eq!(piece, [2, 2, 2, 2, 4, 4, 4, 4]);
//! # Ok::<_, kvdepot_session::llama::Error>(())
//! ```
#![deny(clippy::indexing_slicing)]

mod error;
mod layout;
mod reader;
mod rest;
mod rows;
mod shape;

pub use error::Error;
pub use layout::Layout;
pub use rows::{Run, Runs};
pub use shape::{Shape, Table};
