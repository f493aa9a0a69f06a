//! Movers: copies of the bytes of pins and reservations, by their placements.

use std::path::Path;

use kvdepot_service::{MoveJob, Mover};
use kvdepot_store::Checksum;

use crate::given::{In, Out, Plain, Text, flag, span};
use crate::guard::{Failure, Status};
use crate::handle::{Made, Ref};
use crate::memory::{Block, Lent, buffers};
use crate::task::Became;

/// A placement, `kvd_placement`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Placed {
    /// Bytes of the placement.
    pub bytes: In<u8>,
    /// Number of bytes.
    pub len: usize,
}

// SAFETY: a pointer and a number.
unsafe impl Plain for Placed {}

/// Most copy threads of a mover, as in the configuration; it detects wrong units.
const LANES_MAX: u64 = 256;

fn placements(given: &[Placed]) -> Result<Vec<Vec<u8>>, Failure> {
    let each = given.iter().enumerate().map(|(at, one)| {
        let bytes = one
            .bytes
            .slice(&format!("placements[{at}].bytes"), one.len)?;
        Ok(bytes.to_vec())
    });
    each.collect()
}

/// Returns the checksum and the outcome of each placement.
fn outcomes(job: &MoveJob, is_over: bool) -> (Vec<[u8; 16]>, Vec<u8>) {
    let moved = job.checksums();
    let each = moved.iter().zip(job.corrupt()).map(|(sum, rotten)| {
        let became = match (sum, rotten) {
            (Some(_), _) => Became::Done,
            (None, true) => Became::Corrupt,
            (None, false) if is_over => Became::Other,
            (None, false) => Became::Pending,
        };
        became as u8
    });
    let became = each.collect();
    let sum = |sum: Option<Checksum>| sum.map_or([0; 16], |sum| sum.0);
    (moved.into_iter().map(sum).collect(), became)
}

exported! {
    /// Implements `kvd_mover_open`.
    fn kvd_mover_open(socket: Text, lanes: u64, writes: u32, mover: Made<Mover>) {
        let mover = mover.making("mover")?;
        let writes = flag("writes", writes)?;
        let socket = socket.read("socket")?;
        let socket = Path::new(socket.strip_prefix("unix:").unwrap_or(socket));
        if lanes > LANES_MAX {
            let allowed = format!("1 to {LANES_MAX}, or 0 for the server's default");
            return Err(Failure::input("lanes", lanes, allowed));
        }
        let lanes = (lanes > 0).then_some(lanes as usize);
        mover.put(Mover::attach(socket, lanes, writes)?);
        Ok(())
    }

    /// Implements `kvd_mover_close`.
    fn kvd_mover_close(mover: Ref<Mover>) {
        if let Some(mover) = mover.end() {
            mover.close();
        }
        Ok(())
    }

    /// Implements `kvd_mover_store`.
    fn kvd_mover_store(
        mover: Ref<Mover>, given: In<Placed>, given_len: usize, blocks: In<Block>, part: u32,
        job: Made<MoveJob>,
    ) {
        let job = job.making("job")?;
        let mover = mover.get("mover")?;
        let placements = placements(given.slice("placements", given_len)?)?;
        let lent = Lent::new();
        let blocks = buffers(&lent, "blocks", blocks.slice("blocks", given_len)?, false)?;
        job.put(mover.store(&placements, &blocks, part)?);
        Ok(())
    }

    /// Implements `kvd_mover_load`.
    fn kvd_mover_load(
        mover: Ref<Mover>, given: In<Placed>, given_len: usize, blocks: In<Block>, part: u32,
        job: Made<MoveJob>,
    ) {
        let job = job.making("job")?;
        let mover = mover.get("mover")?;
        let placements = placements(given.slice("placements", given_len)?)?;
        let lent = Lent::new();
        let blocks = buffers(&lent, "blocks", blocks.slice("blocks", given_len)?, true)?;
        job.put(mover.load(&placements, &blocks, part)?);
        Ok(())
    }

    /// Implements `kvd_job_wait`.
    fn kvd_job_wait(
        job: Ref<MoveJob>, timeout_ms: u64, sums: Out<[u8; 16]>, became: Out<u8>, len: usize,
    ) {
        let job = job.get("job")?;
        let parts = job.checksums().len();
        if len < parts {
            return Err(Failure::input("len", len, format!("at least {parts}")));
        }
        let is_over = job.wait(span(timeout_ms));
        let (moved, outcomes) = outcomes(job, is_over);
        became.fill("outcomes", len, &outcomes)?;
        if sums.wanted("sums")?.is_some() {
            sums.fill("sums", len, &moved)?;
        }
        match is_over {
            true => Ok(()),
            false => Err(Failure::new(
                Status::Timeout,
                format!("copies are still in progress after {timeout_ms} ms"),
            )),
        }
    }

    /// Implements `kvd_job_free`. The memory is released when it returns.
    fn kvd_job_free(job: Ref<MoveJob>) {
        if let Some(job) = job.end() {
            let _over = job.wait(None);
        }
        Ok(())
    }
}
