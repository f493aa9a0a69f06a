//! A worker's end: the owner's media mapped here, and lanes of its own that move bytes straight
//! between them and the caller's memory.

pub(crate) mod attach;
mod doors;
pub(crate) mod duty;
mod files;
mod held;
pub(crate) mod job;
mod media;

use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::format::record::Packed;
use kvdepot_arena::gate::Gate;
use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{self as arena, Error, Place};
use kvdepot_host::dir;
use kvdepot_media::{Buffer, Copier, CopierConfig, Done};
use kvdepot_store::config::default_lanes;
use kvdepot_store::placement::{self, Holder, Placement};
use kvdepot_store::{BlockBuffers, BlockFile, Borrowed, Ends, Journal, Outside, populate};
use parking_lot::Mutex;

use crate::frame::hello::{Role, Welcome};
use attach::{PATIENCE, shake_hands};
use duty::{Duty, Shift};
use held::Held;
use job::{MoveJob, Report};
use media::Media;

/// A worker: copies bytes between its memory and the media of a depot in another process.
///
/// The scheduler of an engine reserves or pins blocks and sends their placements to its workers.
///
/// # Examples
///
/// ```
/// use kvdepot_service::Mover;
/// use kvdepot_store::{BlockBuffers, Buffer, Config, Key, NamespaceSpec};
/// use serde_json::json;
///
/// let dir = tempfile::tempdir()?;
/// let socket = dir.path().join("depot.sock");
/// let settings = json!({"cache": {"capacity": "1MiB"}, "socket": socket});
/// let depot = kvdepot_service::open(&Config::new("Cache", &settings)?)?;
/// # let spec = NamespaceSpec {
/// #     model: "m".into(),
/// #     dtype: "bfloat16".into(),
/// #     block_tokens: 16,
/// #     ..NamespaceSpec::default()
/// # };
/// let blocks = depot.namespace(&spec)?;
///
/// // The scheduler reserves a block of one part and sends the placement to a worker.
/// let key = Key([1; 32]);
/// let reservations = blocks.reserve(&[(key, vec![4096])])?;
/// let reservations: Vec<_> = reservations.into_iter().flatten().collect();
/// let placements = [reservations[0].placement()];
///
/// // The worker, in another process, copies part 0 and returns its checksum.
/// let worker = Mover::attach(&socket, Some(1), true)?;
/// let memory = BlockBuffers::whole([Buffer::from_vec(vec![7; 4096])]);
/// let job = worker.store(&placements, &memory, 0)?;
/// assert!(job.wait(None));
/// let checksums: Vec<_> = job.checksums().into_iter().flatten().collect();
///
/// // The scheduler publishes the block, and pins it for a load.
/// assert_eq!(blocks.commit(&reservations, &[checksums])?, [true]);
/// let pins: Vec<_> = blocks.pin(&[key], false)?.into_iter().flatten().collect();
/// let memory = Buffer::from_vec(vec![0; 4096]);
/// let buffers = BlockBuffers::whole([memory.clone()]);
/// let job = worker.load(&[pins[0].placement()], &buffers, 0)?;
/// assert!(job.wait(None) && job.corrupt() == [false]);
/// assert_eq!(memory.to_vec(), [7; 4096]);
/// blocks.unpin(&pins, true);
/// worker.close();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mover {
    /// Of the owner, and the seat of the client whose end this is.
    pub(crate) holder: Holder,
    /// Tells the owner for whom lanes here are at work.
    duty: Arc<Duty>,
    media: Arc<Media>,
    held: Held,
    /// Where more of them are asked for, and as whom.
    at: PathBuf,
    role: Role,
    pub(crate) copier: Copier,
    gate: Arc<Gate>,
    /// Open as long as this process works for the owner.
    pub(crate) socket: UnixStream,
}

/// What has a block's bytes.
pub(crate) enum Reached {
    Medium(Arc<dyn arena::Medium>),
    File(BlockFile),
}

