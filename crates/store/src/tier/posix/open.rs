//! Files that are pinned or written now.

mod left;
mod making;
mod marks;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_arena::clock::unix_seconds;
use kvdepot_arena::format::file_header::{self, FileHeader, LEN};
use kvdepot_arena::format::file_note::{self, FileNote};
use kvdepot_arena::held::turn_len;
use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Error, Identity, NamespaceId, Place, Reserved, TakesBack, Token};
use kvdepot_host::EachMinute;
use kvdepot_host::dir::{Seen, annotate, annotation};
use kvdepot_media::checksum::compose;
use kvdepot_media::file::{File, Hands, Manner};
use kvdepot_media::{Buffer, Checksum, Mac};
use parking_lot::Mutex;

use super::desk::Desk;
use super::folder::Folder;
use super::losses::{Losses, Why};
use super::name::room_of;
use super::options::Options;
use super::reach::{files_max, reach, syncs};
use super::usage::{Unnamed, Usage};
use super::uses::Uses;
use crate::keyring::Keyring;
use crate::tier::slots::{Permits, Slots};
use crate::tier::{BlockFile, Directory, Ends, Outside, Proof, Terms};
use left::Left;

pub(super) struct Open {
    number: u32,
    folder: Arc<Folder>,
    usage: Arc<Usage>,
    losses: Arc<Losses>,
    uses: Arc<Uses>,
    /// `None` once it is closed: with the last file their threads end.
    hands: Mutex<Option<Arc<Hands>>>,
    /// How its files are read and written.
    manner: Manner,
    /// Files are synced before they are named, whatever they are to outlive.
    syncs: bool,
    /// The file system is one that may hang. Of others a file's attribute is at hand when it is
    /// open, sooner than its header.
    far: bool,
    /// What blocks are authenticated with.
    keys: Option<Arc<Keyring>>,
    /// For the files that are open, so that the process has descriptors for other things.
    pub(super) slots: Arc<Slots>,
    /// Has threads for what the file system may take its time for.
    desk: Arc<Desk>,
    next: AtomicU64,
    state: Mutex<State>,
    passed_over: EachMinute,
}

#[derive(Default)]
struct State {
    /// By sequence.
    files: HashMap<u64, Opened>,
    /// Blocks that this process writes, by the sequences of their files; 0 where there is none yet.
    writing: HashMap<Identity, u64>,
    /// Files that are written.
    new: u64,
    closed: bool,
}

struct Opened {
    file: Arc<BlockFile>,
    /// Dropped after the file is closed.
    _slot: Permits,
    /// In the directory; one that is new may have none.
    name: Option<String>,
    unnamed: Option<Unnamed>,
    /// Of the count that has its bytes, where it is new.
    epoch: u64,
    place: Place,
    /// The digests of its leaves, where they are known when it is written.
    leaves: Vec<u128>,
    /// The MACs of its parts: of one that is new when it is written.
    macs: Vec<Mac>,
    /// A reservation, and else a pin.
    new: bool,
    holds: u32,
    /// A copy while it is written, or what is to be published; and whether its block was removed
    /// since.
    copy: bool,
    removed: bool,
}

impl Open {
    pub(super) fn new(
        terms: Terms,
        (folder, usage, losses, uses): (&Arc<Folder>, &Arc<Usage>, &Arc<Losses>, &Arc<Uses>),
        desk: &Arc<Desk>,
        options: &Options,
    ) -> Result<Arc<Open>, Error> {
        let far = folder.is_far();
        let (hands, manner, way) = reach(options, folder, terms.timeout)?;
        tracing::info!(path = %folder.path.display(), way, "I/O engine selected");
        Ok(Arc::new(Open {
            number: terms.number,
            folder: Arc::clone(folder),
            usage: Arc::clone(usage),
            losses: Arc::clone(losses),
            uses: Arc::clone(uses),
            hands: Mutex::new(Some(hands)),
            manner,
            syncs: syncs(far, options, manner.is_direct()),
            far,
            keys: terms.keys,
            slots: Slots::new(files_max(&options.reach), None),
            desk: Arc::clone(desk),
            next: AtomicU64::new(0),
            state: Mutex::default(),
            passed_over: EachMinute::default(),
        }))
    }

    /// Whether blocks of a namespace can be authenticated, or need not be.
    pub(super) fn proves(&self, namespace: NamespaceId) -> bool {
        self.keys
            .as_ref()
            .is_none_or(|keys| keys.of(namespace).is_some())
    }

    /// Whether blocks have to be.
    pub(super) fn has_keys(&self) -> bool {
        self.keys.is_some()
    }

