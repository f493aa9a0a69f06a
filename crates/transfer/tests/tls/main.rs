//! Engines whose connections are under TLS: what they move, whom they refuse, and what is left of
//! them.

#![expect(
    unsafe_code,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and forks"
)]

mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../peer_tier/hosts.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod hosts;
mod refused;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use certificates::Authority;
use common::peer::NAME;
use common::{
    Home, Late, Local, bytes, config, done, ended, engine_of, held, ms, pieces, submit, until,
    within,
};
use kvdepot_testkit::Rng;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::proxy::{Act, Proxy, Way};
use kvdepot_transfer::{Config, Engine, Op, Options, Status, Tls};

/// The settings of an engine here.
fn under(tls: &Tls) -> Config {
    Config {
        tls: Some(tls.clone()),
        ..config()
    }
}

/// An engine, a target with `len` bytes, and what stands between them.
struct Pair {
    one: Arc<Engine>,
    other: Arc<Engine>,
    home: Home,
    proxy: Proxy,
}

fn pair(config: Config, len: usize) -> Pair {
    let (one, other) = (engine_of(config.clone()), engine_of(config));
    let home = Home::of(&other, NAME, bytes(len, 1));
    let proxy = Proxy::plain(other.address().unwrap());
    Pair {
        one,
        other,
        home,
        proxy,
    }
}

/// Runs a scene in a process of its own, where nothing else has threads or descriptors.
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
fn batches_of_reads_and_writes_come_whole() {
    let authority = Authority::new();
    let tls = authority.tls();
    let len = 8 << 20;
    for (checksum, token) in [(false, &b""[..]), (true, b"too")] {
        let config = Config {
            checksum,
            token: token.to_vec(),
            ..under(&tls)
        };
        let (one, other) = (engine_of(config.clone()), engine_of(config));
        let home = Home::of(&other, NAME, bytes(len, 1));
        let remote = one.open(other.address().unwrap(), NAME).unwrap();
        let local = Local::zeros(&one, len);
        for size in [900, 70_000, 3 << 20] {
            local.buffer.write_at(0, &vec![0; len]).unwrap();
            done(&one, Op::Read, &local, &remote, &pieces(len as u64, size));
            assert!(local.get() == home.get(), "{size}");
            local.buffer.write_at(0, &bytes(len, size)).unwrap();
            done(&one, Op::Write, &local, &remote, &pieces(len as u64, size));
            assert!(home.get() == bytes(len, size), "{size}");
        }
        // By the caller's thread.
        let few = [local.request(Op::Read, &remote, (7, 9, 100))];
        let task = one.run(few.into_iter(), Options::default()).unwrap();
        assert!(task.is_done());
        assert!(local.get()[7..107] == home.get()[9..109]);
        assert!(one.ping(other.address().unwrap()).is_ok());
    }
}

#[test]
fn both_ways_at_once_do_not_wait_for_each_other() {
    let authority = Authority::new();
    let tls = authority.tls();
    let len = 32 << 20;
    let Pair {
        one, other, home, ..
    } = pair(
        Config {
            streams: 1,
            ..under(&tls)
        },
        len,
    );
    let out = Home::of(&other, b"out", vec![0; len]);
    let address = other.address().unwrap();
    let (reads, writes) = (one.open(address, NAME), one.open(address, b"out"));
    let (reads, writes) = (reads.unwrap(), writes.unwrap());
    let (mine, theirs) = (Local::zeros(&one, len), Local::of(&one, bytes(len, 2)));
    let all = pieces(len as u64, 400_000);
    let read = submit(&one, Op::Read, &mine, &reads, &all, Options::default());
    let write = submit(&one, Op::Write, &theirs, &writes, &all, Options::default());
    ended(&read);
    ended(&write);
    assert!(read.is_done() && write.is_done());
    assert!(mine.get() == home.get() && out.get() == theirs.get());
}

#[test]
fn nothing_that_is_moved_can_be_read_on_the_way() {
    let authority = Authority::new();
    let tls = authority.tls();
    let Pair {
        one,
        other: _other,
        home: _home,
        proxy,
    } = pair(under(&tls), 1 << 20);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let its = Arc::clone(&seen);
    proxy.rule(move |_, some| {
        its.lock().unwrap().extend_from_slice(some);
        Act::Pass
    });
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    done(&one, Op::Read, &local, &remote, &[(0, 0, 1 << 20)]);
    let seen = seen.lock().unwrap();
    assert!(seen.len() > 1 << 20, "it went another way");
    let has = |what: &[u8]| seen.windows(what.len()).any(|some| some == what);
    assert!(!has(NAME) && !has(b"kvdxfer") && !has(&local.get()[5000..5016]));
}

