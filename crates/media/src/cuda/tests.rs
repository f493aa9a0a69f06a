//! Against the double of the driver in `crates/testkit/cuda`, which is compiled here.

use super::*;
use crate::buffer::Buffer;
use crate::carrier::{Leg, Op, Receipt};
use crate::checksum::{self, PartId};
use crate::conformance::{self, InMemory, Medium, Room, every_pair};
use crate::copier::{Copier, CopierConfig};
use crate::error::{Error, Failure};
use std::path::PathBuf;
use std::sync::mpsc;

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
    (conformance::on_double(device, &host), host)
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
            let all = parts.iter().all(|part| *part == Ok(Some(true)));
            assert!(all, "{parts:?}");
            for (number, bytes) in bytes.iter().enumerate() {
                let right = *bytes == content(number, LENS[number]);
                assert!(right, "part {number} cut {cut}");
            }
        }
        assert_eq!(double(&device, "double_registered", 0), 1);
        drop(copier);
        assert_eq!(double(&device, "double_registered", 0), 0);
    }
    let [contexts, now] = ["double_contexts", "double_streams"].map(|it| double(&device, it, 0));
    assert_eq!(contexts, 0, "the calling thread has left");
    assert!(now <= streams + 4, "streams are used again");
}

#[test]
fn threads_of_kvdepot_enter_a_context_once() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    // Copied by lanes alone, and reported by them or by threads of streams.
    let copier = copier(0, 1 << 20, 4);
    let entered = || double(&device, "double_entered", 0);
    let mut before = entered();
    let enters_again = || {
        let (parts, _) = restore(&device, &copier, &LENS, 4096);
        assert!(parts.iter().all(|part| *part == Ok(Some(true))));
        entered() > std::mem::replace(&mut before, entered())
    };
    // A run of each of these threads may be its first.
    let entries = std::iter::repeat_with(enters_again).take(100);
    assert!(entries.filter(|again| *again).count() <= 8);
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

/// Brings parts to the device and back; whether all of it is right.
fn there_and_back(device: &Arc<Device>, copier: &Copier, cut: usize) {
    let mut batch = copier.batch();
    let (mut hosts, mut backs) = (Vec::new(), Vec::new());
    for (number, &len) in LENS.iter().enumerate() {
        let (on, host) = room(device, 2 * len.max(cut));
        // Pages with as much between them.
        let pages = |buffer: &Buffer| -> Vec<Buffer> {
            let each = |at: usize| buffer.slice(2 * at, cut.min(len - at)).unwrap();
            (0..len).step_by(cut).map(each).collect()
        };
        let bytes = Buffer::from_vec(content(number, len));
        let sum = checksum::of(&id(number), &bytes.to_vec());
        let from = [bytes.clone()];
        batch
            .part(&id(number), &from, &pages(&on), Some(sum), 0)
            .unwrap();
        hosts.push((pages(&on), sum, host));
        backs.push((Buffer::from_vec(vec![0; len]), bytes));
    }
    let ticket = copier.submit(batch, |done| assert!(done.is_clean()));
    assert!(ticket.wait(None));
    let mut batch = copier.batch();
    for (number, ((pages, sum, _), (back, _))) in hosts.iter().zip(&backs).enumerate() {
        let to = std::slice::from_ref(back);
        batch.part(&id(number), pages, to, Some(*sum), 0).unwrap();
    }
    let ticket = copier.submit(batch, |done| {
        assert!(done.is_clean());
        assert!(
            done.parts()
                .all(|(_, part)| part.unwrap().matches == Some(true))
        );
    });
    assert!(ticket.wait(None));
    assert!(
        backs
            .iter()
            .all(|(back, bytes)| back.to_vec() == bytes.to_vec())
    );
    for (_, _, host) in hosts {
        // What is between the pages is as it was.
        let bytes = host.to_vec();
        let between = bytes.chunks(2 * cut).flat_map(|both| both.iter().skip(cut));
        assert!(between.into_iter().all(|byte| *byte == 0xEE));
    }
}

