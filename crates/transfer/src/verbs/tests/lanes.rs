//! Lanes over the double: what is carried, reported and counted, and what ends how.

use super::double::{self, Mood};
use super::*;

const LEN: usize = 4096;

/// A lane, its peer, and a region of each that the other may use.
struct Pair {
    lane: Lane,
    local: Arc<Region>,
    local_gone: Arc<AtomicBool>,
    remote: Arc<Region>,
    _peer: QueuePair,
}

fn pair(shape: Shape, watermark: usize) -> Pair {
    let (here, there) = (double::open("double0"), double::open("double1"));
    let (queue, peer) = connected(&here, &there, shape);
    let (local, local_gone) = watched(content(1, LEN));
    Pair {
        lane: Lane::new(queue, watermark).unwrap(),
        local: Region::register(&here, local, Rights::default()).unwrap(),
        local_gone,
        remote: Region::register(&there, Buffer::from_vec(content(2, LEN)), BOTH).unwrap(),
        _peer: peer,
    }
}

impl Pair {
    /// Takes 16 bytes at both sides' `number` × 16.
    fn push(&mut self, op: Op, number: usize) -> Result<()> {
        let offset = number * 16 % LEN;
        let piece = self.local.piece(offset, 16)?;
        self.lane
            .push(number as u64, op, at(&self.remote, offset), &[piece])
    }

    fn finish(&mut self, deadline: Instant) -> Vec<std::result::Result<(), Failure>> {
        let (mut reports, begin) = (Vec::new(), Instant::now());
        self.lane.finish(deadline, &mut reports);
        assert!(
            begin.elapsed() < Duration::from_secs(10),
            "it is known at once"
        );
        assert_eq!(self.lane.pending(), 0);
        ends(reports)
    }
}

fn small(depth: u16, signal_every: u16) -> Shape {
    Shape {
        depth,
        pieces: 3,
        signal_every,
    }
}

#[test]
fn slices_of_several_pieces_go_both_ways() {
    let mut pair = pair(Shape::default(), 4);
    let (ours, theirs) = (pair.local.buffer().to_vec(), pair.remote.buffer().to_vec());
    let piece = |offset, len| -> Piece { pair.local.piece(offset, len).unwrap() };
    let (read, written) = (
        [piece(100, 7), piece(50, 1), piece(0, 30)],
        [piece(200, 99)],
    );
    pair.lane
        .push(0, Op::Read, at(&pair.remote, 1000), &read)
        .unwrap();
    pair.lane
        .push(1, Op::Write, at(&pair.remote, 3), &written)
        .unwrap();
    assert_eq!(pair.finish(soon()), [Ok(()), Ok(())]);
    let (mut here, mut there) = (ours.clone(), theirs.clone());
    here[100..107].copy_from_slice(&theirs[1000..1007]);
    here[50] = theirs[1007];
    here[..30].copy_from_slice(&theirs[1008..1038]);
    there[3..102].copy_from_slice(&ours[200..299]);
    assert!(pair.local.buffer().to_vec() == here && pair.remote.buffer().to_vec() == there);
}

#[test]
fn a_watermark_of_slices_is_one_post_and_every_so_many_are_told() {
    for (watermark, posts) in [(1, 64), (8, 8), (32, 2), (50, 2)] {
        let before = double::seen().told;
        let mut pair = pair(small(128, 16), watermark);
        for number in 0..64 {
            pair.push(Op::Write, number).unwrap();
        }
        assert_eq!(pair.finish(soon()), [Ok(()); 64]);
        let counts = Counts {
            posts,
            work_requests: 64,
        };
        assert_eq!(pair.lane.counts(), counts, "{watermark}");
        let told = double::seen().told - before;
        // One for each end of a chain, and one for each sixteen within it.
        let expected = match watermark {
            1 => 64,
            8 => 8,
            32 => 4,
            _ => 5,
        };
        assert_eq!(told, expected, "{watermark}");
    }
}

