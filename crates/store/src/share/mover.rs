//! A worker's end: the owner's media mapped here, and lanes of its own that move bytes straight
//! between them and the caller's memory.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_media::host::fork;
use kvdepot_media::{Access, Checksum, Copier, CopierConfig, Done, Mapping, Ticket};
use parking_lot::Mutex;

use super::placement::{self, Placement};
use super::wire::{self, Role};
use crate::buffers::BlockBuffers;
use crate::config::default_lanes;
use crate::gate::Gate;
use crate::journal::Journal;
use crate::populate;
use crate::{Error, parts};

/// How long attaching waits for the owner to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Moves bytes for an owner in another process of this host.
pub struct Mover {
    session: u64,
    media: Vec<Arc<Mapping>>,
    copier: Copier,
    gate: Arc<Gate>,
    /// Open as long as this process works for the owner.
    _socket: UnixStream,
}

/// What became of one placement.
type Moved = Option<Checksum>;

/// A batch under way. Dropping it changes nothing for the batch.
pub struct MoveJob {
    ticket: Ticket,
    report: Arc<Mutex<Report>>,
    bytes: u64,
    journal: Journal,
}

struct Report {
    moved: Vec<Moved>,
    /// Those whose bytes have another checksum than they should.
    corrupt: Vec<bool>,
    /// The first thing that went wrong.
    error: Option<String>,
    elapsed: Option<Duration>,
}

impl Mover {
    /// Attaches to the owner that listens at `socket`. With `write` it can fill reservations,
    /// and the next owner of a lasting medium waits for this process to end before it allocates.
    /// `lanes` and `slice_size` are the owner's, where its configuration names them and the
    /// argument does not.
    ///
    /// # Errors
    /// [`Error::Peer`] when nobody answers there, or with a refusal.
    pub fn attach(socket: &Path, lanes: Option<usize>, write: bool) -> Result<Mover, Error> {
        let at = |error: Error| match error {
            Error::Peer { reason, .. } => Error::Peer {
                socket: socket.display().to_string(),
                reason,
            },
            Error::Host(error) => Error::Peer {
                socket: socket.display().to_string(),
                reason: match error.io_kind() {
                    Some(ErrorKind::WouldBlock) => {
                        format!("no answer within {} s", PATIENCE.as_secs())
                    }
                    _ => error.to_string(),
                },
            },
            other => other,
        };
        let io = |source: std::io::Error| Error::Peer {
            socket: socket.display().to_string(),
            reason: source.to_string(),
        };
        let (role, access) = if write {
            (Role::Write, Access::ReadWrite)
        } else {
            (Role::Read, Access::ReadOnly)
        };
        // A child that this process forks must not keep the lock that comes with a descriptor.
        let (stream, welcome) = fork::between_forks(|| {
            let stream = UnixStream::connect(socket).map_err(io)?;
            stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
            stream.set_write_timeout(Some(PATIENCE)).map_err(io)?;
            wire::send_request(&stream, role)?;
            let welcome = wire::receive_welcome(&stream)?;
            Ok((stream, welcome))
        })
        .map_err(at)?;
        let media = welcome
            .media
            .into_iter()
            .map(|(len, fd)| Ok(Mapping::from_fd(fd, len, access)?))
            .collect::<Result<Vec<_>, Error>>()?;
        let mut config = CopierConfig::default();
        let lanes = lanes.or(welcome.terms.lanes);
        config.lanes = lanes.unwrap_or_else(default_lanes);
        config.slice_size = welcome.terms.slice_size;
        Ok(Mover {
            session: welcome.terms.session,
            media,
            copier: Copier::new(config)?,
            gate: Gate::new()?,
            _socket: stream,
        })
    }

    /// Copies the caller's memory into reservations, part `part` of each. Nothing is moved for
    /// placements of another owner, such as one that was there before.
    ///
    /// # Errors
    /// [`Error::Input`] for bytes that are no placement, or buffers that do not fit.
    pub fn store(
        &self,
        placements: &[Vec<u8>],
        buffers: &BlockBuffers,
        part: u32,
    ) -> Result<MoveJob, Error> {
        buffers.check(placements.len(), false)?;
        self.submit(placements, Some(buffers), part, true)
    }

    /// Copies part `part` of pinned blocks into the caller's memory, verified.
    ///
    /// # Errors
    /// As [`Mover::store`].
    pub fn load(
        &self,
        placements: &[Vec<u8>],
        buffers: &BlockBuffers,
        part: u32,
    ) -> Result<MoveJob, Error> {
        buffers.check(placements.len(), true)?;
        self.submit(placements, Some(buffers), part, false)
    }

    /// Hashes part `part` in place: after a device wrote a reservation (`expect` false), or
    /// before it reads a pinned block (`expect` true).
    ///
    /// # Errors
    /// As [`Mover::store`].
    pub fn hash(&self, placements: &[Vec<u8>], part: u32, expect: bool) -> Result<MoveJob, Error> {
        self.submit(placements, None, part, !expect)
    }

    /// Where part `part` of a placement lies, as `(medium, offset, length)` in payload order, for
    /// engines whose own copy engine moves the bytes. Nowhere for a placement of another owner.
    ///
    /// # Errors
    /// As [`Mover::store`].
    pub fn locate(&self, bytes: &[u8], part: u32) -> Result<Vec<(usize, u64, u64)>, Error> {
        let Some(placement) = self.decode(bytes, part)? else {
            return Ok(Vec::new());
        };
        let wanted = placement.parts[part as usize];
        let ranges = parts::ranges(&placement.extents, wanted.offset, wanted.len);
        Ok(ranges
            .map(|(offset, len)| (placement.medium as usize, offset, len))
            .collect())
    }

