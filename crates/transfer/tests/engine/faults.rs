//! The ten faults that were found in another system's engine, each as what this one does instead,
//! with default settings.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::peer::{NAME, Peer};
use crate::common::raw::Head;
use crate::common::{
    Home, Late, Local, PATIENCE, bytes, cpu, done, ended, engine, held, ms, pieces, submit, until,
    within,
};
use kvdepot_media::Buffer;
use kvdepot_testkit::child::{self, Child};
use kvdepot_transfer::{Error, Fault, Op, Options, Request, Rights, Status};

/// Runs a scene in a process of its own, where nothing else takes CPU time or descriptors.
fn alone(test: &str, scene: impl FnOnce()) {
    match child::role() {
        None => Child::start(test, "alone", &[]).expect("well"),
        Some(_) => {
            scene();
            child::say("well");
        }
    }
}

#[test]
fn a_batch_of_three_thousand_is_taken() {
    let (one, other) = (engine(), engine());
    let len = 3000 * 4096;
    let home = Home::of(&other, NAME, vec![0; len]);
    let local = Local::of(&one, bytes(len, 1));
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let pieces = pieces(len as u64, 4096);
    assert_eq!(pieces.len(), 3000);
    done(&one, Op::Write, &local, &remote, &pieces);
    assert!(home.get() == local.get());
}

#[test]
fn a_read_from_a_stopped_peer_ends_in_its_time_and_touches_nothing_later() {
    let len = 96 << 20;
    let peer = Peer::start(len, 2);
    let one = engine();
    let remote = one.open(peer.address, NAME).unwrap();
    let local = Local::zeros(&one, len);
    for round in 0..3 {
        let timeout = ms(250);
        let begun = Instant::now();
        let late = Late::at(begun + timeout);
        let all = pieces(len as u64, 64 << 10);
        let task = submit(&one, Op::Read, &local, &remote, &all, within(timeout));
        // Some of it has come, some is on its way.
        until("the first request is done", || {
            task.statuses().any(|status| status == Status::Done) || task.is_over()
        });
        peer.stop();
        ended(&task);
        late.assert_in_time(begun + timeout);
        let wanted = Status::Failed(Fault::TimedOut);
        let failed = task.statuses().filter(|status| *status == wanted).count();
        assert!(failed > 0, "round {round}: it was faster than its stop");
        let left = local.get();
        peer.go_on();
        std::thread::sleep(ms(300));
        assert!(local.get() == left, "written after its task was over");
        for (status, (at, _, size)) in task.statuses().zip(&all) {
            if status == Status::Done {
                let range = *at as usize..(at + size) as usize;
                assert!(left[range.clone()] == bytes(len, 2)[range]);
                break;
            }
        }
    }
    done(
        &one,
        Op::Read,
        &local,
        &remote,
        &pieces(len as u64, 1 << 20),
    );
    assert!(local.get() == bytes(len, 2), "it is served again");
}

#[test]
fn a_stopped_peer_burns_no_cpu() {
    alone("faults::a_stopped_peer_burns_no_cpu", || {
        let peer = Peer::start(1 << 20, 3);
        let one = engine();
        let remote = one.open(peer.address, NAME).unwrap();
        let local = Local::zeros(&one, 1 << 20);
        peer.stop();
        let before = cpu();
        let all = pieces(1 << 20, 4096);
        for _ in 0..4 {
            for op in [Op::Read, Op::Write] {
                ended(&submit(&one, op, &local, &remote, &all, within(ms(250))));
            }
        }
        let used = cpu() - before;
        assert!(used < ms(200), "{used:?} in two seconds");
    });
}

