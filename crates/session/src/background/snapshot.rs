//! The engine's side of a save in the background: its rows are copied in slices, between its steps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_store::Buffer;

use super::job::{Job, Ticket, late};
use super::memory::Taken;
use super::writer::{Item, Shared};
use crate::error::Error;

/// Bytes that are copied between two looks at the clock: some 50 µs.
const COPIED: usize = 256 << 10;

/// Amount of data that one step copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "bytes or time, and nothing else")]
pub enum Slice {
    /// At most this number of bytes.
    Bytes(u64),
    /// Chunks of at most 256 KiB until this time has passed; at least one chunk.
    Time(Duration),
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step {
    /// Bytes that the step copied.
    pub copied: u64,
    /// Bytes that remain to be copied. At 0 the engine may reuse its memory.
    pub left: u64,
    /// True if the step ended early, because no memory is free until a piece is written.
    pub is_full: bool,
}

/// Copy of the engine's rows, in progress.
///
/// The rows must stay unchanged until [`left`](Snapshot::left) is 0. Dropping the snapshot before
/// that cancels the save, and removes its parts.
pub struct Snapshot {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// Pieces that are still to be copied, and where they lie.
    source: VecDeque<(usize, Vec<Buffer>)>,
    /// Room for all of them, where it was asked for.
    room: Option<Taken>,
    filling: Option<Filling>,
    left: u64,
}

/// The piece that is being copied.
struct Filling {
    piece: usize,
    from: VecDeque<Buffer>,
    rows: Vec<u8>,
    room: Taken,
}

impl Snapshot {
    pub(super) fn new(
        shared: Arc<Shared>,
        job: Arc<Job>,
        source: VecDeque<(usize, Vec<Buffer>)>,
        room: Option<Taken>,
    ) -> Snapshot {
        let each = source.iter().flat_map(|(_, rows)| rows);
        let left = each.map(|some| some.len() as u64).sum();
        let mut snapshot = Snapshot {
            shared,
            job,
            source,
            room,
            filling: None,
            left,
        };
        snapshot.hand_over();
        snapshot
    }

    /// Returns the number of bytes that remain to be copied.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Returns a handle to the save.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        Ticket(Arc::clone(&self.job))
    }

    /// Copies one slice. The call does not wait for a disk or for memory.
    ///
    /// # Errors
    /// [`Error::Background`] if the save has failed.
    pub fn step(&mut self, slice: Slice) -> Result<Step, Error> {
        let begun = Instant::now();
        let (mut copied, mut is_full) = (0, false);
        while self.left > 0 {
            if let Some(error) = self.job.failed() {
                return Err(error);
            }
            let most = match slice {
                Slice::Bytes(bytes) => bytes - copied,
                Slice::Time(time) if copied > 0 && begun.elapsed() >= time => 0,
                Slice::Time(_) => u64::MAX,
            };
            if most == 0 {
                break;
            }
            if !self.has_room() {
                is_full = true;
                break;
            }
            copied += self.copy(usize::try_from(most).unwrap_or(usize::MAX))?;
        }
        Ok(Step {
            copied,
            left: self.left,
            is_full,
        })
    }

    /// Copies all remaining rows, and waits for memory if necessary. Use it when the engine needs
    /// its memory for something else.
    ///
    /// `within` is the longest wait; `None` waits without a limit.
    ///
    /// # Errors
    /// [`Error::Background`] if the save has failed, or [`Error::Depot`] with a time-out; the
    /// snapshot can continue after a time-out.
    pub fn finish(&mut self, within: Option<Duration>) -> Result<(), Error> {
        let until = within.and_then(|within| Instant::now().checked_add(within));
        while self.step(Slice::Bytes(u64::MAX))?.is_full {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(late("the wait for snapshot memory", within));
            }
            // A save that has failed frees its room, or never had any.
            const LOOK: Duration = Duration::from_millis(20);
            let wanted = self.next_bytes();
            let wait = left.map_or(LOOK, |left| left.min(LOOK));
            drop(self.shared.memory.take(wanted, Some(wait)));
        }
        Ok(())
    }

    fn next_bytes(&self) -> u64 {
        let next = self.source.front().into_iter().flat_map(|(_, rows)| rows);
        next.map(|some| some.len() as u64).sum()
    }

    /// Begins the next piece where none is being copied.
    fn has_room(&mut self) -> bool {
        if self.filling.is_some() {
            return true;
        }
        let bytes = self.next_bytes();
        let room = match &mut self.room {
            Some(room) => Some(room.split(bytes)),
            None => self.shared.memory.take(bytes, Some(Duration::ZERO)),
        };
        let Some(room) = room else {
            return false;
        };
        let Some((piece, from)) = self.source.pop_front() else {
            return false;
        };
        self.filling = Some(Filling {
            piece,
            from: from.into(),
            rows: Vec::with_capacity(bytes as usize),
            room,
        });
        true
    }

    /// Copies so many bytes at most.
    fn copy(&mut self, most: usize) -> Result<u64, Error> {
        let Some(filling) = &mut self.filling else {
            return Ok(0);
        };
        let mut copied = 0;
        if let Some(first) = filling.from.front_mut() {
            let count = first.len().min(most).min(COPIED);
            let slice = |at, len| first.slice(at, len).map_err(kvdepot_store::Error::from);
            let (some, rest) = (slice(0, count)?, slice(count, first.len() - count)?);
            filling.rows.extend_from_slice(&some.to_vec());
            *first = rest;
            if first.is_empty() {
                filling.from.pop_front();
            }
            copied = count as u64;
        }
        self.left -= copied;
        self.job.copied(copied);
        if filling.from.is_empty() {
            self.hand_over();
        }
        Ok(copied)
    }

    /// Gives the thread that writes the piece that is full, and word of the last one.
    fn hand_over(&mut self) {
        if let Some(filling) = self.filling.take() {
            let Filling {
                piece, rows, room, ..
            } = filling;
            let job = Arc::clone(&self.job);
            self.shared.push(Item::Piece {
                job,
                piece,
                rows,
                room,
            });
        }
        if self.left == 0 {
            self.job.whole();
            self.shared.push(Item::End(Arc::clone(&self.job)));
        }
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        if self.left > 0 {
            self.shared.push(Item::Cancel(Arc::clone(&self.job)));
        }
    }
}
