//! One block's way into a caller's memory.

use kvdepot_arena::{Error, Place, parts};

use crate::buffers::BlockBuffers;
use crate::task::Outcome;
use crate::tier::Ends;

/// Adds the copies of one block into the caller's memory to `batch`.
///
/// `place` is the pinned block, `index` its key in `buffers`, and `tag` the number of its copies in
/// the batch. `source` is scratch memory that calls for further blocks reuse.
///
/// Returns [`Outcome::Done`] if the copies decide about the outcome. Otherwise returns the outcome
/// of the key, such as [`Outcome::Length`].
///
/// # Errors
///
/// Those of `ends` and of the batch, such as [`Error::Media`].
pub fn plan(
    batch: &mut kvdepot_media::Batch,
    (ends, source): (&dyn Ends, &mut Vec<kvdepot_media::Buffer>),
    place: &Place,
    buffers: &BlockBuffers,
    index: usize,
    tag: u32,
) -> Result<Outcome, Error> {
    let identity = &place.identity;
    let proof = ends.proof(place);
    if proof.as_ref().is_some_and(|proof| !proof.is_of(place)) {
        return Ok(Outcome::Corrupt);
    }
    let authenticate = |batch: &mut kvdepot_media::Batch, index, number: usize| {
        if let Some(proof) = &proof {
            batch.authenticate(index, &proof.key, proof.macs.get(number).copied());
        }
    };
    if place.parts == 1 {
        if place.len != buffers.bytes(index) {
            return Ok(Outcome::Length);
        }
        ends.buffers(place, 0, place.len, source)?;
        let id = parts::part_id(identity, 0, 1);
        let (pieces, sum) = (buffers.pieces(index), Some(place.checksum));
        let part = batch.part(&id, source, pieces, sum, tag)?;
        authenticate(batch, part, 0);
        return Ok(Outcome::Done);
    }
    let Some(found) = ends.parts(place)? else {
        return Ok(Outcome::Corrupt);
    };
    if parts::bytes(&found) != buffers.bytes(index) {
        return Ok(Outcome::Length);
    }
    let mut pieces = buffers.pieces(index).to_vec();
    for (number, part) in found.iter().enumerate() {
        ends.buffers(place, part.offset, part.len, source)?;
        let rest = split(&mut pieces, part.len as usize)?;
        let id = parts::part_id(identity, number as u32, place.parts);
        let index = batch.part(&id, source, &pieces, Some(part.checksum), tag)?;
        authenticate(batch, index, number);
        pieces = rest;
    }
    Ok(Outcome::Done)
}

/// Cuts the first `len` bytes off a list of buffers: they stay, the rest is returned.
fn split(
    pieces: &mut Vec<kvdepot_media::Buffer>,
    len: usize,
) -> Result<Vec<kvdepot_media::Buffer>, Error> {
    let mut left = len;
    let Some(at) = pieces.iter().position(|piece| {
        let here = left < piece.len();
        if !here {
            left -= piece.len();
        }
        here
    }) else {
        return Ok(Vec::new());
    };
    let mut rest = pieces.split_off(at);
    if left > 0 {
        pieces.push(rest[0].slice(0, left)?);
        rest[0] = rest[0].slice(left, rest[0].len() - left)?;
    }
    Ok(rest)
}
