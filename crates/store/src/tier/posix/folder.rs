//! A directory of blocks: what lies where, and under which name.
//!
//! ```text
//! usage              how much is used, for all who share it
//! new/NAME/N         blocks that are being written, by the process that has `new/NAME`
//! blocks/xxx/KEY-NS  published blocks, in as many folders as `fan_out` says
//! ```
//!
//! Where the file system has files without a name, a block is written into one, near those of its
//! folder, until it is published or another process is to write it: eight writers do not wait for
//! each other in one folder, and nothing is left of a process that is killed. How much is in such
//! files at a time is bounded ([`Unnamed`](super::usage::Unnamed)): no look finds them.

mod at;
mod time;

use std::collections::HashSet;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use kvdepot_arena::format::file_header::{FileHeader, LEN, macs};
use kvdepot_arena::{Durability, Error, Identity};
use kvdepot_host::dir::{Access, Dir, Seen};
use kvdepot_host::lock::{self};
use kvdepot_media::file::Manner;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use at::{At, make};

use super::name::{self, BLOCKS, LEN_MAX, file_of, folder_name, room_of};
use super::options::{FAN_OUT, Options};

/// Where blocks lie that are written.
const NEW: &str = "new";

/// The file of a writer's folder that it has locked as long as it lives.
const ALIVE: &str = "alive";
const ALIVE_BYTE: u64 = 0;

/// How long after its last word a process is not taken for gone: one that has just made its folder
/// has not locked it yet; one of another host says every few minutes that it is there.
const PATIENCE_HERE: Duration = Duration::from_secs(5);
const PATIENCE_ELSEWHERE: Duration = Duration::from_secs(3600);

pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Of the configuration.
    pub(super) section: &'static str,
    /// Set once all who share it agree.
    fan_out: OnceLock<u32>,
    /// Names are made durable.
    lasts: bool,
    is_far: bool,
    /// How the folder is called in which this process writes.
    mine: String,
    at: ArcSwap<At>,
    /// Held by who opens it again.
    again: Mutex<()>,
    /// How far the file system's clock is ahead of this host's, in nanoseconds.
    ahead: AtomicI64,
    next: AtomicU64,
    /// Folders of blocks that are known to outlive a power cut.
    durable: Mutex<HashSet<String>>,
}

impl Folder {
    /// The directory at a path, which is made where there is none.
    pub(super) fn open(options: &Options) -> Result<Folder, Error> {
        let (path, is_far) = (&options.path, options.is_far);
        let lasts = options.durability == Durability::Power;
        make(path, true).map_err(|error| unusable(options.section, path, error))?;
        let pid = std::process::id();
        let chosen = RandomState::new().hash_one(pid);
        let mine = format!("{:08x}-{pid}-{chosen:016x}", boot());
        let at = At::open(path, &mine, (lasts, is_far), None)?;
        at.check_owner(&format!("{}.path", options.section), path)?;
        if at.owner != rustix::process::geteuid().as_raw() {
            tracing::info!(path = %path.display(), owner = at.owner,
                "file system maps all files to one user; accepting the files of that user");
        }
        Ok(Folder {
            at: ArcSwap::from_pointee(at),
            path: path.clone(),
            section: options.section,
            fan_out: OnceLock::new(),
            lasts,
            is_far,
            mine,
            ahead: AtomicI64::new(0),
            next: AtomicU64::new(0),
            again: Mutex::default(),
            durable: Mutex::default(),
        })
    }

    /// Its blocks are spread over so many folders.
    pub(super) fn has_folders(&self, fan_out: u32) {
        let _set_before = self.fan_out.set(fan_out);
    }

    /// All of it, as other processes have it.
    pub(super) fn dir(&self) -> Arc<Dir> {
        Arc::clone(&self.at.load().dir)
    }

