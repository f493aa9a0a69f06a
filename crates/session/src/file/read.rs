//! A session's file is read: verified chunk by chunk, into the engine's memory as it lies.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_media::checksum::Sum;
use kvdepot_media::file::{File, plain};
use kvdepot_media::{Buffer, Checksum};
use kvdepot_store::BlockBuffers;
use rustix::fs::OFlags;

use super::about::About;
use super::checkpoint::id_of;
use super::cut::{Rest, Slot};
use super::format::{CHANGED, HEAD, Head, MAGIC, Place, Places, decode_tail, part};
use super::mover::{FileMover, Flight, Outcomes};
use super::write::{Room, SessionWriter};
use crate::error::{Error, io, room};
use crate::index::Id;
use crate::restore::{Restored, fit};
use crate::upkeep::Checked;

/// Chunks that are read ahead of whoever takes them one by one.
const AHEAD: usize = 4;

/// Bytes that are read at a time of what a file says of itself.
const STEP: u64 = 1 << 20;

/// Chunks that are looked at together.
const LOOKED: usize = 64;

/// Session file that is open for reading.
///
/// The handle reads the opened file, even if another file gets its name.
///
/// # Examples
/// ```
/// use kvdepot_session::Reason;
/// use kvdepot_session::file::{FileCheckpoint, FileMover, FileOptions, SessionFile, save_file};
/// use kvdepot_store::{BlockBuffers, Buffer, NamespaceSpec};
///
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("conversation.kvs");
/// let mover = FileMover::new(FileOptions::default())?;
/// let namespace = NamespaceSpec {
///     model: "m".into(),
///     dtype: "f16".into(),
///     block_tokens: 256,
///     ..NamespaceSpec::default()
/// };
/// let checkpoint = FileCheckpoint {
///     namespace: &namespace,
///     tokens: &[1, 2, 3],
///     text: b"",
///     reason: Reason::Asked,
///     context_tokens: 4096,
///     note: "",
///     created: 1_700_000_000,
/// };
/// let pieces = BlockBuffers::whole([Buffer::from_vec(vec![7; 300])]);
/// save_file(&mover, &path, &checkpoint, &pieces, &[])?;
///
/// let file = SessionFile::open(&mover, &path)?;
/// let piece = Buffer::from_vec(vec![0; 300]);
/// let rows = BlockBuffers::whole([piece.clone()]);
/// assert!(file.restore(&rows, &BlockBuffers::default())?.whole);
/// assert_eq!(piece.to_vec(), [7; 300]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SessionFile {
    mover: Arc<FileMover>,
    path: PathBuf,
    file: Arc<File>,
    head: Head,
    about: About,
    places: Places,
    sums: Vec<Checksum>,
}

