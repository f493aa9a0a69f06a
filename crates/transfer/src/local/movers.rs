//! Threads that copy slices between this process and its neighbours.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use kvdepot_host::Condvar;
use parking_lot::Mutex;

use crate::error::{Error, Fault};
use crate::flight::Flight;
use crate::task::PRIORITIES;

/// Memory that a neighbour has lent.
pub(crate) trait Lends: Send + Sync {
    /// Copies a slice; it is given back where that cannot be done from here.
    fn carry(&self, flight: Flight) -> Result<(), Flight>;

    /// Moves a slice by a connection.
    fn by_connection(&self, flight: Flight);
}

#[derive(Default)]
struct State {
    queues: [VecDeque<(Flight, Arc<dyn Lends>)>; PRIORITIES],
    busy: usize,
    waiting: usize,
    is_closing: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

/// The threads, which are started by the first slice.
pub(crate) struct Movers {
    shared: Arc<Shared>,
    count: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Movers {
    pub(crate) fn new(count: usize) -> Movers {
        Movers {
            shared: Arc::default(),
            count,
            threads: Mutex::default(),
        }
    }

    fn start(&self) -> Result<(), Error> {
        let mut threads = self.threads.lock();
        while threads.len() < self.count {
            let shared = Arc::clone(&self.shared);
            let name = format!("kvdepot-near-{}", threads.len());
            let thread = kvdepot_host::cpu::spawn(&name, move || shared.run());
            match thread {
                Ok(thread) => threads.push(thread),
                // One is enough.
                Err(_) if !threads.is_empty() => return Ok(()),
                Err(error) => return Err(Error::io("start a thread")(error)),
            }
        }
        Ok(())
    }

    /// Queues a slice of a window that is mapped.
    pub(crate) fn submit(&self, flight: Flight, opened: &Arc<dyn Lends>) {
        if self.start().is_err() {
            opened.by_connection(flight);
            return;
        }
        let mut state = self.shared.state.lock();
        if state.is_closing {
            drop(state);
            flight.end(Err(Fault::Closed));
            return;
        }
        state.queues[flight.priority()].push_back((flight, Arc::clone(opened)));
        let sleeps = state.waiting > 0;
        drop(state);
        if sleeps {
            self.shared.wake.notify_one();
        }
    }

    /// Ends slices that wait, as far as these `ends` say. Those that are being copied end by
    /// themselves, at once.
    pub(crate) fn cancel(&self, ends: impl Fn(&Flight) -> bool) {
        let mut ended = Vec::new();
        let mut state = self.shared.state.lock();
        for queue in &mut state.queues {
            for (flight, opened) in std::mem::take(queue) {
                match ends(&flight) {
                    true => ended.push(flight),
                    false => queue.push_back((flight, opened)),
                }
            }
        }
        drop(state);
        for flight in ended {
            let cause = flight.cause().unwrap_or(Fault::Cancelled);
            flight.end(Err(cause));
        }
    }

    /// Whether nothing waits, and nothing is being copied.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.shared.state.lock();
        state.busy == 0 && state.queues.iter().all(VecDeque::is_empty)
    }

    /// Ends the threads.
    pub(crate) fn close(&self) {
        self.shared.state.lock().is_closing = true;
        self.shared.wake.notify_all();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // It catches nothing, and has nothing to say.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            let next = state.queues.iter_mut().find_map(VecDeque::pop_front);
            let Some((flight, opened)) = next else {
                if state.is_closing {
                    return;
                }
                state.waiting += 1;
                self.wake.wait(&mut state);
                state.waiting -= 1;
                continue;
            };
            state.busy += 1;
            let is_closing = state.is_closing;
            drop(state);
            if is_closing {
                flight.end(Err(Fault::Closed));
            } else if let Err(flight) = opened.carry(flight) {
                // The neighbour wants its memory back: what is left goes by the network.
                opened.by_connection(flight);
            }
            // The last one unmaps it, and tells the neighbour: not under the lock.
            drop(opened);
            state = self.state.lock();
            state.busy -= 1;
        }
    }
}