    /// Opens again what somebody has removed meanwhile; whether there was need.
    pub(super) fn open_again(&self) -> Result<bool, Error> {
        // By one thread at a time: the last one's lock is kept.
        let _alone = self.again.lock();
        let before = self.at.load();
        if !before.is_removed() {
            return Ok(false);
        }
        // Whatever is above it is not this tier's to make.
        make(&self.path, false)?;
        let at = At::open(
            &self.path,
            &self.mine,
            (self.lasts, self.is_far),
            Some(&before),
        )?;
        if (at.far, at.direct) != (before.far, before.direct) {
            return Err(Error::Io {
                path: self.path.clone(),
                source: io::Error::other(
                    "the directory is now on a different kind of file system; close and reopen the \
                     depot",
                ),
            });
        }
        at.check_owner(&format!("{}.path", self.section), &self.path)?;
        self.durable.lock().clear();
        self.at.store(Arc::new(at));
        Ok(true)
    }

    /// Whether its file system may hang.
    pub(super) fn is_far(&self) -> bool {
        self.at.load().far
    }

    /// How files are read and written past the page cache; `None` where they cannot be.
    pub(super) fn direct(&self) -> Option<Manner> {
        self.at.load().direct
    }

    /// A new file that nobody looks for, and its name, which it needs not have if it may be
    /// `unnamed`.
    pub(super) fn create(
        &self,
        identity: &Identity,
        unnamed: bool,
        direct: bool,
    ) -> Result<(Option<String>, OwnedFd), Error> {
        let at = self.at.load();
        if unnamed && at.unnamed.load(Ordering::Relaxed) {
            // Near those that it will lie with, and where nobody else makes one just now.
            let folder = at.blocks.make_folder(&self.folder_of(identity))?;
            if let Some(file) = folder.unnamed(direct)? {
                return Ok((None, file));
            }
        }
        let name = self.spare();
        let file = at.new.create(&name, direct)?;
        Ok((Some(name), file))
    }

    fn spare(&self) -> String {
        self.next.fetch_add(1, Ordering::Relaxed).to_string()
    }

    /// Names a new file that has no name, so that other processes find it.
    pub(super) fn name(&self, file: BorrowedFd<'_>) -> Result<String, Error> {
        let name = self.spare();
        match self.at.load().new.link(file, &name)? {
            true => Ok(name),
            false => Err(Error::Io {
                path: self.path.join(NEW).join(&self.mine).join(name),
                source: ErrorKind::AlreadyExists.into(),
            }),
        }
    }

    /// Removes the name of what [`Folder::create`] has made.
    pub(super) fn drop_new(&self, name: Option<&str>) {
        if let Some(name) = name
            && let Err(error) = self.at.load().new.remove(name)
        {
            tracing::warn!(%error,
                "cannot delete the temporary file of a block; its space stays in use");
        }
    }

