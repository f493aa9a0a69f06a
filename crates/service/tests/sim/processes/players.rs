//! What the processes do that a history starts: the owner, its clients, and a mover. Each does what
//! its command says, and answers in one line.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use kvdepot_service::Mover;
use kvdepot_store::format::layout::CAPACITY_MIN;
use kvdepot_store::{
    BlockBuffers, Buffer, Checksum, Depot, GetOptions, Key, Namespace, Outcome, Pin, Reservation,
    Task, TierStats,
};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::sim::run::{note_panics, take_wrong};
use kvdepot_testkit::worker::answer;

use super::signal::{duplicate, shut, steal};
use crate::common::config_of;
use crate::log;
use crate::talks::talker::talker;
use crate::world::{key, spec};

/// Longest wait for a task: far beyond what any takes, and below what the parent waits.
const PATIENCE: Duration = Duration::from_secs(15);

/// How long whoever is to lose an answer waits for one.
const DEAF: Duration = Duration::from_millis(5);

/// A key that nobody puts.
const NOBODYS: u16 = 500;

/// Tells contents apart.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

/// Answers the words of a command.
pub type Player = Box<dyn FnMut(&[&str]) -> String>;

/// Plays a role until the parent ends.
pub fn play(role: &str, commands: &Receiver<String>) {
    log::listen();
    note_panics();
    kvdepot_transfer::install();
    let mut words = role.splitn(3, ' ');
    let (role, first) = (words.next().unwrap(), words.next().unwrap_or_default());
    let rest = words.next().unwrap_or_default();
    let mut perform: Player = match role {
        "owner" => owner(&format!("{first} {rest}")),
        "client" => client(first.into(), rest.parse().unwrap()),
        "sharer" => sharer(&format!("{first} {rest}")),
        "talker" => talker(&format!("{first} {rest}")),
        _ => mover(first.into()),
    };
    for command in commands {
        let words: Vec<&str> = command.split(' ').collect();
        let said = perform(&words);
        let wrong = take_wrong();
        match wrong.is_empty() {
            true => answer(&said),
            false => answer(&format!("WRONG {}", wrong.join("; ").replace('\n', " "))),
        }
    }
}

fn owner(spec: &str) -> Player {
    let config = config_of(spec);
    let mut depot = None;
    Box::new(move |words| match words[0] {
        "open" => match kvdepot_service::open(&config) {
            Ok(opened) => {
                let found = opened.opening();
                depot = Some(opened);
                let (blocks, damaged) = (found.blocks, found.damaged);
                format!("open {blocks} {damaged} {}", found.outranked)
            }
            Err(error) => format!("failed: {error}"),
        },
        "close" => {
            depot.iter().for_each(Depot::close);
            "closed".into()
        }
        "losses" => {
            log::expect_losses(true);
            "expected".into()
        }
        _ => "here".into(),
    })
}

/// A client's depot and what it holds.
struct Client {
    depot: Depot,
    reserved: BTreeMap<u64, Reservation>,
    pinned: BTreeMap<u64, Pin>,
    number: u64,
    mover: Option<Mover>,
    /// Ends this process's connections.
    cut: Option<std::thread::JoinHandle<()>>,
}

fn client(socket: PathBuf, patience: u64) -> Player {
    let mut client = None;
    Box::new(move |words| {
        if words[0] == "open" {
            let patience = Some(Duration::from_millis(patience));
            return match kvdepot_service::connect_within(&socket, Some(2), patience) {
                Ok(depot) => {
                    client = Some(Client::new(depot));
                    "open".into()
                }
                Err(error) => format!("failed: {error}"),
            };
        }
        let client = client.as_mut().unwrap();
        match client.perform(words) {
            Ok(answer) => answer,
            Err(error) => format!("failed: {error}").replace('\n', " "),
        }
    })
}

/// A depot of its own over what others share.
fn sharer(spec: &str) -> Player {
    let config = config_of(spec.trim_end());
    let mut client = None;
    Box::new(move |words| {
        let said = match words[0] {
            "open" => kvdepot_service::open(&config).map(|depot| {
                client = Some(Client::new(depot));
                "open".to_owned()
            }),
            "close" => {
                client
                    .take()
                    .into_iter()
                    .for_each(|client: Client| client.depot.close());
                Ok("closed".into())
            }
            _ => client.as_mut().unwrap().perform(words),
        };
        said.unwrap_or_else(|error| format!("failed: {error}").replace('\n', " "))
    })
}

/// `a:b:c` as its words.
pub fn fields(word: &str) -> Vec<&str> {
    word.split(':').collect()
}

pub fn number(word: &str) -> u64 {
    word.parse().unwrap()
}

pub fn key_of(word: &str) -> Key {
    key(word.parse().unwrap())
}

impl Client {
    fn new(depot: Depot) -> Client {
        Client {
            depot,
            reserved: BTreeMap::new(),
            pinned: BTreeMap::new(),
            number: 0,
            mover: None,
            cut: None,
        }
    }

