//! A slice on its way: which bytes, and what is told when it is over.

use std::sync::Arc;
use std::time::Instant;

use zerocopy::IntoBytes;

use crate::error::Fault;
use crate::socket::Ranges;
use crate::task::{Hold, Progress};
use crate::window::{Granted, Window};
use crate::wire::Row;

/// Direction of a transfer, as the initiator sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "there is no third")]
pub enum Op {
    /// From the peer to memory of this process.
    Read,
    /// From memory of this process to the peer.
    Write,
}

/// One range of a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// The run of its batch that it belongs to.
    pub(crate) run: u32,
    pub(crate) len: u32,
    pub(crate) local: u64,
    pub(crate) offset: u64,
}

/// A slice of a batch. What is dropped without an end has lost its peer.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) op: Op,
    pub(crate) window: Arc<Window>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: u64,
    /// How often it was tried before.
    pub(crate) tries: u32,
    /// The grant's number that it was sent with.
    pub(crate) grant: Granted,
    /// Whether the name was opened again for it.
    pub(crate) renewed: bool,
    hold: Option<Hold>,
}

impl Flight {
    pub(crate) fn new(op: Op, window: Arc<Window>, pieces: Vec<Piece>, hold: Hold) -> Flight {
        let bytes = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        Flight {
            op,
            window,
            pieces,
            bytes,
            tries: 0,
            grant: Granted::default(),
            renewed: false,
            hold: Some(hold),
        }
    }

    /// Its batch.
    pub(crate) fn progress(&self) -> Option<&Arc<Progress>> {
        self.hold.as_ref().map(|hold| &hold.payload().progress)
    }

    /// Whether it is of this batch.
    pub(crate) fn is_of(&self, batch: &Arc<Progress>) -> bool {
        self.progress().is_some_and(|one| Arc::ptr_eq(one, batch))
    }

    /// Whether its time is over, which is said to its batch.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        let late = self.progress().filter(|batch| batch.deadline <= now);
        late.inspect(|batch| batch.end(Fault::TimedOut)).is_some()
    }

    /// Why it is not to go on, where its batch was ended.
    pub(crate) fn cause(&self) -> Option<Fault> {
        self.progress().and_then(|progress| progress.cause())
    }

    /// Its place in the queue of a lane.
    pub(crate) fn priority(&self) -> usize {
        self.progress()
            .map_or(0, |progress| progress.priority as usize)
    }

    /// Its memory, as ranges.
    ///
    /// # Safety
    ///
    /// The ranges go before the flight ends.
    pub(crate) unsafe fn add_to(&self, ranges: &mut Ranges) {
        for piece in &self.pieces {
            // SAFETY: the region that has these bytes was found when the batch was planned, and the
            // batch holds its owner until this flight has ended.
            unsafe { ranges.push(piece.local as usize, piece.len as usize) };
        }
    }

    /// The bytes of all rows but the first, and that one.
    pub(crate) fn rows(&self, rest: &mut Vec<u8>) -> Row {
        let row = |piece: &Piece| Row::new(self.grant.number, piece.offset, piece.len);
        let mut rows = self.pieces.iter().map(row);
        let first = rows.next().unwrap_or_default();
        rest.clear();
        rows.for_each(|row| rest.extend_from_slice(row.as_bytes()));
        first
    }

    /// One of its ranges, alone.
    pub(crate) fn split_off(&mut self, piece: usize) -> Option<Flight> {
        let hold = self.hold.clone()?;
        if piece >= self.pieces.len() {
            return None;
        }
        let piece = self.pieces.remove(piece);
        self.bytes -= u64::from(piece.len);
        let window = Arc::clone(&self.window);
        Some(Flight::new(self.op, window, vec![piece], hold))
    }

    /// It is over.
    pub(crate) fn end(mut self, result: Result<(), Fault>) {
        self.settle(result.err());
    }

    fn settle(&mut self, fault: Option<Fault>) {
        let Some(hold) = self.hold.take() else { return };
        for piece in &self.pieces {
            let bytes = u64::from(piece.len);
            hold.payload().progress.moved(piece.run, bytes, fault);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.settle(Some(Fault::Lost));
    }
}
