//! A lane: slices in, reports out, in batches.

use super::error::{Error, Failure, Result};
use super::queue::QueuePair;
use super::region::Piece;
use super::request::{Chain, Completion, Op, Remote};
use std::time::{Duration, Instant};

/// How long a device has, at an end, to say what it has carried and what it gave up: it does at
/// once or never. What it has not said then is reported as not carried.
const GRACE: Duration = Duration::from_millis(100);

/// Slices over one queue pair, each of them reported once: as carried, as failed, or as not carried
/// at the deadline. Nobody waits for another lane's.
///
/// They wait until there is a watermark of them, or [`Lane::wait`] is called, and are then posted
/// at once, as many as the send queue has room for. Once one has failed the connection carries
/// nothing more: the others are reported too, and the lane is over.
#[derive(Debug)]
pub(crate) struct Lane {
    queue: QueuePair,
    waiting: Chain,
    watermark: usize,
}

/// What a lane has asked of its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// How often the device was told of new work requests.
    pub(crate) posts: u64,
    /// Of how many.
    pub(crate) work_requests: u64,
}

impl Lane {
    /// Over a queue pair that is connected.
    ///
    /// # Errors
    ///
    /// [`Error::Shut`] where it is not, [`Error::Invalid`] for a watermark of none, or of more than
    /// the send queue holds.
    pub(crate) fn new(queue: QueuePair, watermark: usize) -> Result<Self> {
        let depth = usize::from(queue.shape().depth);
        if !queue.is_open() {
            return Err(Error::Shut);
        }
        if !(1..=depth).contains(&watermark) {
            let allowed = format!("1 to {depth}");
            return Err(Error::invalid("watermark", watermark as u64, allowed));
        }
        Ok(Self {
            queue,
            waiting: Chain::default(),
            watermark,
        })
    }

    /// Takes a slice: as many bytes as its pieces have, between them in their order and what lies
    /// at the peer from `remote` on. `id` is the caller's; it comes back with the report.
    ///
    /// # Errors
    ///
    /// Such a slice is not taken, and not reported. [`Error::Full`] until others have been,
    /// [`Error::Shut`] where the lane is over; [`Error::Invalid`] for too many pieces or bytes,
    /// [`Error::OtherDevice`], [`Error::ReadOnly`].
    pub(crate) fn push(&mut self, id: u64, op: Op, remote: Remote, pieces: &[Piece]) -> Result<()> {
        self.queue.check(op, pieces)?;
        if !self.queue.is_open() {
            return Err(Error::Shut);
        }
        let (waiting, room) = (self.waiting.len(), usize::from(self.queue.shape().depth));
        if waiting >= room {
            return Err(Error::Full { waiting, room });
        }
        self.waiting.push(id, op, remote, pieces);
        self.post(self.watermark);
        Ok(())
    }

    /// Posts what waits where it is `least` or more, once there is room for a whole batch of it.
    /// Where that fails the queue pair is broken, which the next wait sees.
    fn post(&mut self, least: usize) {
        let (waiting, room) = (self.waiting.len(), self.queue.room());
        if waiting >= least && room >= waiting.min(self.watermark) && self.queue.is_open() {
            let posted = self.queue.post(&mut self.waiting, waiting.min(room));
            if let Err(error) = posted {
                tracing::warn!("{error}; closing the RDMA connection");
            }
        }
    }

    /// Slices that were taken and not reported.
    pub(crate) fn pending(&self) -> usize {
        self.waiting.len() + self.queue.outstanding()
    }

    /// Posts what waits, and sleeps until some slices are reported, or until `until`.
    pub(crate) fn wait(&mut self, until: Instant, out: &mut Vec<Completion>) {
        self.post(1);
        if self.queue.is_open() {
            let waited = self.queue.wait(until, out);
            if let Err(error) = &waited {
                tracing::warn!("{error}; closing the RDMA connection");
            }
            if waited.is_ok() && self.queue.is_open() {
                return;
            }
        }
        self.end(Failure::Flushed, out);
    }

    /// Reports all slices, at the deadline at the latest: what is not carried by then has failed,
    /// and the lane is over. Afterwards no device touches what any of them named.
    pub(crate) fn finish(&mut self, deadline: Instant, out: &mut Vec<Completion>) {
        while self.pending() > 0 {
            if Instant::now() >= deadline {
                return self.end(Failure::Deadline, out);
            }
            self.wait(deadline, out);
        }
    }

    /// Ends it, with a report of each slice that has none.
    pub(crate) fn shut(&mut self, out: &mut Vec<Completion>) {
        self.end(Failure::Shut, out);
    }

    fn end(&mut self, failure: Failure, out: &mut Vec<Completion>) {
        self.queue.shut(Instant::now() + GRACE, failure, out);
        let count = self.waiting.len();
        let (works, _regions) = self.waiting.take(count);
        out.extend(works.map(|work| Completion {
            id: work.id,
            ended: Err(failure),
        }));
    }

    /// Whether it takes slices.
    pub(crate) fn is_open(&self) -> bool {
        self.queue.is_open()
    }

    /// What it has asked of its device.
    pub(crate) fn counts(&self) -> Counts {
        let (posts, work_requests) = self.queue.counts();
        Counts {
            posts,
            work_requests,
        }
    }
}
