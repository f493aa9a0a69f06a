//! A directory of sessions, each a file of its own: what any number of processes share.
//!
//! A file is named by its session. What is being written has a name from the first byte on, so that
//! it is counted; space is given under a lock that all processes of the directory take, and so all
//! that is there together stays within the capacity. Lookups are answered by an index in memory,
//! made of what the files say of themselves.

use std::any::Any;
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_host::EachMinute;
use kvdepot_host::dir::{Dir, mark_used};
use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::Kind;
use kvdepot_media::Buffer;
use kvdepot_store::{BlockBuffers, Key, NamespaceSpec};
use parking_lot::RwLock;

use super::checkpoint::{FileCheckpoint, FileSaved, namespace_of};
use super::format::page_up;
use super::mover::{FileMover, FileOptions};
use super::read::SessionFile;
use super::temporary::{named, random, sweep};
use super::write::{Room, SessionWriter};
use crate::error::{Error, io};
use crate::index::{Hits, Id, Index};
use crate::restore::Restored;
use crate::upkeep::{Checked, Listed, listed};

/// What names of sessions' files end with.
const END: &str = ".kvs";

/// The file whose first byte is locked while space is given.
const LOCK: &str = ".kvdepot-sessions.lock";
const SPACE: u64 = 0;

/// How long others may take to look at the directory and give a file its space.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tokens of a piece of the index, whatever pieces the files have.
const CUT: u32 = 256;

/// How often a lookup begins anew that files are replaced under.
const TRIES: usize = 4;

/// What a directory of sessions is.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct FilesSpec {
    /// What has to be the same for a session to be used again: others are in the directory, and not
    /// found. `block_tokens` are those of a piece.
    pub namespace: NamespaceSpec,
    /// Bytes that all files of the directory have together, at most, whoever has made them.
    pub capacity: u64,
    /// Whether sessions that were not used for the longest time go for new ones; else a save that
    /// finds no room fails.
    pub evicts: bool,
    /// How files are written and read.
    pub options: FileOptions,
}

/// Sessions in a directory.
pub struct SessionFiles {
    mover: Arc<FileMover>,
    path: PathBuf,
    spec: FilesSpec,
    namespace: [u8; 16],
    index: RwLock<Index>,
    passed_over: EachMinute,
}

/// The space of a directory, and who may have some.
struct Space {
    path: PathBuf,
    capacity: u64,
    evicts: bool,
}

impl Space {
    /// Makes room for so many bytes more, and says for how many; nobody else does until what is
    /// answered is dropped.
    fn take(&self, more: Option<RangeInclusive<u64>>) -> Result<(u64, Box<dyn Any>), Error> {
        let dir = Dir::open(&self.path)?;
        let lock = lock(&dir, &self.path)?;
        let given = match more {
            Some(more) => {
                sweep(&dir)?;
                self.make_room(&dir, more.into_inner())?
            }
            None => 0,
        };
        Ok((given, Box::new(lock)))
    }

    /// For the most that is wanted where it is free; else sessions go for the least.
    fn make_room(&self, dir: &Dir, (more, wish): (u64, u64)) -> Result<u64, Error> {
        let mut files = Vec::new();
        // Files with holes may have more in all than a u64 holds.
        let mut used = 0_u128;
        for name in dir.names()? {
            if let Some(seen) = dir.look(&name)? {
                let bytes = u128::from(page_up(seen.len).unwrap_or(seen.len));
                used += bytes;
                if name.ends_with(END) {
                    files.push((seen.changed, name, bytes));
                }
            }
        }
        if used + u128::from(wish) <= self.capacity.into() {
            return Ok(wish);
        }
        let most = u128::from(self.capacity.saturating_sub(more));
        // A file that alone is too long for the capacity is evicted in any case, so it is first.
        files.sort_by(|one, other| {
            let order = |file: &(_, _, u128)| file.2 <= most;
            order(one).cmp(&order(other)).then_with(|| one.cmp(other))
        });
        // Nothing goes for what finds no room either way.
        let rest = used - files.iter().map(|(_, _, bytes)| bytes).sum::<u128>();
        if more > self.capacity || (used > most && (!self.evicts || rest > most)) {
            let value = format!("{more} bytes more, beside {used}");
            let allowed = format!("{} bytes in all in {}", self.capacity, self.path.display());
            return Err(Error::input("capacity", value, allowed));
        }
        for (_, name, bytes) in files {
            if used <= most {
                break;
            }
            tracing::info!(%name, bytes, "a session goes for a new one");
            dir.remove(&name)?;
            used -= bytes;
        }
        Ok(more)
    }
}

