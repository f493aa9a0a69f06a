//! Everything that kvdepot makes outside of named paths: default arenas in the cache directory,
//! sockets in the runtime directory, measured copy kernels, files of benchmarks that were killed.

use std::fs;
use std::path::{Path, PathBuf};

use kvdepot_host::{dirs, limits, peer, socket};
use kvdepot_media::copy_kernel;

use crate::error::Error;

/// What something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A default arena.
    Arena,
    /// A default arena that somebody makes, or was making when it was killed.
    Unfinished,
    /// A socket where movers attach.
    Socket,
    /// A benchmark's directory.
    Scratch,
    /// The copy kernels that a measurement has chosen.
    Kernels,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Arena => "arena",
            Kind::Unfinished => "unfinished arena",
            Kind::Socket => "socket",
            Kind::Scratch => "benchmark files",
            Kind::Kernels => "measured copy kernels",
        }
    }
}

/// One thing that was found.
pub(crate) struct Found {
    pub(crate) kind: Kind,
    pub(crate) path: PathBuf,
}

/// The beginning of the names of benchmarks' directories; process and start time follow.
const SCRATCH: &str = "kvdepot-bench-";

/// Everything there is.
pub(crate) fn find() -> Result<Vec<Found>, Error> {
    let mut found = Vec::new();
    let mut add = |kind, path| found.push(Found { kind, path });
    for path in default_arenas()? {
        add(Kind::Arena, path);
    }
    for path in entries(&dirs::cache_dir()?) {
        let name = name_of(&path);
        let hidden = name.strip_prefix('.');
        let unfinished = hidden.and_then(|name| name.strip_suffix(kvdepot_store::UNFINISHED));
        if unfinished.is_some_and(is_default) {
            add(Kind::Unfinished, path);
        } else if name.starts_with(copy_kernel::FILES) {
            add(Kind::Kernels, path);
        }
    }
    for path in entries(&dirs::runtime_dir()?) {
        if name_of(&path).ends_with(".sock") {
            add(Kind::Socket, path);
        }
    }
    for parent in [Path::new("/dev/shm"), &std::env::temp_dir()] {
        for path in entries(parent) {
            if is_own(&path) && is_abandoned(&path) {
                add(Kind::Scratch, path);
            }
        }
    }
    Ok(found)
}

/// The default arenas of all instances.
pub(crate) fn default_arenas() -> Result<Vec<PathBuf>, Error> {
    let mut found = entries(&dirs::cache_dir()?);
    found.retain(|path| is_default(&name_of(path)));
    Ok(found)
}

/// Whether a default arena has this name.
fn is_default(name: &str) -> bool {
    let stem = name.strip_suffix(".kvd").unwrap_or_default();
    let of = |default: &str| {
        let instance = stem.strip_prefix(default);
        instance.is_some_and(|instance| instance.is_empty() || instance.starts_with('-'))
    };
    // Those of `Dax` and of `Nvme`.
    of("arena") || of("nvme")
}

/// Removes the directories that are empty now.
pub(crate) fn remove_empty_directories() {
    let dirs = [dirs::cache_dir(), dirs::runtime_dir()];
    for dir in dirs.into_iter().flatten() {
        // It stays where something else lies in it.
        let _removed = fs::remove_dir(dir);
    }
}

impl Found {
    /// Removes it, where nobody uses it; its bytes.
    pub(crate) fn remove(&self) -> Result<u64, Error> {
        match self.kind {
            Kind::Socket => {
                let removed = socket::remove_deserted(&self.path);
                match removed.map_err(Error::io(&self.path))? {
                    true => Ok(0),
                    false => Err(Error::InUse {
                        path: self.path.clone(),
                    }),
                }
            }
            Kind::Arena => Ok(kvdepot_store::erase(&self.path)?),
            Kind::Unfinished => Ok(kvdepot_store::erase_unfinished(&self.path)?),
            Kind::Kernels => {
                fs::remove_file(&self.path).map_err(Error::io(&self.path))?;
                Ok(0)
            }
            Kind::Scratch => {
                let lengths = entries(&self.path).into_iter();
                let bytes = lengths
                    .filter_map(|path| path.metadata().ok())
                    .map(|at| at.len());
                let bytes = bytes.sum();
                fs::remove_dir_all(&self.path).map_err(Error::io(&self.path))?;
                Ok(bytes)
            }
        }
    }
}

/// A benchmark's own directory, which goes with this value. It is named after the process, so
/// that one that was killed can be told from one that runs.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(parent: &Path) -> Result<Scratch, Error> {
        if limits::is_of_devices(parent) {
            return Err(Error::Usage {
                field: "--dir",
                value: parent.display().to_string(),
                allowed: "a directory other than /dev, such as /dev/shm (a file in /dev is in \
                          memory, and can take the name of a device)"
                    .into(),
            });
        }
        let me = peer::Identity::current()?;
        let path = parent.join(format!("{SCRATCH}{}-{}", me.pid, me.start_ticks));
        Ok(Scratch(dirs::private(path)?))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(path = %self.0.display(), %error,
                "cannot delete the temporary directory of a benchmark");
        }
    }
}

/// Whether it is the directory of a benchmark that does not run any more.
fn is_abandoned(path: &Path) -> bool {
    let name = name_of(path);
    let numbers = name
        .strip_prefix(SCRATCH)
        .and_then(|rest| rest.split_once('-'));
    let parsed = numbers.and_then(|(pid, ticks)| Some((pid.parse().ok()?, ticks.parse().ok()?)));
    parsed.is_some_and(|(pid, start_ticks)| {
        let owner = peer::Identity { pid, start_ticks };
        // Where `/proc` cannot say, it may well run.
        !owner.is_running().unwrap_or(true)
    })
}

fn is_own(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::symlink_metadata(path).is_ok_and(|at| at.is_dir() && at.uid() == peer::own_uid())
}

/// What is in a directory; nothing where it cannot be read.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = read.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
