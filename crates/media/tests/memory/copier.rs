//! The copier against a naive twin, over every medium, and when things go wrong.

use kvdepot_media::checksum::{self, LEAF};
use kvdepot_media::{
    Access, Batch, Buffer, Checksum, Copier, CopierConfig, Done, Error, Failure, Mapping, Owner,
    PartId, Ticket,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// A small generator (splitmix64), seeded so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        bytes
    }
}

fn id(number: u32) -> PartId {
    let mut key = [7; 32];
    key[..4].copy_from_slice(&number.to_le_bytes());
    PartId {
        namespace: [3; 16],
        key,
        part: number % 4,
        parts: 4,
    }
}

fn copier(lanes: usize) -> Copier {
    let mut config = CopierConfig::default();
    config.lanes = lanes;
    // These tests are about lanes.
    config.inline_max = 0;
    Copier::new(config).unwrap()
}

type Results = Vec<(u32, Result<(Checksum, Option<bool>), Failure>)>;

/// Submits a batch and returns what the completion saw.
fn run(copier: &Copier, batch: Batch) -> Results {
    let (sender, receiver) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| sender.send(results(done)).unwrap());
    assert!(
        ticket.wait(Some(Duration::from_secs(60))),
        "the batch hangs"
    );
    assert!(ticket.is_done());
    receiver.recv().unwrap()
}

fn results(done: &Done<'_>) -> Results {
    done.parts()
        .map(|(tag, part)| (tag, part.map(|o| (o.checksum, o.matches))))
        .collect()
}

/// Cuts `buffer` into pieces of random lengths, in order.
fn cut(random: &mut Random, buffer: &Buffer, longest: usize) -> Vec<Buffer> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < buffer.len() {
        let len = random.below(longest + 1).min(buffer.len() - at);
        pieces.push(buffer.slice(at, len).unwrap());
        at += len;
    }
    pieces
}

/// Random parts, cut at random on both sides, go from `src` to `dst` and back to the heap.
fn conformance(name: &str, copier: &Copier, medium: &Arc<Mapping>, seed: u64) {
    let mut random = Random(seed);
    let capacity = medium.len() as usize;
    let mut parts = Vec::new();
    let mut at = random.below(100);
    while parts.len() < 40 {
        let len = 1 + match random.below(6) {
            0 => random.below(300),
            1 => random.below(5000),
            2 => 4095,
            3 => random.below(200_000),
            4 => LEAF as usize - 1 + random.below(3),
            _ => random.below(3 * LEAF as usize),
        };
        if at + len > capacity {
            break;
        }
        parts.push((at, random.bytes(len)));
        // Mostly aligned, as stores do it, but not always.
        at = if random.below(3) == 0 {
            at + len + 1
        } else {
            (at + len).next_multiple_of(4096)
        };
    }
    let mut put = copier.batch();
    for (number, (at, bytes)) in parts.iter().enumerate() {
        let longest = [100, 5000, 262_144, 4 << 20][random.below(4)];
        let src = Buffer::from_vec(bytes.clone()).read_only();
        let dst = medium.buffer(*at as u64, bytes.len() as u64).unwrap();
        let (src, dst) = (
            cut(&mut random, &src, longest),
            cut(&mut random, &dst, longest * 2),
        );
        let position = put
            .part(&id(number as u32), &src, &dst, None, number as u32)
            .unwrap();
        assert_eq!(position, number);
    }
    let put = run(copier, put);
    let expected: Vec<Checksum> = parts
        .iter()
        .enumerate()
        .map(|(number, (_, bytes))| checksum::of(&id(number as u32), bytes))
        .collect();
    let mut get = copier.batch();
    let mut targets = Vec::new();
    for (number, (at, bytes)) in parts.iter().enumerate() {
        assert_eq!(
            put[number],
            (number as u32, Ok((expected[number], None))),
            "{name} {seed}"
        );
        let mut stored = vec![0; bytes.len()];
        medium.read_into(*at as u64, &mut stored).unwrap();
        assert!(
            stored == *bytes,
            "{name} seed {seed} part {number} was stored wrong"
        );
        let (part, tag) = (id(number as u32), number as u32);
        let src = medium.buffer(*at as u64, bytes.len() as u64).unwrap();
        let room = Buffer::from_vec(vec![0xEE; bytes.len() + 64]);
        let dst = room.slice(random.below(64), bytes.len()).unwrap();
        get.part(
            &part,
            std::slice::from_ref(&src),
            std::slice::from_ref(&dst),
            Some(expected[number]),
            tag,
        )
        .unwrap();
        get.hash_only(&part, &[src], Some(Checksum([9; 16])), tag + 1000)
            .unwrap();
        targets.push(dst);
    }
    let get = run(copier, get);
    for (number, (_, bytes)) in parts.iter().enumerate() {
        let (tag, sum) = (number as u32, expected[number]);
        assert_eq!(
            get[2 * number],
            (tag, Ok((sum, Some(true)))),
            "{name} seed {seed}"
        );
        assert_eq!(
            get[2 * number + 1],
            (tag + 1000, Ok((sum, Some(false)))),
            "{name} {seed}"
        );
        assert!(
            targets[number].to_vec() == *bytes,
            "{name} seed {seed} part {number} read wrong"
        );
    }
}

