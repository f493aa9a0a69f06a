//! On real verbs: two Soft-RoCE devices at the ends of a virtual cable. `make test-vm` runs these
//! in a virtual machine, whose kernel has `rdma_rxe`, `veth` and `sch_netem`; they need root, and a
//! machine of their own, as they change how it routes. `KVDEPOT_TEST_DAX` names a DAX device and
//! `KVDEPOT_TEST_FILE` a file on a DAX file system; everything on them is lost.

use super::*;
use kvdepot_media::{Access, Mapping};
use std::path::Path;

mod cable;
mod engine;
use cable::Cable;

const MIB: usize = 1 << 20;

/// Says what was checked.
fn ok(what: impl std::fmt::Display) {
    println!("ok: {what}");
}

fn named(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| panic!("{variable} names a medium"))
}

fn open() -> (Arc<Device>, Arc<Device>) {
    (Device::open("rxe0").unwrap(), Device::open("rxe1").unwrap())
}

fn lane(here: &Arc<Device>, there: &Arc<Device>, watermark: usize) -> (Lane, QueuePair) {
    let (queue, peer) = connected(here, there, Shape::default());
    (Lane::new(queue, watermark).unwrap(), peer)
}

fn register(device: &Arc<Device>, buffer: Buffer) -> Arc<Region> {
    Region::register(device, buffer, BOTH).unwrap()
}

/// A region whose bytes are known.
struct Known {
    region: Arc<Region>,
    bytes: Vec<u8>,
}

impl Known {
    fn new(device: &Arc<Device>, seed: usize, buffer: Buffer) -> Self {
        let bytes = content(seed, buffer.len());
        buffer.write_at(0, &bytes).unwrap();
        Self {
            region: register(device, buffer),
            bytes,
        }
    }

    fn check(&self, what: impl std::fmt::Display) {
        let found = self.region.buffer().to_vec();
        let wrong = found.iter().zip(&self.bytes).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "{what}: the first wrong byte");
    }

    /// `len` bytes at `offset` as three pieces, or as one.
    fn pieces(&self, offset: usize, len: usize) -> Vec<Piece> {
        let third = len / 3;
        let cuts = match third {
            0 => vec![(offset, len)],
            _ => vec![
                (offset, third),
                (offset + third, third),
                (offset + 2 * third, len - 2 * third),
            ],
        };
        let piece = |(offset, len)| self.region.piece(offset, len).unwrap();
        cuts.into_iter().map(piece).collect()
    }
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn devices_are_found_and_their_best_addresses_chosen() {
    let _cable = Cable::lay();
    let names = devices().unwrap();
    assert!(
        ["rxe0", "rxe1"]
            .iter()
            .all(|name| names.contains(&(*name).to_owned())),
        "{names:?}"
    );
    let (here, there) = open();
    for (device, last) in [(&here, 1), (&there, 2)] {
        let port: Port = device.port(Choice::default()).unwrap();
        assert_eq!(
            port.gid,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 9, 0, last]
        );
        assert!(
            port.is_ethernet && port.mtu == 5 && port.lid == 0,
            "{port:?}"
        );
        ok(format!("{}, {port:?}", device.name()));
    }
    let error = Device::open("mlx5_0").map(drop).unwrap_err().to_string();
    assert!(
        error.contains("no RDMA device mlx5_0; available: "),
        "{error}"
    );
    Cable::run("ip link set left down");
    let error = here.port(Choice::default()).unwrap_err().to_string();
    assert_eq!(error, "RDMA device rxe0 has no active port: port 1 is down");
    ok(error);
}

