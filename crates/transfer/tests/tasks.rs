//! Tasks that are cancelled, overtaken, closed under, and left behind by a fork; and random batches
//! against a model.

#![expect(unsafe_code, reason = "forks")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::peer::{NAME, Peer};
use common::{
    Home, Late, Local, bytes, config, done, ended, engine, engine_of, ms, pieces, submit, within,
};
use kvdepot_media::Buffer;
use kvdepot_testkit::Rng;
use kvdepot_testkit::proxy::{Act, Proxy, Way};
use kvdepot_transfer::{Config, Error, Fault, Op, Options, Priority, Request, Status};

#[test]
fn plays_a_peer() {
    common::peer::play();
}

#[test]
fn what_is_cancelled_touches_no_memory_after_that() {
    let len = 8 << 20;
    let (one, other) = (engine(), engine());
    let home = Home::of(&other, NAME, bytes(len, 1));
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let mut rng = Rng::for_test("what_is_cancelled_touches_no_memory_after_that");
    for round in 0..kvdepot_testkit::rounds(60) {
        let op = *rng.pick(&[Op::Read, Op::Write]);
        let local = Local::of(&one, vec![round as u8; len]);
        let all = pieces(len as u64, rng.between(1000, 1 << 20));
        let task = submit(&one, op, &local, &remote, &all, Options::default());
        let pause = Duration::from_micros(rng.below(6000));
        let begun = Instant::now();
        while begun.elapsed() < pause {
            std::hint::spin_loop();
        }
        one.cancel(&task);
        assert!(task.is_over());
        assert!(begun.elapsed() < Duration::from_secs(60));
        // Whoever had it last may use it for something else.
        let buffer = local.buffer.clone();
        drop(local);
        let mut own = buffer.into_vec().unwrap();
        let before = own.clone();
        std::thread::sleep(ms(rng.below(4)));
        assert!(own == before, "round {round}");
        own.fill(0xEE);
        let content = home.get();
        for (status, (at, _, size)) in task.statuses().zip(&all) {
            let range = *at as usize..(at + size) as usize;
            match status {
                Status::Done => assert!(before[range.clone()] == content[range]),
                Status::Failed(Fault::Cancelled) => {}
                other => panic!("round {round}: {other:?}"),
            }
        }
    }
}

#[test]
fn cancelling_one_task_fails_no_other() {
    let len = 8 << 20;
    // Room for the writes behind the reads.
    let roomy = || {
        engine_of(Config {
            window: 32,
            retries: 1,
            ..config()
        })
    };
    let (one, other) = (roomy(), roomy());
    let _home = Home::of(&other, NAME, bytes(len, 2));
    let proxy = Proxy::to(other.address().unwrap(), |chunk, _| match chunk.way {
        Way::Back => Act::Delay(ms(5)),
        Way::There => Act::Pass,
    });
    let remote = one.open(proxy.address, NAME).unwrap();
    let (local, theirs) = (Local::zeros(&one, len), Local::zeros(&one, len));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::for_test("cancelling_one_task_fails_no_other");
            while !is_over.load(Ordering::Acquire) {
                let task = submit(
                    &one,
                    Op::Write,
                    &theirs,
                    &remote,
                    &[(0, 1 << 20, 7 << 20)],
                    Options::default(),
                );
                std::thread::sleep(Duration::from_micros(rng.below(3000)));
                one.cancel(&task);
                std::thread::sleep(ms(80));
            }
        });
        for _ in 0..kvdepot_testkit::rounds(1) {
            let task = submit(
                &one,
                Op::Read,
                &local,
                &remote,
                &pieces(len as u64, 1 << 20),
                Options::default(),
            );
            ended(&task);
            let fault = task.fault();
            if fault.is_some() {
                is_over.store(true, Ordering::Release);
            }
            assert_eq!(fault, None);
        }
        is_over.store(true, Ordering::Release);
    });
}