    /// Pins the block in a file, if it is the one of that name, whole, and its user's own. It is
    /// `used` at that time.
    pub(super) fn adopt(
        &self,
        name: &Identity,
        used: Option<i64>,
        slot: Permits,
    ) -> Result<Option<Place>, Error> {
        if !self.proves(name.namespace) {
            self.pass_over(name, "no MAC key for its namespace");
            return Ok(None);
        }
        let found = self.folder.find(name, self.manner.is_direct())?;
        let Some((fd, seen)) = found else {
            return Ok(None);
        };
        if !self.folder.is_own(seen.owner) {
            self.pass_over(
                name,
                &format!("it belongs to another user (uid {})", seen.owner),
            );
            return Ok(None);
        }
        let note = match !self.far {
            true => annotation(&fd, file_note::NAME),
            false => None,
        };
        let note = note.and_then(|bytes| FileNote::decode(&bytes, name));
        // What is not proven is for the header to say.
        let note = note.filter(|note| self.keys.is_none() || note.mac.is_some());
        let file = self.block_file((fd, false), seen.inode)?;
        // One that says what is not so is found out when the payload is verified.
        let fits = |len: u64| seen.len == room_of(LEN as u64 + len);
        let Some(FileNote {
            len,
            parts,
            checksum,
            mac,
        }) = note.filter(|note| fits(note.len))
        else {
            return self.adopt_unseen((name, used), (file, slot), &seen);
        };
        self.mark_used(used, &file, &seen);
        let place = Place {
            len,
            parts,
            checksum,
            ..Place::of(*name)
        };
        let (named, macs) = (Some(self.folder.name_of(name)), mac.into_iter().collect());
        Ok(self.hold((named, None, 0), (file, slot), (place, macs), None))
    }

    /// As [`Open::adopt`], of a file whose header has to be read.
    fn adopt_unseen(
        &self,
        (name, used): (&Identity, Option<i64>),
        (file, slot): (BlockFile, Permits),
        seen: &Seen,
    ) -> Result<Option<Place>, Error> {
        let mut page = [0; LEN];
        let read = match seen.len >= LEN as u64 {
            true => file
                .raw()
                .read_exact_at(0, &mut page)
                .map_err(|source| Error::Io {
                    path: self.folder.path.clone(),
                    source,
                }),
            false => Ok(()),
        };
        read?;
        if FileHeader::is_newer(&page) {
            self.pass_over(name, "it was written by a later release");
            return Ok(None);
        }
        let header = FileHeader::decode(&page);
        let header = header.filter(|header| {
            header.identity == *name && seen.len == room_of(LEN as u64 + header.len)
        });
        let macs = file_header::macs(&page);
        let proven = self.keys.is_none() || !macs.is_empty();
        let Some(header) = header.filter(|_| proven) else {
            let why = match proven {
                true => "its header does not match its file name and size",
                false => "it has no valid MAC",
            };
            self.pass_over(name, why);
            // The next put writes it again.
            if let Some(bytes) = self.folder.remove(name, Some(seen.inode))? {
                self.losses.went(name, Why::Rotten, bytes, None);
                self.usage.freed(bytes)?;
            }
            return Ok(None);
        };
        self.mark_used(used, &file, seen);
        let place = Place {
            len: header.len,
            parts: header.parts,
            checksum: header.checksum,
            ..Place::of(*name)
        };
        let named = Some(self.folder.name_of(name));
        Ok(self.hold((named, None, 0), (file, slot), (place, macs), None))
    }

    /// Warns of a file that is not used, at most once a minute: readers ask for it again, and
    /// others may have made any number of them.
    fn pass_over(&self, name: &Identity, reason: &str) {
        if let Some(unsaid) = self.passed_over.may_say() {
            let (namespace, key) = (name.namespace, name.key);
            tracing::warn!(%namespace, %key, reason, unsaid,
                "block file is not valid; the block is a miss");
        }
    }

    /// A file that was opened, to be written too or not.
    fn block_file(&self, fd: (OwnedFd, bool), inode: u64) -> Result<BlockFile, Error> {
        let hands = self.hands.lock().clone();
        let hands = hands.ok_or(Error::Closed("the tier is closed"))?;
        let file = File::known(fd, &hands, self.manner);
        // This thread has just waited for the file system anyway.
        file.enlist();
        Ok(BlockFile::new(file, inode, LEN as u64))
    }

