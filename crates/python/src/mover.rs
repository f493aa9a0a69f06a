//! Movers: a worker process's end, for engines whose scheduler owns the depot elsewhere.

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use kvdepot_service::{MoveJob as ServiceJob, Mover as ServiceMover};
use kvdepot_store::{BlockBuffers, Buffer, Error, Origin};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PyTuple};

use crate::aside::{Beginner, HasMover, Job};
use crate::buffers::{self, Parsed};
use crate::handle::{self, Closing};
use crate::keep::{self, Keep};
use crate::view::View;
use crate::{arguments, errors, log, settings, wait};

/// The most lanes of a mover: a bound against a wrong unit, as in the configuration.
const LANES_MAX: usize = 256;

/// Attaches to the depot that listens at a socket, to copy blocks in this process.
///
/// The depot may be open in another process of this host or in this one.
///
/// Args:
///     socket: Path of the socket (`Depot.socket`), with or without "unix:" before it.
///     lanes: Number of copy threads, 1 to 256. Default: the server's setting, or else one per CPU,
///         at most 4.
///     write: Allow stores. With False the mover can only load and verify.
///     with_owner: Release the media when the server ends. With False, a mover that outlives the
///         server prevents the next owner from allocating.
///
/// Returns:
///     The mover. Close it, or use it as a context manager.
///
/// Raises:
///     InputError: `lanes` is out of range.
///     Error: The server at `socket` does not respond, or rejects the connection.
#[pyfunction]
#[pyo3(signature = (socket, lanes = None, write = true, with_owner = false))]
pub(crate) fn attach(
    py: Python<'_>,
    socket: PathBuf,
    lanes: Option<i128>,
    write: bool,
    with_owner: bool,
) -> PyResult<Mover> {
    log::start(py)?;
    let allowed = format!("1 to {LANES_MAX}");
    let lanes = lanes.map(|count| match usize::try_from(count) {
        Ok(lanes) if (1..=LANES_MAX).contains(&lanes) => Ok(lanes),
        _ => Err(errors::input(py, "lanes", count, &*allowed)),
    });
    let lanes = lanes.transpose()?;
    let socket = settings::bare(socket);
    let mover = wait::call(py, || {
        let mover = ServiceMover::attach(&socket, lanes, write)?;
        if with_owner {
            mover.end_with_owner()?;
        }
        Ok(mover)
    })?;
    let mover = mover.map_err(|error| errors::raise(py, error))?;
    let shared = Arc::new(Shared {
        mover: Some(mover),
        beginner: Beginner::default(),
        origin: Arc::new(handle::origin(py)?),
    });
    handle::register(&shared);
    Ok(Mover { shared })
}

/// The number of a part. Which there are depends on the block.
fn number_of(py: Python<'_>, part: i128) -> PyResult<u32> {
    arguments::whole(py, "part", part, "the number of a part, 0 or more")
}

struct Shared {
    /// `None` only while dropping.
    mover: Option<ServiceMover>,
    beginner: Beginner,
    /// Goes last: the thread that begins jobs may be who drops this.
    origin: Arc<Origin>,
}

impl HasMover for Shared {
    fn mover(&self) -> Option<&ServiceMover> {
        self.mover.as_ref()
    }
}

impl Closing for Shared {
    fn close(&self) {
        if let Some(mover) = &self.mover
            && self.origin.is_here()
        {
            self.beginner.close();
            mover.close();
        }
    }

    fn alive(&self) -> Weak<Origin> {
        Arc::downgrade(&self.origin)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        handle::drop_detached(self.mover.take());
    }
}

/// Worker that copies between the memory of this process and the tiers of a depot.
///
/// `attach` creates it. A context manager: leaving the block closes the mover. The process with the
/// depot reserves or pins blocks, and commits or unpins them after the copy.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct Mover {
    shared: Arc<Shared>,
}

impl Mover {
    fn here(&self, py: Python<'_>) -> PyResult<&ServiceMover> {
        if let Some(mover) = &self.shared.mover
            && self.shared.origin.is_here()
        {
            return Ok(mover);
        }
        let word = ": it was attached before this process was forked; attach again in this process";
        Err(errors::raise(py, Error::Closed(word)))
    }

