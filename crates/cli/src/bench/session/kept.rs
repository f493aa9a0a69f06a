//! A depot of sessions whose states are slices of one memory.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvdepot_media::Buffer;
use kvdepot_media::file::plain;
use kvdepot_session::{Checkpoint, Id, Reason, Saved, Sessions, Spec};
use kvdepot_store::{BlockBuffers, Config, Depot, NamespaceSpec};
use serde_json::json;

use super::plan::Io;
use crate::bench::media::Region;
use crate::error::Error;

/// How a state is cut.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// Bytes of a token's rows.
    pub(super) row: usize,
    /// Tokens of a piece.
    pub(super) tokens: usize,
}

/// 4 MiB a piece.
pub(super) const CUT: Cut = Cut {
    row: 16 << 10,
    tokens: 256,
};

/// The depot, and its sessions.
pub(super) struct Kept {
    depot: Depot,
    pub(super) sessions: Sessions,
    pub(super) path: PathBuf,
    cut: Cut,
    conversations: u32,
}

impl Kept {
    /// An empty one in a directory that is not there, with room for so many bytes.
    pub(super) fn open(path: &Path, io: Io, cut: Cut, room: usize) -> Result<Kept, Error> {
        Kept::of("Posix", path, io, cut, room)
    }

    /// The same of a pipeline of Posix with or without a Cache of as many bytes.
    pub(super) fn of(
        pipeline: &str,
        path: &Path,
        io: Io,
        cut: Cut,
        room: usize,
    ) -> Result<Kept, Error> {
        let durability = if io == Io::Fsync { "power" } else { "process" };
        let direct = if io == Io::Direct { "true" } else { "false" };
        let mut settings = json!({
            "socket": "off",
            "posix": {
                "path": path, "capacity": 2 * room + (1 << 30), "direct": direct,
                "durability": durability,
            },
        });
        if pipeline.starts_with("Cache") {
            settings["cache"] = json!({"capacity": room + room / 8 + (64 << 20)});
        }
        let depot = kvdepot_service::open(&Config::new(pipeline, &settings)?)?;
        let namespace = NamespaceSpec {
            model: "kvdepot-bench".into(),
            dtype: "bytes".into(),
            block_tokens: cut.tokens as u64,
            ..Default::default()
        };
        let spec = Spec {
            timeout: Duration::from_secs(3600),
            ..Spec::new(namespace)
        };
        Ok(Kept {
            sessions: Sessions::open(depot.clone(), &spec).map_err(fail)?,
            depot,
            path: path.to_owned(),
            cut,
            conversations: 0,
        })
    }

    /// The tokens of a conversation that there was not before.
    pub(super) fn conversation(&mut self, tokens: usize) -> Vec<u32> {
        self.conversations += 1;
        let first = self.conversations;
        (0..tokens as u32).map(|at| at ^ (first << 20)).collect()
    }

    /// Saves a state: seconds, and what became of it.
    pub(super) fn save(
        &self,
        tokens: &[u32],
        state: &Region,
        objects: Vec<(String, Buffer)>,
    ) -> Result<(f64, Saved), Error> {
        let Cut { row, .. } = self.cut;
        let checkpoint = Checkpoint {
            tokens,
            text: &[],
            reason: Reason::Continued,
            context_tokens: 0,
            objects,
            note: String::new(),
            created: 0,
            exact: false,
        };
        let begun = Instant::now();
        let rows = |runs: &[std::ops::Range<usize>]| {
            let mut buffers = BlockBuffers::default();
            for run in runs {
                let (at, len) = (run.start * row, run.len() * row);
                buffers.push([state
                    .whole()
                    .slice(at, len)
                    .map_err(kvdepot_store::Error::from)?]);
            }
            Ok(buffers)
        };
        let saved = self.sessions.save(checkpoint, Box::new(rows));
        Ok((begun.elapsed().as_secs_f64(), saved.map_err(fail)?))
    }

    /// Looks the state up and brings it back: seconds.
    pub(super) fn restore(&self, tokens: &[u32], into: &Region) -> Result<f64, Error> {
        let begun = Instant::now();
        let found = self.sessions.lookup(tokens, 1).map_err(fail)?;
        let gone = || Error::Bench("a saved session was not found".into());
        let found = found.into_iter().next().ok_or_else(gone)?;
        let (mut at, mut buffers) = (0, [BlockBuffers::default(), BlockBuffers::default()]);
        let pieces = found.pieces.iter().map(|(_, bytes)| (0, *bytes));
        let objects = found.objects.iter().map(|one| (1, one.bytes));
        for (which, bytes) in pieces.chain(objects) {
            buffers[which].push([into.whole().slice(at, bytes as usize)?]);
            at += bytes as usize;
        }
        let [rows, objects] = buffers;
        let restored = self.sessions.restore(&found, rows, objects).map_err(fail)?;
        let taken = begun.elapsed().as_secs_f64();
        match restored.whole && restored.cached_tokens == tokens.len() {
            true => Ok(taken),
            false => Err(gone()),
        }
    }

    /// Removes a session once all is on the disk.
    pub(super) fn remove(&self, id: Id) -> Result<(), Error> {
        self.settle()?;
        self.sessions.remove(id).map_err(fail)
    }

    /// Has all of it on the disk.
    pub(super) fn settle(&self) -> Result<(), Error> {
        let folder = File::open(&self.path).map_err(Error::io(&self.path))?;
        Ok(plain::settle(folder.as_fd())?)
    }

    /// Empties the page cache of its files.
    pub(super) fn cool(&self) -> Result<(), Error> {
        self.settle()?;
        each_file(&self.path, &mut |file| Ok(plain::cool(file, 0)?))
    }

    /// Bytes of the disk that its files take.
    pub(super) fn on_disk(&self) -> Result<u64, Error> {
        use std::os::unix::fs::MetadataExt;
        let mut bytes = 0;
        each_file(&self.path, &mut |file| {
            let about = file.metadata().map_err(Error::io(&self.path))?;
            bytes += about.blocks() * 512;
            Ok(())
        })?;
        Ok(bytes)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.depot.close();
    }
}

/// What a session says, as a benchmark's error.
pub(super) fn fail(error: kvdepot_session::Error) -> Error {
    Error::Bench(error.to_string())
}

fn each_file(folder: &Path, with: &mut dyn FnMut(&File) -> Result<(), Error>) -> Result<(), Error> {
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let path = entry.map_err(Error::io(folder))?.path();
        if path.is_dir() {
            each_file(&path, with)?;
        } else {
            with(&File::open(&path).map_err(Error::io(&path))?)?;
        }
    }
    Ok(())
}
