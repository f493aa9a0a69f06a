//! What stands ahead of the record table: superblocks, owner page, namespace directory.

use std::collections::HashSet;
use std::path::Path;

use crate::device;
use crate::error::Error;
use crate::format::layout;
use crate::format::superblock::{self, Refusal, Superblock};
use crate::format::{directory, owner};
use crate::key::NamespaceId;
use crate::medium::Medium;
use crate::size;
use kvdepot_host::peer;

pub(crate) fn read_page(medium: &dyn Medium, offset: u64) -> Result<[u8; superblock::LEN], Error> {
    let mut page = [0; superblock::LEN];
    medium.read_at(offset, &mut page)?;
    Ok(page)
}

/// Returns the newer one of the two superblocks that pass verification.
///
/// # Errors
///
/// [`Error::Corrupt`] if the medium is too small or has no valid superblock, with a remedy.
/// [`Error::Media`] if it cannot be read.
pub fn read_superblock(path: &Path, medium: &dyn Medium) -> Result<Superblock, Error> {
    let corrupt = |reason: String| Error::Corrupt {
        path: path.into(),
        reason,
    };
    let len = medium.len();
    if len < layout::CAPACITY_MIN {
        let mut bytes = vec![0; len as usize];
        medium.read_at(0, &mut bytes)?;
        // Whoever keeps something here is not told to remove it.
        let is_ours = bytes.starts_with(&superblock::MAGIC) || bytes.iter().all(|byte| *byte == 0);
        return Err(corrupt(if is_ours {
            format!(
                "the medium is too small ({}): {}",
                size::show(len),
                enlarge(path)
            )
        } else {
            "the content is not a kvdepot arena; use another path".into()
        }));
    }
    // One that cannot be read is as good as a damaged one.
    let copy =
        |at| read_page(medium, at).map_or(Err(Refusal::Damaged), |page| Superblock::decode(&page));
    let [a, b] = COPIES.map(copy);
    let newest = [&a, &b]
        .into_iter()
        .flatten()
        .max_by_key(|superblock| superblock.generation);
    if let Some(superblock) = newest {
        return Ok(superblock.clone());
    }
    let hint = "set format: true to create a new arena (all content is lost)";
    Err(corrupt(match (a, b) {
        (Err(Refusal::Version(version)), _) | (_, Err(Refusal::Version(version))) => format!(
            "the arena has format version {version}, but this release reads only version {}; use \
             the release that wrote the arena, or {hint}",
            superblock::VERSION
        ),
        (Err(Refusal::Damaged), _) | (_, Err(Refusal::Damaged)) => {
            format!("both superblocks of the arena are damaged; {hint}")
        }
        _ => {
            let found = device::found(medium)?;
            let found = found.map_or_else(String::new, |found| {
                format!(": the medium contains {found}")
            });
            format!("the content is not a kvdepot arena{found}; use another path, or {hint}")
        }
    }))
}

/// Where the superblocks are.
const COPIES: [u64; 2] = [0, layout::SUPERBLOCK_B];

/// Returns the offsets of superblocks that fail verification or cannot be read.
///
/// `in_force` is the superblock in use. An arena that was never opened has only one superblock; its
/// other copy does not count.
///
/// # Errors
///
/// No error at present: a copy that cannot be read is in the result.
pub fn dead_superblocks(medium: &dyn Medium, in_force: &Superblock) -> Result<Vec<u64>, Error> {
    let mut dead = Vec::new();
    for at in COPIES {
        let is_dead = |page: [u8; superblock::LEN]| {
            let is_unused = in_force.generation == 0 && page == [0; superblock::LEN];
            !is_unused && Superblock::decode(&page).is_err()
        };
        if read_page(medium, at).map_or(true, is_dead) {
            dead.push(at);
        }
    }
    Ok(dead)
}

/// What makes an arena possible at a file that is too small for one.
pub(crate) fn enlarge(path: &Path) -> String {
    let (path, least) = (path.display(), size::show(layout::CAPACITY_MIN));
    format!(
        "an arena needs at least {least}; remove the file, so that kvdepot creates it with \
         dax.capacity, or enlarge it with truncate -s SIZE {path}"
    )
}

/// Begins a new generation, in the older copy: the newer one stays whole meanwhile.
pub(crate) fn advance(medium: &dyn Medium, superblock: Superblock) -> Result<Superblock, Error> {
    let next = Superblock {
        generation: superblock.generation + 1,
        ..superblock
    };
    let at = if next.generation.is_multiple_of(2) {
        0
    } else {
        layout::SUPERBLOCK_B
    };
    medium.write_at(at, &next.encode())?;
    medium.sync_one(at, superblock::LEN as u64)?;
    Ok(next)
}

pub(crate) fn write_owner(medium: &dyn Medium, socket: &str) -> Result<(), Error> {
    let pid = std::process::id();
    let page = owner::Owner {
        pid,
        start_time: peer::start_ticks(pid).ok().flatten().unwrap_or(0),
        host: peer::hostname(),
        socket: socket.to_owned(),
    };
    Ok(medium.write_at(layout::OWNER, &page.encode())?)
}

/// The namespaces of the directory, and its entries without one, the first one last.
pub(crate) fn described(medium: &dyn Medium) -> Result<(HashSet<NamespaceId>, Vec<u32>), Error> {
    let entries = read_directory(medium)?;
    let taken: HashSet<u64> = entries.iter().map(|(index, _, _)| *index).collect();
    let free = (0..directory::ENTRIES)
        .rev()
        .filter(|index| !taken.contains(index));
    let free = free.map(|index| index as u32).collect();
    Ok((entries.into_iter().map(|(_, id, _)| id).collect(), free))
}

/// Returns the namespaces that the arena describes, with the number of their entry.
///
/// # Errors
///
/// [`Error::Media`] if the directory cannot be read.
pub fn read_directory(medium: &dyn Medium) -> Result<Vec<(u64, NamespaceId, String)>, Error> {
    let mut bytes = [0; (layout::TABLE - layout::DIRECTORY) as usize];
    // What the medium cannot read of it is zeros: entries that are not used.
    if let Err(error) = medium.read_at(layout::DIRECTORY, &mut bytes)
        && medium.losses() == 0
    {
        return Err(error.into());
    }
    let mut entries = Vec::new();
    let (each, _) = bytes.as_chunks::<{ directory::LEN }>();
    for (index, bytes) in (0..).zip(each) {
        if let Some((id, text)) = directory::decode(bytes) {
            entries.push((index, id, text));
        }
    }
    Ok(entries)
}

/// Returns the process that opened the arena last, from the owner page.
pub fn read_owner(medium: &dyn Medium) -> Option<owner::Owner> {
    let mut page = [0; owner::LEN];
    medium.read_at(layout::OWNER, &mut page).ok()?;
    owner::Owner::decode(&page)
}