#[test]
fn a_connection_cut_mid_slice_costs_no_byte() {
    let authority = Authority::new();
    let tls = authority.tls();
    let len = 4 << 20;
    let Pair {
        one, home, proxy, ..
    } = pair(
        Config {
            retries: 30,
            ..under(&tls)
        },
        len,
    );
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::of(&one, bytes(len, 2));
    for way in [Way::There, Way::Back] {
        for op in [Op::Write, Op::Read] {
            let mut rng = Rng::for_test("a_connection_cut_mid_slice_costs_no_byte");
            let mut cuts = 6;
            let from = proxy.connections();
            // The handshake has less.
            let mut at = rng.between(10_000, 1 << 20);
            proxy.rule(move |chunk, some| {
                let end = chunk.before + some.len() as u64;
                if chunk.connection + 2 < from || chunk.way != way || cuts == 0 || end < at {
                    return Act::Pass;
                }
                cuts -= 1;
                at = rng.between(10_000, 1 << 20);
                Act::Cut(rng.below(some.len() as u64) as usize)
            });
            done(&one, op, &local, &remote, &pieces(len as u64, 30_000));
            assert!(home.get() == local.get(), "{op:?} {way:?}");
            local.buffer.write_at(0, &bytes(len, 3)).unwrap();
        }
    }
}

#[test]
fn a_bit_that_flips_ends_the_connection_and_costs_no_byte() {
    let authority = Authority::new();
    let tls = authority.tls();
    let len = 1 << 20;
    let Pair {
        one, home, proxy, ..
    } = pair(
        Config {
            retries: 30,
            ..under(&tls)
        },
        len,
    );
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::zeros(&one, len);
    for way in [Way::There, Way::Back] {
        let mut flips = 4;
        proxy.rule(move |chunk, some| {
            if chunk.way != way || chunk.before < 10_000 || flips == 0 || some.len() < 1000 {
                return Act::Pass;
            }
            flips -= 1;
            Act::Flip(some.len() as u64 * 4)
        });
        let op = if way == Way::There {
            Op::Write
        } else {
            Op::Read
        };
        done(&one, op, &local, &remote, &pieces(len as u64, 30_000));
        assert!(home.get() == local.get(), "{op:?}");
        local.buffer.write_at(0, &bytes(len, 4)).unwrap();
    }
}

#[test]
fn a_batch_ends_in_its_time_over_a_way_that_swallows_all() {
    let authority = Authority::new();
    let tls = authority.tls();
    let Pair {
        one, home, proxy, ..
    } = pair(under(&tls), 8 << 20);
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::zeros(&one, 8 << 20);
    for op in [Op::Read, Op::Write, Op::Read, Op::Write] {
        proxy.rule(|_, _| Act::Delay(ms(600)));
        let begun = Instant::now();
        let late = Late::at(begun + ms(200));
        let all = pieces(8 << 20, 40_000);
        let task = submit(&one, op, &local, &remote, &all, within(ms(200)));
        ended(&task);
        late.assert_in_time(begun + ms(200));
        let left = local.get();
        let failed = |status| matches!(status, Status::Failed(_));
        assert!(task.statuses().any(failed));
        std::thread::sleep(ms(100));
        assert!(local.get() == left, "written after its task was over");
    }
    drop(home);
}

#[test]
fn connections_that_are_lost_leave_neither_threads_nor_descriptors() {
    alone(
        "connections_that_are_lost_leave_neither_threads_nor_descriptors",
        lose_many,
    );
}

fn lose_many() {
    let authority = Authority::new();
    let tls = authority.tls();
    let before_all = held();
    let Pair {
        one,
        other,
        proxy,
        home,
    } = pair(
        Config {
            retries: 8,
            ..under(&tls)
        },
        1 << 20,
    );
    let remote = one.open(proxy.address, NAME).unwrap();
    let local = Local::zeros(&one, 1 << 20);
    let all = pieces(1 << 20, 60_000);
    let read = || {
        ended(&submit(
            &one,
            Op::Read,
            &local,
            &remote,
            &all,
            Options::default(),
        ));
    };
    let mut before = (0, 0);
    for round in 0..100 {
        if round == 10 {
            before = held();
        }
        read();
        proxy.cut_all();
    }
    assert!(proxy.connections() > 100);
    // Some of the connections of the proxy may be ending.
    let is_as_before = |now: (usize, usize)| now.0 <= before.0 + 8 && now.1 <= before.1 + 8;
    until("what was lost is let go", || is_as_before(held()));
    done(&one, Op::Read, &local, &remote, &all);
    assert!(local.get() == home.get());
    one.close();
    until("the target has let all go", || {
        other.stats().connections == 0
    });
    drop((remote, local));
    drop((one, proxy));
    drop(home);
    other.close();
    drop(other);
    until("nothing is left", || {
        let now = held();
        now.0 <= before_all.0 && now.1 <= before_all.1 + 1
    });
}