impl SessionFile {
    /// Opens a session file, and reads and verifies its head and its description.
    ///
    /// # Errors
    /// * [`Error::Malformed`] if `path` is not a session file, is truncated, has changed, or has
    ///   another version.
    /// * [`Error::Input`] if `path` is not a regular file, and [`Error::Io`] if it cannot be read.
    pub fn open(mover: &Arc<FileMover>, path: &Path) -> Result<SessionFile, Error> {
        let wrong = |reason: String| Error::malformed(path.display().to_string(), reason);
        let io = io(path);
        let (file, len) = open_file(path, mover.options().direct)?;
        if len < HEAD as u64 {
            return Err(wrong(
                "it is not a session file, or it is truncated".to_owned(),
            ));
        }
        let file = mover.file(file)?;
        let read = |at: u64, bytes: usize| {
            let mut read = vec![0; bytes];
            let done = file.read_exact_at(at, &mut read);
            match done {
                Ok(()) => Ok(read),
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    Err(wrong("it is truncated".to_owned()))
                }
                Err(error) => Err(io(error)),
            }
        };
        let head = Head::decode(&read(0, HEAD)?, len).map_err(wrong)?;
        let step = |at: u64, end: u64| read(at, (end - at).min(STEP) as usize);
        // Read twice: nothing is kept of it before all of it has verified.
        let end = head.tail + head.tail_len().unwrap_or_default();
        let (mut sum, mut at) = (Sum::new(end - head.tail), head.tail);
        while at < end {
            let some = step(at, end)?;
            sum.add(&some);
            at += some.len() as u64;
        }
        if sum.finish() != head.sum {
            return Err(wrong(CHANGED.to_owned()));
        }
        let mut tail = room(head.tail_bytes() as u64, path)?;
        while head.tail + (tail.len() as u64) < head.len {
            tail.extend(step(head.tail + tail.len() as u64, head.len)?);
        }
        let (about, sums) = decode_tail(&head, &tail).map_err(wrong)?;
        let places = Places::of(&about);
        let places =
            places.ok_or_else(|| wrong("its pieces or objects are too long".to_owned()))?;
        Ok(SessionFile {
            mover: Arc::clone(mover),
            path: path.to_owned(),
            file,
            head,
            about,
            places,
            sums,
        })
    }

    /// Returns the ID of the session, which all copies of the file share.
    #[must_use]
    pub fn id(&self) -> Id {
        id_of(&self.head.key)
    }

    /// Returns the description of the session.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Returns the path that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of the file, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.head.len
    }

    /// Reads the session into memory and verifies it.
    ///
    /// `rows` has one block of buffers per piece, and `objects` one per object, with their sizes
    /// and in their order. If a part fails checksum verification, the content of the buffers is
    /// unspecified, except for the rows of the first `cached_tokens` tokens of the result.
    ///
    /// # Errors
    /// [`Error::Input`] if the buffers do not match the session, and [`Error::Depot`] if they
    /// cannot be written, both before any byte is moved.
    pub fn restore(&self, rows: &BlockBuffers, objects: &BlockBuffers) -> Result<Restored, Error> {
        let sizes: Vec<u64> = self.about.objects.iter().map(|(_, bytes)| *bytes).collect();
        for (what, buffers, sizes) in [
            ("rows", rows, &self.about.piece_bytes),
            ("objects", objects, &sizes),
        ] {
            fit(what, buffers, sizes)?;
            if !sizes.is_empty() {
                buffers.check(sizes.len(), true)?;
            }
        }
        let pieces = (0..rows.len()).map(|at| rows.pieces(at));
        let objects = (0..objects.len()).map(|at| objects.pieces(at));
        let mut batch = self.mover.batch();
        for (place, buffers) in self.places.members.iter().zip(pieces.chain(objects)) {
            let mut rest = Rest::of(buffers);
            for (chunk, begin, len) in place.chunks() {
                let to = rest.take(len as usize)?;
                let from = self.file.buffer((place.at + begin) as usize, len as usize);
                let (id, expected) = self.expected(chunk);
                batch.part(&id, &[from], &to, expected, chunk as u32)?;
            }
        }
        let bad = self.bad(&self.mover.submit(batch).wait());
        let is_whole = |place: &&Place| place.chunks().all(|(chunk, ..)| !bad.contains(&chunk));
        let pieces = self.about.pieces();
        let come = self.places.members.iter().take(pieces.len());
        let come = come.take_while(is_whole).count();
        let end = come.checked_sub(1).and_then(|last| pieces.get(last));
        Ok(Restored {
            cached_tokens: match bad.is_empty() {
                true => self.about.tokens.len(),
                false => end.map_or(0, |(run, _)| run.end),
            },
            whole: bad.is_empty(),
        })
    }

    /// Reads a piece or an object, and passes the verified bytes to `take` in order, in chunks of
    /// at most 4 MiB.
    ///
    /// `member` is an index: pieces come first, then objects.
    ///
    /// # Errors
    /// * [`Error::Input`] if there is no such member.
    /// * [`Error::Malformed`] if a chunk fails checksum verification; the chunks that `take`
    ///   received are correct.
    /// * Errors of `take`.
    pub fn read(
        &self,
        member: usize,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let place = self.places.members.get(member).copied().ok_or_else(|| {
            let count = self.places.members.len();
            Error::input("member", member, format!("less than {count}"))
        })?;
        let (mut spare, mut ahead) = (Vec::new(), VecDeque::new());
        let mut chunks = place.chunks();
        let read = loop {
            while ahead.len() < AHEAD
                && let Some(chunk) = chunks.next()
            {
                let slot = spare.pop().unwrap_or_else(Slot::new);
                ahead.push_back(self.ask(place, chunk, slot)?);
            }
            let Some((chunk, flight, whole, len)) = ahead.pop_front() else {
                break Ok(());
            };
            let outcomes = flight.wait();
            if !self.bad(&outcomes).is_empty() || outcomes.is_empty() {
                break Err(self.changed(chunk));
            }
            let mut slot = Slot::back(whole);
            slot.used = len;
            if let Err(error) = take(slot.filled()) {
                break Err(error);
            }
            slot.used = 0;
            spare.push(slot);
        };
        for (_, flight, ..) in ahead {
            flight.give_up();
        }
        read
    }

    /// Begins to read a chunk.
    fn ask(
        &self,
        place: Place,
        (chunk, begin, len): (u64, u64, u64),
        mut slot: Slot,
    ) -> Result<(u64, Flight, Buffer, usize), Error> {
        let len = len as usize;
        slot.used = len;
        let (whole, to) = slot.lend()?;
        let from = self.file.buffer((place.at + begin) as usize, len);
        let (id, expected) = self.expected(chunk);
        let mut batch = self.mover.batch();
        batch.part(&id, &[from], &[to], expected, chunk as u32)?;
        Ok((chunk, self.mover.submit(batch), whole, len))
    }

    /// Reads the whole file, and returns the parts that fail checksum verification.
    ///
    /// # Errors
    /// [`Error::Depot`] if the file mover fails.
    pub fn verify(&self) -> Result<Checked, Error> {
        let all = self.places.members.iter();
        let all = all.flat_map(|place| place.chunks().map(move |chunk| (place, chunk)));
        let all: Vec<_> = all.collect();
        let mut bad = Vec::new();
        for some in all.chunks(LOOKED) {
            let mut batch = self.mover.batch();
            for (place, (chunk, begin, len)) in some {
                let from = self.file.buffer((place.at + begin) as usize, *len as usize);
                let (id, expected) = self.expected(*chunk);
                batch.hash_only(&id, &[from], expected, *chunk as u32)?;
            }
            bad.extend(self.bad(&self.mover.submit(batch).wait()));
        }
        let mut checked = Checked::default();
        for (number, place) in self.places.members.iter().enumerate() {
            checked.blocks += 1;
            if place.chunks().any(|(chunk, ..)| bad.contains(&chunk)) {
                checked.missing.push(self.name_of(number));
            } else {
                checked.bytes += place.bytes;
            }
        }
        Ok(checked)
    }

    /// Copies the file to `path` and verifies it at the same time. The copy is the same session.
    ///
    /// Returns the size of the copy in bytes. If the copy fails, it leaves no file.
    ///
    /// # Errors
    /// [`Error::Malformed`] if a part fails checksum verification, and [`Error::Io`] if `path`
    /// cannot be written.
    pub fn copy_to(&self, path: &Path) -> Result<u64, Error> {
        self.copy(path, (false, None))
    }

    pub(super) fn copy(&self, path: &Path, place: (bool, Option<Box<Room>>)) -> Result<u64, Error> {
        let mut about = self.about.clone();
        (about.piece_bytes, about.objects) = (Vec::new(), Vec::new());
        let mut writer = SessionWriter::at(&self.mover, path, (about, self.head.key), place)?;
        let buffer = |place: &Place| self.file.buffer(place.at as usize, place.bytes as usize);
        let mut members = self.places.members.iter().map(buffer);
        let count = self.about.piece_bytes.len();
        let pieces = BlockBuffers::whole(members.by_ref().take(count));
        let names = self.about.objects.iter().map(|(name, _)| name.clone());
        let objects: Vec<_> = names.zip(members).collect();
        writer.put_all(&pieces, &objects)?;
        Ok(writer
            .finish_as(Some((&self.sums, self.path())))?
            .bytes_written)
    }

    pub(super) fn key(&self) -> [u8; 32] {
        self.head.key
    }

    /// Has something done with the file itself, where it is this process's.
    pub(super) fn with_fd(&self, run: impl FnOnce(BorrowedFd<'_>)) {
        if let Ok(fd) = self.file.fd() {
            run(fd);
        }
    }

    /// What a chunk is to be.
    fn expected(&self, chunk: u64) -> (kvdepot_media::PartId, Option<Checksum>) {
        let sum = self.sums.get(chunk as usize).copied();
        let id = part(self.head.namespace, self.head.key, chunk);
        // One that has none, which no open file has, matches nothing.
        (id, Some(sum.unwrap_or_default()))
    }

    /// Chunks that did not come, or did not verify.
    fn bad(&self, outcomes: &Outcomes) -> Vec<u64> {
        let bad = outcomes.iter().filter_map(|(chunk, outcome)| {
            let reason = match outcome {
                Ok((_, true)) => return None,
                Ok(_) => "checksum mismatch".to_owned(),
                Err(failure) => failure.to_string(),
            };
            let path = self.path.display();
            tracing::warn!(%path, chunk, reason,
                "chunk of a session file is corrupt; restores of the chunk fail");
            Some(u64::from(*chunk))
        });
        bad.collect()
    }

    fn changed(&self, chunk: u64) -> Error {
        let members = &self.places.members;
        let behind = members.partition_point(|place| place.first <= chunk);
        let reason = format!(
            "{} fails checksum verification",
            self.name_of(behind.saturating_sub(1))
        );
        Error::malformed(self.path.display().to_string(), reason)
    }

    fn name_of(&self, member: usize) -> String {
        let pieces = self.about.piece_bytes.len();
        match member.checked_sub(pieces) {
            None => format!("piece {member}"),
            Some(at) => {
                let name = self.about.objects.get(at).map(|(name, _)| &**name);
                format!("object {:?}", name.unwrap_or_default())
            }
        }
    }

    /// Returns the range of tokens and the size in bytes of each piece.
    #[must_use]
    pub fn pieces(&self) -> Vec<(Range<usize>, u64)> {
        self.about.pieces()
    }
}

/// Returns true if a file begins like a session file, damaged or whole.
#[must_use]
pub fn is_session_file(path: &Path) -> bool {
    let mut begins = [0; MAGIC.len()];
    let read = open_file(path, false).is_ok_and(|(mut file, _)| {
        use std::io::Read;
        file.read_exact(&mut begins).is_ok()
    });
    read && begins == *MAGIC
}

/// Opens what is a file, past the page cache where that is wanted and there is such a way.
pub(crate) fn open_file(path: &Path, direct: bool) -> Result<(std::fs::File, u64), Error> {
    let io = io(path);
    // A pipe that somebody has put there must not stop this.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let open = |flags: i32| {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(flags).open(path)
    };
    let file = match direct {
        true => match open(flags | plain::DIRECT) {
            Err(error) if error.kind() == ErrorKind::InvalidInput => open(flags),
            file => file,
        },
        false => open(flags),
    };
    let file = file.map_err(&io)?;
    let about = file.metadata().map_err(&io)?;
    match about.is_file() {
        true => Ok((file, about.len())),
        false => Err(Error::input("file", path.display(), "a regular file")),
    }
}
