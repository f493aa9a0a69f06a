//! What no engine would say, said to one: it costs the connection that says it, and nothing else.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::peer::NAME;
use crate::common::raw::{Head, Raw, hello};
use crate::common::{
    Home, Local, bytes, config, done, ended, engine, engine_of, ms, pieces, submit, until,
};
use kvdepot_media::Buffer;
use kvdepot_testkit::Rng;
use kvdepot_transfer::{Config, Engine, Op, Rights};

const OPEN: u8 = 1;
const READ: u8 = 2;
const WRITE: u8 = 3;
const CLOSE: u8 = 4;
const PING: u8 = 5;
const CALL: u8 = 6;

fn raw(engine: &Engine, lane: u32) -> Raw {
    Raw::greet(engine.address().unwrap(), lane, [7; 16], &[])
}

/// Rows behind the first.
fn rows(all: &[(u32, u32, u64)]) -> Vec<u8> {
    let row = |&(grant, len, offset): &(u32, u32, u64)| {
        [
            &grant.to_le_bytes()[..],
            &len.to_le_bytes(),
            &offset.to_le_bytes(),
        ]
        .concat()
    };
    all.iter().flat_map(row).collect()
}

#[test]
fn a_frame_that_breaks_a_rule_ends_its_connection_and_no_other() {
    let (one, other) = (engine(), engine());
    let home = Home::of(&other, NAME, bytes(1 << 20, 1));
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    let mut good = raw(&other, 0);
    let grant = good.open(NAME);
    let read = Head::new(READ, 1, 0).row(grant, 0, 8);
    let write = Head::new(WRITE, 1, 8).row(grant, 0, 8);
    let all: Vec<(Head, Vec<u8>)> = vec![
        (Head::new(0, 0, 0), vec![]),
        (Head::new(7, 0, 0), vec![]),
        (Head::new(255, 0, 0), vec![]),
        (Head { flags: 2, ..read }, vec![]),
        (
            Head {
                flags: 128,
                ..write
            },
            vec![0; 8],
        ),
        (Head { status: 1, ..read }, vec![]),
        (Head { rows: 0, ..read }, vec![]),
        (Head { rows: 1001, ..read }, vec![0; 16_000]),
        (
            Head {
                rows: u32::MAX,
                ..read
            },
            vec![],
        ),
        (Head { bytes: 1, ..read }, vec![0]),
        (Head { len: 0, ..read }, vec![]),
        // Rows of more bytes than a frame may have, each of which is within 32 bits.
        (
            Head {
                rows: 1000,
                len: u32::MAX,
                ..read
            },
            rows(&vec![(grant, u32::MAX, 0); 999]),
        ),
        (
            Head {
                len: (64 << 20) + 1,
                ..read
            },
            vec![],
        ),
        (
            Head {
                bytes: (64 << 20) + 1,
                ..write
            },
            vec![],
        ),
        (
            Head {
                bytes: u64::MAX,
                ..write
            },
            vec![],
        ),
        (Head { bytes: 9, ..write }, vec![0; 9]),
        (Head { bytes: 7, ..write }, vec![0; 7]),
        (Head { flags: 1, ..read }, vec![0; 16]),
        (Head { flags: 1, ..write }, vec![0; 40]),
        (Head::new(OPEN, 0, 0), vec![]),
        (Head::new(OPEN, 0, 1025), vec![b'x'; 1025]),
        (Head::new(OPEN, 1, 4), b"home".to_vec()),
        (Head::new(OPEN, 0, u64::MAX), vec![]),
        (
            Head {
                flags: 1,
                ..Head::new(OPEN, 0, 4)
            },
            b"home".to_vec(),
        ),
        (Head::new(CLOSE, 0, 0), vec![]),
        (Head::new(CLOSE, 1, 1), vec![0]),
        (Head::new(PING, 1, 0), vec![]),
        (Head::new(PING, 0, 1), vec![0]),
        (Head::new(CALL, 0, (64 << 20) + 1), vec![]),
        (Head::new(CALL, 1, 0), vec![]),
    ];
    for (count, (head, rest)) in all.iter().enumerate() {
        let mut bad = raw(&other, 1);
        // It may be reset while it is still being said.
        let _gone = bad.stream.write_all(&[&head.bytes()[..], rest].concat());
        assert!(bad.answer().is_none(), "{head:?} was answered");
        until("it is counted", || {
            other.stats().malformed_frames == count as u64 + 1
        });
        good.send(Head::new(PING, 0, 0), &[]);
        assert_eq!(good.answer().unwrap().0.status, 0, "another one ended");
    }
    done(&one, Op::Read, &local, &remote, &pieces(1 << 20, 9000));
    assert!(local.get() == bytes(1 << 20, 1) && home.get() == local.get());
    drop(good);
    until("they have ended", || other.stats().connections == 2);
}

