//! A file system in memory that fails and hangs as it is told: a FUSE server, which is a process of
//! its own. A test's body runs in another one, where it is mounted, and tells it by a socket.

#![allow(
    dead_code,
    clippy::allow_attributes,
    clippy::print_stdout,
    reason = "each test binary uses its own part of this, and says why it is skipped"
)]

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvdepot_testkit::child::{self, Child};

use crate::realm::{self, User};

/// The most bytes of one write, and what stands before them.
const WRITE_MAX: usize = 128 << 10;
const REQUEST_MAX: usize = WRITE_MAX + 4096;

/// What the server's process says where it cannot mount, with the error's number.
const NO_FUSE: &str = "no FUSE: ";

/// Longer than any body takes on a busy machine, and less than a test program may.
const LONGEST: Duration = Duration::from_secs(500);

/// What the kernel asks for, by its numbers.
const CALLS: [(&str, u32); 24] = [
    ("lookup", 1),
    ("forget", 2),
    ("getattr", 3),
    ("setattr", 4),
    ("mkdir", 9),
    ("unlink", 10),
    ("rmdir", 11),
    ("rename", 12),
    ("open", 14),
    ("read", 15),
    ("write", 16),
    ("statfs", 17),
    ("release", 18),
    ("fsync", 20),
    // Of those, the ones that are for bytes alone; no number of a call.
    ("fdatasync", u32::MAX),
    ("flush", 25),
    ("init", 26),
    ("opendir", 27),
    ("readdir", 28),
    ("releasedir", 29),
    ("fsyncdir", 30),
    ("create", 35),
    ("forgets", 42),
    ("fallocate", 43),
];

fn name_of(code: u32) -> &'static str {
    let known = CALLS.iter().find(|(_, number)| *number == code);
    known.map_or("other", |(name, _)| name)
}

/// The mounted file system, as the test's body has it. When it ends, the faults do.
pub(crate) struct Mounted {
    /// Where it is.
    pub(crate) dir: PathBuf,
    control: PathBuf,
}

impl Mounted {
    fn tell(&self, line: &str) -> String {
        let mut stream = UnixStream::connect(&self.control).unwrap();
        writeln!(stream, "{line}").unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    }

    /// From now on these calls (`read`, or several: `open create`) get no answer.
    pub(crate) fn hang(&self, calls: &str) {
        self.hang_after(0, calls);
    }

    /// The same, but for so many of each.
    pub(crate) fn hang_after(&self, passed: usize, calls: &str) {
        self.tell(&format!("0 {passed} {calls}"));
    }

    /// From now on these calls fail.
    pub(crate) fn fail(&self, calls: &str, errno: i32) {
        self.fail_after(0, calls, errno);
    }

    /// The same, but for so many of each.
    pub(crate) fn fail_after(&self, passed: usize, calls: &str, errno: i32) {
        self.tell(&format!("{errno} {passed} {calls}"));
    }

    /// From now on all files belong to this user, as NFS and SMB may have it.
    pub(crate) fn owned_by(&self, user: u32) {
        self.tell(&format!("owner {user}"));
    }

    /// No call fails any more, and those that hang are answered.
    pub(crate) fn calm(&self) {
        self.tell("calm");
    }

    /// How many calls hang.
    pub(crate) fn hanging(&self) -> usize {
        self.tell("hanging").parse().unwrap()
    }

    /// How many calls there were so far, but for those that the kernel does not wait for.
    pub(crate) fn calls(&self) -> u64 {
        self.tell("calls").parse().unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.calm();
    }
}

/// Runs `body` over such a file system; skips where this user can have none.
pub(crate) fn over(test: &str, body: impl FnOnce(&Mounted)) {
    over_by(test, User::Root, body);
}

/// The same, for a process of this kind.
pub(crate) fn over_by(test: &str, user: User, body: impl FnOnce(&Mounted)) {
    match child::role().as_deref() {
        Some("world") => return world(test),
        Some(_) => {
            let mounted = Mounted {
                dir: child::value("dir").into(),
                control: child::value("control").into(),
            };
            body(&mounted);
            drop(mounted);
            return child::say("done");
        }
        None => {}
    }
    let dir = tempfile::tempdir().unwrap();
    let home = [("home", dir.path().to_str().unwrap())];
    let mut world = match realm::start(test, "world", &home, user, &[]) {
        Ok(world) => world,
        Err(error) => return realm::skip("a namespace", &error),
    };
    let line = world.line().expect("the body has failed");
    if line != "done" {
        let errno = line
            .strip_prefix(NO_FUSE)
            .and_then(|errno| errno.parse().ok());
        let errno = errno.unwrap_or_else(|| panic!("{line}"));
        realm::skip("FUSE for this user", &io::Error::from_raw_os_error(errno));
    }
}