#[test]
fn a_close_ends_what_is_under_way() {
    alone("a_close_ends_what_is_under_way", || {
        let authority = Authority::new();
        let tls = authority.tls();
        for closes_target in [false, true] {
            let Pair {
                one,
                other,
                home: _home,
                proxy,
            } = pair(under(&tls), 8 << 20);
            let before = held().1;
            let remote = one.open(proxy.address, NAME).unwrap();
            let local = Local::zeros(&one, 8 << 20);
            let all = pieces(8 << 20, 40_000);
            // All lanes are connected then: a dial would be waited for.
            done(&one, Op::Read, &local, &remote, &all);
            proxy.rule(|_, _| Act::Delay(ms(300)));
            let task = submit(&one, Op::Write, &local, &remote, &all, within(ms(30_000)));
            std::thread::sleep(ms(100));
            let begun = Instant::now();
            if closes_target {
                other.close();
            } else {
                one.close();
            }
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(10), "{took:?}");
            drop((one, other, remote, proxy));
            ended(&task);
            until("no thread is left", || held().1 <= before);
        }
    });
}

#[test]
fn a_forked_process_keeps_no_connection_up() {
    alone("a_forked_process_keeps_no_connection_up", || {
        let authority = Authority::new();
        let tls = authority.tls();
        let Pair { one, other, .. } = pair(under(&tls), 4096);
        let address = other.address().unwrap();
        one.ping(address).unwrap();
        let before = held().0;
        let mut stranger = TcpStream::connect(address).unwrap();
        let timeout = Some(Duration::from_secs(10));
        stranger.set_read_timeout(timeout).unwrap();
        until("both ends are there", || held().0 > before + 1);
        // SAFETY: the child calls nothing that another thread's lock could be in the way of.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: as above; it waits until it is killed.
            unsafe {
                libc::pause();
                libc::_exit(0)
            };
        }
        let begun = Instant::now();
        // It is refused, and sees its connection end.
        stranger.write_all(&[0; 64]).unwrap();
        let ends = stranger.read_to_end(&mut Vec::new());
        one.close();
        until("the target has let all go", || {
            other.stats().connections == 0
        });
        other.close();
        let took = begun.elapsed();
        let mut status = 0;
        // SAFETY: `child` is this test's, and so is `status`.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0);
        }
        assert!(took < Duration::from_secs(5), "{took:?}, {ends:?}");
    });
}

#[test]
fn who_has_not_proved_itself_has_no_thread_and_one_descriptor() {
    let test = "who_has_not_proved_itself_has_no_thread_and_one_descriptor";
    alone(test, || {
        let authority = Authority::new();
        let other = engine_of(under(&authority.tls()));
        let address = other.address().unwrap();
        let before = held();
        let strangers: Vec<TcpStream> = (0..20)
            .map(|_| {
                let mut stranger = TcpStream::connect(address).unwrap();
                // The beginning of a handshake whose end never comes.
                stranger.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
                stranger
            })
            .collect();
        until("both ends of all are there", || {
            held().0 >= before.0 + 2 * strangers.len() || other.stats().refused_greetings > 0
        });
        let (descriptors, threads) = held();
        assert!(descriptors <= before.0 + 2 * strangers.len());
        // One of the start may have ended.
        assert!(threads <= before.1, "{threads} threads");
    });
}

#[test]
fn hosts_of_a_depot_put_and_get_by_their_certificates() {
    let authority = Authority::new();
    let tls = authority.tls();
    let mut cluster = hosts::Cluster::new(2);
    cluster.extra = serde_json::json!({
        "tls_certificate": tls.certificate,
        "tls_key": tls.key,
        "tls_ca": tls.ca,
    });
    let depots = cluster.open_all("Cache|Peer");
    let spaces: Vec<_> = depots.iter().map(hosts::namespace).collect();
    let all: Vec<u64> = (0..40).collect();
    assert!(hosts::put(&spaces[0], &all, 50_000).iter().all(|ok| *ok));
    hosts::eventually("a share of each", || {
        depots.iter().all(|depot| hosts::share(depot).blocks > 5)
    });
    assert!(hosts::has(&spaces[1], &all, 50_000));
    hosts::at_rest(&depots);
    // Who has no certificate is none of them.
    let stranger = engine_of(config());
    let address = cluster.addresses[0].parse().unwrap();
    assert!(stranger.ping(address).is_err());

    let mut section = cluster.settings("Peer", 0);
    section["peer"].as_object_mut().unwrap().remove("tls_key");
    let missing = hosts::config("Peer", &section).err().unwrap();
    assert!(missing.to_string().contains("peer.tls_key"), "{missing}");
}
