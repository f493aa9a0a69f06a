//! llama.cpp's state of one sequence, cut by tokens: where the rows of a run of them lie.
//!
//! A thin layer over [`kvdepot_session::llama`]. States are the caller's memory, as
//! `llama_state_seq_get_data` writes it; what is not asked to be copied stays where it is.

use std::ffi::c_void;
use std::ops::Range;

use kvdepot_session::llama::{Error, Layout};

use crate::given::{Growing, In, Out, Plain};
use crate::guard::Failure;
use crate::handle::{Made, Ref};
use crate::memory::Piece;
use crate::save::Run;

/// `kvd_llama_about`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct About {
    /// Its size, as the caller knows it.
    pub struct_size: usize,
    /// Its tokens.
    pub tokens: usize,
    /// Bytes of the state.
    pub state_len: usize,
    /// Where the rest begins.
    pub rest: usize,
    /// Bytes of the rest.
    pub rest_len: usize,
    /// Bytes of a token's rows.
    pub token_len: usize,
    /// Pieces that the rows of any run of tokens lie in.
    pub pieces_len: usize,
    /// The sequence's number.
    pub sequence: i32,
    /// Layers with attention.
    pub layers: u32,
    /// Whether values lie transposed.
    pub transposed: u32,
    /// Zero.
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
            Err(Failure::input("run", value, "a first token below its end"))
        }
    }
}

/// The pieces of a run of tokens, all of which were held against the state.
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
    /// `kvd_llama_open`.
    fn kvd_llama_open(state: In<u8>, state_len: usize, layout: Made<Layout>) {
        let layout = layout.making("layout")?;
        layout.put(Layout::read(state.slice("state", state_len)?)?);
        Ok(())
    }

    /// `kvd_llama_resized`.
    fn kvd_llama_resized(
        of: Ref<Layout>, tokens: usize, rest_len: usize, sequence: i32, layout: Made<Layout>,
    ) {
        let layout = layout.making("layout")?;
        let resized = of.get("of")?.resized(tokens, rest_len)?;
        layout.put(resized.of_sequence(sequence));
        Ok(())
    }

    /// `kvd_llama_close`.
    fn kvd_llama_close(layout: Ref<Layout>) {
        drop(layout.end());
        Ok(())
    }

    /// `kvd_llama_look`.
    fn kvd_llama_look(layout: Ref<Layout>, told: Out<About>) {
        let told = told.sized("about")?;
        told.put(&about(layout.get("layout")?)?);
        Ok(())
    }

    /// `kvd_llama_rows`.
    fn kvd_llama_rows(
        layout: Ref<Layout>, state: *mut c_void, state_len: usize, run: Run,
        pieces: Out<Piece>, pieces_len: usize, count: Out<usize>,
    ) {
        let count = count.wanted("count")?;
        let layout = layout.get("layout")?;
        if state.is_null() {
            return Err(Failure::input("state", "NULL", "a pointer that is not"));
        }
        layout.check(state_len, &range(run)?, layout.piece_bytes(range(run)?)?)?;
        let all = rows(layout, state, run)?;
        pieces.fill("pieces", pieces_len, &all)?;
        if let Some(count) = count {
            count.put(all.len());
        }
        Ok(())
    }

    /// `kvd_llama_gather`.
    fn kvd_llama_gather(
        layout: Ref<Layout>, state: In<u8>, state_len: usize, run: Run, piece: Out<u8>,
        piece_len: usize,
    ) {
        let layout = layout.get("layout")?;
        let state = state.slice("state", state_len)?;
        Ok(layout.gather(state, range(run)?, piece.bytes("piece", piece_len)?)?)
    }

    /// `kvd_llama_scatter`.
    fn kvd_llama_scatter(
        layout: Ref<Layout>, piece: In<u8>, piece_len: usize, run: Run, state: Out<u8>,
        state_len: usize,
    ) {
        let layout = layout.get("layout")?;
        let piece = piece.slice("piece", piece_len)?;
        Ok(layout.scatter(piece, range(run)?, state.bytes("state", state_len)?)?)
    }

    /// `kvd_llama_head`.
    fn kvd_llama_head(layout: Ref<Layout>, state: Out<u8>, state_len: usize) {
        let layout = layout.get("layout")?;
        Ok(layout.write_head(state.bytes("state", state_len)?)?)
    }
}
