//! Blocks that lie in files of the owner's directories: opened here by the names that it says, each
//! as long as it is read or written. What is not the file that was meant is nothing.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_host::dir::{Access, Dir};
use kvdepot_host::fork::LockFd;
use kvdepot_media::file::Hands;
use kvdepot_store::{BlockFile, Directory, Outside};
use parking_lot::RwLock;

use crate::frame::hello::{Kind, Medium};

/// The owner's directories, by their numbers.
pub(crate) struct Files {
    directories: RwLock<Vec<(u32, Directory)>>,
    /// They read and write, in file systems of this host and in others; started by the first file.
    hands: [OnceLock<Arc<Hands>>; 2],
    lanes: usize,
}

/// How long a file system that may hang is waited for: as an owner waits by default.
const PATIENCE: Duration = Duration::from_secs(10);

impl Files {
    /// With as many threads as there are lanes, where there is no ring.
    pub(crate) fn new(lanes: usize) -> Files {
        Files {
            directories: RwLock::default(),
            hands: Default::default(),
            lanes,
        }
    }

    /// Takes the directories out of what a welcome has brought.
    pub(crate) fn learn(&self, media: &mut Vec<(Medium, LockFd)>) -> Result<(), Error> {
        let directories = media.extract_if(.., |(medium, _)| {
            matches!(medium.kind, Kind::Directory { .. })
        });
        let open = |(medium, fd): (Medium, LockFd)| {
            let direct = medium.kind == Kind::Directory { direct: true };
            let twin = fd.fd()?.try_clone_to_owned().map_err(|source| Error::Io {
                path: "cannot duplicate the descriptor of a directory".into(),
                source,
            })?;
            let dir = Arc::new(Dir::adopt(twin)?);
            Ok((medium.number, Directory { dir, direct }))
        };
        let all = directories.map(open).collect::<Result<Vec<_>, Error>>()?;
        *self.directories.write() = all;
        Ok(())
    }

    /// Whether somebody has removed a directory.
    pub(crate) fn is_removed(&self, number: u32) -> bool {
        let directories = self.directories.read();
        let known = directories.iter().find(|(known, _)| *known == number);
        known.is_some_and(|(_, directory)| directory.dir.is_removed())
    }

    /// The owner is gone.
    pub(crate) fn let_go(&self) {
        self.directories.write().clear();
    }

    /// Opens a block's file; `None` where it is gone, or is not what the owner meant.
    pub(crate) fn open(&self, number: u32, at: &Outside, access: Access) -> Option<BlockFile> {
        let directory = {
            let directories = self.directories.read();
            let known = directories.iter().find(|(known, _)| *known == number);
            known?.1.clone()
        };
        let opened = self
            .hands(directory.dir.may_be_far())
            .and_then(|hands| BlockFile::open(&directory, at, access, hands));
        opened.unwrap_or_else(|error| {
            tracing::warn!(%error, number, "cannot open the file of a block; the block is a miss");
            None
        })
    }

    fn hands(&self, far: bool) -> Result<&Arc<Hands>, Error> {
        let hands = &self.hands[usize::from(far)];
        if let Some(hands) = hands.get() {
            return Ok(hands);
        }
        let started = match far {
            true => Hands::patient(self.lanes, PATIENCE),
            false => Hands::new(self.lanes),
        }?;
        Ok(hands.get_or_init(|| started))
    }
}