    /// Publishes what [`Folder::create`] has made; durably if `lasts`. How many bytes of a file
    /// went that had its name.
    pub(super) fn publish(
        &self,
        (new, file): (Option<&str>, BorrowedFd<'_>),
        identity: &Identity,
        lasts: bool,
    ) -> Result<u64, Error> {
        let at = self.at.load();
        let number = self.folder_of(identity);
        let folder = at.blocks.make_folder(&number)?;
        // Whoever has made it may not have synced it yet.
        if lasts && !self.durable.lock().contains(&number) {
            at.blocks.sync()?;
            self.durable.lock().insert(number);
        }
        let name = file_of(identity);
        let replaced = match new {
            Some(new) => replace(&at.new, new, &folder, &name)?,
            None if at.link(&folder, file, &name)? => 0,
            // A link takes nobody's name, and a rename does.
            None => {
                let new = self.name(file)?;
                let replaced = replace(&at.new, &new, &folder, &name);
                replaced.inspect_err(|_| self.drop_new(Some(&new)))?
            }
        };
        if lasts {
            folder.sync()?;
        }
        Ok(replaced)
    }

    /// Where a new file of that name is, in the directory.
    pub(super) fn path_of(&self, new: &str) -> String {
        format!("{NEW}/{}/{new}", self.mine)
    }

    /// Where a block's file is, in the directory.
    pub(super) fn name_of(&self, identity: &Identity) -> String {
        name::path_of(identity, self.number_of(identity))
    }

    fn folder_of(&self, identity: &Identity) -> String {
        folder_name(self.number_of(identity))
    }

    pub(super) fn number_of(&self, identity: &Identity) -> u32 {
        name::spread(identity) % self.folders()
    }

    /// Whether something of the directory's user has a block's name; what it is shows when it is
    /// opened.
    pub(super) fn has(&self, identity: &Identity) -> Result<bool, Error> {
        Ok(self
            .owner_of(identity)?
            .is_some_and(|owner| self.is_own(owner)))
    }

    fn owner_of(&self, identity: &Identity) -> Result<Option<u32>, Error> {
        Ok(self.at.load().dir.owner_of(&self.name_of(identity))?)
    }

    /// Whether the files of this user can be blocks.
    pub(super) fn is_own(&self, owner: u32) -> bool {
        owner == self.at.load().owner
    }

    /// What has a block's name; a block is durable then if it shall last, and none that shall be
    /// `proven` and is not.
    pub(super) fn keeps(
        &self,
        identity: &Identity,
        (lasts, proven): (bool, bool),
    ) -> Result<Kept, Error> {
        // Mostly nothing has.
        if self.owner_of(identity)?.is_none() {
            return Ok(Kept::Nothing);
        }
        let Some(folder) = self.at.load().blocks.folder(&self.folder_of(identity))? else {
            return Ok(Kept::Nothing);
        };
        let name = file_of(identity);
        let Some(seen) = folder.look(&name)? else {
            return Ok(Kept::Nothing);
        };
        if !self.is_own(seen.owner) {
            return Ok(Kept::Strange);
        }
        match self.page(identity) {
            Some(page) if FileHeader::is_newer(&page) => return Ok(Kept::Strange),
            Some(page) if proven && macs(&page).is_empty() => return Ok(Kept::Nothing),
            Some(page) if whose(&page, identity).is_some() => {}
            _ => return Ok(Kept::Nothing),
        }
        if lasts {
            let Some(file) = folder.open_at(&name, Access::Read)? else {
                return Ok(Kept::Nothing);
            };
            self.sync_file(file.as_fd())?;
            folder.sync()?;
            self.at.load().blocks.sync()?;
        }
        Ok(Kept::Block)
    }

    /// Puts a file's bytes on its medium, and its length.
    pub(super) fn sync_file(&self, file: BorrowedFd<'_>) -> Result<(), Error> {
        let synced = match self.is_far {
            // `fdatasync` leaves the length that others see as it was, unless a 3FS is told not to.
            true => rustix::fs::fsync(file),
            false => rustix::fs::fdatasync(file),
        };
        synced.map_err(|errno| Error::Io {
            path: self.path.clone(),
            source: errno.into(),
        })
    }

    /// Opens a block's file, and says what it is.
    pub(super) fn find(
        &self,
        identity: &Identity,
        direct: bool,
    ) -> Result<Option<(OwnedFd, Seen)>, Error> {
        let name = self.name_of(identity);
        Ok(self.at.load().dir.open_seen(&name, Access::Read, direct)?)
    }

    /// What a block's file says of itself, if it is the one that its name says.
    pub(super) fn header(&self, identity: &Identity) -> Option<FileHeader> {
        whose(&self.page(identity)?, identity)
    }

    fn page(&self, identity: &Identity) -> Option<[u8; LEN]> {
        let (file, _) = self.find(identity, false).ok()??;
        let file = File::from(file);
        let mut page = [0; LEN];
        file.read_exact_at(&mut page, 0).ok()?;
        Some(page)
    }

    /// Removes a block's file, if it is the one of that number, or whichever it is; its bytes.
    pub(super) fn remove(
        &self,
        identity: &Identity,
        inode: Option<u64>,
    ) -> Result<Option<u64>, Error> {
        let Some(folder) = self.at.load().blocks.folder(&self.folder_of(identity))? else {
            return Ok(None);
        };
        let name = file_of(identity);
        let seen = folder.look(&name)?;
        match inode {
            Some(wanted) if seen.is_none_or(|seen| seen.inode != wanted) => Ok(None),
            Some(wanted) => self.take_out(&folder, &name, wanted),
            None => {
                let bytes = seen.map_or(0, |seen| room_of(seen.len));
                Ok(folder.remove(&name)?.then_some(bytes))
            }
        }
    }

    /// Removes the file of that number, if it still has the name: no call removes a name by what it
    /// stands for, and another process may have put a sound block in its place since it was looked
    /// at. So it is moved to where nobody looks, looked at there, and moved back if it is another.
    fn take_out(&self, folder: &Dir, name: &str, wanted: u64) -> Result<Option<u64>, Error> {
        let (at, spare) = (self.at.load(), self.spare());
        match folder.move_to(name, &at.new, &spare) {
            Err(error) if error.io_kind() == Some(ErrorKind::NotFound) => return Ok(None),
            moved => moved?,
        }
        match at.new.look(&spare)? {
            Some(seen) if seen.inode == wanted => {
                at.new.remove(&spare)?;
                Ok(Some(room_of(seen.len)))
            }
            // One that was published meanwhile holds the same bytes.
            _ => replace(&at.new, &spare, folder, name).map(|_| None),
        }
    }

    /// The folder of that number, where there is one.
    pub(super) fn folder(&self, number: u32) -> Result<Option<Dir>, Error> {
        Ok(self.at.load().blocks.folder(&folder_name(number))?)
    }

    pub(super) fn folders(&self) -> u32 {
        *self.fan_out.get_or_init(|| FAN_OUT)
    }

    /// Removes what processes have left that are gone; how many bytes. One of this host's lifetime
    /// is gone when nobody has its lock, any other when it has said nothing for long: not every
    /// file system knows the locks of other hosts.
    pub(super) fn sweep(&self) -> u64 {
        let swept = |error: Error| {
            tracing::debug!(%error, "cannot list temporary files of other processes");
            0
        };
        let now = match self.still_here() {
            Ok(now) => now,
            Err(error) => return swept(error),
        };
        let Ok(Some(all)) = self.at.load().dir.folder(NEW) else {
            return 0;
        };
        let names = all.names().unwrap_or_default().into_iter();
        let others = names.filter(|name| *name != self.mine);
        let each = others.map(|name| self.sweep_one(&all, &name, now).unwrap_or_else(swept));
        each.sum()
    }

    fn sweep_one(&self, all: &Dir, name: &str, now: i128) -> Result<u64, Error> {
        let Some(folder) = all.folder(name)? else {
            return Ok(0);
        };
        if lives(&folder, name, now, PATIENCE_HERE)? {
            return Ok(0);
        }
        let mut swept = 0;
        for file in folder.names()? {
            let bytes = folder.look(&file)?.map_or(0, |seen| room_of(seen.len));
            if folder.remove(&file)? && file != ALIVE {
                swept += bytes;
            }
        }
        all.remove_folder(name)?;
        Ok(swept)
    }

    /// Whether another process has said that it is there within this time.
    pub(super) fn others_act(&self, within: Duration) -> Result<bool, Error> {
        let now = self.still_here()?;
        let Some(all) = self.at.load().dir.folder(NEW)? else {
            return Ok(false);
        };
        for name in all.names()?.into_iter().filter(|name| *name != self.mine) {
            let alive = match all.folder(&name)? {
                Some(folder) => folder.look(ALIVE)?,
                None => None,
            };
            if alive.is_some_and(|alive| now - alive.changed < within.as_nanos() as i128) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// How many processes live that write here, and the files that are written: their numbers, and
    /// what they take.
    pub(super) fn new_files(&self) -> Result<(u64, Vec<(u64, u64)>), Error> {
        let Some(all) = self.at.load().dir.folder(NEW)? else {
            return Ok((0, Vec::new()));
        };
        let now = self.still_here()?;
        let (mut sharers, mut files) = (0, Vec::new());
        for name in all.names()? {
            let Ok(Some(folder)) = all.folder(&name) else {
                continue;
            };
            sharers += u64::from(lives(&folder, &name, now, Duration::ZERO).unwrap_or(true));
            for file in folder.names().unwrap_or_default() {
                let seen = folder.look(&file).ok().flatten();
                let seen = seen.filter(|seen| seen.len <= LEN_MAX);
                files.extend(seen.map(|seen| (seen.inode, room_of(seen.len))));
            }
        }
        Ok((sharers, files))
    }

    /// Nothing of this process is left.
    pub(super) fn close(&self) {
        let gone = self.at.load().new.names().and_then(|names| {
            for name in names {
                self.at.load().new.remove(&name)?;
            }
            match self.at.load().dir.folder(NEW)? {
                Some(all) => all.remove_folder(&self.mine),
                None => Ok(true),
            }
        });
        if let Err(error) = gone {
            tracing::debug!(%error, "cannot delete temporary files of this process");
        }
    }
}

/// Whether the process whose folder this is may live: of this lifetime of this host one that has
/// its lock, or has said less than `patience` ago that it is there; of others one that has not been
/// silent for long.
fn lives(folder: &Dir, name: &str, now: i128, patience: Duration) -> Result<bool, Error> {
    let (said, locked) = match folder.open_at(ALIVE, Access::Write)? {
        Some(fd) => {
            let said = Seen::of(&fd)?.map_or(0, |seen| seen.changed);
            (said, lock::is_locked(&fd, ALIVE_BYTE)?)
        }
        None => (folder.changed()?, false),
    };
    let patience = match name.starts_with(&format!("{:08x}-", boot())) {
        true => patience,
        false => PATIENCE_ELSEWHERE,
    };
    Ok(locked || now - said < patience.as_nanos() as i128)
}

/// Moves a file to where another one may be; how many bytes of that have gone. Who has it open
/// keeps it.
fn replace(new: &Dir, name: &str, folder: &Dir, to: &str) -> Result<u64, Error> {
    if new.move_to_new(name, folder, to)? {
        return Ok(0);
    }
    // Whose bytes go is known only of what is taken out: another process may replace it, too.
    let before = folder.look(to)?;
    if before.is_some() && new.exchange(name, folder, to)? {
        let gone = new.look(name)?.map_or(0, |seen| room_of(seen.len));
        return Ok(if new.remove(name)? { gone } else { 0 });
    }
    new.move_to(name, folder, to)?;
    Ok(before.map_or(0, |seen| room_of(seen.len)))
}

/// What has the name of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Block,
    /// Nothing, or what makes way for a block.
    Nothing,
    /// Another user's file, or a later release's: it stays, and is of no use here.
    Strange,
}

/// The error of a directory that cannot be created, with the option that names the directory.
fn unusable(section: &str, path: &Path, error: Error) -> Error {
    match error {
        Error::Io { source, .. } => Error::Io {
            path: format!(
                "{section}.path: cannot create the directory {}",
                path.display()
            )
            .into(),
            source: io::Error::new(
                source.kind(),
                format!("{source}; use a directory that this user can create and write"),
            ),
        },
        other => other,
    }
}

fn whose(page: &[u8; LEN], identity: &Identity) -> Option<FileHeader> {
    FileHeader::decode(page).filter(|header| header.identity == *identity)
}

/// This lifetime of this host, as a number.
fn boot() -> u32 {
    static BOOT: OnceLock<u32> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        xxh3_64(&id) as u32
    })
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::{Key, NamespaceId};

