//! Taking a medium: finding or making it, and becoming its owner.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::create::{create, open_error};
use crate::clock;
use crate::device;
use crate::error::Error;
use crate::inode::{Inode, metadata};
use crate::medium::{self, Medium, Shared};
use crate::options::Options;
use crate::owner_lock::OwnerLock;

/// A medium that this process owns.
pub(crate) struct Taken {
    pub(crate) medium: Shared,
    pub(crate) lock: OwnerLock,
    /// It was missing, and this process has made it.
    pub(crate) created: bool,
}

/// Opens what is at the path, makes a file where nothing is, and waits for its owner to go. One
/// whose start fails removes the file that it has made: whoever has waited for it with that file
/// open begins anew, as if it came only now.
pub(crate) fn take(
    path: &Path,
    config: &Options,
    lock_wait: Duration,
    field: &impl Fn(&str) -> String,
) -> Result<Taken, Error> {
    let begun = clock::now();
    loop {
        let left = lock_wait.saturating_sub(begun.elapsed());
        let mut created = false;
        let medium = loop {
            match medium::open(path, config.access) {
                Ok(medium) => break medium,
                Err(error) if error.is_not_found() => {
                    created = create(path, config, (left, lock_wait), field)?;
                }
                Err(error) => return Err(open_error(path, error, field)),
            }
        };
        let mut lock = OwnerLock::acquire(path, medium.as_ref(), (begun, lock_wait))?;
        let used = |allowed| Error::config(field("path"), path.display(), allowed);
        lock.claim = device::claim(path, medium.as_ref(), &used)?;
        if !is_removed(path, medium.as_ref())? {
            return Ok(Taken {
                medium,
                lock,
                created,
            });
        }
        tracing::info!(path = %path.display(), "arena file was deleted by its last owner; \
                                                creating a new one");
    }
}

/// Whether the medium has lost its name. A file that is mounted over the path has none either when
/// it was removed where it came from, and is there all the same.
fn is_removed(path: &Path, medium: &dyn Medium) -> Result<bool, Error> {
    let data = metadata(path, medium)?;
    Ok(data.nlink() == 0 && Inode::of(path) != Some(Inode::from(&data)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use kvdepot_media::{Access, Mapping};

    use super::*;

    #[test]
    fn what_has_no_name_is_removed_unless_the_path_leads_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        Mapping::create(&path, 4096).unwrap();
        let mapping = Mapping::open(&path, Access::ReadWrite).unwrap();
        assert!(!is_removed(&path, &mapping).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert!(is_removed(&path, &mapping).unwrap());
        Mapping::create(&path, 4096).unwrap();
        assert!(is_removed(&path, &mapping).unwrap());
        // As a mount does, for which a test has no rights.
        let leads = format!("/proc/self/fd/{}", mapping.fd().unwrap().as_raw_fd());
        assert!(!is_removed(Path::new(&leads), &mapping).unwrap());
    }
}
