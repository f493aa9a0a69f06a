//! A file that nobody finds yet, and how it gets its name.
//!
//! Where the file system has files without a name it has none, and goes with its process. Else it
//! has one that says what it is, and a lock that its process holds: what a process that is gone has
//! left is removed by whoever saves next beside it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kvdepot_host::dir::{Access, Dir};
use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::{self, Kind};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::error::{Error, io};

/// What names of temporary files begin and end with.
const BEGIN: &str = ".kvdepot-session-";
const END: &str = ".tmp";

/// The byte that is locked as long as the process lives that writes the file.
const ALIVE: u64 = 0;

/// How old a file is that nobody writes any more, where the file system has no locks.
const OLD: Duration = Duration::from_secs(24 * 3600);

/// How often another name is drawn.
const TRIES: usize = 16;

/// A place for a file in a directory, by its name.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) dir: Dir,
    pub(super) name: String,
    pub(super) path: PathBuf,
}

impl Target {
    /// Of a path, whose directory is there.
    pub(super) fn of(path: &Path) -> Result<Target, Error> {
        let refuse = || {
            let allowed = "the path of a new file, or of a file to replace";
            Error::input("file", path.display(), allowed)
        };
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(refuse)?.to_owned();
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        let dir = Dir::open(parent.unwrap_or_else(|| Path::new(".")))?;
        // What is there is a file, or nothing.
        if dir.has(&name)? && dir.look(&name)?.is_none() {
            return Err(refuse());
        }
        Ok(Target {
            dir,
            name,
            path: path.to_owned(),
        })
    }
}

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Temporary {
    pub(super) target: Target,
    /// Open a second time, for the lock alone: where a ring has requests of a process that was
    /// killed, the kernel lets go of their file only when the last has ended.
    fd: LockFd,
    /// Its own name, where it has one.
    own: Option<String>,
}

/// Drawn at random, or an error where the system has nothing to draw from.
pub(super) fn random<const LEN: usize>() -> Result<[u8; LEN], Error> {
    let mut bytes = [0; LEN];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match got {
        Ok(count) if count == LEN => Ok(bytes),
        Ok(_) => Err(io(Path::new("getrandom"))(Errno::IO.into())),
        Err(errno) => Err(io(Path::new("getrandom"))(errno.into())),
    }
}

fn temporary_name() -> Result<String, Error> {
    let drawn = u64::from_le_bytes(random()?);
    Ok(format!("{BEGIN}{drawn:016x}{END}"))
}

impl Temporary {
    /// A new one for this place, and its descriptor. `seen` has it under a name, for others to
    /// count.
    pub(super) fn new(
        target: Target,
        direct: bool,
        seen: bool,
    ) -> Result<(Temporary, OwnedFd), Error> {
        sweep(&target.dir)?;
        if !seen && let Some(file) = unnamed(&target.dir, direct)? {
            let fd = LockFd::reopen(&file, false)?;
            lock(&fd)?;
            let own = None;
            return Ok((Temporary { target, fd, own }, file));
        }
        for _ in 0..TRIES {
            let name = temporary_name()?;
            let file = target.dir.create(&name, direct);
            let file = file.map_err(|error| named(&target.path, error))?;
            let fd = LockFd::reopen(&file, false)?;
            // Whoever swept between the two has taken it for one that was left.
            if lock(&fd)? && target.dir.has(&name)? {
                let own = Some(name);
                return Ok((Temporary { target, fd, own }, file));
            }
            target.dir.remove(&name)?;
        }
        Err(io(&target.path)(Errno::EXIST.into()))
    }

    fn io(&self, errno: Errno) -> Error {
        io(&self.target.path)(errno.into())
    }

    /// Gives it space up to there, where the file system can; whether it has.
    pub(super) fn allocate(&self, bytes: u64) -> Result<bool, Error> {
        let flags = FallocateFlags::empty();
        match rustix::fs::fallocate(self.fd.fd()?, flags, 0, bytes) {
            Ok(()) => Ok(true),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(false),
            Err(errno) => Err(self.io(errno)),
        }
    }

    /// Gives it a length.
    pub(super) fn set_len(&self, bytes: u64) -> Result<(), Error> {
        rustix::fs::ftruncate(self.fd.fd()?, bytes).map_err(|errno| self.io(errno))
    }

    /// Has all of it on the medium.
    pub(super) fn sync(&self) -> Result<(), Error> {
        rustix::fs::fsync(self.fd.fd()?).map_err(|errno| self.io(errno))
    }

    /// Gives it its name, in place of a file that has it. With `lasts` that is on the medium.
    pub(super) fn publish(mut self, lasts: bool) -> Result<(), Error> {
        let Target { dir, name, .. } = &self.target;
        let own = match self.own.take() {
            Some(own) => own,
            None if dir.link(self.fd.fd()?, name)? => return self.made_to_last(lasts),
            None => {
                // A link replaces nothing, and a rename takes a name.
                let own = temporary_name()?;
                dir.link(self.fd.fd()?, &own)?;
                own
            }
        };
        if let Err(error) = dir.move_to(&own, dir, name) {
            let _left = dir.remove(&own);
            return Err(named(&self.target.path, error));
        }
        self.made_to_last(lasts)
    }

    fn made_to_last(&self, lasts: bool) -> Result<(), Error> {
        match lasts {
            true => Ok(self.target.dir.sync()?),
            false => Ok(()),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            // What is left is swept by who saves next.
            let _left = self.target.dir.remove(own);
        }
    }
}

/// Has `write` write a file that nobody finds, which becomes `to` once all of it is on the medium.
/// Nothing is left where that fails, or where its process ends.
pub(crate) fn replace(
    to: &Path,
    write: impl FnOnce(&mut std::fs::File) -> Result<u64, Error>,
) -> Result<u64, Error> {
    let (temporary, file) = Temporary::new(Target::of(to)?, false, false)?;
    let written = write(&mut file.into())?;
    temporary.sync()?;
    temporary.publish(true)?;
    Ok(written)
}

/// What the system said of a path.
pub(super) fn named(path: &Path, error: kvdepot_host::Error) -> Error {
    match error {
        kvdepot_host::Error::Os { source, .. } => io(path)(source),
        other => other.into(),
    }
}

fn unnamed(dir: &Dir, direct: bool) -> Result<Option<OwnedFd>, Error> {
    match dir.unnamed(direct)? {
        None if direct => Ok(dir.unnamed(false)?),
        file => Ok(file),
    }
}

/// Whether it has its lock, or there are no locks.
fn lock(fd: &LockFd) -> Result<bool, Error> {
    match fd.try_lock(ALIVE, Kind::Exclusive) {
        Ok(locked) => Ok(locked),
        Err(kvdepot_host::Error::Os { .. }) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Whether a name is one of a temporary file.
fn is_temporary(name: &str) -> bool {
    name.starts_with(BEGIN) && name.ends_with(END)
}

/// Removes what processes that are gone have left in a directory.
pub(super) fn sweep(dir: &Dir) -> Result<(), Error> {
    for name in dir.names()? {
        if !is_temporary(&name) {
            continue;
        }
        let Ok(Some((file, seen))) = dir.open_seen(&name, Access::Write, false) else {
            continue;
        };
        let is_left = match lock::try_lock(file.as_fd(), ALIVE, Kind::Exclusive) {
            Ok(locked) => locked,
            // There are no locks.
            Err(_) => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                now.unwrap_or_default().as_nanos() as i128 - seen.changed > OLD.as_nanos() as i128
            }
        };
        if is_left {
            dir.remove(&name)?;
        }
    }
    Ok(())
}