fn lock(dir: &Dir, path: &Path) -> Result<LockFd, Error> {
    use kvdepot_host::dir::Access;
    let made = |error| named(path, error);
    let lock = LockFd::open(|| {
        loop {
            if let Some(file) = dir.open_at(LOCK, Access::Write)? {
                return Ok(file);
            }
            match dir.create(LOCK, false) {
                Ok(file) => return Ok(file),
                Err(error) if error.io_kind() == Some(std::io::ErrorKind::AlreadyExists) => {}
                Err(error) => return Err(error),
            }
        }
    });
    let lock = lock.map_err(made)?;
    match lock.lock_timeout(SPACE, Kind::Exclusive, PATIENCE) {
        Ok(true) => Ok(lock),
        Ok(false) => {
            let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
            Err(io(&path.join(LOCK))(error))
        }
        Err(error) => Err(named(path, error)),
    }
}

impl SessionFiles {
    /// Opens a directory, which is made where there is none, and looks which sessions there are.
    /// What saves of processes that are gone have left is removed.
    ///
    /// # Errors
    /// [`Error::Input`] for what cannot be, [`Error::Io`].
    pub fn open(path: &Path, spec: FilesSpec) -> Result<SessionFiles, Error> {
        let namespace = namespace_of(&spec.namespace)?;
        if path.exists() && !path.is_dir() {
            let allowed = "a directory of sessions' files, or a new one";
            return Err(Error::input("path", path.display(), allowed));
        }
        std::fs::create_dir_all(path).map_err(io(path))?;
        let files = SessionFiles {
            mover: FileMover::new(spec.options.clone())?,
            path: path.to_owned(),
            spec,
            namespace,
            index: RwLock::new(Index::new(CUT)),
            passed_over: EachMinute::default(),
        };
        files.refresh()?;
        Ok(files)
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
    #[must_use]
    pub fn spec(&self) -> &FilesSpec {
        &self.spec
    }

    /// Who moves its bytes.
    #[must_use]
    pub fn mover(&self) -> &Arc<FileMover> {
        &self.mover
    }

    fn dir(&self) -> Result<Dir, Error> {
        Ok(Dir::open(&self.path)?)
    }

    fn path_of(&self, id: Id) -> PathBuf {
        self.path.join(format!("{id}{END}"))
    }

    fn room(&self) -> Box<Room> {
        let space = Space {
            path: self.path.clone(),
            capacity: self.spec.capacity,
            evicts: self.spec.evicts,
        };
        Box::new(move |more| space.take(more))
    }

    /// Saves a session, in place of those of the same tokens: straight from memory, as
    /// [`save_file`](super::save_file).
    ///
    /// # Errors
    /// As [`save_file`](super::save_file), and [`Error::Input`] where there is no room.
    pub fn save(
        &self,
        checkpoint: &FileCheckpoint<'_>,
        pieces: &BlockBuffers,
        objects: &[(String, Buffer)],
    ) -> Result<FileSaved, Error> {
        self.write(checkpoint, None, |writer| writer.put_all(pieces, objects))
    }

    /// Saves a session whose members `fill` puts, or says in parts; with `predicted` bytes in all.
    ///
    /// # Errors
    /// As [`SessionFiles::save`], and those of `fill`.
    pub fn write(
        &self,
        checkpoint: &FileCheckpoint<'_>,
        predicted: Option<u64>,
        fill: impl FnOnce(&mut SessionWriter) -> Result<(), Error>,
    ) -> Result<FileSaved, Error> {
        let about = checkpoint.about()?;
        if about.namespace != self.namespace {
            let value = format!("{}", about.namespace());
            return Err(Error::input("namespace", value, "that of the directory"));
        }
        let before = self.index.read().same(checkpoint.tokens);
        let key = random()?;
        let path = self.path_of(super::checkpoint::id_of(&key));
        let place = (true, Some(self.room()));
        let mut writer = SessionWriter::at(&self.mover, &path, (about, key), place)?;
        writer.predict(predicted)?;
        fill(&mut writer)?;
        let saved = writer.finish()?;
        self.adopt_at(&path)?;
        for old in before {
            self.remove_file(old)?;
        }
        Ok(saved)
    }

    /// Adds a session to the index.
    fn adopt(&self, file: &SessionFile) {
        let mut manifest = file.about().as_manifest();
        manifest.piece_tokens = CUT;
        let key = Key(file.key());
        self.index.write().add(key, file.bytes(), &manifest);
    }

    fn adopt_at(&self, path: &Path) -> Result<(), Error> {
        match SessionFile::open(&self.mover, path) {
            Ok(file) => self.adopt(&file),
            // It has gone for another process's already.
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn remove_file(&self, id: Id) -> Result<bool, Error> {
        let gone = self.dir()?.remove(&format!("{id}{END}"))?;
        self.index.write().remove(id);
        Ok(gone)
    }

    /// Looks which sessions there are: others may have saved or removed some.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn refresh(&self) -> Result<(), Error> {
        let dir = self.dir()?;
        sweep(&dir)?;
        let names: HashSet<String> = dir.names()?.into_iter().collect();
        let known: HashSet<Id> = {
            let mut index = self.index.write();
            index.doubt();
            let all: Vec<Id> = index.entries().map(|(id, _)| id).collect();
            let (there, gone) = all
                .into_iter()
                .partition::<Vec<Id>, _>(|id| names.contains(&format!("{id}{END}")));
            gone.into_iter().for_each(|id| index.remove(id));
            there.into_iter().collect()
        };
        let known: HashSet<String> = known.iter().map(|id| format!("{id}{END}")).collect();
        for name in names.iter().filter(|name| name.ends_with(END)) {
            if known.contains(name) {
                continue;
            }
            match SessionFile::open(&self.mover, &self.path.join(name)) {
                Ok(file) if format!("{}{END}", file.id()) != *name => {
                    self.pass_over(name, &"it has another session's name");
                }
                Ok(file) if file.about().namespace == self.namespace => self.adopt(&file),
                Ok(_) => {}
                Err(error) => self.pass_over(name, &error),
            }
        }
        Ok(())
    }

    /// Warns of a file that is not used, at most once a minute: each refresh finds it again, and
    /// others may have made any number of them.
    fn pass_over(&self, name: &str, reason: &dyn std::fmt::Display) {
        if let Some(unsaid) = self.passed_over.may_say() {
            tracing::warn!(name, %reason, unsaid, "a session's file is passed over");
        }
    }

    /// Sessions whose tokens these begin with, the longest first, open: so many at most.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn lookup(&self, tokens: &[u32], most: usize) -> Result<Vec<SessionFile>, Error> {
        let begins = |file: &SessionFile| tokens.starts_with(&file.about().tokens);
        self.usable(|index| index.by_tokens(tokens), most, begins)
    }

    /// The same by rendered text.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn lookup_text(&self, text: &[u8], most: usize) -> Result<Vec<SessionFile>, Error> {
        let begins = |file: &SessionFile| text.starts_with(&file.about().text);
        self.usable(|index| index.by_text(text), most, begins)
    }

