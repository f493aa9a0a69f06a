//! What the way between two engines may do, and what it costs: cuts, delays, bits that flip, peers
//! that start anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::peer::NAME;
use crate::common::{
    Home, Late, Local, bytes, config, done, ended, engine, engine_of, held, ms, pieces, submit,
    until, within,
};
use kvdepot_testkit::Rng;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::proxy::{Act, Proxy, Way};
use kvdepot_transfer::{Config, Engine, Fault, Op, Options, Status};

/// An engine, a target with `len` bytes, and what stands between them.
struct Pair {
    one: Arc<Engine>,
    other: Arc<Engine>,
    home: Home,
    proxy: Proxy,
}

fn pair(config: Config, len: usize) -> Pair {
    let (one, other) = (engine_of(config), engine());
    let home = Home::of(&other, NAME, bytes(len, 1));
    let proxy = Proxy::plain(other.address().unwrap());
    Pair {
        one,
        other,
        home,
        proxy,
    }
}

#[test]
fn a_connection_cut_mid_slice_costs_no_byte() {
    let len = 8 << 20;
    for checksum in [false, true] {
        let retries = 30;
        let Pair {
            one, home, proxy, ..
        } = pair(
            Config {
                checksum,
                retries,
                ..config()
            },
            len,
        );
        let remote = one.open(proxy.address, NAME).unwrap();
        let local = Local::of(&one, bytes(len, 2));
        for way in [Way::There, Way::Back] {
            for op in [Op::Write, Op::Read] {
                // After some bytes of each connection, in the middle of whatever it is.
                let mut rng = Rng::for_test("paths::a_connection_cut_mid_slice_costs_no_byte");
                let mut cuts = 6;
                let from = proxy.connections();
                let mut at = rng.between(1000, 2 << 20);
                proxy.rule(move |chunk, some| {
                    let end = chunk.before + some.len() as u64;
                    if chunk.connection + 2 < from || chunk.way != way || cuts == 0 || end < at {
                        return Act::Pass;
                    }
                    cuts -= 1;
                    at = rng.between(1000, 2 << 20);
                    Act::Cut(rng.below(some.len() as u64) as usize)
                });
                done(&one, op, &local, &remote, &pieces(len as u64, 30_000));
                assert!(home.get() == local.get(), "{op:?} {way:?}");
                local.buffer.write_at(0, &bytes(len, 3)).unwrap();
            }
        }
    }
}

#[test]
fn a_slow_way_only_costs_time() {
    let Pair {
        one, home, proxy, ..
    } = pair(config(), 1 << 20);
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    let mut rng = Rng::for_test("paths::a_slow_way_only_costs_time");
    proxy.rule(move |_, _| Act::Delay(ms(rng.below(8))));
    done(&one, Op::Read, &local, &remote, &pieces(1 << 20, 5_000));
    assert!(local.get() == home.get());
    let mine = Local::of(&one, bytes(1 << 20, 4));
    done(&one, Op::Write, &mine, &remote, &pieces(1 << 20, 5_000));
    assert!(home.get() == mine.get());
}

