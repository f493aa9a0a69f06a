//! Waiting without the interpreter's lock, with an eye on Ctrl-C.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors;

/// How long a wait may not notice a signal.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// A time-out in seconds; `None` (and infinity) waits without a limit.
pub(crate) fn timeout(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds.is_nan() || seconds < 0.0 => Err(errors::input(
            py,
            "timeout",
            seconds,
            "seconds, 0 or more, or None for no limit",
        )),
        // More than a Duration holds is no limit either.
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds).ok()),
    }
}

/// Waits by `reached`, which waits at most as long as it is told and answers whether it is done.
/// False when `timeout` passed first.
///
/// # Errors
/// What a signal handler raises, such as KeyboardInterrupt; what was waited for goes on.
pub(crate) fn until(
    py: Python<'_>,
    timeout: Option<Duration>,
    reached: impl Fn(Duration) -> bool + Sync,
) -> PyResult<bool> {
    if reached(Duration::ZERO) {
        return Ok(true);
    }
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map_or(SLICE, |at| at.saturating_duration_since(Instant::now()));
        if py.detach(|| reached(left.min(SLICE))) {
            return Ok(true);
        }
        py.check_signals()?;
        if left <= SLICE && deadline.is_some_and(|at| at <= Instant::now()) {
            return Ok(false);
        }
    }
}

thread_local! {
    /// What a signal handler has raised while this thread waited.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };

    /// Calls that this thread is in the middle of: a signal handler runs inside them.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

struct Inside;

impl Inside {
    fn enter() -> Inside {
        INSIDE.set(INSIDE.get() + 1);
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
    }
}

/// Runs a call that may wait for another process, without the interpreter's lock.
///
/// # Errors
/// What a signal handler raises: the call ends then, at once.
pub(crate) fn call<T: Send>(py: Python<'_>, run: impl FnOnce() -> T + Send) -> PyResult<T> {
    fn signalled() -> bool {
        Python::attach(|py| match py.check_signals() {
            Ok(()) => false,
            Err(raised) => {
                RAISED.set(Some(raised));
                true
            }
        })
    }
    let answer = {
        let _inside = Inside::enter();
        py.detach(|| kvdepot_store::interruptible(signalled, run))
    };
    match RAISED.take() {
        Some(raised) => Err(raised),
        None => Ok(answer),
    }
}

/// Closes something on a thread of its own and waits for it, but in a signal handler that runs
/// inside a call: the close waits for that call, and the call for the handler. There it goes on in
/// the background.
///
/// # Errors
/// What a signal handler raises.
pub(crate) fn close(py: Python<'_>, work: impl FnOnce() + Send + 'static) -> PyResult<()> {
    if INSIDE.get() == 0 {
        return on_thread(py, work);
    }
    let thread = std::thread::Builder::new().name("kvdepot-call".into());
    thread.spawn(work)?;
    Ok(())
}

/// Runs something that cannot be waited for in slices, on a thread of its own. A signal ends the
/// wait, not the work; its result is dropped then.
///
/// # Errors
/// What a signal handler raises.
pub(crate) fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let running = Running::start(work)?;
    let result = running.wait(py)?;
    running.join();
    Ok(result)
}

/// How long a start that nobody wants any more may take to undo what it has done. Then it goes on
/// alone, and what it leaves when the process ends meanwhile, the next start there removes.
const UNDO: Duration = Duration::from_secs(10);

thread_local! {
    /// Whether anybody still waits for what this thread opens.
    static UNWANTED: RefCell<Arc<AtomicBool>> = RefCell::default();
}

/// As [`on_thread`], for what makes something: a signal ends the work too, and is raised once what
/// was made is gone. A second signal is raised at once.
///
/// # Errors
/// What a signal handler raises.
pub(crate) fn opening<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    fn is_unwanted() -> bool {
        UNWANTED.with_borrow(|unwanted| unwanted.load(Ordering::Relaxed))
    }
    let unwanted = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&unwanted);
    let running = Running::start(move || {
        UNWANTED.set(theirs);
        kvdepot_store::interruptible(is_unwanted, work)
    })?;
    let raised = match running.wait(py) {
        Err(raised) => raised,
        opened => {
            running.join();
            return opened;
        }
    };
    unwanted.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    while begun.elapsed() < UNDO {
        // What comes too late is let go here, which closes it.
        let undone = py.detach(|| !matches!(running.answer(), Err(RecvTimeoutError::Timeout)));
        if undone {
            break;
        }
        py.check_signals()?;
    }
    Err(raised)
}

/// Work on a thread of its own.
struct Running<T> {
    thread: JoinHandle<()>,
    /// Locked for as long as it is waited for.
    finished: Mutex<Receiver<T>>,
}

impl<T: Send + 'static> Running<T> {
    fn start(work: impl FnOnce() -> T + Send + 'static) -> PyResult<Running<T>> {
        let (done, finished) = channel();
        let thread = std::thread::Builder::new()
            .name("kvdepot-call".into())
            .spawn(move || {
                // Nobody listens after a signal.
                let _heard = done.send(work());
            })?;
        Ok(Running {
            thread,
            finished: Mutex::new(finished),
        })
    }

    /// Its result, if there is one within a slice.
    fn answer(&self) -> Result<T, RecvTimeoutError> {
        match self.finished.lock() {
            Ok(finished) => finished.recv_timeout(SLICE),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        }
    }

    /// It has given its result and nothing left to do: whoever looks for our threads finds none.
    fn join(self) {
        drop(self.thread.join());
    }

    /// Its result, or what a signal handler raises.
    fn wait(&self, py: Python<'_>) -> PyResult<T> {
        loop {
            match py.detach(|| self.answer()) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(PyRuntimeError::new_err(
                        "kvdepot: the call's thread panicked",
                    ));
                }
            }
        }
    }
}
