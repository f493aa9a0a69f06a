//! Peers that do what they should not, or at the wrong moment.

#![expect(
    clippy::unwrap_used,
    reason = "a test may stop where nothing can be started"
)]

mod raw;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvdepot_media::{Buffer, Mapping};
use kvdepot_transfer::{
    Answers, Config, Engine, Fault, Op, Options, Remote, Request, Rights, Status,
};

/// Over connections, also on one host.
fn config() -> Config {
    Config {
        local: false,
        ..Config::default()
    }
}

fn engine(config: Config) -> Arc<Engine> {
    Arc::new(Engine::start(config).unwrap())
}

/// What `run` says, if it ends soon.
fn soon<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(run()));
    told.recv_timeout(Duration::from_secs(5)).ok()
}

fn pause(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn one<'a>(op: Op, local: &Buffer, remote: &'a Remote, offset: u64, len: u64) -> Request<'a> {
    Request {
        op,
        local: local.addr() as u64,
        remote,
        offset,
        len,
    }
}

/// A target that is no engine: each connection of a lane is served by `serve`, after `enter`.
fn target(
    enter: impl Fn(u32) + Clone + Send + 'static,
    serve: impl Fn(u32, TcpStream) + Clone + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let (enter, serve, mut socket) = (enter.clone(), serve.clone(), socket.unwrap());
            std::thread::spawn(move || {
                let mut lane = 0;
                raw::welcome(&mut socket, |number| {
                    lane = number;
                    enter(number);
                });
                serve(lane, socket);
            });
        }
    });
    address
}

#[test]
fn what_is_lent_is_used_as_long_as_it_is_granted() {
    let (target, engine) = (engine(Config::default()), engine(Config::default()));
    // Longer than a machine stands still.
    let lasts = Duration::from_secs(5);
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let home = mapping.buffer(0, 4096).unwrap();
    let _published = target
        .publish(b"home", &[home], Rights::BOTH, Some(lasts))
        .unwrap();
    let local = Buffer::from_vec(vec![7; 4096]);
    let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
    let remote = engine.open(target.address().unwrap(), b"home").unwrap();
    let write = |offset| {
        let write = one(Op::Write, &local, &remote, offset, 10);
        let task = engine.run([write].into_iter(), Options::default());
        task.unwrap().status(0)
    };
    assert!(remote.is_near());
    assert_eq!(write(0), Status::Done);
    std::thread::sleep(lasts);
    assert!(!remote.is_near());
    assert_eq!(write(100), Status::Failed(Fault::Unknown));
    let mut there = [0; 200];
    mapping.read_into(0, &mut there).unwrap();
    assert!(there[..10] == [7; 10] && there[100..] == [0; 100]);
}

#[test]
fn what_is_lent_is_what_was_opened() {
    let (target, engine) = (engine(Config::default()), engine(Config::default()));
    let address = target.address().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stops = Arc::clone(&stop);
    let publisher = std::thread::spawn(move || {
        let of = |len| Mapping::anonymous("home", len).unwrap();
        let both = [(of(4 << 20), Rights::BOTH), (of(4096), Rights::READ)];
        while !stops.load(Ordering::Relaxed) {
            for (mapping, rights) in &both {
                let home = mapping.buffer(0, mapping.len()).unwrap();
                let published = target.publish(b"home", &[home], *rights, None);
                pause(Duration::from_micros(200));
                drop(published.unwrap());
            }
        }
    });
    let local = Buffer::from_vec(vec![0; 4096]);
    let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        let Ok(remote) = engine.open(address, b"home") else {
            continue;
        };
        let op = if remote.rights().write {
            Op::Write
        } else {
            Op::Read
        };
        let last = one(op, &local, &remote, remote.len() - 8, 8);
        let task = engine.run([last].into_iter(), Options::default()).unwrap();
        assert!(task.is_over());
    }
    stop.store(true, Ordering::Relaxed);
    publisher.join().unwrap();
}