    /// The owner's media as mapped here, near to far.
    #[must_use]
    pub fn media(&self) -> Vec<kvdepot_media::Buffer> {
        self.media
            .iter()
            .filter_map(|medium| medium.buffer(0, medium.len()).ok())
            .collect()
    }

    /// `None` for a placement of another owner.
    fn decode(&self, bytes: &[u8], part: u32) -> Result<Option<Placement>, Error> {
        let placement = placement::decode(bytes)?;
        if placement.session != self.session || placement.medium as usize >= self.media.len() {
            return Ok(None);
        }
        if part as usize >= placement.parts.len() {
            return Err(Error::input(
                "part",
                part,
                format!("below the block's {} parts", placement.parts.len()),
            ));
        }
        Ok(Some(placement))
    }

    fn submit(
        &self,
        placements: &[Vec<u8>],
        buffers: Option<&BlockBuffers>,
        part: u32,
        store: bool,
    ) -> Result<MoveJob, Error> {
        let pass = self.gate.enter()?;
        let mut batch = self.copier.batch();
        let mut error = None;
        for (index, bytes) in placements.iter().enumerate() {
            let Some(placement) = self.decode(bytes, part)? else {
                error = Some("a placement of another owner".to_owned());
                continue;
            };
            let wanted = placement.parts[part as usize];
            let mapping = &self.media[placement.medium as usize];
            let medium = parts::buffers(mapping, &placement.extents, wanted.offset, wanted.len)?;
            let id = parts::part_id(&placement.identity, part, placement.parts.len() as u16);
            let expected = (!store).then_some(wanted.checksum);
            let tag = index as u32;
            match buffers.map(|buffers| (buffers.bytes(index), buffers.pieces(index))) {
                None => batch.hash_only(&id, &medium, expected, tag)?,
                Some((len, _)) if len != wanted.len => {
                    return Err(Error::input(
                        format!("buffers[{index}]"),
                        format!("{len} bytes"),
                        format!("{} bytes, the part's length", wanted.len),
                    ));
                }
                Some((_, pieces)) if store => batch.part(&id, pieces, &medium, expected, tag)?,
                Some((_, pieces)) => batch.part(&id, &medium, pieces, expected, tag)?,
            };
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
            for (tag, outcome) in done.parts() {
                match outcome {
                    Ok(outcome) if outcome.matches != Some(false) => {
                        report.moved[tag as usize] = Some(outcome.checksum);
                    }
                    Ok(_) => {
                        report.corrupt[tag as usize] = true;
                        report.note("a block does not have its checksum");
                    }
                    Err(failure) => report.note(&failure.to_string()),
                }
            }
            report.elapsed = Some(journal.elapsed());
            let done = report.moved.iter().flatten().count();
            drop(report);
            journal.finished(done);
            drop(pass);
        });
        Ok(MoveJob {
            ticket,
            report,
            bytes,
            journal,
        })
    }

    /// Makes the owner's media present in this process, so that the first moves do not stop for
    /// page faults. Memory that nobody has touched yet is allocated by this; of a file only what
    /// is in memory already is mapped, and nothing is read from its disk.
    ///
    /// # Errors
    /// [`Error::Closed`] when the mover is closed meanwhile, [`Error::Media`].
    pub fn populate(&self) -> Result<(), Error> {
        populate::now(&self.media, &self.gate)
    }

    /// As [`Mover::populate`], in a thread of its own that ends when the mover is closed.
    ///
    /// # Errors
    /// [`Error::Io`] when the thread cannot be started.
    pub fn populate_aside(&self) -> Result<(), Error> {
        populate::aside(self.media.clone(), Arc::clone(&self.gate))
    }

    /// Refuses new work, waits for what is under way, and ends the lanes. Every job is done then.
    pub fn close(&self) {
        self.gate.close();
        self.gate.wait_empty(Duration::MAX);
        self.copier.close();
    }
}

impl MoveJob {
    /// Waits until no lane touches the caller's memory any more; false when `timeout` passed
    /// first.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.ticket.wait(timeout)
    }

    /// Whether that is so now.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }

    /// The checksum of each part that was moved, and matched where one was expected; `None` for
    /// the others. All `None` before the job is done.
    #[must_use]
    pub fn checksums(&self) -> Vec<Option<Checksum>> {
        self.report.lock().moved.clone()
    }

    /// Which parts have another checksum than they should. Those that are neither here nor among
    /// [`MoveJob::checksums`] were not moved: nothing is known about their bytes.
    #[must_use]
    pub fn corrupt(&self) -> Vec<bool> {
        self.report.lock().corrupt.clone()
    }

    /// Bytes of the batch.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// From the call to the end of the last lane; so far, while it is under way.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let elapsed = self.report.lock().elapsed;
        elapsed.unwrap_or_else(|| self.journal.elapsed())
    }

    /// Why something failed, if something did; for people.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.report.lock().error.clone()
    }
}

impl Report {
    fn note(&mut self, what: &str) {
        if self.error.is_none() {
            self.error = Some(what.to_owned());
        }
    }
}
