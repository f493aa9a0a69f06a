//! Memory for objects that are being written, as much of it as was allowed and no more.
//!
//! Lanes write it as they write any memory; then it becomes the body of a request, which the
//! client keeps for as long as it sends it. It is used again: new pages cost as much as a copy.

use std::sync::Arc;

use bytes::Bytes;
use kvdepot_arena::Error;
use kvdepot_media::Buffer;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Memory is counted in these.
const UNIT: u64 = 4096;

/// Where an object's first byte lies: what is behind its header is aligned for lanes then.
const ALIGN: usize = 4096;

/// Of all memory, the part that is kept beside what is in use.
const KEPT: u64 = 4;

/// The memory of one tier.
pub(super) struct Staging {
    room: Arc<Semaphore>,
    capacity: u64,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    all: Vec<Vec<u8>>,
    bytes: u64,
}

/// Memory for one object, in this process.
pub(super) struct Staged {
    /// All of it; the object is a part.
    whole: Buffer,
    begin: usize,
    len: usize,
    room: OwnedSemaphorePermit,
    of: Arc<Staging>,
}

/// The bytes of an object.
struct Body {
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
    of: Arc<Staging>,
    _room: OwnedSemaphorePermit,
}

impl Staging {
    pub(super) fn new(capacity: u64) -> Arc<Staging> {
        Arc::new(Staging {
            room: Arc::new(Semaphore::new((capacity / UNIT) as usize)),
            capacity,
            kept: Mutex::default(),
        })
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn free(&self) -> u64 {
        self.room.available_permits() as u64 * UNIT
    }

    /// Memory for `len` bytes, with what was there before. Waits `until` then for others to be
    /// sent, where that is said.
    pub(super) async fn take(
        self: &Arc<Staging>,
        len: usize,
        until: Option<Instant>,
    ) -> Option<Staged> {
        let units = u32::try_from((len as u64).div_ceil(UNIT)).ok()?;
        let room = Arc::clone(&self.room);
        let room = match until {
            None => room.try_acquire_many_owned(units).ok()?,
            Some(until) => {
                let taken = timeout_at(until, room.acquire_many_owned(units)).await;
                taken.ok()?.ok()?
            }
        };
        let bytes = self.memory(len + ALIGN);
        let begin = bytes.as_ptr().align_offset(ALIGN);
        Some(Staged {
            whole: Buffer::from_vec(bytes),
            begin,
            len,
            room,
            of: Arc::clone(self),
        })
    }

    /// So much memory, or somewhat more.
    fn memory(&self, len: usize) -> Vec<u8> {
        let mut kept = self.kept.lock();
        let fits = |one: &Vec<u8>| (len..=len + len / 4).contains(&one.len());
        let Some(at) = kept.all.iter().rposition(fits) else {
            drop(kept);
            return vec![0; len];
        };
        let found = kept.all.swap_remove(at);
        kept.bytes -= found.len() as u64;
        found
    }

    fn keep(&self, bytes: Vec<u8>) {
        let len = bytes.len() as u64;
        let most = self.capacity / KEPT;
        let mut gone = Vec::new();
        let mut kept = self.kept.lock();
        while kept.bytes + len > most && !kept.all.is_empty() {
            let oldest = kept.all.remove(0);
            kept.bytes -= oldest.len() as u64;
            gone.push(oldest);
        }
        if len <= most {
            kept.bytes += len;
            kept.all.push(bytes);
        }
        drop(kept);
    }
}

impl Staged {
    /// A part of the object.
    pub(super) fn part(&self, offset: u64, len: u64) -> Result<Buffer, Error> {
        let object = self.whole.slice(self.begin, self.len)?;
        Ok(object.slice(offset as usize, len as usize)?)
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let part = self.part(offset, bytes.len() as u64)?;
        Ok(part.write_at(0, bytes)?)
    }

    /// The object, which nobody writes any more. Where somebody may, its bytes are copied.
    pub(super) fn into_bytes(self) -> Bytes {
        let Staged {
            whole,
            begin,
            len,
            room,
            of,
        } = self;
        let bytes = whole.into_vec().unwrap_or_else(|shared| {
            tracing::debug!("copying a buffer that is still in use");
            shared.to_vec()
        });
        // A copy lies elsewhere, and its alignment is of no use any more.
        Bytes::from_owner(Body {
            bytes,
            begin,
            len,
            of,
            _room: room,
        })
    }
}

impl AsRef<[u8]> for Body {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[self.begin..][..self.len]
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.of.keep(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_becomes_an_objects_bytes_and_is_used_again() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .unwrap();
        let staging = Staging::new(2 << 20);
        let take = |len| runtime.block_on(staging.take(len, None));
        let staged = take(300_000).unwrap();
        assert!(take(1_900_000).is_none(), "that is more than is left");
        let lanes = staged.part(4096, 1000).unwrap();
        lanes.write_at(10, &[7; 5]).unwrap();
        let at = lanes.addr();
        assert_eq!(at % ALIGN, 0);
        drop(lanes);
        let bytes = staged.into_bytes();
        assert_eq!((bytes.len(), &bytes[4106..4111]), (300_000, &[7; 5][..]));
        assert_eq!(bytes[4096..].as_ptr().addr(), at, "it is not copied");
        let part = bytes.slice(..10);
        drop(bytes);
        assert!(staging.free() < 2 << 20);
        drop(part);
        assert_eq!(staging.free(), 2 << 20);
        let again = take(290_000).unwrap();
        assert_eq!(again.part(4096, 1).unwrap().addr(), at);
        // One that is still held is copied.
        let held = again.part(0, 290_000).unwrap();
        let bytes = again.into_bytes();
        assert_ne!(bytes.as_ptr().addr(), held.addr());
    }
}