#[test]
fn what_is_forged_out_of_range_or_overflows_is_refused_and_counted() {
    let other = engine();
    let home = Home::of(&other, NAME, bytes(4096, 2));
    let _read_only = other
        .publish(
            b"read",
            &[Buffer::from_vec(vec![3; 4096])],
            Rights::READ,
            None,
        )
        .unwrap();
    let write_only = Buffer::from_vec(vec![4; 4096]);
    let _write_only = other
        .publish(
            b"write",
            std::slice::from_ref(&write_only),
            Rights::WRITE,
            None,
        )
        .unwrap();
    let mut one = raw(&other, 0);
    let numbers = [NAME, b"read", b"write"].map(|name| one.open(name));
    let [grant, read_only, write_only_number] = numbers;
    // A grant of another initiator is no grant of this one.
    let mut stranger = Raw::greet(other.address().unwrap(), 0, [8; 16], &[]);
    let theirs = stranger.open(NAME);
    assert!(!numbers.contains(&theirs));
    let refused = [
        (READ, grant, 4089, 8, 2),
        (READ, grant, u64::MAX, 8, 2),
        (READ, grant, u64::MAX - 7, 8, 2),
        (READ, grant, 4097, 1, 2),
        (WRITE, grant, 4089, 8, 2),
        (WRITE, grant, 1 << 63, 8, 2),
        (WRITE, read_only, 0, 8, 3),
        (READ, write_only_number, 0, 8, 3),
        (READ, theirs, 0, 8, 1),
        (WRITE, theirs, 0, 8, 1),
        (READ, 0, 0, 8, 1),
        (READ, u32::MAX, 0, 8, 1),
    ];
    for (count, (verb, number, offset, len, status)) in refused.into_iter().enumerate() {
        let body = if verb == WRITE { len } else { 0 };
        // Behind a good row, which is not done either.
        let first = Head::new(verb, 2, u64::from(2 * body)).row(grant, 0, len);
        let rest = [rows(&[(number, len, offset)]), vec![9; 2 * body as usize]].concat();
        one.send(first, &rest);
        let (answer, bytes) = one.answer().unwrap();
        assert_eq!((answer.status, answer.offset, bytes.len()), (status, 1, 0));
        assert_eq!(other.stats().refused_grants, count as u64 + 1);
    }
    assert!(home.get() == bytes(4096, 2) && write_only.to_vec() == [4; 4096]);
    one.send(Head::new(OPEN, 0, 4), b"nope");
    assert_eq!(one.answer().unwrap().0.status, 1);
    // What was closed is unknown, and closing it again changes nothing.
    for _ in 0..2 {
        one.send(Head::new(CLOSE, 1, 0).row(grant, 0, 0), &[]);
        assert_eq!(one.answer().unwrap().0.status, 0);
        one.send(Head::new(READ, 1, 0).row(grant, 0, 8), &[]);
        assert_eq!(one.answer().unwrap().0.status, 1);
    }
    assert_eq!(other.stats().malformed_frames, 0);
}

#[test]
fn any_bytes_at_all_end_one_connection_at_most() {
    let other = engine();
    let home = Home::of(&other, NAME, bytes(4096, 3));
    let mut rng = Rng::for_test("wire::any_bytes_at_all_end_one_connection_at_most");
    for round in 0..kvdepot_testkit::rounds(150) {
        let mut bad = raw(&other, round as u32 % 3);
        let grant = bad.open(NAME);
        let mut said = Vec::new();
        for _ in 0..rng.below(4) {
            let head = Head::new(rng.below(8) as u8, rng.below(4) as u32, rng.below(40));
            said.extend(
                head.row(grant, rng.below(5000), rng.below(64) as u32)
                    .bytes(),
            );
            said.extend((0..rng.below(60)).map(|_| rng.bits() as u8));
        }
        let _gone = bad.stream.write_all(&said);
        let _gone = bad.stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let _gone = bad.stream.read_to_end(&mut rest);
    }
    until("all have ended", || other.stats().connections == 0);
    assert_eq!(home.get().len(), 4096);
    let (one, local) = (engine(), Buffer::from_vec(vec![0; 4096]));
    let _registered = one.register(std::slice::from_ref(&local)).unwrap();
    one.open(other.address().unwrap(), NAME).unwrap();
}