/// Slices of all lengths between two regions, both ways, one after the other.
fn carry(lane: &mut Lane, local: &mut Known, remote: &mut Known, what: &str) {
    let lens = [1, 2, 3, 64, 4095, 4096, 4097, 65_539, MIB, MIB + 4097];
    for (number, len) in lens.into_iter().enumerate() {
        let (here, there) = (number * 8191 + 1, number * 12_289 + 5);
        let mut reports = Vec::new();
        let place = at(&remote.region, there);
        lane.push(0, Op::Write, place, &local.pieces(here, len))
            .unwrap();
        lane.finish(soon(), &mut reports);
        remote.bytes[there..there + len].copy_from_slice(&local.bytes[here..here + len]);
        // Back, to another place, from one byte before to one behind.
        let (back, from, len) = (here / 2, there - 1, len + 2);
        let place = at(&remote.region, from);
        lane.push(1, Op::Read, place, &local.pieces(back, len))
            .unwrap();
        lane.finish(soon(), &mut reports);
        assert_eq!(ends(reports), [Ok(()); 2], "{what}, {len} bytes");
        local.bytes[back..back + len].copy_from_slice(&remote.bytes[from..from + len]);
    }
    local.check(what);
    remote.check(what);
    ok(format!(
        "{what}: READ and WRITE of 1 byte to 1 MiB and more, all bytes right"
    ));
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn bytes_go_both_ways_of_memory_and_of_a_dax_device() {
    let _cable = Cable::lay();
    let (here, there) = open();
    let len = 2 * MIB;
    let heap = || Buffer::from_vec(vec![0; len]);
    let memory = || {
        Mapping::anonymous("test", len as u64)
            .unwrap()
            .buffer(0, len as u64)
            .unwrap()
    };
    let device = Mapping::open(Path::new(&named("KVDEPOT_TEST_DAX")), Access::ReadWrite).unwrap();
    let dax = |offset: usize| device.buffer(offset as u64, len as u64).unwrap();
    for (what, local, remote) in [
        ("heap and heap", heap(), heap()),
        ("heap and memfd", heap(), memory()),
        ("heap and DAX device", heap(), dax(0)),
        ("DAX device and memfd", dax(len), memory()),
        ("DAX device and DAX device", dax(len), dax(3 * len)),
    ] {
        let (mut lane, _peer) = lane(&here, &there, 1);
        let mut local = Known::new(&here, 1, local);
        let mut remote = Known::new(&there, 2, remote);
        carry(&mut lane, &mut local, &mut remote, what);
    }
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn a_file_on_a_dax_file_system_is_to_be_bounced() {
    let _cable = Cable::lay();
    let (here, _) = open();
    let path = named("KVDEPOT_TEST_FILE");
    drop(std::fs::remove_file(&path));
    let file = Mapping::create(Path::new(&path), MIB as u64).unwrap();
    let buffer = file.buffer(0, MIB as u64).unwrap();
    let error = Region::register(&here, buffer, BOTH).unwrap_err();
    assert!(matches!(error, Error::Bounce { .. }), "{error}");
    ok(error);
    drop(file);
    std::fs::remove_file(&path).unwrap();
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn what_the_peer_has_not_allowed_is_refused_by_its_device() {
    let _cable = Cable::lay();
    let (here, there) = open();
    let local = Known::new(&here, 1, Buffer::from_vec(vec![0; 8192]));
    let remote = Known::new(&there, 2, Buffer::from_vec(vec![0; 8192]));
    let only = |remote_read, remote_write| {
        let rights = Rights {
            remote_read,
            remote_write,
        };
        Region::register(&there, Buffer::from_vec(vec![7; 8192]), rights).unwrap()
    };
    let (readable, writable, gone) = (only(true, false), only(false, true), only(true, true));
    let gone_at = at(&gone, 0);
    drop(gone);
    let good = at(&remote.region, 0);
    let other_key = Remote {
        rkey: good.rkey ^ 0x55,
        ..good
    };
    for (what, op, place) in [
        ("READ, wrong key", Op::Read, other_key),
        ("WRITE, wrong key", Op::Write, other_key),
        (
            "READ beyond the end",
            Op::Read,
            at(&remote.region, 8192 - 99),
        ),
        (
            "WRITE before the start",
            Op::Write,
            Remote {
                addr: good.addr - 1,
                ..good
            },
        ),
        ("WRITE to what may be read", Op::Write, at(&readable, 0)),
        ("READ of what may be written", Op::Read, at(&writable, 0)),
        ("WRITE to what was taken back", Op::Write, gone_at),
    ] {
        let (mut lane, _peer) = lane(&here, &there, 4);
        let mut reports = Vec::new();
        for number in 0..8 {
            let place = if number == 3 { place } else { good };
            let op = if number == 3 { op } else { Op::Write };
            let piece = local.region.piece(0, 100).unwrap();
            lane.push(number, op, place, &[piece]).unwrap();
        }
        lane.finish(soon(), &mut reports);
        let ended = ends(reports);
        assert_eq!(ended[..3], [Ok(()); 3], "{what}");
        let refused = [Failure::RemoteAccess, Failure::RemoteRequest];
        assert!(
            refused.iter().any(|failure| ended[3] == Err(*failure)),
            "{what}: {ended:?}"
        );
        assert_eq!(ended[4..], [Err(Failure::Flushed); 4], "{what}");
        ok(format!("{what}: {}", ended[3].unwrap_err()));
    }
    local.check("what was to be read into");
    assert_eq!(readable.buffer().to_vec(), [7; 8192]);
    assert_eq!(remote.region.buffer().to_vec()[100..], remote.bytes[100..]);
}

/// Loses the peer under slices of both kinds; what became of them, after how long.
fn lose(lose: &[&str], find: impl FnOnce(&Cable)) {
    let cable = Cable::lay();
    let (here, there) = open();
    let (mut lane, peer) = lane(&here, &there, 4);
    let (buffer, has_gone) = watched(vec![9; MIB]);
    let kept = Mapping::anonymous("kept", MIB as u64).unwrap();
    let target = kept.buffer(0, MIB as u64).unwrap();
    let source = register(&here, buffer);
    let target = register(&here, target);
    let remote = Known::new(&there, 2, Buffer::from_vec(vec![0; MIB]));
    for command in lose {
        Cable::run(command);
    }
    for number in 0..16_usize {
        let offset = number * 65_536;
        let (op, region) = match number % 2 {
            0 => (Op::Write, &source),
            _ => (Op::Read, &target),
        };
        let piece = region.piece(offset, 65_536).unwrap();
        lane.push(number as u64, op, at(&remote.region, offset), &[piece])
            .unwrap();
    }
    drop((source, target));
    assert!(!has_gone.load(SeqCst), "the device has it");
    let (begin, patience) = (Instant::now(), Duration::from_secs(2));
    let mut reports = Vec::new();
    lane.finish(begin + patience, &mut reports);
    let took = begin.elapsed();
    assert!(took < patience + Duration::from_secs(3), "{took:?}");
    assert!(has_gone.load(SeqCst), "it came back");
    let ended = ends(reports);
    assert!(
        ended.len() == 16 && ended.iter().all(|end| end.is_err()),
        "{ended:?}"
    );
    ok(format!(
        "{}: after {took:.1?} {}",
        lose.join(", "),
        ended[0].unwrap_err()
    ));
    // The network is there again, and what was on its way arrives, or not.
    let after = content(5, MIB);
    kept.write_from(0, &after).unwrap();
    find(&cable);
    std::thread::sleep(Duration::from_secs(2));
    let mut found = vec![0; MIB];
    kept.read_into(0, &mut found).unwrap();
    assert!(
        found == after,
        "nothing came to memory that had been let go"
    );
    drop((lane, peer));
    let (mut lane, _peer) = self::lane(&here, &there, 1);
    let mut local = Known::new(&here, 1, Buffer::from_vec(vec![0; 2 * MIB]));
    let mut remote = Known::new(&there, 2, Buffer::from_vec(vec![0; 2 * MIB]));
    carry(&mut lane, &mut local, &mut remote, "the next connection");
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn a_peer_whose_link_is_down_ends_at_the_deadline() {
    lose(&["ip link set right down"], Cable::mend);
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn a_peer_of_whom_nothing_arrives_ends_at_the_deadline() {
    let lost = "tc qdisc replace dev right root netem loss 100%";
    lose(&[lost], |_| Cable::run("tc qdisc del dev right root"));
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn loss_and_delay_cost_time_and_no_bytes() {
    let _cable = Cable::lay();
    let (here, there) = open();
    for end in ["left", "right"] {
        Cable::run(&format!(
            "tc qdisc replace dev {end} root netem delay 3ms 1ms loss 1%"
        ));
    }
    // Striped over two devices, of which each has the peer's memory.
    let (mut first, _peer) = lane(&here, &there, 8);
    let (mut second, _other) = lane(&there, &here, 8);
    let (size, count) = (8192, 96);
    let ours = Mapping::anonymous("ours", (size * count) as u64).unwrap();
    let theirs = Mapping::anonymous("theirs", (size * count) as u64).unwrap();
    let all = |memory: &Arc<Mapping>| memory.buffer(0, memory.len()).unwrap();
    let begin = Instant::now();
    for (op, seed) in [(Op::Write, 3), (Op::Read, 4)] {
        let bytes = content(seed, size * count);
        let (from, to) = match op {
            Op::Write => (&ours, &theirs),
            Op::Read => (&theirs, &ours),
        };
        from.write_from(0, &bytes).unwrap();
        let locals = [register(&here, all(&ours)), register(&there, all(&ours))];
        let remotes = [
            register(&there, all(&theirs)),
            register(&here, all(&theirs)),
        ];
        let mut reports = Vec::new();
        for number in 0..count {
            let lane = if number % 2 == 0 {
                &mut first
            } else {
                &mut second
            };
            let piece = locals[number % 2].piece(number * size, size).unwrap();
            let place = at(&remotes[number % 2], number * size);
            lane.push(number as u64, op, place, &[piece]).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(120);
        first.finish(deadline, &mut reports);
        second.finish(deadline, &mut reports);
        let ended = ends(reports);
        assert!(ended.iter().all(|end| end.is_ok()), "{op:?}: {ended:?}");
        let mut found = vec![0; size * count];
        to.read_into(0, &mut found).unwrap();
        assert!(found == bytes, "{op:?}");
    }
    let took = begin.elapsed();
    ok(format!(
        "1 % lost, 3 ms late, over two devices: all bytes right after {took:.1?}"
    ));
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn a_batch_is_told_to_the_device_at_once() {
    let _cable = Cable::lay();
    let (here, there) = open();
    let (size, count) = (4096, 256);
    let shape = Shape {
        depth: 256,
        pieces: 1,
        signal_every: 64,
    };
    for (watermark, posts) in [(1, 256), (32, 8)] {
        let (queue, _peer) = connected(&here, &there, shape);
        let mut lane = Lane::new(queue, watermark).unwrap();
        let local = Known::new(&here, 1, Buffer::from_vec(vec![0; size * count]));
        let mut remote = Known::new(&there, 2, Buffer::from_vec(vec![0; size * count]));
        let (mut reports, begin) = (Vec::new(), Instant::now());
        for number in 0..count {
            let piece = [local.region.piece(number * size, size).unwrap()];
            let place = at(&remote.region, number * size);
            lane.push(number as u64, Op::Write, place, &piece).unwrap();
        }
        lane.finish(soon(), &mut reports);
        let took = begin.elapsed();
        assert_eq!(ends(reports), [Ok(()); 256]);
        remote.bytes.copy_from_slice(&local.bytes);
        remote.check("a batch");
        let counts = lane.counts();
        let expected = Counts {
            posts,
            work_requests: 256,
        };
        assert_eq!(counts, expected);
        ok(format!("watermark {watermark}: {counts:?}, {took:.1?}"));
    }
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn the_device_is_asked_for_no_more_than_its_queue_holds() {
    let _cable = Cable::lay();
    let (here, there) = open();
    let shape = Shape {
        depth: 8,
        pieces: 2,
        signal_every: 4,
    };
    let (queue, _peer) = connected(&here, &there, shape);
    let mut lane = Lane::new(queue, 3).unwrap();
    let (size, count) = (512, 600);
    let mut local = Known::new(&here, 1, Buffer::from_vec(vec![0; size * count]));
    let remote = Known::new(&there, 2, Buffer::from_vec(vec![0; size * count]));
    let mut reports = Vec::new();
    for number in 0..count {
        let piece = [local.region.piece(number * size, size).unwrap()];
        let place = at(&remote.region, number * size);
        while let Err(error) = lane.push(number as u64, Op::Read, place, &piece) {
            assert!(matches!(error, Error::Full { .. }), "{error}");
            lane.wait(soon(), &mut reports);
        }
    }
    lane.finish(soon(), &mut reports);
    assert!(ends(reports).iter().all(|end| end.is_ok()));
    local.bytes.copy_from_slice(&remote.bytes);
    local.check("a queue of eight");
    ok(format!(
        "{count} slices through a send queue of {}: {:?}",
        shape.depth,
        lane.counts()
    ));
}

#[test]
#[ignore = "needs Soft-RoCE; make test-vm runs it in a virtual machine"]
fn a_forked_child_refuses_and_takes_nothing_back() {
    let _cable = Cable::lay();
    let (here, there) = open();
    let (mut lane, peer) = lane(&here, &there, 1);
    let mut local = Known::new(&here, 1, Buffer::from_vec(vec![0; 2 * MIB]));
    let mut remote = Known::new(&there, 2, Buffer::from_vec(vec![0; 2 * MIB]));
    let piece = [local.region.piece(0, 64).unwrap()];
    // SAFETY: this process has this thread, which the test's harness waits for, and the child ends
    // without going back to it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = here
            .port(Choice::default())
            .is_err_and(|e| matches!(e, Error::Forked { .. }));
        let _taken = lane.push(0, Op::Write, at(&remote.region, 0), &piece);
        let mut reports = Vec::new();
        lane.finish(soon(), &mut reports);
        let ended = reports.len() == 1 && reports[0].ended.is_err();
        drop((lane, peer, local, remote, piece, here, there));
        // SAFETY: nothing of this process is needed any more.
        unsafe { libc::_exit(if refused && ended { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: the child was just made, and the status is writable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "what the child found");
    carry(&mut lane, &mut local, &mut remote, "after a fork");
}