#[test]
fn what_is_urgent_overtakes_what_nobody_waits_for() {
    let len = 64 << 20;
    let (one, other) = (engine(), engine());
    let _home = Home::of(&other, NAME, bytes(len, 3));
    let proxy = Proxy::plain(other.address().unwrap());
    let remote = one.open(proxy.address, NAME).unwrap();
    let (local, mine) = (Local::zeros(&one, len), Local::zeros(&one, 1 << 20));
    done(&one, Op::Read, &mine, &remote, &pieces(1 << 20, 4096));
    proxy.rule(|chunk, _| match chunk.way {
        Way::Back => Act::Delay(ms(1)),
        Way::There => Act::Pass,
    });
    let background = Options {
        priority: Priority::Background,
        ..Options::default()
    };
    let urgent = Options {
        priority: Priority::Urgent,
        ..Options::default()
    };
    let slow = submit(
        &one,
        Op::Read,
        &local,
        &remote,
        &pieces(len as u64, 32 << 10),
        background,
    );
    for _ in 0..3 {
        let task = submit(
            &one,
            Op::Read,
            &mine,
            &remote,
            &pieces(1 << 20, 32 << 10),
            urgent,
        );
        ended(&task);
        assert!(task.is_done());
    }
    let left = slow
        .statuses()
        .filter(|status| *status == Status::Pending)
        .count();
    assert!(left > slow.len() / 4, "{left} of {} are left", slow.len());
    proxy.rule(|_, _| Act::Pass);
    ended(&slow);
    assert!(slow.is_done());
}

#[test]
fn closing_ends_what_is_under_way_wherever_it_is() {
    let peer = Peer::start(32 << 20, 4);
    for (stopped, greeted) in [(false, true), (true, true), (true, false)] {
        let one = engine();
        let local = Local::zeros(&one, 32 << 20);
        let remote = one.open(peer.address, NAME).unwrap();
        let all = pieces(32 << 20, 32 << 10);
        if greeted {
            done(&one, Op::Read, &local, &remote, &all);
        }
        if stopped {
            peer.stop();
        }
        let tasks: Vec<_> = [Op::Read, Op::Write, Op::Read]
            .map(|op| submit(&one, op, &local, &remote, &all, within(ms(200_000))))
            .into();
        std::thread::sleep(ms(5));
        let closes = Arc::clone(&one);
        let begun = Instant::now();
        let closing = std::thread::spawn(move || closes.close());
        for task in &tasks {
            ended(task);
        }
        let took = begun.elapsed();
        assert!(
            took < ms(100_000),
            "{took:?}, stopped: {stopped}, greeted: {greeted}"
        );
        assert!(tasks.iter().flat_map(|task| task.statuses()).all(|status| {
            matches!(
                status,
                Status::Done | Status::Failed(Fault::Closed | Fault::Lost)
            )
        }));
        closing.join().unwrap();
        let refused = one.run(std::iter::empty(), Options::default());
        assert!(matches!(refused, Err(Error::Closed)));
        if stopped {
            peer.go_on();
        }
    }
}

