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

/// A session's file that is open. What is read is this file's, whatever becomes of its name.
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
    /// Opens one: its head and what it says of itself are read, and verified.
    ///
    /// # Errors
    /// [`Error::Malformed`] for what is none, is cut, has changed or is of another version;
    /// [`Error::Io`].
    pub fn open(mover: &Arc<FileMover>, path: &Path) -> Result<SessionFile, Error> {
        let wrong = |reason: String| Error::malformed(path.display().to_string(), reason);
        let io = io(path);
        let (file, len) = open_file(path, mover.options().direct)?;
        if len < HEAD as u64 {
            return Err(wrong("it is no session, or cut".to_owned()));
        }
        let file = mover.file(file)?;
        let read = |at: u64, bytes: usize| {
            let mut read = vec![0; bytes];
            let done = file.read_exact_at(at, &mut read);
            match done {
                Ok(()) => Ok(read),
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    Err(wrong("it is cut".to_owned()))
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
        let places = places.ok_or_else(|| wrong("its members are too long".to_owned()))?;
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

    /// The session's name: the same of every copy of the file.
    #[must_use]
    pub fn id(&self) -> Id {
        id_of(&self.head.key)
    }

    /// What it says of itself.
    #[must_use]
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Where it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.head.len
    }

    /// Brings the session back: one block's buffers for each of its pieces, and for each object, in
    /// their order. What does not verify has come as whatever it is: of the pieces only those count
    /// that `cached_tokens` names, and of the objects all or none.
    ///
    /// # Errors
    /// [`Error::Input`] before a byte moves.
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

    /// Reads a member, pieces before objects, and hands it over verified, in its order, by up to
    /// 4 MiB at a time.
    ///
    /// # Errors
    /// [`Error::Input`] for one that there is not, [`Error::Malformed`] for what does not verify:
    /// what was handed over before is right. Those of `take`.
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

    /// Reads all of it, and says what does not verify.
    ///
    /// # Errors
    /// Those of the mover.
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

    /// Copies it to another file, verified on the way; its bytes. The copy is the same session.
    ///
    /// # Errors
    /// [`Error::Malformed`] for what does not verify, and those of the file. Nothing is left then.
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
                Ok(_) => "other bytes than were written".to_owned(),
                Err(failure) => failure.to_string(),
            };
            let path = self.path.display();
            tracing::warn!(%path, chunk, reason, "a part of a session does not verify");
            Some(u64::from(*chunk))
        });
        bad.collect()
    }

    fn changed(&self, chunk: u64) -> Error {
        let members = &self.places.members;
        let behind = members.partition_point(|place| place.first <= chunk);
        let reason = format!("{} does not verify", self.name_of(behind.saturating_sub(1)));
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

    /// Runs of tokens, and bytes of each piece.
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
