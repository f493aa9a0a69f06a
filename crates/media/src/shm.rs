//! Memory that can have a name in `/dev/shm`, by which another process maps it.
//!
//! It begins without one. Once asked for, the name stays as long as the memory: the system gives
//! none a second time. That of a process that was killed is taken away by the next one that asks;
//! who lives holds a lock.

use crate::error::{Error, Result};
use crate::tried::Tried;
use kvdepot_host::fork::Origin;
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) const FOLDER: &str = "/dev/shm";

/// What the names begin with.
const PREFIX: &str = "kvdepot-slab-";

/// The file that some memory is, from its beginning on.
#[derive(Debug)]
pub(crate) struct Shm {
    fd: OwnedFd,
    origin: Origin,
    name: Tried<PathBuf, ()>,
}

impl Shm {
    /// Of a file in `/dev/shm` that never had a name.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] where a forked child could not be told from this process.
    pub(crate) fn new(fd: OwnedFd) -> Result<Arc<Self>> {
        let origin = Origin::here();
        let origin = origin.map_err(|e| Error::io("use", FOLDER, io::Error::other(e)))?;
        Ok(Arc::new(Self {
            fd,
            origin,
            name: Tried::new(),
        }))
    }

    /// Its name, which it is given now if it has none; none while the system refuses.
    pub(crate) fn name(&self) -> Option<&Path> {
        let name = self.name.get_or_make(|| self.link().map_err(drop));
        name.ok().map(PathBuf::as_path)
    }

    fn link(&self) -> io::Result<PathBuf> {
        sweep();
        rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockShared)?;
        let name = Path::new(FOLDER).join(format!("{PREFIX}{}", uuid()?));
        let open = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::linkat(CWD, open, CWD, &name, AtFlags::SYMLINK_FOLLOW)?;
        Ok(name)
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        // In a forked child it is its parent's.
        if let Some(name) = self.name.get()
            && self.origin.is_here()
        {
            // Of an error nobody could make anything: the next process takes it away.
            drop(std::fs::remove_file(name));
        }
    }
}

/// A new universally unique identifier, as it is written.
pub(crate) fn uuid() -> io::Result<String> {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(uuid.trim_ascii_end().to_owned())
}

fn is_ours(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
}

/// Whether a path was the name of such memory, and is nobody's any more.
pub(crate) fn is_gone(path: &Path) -> bool {
    let name = path.strip_prefix(FOLDER).ok().map(Path::as_os_str);
    let looked = path.symlink_metadata();
    name.is_some_and(is_ours) && looked.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Takes away the names of those who were killed. Anybody may put there what they like: nothing is
/// waited for, and no link followed.
fn sweep() {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let names = std::fs::read_dir(FOLDER).into_iter().flatten().flatten();
    for name in names {
        if !is_ours(&name.file_name()) {
            continue;
        }
        let lock = FlockOperation::NonBlockingLockExclusive;
        let file = rustix::fs::open(name.path(), flags, Mode::empty());
        let left = file.map(|file| rustix::fs::flock(file, lock));
        if matches!(left, Ok(Ok(()))) {
            drop(std::fs::remove_file(name.path()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Access, Mapping};

    fn create(len: u64) -> (Arc<Mapping>, Arc<Shm>) {
        let mapping = Mapping::nameable(FOLDER, len).unwrap();
        let fd = mapping.try_clone_fd(Access::ReadWrite).unwrap();
        (mapping, Shm::new(fd).unwrap())
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memory files")]
    fn a_name_goes_with_its_memory_and_that_of_a_killed_process_with_the_next() {
        let left = Path::new(FOLDER).join(format!("{PREFIX}left-by-a-test"));
        std::fs::write(&left, [1]).unwrap();
        // Others may put there what they like.
        let pipe = Path::new(FOLDER).join(format!("{PREFIX}pipe-{}", std::process::id()));
        let mode = Mode::RUSR;
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let (mapping, shm) = create(8192);
        mapping.write_from(4096, &[7; 10]).unwrap();
        let name = shm.name().unwrap().to_owned();
        assert!(!left.exists() && !pipe.exists());
        assert_eq!(std::fs::read(&name).unwrap()[4096..4106], [7; 10]);
        let (_, other) = create(4096);
        other.name().unwrap();
        assert_eq!(shm.name(), Some(&*name), "who lives keeps its own");
        assert!(name.exists());
        drop((mapping, shm));
        assert!(!name.exists());
    }
}