    fn start(
        &self,
        py: Python<'_>,
        keep: Arc<Keep>,
        start: impl FnOnce(&ServiceMover) -> Result<ServiceJob, Error> + Send,
    ) -> PyResult<MoveJob> {
        keep::sweep(py);
        let mover = self.here(py)?;
        let job = py.detach(|| start(mover)).map_err(|error| {
            // Refused: no lane has seen the buffers.
            keep.release(py);
            errors::raise(py, error)
        });
        Ok(MoveJob {
            job: Job::Begun(job?),
            keep,
            origin: *self.shared.origin,
        })
    }

    fn moves(
        &self,
        py: Python<'_>,
        placements: &Bound<'_, PyAny>,
        (buffers, part): (&Bound<'_, PyAny>, i128),
        load: bool,
        background: bool,
    ) -> PyResult<MoveJob> {
        // First: a forked child may find a lane's locks held.
        self.here(py)?;
        let (list, part) = (read_placements(placements)?, number_of(py, part)?);
        if !background {
            let Parsed { blocks, keep } = buffers::parse(buffers, load)?;
            return self.start(py, keep, |mover| moved(mover, &list, &blocks, part, load));
        }
        keep::sweep(py);
        let given = buffers::read(buffers, load)?;
        let (keep, count) = (Arc::clone(&given.keep), list.len());
        let begin = move |mover: &ServiceMover| {
            let blocks = given.blocks().map_err(|refused| refused.to_string())?;
            moved(mover, &list, &blocks, part, load).map_err(|error| error.to_string())
        };
        let job = self.shared.beginner.begin(&self.shared, count, begin);
        Ok(MoveJob {
            job,
            keep,
            origin: *self.shared.origin,
        })
    }

    fn hash(&self, placements: &Bound<'_, PyAny>, part: u32, expect: bool) -> PyResult<MoveJob> {
        let list = read_placements(placements)?;
        let keep = Keep::new(Vec::new());
        self.start(placements.py(), keep, |mover| {
            mover.hash(&list, part, expect)
        })
    }
}

#[pymethods]
impl Mover {
    /// Copies memory into reserved blocks, in the background.
    ///
    /// Args:
    ///     placements: `Reservation.placement` of each block.
    ///     buffers: Memory per block, of the length of the part, or one `Spans` with a row per
    ///         block, as in `Namespace.put`.
    ///     part: Number of the part of each block, from 0.
    ///     background: Return before the buffers are prepared, which a thread of the mover does.
    ///         Errors of buffers, and of a closed mover, are then in `MoveJob.error`, with
    ///         `rejected` True.
    ///
    /// Returns:
    ///     A job with one checksum per block.
    ///
    /// Raises:
    ///     InputError: A placement or buffer is unsuitable.
    ///     ClosedError: The mover was closed.
    #[pyo3(signature = (placements, buffers, part = 0, *, background = false))]
    fn store(
        &self,
        py: Python<'_>,
        placements: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        part: i128,
        background: bool,
    ) -> PyResult<MoveJob> {
        self.moves(py, placements, (buffers, part), false, background)
    }

    /// Copies pinned blocks into memory and verifies them, in the background.
    ///
    /// Args:
    ///     placements: `Pin.placement` of each block.
    ///     buffers: Writable memory per block, of the length of the part, or one `Spans` with a row
    ///         per block, as in `Namespace.get`.
    ///     part: Number of the part of each block, from 0.
    ///     background: Return before the buffers are prepared, as in `store`.
    ///
    /// Returns:
    ///     A job with one result per block.
    ///
    /// Raises:
    ///     InputError: A placement or buffer is unsuitable.
    ///     ClosedError: The mover was closed.
    #[pyo3(signature = (placements, buffers, part = 0, *, background = false))]
    fn load(
        &self,
        py: Python<'_>,
        placements: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        part: i128,
        background: bool,
    ) -> PyResult<MoveJob> {
        self.moves(py, placements, (buffers, part), true, background)
    }