#[test]
fn bits_that_flip_are_found_wherever_they_are() {
    let len = 2 << 20;
    let all = pieces(len as u64, 9_000);
    let mut rng = Rng::for_test("paths::bits_that_flip_are_found_wherever_they_are");
    let Pair {
        one, home, proxy, ..
    } = pair(
        Config {
            checksum: true,
            retries: 20,
            ..config()
        },
        len,
    );
    let remote = one.open(proxy.address, NAME).unwrap();
    let flips = Arc::new(AtomicU64::new(0));
    for round in 0..kvdepot_testkit::rounds(60) {
        let op = [Op::Read, Op::Write][(round % 2) as usize];
        let way = *rng.pick(&[Way::There, Way::Back]);
        // Often among heads and rows, which are a small part of all.
        let early = rng.once_in(2);
        let at = if early {
            rng.below(200)
        } else {
            rng.below(1 << 20)
        };
        let (mut seen, bit) = (0, rng.bits() >> 8);
        let its = Arc::clone(&flips);
        proxy.rule(move |chunk, some| {
            if chunk.way != way || seen > at {
                return Act::Pass;
            }
            seen += some.len() as u64;
            if seen <= at {
                return Act::Pass;
            }
            its.fetch_add(1, Ordering::Relaxed);
            let near = if early {
                bit % (some.len() as u64).min(700)
            } else {
                bit
            };
            Act::Flip(near * 8 + (bit >> 40) % 8)
        });
        let content = bytes(len, 100 + round);
        let local = match op {
            Op::Write => Local::of(&one, content.clone()),
            Op::Read => {
                home.buffer.write_at(0, &content).unwrap();
                Local::zeros(&one, len)
            }
        };
        let task = submit(&one, op, &local, &remote, &all, within(ms(10_000)));
        ended(&task);
        proxy.rule(|_, _| Act::Pass);
        // A flip may look like a refusal; it never looks like success.
        let (from, to) = match op {
            Op::Write => (local.get(), home.get()),
            Op::Read => (home.get(), local.get()),
        };
        for (status, (at, _, size)) in task.statuses().zip(&all) {
            let range = *at as usize..(at + size) as usize;
            let same = from[range.clone()] == to[range];
            assert!(
                same || status != Status::Done,
                "round {round}: {op:?} {way:?} at {at}"
            );
        }
        assert!(home.get().len() == len && from == content, "round {round}");
    }
    assert!(flips.load(Ordering::Relaxed) >= 40);
}

#[test]
fn a_write_that_arrives_late_overwrites_nothing_that_came_after() {
    let len = 256 << 10;
    for streams in [1, 2, 4] {
        let slice_size = 64 << 10;
        let Pair {
            one,
            other,
            home,
            proxy,
        } = pair(
            Config {
                streams,
                slice_size,
                tail_merge: 0,
                ..config()
            },
            len,
        );
        let remote = one.open(proxy.address, NAME).unwrap();
        let old = Local::of(&one, vec![1; len]);
        let new = Local::of(&one, vec![2; len]);
        // All lanes are there.
        for _ in 0..4 {
            done(
                &one,
                Op::Read,
                &Local::zeros(&one, len),
                &remote,
                &pieces(len as u64, 4096),
            );
        }
        let mut late = 0;
        for round in 0..4 {
            // The first bytes of a write are held back while the initiator loses the connection.
            let held_back = Arc::new(AtomicU64::new(0));
            let its = Arc::clone(&held_back);
            let known = proxy.connections();
            proxy.rule(move |chunk, some| {
                let is_old = chunk.connection < known;
                if is_old && chunk.way == Way::There && some.len() > 4096 {
                    its.fetch_add(1, Ordering::SeqCst);
                    return Act::Late(ms(150));
                }
                Act::Pass
            });
            // It is moved again by itself, or given up by its caller.
            let timeout = if round % 2 == 0 { ms(20_000) } else { ms(40) };
            let task = submit(
                &one,
                Op::Write,
                &old,
                &remote,
                &pieces(len as u64, 16 << 10),
                within(timeout),
            );
            ended(&task);
            late += u64::from(held_back.load(Ordering::SeqCst) > 0);
            done(
                &one,
                Op::Write,
                &new,
                &remote,
                &pieces(len as u64, 16 << 10),
            );
            // What was late has arrived by now, wherever that is.
            std::thread::sleep(ms(400));
            let got = home.get();
            let wrong = got.iter().position(|byte| *byte != 2);
            assert_eq!(wrong, None, "{streams} streams, round {round}");
            home.buffer.write_at(0, &vec![0; len]).unwrap();
        }
        assert!(late >= 2, "nothing was held back");
        drop(other);
    }
}