#[test]
fn what_is_withdrawn_while_it_is_lent_is_given_back() {
    let (target, engine) = (engine(Config::default()), engine(Config::default()));
    let address = target.address().unwrap();
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stops = Arc::clone(&stop);
    let opener = std::thread::spawn(move || {
        let mut kept = Vec::new();
        while !stops.load(Ordering::Relaxed) {
            let opened = engine.open(address, b"home");
            kept.extend(opened.ok().filter(Remote::is_near));
        }
    });
    let hangs = |round| {
        let home = mapping.buffer(0, 4096).unwrap();
        let published = target.publish(b"home", &[home], Rights::BOTH, None);
        let published = published.unwrap();
        pause(Duration::from_micros(round % 400));
        soon(move || drop(published)).is_none()
    };
    let hung = (0..2000_u64).find(|round| hangs(*round));
    stop.store(true, Ordering::Relaxed);
    opener.join().unwrap();
    assert_eq!(hung, None);
}

#[test]
fn a_neighbour_that_does_not_listen_still_has_what_it_was_lent() {
    let timeout = Duration::from_millis(300);
    let target = engine(Config {
        timeout,
        ..Config::default()
    });
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let home = mapping.buffer(0, 4096).unwrap();
    let published = target.publish(b"home", &[home], Rights::BOTH, None);
    let published = published.unwrap();
    // More than a socket holds.
    let heap = Buffer::from_vec(vec![0; 1 << 16]);
    let many: Vec<_> = (0..1 << 16).map(|at| heap.slice(at, 1).unwrap()).collect();
    let _many = target.publish(b"many", &many, Rights::BOTH, None).unwrap();

    let name = u128::from_le_bytes(target.id());
    let name = format!("kvdepot-transfer-{name:032x}");
    let door = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let mut socket = UnixStream::connect_addr(&door).unwrap();
    raw::greet(&mut socket, 0);
    let mut map = |name: &[u8; 4]| {
        let asked = raw::ask(raw::MAP, 0, 4, raw::row(0, 0, 0));
        socket.write_all(&asked).unwrap();
        socket.write_all(name).unwrap();
    };
    map(b"home");
    map(b"many");
    std::thread::sleep(3 * timeout);
    let (tell, told) = channel();
    std::thread::spawn(move || {
        drop(published);
        tell.send(()).unwrap();
    });
    let given_back = told.recv_timeout(2 * timeout);
    assert!(given_back.is_err(), "it may be written to at any time");
    drop(socket);
    told.recv_timeout(Duration::from_secs(5)).unwrap();
}

#[test]
#[expect(unsafe_code, reason = "it forks")]
fn a_forked_process_gives_nothing_back() {
    let (target, engine) = (engine(Config::default()), engine(Config::default()));
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let home = mapping.buffer(0, 4096).unwrap();
    let published = target.publish(b"home", &[home], Rights::BOTH, None);
    let published = published.unwrap();
    let remote = engine.open(target.address().unwrap(), b"home").unwrap();
    // SAFETY: the child calls nothing that another thread's lock could be in the way of, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        drop(remote);
        // SAFETY: it ends this process alone.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: `status` is this function's.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    std::thread::sleep(Duration::from_millis(50));
    assert!(remote.is_near());
    drop(published);
    assert!(!remote.is_near(), "it is asked for what it has");
}

#[test]
fn a_length_that_cannot_be_is_out_of_range_alone() {
    let (target, engine) = (engine(config()), engine(config()));
    let home = Buffer::from_vec(vec![0; 4096]);
    let _published = target.publish(b"home", &[home], Rights::BOTH, None);
    let local = Buffer::from_vec(vec![0; 4096]);
    let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
    let remote = engine.open(target.address().unwrap(), b"home").unwrap();
    let all = [u64::MAX, 10, u64::MAX].map(|len| one(Op::Read, &local, &remote, 0, len));
    let task = engine.run(all.into_iter(), Options::default()).unwrap();
    let statuses: Vec<_> = task.statuses().collect();
    let refused = Status::Failed(Fault::Local);
    assert_eq!(statuses, [refused, Status::Done, refused]);
    assert_eq!(engine.stats().bytes, 10);
}