    /// Hashes reserved blocks that another program, such as a device, has written.
    ///
    /// Args:
    ///     placements: `Reservation.placement` of each block.
    ///     part: Number of the part of each block, from 0.
    ///
    /// Returns:
    ///     A job with one checksum per block, for `Namespace.commit`.
    ///
    /// Raises:
    ///     InputError: A placement is unsuitable.
    ///     ClosedError: The mover was closed.
    #[pyo3(signature = (placements, part = 0))]
    fn digest(&self, placements: &Bound<'_, PyAny>, part: i128) -> PyResult<MoveJob> {
        self.hash(placements, number_of(placements.py(), part)?, false)
    }

    /// Verifies pinned blocks in place, before another program, such as a device, reads them.
    ///
    /// Args:
    ///     placements: `Pin.placement` of each block.
    ///     part: Number of the part of each block, from 0.
    ///
    /// Returns:
    ///     A job with one result per block.
    ///
    /// Raises:
    ///     InputError: A placement is unsuitable.
    ///     ClosedError: The mover was closed.
    #[pyo3(signature = (placements, part = 0))]
    fn verify(&self, placements: &Bound<'_, PyAny>, part: i128) -> PyResult<MoveJob> {
        self.hash(placements, number_of(placements.py(), part)?, true)
    }

    /// Returns the location of a part of each block in `media`.
    ///
    /// Args:
    ///     placements: Placements of pins or reservations.
    ///     part: Number of the part of each block, from 0.
    ///
    /// Returns:
    ///     (index in `media`, offset, length) per block, in bytes. None for a block in several
    ///     pieces, for a placement of another owner, and while processes of an earlier owner may
    ///     still write.
    ///
    /// Raises:
    ///     InputError: A placement is unsuitable, or the mover was attached with `write=False`.
    #[pyo3(signature = (placements, part = 0))]
    fn locate(
        &self,
        py: Python<'_>,
        placements: &Bound<'_, PyAny>,
        part: i128,
    ) -> PyResult<Vec<Option<(usize, u64, u64)>>> {
        let mover = self.here(py)?;
        let (list, part) = (read_placements(placements)?, number_of(py, part)?);
        let locate = |placement: &Vec<u8>| -> Result<_, Error> {
            let found = mover.locate(placement, part)?;
            Ok(match found.as_slice() {
                [one] => Some(*one),
                _ => None,
            })
        };
        // The owner may be asked.
        let places = wait::call(py, || list.iter().map(locate).collect::<Result<_, _>>())?;
        places.map_err(|error| errors::raise(py, error))
    }

    /// The tiers as mapped in this process, first to last.
    ///
    /// One memory view per medium, read-only with `write=False`.
    #[getter]
    fn media<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut views = Vec::new();
        for memory in self.here(py)?.media() {
            let medium = Bound::new(py, Medium { memory })?;
            views.push(PyMemoryView::from(&medium)?);
        }
        PyList::new(py, views)
    }

    /// True if the mover has ended with its server.
    ///
    /// That happens with `with_owner=True` only. The mover copies nothing then; attach again.
    #[getter]
    fn ended(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.here(py)?.has_ended())
    }

    /// Maps the media in this process, so that the first copies take no page faults.
    ///
    /// The call allocates memory that has not been used yet. Of a file, only pages that are in
    /// memory are mapped; the disk is not read.
    ///
    /// Args:
    ///     wait: Return when it is complete. With False, a thread does it in the background.
    ///
    /// Raises:
    ///     Error: The media cannot be mapped, or the thread cannot be started.
    #[pyo3(signature = (*, wait = false))]
    fn prefault(&self, py: Python<'_>, wait: bool) -> PyResult<()> {
        let mover = self.here(py)?;
        let populated = if wait {
            let shared = Arc::clone(&self.shared);
            wait::on_thread(py, move || {
                shared.mover.as_ref().map_or(Ok(()), ServiceMover::populate)
            })?
        } else {
            py.detach(|| mover.populate_aside())
        };
        populated.map_err(|error| errors::raise(py, error))
    }

    /// Rejects new jobs and waits for jobs in progress.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let shared = Arc::clone(&self.shared);
        wait::close(py, move || shared.close())
    }

    fn __enter__(slf: Py<Mover>) -> Py<Mover> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

fn moved(
    mover: &ServiceMover,
    placements: &[Vec<u8>],
    blocks: &BlockBuffers,
    part: u32,
    load: bool,
) -> Result<ServiceJob, Error> {
    match load {
        true => mover.load(placements, blocks, part),
        false => mover.store(placements, blocks, part),
    }
}

