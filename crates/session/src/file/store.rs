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

/// Settings of a directory of session files.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct FilesSpec {
    /// Model, weights, element types, layout and tokenizer, which must be equal for a session to be
    /// used again. Lookups ignore files of other namespaces. `block_tokens` is the number of tokens
    /// per piece.
    pub namespace: NamespaceSpec,
    /// Limit for all files of the directory together, in bytes, regardless of the process that
    /// created them.
    pub capacity: u64,
    /// True to evict the least recently used sessions when the capacity is reached. With false, the
    /// save fails.
    pub evicts: bool,
    /// Options for reading and writing files.
    pub options: FileOptions,
}

/// Directory of session files, which several processes may share.
///
/// # Examples
/// ```
/// use kvdepot_session::Reason;
/// use kvdepot_session::file::{FileCheckpoint, FileOptions, FilesSpec, SessionFiles};
/// use kvdepot_store::{BlockBuffers, Buffer, NamespaceSpec};
///
/// # let dir = tempfile::tempdir()?;
/// let (model, dtype) = ("m".into(), "f16".into());
/// let namespace = NamespaceSpec { model, dtype, block_tokens: 256, ..Default::default() };
/// let options = FileOptions::default();
/// let spec = FilesSpec { namespace, capacity: 64 << 20, evicts: true, options };
/// let files = SessionFiles::open(dir.path(), spec)?;
/// let tokens: Vec<u32> = (0..300).collect();
/// let checkpoint = FileCheckpoint {
///     namespace: &files.spec().namespace,
///     tokens: &tokens,
///     text: b"",
///     reason: Reason::Asked,
///     context_tokens: 4096,
///     note: "",
///     created: 1_700_000_000,
/// };
/// // 100 bytes per token: pieces of 256 and of 44 tokens.
/// let pieces = [25_600, 4400].map(|bytes| Buffer::from_vec(vec![7; bytes]));
/// files.save(&checkpoint, &BlockBuffers::whole(pieces), &[])?;
/// let prompt: Vec<u32> = (0..307).collect();
/// assert_eq!(files.lookup(&prompt, 1)?[0].about().tokens, tokens);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
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
            let value = format!("{more} more bytes, with {used} in use");
            let allowed = format!(
                "at most {} bytes in total in {}",
                self.capacity,
                self.path.display()
            );
            return Err(Error::input("capacity", value, allowed));
        }
        for (_, name, bytes) in files {
            if used <= most {
                break;
            }
            tracing::info!(%name, bytes, "evicted session file to make space");
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
    /// Opens a directory of session files, creates it if it is missing, and builds an index of its
    /// sessions.
    ///
    /// Temporary files of processes that have ended are removed.
    ///
    /// # Errors
    /// [`Error::Input`] if `path` is a file or the namespace is not allowed, [`Error::Io`] or
    /// [`Error::Depot`] if the directory cannot be read, and [`Error::Depot`] if the file mover
    /// cannot be started.
    pub fn open(path: &Path, spec: FilesSpec) -> Result<SessionFiles, Error> {
        let namespace = namespace_of(&spec.namespace)?;
        if path.exists() && !path.is_dir() {
            let allowed = "a directory of session files, or a new directory";
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

    /// Returns the path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the settings of the directory.
    #[must_use]
    pub fn spec(&self) -> &FilesSpec {
        &self.spec
    }

    /// Returns the file mover of the directory.
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

    /// Saves a session from memory, like [`save_file`](super::save_file), and replaces sessions
    /// with the same tokens.
    ///
    /// # Errors
    /// Errors of [`save_file`](super::save_file), and [`Error::Input`] if the capacity is too
    /// small.
    pub fn save(
        &self,
        checkpoint: &FileCheckpoint<'_>,
        pieces: &BlockBuffers,
        objects: &[(String, Buffer)],
    ) -> Result<FileSaved, Error> {
        self.write(checkpoint, None, |writer| writer.put_all(pieces, objects))
    }

    /// Saves a session whose members `fill` writes, whole or in parts.
    ///
    /// With `predicted`, the sizes of all members must add up to this number of bytes; `None` for
    /// an unknown size.
    ///
    /// # Errors
    /// Errors of [`SessionFiles::save`], and those of `fill`.
    pub fn write(
        &self,
        checkpoint: &FileCheckpoint<'_>,
        predicted: Option<u64>,
        fill: impl FnOnce(&mut SessionWriter) -> Result<(), Error>,
    ) -> Result<FileSaved, Error> {
        let about = checkpoint.about()?;
        if about.namespace != self.namespace {
            let value = format!("{}", about.namespace());
            return Err(Error::input(
                "namespace",
                value,
                "the namespace of the directory",
            ));
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

    /// Updates the index with sessions that other processes have saved or removed.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Depot`] if the directory cannot be read.
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
                    self.pass_over(name, &"its name is that of another session");
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
            tracing::warn!(name, %reason, unsaid,
                "file is not a valid session; lookups ignore the file");
        }
    }

    /// Finds sessions whose tokens are a prefix of `tokens`, and opens at most `most` of them,
    /// longest first.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Depot`] if the directory cannot be read, or if the process lacks
    /// descriptors or memory.
    pub fn lookup(&self, tokens: &[u32], most: usize) -> Result<Vec<SessionFile>, Error> {
        let begins = |file: &SessionFile| tokens.starts_with(&file.about().tokens);
        self.usable(|index| index.by_tokens(tokens), most, begins)
    }

    /// Finds sessions whose rendered text is a prefix of `text`, and opens at most `most` of them,
    /// longest first.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Depot`] if the directory cannot be read, or if the process lacks
    /// descriptors or memory.
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
                    Ok(_) => self.suspect(id, "another session has replaced it"),
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

    /// Opens the session `id`.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such session, [`Error::Malformed`] if its file is damaged
    /// or is another session, and [`Error::Io`] if it cannot be read.
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
            return Err(Error::malformed(what, "it is a different session"));
        }
        Ok(file)
    }

    /// Reads a session into memory and verifies it, like [`SessionFile::restore`].
    ///
    /// A complete restore marks the session as used now. If a part fails checksum verification,
    /// lookups skip the session until [`refresh`](SessionFiles::refresh) is called.
    ///
    /// # Errors
    /// [`Error::Input`] if the buffers do not match the session, and [`Error::Depot`] if they
    /// cannot be written, both before any byte is moved.
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
            false => self.suspect(file.id(), "a part fails checksum verification"),
        }
        Ok(restored)
    }

    fn suspect(&self, id: Id, reason: &str) {
        self.pass_over(&format!("{id}{END}"), &reason);
        self.index.write().quarantine(id);
    }

    /// Returns all sessions in the index, newest first.
    #[must_use]
    pub fn list(&self) -> Vec<Listed> {
        listed(&self.index.read())
    }

    /// Returns the ID of the session whose ID begins with these hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is none, and [`Error::Input`] if there are several.
    pub fn find(&self, digits: &str) -> Result<Id, Error> {
        self.index.read().named(digits)
    }

    /// Reads the session `id`, and returns the parts that fail checksum verification. If there are
    /// any, lookups skip the session until [`refresh`](SessionFiles::refresh) is called.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such session, and [`Error::Io`] if the file cannot be
    /// read.
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

    /// Removes the session `id`. Open handles can still read it.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such session, and [`Error::Depot`] if the file cannot be
    /// removed.
    pub fn remove(&self, id: Id) -> Result<(), Error> {
        match self.remove_file(id)? {
            true => Ok(()),
            false => Err(Error::Unknown(id.to_string())),
        }
    }

    /// Copies the session `id` to the file `to`, and verifies it at the same time.
    ///
    /// Returns the size of the copy in bytes.
    ///
    /// # Errors
    /// Errors of [`named`](SessionFiles::named) and [`SessionFile::copy_to`].
    pub fn export(&self, id: Id, to: &Path) -> Result<u64, Error> {
        self.named(id)?.copy_to(to)
    }

    /// Copies the session file `from` into the directory, verifies it, and returns the ID of the
    /// session.
    ///
    /// # Errors
    /// [`Error::Input`] if the session belongs to another namespace, or the capacity is too small,
    /// [`Error::Malformed`] if a part fails checksum verification, and [`Error::Io`] if a file
    /// cannot be read or written.
    pub fn import(&self, from: &Path) -> Result<Id, Error> {
        let file = SessionFile::open(&self.mover, from)?;
        if file.about().namespace != self.namespace {
            let value = format!("a session of namespace {}", file.about().namespace());
            let allowed = "sessions of the directory's namespace (same model, weights, layout and \
                           piece size)";
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

/// Path of a session file, and the opened file or the error of the attempt.
pub type OpenedFile = (PathBuf, Result<SessionFile, Error>);

/// Opens all session files of a directory, in order of their names, regardless of their namespaces.
///
/// # Errors
/// [`Error::Depot`] if the directory cannot be read.
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
