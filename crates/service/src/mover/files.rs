//! Blocks that lie in files of the owner's directories: opened here by the names that it says, each
//! as long as it is read or written. What is not the file that was meant is nothing.

use std::sync::{Arc, OnceLock};

use kvdepot_arena::Error;
use kvdepot_host::dir::{Access, Dir};
use kvdepot_host::fork::LockFd;
use kvdepot_media::file::Hands;
use kvdepot_store::{BlockFile, FileAt};
use parking_lot::RwLock;

use crate::frame::hello::{Kind, Medium};

/// The owner's directories, by their numbers.
pub(crate) struct Files {
    directories: RwLock<Vec<(u32, Arc<Dir>)>>,
    /// They read and write; started by the first file.
    hands: OnceLock<Arc<Hands>>,
    lanes: usize,
}

impl Files {
    /// With as many threads as there are lanes, where there is no ring.
    pub(crate) fn new(lanes: usize) -> Files {
        Files {
            directories: RwLock::default(),
            hands: OnceLock::new(),
            lanes,
        }
    }

    /// Takes the directories out of what a welcome has brought.
    pub(crate) fn learn(&self, media: &mut Vec<(Medium, LockFd)>) -> Result<(), Error> {
        let directories = media.extract_if(.., |(medium, _)| medium.kind == Kind::Directory);
        let open = |(medium, fd): (Medium, LockFd)| {
            let twin = fd.fd()?.try_clone_to_owned().map_err(|source| Error::Io {
                path: "directory".into(),
                source,
            })?;
            Ok((medium.number, Arc::new(Dir::adopt(twin)?)))
        };
        let all = directories.map(open).collect::<Result<Vec<_>, Error>>()?;
        *self.directories.write() = all;
        Ok(())
    }

    /// The owner is gone.
    pub(crate) fn let_go(&self) {
        self.directories.write().clear();
    }

    /// Opens a block's file; `None` where it is gone, or is not what the owner meant.
    pub(crate) fn open(&self, number: u32, at: &FileAt, access: Access) -> Option<BlockFile> {
        let dir = {
            let directories = self.directories.read();
            let known = directories.iter().find(|(known, _)| *known == number);
            Arc::clone(&known?.1)
        };
        let opened = self
            .hands()
            .and_then(|hands| BlockFile::open(&dir, at, access, hands));
        opened.unwrap_or_else(|error| {
            tracing::warn!(%error, number, "a block's file cannot be opened");
            None
        })
    }

    fn hands(&self) -> Result<&Arc<Hands>, Error> {
        if let Some(hands) = self.hands.get() {
            return Ok(hands);
        }
        let started = Hands::new(self.lanes)?;
        Ok(self.hands.get_or_init(|| started))
    }
}
