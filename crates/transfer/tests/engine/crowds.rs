//! Who has not proved itself, who has forked, and who has gone: what they cost, and whom.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use kvdepot_media::Mapping;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::log::Log;
use kvdepot_transfer::{Config, Engine, Fault, Op, Options, Rights, Status};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process, setrlimit};

use crate::common::peer::{NAME, Peer};
use crate::common::raw::{Head, Raw, hello, sum};
use crate::common::{
    Home, Local, PATIENCE, config, done, ended, engine, engine_of, held, ms, submit, until,
};

const TOKEN: &[u8] = b"only we know";

/// Connections that have not proved themselves, at most.
const UNGREETED: usize = 64;

/// Runs a scene in a process of its own, where nothing else has descriptors or threads.
fn alone(test: &str, scene: impl FnOnce()) {
    match child::role() {
        None => Child::start(&format!("crowds::{test}"), "alone", &[]).expect("well"),
        Some(_) => {
            scene();
            child::say("well");
        }
    }
}

/// Returns how many there may be: fewer where this process may not have so many.
fn allow_descriptors(count: u64) -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    let allowed = limit.maximum.map_or(count, |most| most.min(count));
    limit.current = Some(allowed);
    setrlimit(Resource::Nofile, limit).unwrap();
    allowed as usize
}

fn with_token() -> Config {
    Config {
        token: TOKEN.to_vec(),
        streams: 1,
        // As often, and as long, as a machine that stands still may need.
        retries: 64,
        timeout: 10 * PATIENCE,
        ..config()
    }
}

/// One of another address of this host that says nothing.
fn silent(host: u8, target: SocketAddr) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let from = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, host), 0);
    rustix::net::bind(&socket, &from).unwrap();
    rustix::net::connect(&socket, &target).unwrap();
    socket
}

/// How many of them the target has not ended.
fn open(sockets: &[OwnedFd]) -> usize {
    let polled = sockets.iter().map(|one| PollFd::new(one, PollFlags::RDHUP));
    let mut polled: Vec<PollFd<'_>> = polled.collect();
    let ended = rustix::event::poll(&mut polled, Some(&Timespec::default())).unwrap();
    sockets.len() - ended
}

#[test]
fn a_thousand_that_say_nothing_hold_no_thread_and_keep_nobody_out() {
    alone(
        "a_thousand_that_say_nothing_hold_no_thread_and_keep_nobody_out",
        || {
            // Later there are 400 more, and the target's own.
            let allowed = allow_descriptors(4096);
            assert!(allowed >= 800, "ulimit -n: {allowed}");
            let crowd = (allowed - 600).min(1000);
            let target = engine_of(with_token());
            let address = target.address().unwrap();
            let before = held();
            // It was there before the others, and has its address for itself.
            let mut early = vec![silent(3, address)];
            let mut strangers: Vec<OwnedFd> = (0..crowd).map(|_| silent(2, address)).collect();
            until("those that are too many have gone", || {
                target.stats().refused_greetings >= (crowd + 1 - UNGREETED) as u64
            });
            assert!(open(&strangers) < UNGREETED);
            assert_eq!(open(&early), 1);
            // One of the start may have ended.
            assert!(held().1 <= before.1, "threads");
            assert_eq!(target.stats().connections, 0);
            for _ in 0..100 {
                strangers.extend((0..4).map(|_| silent(2, address)));
                engine_of(with_token()).ping(address).unwrap();
            }
            assert_eq!(open(&early), 1);
            early.extend(strangers);
            target.close();
            assert_eq!(open(&early), 0);
        },
    );
}

#[test]
fn all_that_come_at_once_from_one_address_are_let_in_beside_strangers() {
    alone(
        "all_that_come_at_once_from_one_address_are_let_in_beside_strangers",
        || {
            allow_descriptors(4096);
            let target = engine_of(with_token());
            let address = target.address().unwrap();
            let strangers: Vec<OwnedFd> = (0..200).map(|_| silent(2, address)).collect();
            let engines: Vec<Arc<Engine>> = (0..64).map(|_| engine_of(with_token())).collect();
            let barrier = Barrier::new(engines.len());
            std::thread::scope(|scope| {
                for engine in &engines {
                    scope.spawn(|| {
                        barrier.wait();
                        engine.ping(address).unwrap();
                    });
                }
            });
            assert_eq!(target.stats().connections, 64);
            drop(strangers);
        },
    );
}

