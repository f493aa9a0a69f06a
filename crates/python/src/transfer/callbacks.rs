//! What Python is told when a task is over: by a thread that has the interpreter when it needs it,
//! since those of an engine must not wait for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvdepot_host::Condvar;
use parking_lot::Mutex;
use pyo3::prelude::*;

/// Something to call with a task that is over.
pub(super) struct Call {
    pub(super) task: Py<PyAny>,
    pub(super) callback: Py<PyAny>,
}

impl Call {
    /// What it raises is reported, as what a finalizer raises is.
    pub(super) fn run(self, py: Python<'_>) {
        let callback = self.callback.bind(py);
        if let Err(raised) = callback.call1((self.task,)) {
            raised.write_unraisable(py, Some(callback));
        }
    }
}

/// The calls of an engine, in the order in which its tasks end.
#[derive(Default)]
pub(super) struct Callbacks {
    queue: Arc<Queue>,
    /// It is started by the first call that there is.
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    calls: VecDeque<Call>,
    is_over: bool,
}

impl Queue {
    /// Calls it soon; where nobody does any more, here.
    pub(super) fn push(&self, call: Call) {
        let mut waiting = self.waiting.lock();
        if !waiting.is_over {
            waiting.calls.push_back(call);
            drop(waiting);
            self.changed.notify_one();
            return;
        }
        drop(waiting);
        let mut call = Some(call);
        // Without an interpreter nobody is left to be told.
        Python::try_attach(|py| call.take().map(|call| call.run(py)));
    }

    fn run(&self) {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some(call) = waiting.calls.pop_front() {
                parking_lot::MutexGuard::unlocked(&mut waiting, || {
                    let mut call = Some(call);
                    Python::try_attach(|py| call.take().map(|call| call.run(py)));
                });
            } else if waiting.is_over {
                return;
            } else {
                self.changed.wait(&mut waiting);
            }
        }
    }
}

impl Callbacks {
    /// Where calls are queued, with a thread that takes them.
    pub(super) fn queue(&self) -> std::io::Result<Arc<Queue>> {
        let mut thread = self.thread.lock();
        if thread.is_none() && !self.queue.waiting.lock().is_over {
            let queue = Arc::clone(&self.queue);
            let named = thread::Builder::new().name("kvdepot-then".into());
            *thread = Some(named.spawn(move || queue.run())?);
        }
        Ok(Arc::clone(&self.queue))
    }

    /// Whether this thread is the one that calls.
    pub(super) fn is_here(&self) -> bool {
        let thread = self.thread.lock();
        let its = thread.as_ref().map(|thread| thread.thread().id());
        its == Some(thread::current().id())
    }

    /// Takes no more calls, and ends when those that wait are over; with `join` that is waited for.
    pub(super) fn close(&self, join: bool) {
        self.queue.waiting.lock().is_over = true;
        self.queue.changed.notify_one();
        let thread = if join {
            self.thread.lock().take()
        } else {
            None
        };
        // It catches nothing, and has nothing to say.
        drop(thread.map(JoinHandle::join));
    }
}
