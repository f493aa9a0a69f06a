//! What an initiator has here: the numbers of its grants, and its connections.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvdepot_host::EachMinute;
use parking_lot::Mutex;

use super::served::Served;
use crate::grant::Grant;
use crate::rdma::{Exposed, Fabric, Joined};

/// Most grants that an initiator may have open.
const GRANTS_MAX: usize = 1 << 20;

pub(super) struct Session {
    pub(super) engine: [u8; 16],
    opened: Mutex<HashMap<u32, Arc<Grant>>>,
    far: Mutex<Far>,
    lanes: Mutex<Lanes>,
}

/// What devices do for it.
#[derive(Default)]
struct Far {
    joined: Option<Joined>,
    exposed: HashMap<u32, Exposed>,
}

#[derive(Default)]
struct Lanes {
    all: HashMap<u32, Arc<Served>>,
    /// Since when there is none.
    left: Option<Instant>,
}

impl Session {
    pub(super) fn new(engine: [u8; 16]) -> Session {
        let lanes = Lanes {
            left: Some(Instant::now()),
            ..Lanes::default()
        };
        Session {
            engine,
            opened: Mutex::default(),
            far: Mutex::default(),
            lanes: Mutex::new(lanes),
        }
    }

    /// The next of `numbers` for a grant; `None` where there are too many.
    pub(super) fn open(&self, grant: Arc<Grant>, numbers: &AtomicU32) -> Option<u32> {
        let mut opened = self.opened.lock();
        if opened.len() >= GRANTS_MAX {
            // What does not hold any more is of no use to anybody.
            opened.retain(|_, grant| grant.holds());
        }
        if opened.len() >= GRANTS_MAX {
            return None;
        }
        let number = std::iter::repeat_with(|| numbers.fetch_add(1, Ordering::Relaxed))
            .find(|number| !opened.contains_key(number))?;
        opened.insert(number, grant);
        Some(number)
    }

    pub(super) fn find(&self, number: u32) -> Option<Arc<Grant>> {
        self.opened.lock().get(&number).cloned()
    }

    pub(super) fn close(&self, number: u32) {
        self.opened.lock().remove(&number);
        self.far.lock().exposed.remove(&number);
    }

    /// Connects devices of both ends, in the place of those that were before; what the initiator
    /// has to know. `failures` limits the lines of the log.
    pub(super) fn join(
        &self,
        fabric: &Fabric,
        ends: &[u8],
        failures: &EachMinute,
    ) -> Option<Vec<u8>> {
        let mut far = self.far.lock();
        // Nothing that was asked of them before arrives any more.
        far.joined = None;
        if ends.is_empty() {
            return Some(Vec::new());
        }
        let joined = Joined::new(fabric, ends);
        let joined = joined.inspect_err(|error| {
            if let Some(unsaid) = failures.may_say() {
                tracing::warn!(%error, unsaid,
                    "RDMA connection from another host failed; using TCP");
            }
        });
        let (joined, said) = joined.ok()?;
        far.joined = Some(joined);
        Some(said)
    }

    /// Lets the devices that are joined know a grant; what the initiator has to know.
    pub(super) fn expose(&self, fabric: &Fabric, number: u32) -> Option<Vec<u8>> {
        let grant = self.find(number)?;
        let mut far = self.far.lock();
        let devices = far.joined.as_ref().map(Joined::devices)?;
        let (exposed, said) = Exposed::new(fabric, devices, &grant)?;
        far.exposed.insert(number, exposed);
        Some(said)
    }

    /// Devices know a grant no more.
    pub(super) fn unexpose(&self, grant: &Arc<Grant>) {
        let mut far = self.far.lock();
        far.exposed.retain(|_, exposed| !exposed.is_of(grant));
    }

    /// A connection is about to be in it.
    pub(super) fn expect(&self) {
        self.lanes.lock().left = None;
    }

    /// A connection is the lane's from now on. The one before has ended when this returns.
    pub(super) fn enter(&self, lane: u32, served: &Arc<Served>) {
        let before = {
            let mut lanes = self.lanes.lock();
            lanes.left = None;
            lanes.all.insert(lane, Arc::clone(served))
        };
        if let Some(before) = before {
            before.kill();
            before.wait();
        }
    }

    /// A connection has ended; whether it was the last one.
    pub(super) fn leave(&self, lane: u32, served: &Arc<Served>) -> bool {
        let mut lanes = self.lanes.lock();
        if lanes
            .all
            .get(&lane)
            .is_some_and(|one| Arc::ptr_eq(one, served))
        {
            lanes.all.remove(&lane);
        }
        let is_last = lanes.all.is_empty();
        if is_last {
            lanes.left = Some(Instant::now());
            let far = std::mem::take(&mut *self.far.lock());
            drop(lanes);
            // First what reaches the memory, then what is known of it.
            drop(far.joined);
            drop(far.exposed);
        }
        is_last
    }

    /// Whether it has had no connection for so long.
    pub(super) fn is_left(&self, now: Instant, long: Duration) -> bool {
        let left = self.lanes.lock().left;
        left.is_some_and(|left| now.saturating_duration_since(left) >= long)
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_testkit::log::Log;

    use super::*;
    use crate::verbs::ENDPOINT_LEN;
    use crate::verbs::tests::double;

    #[test]
    fn devices_that_are_not_joined_are_one_line_a_minute() {
        let fabric = Fabric::of(double::open("double0")).unwrap();
        let (session, failures) = (Session::new([7; 16]), EachMinute::default());
        let (log, begun) = (Log::default(), Instant::now());
        tracing::subscriber::with_default(log.clone(), || {
            for _ in 0..100 {
                // Not the end of a queue pair.
                let joined = session.join(&fabric, &[0xFF; ENDPOINT_LEN], &failures);
                assert!(joined.is_none());
            }
        });
        let lines = log.lines_with("RDMA connection from another host failed");
        // A machine that stands still for a minute has a second line.
        let most = 1 + begun.elapsed().as_secs() / 60;
        assert!((1..=most).contains(&(lines.len() as u64)), "{lines:?}");
    }
}
