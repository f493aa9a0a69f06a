//! Queues, lanes and regions over a double of the library (`double.rs`), and over real devices
//! where the virtual machine has some (`guest.rs`).

use super::*;
use kvdepot_media::{Buffer, Owner};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

mod absent;
pub(crate) mod double;
mod guest;
mod lanes;
mod regions;

/// Bytes that differ from place to place.
fn content(seed: usize, len: usize) -> Vec<u8> {
    let mut state = (seed as u64) << 1 | 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Memory of which is known whether it has gone.
struct Memory {
    bytes: Buffer,
    has_gone: Arc<AtomicBool>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.has_gone.store(true, SeqCst);
        double::note("memory");
    }
}

/// A buffer with such bytes, and whether its memory has gone.
fn watched(bytes: Vec<u8>) -> (Buffer, Arc<AtomicBool>) {
    let has_gone = Arc::new(AtomicBool::new(false));
    let bytes = Buffer::from_vec(bytes);
    let (addr, len) = (bytes.addr(), bytes.len());
    let memory = Memory {
        bytes,
        has_gone: Arc::clone(&has_gone),
    };
    assert!(memory.bytes.is_writable());
    let owner: Owner = Arc::new(memory);
    // SAFETY: the owner has the bytes, which are writable.
    (
        unsafe { Buffer::from_raw(addr, len, true, owner) },
        has_gone,
    )
}

/// Two queue pairs that are connected to each other.
fn connected(here: &Arc<Device>, there: &Arc<Device>, shape: Shape) -> (QueuePair, QueuePair) {
    let make = |device: &Arc<Device>| {
        let port = device.port(Choice::default()).unwrap();
        QueuePair::make(device, port, shape).unwrap()
    };
    let (mut a, mut b) = (make(here), make(there));
    let bytes: [u8; ENDPOINT_LEN] = a.local().to_bytes();
    b.connect(&Endpoint::from_bytes(bytes).unwrap()).unwrap();
    a.connect(&b.local()).unwrap();
    (a, b)
}

const BOTH: Rights = Rights {
    remote_read: true,
    remote_write: true,
};

/// Where a part of a region lies, for a peer.
fn at(region: &Region, offset: usize) -> Remote {
    Remote {
        addr: region.addr() + offset as u64,
        rkey: region.rkey(),
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// What became of each, in the order of their numbers; each must be there once.
fn ends(mut reports: Vec<Completion>) -> Vec<std::result::Result<(), Failure>> {
    reports.sort_by_key(|report| report.id);
    let ids: Vec<u64> = reports.iter().map(|report| report.id).collect();
    assert_eq!(ids, (0..ids.len() as u64).collect::<Vec<_>>(), "each once");
    reports.into_iter().map(|report| report.ended).collect()
}
