//! llama.cpp's state of one sequence, as `llama_state_seq_get_data` writes it, cut by tokens. All
//! numbers are little-endian; n tokens, L layers.
//!
//! | bytes | what |
//! | --- | --- |
//! | 4 | `0xaf143cd8` |
//! | 4 | the sequence, `i32` |
//! | | the attention: |
//! | 4 | streams, 1 |
//! | 4 | n |
//! | 12 n | a token each: its position, the number of its sequences, 1, and the sequence |
//! | 4 | whether values are transposed |
//! | 4 | L |
//! | L × | keys of a layer: element type, `i32`, bytes of a row, `u64`, and n rows |
//! | L × | values of a layer the same; or transposed: element type, bytes of an element, `u32`,
//! elements of a row, `u32`, and for each element of a row those of n tokens |
//! | to the end | the rest |
//!
//! Layer lies behind layer, so the state of a shorter sequence is no beginning of a longer one's.
//! But each token's rows lie at known places: [`Layout::gather`] takes those of a run of tokens out
//! into one *piece*, [`Layout::scatter`] puts a piece back, and [`Layout::write_head`] writes all
//! that is neither rows nor rest. A piece has, in the state's order, what each table of rows has of
//! its tokens, and nothing else: it depends on neither the length of the sequence nor its number.
//!
//! Values are transposed where flash attention is off. Latent attention (MLA) has no values. The
//! rest is what does not grow by appending: the window of models with sliding-window layers, the
//! state of recurrent layers, and is one object of a checkpoint; without such layers it is empty.
//! It is what `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` writes behind its eight first bytes, but for
//! models with an index beside their attention (DeepSeek 3.2 and its like), whose index is a
//! second attention behind the first, and grows: it is in the rest whole. A model that is recurrent
//! alone has no attention, and its state nothing to cut.
//!
//! **Refused**: positions other than 0 to n - 1 in this order, several streams, cells with more
//! than a position (M-RoPE), and what is torn. No bytes make anything here panic.
//!
//! **Where this is from.** llama.cpp as llama-cpp-python 0.3.36 has it: `llama-kv-cache.cpp`,
//! `llama-kv-cache-iswa.cpp`, `llama-memory-hybrid.cpp`, `llama-memory-recurrent.cpp`. It has no
//! checksum: a flipped bit reads like any other.
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