    fn usable(
        &self,
        find: impl Fn(&Index) -> Hits,
        most: usize,
        begins: impl Fn(&SessionFile) -> bool,
    ) -> Result<Vec<SessionFile>, Error> {
        for _ in 0..TRIES {
            let (mut usable, mut is_gone) = (Vec::new(), false);
            let hits = find(&self.index.read());
            for id in hits.found.iter().map(|hit| hit.id) {
                if usable.len() >= most {
                    break;
                }
                match self.named(id) {
                    Ok(file) if begins(&file) => usable.push(file),
                    Ok(_) => self.suspect(id, "it is another than it was"),
                    Err(Error::Unknown(_)) => is_gone = true,
                    Err(error) if error.is_of_this_process() => return Err(error),
                    // The file's own trouble: the others are there all the same.
                    Err(error) => self.suspect(id, &error.to_string()),
                }
            }
            if !usable.is_empty() || !is_gone {
                return Ok(usable);
            }
            // One that was replaced meanwhile is there as another.
            self.refresh()?;
        }
        Ok(Vec::new())
    }

    /// A session by its name, open.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Malformed`], [`Error::Io`].
    pub fn named(&self, id: Id) -> Result<SessionFile, Error> {
        let file = match SessionFile::open(&self.mover, &self.path_of(id)) {
            Err(error) if error.is_not_found() => {
                self.index.write().remove(id);
                return Err(Error::Unknown(id.to_string()));
            }
            Err(Error::Input { value, allowed, .. }) => {
                return Err(Error::malformed(value, format!("it is not {allowed}")));
            }
            file => file?,
        };
        if file.id() != id || file.about().namespace != self.namespace {
            let what = self.path_of(id).display().to_string();
            return Err(Error::malformed(what, "it is another session"));
        }
        Ok(file)
    }