    fn perform(&mut self, words: &[&str]) -> Result<String, kvdepot_store::Error> {
        let namespace = || self.depot.namespace(&spec(words[1].parse().unwrap()));
        Ok(match words[0] {
            "put" => put(&namespace()?, &words[2..])?,
            "get" => get(&namespace()?, words[2] == "prefix", &words[3..])?,
            "load" => {
                let ns = namespace()?;
                super::lanes::load(&self.depot, &ns, &mut self.mover, &words[3..])?
            }
            "prefetch" => {
                let keys: Vec<Key> = words[2..].iter().map(|word| key_of(word)).collect();
                ended(&namespace()?.prefetch(&keys)?)
            }
            "clear" => format!("removed {}", namespace()?.clear()?),
            "held" => {
                let stats = self.depot.stats();
                let held = |tier: &TierStats| tier.pinned_blocks + tier.reserved_blocks;
                let held: u64 = stats.tiers.iter().map(held).sum();
                format!("held {} {}", held, stats.write_back_bytes)
            }
            "remove" => {
                let keys: Vec<Key> = words[2..].iter().map(|word| key_of(word)).collect();
                format!("removed {}", namespace()?.remove(&keys)?)
            }
            "reserve" => self.reserve(&namespace()?, &words[2..])?,
            "commit" => self.commit(&namespace()?, &words[2..])?,
            "abort" => {
                let name = number(words[2]);
                let held: Vec<_> = self.reserved.remove(&name).into_iter().collect();
                namespace()?.abort(&held);
                "aborted".into()
            }
            "pin" => self.pin(&namespace()?, &words[2..])?,
            "unpin" => {
                let held: Vec<_> = self.pinned.remove(&number(words[2])).into_iter().collect();
                namespace()?.unpin(&held, words[3] == "served");
                "unpinned".into()
            }
            "grow" => {
                let grown = self.depot.grow_device(words[1].as_ref(), number(words[2]));
                grown.map(|()| "grown".to_owned())?
            }
            "found" => {
                self.cut
                    .take()
                    .into_iter()
                    .for_each(|cut| cut.join().unwrap());
                // Whether a connection has ended is known for certain once it is used.
                let namespace = self.depot.namespace(&spec(0))?;
                let begun = Instant::now();
                while namespace.remove(&[key(NOBODYS)]).is_err() && begun.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_millis(2));
                }
                format!("connected {}", self.depot.is_connected())
            }
            "cut" => {
                // In the middle of what comes next, or with the first answer to it.
                let after = Duration::from_micros(number(words[1]));
                let deaf = words[2] == "deaf";
                let (all, begun) = (sockets(), Instant::now());
                let cut = move || {
                    match deaf {
                        true => {
                            while begun.elapsed() < DEAF && !all.iter().any(|(one, _)| steal(*one))
                            {
                            }
                        }
                        false => std::thread::sleep(after),
                    }
                    // Held, so that no other connection gets their numbers meanwhile.
                    let held: Vec<_> = sockets().into_iter().filter_map(hold).collect();
                    held.iter().for_each(shut);
                };
                let last = self.cut.replace(std::thread::spawn(cut));
                last.into_iter().for_each(|last| last.join().unwrap());
                "cutting".into()
            }
            other => format!("failed: what is {other}?"),
        })
    }

    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    fn reserve(&mut self, ns: &Namespace, words: &[&str]) -> Result<String, kvdepot_store::Error> {
        let block = |word: &&str| {
            let word = fields(word);
            let parts = word[1].split(',').map(number).collect();
            (key_of(word[0]), parts)
        };
        let blocks: Vec<_> = words.iter().map(block).collect();
        let mut said = String::from("reserved");
        for one in ns.reserve(&blocks)? {
            match one {
                Some(one) => {
                    let name = self.next();
                    said += &format!(" {name}:{}", hex(&one.placement()));
                    self.reserved.insert(name, one);
                }
                None => said += " -",
            }
        }
        Ok(said)
    }

    fn commit(&mut self, ns: &Namespace, words: &[&str]) -> Result<String, kvdepot_store::Error> {
        let Some(held) = self.reserved.remove(&number(words[0])) else {
            return Ok("committed false".into());
        };
        let sums: Vec<Checksum> = words[1]
            .split(',')
            .map(|sum| Checksum(unhex(sum).try_into().unwrap()))
            .collect();
        let stored = ns.commit(&[held], &[sums])?;
        Ok(format!("committed {}", stored[0]))
    }

    fn pin(&mut self, ns: &Namespace, words: &[&str]) -> Result<String, kvdepot_store::Error> {
        let keys: Vec<Key> = words.iter().map(|word| key_of(word)).collect();
        let mut said = String::from("pinned");
        for one in ns.pin(&keys, false)? {
            match one {
                Some(one) => {
                    let name = self.next();
                    said += &format!(" {name}:{}:{}", one.bytes(), hex(&one.placement()));
                    self.pinned.insert(name, one);
                }
                None => said += " -",
            }
        }
        Ok(said)
    }
}