#[test]
fn one_bad_address_in_a_hundred_and_one_fails_alone() {
    let (one, other) = (engine(), engine());
    let len = 101 * 1000;
    let home = Home::of(&other, NAME, vec![0; len]);
    let local = Local::of(&one, bytes(len, 4));
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    for bad in [0, 57, 100] {
        home.buffer.write_at(0, &vec![0; len]).unwrap();
        let mut all: Vec<_> = (0..101).map(|n| (n * 1000, n * 1000, 1000)).collect();
        all[bad].1 = len as u64 - 999;
        let task = submit(&one, Op::Write, &local, &remote, &all, Options::default());
        ended(&task);
        let mut wanted = local.get();
        wanted[bad * 1000..][..1000].fill(0);
        assert!(home.get() == wanted);
        assert_eq!(task.fault(), Some((bad, Fault::Range)));
        let failed = task.statuses().filter(|status| *status != Status::Done);
        assert_eq!(failed.count(), 1);
    }
}

#[test]
fn a_refused_request_slows_no_later_one() {
    let (one, other) = (engine(), engine());
    let _home = Home::of(&other, NAME, bytes(1 << 20, 5));
    let short = Home::of(&other, b"short", vec![0; 4096]);
    let local = Local::zeros(&one, 1 << 20);
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let gone = one.open(other.address().unwrap(), b"short").unwrap();
    drop(short);
    let mut slow = 0;
    for round in 0..200 {
        // One that this side refuses, and one that the other does.
        let here = submit(
            &one,
            Op::Read,
            &local,
            &remote,
            &[(0, 1 << 20, 1)],
            Options::default(),
        );
        let there = submit(
            &one,
            Op::Read,
            &local,
            &gone,
            &[(0, 0, 9)],
            Options::default(),
        );
        let at = round * 4096;
        let good = Instant::now();
        done(&one, Op::Read, &local, &remote, &[(at, at, 4096)]);
        slow += u32::from(good.elapsed() >= ms(500));
        ended(&here);
        ended(&there);
        assert_eq!(here.status(0), Status::Failed(Fault::Range));
        assert_eq!(there.status(0), Status::Failed(Fault::Unknown));
    }
    // A machine that stands still delays some of them.
    assert!(slow < 40, "{slow} of 200 are slow");
    assert_eq!(other.stats().connections, 2, "no connection ended");
}

#[test]
fn a_task_that_is_over_may_be_used_again() {
    let (one, other, third) = (engine(), engine(), engine());
    let _home = Home::of(&other, NAME, bytes(4096, 6));
    let local = Local::zeros(&one, 4096);
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let task = submit(
        &one,
        Op::Read,
        &local,
        &remote,
        &[(0, 0, 4096)],
        Options::default(),
    );
    ended(&task);
    for _ in 0..3 {
        one.cancel(&task);
        third.cancel(&task);
        assert!(task.wait(None) && task.wait(Some(Duration::ZERO)) && task.is_over());
        assert_eq!((task.status(0), task.fault()), (Status::Done, None));
    }
    let empty = submit(&one, Op::Read, &local, &remote, &[], Options::default());
    assert!(empty.is_over() && empty.is_empty() && empty.is_done());
    one.close();
    one.cancel(&task);
    drop(one);
    assert!(task.is_done());
}

#[test]
fn a_socket_without_a_greeting_reads_nothing() {
    let other = engine();
    let address = other.address().unwrap();
    let home = Home::of(&other, NAME, bytes(4096, 7));
    // A read, a write, and the frame that opens a name: there is no greeting in front of them.
    let write = [&Head::new(3, 1, 8).row(1, 0, 8).bytes()[..], &[1; 8]].concat();
    let open = [&Head::new(1, 0, 4).bytes()[..], NAME].concat();
    let read = Head::new(2, 1, 0).row(1, 0, 4096).bytes();
    for frame in [read, write, open] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&[&frame[..], &[0; 64]].concat()).unwrap();
        let mut got = Vec::new();
        // It may be reset instead, since not all was read.
        let _end = stream.read_to_end(&mut got);
        assert_eq!(got, [0_u8; 0], "{} bytes came", got.len());
    }
    until("all were counted", || other.stats().refused_greetings == 3);
    assert!(home.get() == bytes(4096, 7));
}

