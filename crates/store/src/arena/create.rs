//! Making an arena's file: with its space really allocated, and under its name only once it is
//! an arena. Whoever is killed half way leaves a file under another name, which the next one
//! removes.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_media::Mapping;
use kvdepot_media::host::limits;

use super::open::{capacity_error, format, path_error};
use crate::config::{DaxConfig, size};
use crate::format::GRANULE;
use crate::format::layout::Layout;
use crate::{Error, clock};

/// Pause of a process that waits for another one to have made its file.
const PAUSE: Duration = Duration::from_millis(5);

/// The end of the name of a file that is not an arena yet.
pub const UNFINISHED: &str = ".unfinished";

/// Makes the file; false when another process has been faster.
pub(super) fn create(
    path: &Path,
    config: &DaxConfig,
    lock_wait: Duration,
    field: &impl Fn(&str) -> String,
) -> Result<bool, Error> {
    let parent = match path.parent() {
        Some(parent) if parent.is_dir() => parent,
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        _ => {
            return Err(Error::config(
                field("path"),
                path.display(),
                "a device, a file, or a file to be made in a directory that exists",
            ));
        }
    };
    let capacity = config.capacity.unwrap_or_else(|| default_capacity(path));
    let records = config
        .records
        .unwrap_or_else(|| Layout::default_records(capacity));
    if Layout::new(capacity, records).is_none() {
        return Err(capacity_error(capacity, records, field));
    }
    let directory = lock_directory(parent, path, lock_wait)?;
    if path.symlink_metadata().is_ok() {
        return Ok(false);
    }
    let unfinished = unfinished(path);
    let io = |source| Error::Io {
        path: path.into(),
        source,
    };
    // Of a process that died: a living one would have the directory locked.
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let made = Mapping::create(&unfinished, capacity / GRANULE * GRANULE)
        .map_err(|error| space_error(path, capacity, error, field))?;
    let finished = format(&made, config, true, field)
        .and_then(|_| std::fs::rename(&unfinished, path).map_err(io))
        .and_then(|()| directory.sync_all().map_err(io));
    if let Err(error) = finished {
        let _gone = std::fs::remove_file(&unfinished);
        return Err(error);
    }
    Ok(true)
}

/// The error for space that an arena of `capacity` bytes did not get.
pub(super) fn space_error(
    path: &Path,
    capacity: u64,
    error: kvdepot_media::Error,
    field: &impl Fn(&str) -> String,
) -> Error {
    if error.is_no_space() {
        let room = format!("what the file system of {} has free", path.display());
        Error::config(field("capacity"), size::show(capacity), room)
    } else {
        path_error(path, error, field)
    }
}

/// One process at a time makes files in a directory. The lock goes with the descriptor.
fn lock_directory(directory: &Path, path: &Path, wait: Duration) -> Result<File, Error> {
    let file = File::open(directory).map_err(|source| Error::Io {
        path: directory.into(),
        source,
    })?;
    let begun = clock::now();
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if begun.elapsed() < wait => std::thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked {
                    path: path.into(),
                    pid: 0,
                    host: "unknown".into(),
                    waited_s: wait.as_secs_f64(),
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

/// Removes what a killed process left of an arena that it was making, and answers its bytes. It
/// has the name of the arena between a dot and [`UNFINISHED`].
///
/// # Errors
/// [`Error::Locked`] when a process makes an arena in that directory, [`Error::Io`].
pub fn erase_unfinished(path: &Path) -> Result<u64, Error> {
    let io = |source| Error::Io {
        path: path.into(),
        source,
    };
    let directory = path.parent().unwrap_or_else(|| Path::new("."));
    let _lock = lock_directory(directory, path, Duration::ZERO)?;
    let bytes = path.symlink_metadata().map_err(io)?.len();
    std::fs::remove_file(path).map_err(io)?;
    Ok(bytes)
}

/// 20 % of the free disk, at most 64 GiB.
pub(crate) fn default_capacity(path: &Path) -> u64 {
    (limits::disk_free(path).unwrap_or(0) / 5).min(64 << 30)
}