#[test]
fn a_target_of_two_addresses_is_reached_at_both() {
    let target = engine(Config {
        listen: Some("0.0.0.0:0".parse().unwrap()),
        allow_unauthenticated: true,
        ..config()
    });
    let engine = engine(config());
    let len = 8 << 20;
    let home = Buffer::from_vec(vec![0; len as usize]);
    let _published = target
        .publish(b"home", &[home], Rights::BOTH, None)
        .unwrap();
    let local = Buffer::from_vec(vec![0; len as usize]);
    let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
    let port = target.address().unwrap().port();
    let at = |host| engine.open(([127, 0, 0, host], port).into(), b"home");
    let both = [at(1).unwrap(), at(2).unwrap()];
    for _ in 0..20 {
        let tasks = both.each_ref().map(|remote| {
            let read = one(Op::Read, &local, remote, 0, len);
            engine.submit([read].into_iter(), Options::default())
        });
        for task in tasks {
            let task = task.unwrap();
            assert!(task.wait(None) && task.is_done(), "{:?}", task.fault());
        }
    }
    assert_eq!(target.stats().connections, 4);
}

#[test]
fn what_is_behind_a_slice_that_ends_before_its_turn_goes_on() {
    // It knows nothing of the first name's number, and does not say which one it has now.
    let opened = Arc::new(AtomicBool::new(false));
    let address = target(
        |_| (),
        move |_, mut socket| {
            let mut head = [0; 40];
            while socket.read_exact(&mut head).is_ok() {
                match head[0] {
                    raw::OPEN if opened.load(Ordering::Relaxed) => {
                        let _name: [u8; 4] = raw::get(&mut socket);
                    }
                    raw::OPEN => drop(raw::opened(&mut socket, &head, 1 + u32::from(head[8]))),
                    _ if raw::grant(&head) == 2 => {
                        opened.store(true, Ordering::Relaxed);
                        let unknown = raw::answer(&head, 1, 0, raw::row(0, 0, 0));
                        socket.write_all(&unknown).unwrap();
                    }
                    _ => {
                        let done = raw::answer(&head, 0, 10, raw::row(0, 0, 0));
                        socket.write_all(&done).unwrap();
                        socket.write_all(&[5; 10]).unwrap();
                    }
                }
            }
        },
    );
    let engine = engine(Config {
        streams: 1,
        ..config()
    });
    let local = Buffer::from_vec(vec![0; 4096]);
    let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
    let [first, second] = [b"here", b"home"].map(|name| engine.open(address, name).unwrap());
    let read = |remote, timeout_ms| {
        let options = Options {
            timeout: Duration::from_millis(timeout_ms),
            ..Options::default()
        };
        let read = one(Op::Read, &local, remote, 0, 10);
        engine.submit([read].into_iter(), options).unwrap()
    };
    let waits = read(&first, 500);
    std::thread::sleep(Duration::from_millis(100));
    let behind = read(&second, 5_000);
    assert!(waits.wait(None));
    assert_eq!(waits.status(0), Status::Failed(Fault::TimedOut));
    assert!(behind.wait(None));
    assert_eq!(behind.status(0), Status::Done);
}

#[test]
fn who_answers_may_panic() {
    struct Panics;
    impl Answers for Panics {
        fn answer(&self, _: [u8; 16], call: &[u8]) -> Option<Vec<u8>> {
            assert!(call.is_empty());
            Some(vec![1])
        }

        fn left(&self, _: [u8; 16]) {
            panic!("nothing to say");
        }
    }
    let target = Arc::new(Engine::answering(config(), Some(Arc::new(Panics))).unwrap());
    let engine = engine(config());
    let address = target.address().unwrap();
    let refused = engine.call(address, vec![0]).unwrap_err();
    assert!(
        refused.to_string().contains("could not execute the call"),
        "{refused}"
    );
    assert_eq!(engine.call(address, Vec::new()).unwrap(), [1]);
    engine.close();
    assert!(soon(move || target.close()).is_some());
}

/// The name under which an engine listens for initiators of its host.
fn local_name(target: &Engine) -> String {
    let number = u128::from_le_bytes(target.id());
    format!("kvdepot-transfer-{number:032x}")
}

/// A target that does not listen at its local name, with something published.
fn target_without_a_door() -> (Arc<Engine>, kvdepot_transfer::Published) {
    let target = engine(config());
    let memory = Mapping::anonymous("strangers", 4096).unwrap();
    let buffer = memory.buffer(0, 4096).unwrap();
    let published = target.publish(b"name", &[buffer], Rights::READ, None);
    (target, published.unwrap())
}

