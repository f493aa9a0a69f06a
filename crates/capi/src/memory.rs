//! The caller's memory: the bytes of blocks, each in one or many pieces.

use std::ffi::c_void;
use std::sync::Arc;

use kvdepot_store::{BlockBuffers, Buffer};

use crate::given::{In, Plain};
use crate::guard::Failure;

/// `kvd_buffer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Piece {
    /// Where it lies.
    pub data: *mut c_void,
    /// Bytes.
    pub len: usize,
}

/// `kvd_block`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Block {
    /// Its pieces, in their order.
    pub pieces: In<Piece>,
    /// How many.
    pub pieces_len: usize,
}

// SAFETY: pointers and numbers.
unsafe impl Plain for Piece {}

// SAFETY: pointers and numbers.
unsafe impl Plain for Block {}

impl Piece {
    /// As the crates below have it.
    pub(crate) fn buffer(&self, field: &str, is_written: bool) -> Result<Buffer, Failure> {
        let addr = self.data.addr();
        let reason = match (addr, self.len) {
            (_, 0) => Some(("0 bytes".to_owned(), "at least one byte")),
            (0, _) => Some(("NULL".to_owned(), "memory of this process")),
            (_, len) if addr.checked_add(len).is_none() => {
                let value = format!("{len} bytes at {addr:#x}");
                Some((value, "memory that ends below 2^64"))
            }
            _ => None,
        };
        if let Some((value, allowed)) = reason {
            return Err(Failure::input(field, value, allowed));
        }
        self.data.expose_provenance();
        // SAFETY: it begins above 0 and ends below 2^64, as was just looked at. The header asks the
        // caller for memory of so many bytes that nobody else writes (or, of destinations, uses)
        // until the call has returned, or its task has let go of it. Nothing here makes a reference
        // to them.
        Ok(unsafe { Buffer::from_raw(addr, self.len, is_written, Arc::new(())) })
    }
}

/// The memory of so many blocks.
pub(crate) fn buffers(
    field: &str,
    blocks: &[Block],
    is_written: bool,
) -> Result<BlockBuffers, Failure> {
    let mut all = BlockBuffers::default();
    for (at, block) in blocks.iter().enumerate() {
        if block.pieces_len == 0 {
            let field = format!("{field}[{at}].pieces_len");
            return Err(Failure::input(field, 0, "at least one piece"));
        }
        let pieces = block
            .pieces
            .slice(&format!("{field}[{at}].pieces"), block.pieces_len)?;
        let each = pieces
            .iter()
            .enumerate()
            .map(|(nth, piece)| piece.buffer(&format!("{field}[{at}].pieces[{nth}]"), is_written));
        all.push(each.collect::<Result<Vec<Buffer>, Failure>>()?);
    }
    Ok(all)
}
