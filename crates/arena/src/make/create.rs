//! Making an arena: its file, with its space really allocated, under its name only once it is
//! an arena, and its format. Whoever is killed half way leaves a file under another name, which
//! the next one removes.

use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_host::{dirs, limits};

use crate::device;
use crate::error::Error;
use crate::format::GRANULE;
use crate::format::layout::{self, Layout};
use crate::format::superblock::{self, Superblock};
use crate::head::enlarge;
use crate::medium::{self, Medium};
use crate::options::Options;
use crate::patience::is_interrupted;
use crate::{clock, size};

/// Pause of a process that waits for another one to have made its file.
const PAUSE: Duration = Duration::from_millis(5);

/// Suffix of the name of a file that is not a complete arena yet.
pub const UNFINISHED: &str = ".unfinished";

/// An arena that is to be made.
struct Plan<'a> {
    parent: &'a Path,
    capacity: u64,
}

impl<'a> Plan<'a> {
    /// Refuses what cannot be made there, before anything is.
    fn new(
        path: &'a Path,
        config: &Options,
        field: &impl Fn(&str) -> String,
    ) -> Result<Plan<'a>, Error> {
        let refused = |allowed| Err(Error::config(field("path"), path.display(), allowed));
        let parent = match path.parent() {
            Some(parent) if parent.is_dir() => parent,
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            _ => {
                return refused(
                    "the path of a device, of a file, or of a new file in an existing directory"
                        .into(),
                );
            }
        };
        if limits::is_of_devices(parent) {
            return refused(no_such_device());
        }
        let usual = || default_capacity(path, config.sharers);
        let capacity = config.capacity.unwrap_or_else(usual);
        let records = records_for(config, capacity);
        if Layout::new(capacity, records).is_none() {
            return Err(capacity_error(capacity, records, field));
        }
        Ok(Plan { parent, capacity })
    }
}

/// Entries of the table of a new arena: what is asked for, or what goes with its size, which is
/// that of the smallest arena at least.
fn records_for(config: &Options, capacity: u64) -> u64 {
    let usual = || Layout::default_records(capacity.max(layout::CAPACITY_MIN));
    config.records.unwrap_or_else(usual)
}

/// What to give where there is no device, and no file may be made.
fn no_such_device() -> String {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("dax"))
        .map(|name| format!("/dev/{name}"))
        .collect();
    names.sort();
    let there = match names.as_slice() {
        [] => "this machine has none".to_owned(),
        names => format!("this machine has {}", names.join(", ")),
    };
    format!(
        "an existing DAX device ({there}; `daxctl reconfigure-device --mode=devdax` creates one \
         from memory), or a file outside /dev: a file in /dev is in memory and lost at the next \
         boot"
    )
}

/// Disk space that is set aside for arenas that are still to be created, in bytes per file system.
#[derive(Default)]
pub struct Promised(HashMap<u64, u64>);

/// Refuses what [`create`] would, and makes nothing.
pub(crate) fn check(
    path: &Path,
    config: &Options,
    field: &impl Fn(&str) -> String,
    promised: &mut Promised,
) -> Result<(), Error> {
    let Plan { parent, capacity } = Plan::new(path, config, field)?;
    if let Err(error) = limits::can_make_files(parent) {
        return Err(Error::config(field("path"), path.display(), usable(&error)));
    }
    // Somebody may be making it just now.
    let begun = unfinished(path).symlink_metadata();
    let begun = begun.map_or(0, |file| file.blocks() * 512);
    // Where nothing is counted, nothing is free either.
    let Some(free) = limits::disk_free(path).ok().filter(|free| *free > 0) else {
        return Ok(());
    };
    let system = parent.metadata().map_or(0, |at| at.dev());
    let promised = promised.0.entry(system).or_default();
    let free = free.saturating_add(begun).saturating_sub(*promised);
    *promised += capacity;
    // A share is of what is free then.
    if config.capacity.is_some() && capacity > free {
        return Err(no_space(path, capacity, Some(free), field));
    }
    Ok(())
}