#[test]
fn no_more_is_posted_than_the_send_queue_holds() {
    // The double refuses what is too much, as devices do.
    for (depth, watermark) in [(2, 1), (4, 4), (16, 5), (16, 16)] {
        let mut pair = pair(small(depth, depth / 2), watermark);
        let mut reports = Vec::new();
        for number in 0..1000 {
            while let Err(error) = pair.push(Op::Read, number) {
                assert!(matches!(error, Error::Full { .. }), "{error}");
                pair.lane.wait(soon(), &mut reports);
            }
            assert!(pair.lane.pending() <= 2 * usize::from(depth));
        }
        pair.lane.finish(soon(), &mut reports);
        assert_eq!(ends(reports), [Ok(()); 1000]);
        let counts = pair.lane.counts();
        assert!(counts.posts <= 1000 / watermark as u64 + 1, "{counts:?}");
    }
}

#[test]
fn what_the_peer_refuses_ends_the_lane_and_tells_which_it_was() {
    let mut pair = pair(small(64, 16), 8);
    for number in 0..20 {
        let piece = pair.local.piece(number * 16, 16).unwrap();
        let mut remote = at(&pair.remote, number * 16);
        if number == 10 {
            remote.rkey += 0x55;
        }
        pair.lane
            .push(number as u64, Op::Read, remote, &[piece])
            .unwrap();
    }
    let ended = pair.finish(soon());
    assert_eq!(ended[..10], [Ok(()); 10]);
    assert_eq!(ended[10], Err(Failure::RemoteAccess));
    assert_eq!(ended[11..], [Err(Failure::Flushed); 9]);
    assert!(!pair.lane.is_open());
    assert!(matches!(pair.push(Op::Read, 0), Err(Error::Shut)));
    assert!(Failure::RemoteAccess.to_string().contains("status 10"));
}

#[test]
fn at_the_deadline_everything_is_reported_and_nothing_held() {
    for flushes_nothing in [true, false] {
        double::set(Mood {
            is_silent: true,
            flushes_nothing,
            ..Mood::default()
        });
        let mut pair = pair(small(8, 4), 4);
        for number in 0..16 {
            pair.push(Op::Read, number).unwrap();
        }
        // Those that wait keep it, too.
        let local = std::mem::replace(&mut pair.local, Arc::clone(&pair.remote));
        drop(local);
        let (begin, wait) = (Instant::now(), Duration::from_millis(50));
        assert_eq!(pair.finish(begin + wait), [Err(Failure::Deadline); 16]);
        assert!(begin.elapsed() >= wait);
        assert!(pair.local_gone.load(SeqCst));
        let events = double::seen().events;
        let end = events.iter().rposition(|event| *event == "stop").unwrap();
        let order = ["stop", "destroy", "take back", "memory"];
        assert_eq!(events[end..], order, "flushes nothing: {flushes_nothing}");
    }
}

#[test]
fn a_queue_pair_that_is_dropped_is_destroyed_before_its_memory_goes() {
    double::set(Mood {
        is_silent: true,
        flushes_nothing: true,
        ..Mood::default()
    });
    let mut pair = pair(small(8, 4), 1);
    pair.push(Op::Write, 0).unwrap();
    let Pair { lane, local, .. } = pair;
    drop(local);
    drop(lane);
    let events = double::seen().events;
    let end = events.iter().position(|event| *event == "stop").unwrap();
    assert_eq!(
        events[end..end + 4],
        ["stop", "destroy", "take back", "memory"]
    );
}

#[test]
fn memory_that_a_device_may_still_touch_is_kept() {
    double::set(Mood {
        is_silent: true,
        flushes_nothing: true,
        destroy: libc::EBUSY,
        ..Mood::default()
    });
    let mut pair = pair(small(8, 4), 1);
    pair.push(Op::Read, 0).unwrap();
    let mut reports = Vec::new();
    pair.lane.shut(&mut reports);
    assert_eq!(ends(reports), [Err(Failure::Shut)]);
    let has_gone = Arc::clone(&pair.local_gone);
    drop(pair);
    assert!(!has_gone.load(SeqCst));
}