#[test]
fn small_pages_go_as_one_and_by_one_call_where_that_cannot_be() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let counts =
        |device: &Device| ["double_kernels", "double_batches"].map(|name| double(device, name, 0));
    // (what the driver refuses, whether there are kernels and batches then)
    let ways: [(&[&str], [bool; 2]); 5] = [
        (&[], [true, false]),
        (&["double_refuse_kernel"], [false, true]),
        (&["double_refuse_memory"], [false, true]),
        (
            &["double_refuse_memory", "double_refuse_batch"],
            [false, false],
        ),
        (&["double_refuse_register"], [true, false]),
    ];
    for (refused, expected) in ways {
        let device = Device::open_with(&library(), 0).unwrap();
        for name in refused {
            double(&device, name, 1);
        }
        let before = (counts(&device), double(&device, "double_taken", 0));
        for cut in [4096, 16 << 10, 10_001] {
            there_and_back(&device, &copier(0, 8 << 20, 4), cut);
        }
        let after = counts(&device);
        let used = [0, 1].map(|n| after[n] > before.0[n]);
        assert_eq!(used, expected, "{refused:?}");
        let taken = double(&device, "double_taken", 0) - before.1;
        assert!(taken <= 64 << 20, "{taken} bytes of the device");
        for name in refused {
            double(&device, name, 0);
        }
    }
    // What was refused once is tried again.
    for refused in ["double_refuse_kernel", "double_refuse_memory"] {
        let (device, copier) = (
            Device::open_with(&library(), 0).unwrap(),
            copier(0, 8 << 20, 4),
        );
        double(&device, refused, 1);
        there_and_back(&device, &copier, 4096);
        double(&device, refused, 0);
        std::thread::sleep(crate::tried::PAUSE);
        let before = counts(&device);
        there_and_back(&device, &copier, 4096);
        assert!(counts(&device)[0] > before[0], "{refused}");
    }
}

/// Panics when a receipt has been told.
struct Bomb;

impl Leg for Bomb {
    fn failed(&self, _number: usize, _failure: Failure) {}

    fn is_cancelled(&self) -> bool {
        false
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        std::panic::resume_unwind(Box::new("what goes on with a carry panics"));
    }
}

#[test]
fn a_panic_of_what_goes_on_with_a_carry_holds_up_no_other() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let (on, host) = room(&device, 4096);
    let bytes = Buffer::from_vec(vec![3; 4096]);
    double(&device, "double_fail_copy", 3);
    for _ in 0..20 {
        let (at, memory) = (on.addr() as u64, (bytes.addr(), 4096));
        // SAFETY: both outlive the copies, which `rest` waits for.
        let receipt = unsafe { Receipt::new(Op::Write, at, memory, 4096, 0, Arc::new(Bomb)) };
        device.carrier(None).carry(vec![receipt]);
    }
    assert!(device.rest(Duration::from_secs(20)));
    double(&device, "double_fail_copy", 0);
    assert_eq!(host.to_vec(), [3; 4096]);
    let (parts, _) = restore(&device, &copier(0, 2 << 20, 4), &LENS, 70_000);
    assert!(parts.iter().all(|part| *part == Ok(Some(true))));
}

#[test]
fn streams_that_overtake_each_other_change_no_byte() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    double(&device, "double_jitter", 3000);
    let copier = copier(0, 4 << 20, 8);
    for cut in [4096, 70_000, 1 << 20] {
        there_and_back(&device, &copier, cut);
    }
    double(&device, "double_jitter", 0);
}

