//! The state of one sequence of llama.cpp, split by tokens into the rows of runs.
//!
//! This module is a thin layer over [`kvdepot_session::llama`]. States are memory of the caller, as
//! `llama_state_seq_get_data` writes it; only the gather and scatter functions copy rows.

use std::ffi::c_void;
use std::ops::Range;

use kvdepot_session::llama::{Error, Layout};

use crate::given::{Growing, In, Out, Plain};
use crate::guard::Failure;
use crate::handle::{Made, Ref};
use crate::memory::Piece;
use crate::save::Run;

/// Description of a layout, `kvd_llama_about`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct About {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Size of the state in bytes.
    pub state_len: usize,
    /// Offset of the rest in bytes.
    pub rest: usize,
    /// Size of the rest in bytes.
    pub rest_len: usize,
    /// Size of the rows of one token in bytes.
    pub token_len: usize,
    /// Number of buffers that the rows of any run of tokens consist of.
    pub pieces_len: usize,
    /// Sequence ID.
    pub sequence: i32,
    /// Number of layers with attention.
    pub layers: u32,
    /// 1 if values are transposed.
    pub transposed: u32,
    /// Reserved; 0.
    pub reserved: u32,
}

// SAFETY: numbers.
unsafe impl Plain for About {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for About {
    const FIRST: usize = 72;
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::new(crate::guard::Status::Input, error.to_string())
    }
}

fn range(run: Run) -> Result<Range<usize>, Failure> {
    match run.first < run.end {
        true => Ok(run.first..run.end),
        false => {
            let value = format!("{} to {}", run.first, run.end);
            Err(Failure::input(
                "run",
                value,
                "a run whose first token is below its end",
            ))
        }
    }
}

/// Returns the buffers of a run of tokens; the caller has checked them against the state's size.
fn rows(layout: &Layout, state: *mut c_void, run: Run) -> Result<Vec<Piece>, Failure> {
    let each = layout.runs(range(run)?)?;
    Ok(each
        .map(|one| Piece {
            data: state.wrapping_byte_add(one.state),
            len: one.len,
        })
        .collect())
}

fn about(layout: &Layout) -> Result<About, Failure> {
    let rest = layout.rest();
    Ok(About {
        struct_size: 0,
        tokens: layout.tokens(),
        state_len: layout.state_bytes(),
        rest: rest.start,
        rest_len: rest.len(),
        token_len: layout.shape().token_bytes(),
        pieces_len: layout.runs(0..1)?.count(),
        sequence: layout.sequence(),
        layers: layout.shape().layers() as u32,
        transposed: layout.shape().transposed().into(),
        reserved: 0,
    })
}

exported! {
    /// Implements `kvd_llama_open`.
    fn kvd_llama_open(state: In<u8>, state_len: usize, layout: Made<Layout>) {
        let layout = layout.making("layout")?;
        layout.put(Layout::read(state.slice("state", state_len)?)?);
        Ok(())
    }

    /// Implements `kvd_llama_resized`.
    fn kvd_llama_resized(
        of: Ref<Layout>, tokens: usize, rest_len: usize, sequence: i32, layout: Made<Layout>,
    ) {
        let layout = layout.making("layout")?;
        let resized = of.get("of")?.resized(tokens, rest_len)?;
        layout.put(resized.of_sequence(sequence));
        Ok(())
    }

    /// Implements `kvd_llama_close`.
    fn kvd_llama_close(layout: Ref<Layout>) {
        drop(layout.end());
        Ok(())
    }

    /// Implements `kvd_llama_info`.
    fn kvd_llama_info(layout: Ref<Layout>, told: Out<About>) {
        let told = told.sized("about")?;
        told.put(&about(layout.get("layout")?)?);
        Ok(())
    }

    /// Implements `kvd_llama_rows`.
    fn kvd_llama_rows(
        layout: Ref<Layout>, state: *mut c_void, state_len: usize, run: Run,
        pieces: Out<Piece>, pieces_len: usize, count: Out<usize>,
    ) {
        let count = count.wanted("count")?;
        let layout = layout.get("layout")?;
        if state.is_null() {
            return Err(Failure::input("state", "NULL", "a pointer that is not NULL"));
        }
        layout.check(state_len, &range(run)?, layout.piece_bytes(range(run)?)?)?;
        let all = rows(layout, state, run)?;
        pieces.fill("pieces", pieces_len, &all)?;
        if let Some(count) = count {
            count.put(all.len());
        }
        Ok(())
    }

    /// Implements `kvd_llama_gather`.
    fn kvd_llama_gather(
        layout: Ref<Layout>, state: In<u8>, state_len: usize, run: Run, piece: Out<u8>,
        piece_len: usize,
    ) {
        let layout = layout.get("layout")?;
        let state = state.slice("state", state_len)?;
        Ok(layout.gather(state, range(run)?, piece.bytes("piece", piece_len)?)?)
    }

    /// Implements `kvd_llama_scatter`.
    fn kvd_llama_scatter(
        layout: Ref<Layout>, piece: In<u8>, piece_len: usize, run: Run, state: Out<u8>,
        state_len: usize,
    ) {
        let layout = layout.get("layout")?;
        let piece = piece.slice("piece", piece_len)?;
        Ok(layout.scatter(piece, range(run)?, state.bytes("state", state_len)?)?)
    }

    /// Implements `kvd_llama_head`.
    fn kvd_llama_head(layout: Ref<Layout>, state: Out<u8>, state_len: usize) {
        let layout = layout.get("layout")?;
        Ok(layout.write_head(state.bytes("state", state_len)?)?)
    }
}
