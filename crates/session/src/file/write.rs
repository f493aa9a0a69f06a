//! A session's file is written: once, to where nobody finds it, and then it has its name.
//!
//! Members go from the engine's memory to their place in the file as they lie, by requests of a
//! MiB many of which are under way, and are hashed on the way; or what a serializer says goes
//! through a few buffers. The head, which makes a session of it, is written last.

mod growth;

use std::any::Any;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_media::file::File;
use kvdepot_media::{Batch, Buffer, Checksum, Descriptor};
use kvdepot_store::{BlockBuffers, Durability};

use super::about::About;
use super::checkpoint::{FileCheckpoint, FileSaved, Member, id_of};
use super::cut::{Rest, Slot};
use super::format::{CHUNK, Head, Place, Places, encode_tail, page_up, part, sum_of};
use super::mover::{FileMover, Flight, failed};
use super::temporary::{Target, Temporary, random};
use crate::error::{Error, io};
use crate::index::Id;
use crate::manifest::OBJECTS_MAX;

/// Buffers that a serializer's bytes go through: 16 MiB, so that the disk has enough to do while
/// one is filled.
const SLOTS: usize = 4;

/// Bytes from memory that are under way at a time where members are given one by one.
const UNDER_WAY: u64 = 64 << 20;

/// A member that comes in parts.
#[derive(Debug)]
struct Coming {
    member: Member,
    slot: Slot,
    /// Bytes before the slot's.
    written: u64,
}

/// Asks how many bytes more a file may have, of these: nobody else gets any, and no name changes,
/// while the answer is kept.
pub(super) type Room =
    dyn FnMut(Option<RangeInclusive<u64>>) -> Result<(u64, Box<dyn Any>), Error> + Send;

/// Session file that is being written. The [module](super) has an example.
///
/// Members are added in order: pieces, then objects. The file exists after
/// [`finish`](SessionWriter::finish); a writer that is dropped before leaves no file.
pub struct SessionWriter {
    mover: Arc<FileMover>,
    path: PathBuf,
    file: Arc<File>,
    temporary: Option<Temporary>,
    about: About,
    places: Places,
    key: [u8; 32],
    sums: Vec<Checksum>,
    flights: VecDeque<(Flight, u64, Option<Buffer>)>,
    under_way: u64,
    spare: Vec<Slot>,
    coming: Option<Coming>,
    /// Bytes of members that were predicted, and that have come.
    predicted: Option<u64>,
    payload: u64,
    allocated: u64,
    room: Option<Box<Room>>,
    /// Something went wrong: nothing can make a session of it any more.
    is_broken: bool,
}

impl SessionWriter {
    /// Begins a file at `path`.
    ///
    /// With `predicted`, the file gets its disk space immediately, and the save fails unless the
    /// sizes of all members add up to this number of bytes. `None` is for an unknown size.
    ///
    /// # Errors
    /// [`Error::Input`] if an argument is not allowed, before a file is created, and [`Error::Io`]
    /// or [`Error::Depot`] if it cannot be created or there is no disk space.
    pub fn new(
        mover: &Arc<FileMover>,
        path: &Path,
        checkpoint: &FileCheckpoint<'_>,
        predicted: Option<u64>,
    ) -> Result<SessionWriter, Error> {
        let place = (false, None);
        let mut writer = Self::at(mover, path, (checkpoint.about()?, random()?), place)?;
        writer.predict(predicted)?;
        Ok(writer)
    }

    /// A file of what says all but its members.
    pub(crate) fn of(
        mover: &Arc<FileMover>,
        path: &Path,
        mut about: About,
    ) -> Result<SessionWriter, Error> {
        (about.piece_bytes, about.objects) = (Vec::new(), Vec::new());
        Self::at(mover, path, (about, random()?), (false, None))
    }