/// Whether `engine` opens a target's name soon.
fn opens(engine: &Arc<Engine>, target: &Engine) -> bool {
    let (engine, address) = (Arc::clone(engine), target.address().unwrap());
    soon(move || engine.open(address, b"name").is_ok()) == Some(true)
}

#[test]
fn a_listener_that_accepts_no_connection_under_a_targets_name_delays_neither_open_nor_close() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let (target, _published) = target_without_a_door();
    let address = SocketAddrUnix::new_abstract_name(local_name(&target).as_bytes()).unwrap();
    let socket = |flags| {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    };
    let listener = socket(SocketFlags::CLOEXEC);
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    // Nothing more can connect when one of these cannot.
    let mut line = Vec::new();
    loop {
        let one = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        if rustix::net::connect(&one, &address).is_err() {
            break;
        }
        line.push(one);
    }
    let engine = engine(Config::default());
    assert!(opens(&engine, &target));
    assert!(soon(move || engine.close()).is_some());
}

#[test]
fn a_silent_listener_under_a_targets_name_delays_neither_other_targets_nor_close() {
    let (target, _published) = target_without_a_door();
    let (other, _others) = target_without_a_door();
    let door = std::os::unix::net::SocketAddr::from_abstract_name(local_name(&target)).unwrap();
    let silent = std::os::unix::net::UnixListener::bind_addr(&door).unwrap();
    let engine = engine(Config {
        timeout: Duration::from_secs(600),
        ..Config::default()
    });
    let (asks, address) = (Arc::clone(&engine), target.address().unwrap());
    let first = std::thread::spawn(move || asks.open(address, b"name").is_ok());
    // It waits for a greeting from now on.
    let (accepted, _) = silent.accept().unwrap();
    assert!(opens(&engine, &other));
    assert!(soon(move || engine.close()).is_some());
    drop(accepted);
    first.join().unwrap();
}

#[test]
fn a_close_does_not_wait_for_an_initiator_that_has_nothing_mapped() {
    let target = engine(Config::default());
    let memory = Mapping::anonymous("strangers", 4096).unwrap();
    let buffer = memory.buffer(0, 4096).unwrap();
    let _published = target
        .publish(b"name", &[buffer], Rights::READ, None)
        .unwrap();
    let door = std::os::unix::net::SocketAddr::from_abstract_name(local_name(&target)).unwrap();
    let greeted = || {
        let mut socket = UnixStream::connect_addr(&door).unwrap();
        raw::greet(&mut socket, 0);
        socket
    };
    let _never_asks = greeted();
    // One that has mapped something, and unmaps it when it is asked to.
    let mut asks = greeted();
    let head = raw::ask(raw::MAP, 0, 4, [0; 16]);
    asks.write_all(&head).unwrap();
    asks.write_all(b"name").unwrap();
    let answer: raw::Head = raw::get(&mut asks);
    let closed = std::thread::spawn(move || soon(move || target.close()).is_some());
    // The rest of the answer, and then the end of what the target sends.
    asks.read_to_end(&mut Vec::new()).unwrap();
    let number = raw::row(raw::grant(&answer), 0, 0);
    let unmap = 8;
    asks.write_all(&raw::ask(unmap, 1, 0, number)).unwrap();
    assert!(closed.join().unwrap());
}

#[test]
fn lanes_of_peers_that_are_forgotten_are_used_again() {
    let engine = engine(Config {
        streams: 1,
        ..config()
    });
    let new = || {
        let (tell, told) = channel();
        // The first lane is what counts; it may come back for another try.
        let enter = move |lane| {
            let _told = tell.send(lane);
        };
        (target(enter, |_, _| {}), told)
    };
    let lane_of = |(address, told): &(SocketAddr, Receiver<u32>)| {
        // The target ends the connection in place of an answer.
        drop(engine.ping(*address));
        told.recv_timeout(Duration::from_secs(20)).unwrap()
    };
    let (stays, goes) = (new(), new());
    let (first, second) = (lane_of(&stays), lane_of(&goes));
    assert_ne!(first, second);
    engine.forget(goes.0);
    // One engine may be at two of the addresses.
    assert_eq!(lane_of(&new()), second);
}