#[test]
fn a_flood_of_greetings_costs_nobody_his_connection_and_ends() {
    let other = engine_of(Config {
        connections_max: 20,
        timeout: ms(600),
        ..config()
    });
    let home = Home::of(&other, NAME, bytes(1 << 20, 4));
    let one = engine();
    let address = other.address().unwrap();
    let remote = one.open(address, NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    done(&one, Op::Read, &local, &remote, &pieces(1 << 20, 4096));
    let is_over = Arc::new(AtomicBool::new(false));
    // Some say nothing, some a part, some a byte now and then, which never ends.
    let flood = |kind: usize| {
        let is_over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            while !is_over.load(Ordering::Acquire) {
                let Ok(mut stream) = TcpStream::connect(address) else {
                    continue;
                };
                let hello = hello(kind as u32, [kind as u8; 16]);
                match kind % 3 {
                    0 => drop(stream.write_all(&hello[..30])),
                    1 => drop(stream.write_all(&hello)),
                    _ => {
                        for byte in hello {
                            if stream.write_all(&[byte]).is_err() {
                                break;
                            }
                            std::thread::sleep(ms(40));
                        }
                    }
                }
                std::thread::sleep(ms(5));
            }
        })
    };
    let floods: Vec<_> = (0..30).map(flood).collect();
    let begun = Instant::now();
    while begun.elapsed() < ms(1500) {
        done(&one, Op::Read, &local, &remote, &pieces(1 << 20, 4096));
        assert!(other.stats().connections <= 21);
    }
    assert!(local.get() == home.get());
    is_over.store(true, Ordering::Release);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
    until("those of the flood have ended", || {
        other.stats().connections <= 2
    });
    // A byte now and then does not make a greeting last longer than it may.
    let before = other.stats().refused_greetings;
    let mut slow = TcpStream::connect(address).unwrap();
    let ends_early = hello(9, [9; 16]).iter().any(|byte| {
        std::thread::sleep(ms(100));
        slow.write_all(&[*byte]).is_err() || other.stats().refused_greetings > before
    });
    assert!(ends_early);
    let late = engine();
    until("there is room again", || late.open(address, NAME).is_ok());
}

#[test]
fn one_connection_too_many_is_told_so_and_the_others_stay() {
    let other = engine_of(Config {
        connections_max: 3,
        ..config()
    });
    let _home = Home::of(&other, NAME, bytes(4096, 5));
    let address = other.address().unwrap();
    let raws: Vec<Raw> = (0..3).map(|lane| raw(&other, lane)).collect();
    let mut refused = TcpStream::connect(address).unwrap();
    refused.write_all(&hello(9, [9; 16])).unwrap();
    let mut challenge = [0; 64];
    refused.read_exact(&mut challenge).unwrap();
    assert_eq!(challenge[10..12], [2, 0]);
    // What would be waited for.
    let timeout = Duration::from_secs(60);
    let one = engine_of(Config {
        timeout,
        ..config()
    });
    let begun = Instant::now();
    let error = one.open(address, NAME).unwrap_err();
    assert!(begun.elapsed() < timeout / 2, "{error}");
    for mut raw in raws {
        raw.send(Head::new(PING, 0, 0), &[]);
        assert_eq!(raw.answer().unwrap().0.status, 0);
    }
    until("there is room again", || one.open(address, NAME).is_ok());
}