    /// A file under a key, `seen` by others as it grows, with who says how long it may be.
    pub(super) fn at(
        mover: &Arc<FileMover>,
        path: &Path,
        (about, key): (About, [u8; 32]),
        (seen, room): (bool, Option<Box<Room>>),
    ) -> Result<SessionWriter, Error> {
        let target = Target::of(path)?;
        let (temporary, file) = Temporary::new(target, mover.options().direct, seen)?;
        let file = mover.file(Descriptor::Plain(file))?;
        Ok(SessionWriter {
            mover: Arc::clone(mover),
            path: path.to_owned(),
            file,
            temporary: Some(temporary),
            about,
            places: Places::none(),
            key,
            sums: Vec::new(),
            flights: VecDeque::new(),
            under_way: 0,
            spare: Vec::new(),
            coming: None,
            predicted: None,
            payload: 0,
            allocated: 0,
            room,
            is_broken: false,
        })
    }

    pub(super) fn predict(&mut self, predicted: Option<u64>) -> Result<(), Error> {
        self.predicted = predicted;
        let Some(bytes) = predicted else {
            return Ok(());
        };
        let end = page_up(bytes).and_then(|bytes| bytes.checked_add(self.places.end));
        let end = end.ok_or_else(|| too_long(bytes))?;
        self.reserve(end..=end)
    }

    /// Returns the ID that the session will have.
    #[must_use]
    pub fn id(&self) -> Id {
        id_of(&self.key)
    }

    /// Adds a member from memory. The buffers are read until [`SessionWriter::finish`] returns or
    /// the writer is dropped.
    ///
    /// # Errors
    /// [`Error::Input`] if the member is out of order, is empty, or exceeds the predicted size, and
    /// [`Error::Io`] if the file cannot be written. The save has then failed.
    pub fn put(&mut self, member: Member, buffers: &[Buffer]) -> Result<(), Error> {
        self.guarded(|writer| {
            let mut batch = writer.mover.batch();
            let place = writer.place(member, bytes_of(buffers))?;
            writer.grow(writer.places.end)?;
            writer.add(&mut batch, place, buffers)?;
            writer.fly(batch, None);
            while writer.under_way > UNDER_WAY && writer.flights.len() > 1 {
                writer.land()?;
            }
            Ok(())
        })
    }

    /// Adds all pieces and objects of a session at once, like [`SessionWriter::put`]. The length of
    /// the file is known before any byte is moved.
    ///
    /// # Errors
    /// Errors of [`SessionWriter::put`].
    pub fn put_all(
        &mut self,
        pieces: &BlockBuffers,
        objects: &[(String, Buffer)],
    ) -> Result<(), Error> {
        self.guarded(|writer| {
            let pieces = (0..pieces.len()).map(|at| (Member::Piece, pieces.pieces(at)));
            let objects = objects.iter();
            let objects = objects.map(|(name, bytes)| {
                let member = Member::Object(name.clone());
                (member, std::slice::from_ref(bytes))
            });
            let mut all = Vec::new();
            for (member, buffers) in pieces.chain(objects) {
                all.push((writer.place(member, bytes_of(buffers))?, buffers));
            }
            // The checksums are of one length, whatever they say.
            let sums = vec![Checksum::default(); writer.places.chunks as usize];
            let (tail, _) = encode_tail(&writer.about, &sums)?;
            let end = page_up(writer.places.end + tail.len() as u64);
            let end = end.ok_or_else(|| too_long(writer.payload))?;
            writer.reserve(end..=end)?;
            let mut batch = writer.mover.batch();
            for (place, buffers) in all {
                writer.add(&mut batch, place, buffers)?;
            }
            writer.fly(batch, None);
            Ok(())
        })
    }

    /// Begins a member whose bytes are [written](SessionWriter::write) in parts.
    ///
    /// # Errors
    /// Errors of [`SessionWriter::put`].
    pub fn begin(&mut self, member: Member) -> Result<(), Error> {
        self.guarded(|writer| {
            writer.check_order(&member)?;
            let slot = writer.slot()?;
            writer.coming = Some(Coming {
                member,
                slot,
                written: 0,
            });
            Ok(())
        })
    }