fn read_placements(placements: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u8>>> {
    let py = placements.py();
    let mut list = Vec::new();
    for (index, item) in placements.try_iter()?.enumerate() {
        let item = item?;
        if let Ok(bytes) = item.cast::<PyBytes>() {
            list.push(bytes.as_bytes().to_vec());
            continue;
        }
        match View::in_rows(&item) {
            Ok(Some(view)) => list.push(view.to_vec()),
            _ => {
                let field = format!("placements[{index}]");
                let allowed = "bytes from the `placement` of a Pin or a Reservation";
                return Err(errors::input(py, field, errors::shown(&item), allowed));
            }
        }
    }
    Ok(list)
}

/// A mapped tier, for the buffer protocol.
#[pyclass(frozen, module = "kvdepot")]
struct Medium {
    memory: Buffer,
}

#[pymethods]
impl Medium {
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let memory = &slf.get().memory;
        let Ok(len) = isize::try_from(memory.len()) else {
            return Err(PyBufferError::new_err(
                "the medium is too large for one view",
            ));
        };
        let start = std::ptr::with_exposed_provenance_mut(memory.addr());
        let fixed = c_int::from(!memory.is_writable());
        // SAFETY: `view` is the interpreter's to fill. The view holds a reference to `slf`, whose
        // buffer keeps the range mapped, and writable unless `fixed` says otherwise.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, len, fixed, flags) };
        if filled < 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        Ok(())
    }
}

/// A batch of copies of a mover.
///
/// Failures of blocks are values of its members rather than exceptions.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct MoveJob {
    job: Job,
    keep: Arc<Keep>,
    origin: Origin,
}

#[pymethods]
impl MoveJob {
    /// Waits until the copy threads have stopped using the memory.
    ///
    /// Args:
    ///     timeout: Seconds to wait. Default: no limit.
    ///
    /// Returns:
    ///     False if the wait timed out. The job continues.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::timeout(py, timeout)?;
        if !self.origin.is_here() {
            let word = ": the job was started before this process was forked";
            return Err(errors::raise(py, Error::Closed(word)));
        }
        let done = wait::until(py, limit, |slice| self.job.wait(slice))?;
        if done {
            self.keep.release(py);
        }
        Ok(done)
    }

    /// True when the copy threads have stopped using the memory.
    #[getter]
    fn done(&self, py: Python<'_>) -> bool {
        let done = self.job.is_done();
        if done {
            self.keep.release(py);
        }
        done
    }

    /// The 16-byte checksum of each part that was copied; None for those that failed.
    #[getter]
    fn checksums<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let sums = self.job.checksums();
        PyList::new(
            py,
            sums.iter()
                .map(|sum| sum.map(|sum| PyBytes::new(py, &sum.0))),
        )
    }

    /// One bool per part: true if it was copied, and verified if it has a checksum.
    #[getter]
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.job.checksums().iter().map(Option::is_some))
    }

    /// True when the job has ended and all `results` are true.
    #[getter]
    fn whole(&self) -> bool {
        self.job.is_done() && self.job.checksums().iter().all(Option::is_some)
    }

    /// One bool per part: true if its checksum did not match.
    ///
    /// If a part is false here and in `results`, it was not copied, and its bytes are unknown.
    #[getter]
    fn corrupt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.job.corrupt())
    }

    /// Size of the job in bytes, copied or not.
    #[getter]
    fn bytes(&self) -> u64 {
        self.job.bytes()
    }

    /// Seconds until the last copy ended, or until now for a job in progress.
    ///
    /// The time starts with the call, or with `background` when the thread began the job.
    #[getter]
    fn seconds(&self) -> f64 {
        self.job.elapsed().as_secs_f64()
    }

    /// True if a job with `background` was rejected.
    ///
    /// Then nothing was copied, and `error` has the reason.
    #[getter]
    fn rejected(&self) -> bool {
        self.job.is_refused()
    }

    /// The first reason of a failure, for a log line; None without one.
    #[getter]
    fn error(&self) -> Option<String> {
        self.job.error()
    }
}