#[test]
fn the_port_is_on_loopback_only() {
    let other = engine();
    let port = format!("{:04X}", other.address().unwrap().port());
    let listens = |table: &str| {
        let table = std::fs::read_to_string(table).unwrap_or_default();
        let sockets = table.lines().skip(1).filter_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            let (address, port) = words.next()?.split_once(':')?;
            let is_listening = words.nth(1)? == "0A";
            Some((address.to_owned(), port.to_owned(), is_listening))
        });
        let its = sockets.filter(|(_, its, listening)| *its == port && *listening);
        its.map(|(address, ..)| address).collect::<Vec<_>>()
    };
    assert_eq!(listens("/proc/net/tcp"), ["0100007F"]);
    assert_eq!(listens("/proc/net/tcp6"), [""; 0]);
}

#[test]
fn a_hundred_thousand_buffers_are_registered_at_once_and_all_are_of_use() {
    let (one, other) = (engine(), engine());
    for count in [20_000_u64, 100_000] {
        let size = 64;
        let whole = bytes((count * size) as usize, 8);
        // Each of them is memory of its own.
        let parts = whole.chunks(size as usize);
        let buffers: Vec<Buffer> = parts.map(|part| Buffer::from_vec(part.to_vec())).collect();
        let begun = Instant::now();
        let _registered = one.register(&buffers).unwrap();
        let published = other.publish(NAME, &buffers, Rights::BOTH, None).unwrap();
        let remote = one.open(other.address().unwrap(), NAME).unwrap();
        let opened = begun.elapsed();
        assert!(opened < PATIENCE, "{opened:?} for {count}");
        let target = Local::zeros(&one, whole.len());
        done(
            &one,
            Op::Read,
            &target,
            &remote,
            &pieces(count * size, 4000),
        );
        assert!(target.get() == whole);
        let begun = Instant::now();
        let request = |(number, buffer): (usize, &Buffer)| Request {
            op: Op::Write,
            local: buffer.addr() as u64,
            remote: &remote,
            offset: (count - 1 - number as u64) * size,
            len: size,
        };
        let home = Home::of(&other, b"back", vec![0; whole.len()]);
        let back = one.open(other.address().unwrap(), b"back").unwrap();
        let there = |(number, buffer)| Request {
            remote: &back,
            ..request((number, buffer))
        };
        let task = one.submit(buffers.iter().enumerate().map(there), Options::default());
        ended(task.as_ref().unwrap());
        assert!(task.unwrap().is_done());
        let moved = begun.elapsed();
        assert!(moved < PATIENCE, "{moved:?} for {count}");
        let turned = whole.rchunks(size as usize).flatten().copied();
        assert!(home.get() == turned.collect::<Vec<u8>>());
        drop((back, home, published));
    }
}

#[test]
fn memory_that_nobody_registered_is_refused() {
    let (one, other) = (engine(), engine());
    let home = Home::of(&other, NAME, bytes(4096, 9));
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let local = Local::zeros(&one, 4096);
    let stranger = Buffer::from_vec(vec![1; 4096]);
    let frames = one.stats().frames;
    let end = local.buffer.addr() as u64 + 4096;
    for op in [Op::Read, Op::Write] {
        for at in [stranger.addr() as u64, 0, 8, end, end - 1, u64::MAX - 1] {
            let request = Request {
                op,
                local: at,
                remote: &remote,
                offset: 0,
                len: 2,
            };
            let task = one.run([request].into_iter(), Options::default()).unwrap();
            assert_eq!(task.status(0), Status::Failed(Fault::Local), "{at:#x}");
        }
    }
    assert_eq!(one.stats().frames, frames, "nothing was even asked");
    assert!(stranger.to_vec() == [1; 4096] && home.get() == bytes(4096, 9));
    let refused = one.register(&[Buffer::from_vec(Vec::new())]).unwrap_err();
    assert!(matches!(refused, Error::Input { .. }), "{refused}");
}