#[test]
fn connections_leave_descriptors_for_what_else_the_process_does() {
    alone(
        "connections_leave_descriptors_for_what_else_the_process_does",
        || {
            let target = engine_of(with_token());
            let address = target.address().unwrap();
            let (most, others) = (64, held().0 as u64);
            allow_descriptors(256);
            let known: Vec<Raw> = (0..most)
                .map(|lane| Raw::greet(address, lane, [9; 16], TOKEN))
                .collect();
            until("all are there", || {
                target.stats().connections == u64::from(most)
            });
            let refused = engine_of(with_token()).ping(address).unwrap_err();
            assert!(refused.to_string().contains("connections"), "{refused}");
            let strangers: Vec<OwnedFd> = (0..50).map(|_| silent(2, address)).collect();
            let half = 32;
            until("those that are too many have gone", || {
                open(&strangers) <= half
            });
            let here = known.len() as u64 + strangers.len() as u64 + others;
            assert!(held().0 as u64 <= here + u64::from(most) + half as u64 + 8);
            assert!(std::fs::File::open("/proc/self/status").is_ok());
        },
    );
}

#[test]
fn an_initiator_keeps_nothing_of_those_that_have_gone() {
    alone("an_initiator_keeps_nothing_of_those_that_have_gone", || {
        let one = engine();
        let local = Local::zeros(&one, 4096);
        let before = held();
        let targets: Vec<_> = (0..20).map(|_| engine()).collect();
        let homes: Vec<Home> = targets
            .iter()
            .map(|target| Home::of(target, NAME, vec![7; 4096]))
            .collect();
        let open = |target: &Arc<Engine>| one.open(target.address().unwrap(), NAME).unwrap();
        let mut remotes: Vec<_> = targets.iter().map(open).collect();
        for remote in &remotes {
            done(&one, Op::Write, &local, remote, &[(0, 0, 4096)]);
        }
        drop(homes);
        targets.iter().for_each(|target| target.close());
        drop(targets);
        until("no thread and no descriptor is left of them", || {
            let (descriptors, threads) = held();
            descriptors <= before.0 && threads <= before.1
        });
        // What is open is as it was: it fails, and is there again when the target is.
        let task = submit(
            &one,
            Op::Read,
            &local,
            &remotes[0],
            &[(0, 0, 8)],
            Options::default(),
        );
        ended(&task);
        assert_eq!(task.status(0), Status::Failed(Fault::Lost));
        let again = engine_of(Config {
            listen: Some(remotes[0].peer()),
            ..config()
        });
        let _home = Home::of(&again, NAME, vec![9; 4096]);
        until("it is there again", || {
            let read = &[(0, 0, 4096)];
            let task = submit(
                &one,
                Op::Read,
                &local,
                &remotes[0],
                read,
                Options::default(),
            );
            ended(&task);
            task.is_done()
        });
        assert!(local.get() == [9; 4096]);
        assert_eq!(one.stats().peers, 20);
        remotes.clear();
        until("they are forgotten", || one.stats().peers == 0);
    });
}

#[test]
fn a_write_ends_with_the_time_of_its_grant() {
    let target = engine();
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let cut = |lasts| {
        mapping.write_from(0, &[0; 4096]).unwrap();
        let home = mapping.buffer(0, 4096).unwrap();
        let published = target.publish(NAME, &[home], Rights::BOTH, Some(lasts));
        let mut raw = Raw::greet(target.address().unwrap(), 0, [9; 16], b"");
        raw.send(Head::new(1, 0, NAME.len() as u64), NAME);
        let (opened, _) = raw.answer().unwrap();
        raw.send(Head::new(3, 1, 4096).row(opened.grant, 0, 4096), &[7; 1024]);
        until("it has begun, or the time is over", || {
            let mut first = [0];
            mapping.read_into(0, &mut first).unwrap();
            first == [7] || target.open(target.address().unwrap(), NAME).is_err()
        });
        // Its end is waited for, not a time.
        let answer = raw.answer();
        let _ended = raw.stream.write_all(&[7; 3072]);
        drop(published);
        let mut there = [0; 4096];
        mapping.read_into(0, &mut there).unwrap();
        assert!(there[1024..] == [0; 3072], "written behind its time");
        answer.is_none() && there[..1024] == [7; 1024]
    };
    // A machine that stands still may be late for the first ones.
    assert!((1..8).any(|tries| cut(ms(100 << tries))));
}