#[test]
fn what_is_behind_a_fence_waits_for_its_stream_and_another_device_does_not() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let busy = conformance::double(&library(), "double_busy_stream", 0);
    let [fence, idle] = [busy, 0].map(|stream| conformance::fence_of_double(&device, stream));
    let copier = copier(0, 4 << 20, 8);
    let (on, below) = room(&device, 100_000);
    let (to, there) = room(&device, 100_000);
    let (free, loaded) = room(&device, 100_000);
    let host = Buffer::from_vec(vec![0; 100_000]);
    let mut store = copier.batch();
    let from = [on.behind(&fence)];
    store
        .part(&id(0), &from, std::slice::from_ref(&host), None, 0)
        .unwrap();
    let mut load = copier.batch();
    let bytes = || [Buffer::from_vec(content(1, 100_000))];
    load.part(&id(1), &bytes(), &[to.behind(&fence)], None, 0)
        .unwrap();
    let [store, load] =
        [store, load].map(|batch| copier.submit(batch, |done| assert!(done.is_clean())));
    // A lane brings them when it comes to it.
    while device.rest(Duration::ZERO) {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(
        !store.is_done() && !load.is_done(),
        "the stream computes still"
    );
    assert_eq!(
        there.to_vec(),
        [0xEE; 100_000],
        "nothing has been written meanwhile"
    );
    // Another device's, and another stream's, go on.
    let other = Device::open_with(&library(), 1).unwrap();
    let (parts, _) = restore(&other, &copier, &LENS, 4096);
    assert!(parts.iter().all(|part| part.is_ok()));
    drop(fence);
    // What the stream writes last is what is stored.
    below.write_at(0, &content(7, 100_000)).unwrap();
    conformance::double(&library(), "double_release", busy);
    assert!(store.wait(None) && load.wait(None) && device.rest(Duration::ZERO));
    // Whoever looks stands in nobody's way.
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| (0..20_000).filter(|_| device.rest(Duration::ZERO)).count());
        while !looks.is_finished() {
            let (parts, _) = restore(&device, &copier, &[4096], 4096);
            assert_eq!(parts, [Ok(Some(true))]);
        }
    });
    assert_eq!(host.to_vec(), content(7, 100_000));
    assert_eq!(there.to_vec(), content(1, 100_000));
    let mut load = copier.batch();
    load.part(&id(1), &bytes(), &[free.behind(&idle)], None, 0)
        .unwrap();
    assert!(copier.submit(load, |_| {}).wait(None));
    assert_eq!(loaded.to_vec(), content(1, 100_000));
}

#[test]
fn a_fence_holds_up_only_what_is_behind_it() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let (copier, len) = (copier(0, 4 << 20, 8), 3 << 20);
    // More streams that compute than kvdepot has of its own.
    let busy: Vec<i64> = (0..6)
        .map(|_| conformance::double(&library(), "double_busy_stream", 0))
        .collect();
    let mut held = Vec::new();
    for (number, stream) in busy.iter().enumerate() {
        let fence = conformance::fence_of_double(&device, *stream);
        let ((from, below), (to, there)) = (room(&device, len), room(&device, len));
        below.write_at(0, &content(number, len)).unwrap();
        let back = Buffer::from_vec(vec![0; len]);
        let mut batch = copier.batch();
        let (from, to) = ([from.behind(&fence)], [to.behind(&fence)]);
        batch
            .part(&id(number), &from, std::slice::from_ref(&back), None, 0)
            .unwrap();
        let bytes = [Buffer::from_vec(content(number + 50, len))];
        batch.part(&id(number + 50), &bytes, &to, None, 0).unwrap();
        let ticket = copier.submit(batch, |done| assert!(done.is_clean()));
        held.push((ticket, back, there, *stream));
    }
    for cut in [usize::MAX >> 1, 70_000] {
        let (parts, bytes) = restore(&device, &copier, &LENS, cut);
        assert!(parts.iter().all(|part| *part == Ok(Some(true))));
        assert!(
            bytes
                .iter()
                .zip(LENS)
                .enumerate()
                .all(|(n, (b, len))| *b == content(n, len))
        );
    }
    assert!(held.iter().all(|(ticket, ..)| !ticket.is_done()));
    // The last first: whoever waits for a stream that others wait for too may wait for theirs.
    for (.., stream) in held.iter().rev() {
        conformance::double(&library(), "double_release", *stream);
    }
    for (number, (ticket, back, there, _)) in held.iter().enumerate() {
        assert!(ticket.wait(None));
        assert!(back.to_vec() == content(number, len));
        assert!(there.to_vec() == content(number + 50, len));
    }
}

