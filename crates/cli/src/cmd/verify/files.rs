//! `kvdepot verify` of blocks in files of their own.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use kvdepot_media::CopierConfig;
use kvdepot_store::Keyring;
use kvdepot_store::inspect::{Judged, Keys, block_files, is_block_file, judge_file};
use serde::Serialize;

use super::interrupted;
use crate::args::Verify;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::output::{Output, Progress, bytes, count, some, span};

/// A file that is no block, or does not verify.
#[derive(Serialize)]
struct Bad {
    path: PathBuf,
    /// What its header says, where it is one.
    #[serde(flatten)]
    block: Option<Block>,
    fault: String,
    /// Offset in the payload and length of leaves that are not what was written.
    rotten: Vec<(u64, u64)>,
}

#[derive(Serialize)]
struct Block {
    namespace: String,
    key: String,
    length: u64,
    parts: u16,
    created: u64,
    checksum: String,
}

/// The last line.
#[derive(Serialize)]
struct Totals {
    /// Files that have names of blocks.
    blocks: u64,
    checked: u64,
    sound: u64,
    bad: u64,
    /// Blocks that were removed meanwhile.
    changed: u64,
    bytes: u64,
    /// False when it was interrupted.
    complete: bool,
    seconds: f64,
}

/// The blocks' files that a path names, one or a directory of them, and whether their names say
/// whose they are; `None` where it is something else.
pub(super) fn of(path: &Path) -> Result<Option<(Vec<PathBuf>, bool)>, Error> {
    if is_block_file(path) {
        return Ok(Some((vec![path.into()], false)));
    }
    Ok(block_files(path)?.map(|files| (files, true)))
}

pub(super) fn run(
    (files, named): (&[PathBuf], bool),
    args: &Verify,
    output: &mut Output,
) -> Result<i32, Error> {
    let keyring = args
        .mac_key_file
        .as_deref()
        .map(Keyring::read)
        .transpose()?;
    let candidates = keyring.map(|keyring| move |id| keyring.candidates(id));
    let keys = candidates.as_ref().map(|of| of as Keys<'_>);
    let interrupt = Interrupt::catch()?;
    let started = Instant::now();
    let threads = args
        .threads
        .unwrap_or_else(|| CopierConfig::default().lanes);
    let (next, read) = (AtomicUsize::new(0), AtomicU64::new(0));
    let (sound, changed) = (AtomicU64::new(0), AtomicU64::new(0));
    let bad = Mutex::new(Vec::new());
    let progress = Progress::steps("verifying", files.len() as u64);
    let work = || {
        while let Some((index, path)) = {
            let index = next.fetch_add(1, Relaxed);
            files.get(index).map(|path| (index, path))
        } && !interrupt.came()
        {
            let one = judge_file(path, named, keys);
            if let Some(header) = one.as_ref().and_then(|one| one.header) {
                read.fetch_add(header.len, Relaxed);
            }
            match one {
                None => drop(changed.fetch_add(1, Relaxed)),
                Some(Judged { fault: None, .. }) => drop(sound.fetch_add(1, Relaxed)),
                Some(judged) => {
                    let kept = bad.lock();
                    let mut kept = kept.unwrap_or_else(|poisoned| poisoned.into_inner());
                    kept.push((index, judged));
                }
            }
            progress.step("");
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.min(files.len()) {
            scope.spawn(work);
        }
    });
    drop(progress);
    let bad = bad.into_inner();
    let mut bad = bad.unwrap_or_else(|poisoned| poisoned.into_inner());
    bad.sort_unstable_by_key(|(index, _)| *index);
    let (sound, changed) = (sound.into_inner(), changed.into_inner());
    let checked = sound + changed + bad.len() as u64;
    let mut totals = Totals {
        blocks: files.len() as u64,
        checked,
        sound,
        bad: bad.len() as u64,
        changed,
        bytes: read.into_inner(),
        complete: checked == files.len() as u64,
        seconds: 0.0,
    };
    for (index, judged) in bad {
        tell(&files[index], judged, output)?;
    }
    totals.seconds = started.elapsed().as_secs_f64();
    match output.is_json() {
        true => output.object(&totals)?,
        false => {
            let mut line = format!(
                "{} checked, {} in {}: {} sound, {} bad",
                some(totals.checked, "file"),
                bytes(totals.bytes),
                span(started.elapsed()),
                count(totals.sound),
                count(totals.bad),
            );
            if totals.changed > 0 {
                line += &format!(", {} removed during the check", count(totals.changed));
            }
            output.line(&line)?;
        }
    }
    if !totals.complete {
        return interrupted(totals.checked, totals.blocks, output);
    }
    Ok(match totals.bad {
        0 => crate::status::OK,
        _ => crate::status::PROBLEMS,
    })
}

fn tell(path: &Path, judged: Judged, output: &mut Output) -> Result<(), Error> {
    let fault = judged.fault.unwrap_or_default();
    if !output.is_json() {
        return output.line(&format!("bad block {}: {fault}", path.display()));
    }
    let block = judged.header.map(|header| Block {
        namespace: header.identity.namespace.to_string(),
        key: header.identity.key.to_string(),
        length: header.len,
        parts: header.parts,
        created: header.created,
        checksum: header.checksum.to_string(),
    });
    output.object(&Bad {
        path: path.into(),
        block,
        fault,
        rotten: judged.rotten,
    })
}