#[test]
fn a_write_whose_checksum_comes_after_the_end_of_its_grant_is_not_acknowledged() {
    let target = engine();
    let address = target.address().unwrap();
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let there = || {
        let mut there = [0; 4096];
        mapping.read_into(0, &mut there).unwrap();
        there
    };
    let is_over = || target.open(address, NAME).is_err();
    let cut = |lasts| {
        mapping.write_from(0, &[0; 4096]).unwrap();
        let home = mapping.buffer(0, 4096).unwrap();
        let published = target.publish(NAME, &[home], Rights::BOTH, Some(lasts));
        let published = published.unwrap();
        let mut raw = Raw::greet(address, 0, [9; 16], b"");
        raw.send(Head::new(1, 0, NAME.len() as u64), NAME);
        let (opened, _) = raw.answer().unwrap();
        let write = Head::new(3, 1, 4096).row(opened.grant, 0, 4096);
        raw.send_but_for_its_sum(write, &[7; 4096]);
        until("all bytes are there, or the time is over", || {
            there() == [7; 4096] || is_over()
        });
        let are_there = there() == [7; 4096];
        until("the time is over", is_over);
        if !are_there {
            return false;
        }
        // The target waits for the checksum no longer than for bytes.
        until("the connection has ended", || {
            match raw.stream.peek(&mut [0]) {
                Ok(count) => {
                    assert_eq!(count, 0, "answered without the checksum");
                    true
                }
                Err(error) => error.kind() != ErrorKind::WouldBlock,
            }
        });
        // From here on the memory is its owner's alone.
        mapping.write_from(0, &[1; 4096]).unwrap();
        let _ended = raw.stream.write_all(&sum(&[7; 4096]));
        assert!(raw.answer().is_none(), "acknowledged behind its time");
        drop(published);
        assert!(there() == [1; 4096], "written behind its time");
        true
    };
    // A machine that stands still may be late for the first ones.
    assert!((1..8).any(|tries| cut(ms(100 << tries))));
}

/// Forks a child that does nothing until it is killed.
#[expect(unsafe_code, reason = "it forks")]
fn fork_a_sleeper() -> i32 {
    // SAFETY: the child makes system calls alone.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            loop {
                libc::pause();
            }
        }
        child
    }
}

/// A process that has forked, and its child, which outlives it.
struct Forked {
    process: Child,
    child: Pid,
}

impl Forked {
    fn of(mut process: Child) -> Forked {
        let child = process.line().unwrap().parse().unwrap();
        Forked {
            process,
            child: Pid::from_raw(child).unwrap(),
        }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        kill_process(self.child, Signal::KILL).unwrap();
    }
}

#[test]
fn a_target_that_has_forked_ends_with_its_process() {
    let test = "crowds::a_target_that_has_forked_ends_with_its_process";
    if child::role().is_some() {
        let engine = engine();
        let _home = Home::of(&engine, NAME, vec![7; 4096]);
        child::say(&engine.address().unwrap().to_string());
        until("somebody has connected", || engine.stats().connections > 0);
        child::say(&fork_a_sleeper().to_string());
        child::sleep_until_killed();
    }
    let mut process = Child::start(test, "forks", &[]);
    let address: SocketAddr = process.line().unwrap().parse().unwrap();
    let one = engine();
    let local = Local::zeros(&one, 4096);
    let remote = one.open(address, NAME).unwrap();
    let read = || {
        let read = &[(0, 0, 4096)];
        let task = submit(&one, Op::Read, &local, &remote, read, Options::default());
        ended(&task);
        task
    };
    assert!(read().is_done());
    let mut forked = Forked::of(process);
    assert!(read().is_done(), "the child has left its parent's alone");
    forked.process.kill();
    assert_eq!(read().status(0), Status::Failed(Fault::Lost));
    let next = Peer::at(&address.to_string(), 4096, 1);
    assert_eq!(next.address, address);
}