#[test]
fn many_lanes_bring_at_once_and_leave_nothing_behind() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (streams, taken) = ("double_streams", "double_taken");
    let device = Device::open_with(&library(), 0).unwrap();
    let before = [streams, taken].map(|name| double(&device, name, 0));
    double(&device, "double_delay", 0);
    let config = CopierConfig {
        lanes: 16,
        inline_max: 0,
        staging_slab: Some(8 << 20),
        staging_regions: Some(64),
        ..CopierConfig::default()
    };
    let copier = Copier::new(config).unwrap();
    for cut in [4096, 70_000] {
        let lens = [300_000; 100];
        let (parts, bytes) = restore(&device, &copier, &lens, cut);
        assert!(parts.iter().all(|part| *part == Ok(Some(true))));
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(n, bytes)| *bytes == content(n, 300_000))
        );
        there_and_back(&device, &copier, cut);
    }
    double(&device, "double_delay", 200);
    drop(copier);
    let library = library();
    drop(device);
    let now = || [streams, taken].map(|name| conformance::double(&library, name, 0));
    let end = Instant::now() + Duration::from_secs(20);
    // Those of other tests go meanwhile.
    while now().iter().zip(before).any(|(now, before)| *now > before) {
        assert!(Instant::now() < end, "{:?} of {before:?}", now());
        std::thread::yield_now();
    }
}

#[test]
fn what_is_nowhere_is_verified_and_gone() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let copier = copier(0, 1 << 20, 4);
    let nowhere = |offset: usize, len| {
        let at = Device::NOWHERE + offset;
        // SAFETY: nothing is there.
        unsafe { Buffer::on_device(at, len, Arc::new(()), device.clone()) }
    };
    let (on, below) = room(&device, 5000);
    let bytes = content(2, 15_000);
    let sum = checksum::of(&id(2), &bytes);
    for (sum, sound) in [(sum, true), (checksum::of(&id(3), &bytes), false)] {
        let mut batch = copier.batch();
        let to = [nowhere(0, 5000), on.clone(), nowhere(5000, 5000)];
        let from = [Buffer::from_vec(bytes.clone())];
        batch.part(&id(2), &from, &to, Some(sum), 0).unwrap();
        // Nothing is read from there.
        let nothing = [nowhere(0, 100)];
        let back = [Buffer::from_vec(vec![7; 100])];
        batch.part(&id(3), &nothing, &back, None, 0).unwrap();
        let (sender, receiver) = mpsc::channel();
        let ticket = copier.submit(batch, move |done| {
            let parts: Vec<_> = done.parts().map(|(_, part)| part).collect();
            sender.send(parts).unwrap();
        });
        assert!(ticket.wait(None));
        let parts = receiver.recv().unwrap();
        assert_eq!(parts[0].unwrap().matches, Some(sound));
        assert!(matches!(parts[1], Err(Failure::Short { .. })));
    }
    assert_eq!(below.to_vec(), bytes[5000..10_000]);
}

#[test]
fn a_context_that_is_lost_costs_its_parts_and_nothing_hangs() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open_with(&library(), 0).unwrap();
    let copier = copier(0, 1 << 20, 4);
    let (parts, _) = restore(&device, &copier, &LENS, 4096);
    assert!(parts.iter().all(|part| part.is_ok()));
    double(&device, "double_lose", 1);
    for cut in [4096, 1 << 20] {
        let (parts, _) = restore(&device, &copier, &LENS, cut);
        assert!(
            parts.iter().all(|part| *part == Err(Failure::Device)),
            "{parts:?}"
        );
    }
    // SAFETY: the default stream.
    assert!(unsafe { device.fence(0) }.is_err());
    double(&device, "double_lose", 0);
    assert_eq!(copier.free_regions(), 4);
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
    let error = missing.unwrap_err().to_string();
    assert!(error.contains("/nonexistent/libcuda.so"));
    let device = Device::open_with(&library(), 7);
    let allowed = "device: 7 is not allowed; allowed: 0 to 1, the CUDA devices of this machine";
    assert_eq!(device.unwrap_err().to_string(), allowed);
}