#[test]
fn every_medium_keeps_the_contract() {
    let disk = tempfile::tempdir().unwrap();
    let len = 24 << 20;
    let mut media = vec![
        ("memfd", Mapping::anonymous("kvdepot-test", len).unwrap()),
        (
            "disk",
            Mapping::create(&disk.path().join("arena"), len).unwrap(),
        ),
    ];
    let tmpfs = tempfile::tempdir_in("/dev/shm");
    if let Ok(tmpfs) = &tmpfs {
        media.push((
            "tmpfs",
            Mapping::create(&tmpfs.path().join("arena"), len).unwrap(),
        ));
    }
    for lanes in [1, 3] {
        let copier = copier(lanes);
        for (name, medium) in &media {
            for seed in 0..8 {
                conformance(name, &copier, medium, seed);
            }
        }
    }
}

#[test]
fn a_part_under_another_identity_does_not_match() {
    let copier = copier(1);
    let bytes = Random(5).bytes(100_000);
    let sum = checksum::of(&id(1), &bytes);
    let (src, dst) = (Buffer::from_vec(bytes), Buffer::from_vec(vec![0; 100_000]));
    let (src, dst) = ([src], [dst]);
    let mut other_key = id(1);
    other_key.key[31] ^= 1;
    let mut other_part = id(1);
    other_part.part ^= 1;
    let mut other_space = id(1);
    other_space.namespace[0] ^= 1;
    for (id, matches) in [
        (id(1), true),
        (other_key, false),
        (other_part, false),
        (other_space, false),
    ] {
        let mut batch = copier.batch();
        batch.part(&id, &src, &dst, Some(sum), 0).unwrap();
        let (_, outcome) = run(&copier, batch)[0];
        assert_eq!(outcome.unwrap().1, Some(matches));
    }
}

