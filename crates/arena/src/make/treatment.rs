//! What becomes of a medium that is there: it is opened, or an arena is made of it.
//!
//! A device of silicon or a file that `truncate` made holds zeros only: where no arena could have
//! left anything, nobody has to say that it may be formatted; on a block device, where nobody else
//! could have, either. Whatever else lies there is lost only
//! to somebody who says so, and an arena that could be opened only to somebody who insists: the
//! option that made it often stays in a configuration.

use std::path::Path;

use crate::device;
use crate::error::Error;
use crate::format::GRANULE;
use crate::format::layout::{self, Layout};
use crate::format::superblock::{self, Refusal, Superblock};
use crate::head::read_page;
use crate::medium::Medium;
use crate::options::{Format, Options};

/// Bytes that are looked at in one go.
const CHUNK: usize = 1 << 20;

/// What is done with a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// It is opened as it is, or refused.
    Open,
    /// It is formatted, and is known to hold zeros where an arena is not zero.
    Blank,
    /// It is formatted, and what lies there is lost.
    Lost,
}

/// What is done with a medium that was there before.
pub(crate) fn treatment(
    path: &Path,
    medium: &dyn Medium,
    config: &Options,
    field: &impl Fn(&str) -> String,
) -> Result<Treatment, Error> {
    let used = |allowed| Error::config(field("path"), path.display(), allowed);
    device::check(medium, &used)?;
    if is_new(medium, config)? && device::found(medium)?.is_none() {
        return Ok(Treatment::Blank);
    }
    match config.format {
        Format::Never => Ok(Treatment::Open),
        Format::Once if is_sound(medium)? => Err(Error::config(
            field("format"),
            "true",
            format!(
                "false, because {} holds a valid arena: omit the option to open the arena, or set \
                 format: force to replace it (its content is lost)",
                path.display()
            ),
        )),
        Format::Once | Format::Always => Ok(Treatment::Lost),
    }
}

/// Whether everything is zero that an arena of whatever size would not have left so: superblocks,
/// owner page, directory and record table.
fn is_new(medium: &dyn Medium, config: &Options) -> Result<bool, Error> {
    if medium.len() < layout::CAPACITY_MIN {
        return Ok(false);
    }
    let capacity = config.capacity.unwrap_or(medium.len()).min(medium.len());
    let capacity = capacity / GRANULE * GRANULE;
    let end = |records: u64| Layout::new(capacity, records).map_or(0, |layout| layout.data);
    // The table that is asked for, and the one that another configuration may have made.
    let usual = end(Layout::default_records(capacity));
    let end = usual.max(config.records.map_or(0, end));
    let zeros = vec![0; CHUNK];
    let mut bytes = vec![0; CHUNK];
    let mut at = 0;
    while at < end {
        let len = (end - at).min(CHUNK as u64) as usize;
        medium.read_at(at, &mut bytes[..len])?;
        if bytes[..len] != zeros[..len] {
            return Ok(false);
        }
        at += len as u64;
    }
    Ok(end > 0)
}

/// Whether an arena is there that this release opens, or that another one would.
fn is_sound(medium: &dyn Medium) -> Result<bool, Error> {
    if medium.len() < layout::CAPACITY_MIN {
        return Ok(false);
    }
    for offset in [0, layout::SUPERBLOCK_B] {
        match Superblock::decode(&read_page(medium, offset)?) {
            Ok(superblock) if superblock.data < medium.len() => return Ok(true),
            Err(Refusal::Version(version)) if version > superblock::VERSION => return Ok(true),
            _ => {}
        }
    }
    Ok(false)
}