#[test]
fn withdrawing_waits_for_no_peer_that_stalls_in_the_middle_of_its_bytes() {
    let other = engine();
    let len = 1 << 16;
    let memory = Buffer::from_vec(vec![0; len]);
    // A frame of many grants, which takes the target a while to look at.
    let name = |n: u32| n.to_le_bytes();
    let small = Buffer::from_vec(vec![0; 16]);
    let small = std::slice::from_ref(&small);
    let publish = |n| other.publish(&name(n), small, Rights::BOTH, None).unwrap();
    let _others: Vec<_> = (0..500).map(publish).collect();
    let mut first = raw(&other, 1);
    let others: Vec<_> = (0..500).map(|n| (first.open(&name(n)), 1, 0)).collect();
    let all = rows(&[&others[..], &others[..499]].concat());
    let mut rng =
        Rng::for_test("wire::withdrawing_waits_for_no_peer_that_stalls_in_the_middle_of_its_bytes");
    for round in 0..kvdepot_testkit::rounds(200) {
        let published = other
            .publish(NAME, std::slice::from_ref(&memory), Rights::BOTH, None)
            .unwrap();
        let mut stalled = raw(&other, 0);
        let grant = stalled.open(NAME);
        let head = Head::new(WRITE, 1000, len as u64 + 999).row(grant, 0, len as u32);
        let pause = Duration::from_micros(rng.below(900));
        let some = rng.below(100) as usize;
        stalled.send(head, &[&all[..], &[1; 100][..some]].concat());
        let begun = Instant::now();
        while begun.elapsed() < pause {
            std::hint::spin_loop();
        }
        let (done, gone) = std::sync::mpsc::channel();
        let withdraw = std::thread::spawn(move || {
            drop(published);
            done.send(()).unwrap();
        });
        let gone = gone.recv_timeout(Duration::from_secs(5));
        assert!(gone.is_ok(), "round {round}: withdrawing hangs");
        withdraw.join().unwrap();
        // Nothing of what comes now arrives anywhere.
        memory.write_at(0, &vec![0; len]).unwrap();
        let _gone = stalled.stream.write_all(&[1; 30_000]);
        assert!(memory.to_vec().iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_read_that_comes_to_its_end_is_not_cut_off_by_a_withdrawal() {
    let other = engine_of(Config {
        // Of which a part is the time that it has.
        timeout: Duration::from_secs(120),
        ..config()
    });
    // More than the system keeps of a connection.
    let len = 32 << 20;
    let memory = Buffer::from_vec(bytes(len, 9));
    let published = other.publish(NAME, &[memory], Rights::READ, None).unwrap();
    let mut reader = raw(&other, 0);
    let grant = reader.open(NAME);
    reader.send(Head::new(READ, 1, 0).row(grant, 0, len as u32), &[]);
    let mut head = [0; 40];
    reader.stream.read_exact(&mut head).unwrap();
    let (one, address) = (engine(), other.address().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| drop(published));
        until("it is withdrawn", || one.open(address, NAME).is_err());
        let mut got = vec![0; len];
        reader.stream.read_exact(&mut got).unwrap();
        assert!(got == bytes(len, 9));
    });
    reader.send(Head::new(PING, 0, 0), &[]);
    assert_eq!(reader.answer().unwrap().0.status, 0);
}

#[test]
fn a_connection_ends_the_one_that_had_its_lane_before_it_is_welcomed() {
    let other = engine();
    let home = Home::of(&other, NAME, vec![0; 1 << 20]);
    for round in 1..20_u8 {
        let mut old = raw(&other, 5);
        let grant = old.open(NAME);
        let head = Head::new(WRITE, 1, 1 << 20).row(grant, 0, 1 << 20);
        old.send(head, &vec![round; 300_000]);
        let mut new = raw(&other, 5);
        let len = home.get().len() as u32;
        // What is left of the old one's bytes comes later, and arrives nowhere.
        new.send(
            Head::new(WRITE, 1, u64::from(len)).row(grant, 0, len),
            &vec![100 + round; 1 << 20],
        );
        let _gone = old.stream.write_all(&vec![round; 700_000]);
        assert_eq!(new.answer().unwrap().0.status, 0);
        let _gone = old.stream.write_all(&vec![round; 48_576]);
        assert!(home.get().iter().all(|byte| *byte == 100 + round));
        assert!(old.answer().is_none());
    }
}

#[test]
fn numbers_are_not_given_to_another_name() {
    let other = engine();
    let _homes = [b"a", b"b"].map(|name| Home::of(&other, name, vec![name[0]; 64]));
    let mut seen = Vec::new();
    for engine in 0..40_u8 {
        let mut raw = Raw::greet(other.address().unwrap(), 0, [engine; 16], &[]);
        seen.extend([raw.open(b"a"), raw.open(b"b")]);
    }
    seen.sort_unstable();
    let count = seen.len();
    seen.dedup();
    assert_eq!(seen.len(), count);
}

#[test]
fn an_answer_that_breaks_a_rule_fails_what_it_answers_and_nothing_hangs() {
    let other = engine();
    let _home = Home::of(&other, NAME, bytes(1 << 16, 6));
    let mut rng =
        Rng::for_test("wire::an_answer_that_breaks_a_rule_fails_what_it_answers_and_nothing_hangs");
    for _ in 0..kvdepot_testkit::rounds(12) {
        let proxy = kvdepot_testkit::proxy::Proxy::plain(other.address().unwrap());
        let one = engine();
        let remote = one.open(proxy.address, NAME).unwrap();
        let local = Local::zeros(&one, 1 << 16);
        done(&one, Op::Read, &local, &remote, &pieces(1 << 16, 4096));
        // A head's first bytes: its verb, flags, status, rows, number, length.
        let bit = rng.below(24 * 8);
        proxy.rule(move |chunk, some| {
            let is_head = chunk.way == kvdepot_testkit::proxy::Way::Back
                && some.len() >= 40
                && chunk.before > 96;
            if is_head {
                kvdepot_testkit::proxy::Act::Flip(bit)
            } else {
                kvdepot_testkit::proxy::Act::Pass
            }
        });
        for op in [Op::Read, Op::Write] {
            let task = submit(
                &one,
                op,
                &local,
                &remote,
                &pieces(1 << 16, 4096),
                common::within(ms(3000)),
            );
            ended(&task);
        }
    }
}
