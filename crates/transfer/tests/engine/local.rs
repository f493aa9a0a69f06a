//! What engines of one host do without a connection: memory that is mapped, or reached in the
//! other's process, until it is wanted back.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_media::{Buffer, Mapping};
use kvdepot_transfer::{Config, Engine, Fault, Op, Options, Remote, Request, Rights, Status};

const LEN: usize = 4 << 20;
const CHILD: &str = "KVDEPOT_TRANSFER_CHILD";

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8 ^ seed)
        .collect()
}

/// The other process: publishes memory of both kinds, says where, and then does as it is told.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let engine = Arc::new(Engine::start(Config::default()).unwrap());
    let mapping = Mapping::anonymous("test", LEN as u64).unwrap();
    mapping.write_from(0, &pattern(LEN, 1)).unwrap();
    // In two halves, the second one first.
    let half = LEN as u64 / 2;
    let halves = [
        mapping.buffer(half, half).unwrap(),
        mapping.buffer(0, half).unwrap(),
    ];
    let heap = Buffer::from_vec(pattern(LEN, 2));
    let mut mapped = Some(
        engine
            .publish(b"mapped", &halves, Rights::BOTH, None)
            .unwrap(),
    );
    let process = engine.publish(b"process", std::slice::from_ref(&heap), Rights::BOTH, None);
    let mut process = Some(process.unwrap());
    println!("address {}", engine.address().unwrap());
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "withdraw" => {
                drop(mapped.take());
                drop(process.take());
                println!("done");
            }
            "sums" => {
                let mut all = vec![0; LEN];
                mapping.read_into(0, &mut all).unwrap();
                let sum = |bytes: &[u8]| kvdepot_media::checksum::digest(bytes);
                println!("done {:x} {:x}", sum(&all), sum(&heap.to_vec()));
            }
            other => panic!("{other}"),
        }
    }
}

struct Other {
    child: Child,
    hears: BufReader<ChildStdout>,
    address: SocketAddr,
}

impl Other {
    fn start() -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["local::child", "--exact", "--nocapture"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut hears = BufReader::new(child.stdout.take().unwrap());
        let address = hear(&mut hears, "address ").parse().unwrap();
        Other {
            child,
            hears,
            address,
        }
    }

    fn tell(&mut self, what: &str) -> String {
        let stdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, "{what}").unwrap();
        hear(&mut self.hears, "done")
    }
}

fn hear(from: &mut BufReader<ChildStdout>, what: &str) -> String {
    loop {
        let mut line = String::new();
        assert!(
            from.read_line(&mut line).unwrap() > 0,
            "the child has ended"
        );
        if let Some((_, rest)) = line.split_once(what) {
            return rest.trim().to_owned();
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Pieces of odd lengths, which go round both halves, backwards.
fn pieces() -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    let mut at = 0;
    while at < LEN as u64 {
        let len = (at % 70_001 + 1).min(LEN as u64 - at);
        all.push((at, len));
        at += len;
    }
    all.reverse();
    all
}

fn requests<'a>(op: Op, local: u64, remote: &'a Remote) -> Vec<Request<'a>> {
    let request = |(offset, len)| Request {
        op,
        local: local + offset,
        remote,
        offset,
        len,
    };
    pieces().into_iter().map(request).collect()
}

fn rotated(bytes: &[u8]) -> Vec<u8> {
    let (first, second) = bytes.split_at(LEN / 2);
    [second, first].concat()
}

#[test]
fn memory_of_another_process_is_read_and_written_whatever_kind_it_is() {
    let mut other = Other::start();
    let engine = Engine::start(Config::default()).unwrap();
    let local = Buffer::from_vec(vec![0; LEN]);
    let at = local.addr() as u64;
    let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
    let wanted = [
        ("mapped", rotated(&pattern(LEN, 1))),
        ("process", pattern(LEN, 2)),
    ];
    // Letting one go is a frame, too.
    let open = |name: &str| engine.open(other.address, name.as_bytes()).unwrap();
    let remotes = wanted.each_ref().map(|(name, _)| open(name));
    engine.ping(other.address).unwrap();
    for ((name, bytes), remote) in wanted.into_iter().zip(&remotes) {
        assert!(remote.is_near(), "{name}");
        let frames = engine.stats().frames;
        let task = engine.submit(
            requests(Op::Read, at, remote).into_iter(),
            Options::default(),
        );
        assert!(task.unwrap().wait(None));
        assert!(local.to_vec() == bytes, "{name}");
        local.write_at(0, &pattern(LEN, 9)).unwrap();
        let task = engine.run(
            requests(Op::Write, at, remote).into_iter(),
            Options::default(),
        );
        assert!(task.unwrap().is_done());
        assert_eq!(
            engine.stats().frames,
            frames,
            "nothing went over the connection"
        );
    }
    let sum = |bytes: &[u8]| kvdepot_media::checksum::digest(bytes);
    let (mapped, process) = (sum(&rotated(&pattern(LEN, 9))), sum(&pattern(LEN, 9)));
    assert_eq!(other.tell("sums"), format!("{mapped:x} {process:x}"));
}