#[test]
fn a_task_that_took_long_to_be_asked_for_has_a_time_all_the_same() {
    let peer = Peer::start(1 << 20, 5);
    let one = engine();
    let remote = one.open(peer.address, NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    done(&one, Op::Read, &local, &remote, &pieces(1 << 20, 4096));
    peer.stop();
    let begun = Instant::now();
    let slow = (0..2_usize).map(|number| {
        std::thread::sleep(ms(1800));
        local.request(Op::Read, &remote, (0, number as u64, 8))
    });
    let task = one.submit(slow, within(ms(100))).unwrap();
    assert!(task.wait(Some(ms(20_000))), "its time is over for long");
    assert!(begun.elapsed() < ms(25_000));
}

#[test]
fn a_remote_of_another_engine_is_none_of_this_one() {
    let (one, two, other) = (engine(), engine(), engine());
    let home = Home::of(&other, NAME, bytes(4096, 6));
    let theirs = two.open(other.address().unwrap(), NAME).unwrap();
    let local = Local::zeros(&one, 4096);
    for op in [Op::Read, Op::Write] {
        let task = submit(
            &one,
            op,
            &local,
            &theirs,
            &[(0, 0, 4096)],
            Options::default(),
        );
        ended(&task);
        assert_eq!(task.status(0), Status::Failed(Fault::Unknown));
    }
    assert!(home.get() == bytes(4096, 6));
}

#[test]
fn a_remote_that_is_dropped_at_once_serves_what_was_asked_of_it() {
    let (one, other) = (engine(), engine());
    let home = Home::of(&other, NAME, bytes(1 << 20, 7));
    let local = Local::zeros(&one, 1 << 20);
    for _ in 0..30 {
        local.buffer.write_at(0, &vec![0; 1 << 20]).unwrap();
        let remote = one.open(other.address().unwrap(), NAME).unwrap();
        let all = pieces(1 << 20, 4096);
        let task = submit(&one, Op::Read, &local, &remote, &all, Options::default());
        drop(remote);
        ended(&task);
        assert!(task.is_done(), "{:?}", task.fault());
        assert!(local.get() == home.get());
    }
}

#[test]
fn a_peer_that_is_forgotten_and_met_again_is_not_written_by_what_came_before() {
    let len = 256 << 10;
    let one = engine_of(Config {
        slice_size: 64 << 10,
        tail_merge: 0,
        streams: 4,
        ..config()
    });
    let other = engine();
    let home = Home::of(&other, NAME, vec![0; len]);
    let proxy = Proxy::plain(other.address().unwrap());
    let (old, new) = (Local::of(&one, vec![1; len]), Local::of(&one, vec![2; len]));
    for _ in 0..2 {
        let remote = one.open(proxy.address, NAME).unwrap();
        for _ in 0..4 {
            done(&one, Op::Write, &new, &remote, &pieces(len as u64, 4096));
        }
        let known = proxy.connections();
        proxy.rule(move |chunk, some| {
            let is_old = chunk.connection < known;
            if is_old && chunk.way == Way::There && some.len() > 4096 {
                return Act::Delay(ms(200));
            }
            Act::Pass
        });
        let task = submit(
            &one,
            Op::Write,
            &old,
            &remote,
            &pieces(len as u64, 16 << 10),
            Options::default(),
        );
        std::thread::sleep(ms(20));
        one.forget(proxy.address);
        ended(&task);
        let again = one.open(proxy.address, NAME).unwrap();
        // One slice, over one lane; the late bytes of it are in another.
        let slice = (128 << 10, 128 << 10, 64 << 10);
        done(&one, Op::Write, &new, &again, &[slice]);
        std::thread::sleep(ms(900));
        let got = home.get();
        let is_new = |byte: &u8| *byte == 2;
        assert!(got[128 << 10..192 << 10].iter().all(is_new), "overwritten");
        proxy.rule(|_, _| Act::Pass);
    }
}

#[test]
fn a_forked_child_asks_for_nothing_and_ends() {
    let (one, other) = (engine(), engine());
    let home = Home::of(&other, NAME, bytes(8 << 20, 8));
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let local = Local::zeros(&one, 8 << 20);
    let all = pieces(8 << 20, 16 << 10);
    for _ in 0..20 {
        let task = submit(&one, Op::Read, &local, &remote, &all, Options::default());
        // SAFETY: the child calls what a child may call here, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = one.submit(std::iter::empty(), Options::default());
            let opened = one.open(other.address().unwrap(), NAME);
            let is_right =
                matches!(refused, Err(Error::Closed)) && matches!(opened, Err(Error::Closed));
            drop((remote, local, home));
            one.close();
            drop((one, other));
            // SAFETY: nothing is to be cleaned up in the child.
            unsafe { libc::_exit(i32::from(!is_right)) }
        }
        ended(&task);
        assert!(task.is_done(), "{:?}", task.fault());
        let begun = Instant::now();
        let mut status = 0;
        // SAFETY: the status is this frame's.
        while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
            if begun.elapsed() > Duration::from_secs(10) {
                // SAFETY: a child that was not waited for.
                unsafe { libc::kill(child, libc::SIGKILL) };
                panic!("the child hangs");
            }
            std::thread::sleep(ms(1));
        }
        assert_eq!(status, 0);
    }
    assert!(local.get() == home.get());
}

#[test]
fn a_time_of_nothing_and_one_without_an_end() {
    let (one, other) = (engine(), engine());
    let _home = Home::of(&other, NAME, bytes(1 << 20, 9));
    let remote = one.open(other.address().unwrap(), NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    for timeout in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        let begun = Instant::now();
        let late = Late::at(begun + ms(100));
        let task = submit(
            &one,
            Op::Read,
            &local,
            &remote,
            &pieces(1 << 20, 999),
            within(timeout),
        );
        ended(&task);
        if timeout < ms(1) {
            late.assert_in_time(begun + ms(100));
        } else {
            assert!(task.is_done());
        }
    }
}