#[test]
fn an_initiator_that_has_forked_ends_with_its_process() {
    let test = "crowds::an_initiator_that_has_forked_ends_with_its_process";
    if child::role().is_some() {
        let engine = engine_of(Config::default());
        let address = child::value("address").parse().unwrap();
        let remote = engine.open(address, NAME).unwrap();
        assert!(remote.is_near());
        child::say(&fork_a_sleeper().to_string());
        child::sleep_until_killed();
    }
    let target = engine_of(Config::default());
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let home = mapping.buffer(0, 4096).unwrap();
    let published = target.publish(NAME, &[home], Rights::BOTH, None).unwrap();
    let address = target.address().unwrap().to_string();
    let mut forked = Forked::of(Child::start(test, "forks", &[("address", &address)]));
    forked.process.kill();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(published);
        target.close();
        tell.send(()).unwrap();
    });
    told.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn strangers_that_have_said_hello_keep_nobody_out() {
    alone("strangers_that_have_said_hello_keep_nobody_out", || {
        allow_descriptors(4096);
        let target = engine_of(with_token());
        let address = target.address().unwrap();
        let strangers = (0..UNGREETED as u32).map(|lane| {
            let mut one = TcpStream::connect(address).unwrap();
            one.write_all(&hello(lane, [5; 16])).unwrap();
            // The target's challenge.
            one.read_exact(&mut [0; 64]).unwrap();
            one
        });
        let _strangers: Vec<TcpStream> = strangers.collect();
        let honest = engine_of(Config {
            retries: 4,
            ..with_token()
        });
        honest.ping(address).unwrap();
    });
}

/// Asserts that the log has a line with `what`, and no second one within a minute.
fn is_one_line_a_minute(log: &Log, what: &str, begun: Instant) {
    let lines = log.lines_with(what);
    // A machine that stands still for a minute has a second line.
    let most = 1 + begun.elapsed().as_secs() / 60;
    assert!((1..=most).contains(&(lines.len() as u64)), "{lines:?}");
}

#[test]
fn strangers_that_are_refused_are_one_line_a_minute() {
    const EACH: usize = 100;
    alone("strangers_that_are_refused_are_one_line_a_minute", || {
        allow_descriptors(4096);
        let target = engine_of(with_token());
        let address = target.address().unwrap();
        let (log, begun) = (Log::default(), Instant::now());
        tracing::subscriber::set_global_default(log.clone()).unwrap();
        for _ in 0..EACH {
            // What no engine says, and the proof of another token.
            let mut strange = TcpStream::connect(address).unwrap();
            strange.write_all(&[7; 64]).unwrap();
            let mut other = TcpStream::connect(address).unwrap();
            other.write_all(&hello(0, [5; 16])).unwrap();
            // The target's challenge.
            other.read_exact(&mut [0; 64]).unwrap();
            other.write_all(&[7; 32]).unwrap();
            for mut one in [strange, other] {
                // It is logged before the end of its connection.
                let _ended = one.read_to_end(&mut Vec::new());
            }
        }
        // Those beyond the limit are refused for saying nothing.
        let crowd = (0..UNGREETED + EACH).map(|_| silent(2, address));
        let _crowd: Vec<OwnedFd> = crowd.collect();
        until("all are refused", || {
            target.stats().refused_greetings >= 3 * EACH as u64
        });
        is_one_line_a_minute(&log, "message: ", begun);
    });
}

#[test]
fn malformed_frames_are_one_line_a_minute() {
    const COUNT: u32 = 100;
    alone("malformed_frames_are_one_line_a_minute", || {
        let target = engine_of(with_token());
        let address = target.address().unwrap();
        let (log, begun) = (Log::default(), Instant::now());
        tracing::subscriber::set_global_default(log.clone()).unwrap();
        for lane in 0..COUNT {
            let mut raw = Raw::greet(address, lane, [9; 16], TOKEN);
            // A verb that there is not.
            raw.send(Head::new(255, 0, 0), &[]);
            // It is logged before the end of its connection.
            assert!(raw.answer().is_none());
        }
        assert_eq!(target.stats().malformed_frames, u64::from(COUNT));
        is_one_line_a_minute(&log, "malformed frame; closing connection", begun);
    });
}