#[test]
fn another_lane_writes_nothing_before_a_lost_ones_bytes_are_over() {
    let len = 60_000;
    let Pair {
        one, home, proxy, ..
    } = pair(config(), len);
    let remote = one.open(proxy.address, NAME).unwrap();
    let (old, new) = (Local::of(&one, vec![1; len]), Local::of(&one, vec![2; len]));
    let whole = [(0, 0, len as u64)];
    for round in 0..3 {
        proxy.rule(|_, _| Act::Pass);
        // A batch of one slice takes the next lane: both are there then.
        for _ in 0..2 {
            done(&one, Op::Write, &new, &remote, &whole);
        }
        let known = proxy.connections();
        let mut is_late = false;
        proxy.rule(move |chunk, some| {
            if chunk.connection >= known {
                // Who takes the lost one's place is welcomed behind its late bytes.
                return Act::Delay(ms(150));
            }
            let is_write = chunk.way == Way::There && some.len() > 4096;
            if is_write && !std::mem::replace(&mut is_late, true) {
                return Act::Late(ms(120));
            }
            Act::Pass
        });
        let task = submit(&one, Op::Write, &old, &remote, &whole, within(ms(40)));
        ended(&task);
        done(&one, Op::Write, &new, &remote, &whole);
        std::thread::sleep(ms(300));
        let wrong = home.get().iter().filter(|byte| **byte != 2).count();
        assert_eq!(wrong, 0, "round {round}: overwritten");
    }
}

#[test]
fn writes_fail_at_once_where_a_lane_with_unanswered_ones_cannot_come_back() {
    let len = 1 << 20;
    // What would be waited for.
    let timeout = Duration::from_secs(60);
    let Pair {
        one, home, proxy, ..
    } = pair(
        Config {
            timeout,
            ..config()
        },
        len,
    );
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::of(&one, bytes(len, 5));
    done(&one, Op::Write, &local, &remote, &pieces(len as u64, 4096));
    until("both lanes are there", || {
        done(&one, Op::Read, &local, &remote, &pieces(len as u64, 4096));
        proxy.connections() == 2
    });
    // The next write ends its connection, and none comes after.
    let gone = AtomicBool::new(false);
    proxy.rule(move |chunk, some| {
        let ends = chunk.connection > 1
            || some.len() > 4096 && chunk.way == Way::There && !gone.swap(true, Ordering::AcqRel);
        if ends { Act::Cut(0) } else { Act::Pass }
    });
    let begun = Instant::now();
    let task = submit(
        &one,
        Op::Write,
        &local,
        &remote,
        &pieces(len as u64, 4096),
        within(timeout),
    );
    ended(&task);
    assert!(begun.elapsed() < timeout / 2, "{:?}", begun.elapsed());
    for _ in 0..3 {
        let begun = Instant::now();
        let task = submit(
            &one,
            Op::Write,
            &local,
            &remote,
            &[(0, 0, 9)],
            within(timeout),
        );
        ended(&task);
        assert_eq!(task.status(0), Status::Failed(Fault::Lost));
        assert!(begun.elapsed() < timeout / 2);
    }
    proxy.rule(|_, _| Act::Pass);
    until("it is asked again", || {
        let task = submit(
            &one,
            Op::Write,
            &local,
            &remote,
            &pieces(len as u64, 4096),
            Options::default(),
        );
        ended(&task);
        std::thread::sleep(ms(20));
        task.is_done()
    });
    assert!(home.get() == local.get());
}

#[test]
fn a_peer_that_was_idle_and_starts_anew_serves_all_lanes() {
    let len = 4 << 20;
    for streams in [1, 2, 4] {
        // What would be waited for.
        let timeout = Duration::from_secs(60);
        let one = engine_of(Config {
            streams,
            timeout,
            ..config()
        });
        let mut other = engine();
        let address = other.address().unwrap();
        let mut home = Home::of(&other, NAME, bytes(len, 20));
        let remote = one.open(address, NAME).unwrap();
        let local = Local::zeros(&one, len);
        for round in 0..6 {
            done(&one, Op::Read, &local, &remote, &pieces(len as u64, 10_000));
            assert!(local.get() == home.get());
            std::thread::sleep(ms(30));
            drop(home);
            other.close();
            other = engine_of(Config {
                listen: Some(address),
                ..config()
            });
            home = Home::of(&other, NAME, bytes(len, 21 + round));
        }
        let begun = Instant::now();
        done(&one, Op::Read, &local, &remote, &pieces(len as u64, 10_000));
        assert!(begun.elapsed() < timeout / 2, "{:?}", begun.elapsed());
    }
}