/// Makes the file; false when another process has been faster.
pub(crate) fn create(
    path: &Path,
    config: &Options,
    waits: (Duration, Duration),
    field: &impl Fn(&str) -> String,
) -> Result<bool, Error> {
    let Plan { parent, capacity } = Plan::new(path, config, field)?;
    let directory = lock_directory(parent, path, waits)?;
    if path.symlink_metadata().is_ok() {
        return Ok(false);
    }
    if limits::is_of_memory(parent) {
        tracing::warn!(
            path = %path.display(),
            "arena created on a memory file system; a reboot deletes the arena (set path to a file \
             on a disk, or to a DAX device)"
        );
    }
    if limits::is_of_container(parent) {
        tracing::warn!(
            path = %path.display(),
            "arena created in a container's writable layer (overlayfs); the arena is slow, and is \
             deleted with the container (set path to a file on a volume)"
        );
    }
    let unfinished = unfinished(path);
    let io = |source| Error::Io {
        path: path.into(),
        source,
    };
    // Of a process that died: a living one would have the directory locked.
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let made = medium::create(&unfinished, capacity / GRANULE * GRANULE, config.access)
        .map_err(|error| space_error(path, capacity, error, field))?;
    let finished = format(made.as_ref(), config, true, field)
        .and_then(|_| std::fs::rename(&unfinished, path).map_err(io))
        .and_then(|()| directory.sync_all().map_err(io));
    if let Err(error) = finished {
        let _gone = std::fs::remove_file(&unfinished);
        return Err(error);
    }
    Ok(true)
}

/// The error for space that an arena of `capacity` bytes did not get.
pub(crate) fn space_error(
    path: &Path,
    capacity: u64,
    error: kvdepot_media::Error,
    field: &impl Fn(&str) -> String,
) -> Error {
    if error.is_no_space() {
        return no_space(path, capacity, limits::disk_free(path).ok(), field);
    }
    let refused = |allowed: String| Error::config(field("capacity"), size::show(capacity), allowed);
    match error {
        kvdepot_media::Error::Io { source, .. } if source.kind() == ErrorKind::FileTooLarge => {
            let path = path.display();
            refused(format!(
                "at most the maximum file size of the file system of {path} ({source})"
            ))
        }
        kvdepot_media::Error::Invalid { allowed, .. } => refused(allowed.into()),
        error => path_error(path, error, field),
    }
}

fn no_space(
    path: &Path,
    capacity: u64,
    free: Option<u64>,
    field: &impl Fn(&str) -> String,
) -> Error {
    let free = free.map_or_else(|| "unknown".into(), size::show);
    let room = format!(
        "at most the free space of the file system of {} ({free})",
        path.display()
    );
    Error::config(field("capacity"), size::show(capacity), room)
}

/// The least that the lock of a directory is waited for. Whoever makes a file there has it for a
/// moment, and so has the child of a process that did, until it begins its own program.
const LEAST: Duration = Duration::from_secs(5);

/// One process at a time makes files in a directory. The lock goes with the descriptor. It is
/// waited for as long as is `left` of `lock_wait`.
fn lock_directory(
    directory: &Path,
    path: &Path,
    (left, lock_wait): (Duration, Duration),
) -> Result<File, Error> {
    let wait = left.max(LEAST);
    let file = File::open(directory).map_err(|source| Error::Io {
        path: directory.into(),
        source,
    })?;
    let begun = clock::now();
    loop {
        if is_interrupted() {
            return Err(Error::Interrupted);
        }
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if begun.elapsed() < wait => std::thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked {
                    path: path.into(),
                    pid: 0,
                    host: "unknown".into(),
                    lock_wait_s: lock_wait.as_secs_f64(),
                });
            }
            // Held; or a file system without locks, where nobody is kept out.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(file),
        }
    }
}

/// Where the file is while it is being made.
fn unfinished(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}{UNFINISHED}"))
}

/// Removes an incomplete arena that a killed process left. Returns its size in bytes.
///
/// The file has the name of the arena between a dot and [`UNFINISHED`].
///
/// # Errors
///
/// [`Error::Locked`] if a process is creating an arena in that directory, [`Error::Io`].
pub fn erase_unfinished(path: &Path) -> Result<u64, Error> {
    let io = |source| Error::Io {
        path: path.into(),
        source,
    };
    let directory = path.parent().unwrap_or_else(|| Path::new("."));
    let _lock = lock_directory(directory, path, Default::default())?;
    let bytes = path.symlink_metadata().map_err(io)?.len();
    std::fs::remove_file(path).map_err(io)?;
    Ok(bytes)
}

/// Returns the default capacity in bytes: 20 % of the free disk space divided by `sharers`, at most
/// 64 GiB.
pub fn default_capacity(path: &Path, sharers: u64) -> u64 {
    let share = limits::disk_free(path).unwrap_or(0) / 5;
    (share / sharers.max(1)).min(64 << 30)
}

/// Returns the path of the default arena in the user's cache directory, with a separate one per
/// `instance`.
///
/// # Errors
///
/// [`Error::Host`] if there is no usable cache directory.
pub fn default_path(stem: &str, instance: Option<&str>) -> Result<PathBuf, Error> {
    let name = match instance {
        None => format!("{stem}.kvd"),
        Some(instance) => format!("{stem}-{instance}.kvd"),
    };
    Ok(dirs::cache_dir()?.join(name))
}