#[test]
fn what_is_wanted_back_is_let_go_of_also_under_load() {
    for name in ["mapped", "process"] {
        let mut other = Other::start();
        let engine = Arc::new(Engine::start(Config::default()).unwrap());
        let local = Buffer::from_vec(vec![0; LEN]);
        let at = local.addr() as u64;
        let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
        let remote = engine.open(other.address, name.as_bytes()).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let load = || {
                let mut faults = Vec::new();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let all = requests(Op::Read, at, &remote).into_iter();
                    let task = engine.run(all, Options::default()).unwrap();
                    faults.extend(task.fault().map(|(_, fault)| fault));
                }
                faults
            };
            let load = scope.spawn(load);
            std::thread::sleep(Duration::from_millis(100));
            let begun = Instant::now();
            other.tell("withdraw");
            assert!(begun.elapsed() < Duration::from_secs(60), "{name}");
            std::thread::sleep(Duration::from_millis(50));
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            let faults = load.join().unwrap();
            assert!(!faults.is_empty() && faults.iter().all(|one| *one == Fault::Unknown));
        });
        assert!(!remote.is_near());
    }
}

#[test]
fn a_process_that_is_killed_is_lost_and_not_more() {
    for name in ["mapped", "process"] {
        let other = Other::start();
        // What would be waited for.
        let timeout = Duration::from_secs(60);
        let engine = Engine::start(Config {
            timeout,
            ..Config::default()
        })
        .unwrap();
        let local = Buffer::from_vec(vec![0; LEN]);
        let at = local.addr() as u64;
        let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
        let remote = engine.open(other.address, name.as_bytes()).unwrap();
        drop(other);
        std::thread::sleep(Duration::from_millis(50));
        let begun = Instant::now();
        let task = engine.run(
            requests(Op::Read, at, &remote).into_iter(),
            Options::default(),
        );
        let statuses: Vec<Status> = task.unwrap().statuses().collect();
        assert!(
            statuses
                .iter()
                .all(|one| *one == Status::Failed(Fault::Lost)),
            "{name}"
        );
        assert!(begun.elapsed() < timeout / 2);
    }
}

#[test]
fn who_has_another_token_maps_nothing() {
    let token = |token: &[u8]| Config {
        token: token.to_vec(),
        ..Config::default()
    };
    let target = Arc::new(Engine::start(token(b"right")).unwrap());
    let home = Mapping::anonymous("home", 4096)
        .unwrap()
        .buffer(0, 4096)
        .unwrap();
    let _published = target
        .publish(b"home", &[home], Rights::READ, None)
        .unwrap();
    let address = target.address().unwrap();
    let right = Engine::start(token(b"right")).unwrap();
    assert!(right.open(address, b"home").unwrap().is_near());
    assert!(
        Engine::start(token(b"wrong"))
            .unwrap()
            .open(address, b"home")
            .is_err()
    );
    // And one that greets as nobody.
    let name = u128::from_le_bytes(target.id());
    let name = format!("kvdepot-transfer-{name:032x}");
    let door =
        <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(
            name,
        );
    let mut socket = std::os::unix::net::UnixStream::connect_addr(&door.unwrap()).unwrap();
    socket.write_all(&[0; 200]).unwrap();
    let mut said = Vec::new();
    let _ended = socket.read_to_end(&mut said);
    assert!(said.is_empty());
}

#[test]
fn what_may_be_read_alone_cannot_be_mapped_for_writing() {
    let target = Arc::new(Engine::start(Config::default()).unwrap());
    let mapping = Mapping::anonymous("home", 4096).unwrap();
    let home = mapping.buffer(0, 4096).unwrap();
    let _published = target
        .publish(b"home", &[home], Rights::READ, None)
        .unwrap();
    let engine = Engine::start(Config::default()).unwrap();
    let local = Buffer::from_vec(vec![7; 4096]);
    let _registered = engine.register(std::slice::from_ref(&local)).unwrap();
    let remote = engine.open(target.address().unwrap(), b"home").unwrap();
    assert!(remote.is_near());
    let write = Request {
        op: Op::Write,
        local: local.addr() as u64,
        remote: &remote,
        offset: 0,
        len: 10,
    };
    let task = engine.run([write].into_iter(), Options::default()).unwrap();
    assert_eq!(task.status(0), Status::Failed(Fault::Rights));
}