#[test]
fn what_a_peer_had_before_it_started_anew_is_not_taken_for_something_else() {
    let one = engine();
    let mut other = engine();
    let address = other.address().unwrap();
    let names: Vec<Vec<u8>> = (0..8).map(|n| format!("home {n}").into_bytes()).collect();
    let publish = |engine: &Arc<Engine>| -> Vec<Home> {
        let home = |(n, name): (usize, &Vec<u8>)| Home::of(engine, name, vec![n as u8 + 1; 4096]);
        names.iter().enumerate().map(home).collect()
    };
    let mut homes = publish(&other);
    let remotes: Vec<_> = names
        .iter()
        .map(|name| one.open(address, name).unwrap())
        .collect();
    let local = Local::zeros(&one, 4096);
    let mut rng = Rng::for_test(
        "paths::what_a_peer_had_before_it_started_anew_is_not_taken_for_something_else",
    );
    for round in 0..6 {
        drop(homes);
        other.close();
        other = engine_of(Config {
            listen: Some(address),
            ..config()
        });
        homes = publish(&other);
        // In another order than they were opened in.
        for _ in 0..12 {
            let n = rng.below(8) as usize;
            done(&one, Op::Read, &local, &remotes[n], &[(0, 0, 4096)]);
            assert!(
                local.get() == vec![n as u8 + 1; 4096],
                "round {round}: {n} is {}",
                local.get()[0]
            );
            let mine = Local::of(&one, vec![n as u8 + 1; 4096]);
            done(&one, Op::Write, &mine, &remotes[n], &[(0, 0, 4096)]);
        }
        for (n, home) in homes.iter().enumerate() {
            assert!(
                home.get() == vec![n as u8 + 1; 4096],
                "round {round}: {n} was overwritten"
            );
        }
    }
}

#[test]
fn a_thousand_lost_connections_leave_nothing_behind() {
    match child::role() {
        None => Child::start(
            "paths::a_thousand_lost_connections_leave_nothing_behind",
            "alone",
            &[],
        )
        .expect("well"),
        Some(_) => {
            lose_a_thousand();
            child::say("well");
        }
    }
}

fn lose_a_thousand() {
    let Pair {
        one,
        other,
        proxy,
        home: _home,
    } = pair(
        Config {
            retries: 8,
            ..config()
        },
        1 << 20,
    );
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    let read = || {
        let task = submit(
            &one,
            Op::Read,
            &local,
            &remote,
            &pieces(1 << 20, 60_000),
            Options::default(),
        );
        ended(&task);
    };
    read();
    let mut before = (0, 0);
    let mut rounds = 0;
    while proxy.connections() < 1000 {
        if rounds == 10 {
            before = held();
        }
        rounds += 1;
        read();
        proxy.cut_all();
    }
    let lost = Instant::now();
    loop {
        let now = held();
        // Some of the connections of the proxy may be ending.
        if now.0 <= before.0 + 8 && now.1 <= before.1 + 8 {
            break;
        }
        assert!(
            lost.elapsed() < Duration::from_secs(20),
            "{before:?} before, {now:?} after"
        );
        std::thread::sleep(ms(20));
    }
    let remote_of = one.stats();
    assert_eq!(remote_of.peers, 1);
    until("the target has let them go", || {
        other.stats().connections <= 2
    });
    done(&one, Op::Read, &local, &remote, &pieces(1 << 20, 60_000));
    one.close();
    until("the target has let all go", || {
        other.stats().connections == 0
    });
}

#[test]
fn a_batch_ends_in_its_time_over_a_way_that_swallows_all() {
    let Pair {
        one,
        proxy,
        home: _home,
        ..
    } = pair(config(), 1 << 20);
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    for _ in 0..2 {
        for op in [Op::Read, Op::Write] {
            proxy.rule(|_, _| Act::Delay(ms(600)));
            let begun = Instant::now();
            let late = Late::at(begun + ms(150));
            let task = submit(
                &one,
                op,
                &local,
                &remote,
                &pieces(1 << 20, 4096),
                within(ms(150)),
            );
            ended(&task);
            late.assert_in_time(begun + ms(150));
            let failed = task
                .statuses()
                .filter(|status| matches!(status, Status::Failed(_)));
            assert!(failed.count() > 0);
        }
    }
}