#[test]
fn a_post_that_is_refused_half_way_reports_each_slice() {
    for takes in [0, 1, 3, 7] {
        double::set(Mood {
            takes: Some(takes),
            ..Mood::default()
        });
        let mut pair = pair(small(16, 2), 8);
        for number in 0..7 {
            pair.push(Op::Write, number).unwrap();
        }
        let whole = takes == 7;
        let ended = pair.finish(soon());
        let carried = ended.iter().filter(|end| end.is_ok()).count();
        // Of the last one before the refused one a device does not tell, if that was not to be.
        assert_eq!(carried, if whole { 7 } else { takes / 2 * 2 });
        assert!(
            ended[carried..]
                .iter()
                .all(|end| *end == Err(Failure::Flushed))
        );
        assert_eq!(pair.lane.is_open(), whole);
        assert_eq!(pair.lane.counts().work_requests, takes as u64);
        double::set(Mood::default());
    }
}

#[test]
fn a_device_that_tells_of_what_it_was_not_asked_is_not_believed() {
    double::set(Mood {
        invents: true,
        ..Mood::default()
    });
    let mut pair = pair(small(8, 4), 1);
    pair.push(Op::Read, 0).unwrap();
    assert_eq!(pair.finish(soon()), [Err(Failure::Flushed)]);
    assert!(!pair.lane.is_open());
}

#[test]
fn slices_that_no_device_could_carry_are_refused() {
    let mut pair = pair(small(4, 2), 4);
    let piece = pair.local.piece(0, 16).unwrap();
    let other = pair.remote.piece(0, 16).unwrap();
    let fixed = Buffer::from_vec(vec![0; 2 << 20]).read_only();
    let fixed = Region::register(pair.local.device(), fixed, Rights::default()).unwrap();
    let (short, long) = (
        fixed.piece(0, 1).unwrap(),
        fixed.piece(0, (1 << 20) + 1).unwrap(),
    );
    for (op, pieces, says) in [
        (
            Op::Read,
            vec![],
            "pieces of a slice: 0 is not allowed; allowed: 1 to 3",
        ),
        (Op::Read, vec![piece; 4], "pieces of a slice: 4"),
        (
            Op::Write,
            vec![other],
            "registered with the RDMA device double1 cannot be used by the RDMA device double0",
        ),
        (Op::Read, vec![short], "is read-only"),
        (
            Op::Write,
            vec![long],
            "bytes of a slice: 1048577 is not allowed; allowed: at most 1048576",
        ),
    ] {
        let refused = pair.lane.push(0, op, at(&pair.remote, 0), &pieces);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    }
    assert_eq!(pair.lane.pending(), 0);
}

#[test]
fn shapes_watermarks_and_ends_that_do_not_fit_are_refused() {
    let device = double::open("double0");
    let port = device.port(Choice::default()).unwrap();
    for (depth, pieces, signal_every, says) in [
        (1, 1, 1, "depth: 1 is not allowed; allowed: 2 to 256"),
        (257, 1, 1, "depth: 257"),
        (4, 0, 1, "pieces: 0 is not allowed; allowed: 1 to 4"),
        (4, 5, 1, "pieces: 5"),
        (4, 1, 0, "signal_every: 0 is not allowed; allowed: 1 to 2"),
        (4, 1, 3, "signal_every: 3"),
    ] {
        let shape = Shape {
            depth,
            pieces,
            signal_every,
        };
        let error = QueuePair::make(&device, port.clone(), shape);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    }
    let make = || QueuePair::make(&device, port.clone(), small(4, 2)).unwrap();
    let mut queue = make();
    let mut row = make().local().to_bytes();
    (row[2], row[3]) = (3, 1);
    let other = queue.connect(&Endpoint::from_bytes(row).unwrap());
    assert!(matches!(other, Err(Error::Invalid { .. })));
    assert!(
        matches!(Lane::new(make(), 1), Err(Error::Shut)),
        "not connected"
    );
    row[3] = 2;
    queue.connect(&Endpoint::from_bytes(row).unwrap()).unwrap();
    assert_eq!(double::seen().mtu, 3, "the smaller one");
    assert!(matches!(queue.connect(&make().local()), Err(Error::Shut)));
    assert!(matches!(Lane::new(queue, 5), Err(Error::Invalid { .. })));
    double::set(Mood {
        connect: libc::ETIMEDOUT,
        ..Mood::default()
    });
    let error = make().connect(&make().local()).unwrap_err().to_string();
    assert!(
        error.starts_with("cannot connect a queue pair of double0: "),
        "{error}"
    );
}