    /// Keeps a file open: a `new` one, which may be a copy, or one that is pinned.
    fn hold(
        &self,
        (name, unnamed, epoch): (Option<String>, Option<Unnamed>, u64),
        (file, slot): (BlockFile, Permits),
        (mut place, macs): (Place, Vec<Mac>),
        new: Option<bool>,
    ) -> Option<Place> {
        let sequence = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        place.token = Token {
            device: self.number,
            slot: 0,
            sequence,
        };
        let opened = Opened {
            file: Arc::new(file),
            _slot: slot,
            name,
            unnamed,
            epoch,
            place,
            leaves: Vec::new(),
            macs,
            new: new.is_some(),
            holds: 1,
            copy: new == Some(true),
            removed: false,
        };
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return None;
        }
        if opened.new {
            state.writing.insert(place.identity, sequence);
            state.new += 1;
        }
        state.files.insert(sequence, opened);
        Some(place)
    }

    pub(super) fn unpin(&self, places: &[Place]) {
        // Closed when the lock is free: that may take its time.
        let mut closed = Vec::new();
        for some in places.chunks(turn_len()) {
            let mut state = self.state.lock();
            for place in some {
                let Some(opened) = state.files.get_mut(&place.token.sequence) else {
                    continue;
                };
                opened.holds -= 1;
                if opened.holds == 0 {
                    closed.extend(state.remove(place.token.sequence));
                }
            }
        }
        self.let_go(closed);
    }

    /// Closes files; where that may take its time, in a thread of its own.
    fn let_go(&self, files: Vec<Opened>) {
        match self.far && !files.is_empty() {
            true => self.desk.run_unawaited(move || drop(files)),
            false => drop(files),
        }
    }

    /// Publishes what is written; whether it is stored.
    pub(super) fn publish(
        &self,
        mut reserved: Reserved,
        checksum: Checksum,
        pinned: bool,
        lasts: bool,
    ) -> Result<bool, Error> {
        let place = reserved.hand_out();
        let sequence = place.token.sequence;
        let (file, name, epoch, leaves, macs) = {
            let mut state = self.state.lock();
            let Some(opened) = state.files.get_mut(&sequence) else {
                return Ok(false);
            };
            let (file, leaves) = (Arc::clone(&opened.file), std::mem::take(&mut opened.leaves));
            let macs = opened.macs.clone();
            (file, opened.name.clone(), opened.epoch, leaves, macs)
        };
        let proven = self.keys.is_none() || macs.len() == usize::from(place.parts);
        debug_assert!(leaves.is_empty() || place.parts > 1 || sum_of(&place, &leaves) == checksum);
        let header = FileHeader {
            identity: place.identity,
            len: place.len,
            parts: place.parts,
            checksum,
            created: unix_seconds().into(),
        };
        let io = |source| Error::Io {
            path: self.folder.path.clone(),
            source,
        };
        if !self.far
            && let Ok(fd) = file.raw().fd()
        {
            let note = FileNote {
                len: place.len,
                parts: place.parts,
                checksum,
                mac: macs.first().copied().filter(|_| place.parts == 1),
            };
            // Where it is not kept, the header is read.
            let _kept = annotate(fd, file_note::NAME, &note.encode(&place.identity));
        }
        // What is not to outlive a power cut need not be on the medium now; others on this host
        // see it.
        let header = header.encode(&macs, &leaves);
        let written = match self.far {
            true => file.raw().write_all_at(0, &header),
            false => file.raw().write_cached_at(0, &header),
        };
        let written = written
            .map_err(io)
            .map(|()| self.mark_stored(&file, place.stamp));
        let synced = written.and_then(|()| match lasts || self.syncs {
            true => {
                let fd = file.raw().fd().map_err(io)?;
                self.folder.sync_file(fd)
            }
            false => Ok(()),
        });
        // Who removes it looks at what is written, and then at what is published.
        let stays = |state: &State| state.files.get(&sequence).is_some_and(|one| !one.removed);
        let published = synced.and_then(|()| {
            // What was taken of a directory that is gone has no room in the one at its place.
            let stays = stays(&self.state.lock()) && self.usage.epoch() == epoch && proven;
            if stays {
                let new = (name.as_deref(), file.raw().fd().map_err(io)?);
                let replaced = self.folder.publish(new, &place.identity, lasts)?;
                if replaced > 0 && self.usage.freed(replaced).is_err() {
                    tracing::debug!("usage is corrected at the next eviction");
                }
            }
            Ok(stays)
        });
        let stored = matches!(published, Ok(true));
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.writing.remove(&place.identity);
        let removed = state.files.get(&sequence).is_some_and(|one| one.removed);
        let mut ended = None;
        match state.files.get_mut(&sequence) {
            Some(opened) if stored && pinned && !removed => {
                opened.new = false;
                state.new -= 1;
                opened.copy = false;
                opened.place.checksum = checksum;
                opened.name = Some(self.folder.name_of(&place.identity));
                opened.unnamed = None;
            }
            _ => ended = state.remove(sequence),
        }
        drop(guard);
        if !stored {
            // It may have been published, and then not been synced.
            let undone = self.folder.remove(&place.identity, Some(file.inode()));
            self.folder.drop_new(name.as_deref());
            if undone.is_ok() {
                self.usage.give_back(room_of(LEN as u64 + place.len), epoch);
            }
        } else if removed {
            // It was, while it was being published.
            if let Some(bytes) = self.folder.remove(&place.identity, Some(file.inode()))? {
                self.usage.freed(bytes)?;
            }
        }
        drop(ended);
        published.map(|stored| stored && !removed)
    }

    /// How many are pinned, and how many written.
    pub(super) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.files.len() as u64 - state.new, state.new)
    }

    /// Nothing is pinned or written any more.
    pub(super) fn close(&self) {
        self.slots.close();
        let left = {
            let mut state = self.state.lock();
            (state.closed, state.new) = (true, 0);
            state.writing.clear();
            std::mem::take(&mut state.files)
        };
        for opened in left.into_values().filter(|opened| opened.new) {
            let bytes = room_of(LEN as u64 + opened.place.len);
            self.usage.give_back(bytes, opened.epoch);
        }
        let hands = self.hands.lock().take();
        drop(hands);
    }

    fn get<R>(&self, place: &Place, read: impl FnOnce(&Opened) -> R) -> Result<R, Error> {
        let state = self.state.lock();
        let opened = state.files.get(&place.token.sequence);
        opened
            .map(read)
            .ok_or(Error::Closed("the block was released before it was copied"))
    }

    /// Names a new file.
    fn name(&self, place: &Place, file: &BlockFile) -> Option<String> {
        let named = file.raw().fd().map_err(|source| Error::Io {
            path: self.folder.path.clone(),
            source,
        });
        let named = named.and_then(|fd| self.folder.name(fd));
        let name = named.inspect_err(|error| {
            tracing::warn!(%error,
                "cannot share a block file with a worker; the copy of the block fails");
        });
        let name = name.ok()?;
        let mut state = self.state.lock();
        let opened = state.files.get_mut(&place.token.sequence);
        // Two who ask at once name it twice, and one of the names goes. A look finds it now.
        let kept = opened.map(|opened| {
            opened.unnamed = None;
            opened.name.get_or_insert_with(|| name.clone()).clone()
        });
        drop(state);
        if kept.as_ref() != Some(&name) {
            self.folder.drop_new(Some(&name));
        }
        kept
    }

    pub(super) fn file_of(&self, place: &Place) -> Result<Arc<BlockFile>, Error> {
        self.get(place, |opened| Arc::clone(&opened.file))
    }
}