#[test]
fn calls_after_the_death_of_a_peer_fail_fast_and_do_not_spin() {
    alone(
        "faults::calls_after_the_death_of_a_peer_fail_fast_and_do_not_spin",
        || {
            let mut peer = Peer::start(1 << 20, 10);
            let one = engine();
            let remote = one.open(peer.address, NAME).unwrap();
            let local = Local::zeros(&one, 1 << 20);
            done(&one, Op::Read, &local, &remote, &pieces(1 << 20, 4096));
            peer.kill();
            let before = (cpu(), Instant::now());
            for _ in 0..30 {
                let begun = Instant::now();
                let all = pieces(1 << 20, 64 << 10);
                let task = submit(&one, Op::Write, &local, &remote, &all, Options::default());
                ended(&task);
                for status in task.statuses() {
                    assert_eq!(status, Status::Failed(Fault::Lost));
                }
                assert!(begun.elapsed() < Duration::from_secs(20));
            }
            assert!(one.open(peer.address, NAME).is_err() && one.ping(peer.address).is_err());
            std::thread::sleep(ms(700));
            let (used, passed) = (cpu() - before.0, before.1.elapsed());
            assert!(passed < PATIENCE, "{passed:?}");
            assert!(used < ms(300), "{used:?} in {passed:?}");
            let (descriptors, threads) = held();
            assert!(descriptors < 40 && threads < 16, "{descriptors} {threads}");
        },
    );
}

#[test]
fn a_peer_killed_mid_batch_costs_what_it_had_and_nothing_else() {
    let (len, half) = (64 << 20, ms(500));
    let mut dies = Peer::start(len, 11);
    let lives = Peer::start(1 << 20, 12);
    let one = engine();
    let remote = one.open(dies.address, NAME).unwrap();
    let other = one.open(lives.address, NAME).unwrap();
    let (local, theirs) = (Local::zeros(&one, len), Local::zeros(&one, 1 << 20));
    for op in [Op::Read, Op::Write] {
        let all = pieces(len as u64, 32 << 10);
        if op == Op::Write {
            local.buffer.write_at(0, &bytes(len, 11)).unwrap();
        }
        let begun = Instant::now();
        let late = Late::at(begun + half);
        let task = submit(&one, op, &local, &remote, &all, within(half));
        until("some are done", || {
            task.statuses().any(|status| status == Status::Done) || task.is_over()
        });
        dies.kill();
        let mut others = 0;
        while !task.is_over() {
            done(&one, Op::Read, &theirs, &other, &pieces(1 << 20, 8 << 10));
            others += 1;
            assert!(begun.elapsed() < PATIENCE);
        }
        if others == 0 {
            late.assert_in_time(begun + half);
        }
        ended(&task);
        assert!(theirs.get() == bytes(1 << 20, 12) || others == 0);
        let content = bytes(len, 11);
        let got = local.get();
        for (status, (at, _, size)) in task.statuses().zip(&all) {
            let range = *at as usize..(at + size) as usize;
            match status {
                Status::Done => assert!(got[range.clone()] == content[range]),
                Status::Failed(Fault::Lost | Fault::TimedOut) => {}
                other => panic!("{other:?}"),
            }
        }
        dies = Peer::at(&dies.address.to_string(), len, 11);
    }
    done(&one, Op::Read, &theirs, &other, &pieces(1 << 20, 4096));
    // What could not be reached is left alone for a while.
    until("it is served again", || {
        let all = pieces(len as u64, 1 << 20);
        let task = submit(&one, Op::Read, &local, &remote, &all, Options::default());
        ended(&task);
        task.is_done()
    });
    assert!(local.get() == bytes(len, 11));
}