    /// Adds the next bytes of the current member. The bytes are copied.
    ///
    /// # Errors
    /// Errors of [`SessionWriter::put`], and [`Error::Input`] if no member was begun.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        self.fill(&mut bytes).map(drop)
    }

    /// Adds all bytes of `source` to the current member. `source` reads directly into buffers for
    /// the disk.
    ///
    /// Returns the number of bytes.
    ///
    /// # Errors
    /// Errors of [`SessionWriter::put`], [`Error::Input`] if no member was begun, and [`Error::Io`]
    /// with an error of `source`.
    pub fn fill(&mut self, source: &mut dyn Read) -> Result<u64, Error> {
        self.guarded(|writer| {
            let mut all = 0;
            loop {
                let Some(coming) = &mut writer.coming else {
                    return Err(Error::input(
                        "member",
                        "none",
                        "a piece or object that `begin` has started",
                    ));
                };
                match source.read(coming.slot.room()) {
                    Ok(0) => return Ok(all),
                    Ok(read) => {
                        coming.slot.used += read;
                        all += read as u64;
                        let is_full = coming.slot.is_full();
                        writer.count(read as u64)?;
                        if is_full {
                            writer.flush()?;
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(writer.io(error)),
                }
            }
        })
    }

    /// Ends the current member, and returns its size in bytes.
    ///
    /// # Errors
    /// Errors of [`SessionWriter::put`], and [`Error::Input`] if no member was begun.
    pub fn end(&mut self) -> Result<u64, Error> {
        self.guarded(|writer| {
            writer.flush()?;
            let Some(coming) = writer.coming.take() else {
                return Err(Error::input(
                    "member",
                    "none",
                    "a piece or object that `begin` has started",
                ));
            };
            writer.spare.push(coming.slot);
            writer.named(coming.member, coming.written)?;
            Ok(coming.written)
        })
    }

    /// Completes the session, and gives the file its name. A file with this name is replaced.
    ///
    /// # Errors
    /// [`Error::Input`] if members are missing, or fewer bytes were added than predicted, and
    /// [`Error::Io`] or [`Error::Depot`] if the file cannot be written. The writer then leaves no
    /// file.
    pub fn finish(self) -> Result<FileSaved, Error> {
        self.finish_as(None)
    }

    /// The same, where all chunks have these checksums, as in the file that they come from.
    pub(super) fn finish_as(
        mut self,
        sums: Option<(&[Checksum], &Path)>,
    ) -> Result<FileSaved, Error> {
        self.guarded(|writer| {
            if writer.coming.is_some() {
                return Err(Error::input(
                    "member",
                    "an unfinished piece or object",
                    "a finished piece or object (call `end` first)",
                ));
            }
            while !writer.flights.is_empty() {
                writer.land()?;
            }
            if let Some((_, from)) = sums.filter(|(sums, _)| *sums != writer.sums) {
                return Err(Error::malformed(
                    from.display().to_string(),
                    "it fails checksum verification",
                ));
            }
            if let Some(predicted) = writer.predicted.filter(|bytes| *bytes != writer.payload) {
                return Err(other_length(writer.payload, predicted));
            }
            writer.check_pieces()?;
            let checked = writer.about.check();
            checked.map_err(|reason| {
                let allowed = format!("all pieces and objects of a session ({reason})");
                Error::input("members", "this session", allowed)
            })?;
            let (tail, about) = encode_tail(&writer.about, &writer.sums)?;
            let at = writer.places.end;
            let len = page_up(at + tail.len() as u64).ok_or_else(|| too_long(at))?;
            writer.grow(len)?;
            let head = Head {
                len,
                tail: at,
                about,
                chunks: writer.places.chunks,
                key: writer.key,
                namespace: writer.about.namespace,
                sum: sum_of(&tail),
            };
            let io = |error| writer.io(error);
            writer.file.write_all_at(at, &tail).map_err(io)?;
            writer.file.write_all_at(0, &head.encode()).map_err(io)?;
            let lasts = writer.mover.options().durability == Durability::Power;
            let Some(temporary) = writer.temporary.take() else {
                return Err(broken());
            };
            temporary.set_len(len)?;
            if lasts {
                temporary.sync()?;
            }
            // Who counts finds it under one of its names.
            let room = writer.room.as_mut();
            let _while_it_is_named = room.map(|room| room(None)).transpose()?;
            temporary.publish(lasts)?;
            Ok(FileSaved {
                id: id_of(&writer.key),
                cached_tokens: 0,
                cache_write_tokens: writer.about.tokens.len(),
                bytes_written: len,
            })
        })
    }

    /// After an error nothing goes on.
    fn guarded<T>(
        &mut self,
        run: impl FnOnce(&mut SessionWriter) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.is_broken {
            return Err(broken());
        }
        let done = run(self);
        self.is_broken = done.is_err();
        done
    }

    fn io(&self, error: std::io::Error) -> Error {
        io(&self.path)(error)
    }

    /// Bytes that have come.
    fn count(&mut self, bytes: u64) -> Result<(), Error> {
        self.payload = self.payload.saturating_add(bytes);
        match self.predicted {
            Some(predicted) if self.payload > predicted => {
                Err(other_length(self.payload, predicted))
            }
            _ => Ok(()),
        }
    }

    /// As many pieces as the tokens have, or none of a state that is not cut.
    fn check_pieces(&self) -> Result<(), Error> {
        let (about, count) = (&self.about, self.about.piece_bytes.len());
        let wanted = about.tokens.len().div_ceil(about.piece_tokens as usize);
        if count == 0 || count == wanted {
            return Ok(());
        }
        let allowed = format!("{wanted} pieces, one per {} tokens", about.piece_tokens);
        Err(Error::input("rows", format!("{count} pieces"), allowed))
    }

    fn check_order(&self, member: &Member) -> Result<(), Error> {
        let refuse = |value: &str, allowed: String| Err(Error::input("member", value, allowed));
        let about = &self.about;
        match member {
            _ if self.coming.is_some() => refuse(
                "a second unfinished piece or object",
                "one piece or object at a time".into(),
            ),
            Member::Piece if !about.objects.is_empty() => refuse(
                "a piece after an object",
                "all pieces before the first object".into(),
            ),
            Member::Object(_) if about.objects.len() >= OBJECTS_MAX => {
                refuse("one more object", format!("at most {OBJECTS_MAX} objects"))
            }
            Member::Object(name) if about.objects.iter().any(|(other, _)| other == name) => refuse(
                &format!("{name:?} twice"),
                "objects with different names".into(),
            ),
            _ => Ok(()),
        }
    }

    /// The place of a member that comes at once.
    fn place(&mut self, member: Member, bytes: u64) -> Result<Place, Error> {
        self.check_order(&member)?;
        self.count(bytes)?;
        self.named(member, bytes)
    }

    fn named(&mut self, member: Member, bytes: u64) -> Result<Place, Error> {
        if bytes == 0 {
            return Err(Error::input("member", "0 bytes", "1 byte or more"));
        }
        let place = self.places.add(bytes).ok_or_else(|| too_long(bytes))?;
        self.sums
            .resize(self.places.chunks as usize, Checksum::default());
        match member {
            Member::Piece => self.about.piece_bytes.push(bytes),
            Member::Object(name) => self.about.objects.push((name, bytes)),
        }
        Ok(place)
    }

    /// Adds the chunks of a member.
    fn add(&self, batch: &mut Batch, place: Place, buffers: &[Buffer]) -> Result<(), Error> {
        let mut rest = Rest::of(buffers);
        for (chunk, begin, len) in place.chunks() {
            let from = rest.take(len as usize)?;
            self.add_chunk(batch, (chunk, place.at + begin, len), &from)?;
        }
        Ok(())
    }

    fn add_chunk(
        &self,
        batch: &mut Batch,
        (chunk, at, len): (u64, u64, u64),
        from: &[Buffer],
    ) -> Result<(), Error> {
        let mut to = self.file.buffer(at as usize, len as usize);
        if len < CHUNK {
            // The last one of its member: up to the next there is nothing.
            to.pad();
        }
        let id = part(self.about.namespace, self.key, chunk);
        batch.part(&id, from, &[to], None, chunk as u32)?;
        Ok(())
    }

    fn fly(&mut self, batch: Batch, slot: Option<Buffer>) {
        let bytes = batch.bytes();
        self.under_way += bytes;
        let flight = self.mover.submit(batch);
        self.flights.push_back((flight, bytes, slot));
    }

    /// Waits for the oldest that is under way.
    fn land(&mut self) -> Result<(), Error> {
        let Some((flight, bytes, slot)) = self.flights.pop_front() else {
            return Ok(());
        };
        self.under_way -= bytes;
        let outcomes = flight.wait();
        if let Some(slot) = slot {
            self.spare.push(Slot::back(slot));
        }
        for (chunk, outcome) in outcomes {
            let (sum, _) = outcome.map_err(|failure| failed(&self.path, failure))?;
            let Some(place) = self.sums.get_mut(chunk as usize) else {
                return Err(broken());
            };
            *place = sum;
        }
        Ok(())
    }

    /// A buffer for a part of a member.
    fn slot(&mut self) -> Result<Slot, Error> {
        loop {
            if let Some(slot) = self.spare.pop() {
                return Ok(slot);
            }
            let lent = self.flights.iter().filter(|(_, _, slot)| slot.is_some());
            if lent.count() < SLOTS {
                return Ok(Slot::new());
            }
            self.land()?;
        }
    }

    /// Begins to write what has come of the member.
    fn flush(&mut self) -> Result<(), Error> {
        let Some(coming) = &mut self.coming else {
            return Ok(());
        };
        let used = coming.slot.used as u64;
        if used == 0 {
            return Ok(());
        }
        let chunk = self.places.chunks + coming.written / CHUNK;
        let at = self.places.end.checked_add(coming.written);
        coming.written += used;
        let end = at.and_then(|at| at.checked_add(used)).and_then(page_up);
        let (Some(at), Some(end)) = (at, end) else {
            return Err(too_long(self.payload));
        };
        if self.sums.len() as u64 <= chunk {
            self.sums.resize(chunk as usize + 1, Checksum::default());
        }
        self.grow(end)?;
        let next = self.slot()?;
        let Some(coming) = &mut self.coming else {
            return Ok(());
        };
        let (whole, used_part) = std::mem::replace(&mut coming.slot, next).lend()?;
        let mut batch = self.mover.batch();
        self.add_chunk(&mut batch, (chunk, at, used), &[used_part])?;
        self.fly(batch, Some(whole));
        Ok(())
    }
}

impl Drop for SessionWriter {
    /// The engine's memory is its own again.
    fn drop(&mut self) {
        for (flight, _, _) in self.flights.drain(..) {
            flight.give_up();
        }
    }
}

impl std::fmt::Debug for SessionWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionWriter")
            .field("temporary", &self.temporary)
            .field("payload", &self.payload)
            .finish_non_exhaustive()
    }
}

fn bytes_of(buffers: &[Buffer]) -> u64 {
    buffers.iter().map(|buffer| buffer.len() as u64).sum()
}

fn too_long(bytes: u64) -> Error {
    Error::input("bytes", bytes, "at most the maximum size of a file")
}

fn other_length(payload: u64, predicted: u64) -> Error {
    let than = if payload < predicted { "" } else { "or more " };
    let value = format!("{payload} {than}bytes");
    Error::input(
        "payload",
        value,
        format!("{predicted} bytes, the predicted size"),
    )
}

fn broken() -> Error {
    Error::input("session", "a failed session", "a new session")
}