/// The sockets of this process, by descriptor, with what tells them from all others.
fn sockets() -> Vec<(i32, PathBuf)> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let socket = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?;
        let name = std::fs::read_link(entry.path()).ok()?;
        let number = entry.file_name().to_str()?.parse().ok()?;
        name.to_str()?
            .starts_with("socket:")
            .then_some((number, name))
    };
    all.filter_map(socket).collect()
}

/// A descriptor of one's own of a socket, if its number still is that one's.
fn hold((number, name): (i32, PathBuf)) -> Option<OwnedFd> {
    let held = duplicate(number)?;
    let path = format!("/proc/self/fd/{}", held.as_raw_fd());
    (std::fs::read_link(path).ok()? == name).then_some(held)
}

/// The outcomes of a task, or that it has none.
fn ended(task: &Task) -> String {
    match task.wait(Some(PATIENCE)) {
        Ok(_) => format!("{:?}", task.outcomes()).replace([',', '[', ']'], ""),
        Err(_) => format!("HANGS {:?}", task.outcomes()),
    }
}

fn put(ns: &Namespace, words: &[&str]) -> Result<String, kvdepot_store::Error> {
    let (mut keys, mut buffers) = (Vec::new(), Vec::new());
    for word in words {
        let word = fields(word);
        keys.push(key_of(word[0]));
        let bytes = content(number(word[1]), number(word[2]) as usize);
        buffers.push(Buffer::from_vec(bytes));
    }
    let task = ns.put(keys, BlockBuffers::whole(buffers))?;
    Ok(ended(&task))
}

fn get(ns: &Namespace, prefix: bool, words: &[&str]) -> Result<String, kvdepot_store::Error> {
    let (mut keys, mut buffers) = (Vec::new(), Vec::new());
    for word in words {
        let word = fields(word);
        keys.push(key_of(word[0]));
        buffers.push(Buffer::from_vec(vec![0xEE; number(word[1]) as usize]));
    }
    let mut options = GetOptions::default();
    options.prefix = prefix;
    let task = ns.get_with(keys, BlockBuffers::whole(buffers.clone()), options)?;
    let said = ended(&task);
    if said.starts_with("HANGS") {
        return Ok(said);
    }
    let each = task.outcomes().into_iter().zip(&buffers);
    let each = each.map(|(outcome, buffer)| match outcome {
        Outcome::Done => format!("Done={}", hash(&buffer.to_vec())),
        other => format!("{other:?}"),
    });
    Ok(each.collect::<Vec<_>>().join(" "))
}

fn mover(socket: PathBuf) -> Player {
    let mut mover = None;
    Box::new(move |words| match words[0] {
        "attach" => {
            mover = None;
            match Mover::attach(&socket, Some(1), true) {
                Ok(attached) => {
                    mover = Some(attached);
                    "attached".into()
                }
                Err(error) => format!("failed: {error}"),
            }
        }
        _ => match transfer(mover.as_ref().unwrap(), words) {
            Ok(said) => said,
            Err(error) => format!("failed: {error}"),
        },
    })
}

/// `store placement part content begin end`, or `load placement part length`.
fn transfer(mover: &Mover, words: &[&str]) -> Result<String, kvdepot_store::Error> {
    let (placement, part) = (unhex(words[1]), words[2].parse().unwrap());
    if words[0] == "store" {
        let (begin, end) = (number(words[4]) as usize, number(words[5]) as usize);
        let bytes = content(number(words[3]), end)[begin..].to_vec();
        let buffers = BlockBuffers::whole([Buffer::from_vec(bytes)]);
        let job = mover.store(&[placement], &buffers, part)?;
        if !job.wait(Some(PATIENCE)) {
            return Ok("HANGS".into());
        }
        return Ok(job.checksums()[0].map_or_else(|| "-".into(), |sum| hex(&sum.0)));
    }
    let buffer = Buffer::from_vec(vec![0xEE; number(words[3]) as usize]);
    let buffers = BlockBuffers::whole([buffer.clone()]);
    let job = mover.load(&[placement], &buffers, part)?;
    if !job.wait(Some(PATIENCE)) {
        return Ok("HANGS".into());
    }
    let loaded = job.checksums()[0].map(|_| hash(&buffer.to_vec()).to_string());
    Ok(loaded.unwrap_or_else(|| "-".into()))
}

/// A part of an arena's file is gone, under everybody's mapping.
pub fn truncate(path: &Path, part: u64) {
    let file = File::options().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    // Nobody would take less for an arena.
    file.set_len((len * part / 100).max(CAPACITY_MIN)).unwrap();
}