impl Reached {
    pub(crate) fn ends(&self) -> &dyn Ends {
        match self {
            Reached::Medium(medium) => medium,
            Reached::File(file) => file,
        }
    }
}

impl Mover {
    /// Attaches to the server that listens at `socket`.
    ///
    /// If `write` is true, the worker can fill reservations. The next owner of a persistent medium
    /// then waits for this process to exit before it allocates space. `lanes` is the number of copy
    /// threads. If it is `None`, `lanes` of the server's configuration applies, if set.
    /// `slice_size` is always the server's.
    ///
    /// # Errors
    ///
    /// [`Error::Peer`] if no server listens at `socket`, or if it rejects the worker.
    pub fn attach(socket: &Path, lanes: Option<usize>, write: bool) -> Result<Mover, Error> {
        let role = if write { Role::Write } else { Role::Read };
        let (stream, welcome) = shake_hands(socket, role, PATIENCE)?;
        Mover::new(socket, stream, welcome, role, lanes)
    }

    /// The owner's socket.
    pub(crate) fn at(&self) -> &Path {
        &self.at
    }

    pub(crate) fn new(
        at: &Path,
        stream: UnixStream,
        welcome: Welcome,
        role: Role,
        lanes: Option<usize>,
    ) -> Result<Mover, Error> {
        let held = Held::default();
        held.learn(&welcome.media);
        let mut config = CopierConfig::default();
        let lanes = lanes.or(welcome.terms.lanes);
        config.lanes = lanes.unwrap_or_else(default_lanes);
        let media = Media::new(welcome.media, role, config.lanes)?;
        config.slice_size = welcome.terms.slice_size;
        Ok(Mover {
            holder: Holder {
                session: welcome.terms.session,
                seat: welcome.terms.seat,
            },
            duty: Duty::new(welcome.roster),
            media: Arc::new(media),
            held,
            at: at.into(),
            role,
            copier: Copier::new(config)?,
            gate: Gate::new()?,
            socket: stream,
        })
    }

    /// Releases the media when the server exits, and stops all copies then.
    ///
    /// The next owner of the media waits until this process has unmapped them before it allocates
    /// space. Batches in progress end first, and memory of [`Mover::media`] that is in use stays
    /// mapped.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the thread that watches the server cannot be started.
    pub fn end_with_owner(&self) -> Result<(), Error> {
        let io = |source| Error::Io {
            path: "cannot set up the socket".into(),
            source,
        };
        let mut socket = self.socket.try_clone().map_err(io)?;
        socket.set_read_timeout(None).map_err(io)?;
        let media = Arc::clone(&self.media);
        let watch = move || {
            // The owner says nothing here: what comes is the end.
            while let Err(error) = socket.read(&mut [0]) {
                if error.kind() != ErrorKind::Interrupted {
                    break;
                }
            }
            media.let_go();
        };
        let thread = std::thread::Builder::new().name("kvdepot-owner".into());
        thread.spawn(watch).map_err(io)?;
        Ok(())
    }