impl TakesBack for Open {
    fn take_back(&self, token: Token) {
        let opened = {
            let mut state = self.state.lock();
            let opened = state.remove(token.sequence);
            if let Some(opened) = &opened {
                state.writing.remove(&opened.place.identity);
            }
            opened
        };
        if let Some(opened) = opened {
            let left = Left {
                folder: Arc::clone(&self.folder),
                usage: Arc::clone(&self.usage),
                opened,
            };
            // Whoever drops a reservation does not wait for the file system. What is not removed
            // when all ends goes with the folder.
            self.desk
                .run_unawaited(move || left.folder.drop_new(left.opened.name.as_deref()));
        }
    }
}

impl Ends for Open {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        self.file_of(place)?.buffers(place, offset, len, ends)
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        self.file_of(place)?.parts(place)
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        self.file_of(place)?.write_parts(place, found)
    }

    fn note_leaves(&self, place: &Place, leaves: Vec<u128>) {
        if let Some(opened) = self.state.lock().files.get_mut(&place.token.sequence) {
            opened.leaves = leaves;
        }
    }

    fn proof(&self, place: &Place) -> Option<Proof> {
        let key = self.keys.as_ref()?.of(place.identity.namespace)?;
        let macs = self.get(place, |opened| opened.macs.clone());
        Some(Proof::new(key, macs.unwrap_or_default()))
    }

    fn note_macs(&self, place: &Place, macs: Vec<Mac>) {
        if let Some(opened) = self.state.lock().files.get_mut(&place.token.sequence) {
            opened.macs = macs;
        }
    }

    /// Lanes of other processes have no keys.
    fn directory(&self) -> Option<Directory> {
        if self.keys.is_some() {
            return None;
        }
        Some(Directory {
            dir: self.folder.dir(),
            direct: self.manner.is_direct(),
        })
    }

    /// One without a name gets one here.
    fn outside(&self, place: &Place) -> Option<Outside> {
        let seen = |opened: &Opened| (Arc::clone(&opened.file), opened.name.clone(), opened.new);
        let (file, name, new) = self.get(place, seen).ok()?;
        let name = match name {
            Some(name) => name,
            None => self.name(place, &file)?,
        };
        Some(Outside {
            name: if new {
                self.folder.path_of(&name)
            } else {
                name
            },
            number: file.inode(),
            offset: LEN as u64,
        })
    }
}

/// What a block of one part has these leaves for.
fn sum_of(place: &Place, leaves: &[u128]) -> Checksum {
    let id = parts::part_id(&place.identity, 0, 1);
    compose(&id, place.len, leaves.iter().copied())
}
