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

/// Attaches to the depot that listens at `socket`, in another process of this host or in this
/// one: a path, with `unix:` before it or without. `lanes` is the number of threads that move
/// bytes. Without `write` it can only load. With `with_owner` it ends with its owner: a mover that
/// outlives it keeps the next owner from allocating.
///
/// Raises Error when nobody answers there.
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
    arguments::whole(py, "part", part, "a part's number, from 0")
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

/// Moves bytes between this process's memory and an owner's tiers. A context manager: leaving it
/// closes it.
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
        let word = ": it belongs to the process this one was forked from; attach here";
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
        aside: bool,
    ) -> PyResult<MoveJob> {
        // First: a forked child may find a lane's locks held.
        self.here(py)?;
        let (list, part) = (read_placements(placements)?, number_of(py, part)?);
        if !aside {
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
    /// Copies memory into reserved blocks, part `part` of each. `buffers` is as in put. With
    /// `aside` a thread of the mover's begins it, and the call returns at once: what it would raise
    /// of buffers that do not fit, or of a closed mover, is in `error` then, with `refused`.
    #[pyo3(signature = (placements, buffers, part = 0, *, aside = false))]
    fn store(
        &self,
        py: Python<'_>,
        placements: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        part: i128,
        aside: bool,
    ) -> PyResult<MoveJob> {
        self.moves(py, placements, (buffers, part), false, aside)
    }

    /// Copies part `part` of pinned blocks into memory, verified. `buffers` is as in get, `aside`
    /// as in store.
    #[pyo3(signature = (placements, buffers, part = 0, *, aside = false))]
    fn load(
        &self,
        py: Python<'_>,
        placements: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        part: i128,
        aside: bool,
    ) -> PyResult<MoveJob> {
        self.moves(py, placements, (buffers, part), true, aside)
    }

    /// Hashes reserved blocks where they are, after a device has written them.
    #[pyo3(signature = (placements, part = 0))]
    fn digest(&self, placements: &Bound<'_, PyAny>, part: i128) -> PyResult<MoveJob> {
        self.hash(placements, number_of(placements.py(), part)?, false)
    }

    /// Verifies pinned blocks where they are, before a device reads them.
    #[pyo3(signature = (placements, part = 0))]
    fn verify(&self, placements: &Bound<'_, PyAny>, part: i128) -> PyResult<MoveJob> {
        self.hash(placements, number_of(placements.py(), part)?, true)
    }

    /// Where part `part` of each block lies: (index in `media`, offset, length). None for a
    /// placement of another owner, and for a block in several pieces; and while processes of an
    /// earlier owner may still write there. InputError without `write`.
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

    /// The owner's tiers as mapped here, near to far: writable memory views, or read-only ones
    /// without `write`.
    #[getter]
    fn media<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut views = Vec::new();
        for memory in self.here(py)?.media() {
            let medium = Bound::new(py, Medium { memory })?;
            views.push(PyMemoryView::from(&medium)?);
        }
        PyList::new(py, views)
    }

    /// Whether it has ended with its owner, as `with_owner` asks for: nothing is moved any more.
    #[getter]
    fn ended(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.here(py)?.has_ended())
    }

    /// Makes the owner's media present in this process, so that the first moves do not stop for
    /// page faults; without `wait`, in the background. Memory that nobody has touched yet is
    /// allocated by this; of a file only what is in memory already is mapped, and nothing is read
    /// from its disk.
    #[pyo3(signature = (*, wait = false))]
    fn populate(&self, py: Python<'_>, wait: bool) -> PyResult<()> {
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

    /// Refuses new work and waits for what is under way.
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
                let allowed = "the bytes of a pin's or reservation's placement";
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
            return Err(PyBufferError::new_err("a medium too large for one view"));
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

/// A batch under way. None of its members raises for what became of a block.
#[pyclass(frozen, module = "kvdepot")]
pub(crate) struct MoveJob {
    job: Job,
    keep: Arc<Keep>,
    origin: Origin,
}

#[pymethods]
impl MoveJob {
    /// Waits until the memory is no longer touched; false when `timeout` seconds passed first.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = wait::timeout(py, timeout)?;
        if !self.origin.is_here() {
            let word = ": the job belongs to the process this one was forked from";
            return Err(errors::raise(py, Error::Closed(word)));
        }
        let done = wait::until(py, limit, |slice| self.job.wait(slice))?;
        if done {
            self.keep.release(py);
        }
        Ok(done)
    }

    /// Whether the memory is no longer touched.
    #[getter]
    fn done(&self, py: Python<'_>) -> bool {
        let done = self.job.is_done();
        if done {
            self.keep.release(py);
        }
        done
    }

    /// The 16-byte checksum of each part that was moved; None for those that failed.
    #[getter]
    fn checksums<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let sums = self.job.checksums();
        PyList::new(
            py,
            sums.iter()
                .map(|sum| sum.map(|sum| PyBytes::new(py, &sum.0))),
        )
    }

    /// Whether each part was moved, and verified where it had a checksum.
    #[getter]
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.job.checksums().iter().map(Option::is_some))
    }

    /// Whether all of it has ended, and every part was moved, and verified where it had a checksum:
    /// mostly nobody need look at each.
    #[getter]
    fn whole(&self) -> bool {
        self.job.is_done() && self.job.checksums().iter().all(Option::is_some)
    }

    /// Whether each part has another checksum than it should. One that is false here and in
    /// `results` was not moved: nothing is known about its bytes.
    #[getter]
    fn corrupt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.job.corrupt())
    }

    /// Bytes of the job, moved or not.
    #[getter]
    fn bytes(&self) -> u64 {
        self.job.bytes()
    }

    /// Seconds from the call, or with `aside` from when it was begun, to the end of the last lane;
    /// so far, while it is under way.
    #[getter]
    fn seconds(&self) -> f64 {
        self.job.elapsed().as_secs_f64()
    }

    /// Whether a job with `aside` was refused: nothing was moved, and `error` says why.
    #[getter]
    fn refused(&self) -> bool {
        self.job.is_refused()
    }

    /// Why something failed, for a log line; None when nothing did.
    #[getter]
    fn error(&self) -> Option<String> {
        self.job.error()
    }
}