/// The server's process.
fn world(test: &str) {
    let home = PathBuf::from(child::value("home"));
    let (at, control) = (home.join("mounted"), home.join("control"));
    // What is mounted here is mounted nowhere else.
    realm::mount("none", Path::new("/"), libc::MS_REC | libc::MS_SLAVE, "").unwrap();
    std::fs::create_dir(&at).unwrap();
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let mounted = device.and_then(|device| {
        let fd = device.as_raw_fd();
        let how = format!("fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions");
        realm::mount("fuse", &at, 0, &how)?;
        Ok(device)
    });
    let device = match mounted {
        Ok(device) => device,
        Err(error) => {
            let errno = match error.kind() {
                io::ErrorKind::NotFound => libc::ENODEV,
                _ => error.raw_os_error().unwrap_or(0),
            };
            return child::say(&format!("{NO_FUSE}{errno}"));
        }
    };
    let server = Arc::new(Server {
        device,
        state: Mutex::new(State::new()),
    });
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.run());
    // Only its server's end frees a process that is at a file system which hangs.
    std::thread::spawn(|| {
        std::thread::sleep(LONGEST);
        std::process::abort();
    });
    let listener = UnixListener::bind(&control).unwrap();
    std::thread::spawn(move || server.listen(&listener));
    let paths = [&at, &control].map(|path| path.to_str().unwrap().to_owned());
    let values = [("dir", &*paths[0]), ("control", &*paths[1])];
    Child::start(test, "body", &values).expect("done");
    child::say("done");
}

struct Server {
    device: File,
    state: Mutex<State>,
}

struct State {
    nodes: HashMap<u64, Node>,
    next: u64,
    /// What a call fails with, 0 where it hangs, and how many pass before.
    faults: HashMap<String, (i32, usize)>,
    /// Requests without an answer.
    held: Vec<Vec<u8>>,
    /// Requests that somebody waits for.
    calls: u64,
    /// Whose all files are.
    owner: u32,
}

struct Node {
    kind: Kind,
    mode: u32,
    changed: (u64, u32),
}

enum Kind {
    Folder(BTreeMap<String, u64>),
    File(Vec<u8>),
}

const ROOT: u64 = 1;

type Answer = Result<Vec<u8>, i32>;

impl Server {
    fn run(&self) {
        let mut request = vec![0; REQUEST_MAX];
        loop {
            match (&self.device).read(&mut request) {
                Ok(len) => self.take(&request[..len]),
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
                Err(_) => {}
            }
        }
    }

    fn take(&self, request: &[u8]) {
        let request = Request(request);
        let name = name_of(request.u32(4));
        let mut state = self.state.lock().unwrap();
        let fault = match name {
            "fsync" if request.u32(48) & 1 > 0 && state.faults.contains_key("fdatasync") => {
                "fdatasync"
            }
            name => name,
        };
        match state.faults.get_mut(fault) {
            Some((_, passed)) if *passed > 0 => *passed -= 1,
            Some((0, _)) => return state.held.push(request.0.to_vec()),
            Some((errno, _)) => {
                let errno = *errno;
                drop(state);
                return self.answer(&request, Err(errno));
            }
            None => {}
        }
        // Nobody waits for these, and who waits for an interrupted one waits on.
        if matches!(name, "forget" | "forgets") || request.u32(4) == 36 {
            return;
        }
        state.calls += 1;
        let answer = state.work(name, &request);
        drop(state);
        self.answer(&request, answer);
    }

    fn answer(&self, request: &Request<'_>, answer: Answer) {
        let (bytes, errno) = match answer {
            Ok(bytes) => (bytes, 0),
            Err(errno) => (Vec::new(), errno),
        };
        let mut all = Vec::with_capacity(16 + bytes.len());
        all.extend_from_slice(&(16 + bytes.len() as u32).to_le_bytes());
        all.extend_from_slice(&(-errno).to_le_bytes());
        all.extend_from_slice(&request.0[8..16]);
        all.extend_from_slice(&bytes);
        // Whoever has asked may be gone.
        let _heard = (&self.device).write(&all);
    }

