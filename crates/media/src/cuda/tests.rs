//! Against the double of the driver in `crates/testkit/cuda`, which is compiled here.

use super::*;
use crate::buffer::{Buffer, Owner};
use crate::checksum::{self, PartId};
use crate::conformance::{self, InMemory, Medium, Room, every_pair};
use crate::copier::{Copier, CopierConfig};
use crate::error::{Error, Failure};
use std::path::PathBuf;
use std::sync::mpsc;

/// The bit that tells the double's device addresses from host ones.
const DEVICE_BIT: usize = 1 << 56;

/// One at a time: the double counts for the process.
static TURN: Mutex<()> = Mutex::new(());

fn library() -> PathBuf {
    static BUILT: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    BUILT
        .get_or_init(|| kvdepot_testkit::double::build("cuda"))
        .clone()
}

/// A function of the double, which takes at most one number and answers an `int`.
fn double(_device: &Device, name: &str, argument: i64) -> i64 {
    i64::from(conformance::double(&library(), name, argument) as i32)
}

fn content(number: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (number * 131 + at * 7 + at / 251) as u8)
        .collect()
}

fn id(number: usize) -> PartId {
    PartId::whole([5; 16], [number as u8; 32])
}

/// Memory of the device, and the host memory that it really is.
fn room(device: &Arc<Device>, len: usize) -> (Buffer, Buffer) {
    let host = Buffer::from_vec(vec![0xEE; len]);
    let owner: Owner = Arc::new(host.clone());
    // SAFETY: the double's device memory is the host's, which the owner keeps.
    let on = unsafe { Buffer::on_device(host.addr() | DEVICE_BIT, len, owner, device.clone()) };
    (on, host)
}

type Parts = Vec<std::result::Result<Option<bool>, Failure>>;

/// Brings parts of `lens` bytes to the device, in pieces of `cut`; the bytes there.
fn restore(
    device: &Arc<Device>,
    copier: &Copier,
    lens: &[usize],
    cut: usize,
) -> (Parts, Vec<Vec<u8>>) {
    let mut batch = copier.batch();
    let mut hosts = Vec::new();
    for (number, &len) in lens.iter().enumerate() {
        let bytes = content(number, len);
        let sum = checksum::of(&id(number), &bytes);
        let (on, host) = room(device, len);
        let pieces: Vec<Buffer> = (0..len)
            .step_by(cut)
            .map(|at| on.slice(at, cut.min(len - at)).unwrap())
            .collect();
        let from = Buffer::from_vec(bytes);
        batch
            .part(&id(number), &[from], &pieces, Some(sum), 0)
            .unwrap();
        hosts.push(host);
    }
    let (sender, receiver) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        let parts = done
            .parts()
            .map(|(_, part)| part.map(|outcome| outcome.matches));
        sender.send(parts.collect()).unwrap();
    });
    assert!(ticket.wait(None));
    let bytes = hosts.iter().map(Buffer::to_vec).collect();
    (receiver.recv().unwrap(), bytes)
}

fn copier(inline_max: u64, slab: u64, regions: usize) -> Copier {
    let config = CopierConfig {
        lanes: 2,
        inline_max,
        staging_slab: Some(slab),
        staging_regions: Some(regions),
        ..CopierConfig::default()
    };
    Copier::new(config).unwrap()
}

const LENS: [usize; 8] = [1, 100, 4096, 70_001, 1 << 20, (1 << 20) + 77, 3 << 20, 5000];

#[test]
fn parts_reach_the_device_through_the_pinned_slab() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let streams = double(&device, "double_streams", 0);
    // One region, so that the lane waits for the device; two halves; moved by this thread.
    for (inline_max, slab, regions) in [(0, 64 << 10, 1), (0, 2 << 20, 4), (u64::MAX, 1 << 20, 2)] {
        let copier = copier(inline_max, slab, regions);
        for cut in [usize::MAX >> 1, 4096, 10_001] {
            let (parts, bytes) = restore(&device, &copier, &LENS, cut);
            assert!(
                parts.iter().all(|part| *part == Ok(Some(true))),
                "{parts:?}"
            );
            for (number, bytes) in bytes.iter().enumerate() {
                assert!(
                    *bytes == content(number, LENS[number]),
                    "part {number} cut {cut}"
                );
            }
        }
        assert_eq!(double(&device, "double_registered", 0), 1);
        drop(copier);
        assert_eq!(
            double(&device, "double_registered", 0),
            0,
            "unpinned with the slab"
        );
    }
    assert_eq!(
        double(&device, "double_contexts", 0),
        0,
        "every thread has left"
    );
    assert!(
        double(&device, "double_streams", 0) <= streams + 3,
        "streams are used again"
    );
}