#[test]
fn a_hundred_thousand_small_parts_in_one_batch() {
    let copier = copier(2);
    let source = Random(1).bytes(100_000 * 16 + 512);
    let src = Buffer::from_vec(source.clone());
    let dst = Buffer::from_vec(vec![0; source.len()]);
    let mut batch = copier.batch();
    for number in 0..100_000_u32 {
        let (at, len) = (number as usize * 16, 1 + number as usize % 16);
        let (from, to) = (src.slice(at, len).unwrap(), dst.slice(at, len).unwrap());
        batch
            .part(&id(number), &[from], &[to], None, number)
            .unwrap();
    }
    assert_eq!(batch.len(), 100_000);
    let results = run(&copier, batch);
    let copied = dst.to_vec();
    for (number, (tag, outcome)) in results.iter().enumerate() {
        let (at, len) = (number * 16, 1 + number % 16);
        assert_eq!(*tag, number as u32);
        assert_eq!(
            outcome.unwrap().0,
            checksum::of(&id(*tag), &source[at..at + len])
        );
        assert_eq!(copied[at..at + len], source[at..at + len]);
        assert!(copied[at + len..at + 16].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn wrong_parts_are_refused_and_leave_the_batch_as_it_was() {
    let copier = copier(1);
    let mut batch = copier.batch();
    let buffer = Buffer::from_vec((0..100).collect());
    let at = |offset, len| [buffer.slice(offset, len).unwrap()];
    batch
        .part(&id(0), &at(0, 10), &at(50, 10), None, 0)
        .unwrap();
    let short = batch.part(&id(1), &at(10, 10), &at(60, 9), None, 1);
    assert!(
        matches!(
            short,
            Err(Error::LengthMismatch {
                tag: 1,
                src: 10,
                dst: 9
            })
        ),
        "{short:?}"
    );
    let empty = batch.part(&id(2), &[], &[], None, 2);
    assert!(matches!(
        empty,
        Err(Error::Invalid {
            field: "part length",
            value: 0,
            ..
        })
    ));
    let fixed = [buffer.slice(60, 10).unwrap().read_only()];
    let written = batch.part(&id(3), &at(10, 10), &fixed, None, 3);
    assert!(matches!(written, Err(Error::ReadOnly { .. })));
    let within = batch.part(&id(4), &at(10, 10), &at(19, 10), None, 4);
    let shared = buffer.addr() as u64 + 19;
    assert!(
        matches!(within, Err(Error::Overlap { tag: 4, addr }) if addr == shared),
        "{within:?}"
    );
    assert_eq!((batch.len(), batch.bytes()), (1, 10));
    batch
        .part(&id(5), &at(10, 10), &at(60, 10), None, 5)
        .unwrap();
    let results = run(&copier, batch);
    assert_eq!(
        results.iter().map(|(tag, _)| *tag).collect::<Vec<_>>(),
        [0, 5]
    );
    assert_eq!(buffer.to_vec()[50..70], (0..20).collect::<Vec<u8>>());
}

#[test]
fn an_empty_batch_completes() {
    let copier = copier(1);
    assert_eq!(run(&copier, copier.batch()), []);
}

#[test]
fn a_small_batch_is_moved_by_the_thread_that_submits_it() {
    let copier = Copier::new(CopierConfig::default()).unwrap();
    let (src, dst) = (
        Buffer::from_vec(vec![5; 9000]),
        Buffer::from_vec(vec![0; 9000]),
    );
    let mut batch = copier.batch();
    let target = std::slice::from_ref(&dst);
    batch.part(&id(1), &[src], target, None, 0).unwrap();
    let (sender, receiver) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| {
        sender
            .send((std::thread::current().id(), done.is_clean()))
            .unwrap();
    });
    assert!(ticket.is_done());
    assert_eq!(receiver.recv(), Ok((std::thread::current().id(), true)));
    assert_eq!(dst.to_vec(), vec![5; 9000]);
}

#[test]
fn wrong_configurations_name_the_field() {
    for (lanes, slice_size, nice, field) in [
        (0, 4096, 0, "lanes"),
        (257, 4096, 0, "lanes"),
        (1, 4095, 0, "slice_size"),
        (1, 4096, 20, "nice"),
    ] {
        let mut config = CopierConfig::default();
        (config.lanes, config.slice_size, config.nice) = (lanes, slice_size, nice);
        let error = Copier::new(config).unwrap_err().to_string();
        assert!(error.starts_with(field), "{error}");
    }
}

#[test]
fn lanes_for_idle_work_have_their_nice_value() {
    let mut config = CopierConfig::default();
    (config.nice, config.inline_max) = (19, 0);
    let copier = Copier::new(config).unwrap();
    let nice = || {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields = stat.rsplit_once(") ").unwrap().1;
        fields.split(' ').nth(16).unwrap().parse::<i32>().unwrap()
    };
    let before = nice();
    loop {
        let (batch, _dst) = one_part(&copier);
        let (sender, receiver) = mpsc::channel();
        let ticket = copier.submit(batch, move |_| {
            sender.send(on_a_lane().then(nice)).unwrap();
        });
        assert!(ticket.wait(Some(Duration::from_secs(60))));
        if let Some(of_lane) = receiver.recv().unwrap() {
            assert_eq!(of_lane, 19);
            break;
        }
    }
    assert_eq!(nice(), before, "of the lanes alone");
}

/// An owner that counts its end.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A buffer whose owner counts its end.
fn counted(bytes: Vec<u8>, gone: &Arc<AtomicUsize>) -> Buffer {
    let (addr, len) = (bytes.as_ptr() as usize, bytes.len());
    let owner: Owner = Arc::new((bytes, Counted(Arc::clone(gone))));
    // SAFETY: the owner keeps the vector, whose bytes nobody else touches.
    #[expect(unsafe_code, reason = "a buffer over foreign memory")]
    unsafe {
        Buffer::from_raw(addr, len, false, owner)
    }
}

#[test]
fn owners_are_held_until_the_completion_has_run_and_gone_when_the_wait_ends() {
    let copier = copier(2);
    for round in 0..200 {
        let gone = Arc::new(AtomicUsize::new(0));
        let mut batch = copier.batch();
        let room = Buffer::from_vec(vec![0; 1 << 16]);
        for number in 0..4 {
            let src = counted(Random(round).bytes(1 << 14), &gone);
            let dst = room.slice(number << 14, 1 << 14).unwrap();
            batch
                .part(&id(number as u32), &[src], &[dst], None, 0)
                .unwrap();
        }
        let seen = Arc::clone(&gone);
        let ticket = copier.submit(batch, move |_| assert_eq!(seen.load(Ordering::SeqCst), 0));
        assert!(ticket.wait(None));
        assert_eq!(gone.load(Ordering::SeqCst), 4, "round {round}");
    }
}

#[test]
fn a_dropped_batch_lets_its_owners_go() {
    let copier = copier(1);
    let gone = Arc::new(AtomicUsize::new(0));
    let mut batch = copier.batch();
    let bytes = counted(vec![0; 100], &gone);
    batch.hash_only(&id(0), &[bytes], None, 0).unwrap();
    drop(batch);
    assert_eq!(gone.load(Ordering::SeqCst), 1);
    assert!(copier.batch().is_empty());
}

/// A batch whose completion waits until `release` is sent to; keeps the only lane busy.
fn plug(copier: &Copier) -> (Ticket, mpsc::Sender<()>) {
    loop {
        let (release, blocked) = mpsc::channel::<()>();
        let (started, running) = mpsc::channel();
        let (batch, _dst) = one_part(copier);
        let ticket = copier.submit(batch, move |_| {
            let plugged = on_a_lane();
            started.send(plugged).unwrap();
            if plugged {
                // Also ends when the test has failed and dropped the sender.
                let _released = blocked.recv();
            }
        });
        if running.recv_timeout(Duration::from_secs(30)).unwrap() {
            return (ticket, release);
        }
    }
}

/// Completions run in the thread that finishes last, which may be the one that submits.
fn on_a_lane() -> bool {
    std::thread::current()
        .name()
        .is_some_and(|name| name.starts_with("kvdepot-lane"))
}

fn one_part(copier: &Copier) -> (Batch, Buffer) {
    let mut batch = copier.batch();
    let dst = Buffer::from_vec(vec![0; 8]);
    batch
        .part(
            &id(1),
            &[Buffer::from_vec(vec![7; 8])],
            std::slice::from_ref(&dst),
            None,
            1,
        )
        .unwrap();
    (batch, dst)
}

#[test]
fn a_wait_times_out_and_the_batch_goes_on() {
    let copier = copier(1);
    let (plugged, release) = plug(&copier);
    let (batch, dst) = one_part(&copier);
    let ticket = copier.submit(batch, |_| ());
    assert!(!ticket.wait(Some(Duration::from_millis(30))));
    assert!(!ticket.wait(Some(Duration::ZERO)));
    assert!(!ticket.is_done() && !plugged.is_done());
    release.send(()).unwrap();
    assert!(ticket.wait(Some(Duration::from_secs(30))));
    assert_eq!(dst.to_vec(), [7; 8]);
}

#[test]
fn a_cancelled_batch_still_completes() {
    let copier = copier(1);
    let (_plugged, release) = plug(&copier);
    let (batch, dst) = one_part(&copier);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let ticket = copier.submit(batch, move |done| *log.lock().unwrap() = results(done));
    ticket.cancel();
    release.send(()).unwrap();
    assert!(ticket.wait(Some(Duration::from_secs(30))));
    assert_eq!(*seen.lock().unwrap(), [(1, Err(Failure::Cancelled))]);
    assert_eq!(dst.to_vec(), [0; 8]);
}

#[test]
fn a_panicking_completion_still_ends_the_batch() {
    let copier = copier(1);
    let (batch, dst) = one_part(&copier);
    let ticket = copier.submit(batch, |_| panic!("on purpose"));
    assert!(ticket.wait(Some(Duration::from_secs(30))));
    assert_eq!(dst.to_vec(), [7; 8]);
    let (batch, _dst) = one_part(&copier);
    assert!(run(&copier, batch)[0].1.is_ok(), "the lane survived");
}

#[test]
fn close_waits_for_what_is_in_flight_and_refuses_the_rest() {
    let copier = Arc::new(copier(2));
    let (plugged, release) = plug(&copier);
    let (queued, queued_dst) = one_part(&copier);
    let queued = copier.submit(queued, |_| ());
    let (late, late_dst) = one_part(&copier);
    let closing = Arc::clone(&copier);
    let closer = std::thread::spawn(move || closing.close());
    std::thread::sleep(Duration::from_millis(30));
    assert!(!closer.is_finished(), "closed under a batch in flight");
    assert_eq!(run(&copier, late), [(1, Err(Failure::Closed))]);
    assert_eq!(late_dst.to_vec(), [0; 8]);
    release.send(()).unwrap();
    closer.join().unwrap();
    assert!(plugged.is_done() && queued.is_done());
    assert_eq!(queued_dst.to_vec(), [7; 8]);
}

#[test]
fn a_copier_may_be_dropped_in_its_own_completion() {
    let copier = Arc::new(copier(2));
    let (batch, _dst) = one_part(&copier);
    let last = Arc::clone(&copier);
    let (gate, passed) = mpsc::channel::<()>();
    let ticket = copier.submit(batch, move |_| {
        if on_a_lane() {
            passed.recv().unwrap();
        }
        drop(last);
    });
    drop(copier);
    // Nobody listens any more where the completion ran in this thread.
    let _passed = gate.send(());
    assert!(ticket.wait(Some(Duration::from_secs(30))));
}

#[test]
fn many_threads_share_a_copier() {
    let copier = copier(2);
    let medium = Mapping::anonymous("kvdepot-test", 8 << 20).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (copier, medium) = (&copier, &medium);
            scope.spawn(move || {
                let mut random = Random(thread);
                for round in 0..300 {
                    let (at, len) = (thread * (2 << 20), 1 + random.below(2 << 20));
                    let bytes = random.bytes(len);
                    let slot = medium.buffer(at, len as u64).unwrap();
                    let mut batch = copier.batch();
                    let src = Buffer::from_vec(bytes.clone());
                    batch
                        .part(&id(round), &[src], std::slice::from_ref(&slot), None, 0)
                        .unwrap();
                    let sum = run(copier, batch)[0].1.unwrap().0;
                    assert_eq!(sum, checksum::of(&id(round), &bytes));
                    assert!(slot.to_vec() == bytes);
                }
            });
        }
    });
}

#[test]
fn a_read_only_mapping_is_never_a_destination() {
    let medium = Mapping::anonymous("kvdepot-test", 1 << 16).unwrap();
    let fd = medium.try_clone_fd(Access::ReadOnly).unwrap();
    let reader = Mapping::from_fd(fd, 1 << 16, Access::ReadOnly).unwrap();
    let copier = copier(1);
    let mut batch = copier.batch();
    let src = Buffer::from_vec(vec![1; 100]);
    let refused = batch.part(&id(0), &[src], &[reader.buffer(0, 100).unwrap()], None, 0);
    assert!(matches!(refused, Err(Error::ReadOnly { .. })));
}
