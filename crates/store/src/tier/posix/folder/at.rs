//! The directory as it is open now, and what its file system can do.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_arena::Error;
use kvdepot_host::dir::{Access, Dir, Seen};
use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::Kind;
use kvdepot_media::file::Manner;

use super::{ALIVE, ALIVE_BYTE, BLOCKS, NEW};

/// The directory, as it was opened last.
pub(super) struct At {
    /// All of it, as other processes have it.
    pub(super) dir: Arc<Dir>,
    pub(super) blocks: Dir,
    /// Where this process writes.
    pub(super) new: Dir,
    pub(super) alive: Arc<LockFd>,
    /// How its files are read and written past the page cache, where they can be.
    pub(super) direct: Option<Manner>,
    /// The user to whom the file system gives what this process makes there: NFS may give all to
    /// one (`all_squash`, `root_squash`), and a mount of SMB does. Files of others are no blocks.
    pub(super) owner: u32,
    /// Whether its file system may be another host's.
    pub(super) far: bool,
    /// Whether there are files without a name, which can be given one.
    pub(super) unnamed: AtomicBool,
}

impl At {
    /// The directory at a path, with this process's own folder. It is made where there is none.
    /// `before` is the same where it was, of which some may be there still.
    pub(super) fn open(
        path: &Path,
        mine: &str,
        (lasts, far): (bool, bool),
        before: Option<&At>,
    ) -> Result<At, Error> {
        let far = |dir: &Dir| far || dir.may_be_far();
        let dir = Dir::open(path)?;
        let blocks = dir.make_folder(BLOCKS)?;
        if lasts {
            dir.sync()?;
            if let Some(parent) = path.parent() {
                Dir::open(parent)?.sync()?;
            }
        }
        let new = dir.make_folder(NEW)?.make_folder(mine)?;
        let alive = match before.filter(|before| !before.new.is_removed()) {
            // Its lock is this process's.
            Some(before) => Arc::clone(&before.alive),
            None => {
                let alive = LockFd::open(|| match new.open_at(ALIVE, Access::Write)? {
                    Some(file) => Ok(file),
                    None => new.create(ALIVE, false),
                })?;
                alive.try_lock(ALIVE_BYTE, Kind::Exclusive)?;
                Arc::new(alive)
            }
        };
        let (direct, owner) = probe(&new)?;
        // A sync of the folder makes a new name last, not everywhere a file's first one.
        let unnamed =
            !lasts && !far(&dir) && dir.links_unnamed() && takes_unnamed(&new, direct.is_some());
        Ok(At {
            far: far(&dir),
            dir: Arc::new(dir),
            blocks,
            new,
            alive,
            direct,
            owner,
            unnamed: AtomicBool::new(unnamed),
        })
    }

    /// Names a file that has none. Where that fails by itself, no more are made.
    pub(super) fn link(
        &self,
        folder: &Dir,
        file: BorrowedFd<'_>,
        name: &str,
    ) -> Result<bool, Error> {
        let linked = folder.link(file, name);
        Ok(linked.inspect_err(|error| {
            let because = error.io_kind();
            if because.is_some_and(|kind| {
                matches!(kind, ErrorKind::NotFound | ErrorKind::PermissionDenied)
            }) {
                self.unnamed.store(false, Ordering::Relaxed);
            }
        })?)
    }

    /// Refuses a directory whose blocks would be no blocks here, and these none to others.
    pub(super) fn check_owner(&self, field: &str, path: &Path) -> Result<(), Error> {
        let (owner, theirs) = (self.owner, self.blocks.owner()?);
        if owner == theirs {
            return Ok(());
        }
        let allowed = format!(
            "a directory whose blocks belong to the user of this process: they belong to uid \
             {theirs}, and new files to uid {owner}; run the process as uid {theirs}, or use \
             another directory"
        );
        Err(Error::config(field, path.display(), allowed))
    }

    /// Whether somebody has removed it, or what this process needs of it.
    pub(super) fn is_removed(&self) -> bool {
        [self.dir.as_ref(), &self.blocks, &self.new]
            .into_iter()
            .any(Dir::is_removed)
    }
}

/// A name that no block has while it is written.
const PROBE: &str = "probe";

/// How files in a folder are read and written past the page cache, `None` where they cannot be; and
/// whose they are.
fn probe(folder: &Dir) -> Result<(Option<Manner>, u32), Error> {
    // What an earlier attempt could not remove.
    folder.remove(PROBE)?;
    let file = folder.create(PROBE, true)?;
    let (manner, seen) = (Manner::of(file.as_fd()), Seen::of(&file));
    folder.remove(PROBE)?;
    let own = rustix::process::geteuid().as_raw();
    let owner = seen?.map_or(own, |seen| seen.owner);
    Ok((Some(manner?).filter(|manner| manner.is_direct()), owner))
}

/// Whether a file can be made without a name, and given one later.
fn takes_unnamed(folder: &Dir, direct: bool) -> bool {
    let made = folder.unnamed(direct).ok().flatten();
    let named = made.is_some_and(|file| folder.link(&file, PROBE).unwrap_or(false));
    named && folder.remove(PROBE).is_ok()
}

pub(super) fn make(path: &Path, recursive: bool) -> Result<(), Error> {
    let made = DirBuilder::new()
        .recursive(recursive)
        .mode(0o700)
        .create(path);
    match made {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(Error::Io {
            path: path.into(),
            source: error,
        }),
        _ => Ok(()),
    }
}