    /// Returns true if the worker has released the media because the server has exited.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.media.has_ended()
    }

    /// Copies the caller's memory into reservations: part `part` of each.
    ///
    /// Placements of another owner, for example an earlier one, are skipped.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] in each of these cases:
    ///
    /// * Bytes are not a placement.
    /// * The buffers do not match the placements.
    /// * The worker was attached without `write`.
    ///
    /// [`Error::Closed`] if the worker is closed.
    pub fn store(
        &self,
        placements: &[Vec<u8>],
        buffers: &BlockBuffers,
        part: u32,
    ) -> Result<MoveJob, Error> {
        if !self.role.writes() {
            return Err(Error::input(
                "write",
                false,
                "true (a worker that attached without `write` can only load)",
            ));
        }
        buffers.check(placements.len(), false)?;
        self.submit(placements, Some(buffers), part, true)
    }

    /// Copies part `part` of pinned blocks into the caller's memory, and verifies the bytes.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] if bytes are not a placement, or if the buffers do not match the
    ///   placements.
    /// * [`Error::Closed`] if the worker is closed.
    pub fn load(
        &self,
        placements: &[Vec<u8>],
        buffers: &BlockBuffers,
        part: u32,
    ) -> Result<MoveJob, Error> {
        buffers.check(placements.len(), true)?;
        self.submit(placements, Some(buffers), part, false)
    }

    /// Computes the checksums of part `part` in place.
    ///
    /// `expect` is false after a device has written a reservation, and true before a device reads a
    /// pinned block.
    ///
    /// # Errors
    ///
    /// * [`Error::Input`] if bytes are not a placement.
    /// * [`Error::Closed`] if the worker is closed.
    pub fn hash(&self, placements: &[Vec<u8>], part: u32, expect: bool) -> Result<MoveJob, Error> {
        self.submit(placements, None, part, !expect)
    }

    /// Returns the location of part `part` of a placement, as `(medium, offset, length)` in payload
    /// order.
    ///
    /// Engines whose own copy engine moves the bytes use it. Offsets and lengths are in bytes. The
    /// result is empty in each of these cases:
    ///
    /// * The placement is of another owner, or of a client that is gone.
    /// * The block is in a file or on another host.
    /// * Workers of an earlier owner may still write to the medium.
    ///
    /// The end of such copies cannot be observed. So pins and reservations of a client that dies
    /// stay until this process has exited too. After the death of the owner, the space is reused
    /// only when this process has exited. Therefore a worker must be attached with `write`.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if `bytes` are not a placement, or if the worker was attached without
    /// `write`.
    pub fn locate(&self, bytes: &[u8], part: u32) -> Result<Vec<(usize, u64, u64)>, Error> {
        if !self.role.writes() {
            return Err(Error::input(
                "write",
                false,
                "true (only a worker that attached with `write` may use addresses of the medium)",
            ));
        }
        let Some(placement) = self.decode(bytes, part)? else {
            return Ok(Vec::new());
        };
        let session = self.holder.session;
        // No device reads a file, or another host, by its address.
        if placement.outside.is_some() || !self.held.has(placement.medium, &self.at, session) {
            return Ok(Vec::new());
        }
        // The owner's own process needs no telling: all ends with it.
        if placement.holder.seat > 0 {
            match self.duty.begin(placement.holder.seat) {
                Some(shift) => shift.keep(),
                None => return Ok(Vec::new()),
            }
        }
        let wanted = placement.parts[part as usize];
        let ranges = parts::ranges(&placement.extents, wanted.offset, wanted.len);
        let Some(medium) = self.media.position(placement.medium) else {
            return Ok(Vec::new());
        };
        Ok(ranges.map(|(offset, len)| (medium, offset, len)).collect())
    }

    /// Returns the media of the server that are mapped in this process, first tier to last.
    #[must_use]
    pub fn media(&self) -> Vec<Buffer> {
        let media = self.media.mappings();
        let buffers = media.iter().map(|medium| medium.buffer(0, medium.len()));
        buffers.filter_map(Result::ok).collect()
    }

    /// Where a block's bytes lie, to be read or to be written as `access` says of a file; `None`
    /// when the owner has them no more.
    pub(crate) fn reach(
        &self,
        place: &Place,
        file: Option<&Outside>,
        access: dir::Access,
    ) -> Option<Reached> {
        let number = place.token.device;
        match file {
            Some(file) => self.file(number, file, access).map(Reached::File),
            None => self.medium(number, &place.extents).map(Reached::Medium),
        }
    }

    /// A block's file, where it is what the owner means. A directory that was removed is asked for
    /// anew: the owner has opened it again.
    fn file(&self, number: u32, at: &Outside, access: dir::Access) -> Option<BlockFile> {
        let files = &self.media.files;
        files.open(number, at, access).or_else(|| {
            if !files.is_removed(number) || self.has_ended() {
                return None;
            }
            if let Err(error) = self.ask_for_media() {
                tracing::warn!(%error, number,
                    "cannot reopen the directory of a tier; its blocks are misses");
            }
            files.open(number, at, access)
        })
    }

    /// A medium by its number, with all of these extents in it: one that is not open here yet, or
    /// has grown, is asked for.
    fn medium(&self, number: u32, extents: &Packed) -> Option<Arc<dyn arena::Medium>> {
        let end = extents.iter().map(|(at, len)| at + len).max().unwrap_or(0);
        let known = || self.media.find(number, end);
        known().or_else(|| {
            if self.has_ended() {
                return None;
            }
            if let Err(error) = self.ask_for_media() {
                tracing::warn!(%error, number, "cannot open a medium; its blocks are misses");
            }
            known()
        })
    }

    /// Lets a medium go, once no batch is at it.
    pub(crate) fn forget(&self, number: u32) {
        self.media.forget(number);
    }

    fn ask_for_media(&self) -> Result<(), Error> {
        let role = match self.role.writes() {
            true => Role::Write,
            false => Role::Read,
        };
        // The connection is only for the descriptors.
        let (_socket, welcome) = shake_hands(&self.at, role, PATIENCE)?;
        if welcome.terms.session != self.holder.session {
            return Ok(());
        }
        self.held.learn(&welcome.media);
        self.media.learn(welcome.media, role)
    }

    /// `None` for a placement of another owner.
    fn decode(&self, bytes: &[u8], part: u32) -> Result<Option<Placement>, Error> {
        let placement = placement::decode(bytes)?;
        if placement.holder.session != self.holder.session {
            return Ok(None);
        }
        if part as usize >= placement.parts.len() {
            return Err(Error::input(
                "part",
                part,
                format!(
                    "less than {}, the number of parts of the block",
                    placement.parts.len()
                ),
            ));
        }
        Ok(Some(placement))
    }

    /// Where a part of a placement lies, told into `ends`; false when the owner has it no more.
    fn buffers(
        &self,
        placement: &Placement,
        (part, store): (&Part, bool),
        borrowed: Option<&dyn Borrowed>,
        ends: &mut Vec<Buffer>,
    ) -> Result<bool, Error> {
        if let Some(borrowed) = borrowed {
            ends.clear();
            ends.push(borrowed.buffer(part.offset, part.len));
            return Ok(true);
        }
        if let Some(at) = &placement.outside {
            let access = match store {
                true => dir::Access::Write,
                false => dir::Access::Read,
            };
            let file = self.file(placement.medium, at, access);
            ends.clear();
            ends.extend(file.map(|file| file.payload(part.offset, part.len)));
            return Ok(!ends.is_empty());
        }
        let Some(medium) = self.medium(placement.medium, &placement.extents) else {
            return Ok(false);
        };
        parts::buffers(
            medium.as_ref(),
            &placement.extents,
            (part.offset, part.len),
            ends,
        )?;
        Ok(true)
    }

    fn submit(
        &self,
        placements: &[Vec<u8>],
        buffers: Option<&BlockBuffers>,
        part: u32,
        store: bool,
    ) -> Result<MoveJob, Error> {
        let pass = self.gate.enter().map_err(|error| match error {
            Error::Closed("") => {
                Error::Closed("the mover (connection to the server) is closed; attach again")
            }
            other => other,
        })?;
        let mut batch = self.copier.batch();
        let mut shifts: Vec<Shift> = Vec::new();
        let mut error = None;
        let bytes = match store {
            true => Bytes::New,
            false => Bytes::Verified,
        };
        let mut verdicts = Verdicts::new(bytes, placements.len());
        let mut medium = Vec::new();
        let placements = placements.iter().map(|bytes| self.decode(bytes, part));
        let placements = placements.collect::<Result<Vec<_>, Error>>()?;
        let borrows = match store {
            true => Vec::new(),
            false => self.media.doors.borrow(&placements),
        };
        let mut borrowed = borrows.iter().peekable();
        for (index, placement) in placements.iter().enumerate() {
            let lent = borrowed.next_if(|(at, _)| *at == index);
            let Some(placement) = placement else {
                error = Some("a placement from another depot".to_owned());
                continue;
            };
            let seat = placement.holder.seat;
            if seat > 0 && shifts.iter().all(|shift| shift.seat() != seat) {
                match self.duty.begin(seat) {
                    Some(shift) => shifts.push(shift),
                    None => {
                        error = Some("a placement of a client that has exited".to_owned());
                        continue;
                    }
                }
            }
            let wanted = placement.parts[part as usize];
            let lent = lent.map(|(_, lent)| lent.as_ref());
            if !self.buffers(placement, (&wanted, store), lent, &mut medium)? {
                error = Some("a medium that the server has removed".to_owned());
                continue;
            }
            let id = parts::part_id(&placement.identity, part, placement.parts.len() as u16);
            let expected = (!store).then_some(wanted.checksum);
            let tag = index as u32;
            match buffers.map(|buffers| (buffers.bytes(index), buffers.pieces(index))) {
                None => batch.hash_only(&id, &medium, expected, tag)?,
                Some((len, _)) if len != wanted.len => {
                    return Err(Error::input(
                        format!("buffers[{index}]"),
                        format!("{len} bytes"),
                        format!("{} bytes, the length of the part", wanted.len),
                    ));
                }
                Some((_, pieces)) if store => batch.part(&id, pieces, &medium, expected, tag)?,
                Some((_, pieces)) => batch.part(&id, &medium, pieces, expected, tag)?,
            };
            verdicts.planned(index, 1);
        }
        let bytes = batch.bytes();
        let op = match buffers {
            None => "hash",
            Some(_) if store => "store",
            Some(_) => "load",
        };
        let journal = Journal::dispatched(op, placements.len(), bytes);
        let report = Arc::new(Mutex::new(Report {
            moved: vec![None; placements.len()],
            corrupt: vec![false; placements.len()],
            error,
            elapsed: None,
        }));
        let results = Arc::clone(&report);
        let ticket = self.copier.submit(batch, move |done: &mut Done<'_>| {
            let mut report = results.lock();
            verdicts.count(done);
            for (at, moved) in verdicts.all().into_iter().enumerate() {
                match moved {
                    Moved::Done(checksum) => report.moved[at] = Some(checksum),
                    Moved::Corrupt => {
                        report.corrupt[at] = true;
                        report.note("checksum mismatch in a block");
                    }
                    Moved::Failed | Moved::Abandoned => {}
                }
            }
            if let Some(failure) = verdicts.failure() {
                report.note(&failure.to_string());
            }
            report.elapsed = Some(journal.elapsed());
            let done = report.moved.iter().flatten().count();
            drop(report);
            journal.finished(done);
            drop(borrows);
            drop(shifts);
            drop(pass);
        });
        Ok(MoveJob {
            ticket,
            report,
            bytes,
            journal,
        })
    }

    /// Prefaults the media of the server in this process, so that the first copies have no page
    /// faults.
    ///
    /// Memory that is still untouched is allocated. Of a file, only the pages that are already in
    /// memory are mapped; the call reads nothing from the disk.
    ///
    /// # Errors
    ///
    /// * [`Error::Closed`] if the worker is closed during the call.
    /// * [`Error::Media`] if the system rejects a request.
    pub fn populate(&self) -> Result<(), Error> {
        populate::now(&self.media.mappings(), &self.gate)
    }

    /// Prefaults the media like [`Mover::populate`], on a thread that ends when the worker is
    /// closed.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the thread cannot be started.
    pub fn populate_aside(&self) -> Result<(), Error> {
        populate::aside(self.media.mappings(), Arc::clone(&self.gate))
    }

    /// Rejects new jobs, waits until all jobs are done, and ends the copy threads.
    pub fn close(&self) {
        let Some(_closing) = self.gate.close() else {
            return;
        };
        self.gate.wait_empty(Duration::MAX);
        self.copier.close();
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // Of the process that attached, and in no forked child, whose descriptor it is too.
        if !self.gate.forked() {
            let _shut = self.socket.shutdown(Shutdown::Both);
        }
    }
}
