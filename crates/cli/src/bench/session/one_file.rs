//! A session as one file, whose state is a slice of one memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use kvdepot_media::Buffer;
use kvdepot_session::Reason;
use kvdepot_session::file::{FileCheckpoint, FileMover, FileOptions, SessionFile, save_file};
use kvdepot_store::{BlockBuffers, Durability, NamespaceSpec};

use super::kept::{Cut, fail};
use super::plan::Io;
use crate::bench::media::Region;
use crate::error::Error;

/// Where the file is, and who moves its bytes.
pub(super) struct OneFile {
    mover: Arc<FileMover>,
    path: PathBuf,
}

impl OneFile {
    /// A file in a directory, that is not there yet.
    pub(super) fn new(folder: &Path, io: Io) -> Result<OneFile, Error> {
        let mut options = FileOptions::default();
        options.direct = io == Io::Direct;
        if io == Io::Fsync {
            options.durability = Durability::Power;
        }
        Ok(OneFile {
            mover: FileMover::new(options).map_err(fail)?,
            path: folder.join("session.kvs"),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Saves a state: seconds.
    pub(super) fn save(
        &self,
        tokens: &[u32],
        cut: Cut,
        state: &Region,
        objects: Vec<(String, Buffer)>,
    ) -> Result<f64, Error> {
        let namespace = NamespaceSpec {
            model: "kvdepot-bench".into(),
            dtype: "bytes".into(),
            block_tokens: cut.tokens as u64,
            ..Default::default()
        };
        let begun = Instant::now();
        let checkpoint = FileCheckpoint {
            namespace: &namespace,
            tokens,
            text: &[],
            reason: Reason::Continued,
            context_tokens: 0,
            note: "",
            created: 0,
        };
        let mut pieces = BlockBuffers::default();
        for at in (0..tokens.len()).step_by(cut.tokens) {
            let len = cut.tokens.min(tokens.len() - at) * cut.row;
            pieces.push([state.whole().slice(at * cut.row, len)?]);
        }
        save_file(&self.mover, &self.path, &checkpoint, &pieces, &objects).map_err(fail)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Opens the file and brings the state back: seconds.
    pub(super) fn restore(&self, into: &Region) -> Result<f64, Error> {
        let begun = Instant::now();
        let file = SessionFile::open(&self.mover, &self.path).map_err(fail)?;
        let mut at = 0;
        let mut next = |bytes: u64| {
            let buffer = into.whole().slice(at, bytes as usize);
            at += bytes as usize;
            buffer
        };
        let mut buffers = [BlockBuffers::default(), BlockBuffers::default()];
        let about = file.about();
        let pieces = about.piece_bytes.iter().map(|bytes| (0, *bytes));
        let objects = about.objects.iter().map(|(_, bytes)| (1, *bytes));
        for (which, bytes) in pieces.chain(objects) {
            buffers[which].push([next(bytes)?]);
        }
        let restored = file.restore(&buffers[0], &buffers[1]).map_err(fail)?;
        let taken = begun.elapsed().as_secs_f64();
        match restored.whole {
            true => Ok(taken),
            false => Err(Error::Bench(
                "a session file fails checksum verification".into(),
            )),
        }
    }
}