/// What is asked of one engine, and what must be in both memories afterwards.
struct Model {
    remote: Vec<u8>,
    local: Vec<u8>,
}

/// Requests of which none writes what another one reads or writes.
fn batch(rng: &mut Rng, len: u64) -> Vec<(Op, u64, u64, u64)> {
    let most = *rng.pick(&[1, 7, 300, 5_000, 70_000, 300_000]);
    let (mut all, mut reads) = (Vec::new(), Vec::new());
    // Where reads go: behind the half that writes come from.
    let (mut at, mut to) = (rng.below(most + 1), len);
    while at < len && all.len() < 4000 {
        let size = rng.between(1, most).min(len - at);
        match rng.below(5) {
            0 => {}
            1 | 2 => {
                let jumps = rng.once_in(3);
                let from = if jumps { rng.below(len - size + 1) } else { at };
                all.push((Op::Write, from, at, size));
            }
            _ => {
                reads.push((at, size));
                all.push((Op::Read, to, at, size));
                to += size + if rng.once_in(3) { rng.below(9) } else { 0 };
            }
        }
        at += size;
    }
    // The same bytes again, to another place.
    for _ in 0..rng.below(20) {
        if reads.is_empty() {
            break;
        }
        let (at, size) = *rng.pick(&reads);
        let inside = rng.below(size);
        all.push((Op::Read, to, at + inside, size - inside));
        to += size;
    }
    if rng.once_in(2) {
        for n in (1..all.len()).rev() {
            all.swap(n, rng.below(n as u64 + 1) as usize);
        }
    }
    all
}

#[test]
fn random_batches_do_what_a_model_does() {
    let mut rng = Rng::for_test("random_batches_do_what_a_model_does");
    let len = 600_000_u64;
    for _ in 0..kvdepot_testkit::rounds(12) {
        let slice_size = *rng.pick(&[4096, 4097, 9_999, 65_537, 512 << 10]);
        let one = engine_of(Config {
            streams: rng.between(1, 4) as usize,
            slice_size,
            tail_merge: rng.below(slice_size + 1),
            watermark: rng.between(1, 9) as usize,
            window: rng.between(1, 12) as usize,
            checksum: rng.once_in(2),
            ..config()
        });
        let other = engine_of(Config {
            window: rng.between(1, 12) as usize,
            ..config()
        });
        // In several buffers, whose borders nobody on the other side sees.
        let mut model = Model {
            remote: bytes(len as usize, rng.bits()),
            local: bytes(4 * len as usize + 8_000_000, rng.bits()),
        };
        let mut homes = Vec::new();
        let mut at = 0;
        while at < model.remote.len() {
            let size = (rng.between(1, 200_000) as usize).min(model.remote.len() - at);
            homes.push(Buffer::from_vec(model.remote[at..at + size].to_vec()));
            at += size;
        }
        let rights = kvdepot_transfer::Rights::BOTH;
        let _published = other.publish(NAME, &homes, rights, None).unwrap();
        let remote = one.open(other.address().unwrap(), NAME).unwrap();
        let local = Local::of(&one, model.local.clone());
        for _ in 0..8 {
            let all = batch(&mut rng, len);
            let before = model.local.clone();
            for &(op, at, offset, size) in &all {
                let (at, offset, size) = (at as usize, offset as usize, size as usize);
                match op {
                    Op::Write => {
                        model.remote[offset..offset + size].copy_from_slice(&before[at..at + size]);
                    }
                    Op::Read => {
                        let from = &model.remote[offset..offset + size];
                        model.local[at..at + size].copy_from_slice(from);
                    }
                }
            }
            let requests: Vec<Request<'_>> = all
                .iter()
                .map(|&(op, at, offset, size)| local.request(op, &remote, (at, offset, size)))
                .collect();
            let task = match rng.once_in(2) {
                true => one.run(requests.into_iter(), Options::default()),
                false => one.submit(requests.into_iter(), Options::default()),
            };
            let task = task.unwrap();
            ended(&task);
            assert!(task.is_done(), "{:?}", task.fault());
            assert!(local.get() == model.local);
            let there: Vec<u8> = homes.iter().flat_map(Buffer::to_vec).collect();
            assert!(there == model.remote);
        }
    }
}
