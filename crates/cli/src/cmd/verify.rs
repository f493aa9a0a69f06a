//! `kvdepot verify`: reads every payload and names what does not verify.

mod files;

use std::time::Instant;

use kvdepot_media::{Copier, CopierConfig};
use kvdepot_store::inspect::{Listed, Verified};
use serde::Serialize;

use super::Block;
use super::stat::dead_superblock;
use crate::args::Verify;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, Progress, bytes, count, note, some, span};

/// A bad block, and what is wrong with it.
#[derive(Serialize)]
struct Bad {
    #[serde(flatten)]
    block: Block,
    fault: &'static str,
}

/// The last line.
#[derive(Serialize)]
struct Totals {
    /// Live blocks of the arena.
    blocks: u64,
    /// Those whose payload was read.
    checked: u64,
    sound: u64,
    bad: u64,
    /// Blocks that a running owner evicted or replaced meanwhile.
    changed: u64,
    bytes: u64,
    /// Slots that hold bytes that are no record.
    damaged_records: Vec<u32>,
    /// Offsets of superblocks that do not verify, beside the one in force.
    damaged_superblocks: Vec<u64>,
    /// Bytes that the arena has lost at its end: blocks there are bad.
    truncated_bytes: u64,
    /// False when it was interrupted.
    complete: bool,
    seconds: f64,
}

const FAULT: &str = "the payload does not match its checksum";

pub(crate) fn run(args: &Verify, output: &mut Output) -> Result<i32, Error> {
    if let Some((files, named)) = args.arena.path.as_deref().map_or(Ok(None), files::of)? {
        return files::run((&files, named), args, output);
    }
    if let Some(path) = &args.mac_key_file {
        let allowed = "this option only for a directory of the tier Posix or the file of a block \
                       (arenas have no MACs)";
        return Err(kvdepot_store::Error::config("mac_key_file", path.display(), allowed).into());
    }
    let interrupt = Interrupt::catch()?;
    let inspection = args.arena.inspect()?;
    let mut config = CopierConfig::default();
    if let Some(threads) = args.threads {
        config.lanes = threads;
    }
    let copier = Copier::new(config)?;
    let started = Instant::now();
    let progress = Progress::bytes("verifying");
    let mut read = 0;
    let verified = inspection.verify(&copier, |at, of| {
        read = at;
        progress.set(at, of);
        !interrupt.came()
    })?;
    drop(progress);
    let checked = verified.sound + verified.bad.len() as u64 + verified.changed;
    let totals = Totals {
        blocks: verified.blocks,
        checked,
        sound: verified.sound,
        bad: verified.bad.len() as u64,
        changed: verified.changed,
        bytes: read,
        damaged_records: verified.damaged_records.clone(),
        damaged_superblocks: inspection.damaged_superblocks()?,
        truncated_bytes: inspection
            .superblock()
            .capacity
            .saturating_sub(inspection.medium_bytes()),
        complete: checked == verified.blocks,
        seconds: started.elapsed().as_secs_f64(),
    };
    if output.is_json() {
        for listed in &verified.bad {
            let block = Block::from(listed);
            output.object(&Bad {
                block,
                fault: FAULT,
            })?;
        }
        output.object(&totals)?;
    } else {
        print(&verified, &totals, started, output)?;
    }
    if !totals.complete {
        return interrupted(checked, totals.blocks, output);
    }
    if totals.bad > 0 && !output.is_json() {
        output.flush()?;
        let path = inspection.path().display();
        note(&format!(
            "hint: bad blocks are misses; kvdepot rm {path} --namespace DIGEST --key KEY removes \
             one from the index"
        ));
    }
    let fine = totals.bad == 0
        && totals.truncated_bytes == 0
        && totals.damaged_records.is_empty()
        && totals.damaged_superblocks.is_empty();
    Ok(if fine {
        crate::status::OK
    } else {
        crate::status::PROBLEMS
    })
}

/// Not all was checked.
fn interrupted(checked: u64, blocks: u64, output: &mut Output) -> Result<i32, Error> {
    output.flush()?;
    let (checked, blocks) = (count(checked), some(blocks, "block"));
    note(&format!("interrupted: {checked} of {blocks} checked"));
    Ok(crate::status::FAILED)
}

fn print(
    verified: &Verified,
    totals: &Totals,
    started: Instant,
    output: &mut Output,
) -> Result<(), Error> {
    for Listed { slot, record, .. } in &verified.bad {
        let extents: Vec<String> = record
            .extents
            .iter()
            .map(|(offset, len)| format!("{offset}+{len}"))
            .collect();
        output.line(&format!(
            "bad block {} of namespace {}: slot {slot}, {} bytes at {}: {FAULT}",
            record.identity.key,
            record.identity.namespace,
            record.len,
            extents.join(" "),
        ))?;
    }
    for slot in &totals.damaged_records {
        output.line(&format!(
            "damaged record: slot {slot} (torn by a crash, or corrupt; it counts as empty, and the \
             next owner clears it)"
        ))?;
    }
    for at in &totals.damaged_superblocks {
        output.line(&format!("damaged superblock: {}", dead_superblock(*at)))?;
    }
    if totals.truncated_bytes > 0 {
        let lost = bytes(totals.truncated_bytes);
        output.line(&format!(
            "truncated: {lost} are missing at the end, with the blocks stored there"
        ))?;
    }
    let mut line = format!(
        "{} checked, {} in {}: {} sound, {} bad, {}",
        some(totals.checked, "block"),
        bytes(totals.bytes),
        span(started.elapsed()),
        count(totals.sound),
        count(totals.bad),
        some(totals.damaged_records.len() as u64, "damaged record"),
    );
    if totals.changed > 0 {
        line += &format!(", {} changed during the check", count(totals.changed));
    }
    output.line(&line)
}
