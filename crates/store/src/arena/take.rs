//! Taking a medium: finding or making it, and becoming its owner.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_media::{Access, Mapping};

use super::create::{create, open_error};
use super::owner_lock::OwnerLock;
use crate::config::DaxConfig;
use crate::{Error, clock};

/// A medium that this process owns.
pub(super) struct Taken {
    pub(super) mapping: Arc<Mapping>,
    pub(super) lock: OwnerLock,
    /// It was missing, and this process has made it.
    pub(super) created: bool,
}

/// Opens what is at the path, makes a file where nothing is, and waits for its owner to go. One
/// whose start fails removes the file that it has made: whoever has waited for it with that file
/// open begins anew, as if it came only now.
pub(super) fn take(
    path: &Path,
    config: &DaxConfig,
    lock_wait: Duration,
    field: &impl Fn(&str) -> String,
) -> Result<Taken, Error> {
    let begun = clock::now();
    loop {
        let left = lock_wait.saturating_sub(begun.elapsed());
        let mut created = false;
        let mapping = loop {
            match Mapping::open(path, Access::ReadWrite) {
                Ok(mapping) => break mapping,
                Err(error) if error.is_not_found() => {
                    created = create(path, config, left, field)?;
                }
                Err(error) => return Err(open_error(path, error, field)),
            }
        };
        let lock = OwnerLock::acquire(path, &mapping, (begun, lock_wait))?;
        if !is_removed(path, &mapping)? {
            return Ok(Taken {
                mapping,
                lock,
                created,
            });
        }
        tracing::info!(path = %path.display(), "its last owner has removed it: it is made anew");
    }
}

/// Whether the medium has no name any more.
fn is_removed(path: &Path, mapping: &Mapping) -> Result<bool, Error> {
    let twin = mapping.fd()?.try_clone_to_owned();
    let links = twin.and_then(|twin| Ok(File::from(twin).metadata()?.nlink()));
    links.map(|links| links == 0).map_err(|source| Error::Io {
        path: path.into(),
        source,
    })
}
