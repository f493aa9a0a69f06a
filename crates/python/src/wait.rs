//! Waiting without the interpreter's lock, with an eye on Ctrl-C.

use std::cell::Cell;
use std::sync::mpsc::{RecvTimeoutError, channel};
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
            "seconds from 0, or None for no limit",
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
    let (done, finished) = channel();
    let spawned = std::thread::Builder::new()
        .name("kvdepot-call".into())
        .spawn(move || {
            // Nobody listens after a signal.
            let _heard = done.send(work());
        });
    let thread = spawned?;
    let finished = std::sync::Mutex::new(finished);
    loop {
        let answer = py.detach(|| match finished.lock() {
            Ok(finished) => finished.recv_timeout(SLICE),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        });
        match answer {
            Ok(result) => {
                // It has nothing left to do: whoever looks for our threads finds none.
                drop(thread.join());
                return Ok(result);
            }
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err(
                    "kvdepot: the call's thread panicked",
                ));
            }
        }
    }
}