    /// Brings a session back ([`SessionFile::restore`]). One that does not verify is found no more,
    /// until [`refresh`](SessionFiles::refresh) looks for it; one that does was used now.
    ///
    /// # Errors
    /// As [`SessionFile::restore`].
    pub fn restore(
        &self,
        file: &SessionFile,
        rows: &BlockBuffers,
        objects: &BlockBuffers,
    ) -> Result<Restored, Error> {
        let restored = file.restore(rows, objects)?;
        match restored.whole {
            true => file.with_fd(|fd| {
                // It goes sooner where that is refused.
                let _marked = mark_used(fd);
            }),
            false => self.suspect(file.id(), "a part of it does not verify"),
        }
        Ok(restored)
    }

    fn suspect(&self, id: Id, reason: &str) {
        self.pass_over(&format!("{id}{END}"), &reason);
        self.index.write().quarantine(id);
    }

    /// All sessions, the newest first.
    #[must_use]
    pub fn list(&self) -> Vec<Listed> {
        listed(&self.index.read())
    }

    /// The session whose name begins with these hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Unknown`] for none, [`Error::Input`] for several.
    pub fn find(&self, digits: &str) -> Result<Id, Error> {
        self.index.read().named(digits)
    }

    /// Reads all of a session, and says what does not verify; that is found no more.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Io`].
    pub fn verify(&self, id: Id) -> Result<Checked, Error> {
        let mut checked = Checked::default();
        match self.named(id) {
            Ok(file) => checked = file.verify()?,
            Err(Error::Malformed { reason, .. }) => checked.missing.push(reason),
            Err(error) => return Err(error),
        }
        if !checked.missing.is_empty() {
            self.index.write().quarantine(id);
        }
        Ok(checked)
    }

    /// Removes a session. Whoever has it open reads it still.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Io`].
    pub fn remove(&self, id: Id) -> Result<(), Error> {
        match self.remove_file(id)? {
            true => Ok(()),
            false => Err(Error::Unknown(id.to_string())),
        }
    }

    /// Copies a session to a file, verified on the way; its bytes.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Malformed`], and those of the file.
    pub fn export(&self, id: Id, to: &Path) -> Result<u64, Error> {
        self.named(id)?.copy_to(to)
    }

    /// Copies a session's file here, verified on the way; the session's name.
    ///
    /// # Errors
    /// [`Error::Input`] for one of another namespace and where there is no room,
    /// [`Error::Malformed`], [`Error::Io`].
    pub fn import(&self, from: &Path) -> Result<Id, Error> {
        let file = SessionFile::open(&self.mover, from)?;
        if file.about().namespace != self.namespace {
            let value = format!("one of namespace {}", file.about().namespace());
            let allowed = "those of the directory: same model, weights, layout and piece";
            return Err(Error::input("session", value, allowed));
        }
        let path = self.path_of(file.id());
        file.copy(&path, (true, Some(self.room())))?;
        self.adopt_at(&path)?;
        Ok(file.id())
    }
}

impl std::fmt::Debug for SessionFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionFiles")
            .field("path", &self.path)
            .field("capacity", &self.spec.capacity)
            .finish_non_exhaustive()
    }
}

/// A file by its path: open, or why it is not.
pub type OpenedFile = (PathBuf, Result<SessionFile, Error>);

/// All sessions' files of a directory, whatever they are of, by their names: each open, or why it
/// is not.
///
/// # Errors
/// [`Error::Io`] for the directory.
pub fn files_of(mover: &Arc<FileMover>, path: &Path) -> Result<Vec<OpenedFile>, Error> {
    let mut names = Dir::open(path)?.names()?;
    names.retain(|name| name.ends_with(END));
    names.sort();
    let open = |name: String| {
        let path = path.join(name);
        let file = SessionFile::open(mover, &path);
        (path, file)
    };
    Ok(names.into_iter().map(open).collect())
}