    fn listen(&self, listener: &UnixListener) {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            let words: Vec<&str> = line.split_whitespace().collect();
            let mut held = Vec::new();
            {
                let mut state = self.state.lock().unwrap();
                let mut calls = None;
                match words[0] {
                    "hanging" => {}
                    "calls" => calls = Some(state.calls),
                    "owner" => state.owner = words[1].parse().unwrap(),
                    "calm" => {
                        state.faults.clear();
                        held = std::mem::take(&mut state.held);
                    }
                    errno => {
                        let fault = (errno.parse().unwrap(), words[1].parse().unwrap());
                        for call in &words[2..] {
                            assert!(CALLS.iter().any(|(name, _)| name == call), "{call}");
                            state.faults.insert((*call).to_owned(), fault);
                        }
                    }
                }
                let hanging = state.held.len() as u64;
                writeln!(stream, "{}", calls.unwrap_or(hanging)).unwrap();
            }
            held.iter().for_each(|request| self.take(request));
        }
    }
}

/// What the kernel sends: a header of 40 bytes, and what belongs to the call.
struct Request<'a>(&'a [u8]);

impl Request<'_> {
    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    fn node(&self) -> u64 {
        self.u64(16)
    }

    /// The names that begin there, each with its end.
    fn names(&self, at: usize) -> Vec<String> {
        let texts = self.0[at..].split(|byte| *byte == 0);
        texts
            .map(|text| String::from_utf8_lossy(text).into_owned())
            .collect()
    }
}