#[test]
fn a_device_that_refuses_or_fails_a_copy_costs_the_parts_it_had() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let copier = copier(0, 1 << 20, 4);
    for inject in ["double_fail_copy", "double_fail_run"] {
        double(&device, inject, 9);
        let (parts, bytes) = restore(&device, &copier, &[1 << 20; 8], 256 << 10);
        assert!(parts.contains(&Err(Failure::Device)), "{inject} {parts:?}");
        assert!(
            parts.contains(&Ok(Some(true))),
            "{inject}: the others go on"
        );
        for (number, (part, bytes)) in parts.iter().zip(&bytes).enumerate() {
            // What is said to be there is there.
            assert!(
                part.is_err() || *bytes == content(number, 1 << 20),
                "{inject} {number}"
            );
        }
        double(&device, inject, 0);
        let (parts, _) = restore(&device, &copier, &LENS, 4096);
        assert!(
            parts.iter().all(|part| part.is_ok()),
            "{inject}: and so does the copier"
        );
    }
}

#[test]
fn memory_that_cannot_be_pinned_serves_as_well() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    double(&device, "double_refuse_register", 1);
    let (parts, _) = restore(&device, &copier(0, 1 << 20, 4), &LENS, 4096);
    assert!(parts.iter().all(|part| part.is_ok()));
    double(&device, "double_refuse_register", 0);
    assert_eq!(double(&device, "double_registered", 0), 0);
}

impl Medium for Arc<Device> {
    fn name(&self) -> String {
        "a device".to_owned()
    }

    fn room(&self, len: usize) -> Room {
        let (buffer, host) = room(self, len);
        let (look, fill) = (host.clone(), host);
        Room {
            buffer,
            look: Box::new(move || look.to_vec()),
            fill: Box::new(move |bytes| fill.write_at(0, bytes).unwrap()),
        }
    }
}

#[test]
fn devices_keep_the_contract_in_both_directions() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let again = Device::open_with(&library(), 1).unwrap();
    every_pair(&[&InMemory, &device, &again]);
    assert_eq!(double(&device, "double_contexts", 0), 0);
    assert_eq!(double(&device, "double_registered", 0), 0);
}

#[test]
fn a_side_of_a_part_is_of_one_device_and_another_part_of_another() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let again = Device::open_with(&library(), 0).unwrap();
    let copier = copier(0, 1 << 20, 4);
    let ((on, below), (other, _)) = (room(&device, 100), room(&again, 100));
    let host = || Buffer::from_vec(content(3, 100));
    let mut batch = copier.batch();
    for mixed in [
        [on.clone(), host()],
        [host(), on.clone()],
        [on.clone(), other.clone()],
    ] {
        let refused = batch.part(&id(0), &[host(), host()], &mixed, None, 0);
        assert!(matches!(refused, Err(Error::MixedEnds { .. })));
        let refused = batch.hash_only(&id(0), &mixed, None, 0);
        assert!(matches!(refused, Err(Error::MixedEnds { .. })));
    }
    assert!(batch.is_empty());
    batch
        .part(&id(0), &[host()], std::slice::from_ref(&on), None, 0)
        .unwrap();
    batch.part(&id(1), &[host()], &[host()], None, 0).unwrap();
    batch.part(&id(2), &[host()], &[other], None, 0).unwrap();
    let ticket = copier.submit(batch, |done| assert!(done.is_clean()));
    assert!(ticket.wait(None));
    assert_eq!(below.to_vec(), content(3, 100));
    assert!(on.write_at(0, &[1]).is_err());
    assert_eq!(on.to_vec(), vec![0; 100]);
}

#[test]
fn a_missing_driver_or_device_is_named() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let missing = Device::open_with(Path::new("/nonexistent/libcuda.so"), 0);
    assert!(
        missing
            .unwrap_err()
            .to_string()
            .contains("/nonexistent/libcuda.so")
    );
    let device = Device::open_with(&library(), 7);
    assert!(device.unwrap_err().to_string().contains("cuDeviceGet"));
}