/// What the system says about a path that the configuration names.
pub(crate) fn path_error(
    path: &Path,
    error: kvdepot_media::Error,
    field: &impl Fn(&str) -> String,
) -> Error {
    let allowed = match error {
        kvdepot_media::Error::Io { source, .. } => usable(&source),
        other => format!("a device or file that this tier supports ({other})"),
    };
    Error::config(field("path"), path.display(), allowed)
}

/// The same of a path that is opened to become an arena, or is one.
pub(crate) fn open_error(
    path: &Path,
    error: kvdepot_media::Error,
    field: &impl Fn(&str) -> String,
) -> Error {
    if let kvdepot_media::Error::TooSmall { available: 0, .. } = error {
        let allowed = format!("a file that is not empty: {}", enlarge(path));
        return Error::config(field("path"), path.display(), allowed);
    }
    path_error(path, error, field)
}

fn usable(error: &std::io::Error) -> String {
    format!("a device or file that this user can read and write; opening it failed: {error}")
}

pub(crate) fn capacity_error(
    capacity: u64,
    records: u64,
    field: &impl Fn(&str) -> String,
) -> Error {
    Error::config(
        field("capacity"),
        size::show(capacity),
        format!(
            "at least {} for an arena of {records} records",
            size::show(layout::capacity_min(records))
        ),
    )
}

/// The layout of the arena that is to be made of a medium.
pub(crate) fn layout_for(
    medium: &dyn Medium,
    config: &Options,
    field: &impl Fn(&str) -> String,
) -> Result<Layout, Error> {
    let capacity = config.capacity.unwrap_or_else(|| medium.len());
    let capacity = capacity / GRANULE * GRANULE;
    let records = records_for(config, capacity);
    if capacity > medium.len() {
        return Err(Error::config(
            field("capacity"),
            size::show(capacity),
            format!(
                "at most {}, the size of the medium",
                size::show(medium.len())
            ),
        ));
    }
    Layout::new(capacity, records).ok_or_else(|| capacity_error(capacity, records, field))
}

/// Makes an arena of a medium, `blank` when it is known to hold zeros only.
pub(crate) fn format(
    medium: &dyn Medium,
    config: &Options,
    blank: bool,
    field: &impl Fn(&str) -> String,
) -> Result<Superblock, Error> {
    let layout = layout_for(medium, config, field)?;
    match blank {
        // The end of a hole: a file system of memory looks for it page by page, at each opening,
        // and need not go on to what is not written yet.
        true => medium.write_at(layout.data - GRANULE, &[0; GRANULE as usize])?,
        false => {
            wipe(medium, layout)?;
            device::wipe(medium)?;
        }
    }
    let superblock = Superblock {
        uuid: random_uuid(),
        capacity: layout.capacity,
        records: layout.records,
        data: layout.data,
        generation: 0,
        created: u64::from(clock::unix_seconds()),
        created_by: concat!("kvdepot ", env!("CARGO_PKG_VERSION")).into(),
    };
    medium.write_at(0, &superblock.encode())?;
    medium.sync_one(0, superblock::LEN as u64)?;
    Ok(superblock)
}

fn wipe(medium: &dyn Medium, layout: Layout) -> Result<(), Error> {
    // The old superblocks go first: a crash in the middle leaves no arena instead of half of one.
    let zeros = vec![0; 1 << 20];
    medium.write_at(0, &zeros[..superblock::LEN])?;
    medium.write_at(layout::SUPERBLOCK_B, &zeros[..superblock::LEN])?;
    medium.sync_one(0, layout::TABLE)?;
    let mut at = layout::OWNER;
    while at < layout.data {
        let len = (layout.data - at).min(zeros.len() as u64);
        medium.write_at(at, &zeros[..len as usize])?;
        at += len;
    }
    medium.sync_one(0, layout.data)?;
    Ok(())
}

fn random_uuid() -> [u8; 16] {
    use std::hash::{BuildHasher, RandomState};
    let mut uuid = [0; 16];
    for half in uuid.chunks_mut(8) {
        half.copy_from_slice(&RandomState::new().hash_one(clock::now()).to_le_bytes());
    }
    uuid
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_directory_in_which_somebody_makes_a_file_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let held = lock_directory(at, &at.join("one"), Default::default()).unwrap();
        let (_never, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let _late = ends.recv_timeout(Duration::from_millis(300));
                drop(held);
            });
            lock_directory(at, &at.join("two"), Default::default()).unwrap();
        });
    }
}