fn now() -> (u64, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    (now.as_secs(), now.subsec_nanos())
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl State {
    fn new() -> State {
        let mut state = State {
            nodes: HashMap::new(),
            next: ROOT,
            faults: HashMap::new(),
            held: Vec::new(),
            calls: 0,
            owner: 0,
        };
        state.add(Kind::Folder(BTreeMap::new()), 0o40777);
        state
    }

    fn add(&mut self, kind: Kind, mode: u32) -> u64 {
        let number = self.next;
        self.next += 1;
        let changed = now();
        self.nodes.insert(
            number,
            Node {
                kind,
                mode,
                changed,
            },
        );
        number
    }

    fn folder(&mut self, number: u64) -> Result<&mut BTreeMap<String, u64>, i32> {
        match self.nodes.get_mut(&number) {
            Some(node) => match &mut node.kind {
                Kind::Folder(names) => Ok(names),
                Kind::File(_) => Err(libc::ENOTDIR),
            },
            None => Err(libc::ESTALE),
        }
    }

    fn bytes(&mut self, number: u64) -> Result<&mut Vec<u8>, i32> {
        match self.nodes.get_mut(&number).map(|node| &mut node.kind) {
            Some(Kind::File(bytes)) => Ok(bytes),
            Some(Kind::Folder(_)) => Err(libc::EISDIR),
            None => Err(libc::ESTALE),
        }
    }

    fn attributes(&self, number: u64) -> Answer {
        let node = self.nodes.get(&number).ok_or(libc::ESTALE)?;
        let len = match &node.kind {
            Kind::File(bytes) => bytes.len() as u64,
            Kind::Folder(_) => 4096,
        };
        let (seconds, nanos) = node.changed;
        let mut all = words(&[number, len, len.div_ceil(512), seconds, seconds, seconds]);
        let links = 1;
        let owner = self.owner;
        for half in [nanos, nanos, nanos, node.mode, links, owner, 0, 0, 4096, 0] {
            all.extend_from_slice(&half.to_le_bytes());
        }
        Ok(all)
    }

    /// What is found at a name: nothing of it is remembered by the kernel.
    fn entry(&self, number: u64) -> Answer {
        let mut all = words(&[number, 1, 0, 0, 0]);
        all.extend(self.attributes(number)?);
        Ok(all)
    }

    fn find(&mut self, folder: u64, name: &str) -> Result<u64, i32> {
        self.folder(folder)?.get(name).copied().ok_or(libc::ENOENT)
    }

    fn make(&mut self, request: &Request<'_>, names: usize, kind: Kind, mode: u32) -> Answer {
        let name = request.names(names).remove(0);
        if self.find(request.node(), &name).is_ok() {
            return Err(libc::EEXIST);
        }
        let made = self.add(kind, mode);
        self.folder(request.node())?.insert(name, made);
        self.entry(made)
    }

    fn work(&mut self, call: &str, request: &Request<'_>) -> Answer {
        let (node, opened) = (request.node(), words(&[0, 0]));
        match call {
            "init" => {
                let (major, minor, ahead, flags) = (7_u32, 31_u32, 0_u32, 0_u32);
                let queue = 64_u32 | (48 << 16);
                let mut all = Vec::new();
                for half in [major, minor, ahead, flags, queue, WRITE_MAX as u32, 1] {
                    all.extend_from_slice(&half.to_le_bytes());
                }
                all.resize(64, 0);
                Ok(all)
            }
            "lookup" => {
                let found = self.find(node, &request.names(40)[0])?;
                self.entry(found)
            }
            "getattr" => Ok([words(&[0, 0]), self.attributes(node)?].concat()),
            "setattr" => self.set(request),
            "mkdir" => {
                let mode = 0o40000 | (request.u32(40) & 0o7777);
                self.make(request, 48, Kind::Folder(BTreeMap::new()), mode)
            }
            "create" => {
                let mode = 0o100_000 | (request.u32(44) & 0o7777);
                let made = self.make(request, 56, Kind::File(Vec::new()), mode)?;
                Ok([made, opened].concat())
            }
            "unlink" | "rmdir" => {
                let name = &request.names(40)[0];
                let found = self.find(node, name)?;
                if let Ok(names) = self.folder(found)
                    && !names.is_empty()
                {
                    return Err(libc::ENOTEMPTY);
                }
                // Who has it open keeps it.
                self.folder(node)?.remove(name);
                Ok(Vec::new())
            }
            "rename" => {
                let names = request.names(48);
                let moved = self.find(node, &names[0])?;
                let to = request.u64(40);
                self.folder(to)?.insert(names[1].clone(), moved);
                self.folder(node)?.remove(&names[0]);
                Ok(Vec::new())
            }
            "open" | "opendir" => Ok(opened),
            "read" => {
                let (at, len) = (request.u64(48) as usize, request.u32(56) as usize);
                let bytes = self.bytes(node)?;
                let begin = at.min(bytes.len());
                Ok(bytes[begin..(at + len).min(bytes.len())].to_vec())
            }
            "write" => {
                let (at, len) = (request.u64(48) as usize, request.u32(56) as usize);
                let bytes = self.bytes(node)?;
                let end = bytes.len().max(at + len);
                bytes.resize(end, 0);
                bytes[at..at + len].copy_from_slice(&request.0[80..80 + len]);
                self.nodes
                    .entry(node)
                    .and_modify(|node| node.changed = now());
                Ok(words(&[len as u64]))
            }
            "fallocate" => {
                let end = (request.u64(48) + request.u64(56)) as usize;
                let bytes = self.bytes(node)?;
                let end = bytes.len().max(end);
                bytes.resize(end, 0);
                Ok(Vec::new())
            }
            "readdir" => self.list(node, request.u64(48) as usize, request.u32(56) as usize),
            "statfs" => Ok([
                words(&[1 << 20; 5]),
                vec![0, 16, 0, 0, 255, 0, 0, 0],
                vec![0; 32],
            ]
            .concat()),
            "release" | "releasedir" | "flush" | "fsync" | "fsyncdir" => Ok(Vec::new()),
            _ => Err(libc::ENOSYS),
        }
    }

    fn set(&mut self, request: &Request<'_>) -> Answer {
        let (node, valid) = (request.node(), request.u32(40));
        if valid & 8 > 0 {
            let len = request.u64(56) as usize;
            self.bytes(node)?.resize(len, 0);
        }
        let changed = match valid {
            _ if valid & 256 > 0 => Some(now()),
            _ if valid & 32 > 0 => Some((request.u64(80), request.u32(100))),
            _ => None,
        };
        if let (Some(changed), Some(node)) = (changed, self.nodes.get_mut(&node)) {
            node.changed = changed;
        }
        Ok([words(&[0, 0]), self.attributes(node)?].concat())
    }

    fn list(&mut self, number: u64, from: usize, room: usize) -> Answer {
        let folder = self.folder(number)?.clone();
        let mut all = Vec::new();
        for (at, (name, node)) in folder.iter().enumerate().skip(from) {
            let len = (24 + name.len()).next_multiple_of(8);
            if all.len() + len > room {
                break;
            }
            let mode = self.nodes.get(node).map_or(0, |node| node.mode);
            let mut entry = words(&[*node, at as u64 + 1]);
            entry.extend_from_slice(&(name.len() as u32).to_le_bytes());
            entry.extend_from_slice(&(mode >> 12).to_le_bytes());
            entry.extend_from_slice(name.as_bytes());
            entry.resize(len, 0);
            all.extend(entry);
        }
        Ok(all)
    }
}