    use super::super::options::{DirectIo, Reach};
    use super::*;

    #[test]
    fn a_block_that_has_taken_the_place_of_a_rotten_one_meanwhile_stays() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            name: "Posix",
            section: "posix",
            path: dir.path().join("blocks"),
            capacity: None,
            reach: Reach::Files(DirectIo::No),
            is_far: false,
            durability: Durability::Process,
            fan_out: None,
        };
        let all = Folder::open(&options).unwrap();
        let identity = Identity {
            namespace: NamespaceId([1; 16]),
            key: Key([2; 32]),
        };
        let folder = all.at.load().blocks.make_folder(&all.folder_of(&identity));
        let (folder, name) = (folder.unwrap(), file_of(&identity));
        rustix::io::pwrite(folder.create(&name, false).unwrap(), b"sound", 0).unwrap();
        let inode = folder.look(&name).unwrap().unwrap().inode;
        // The look before it has seen another file.
        assert_eq!(all.take_out(&folder, &name, inode + 1).unwrap(), None);
        let kept = folder.look(&name).unwrap().unwrap();
        assert_eq!((kept.inode, kept.len), (inode, 5));
        assert_eq!(all.remove(&identity, Some(inode + 1)).unwrap(), None);
        let bytes = all.remove(&identity, Some(inode)).unwrap();
        assert_eq!(bytes, Some(room_of(5)));
        assert!(folder.look(&name).unwrap().is_none());
        assert_eq!(
            all.take_out(&folder, &name, inode).unwrap(),
            None,
            "it is gone"
        );
        assert_eq!(
            all.at.load().new.names().unwrap(),
            [ALIVE],
            "nothing is left"
        );
        all.close();
    }
}
