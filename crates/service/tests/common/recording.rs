//! What two processes said to each other over a Unix socket: taken down by someone between them,
//! and said again by one who plays either side.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_host::fds;
use kvdepot_testkit::runs;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// Longer than any answer takes; whoever waits so long is taken for hanging.
pub const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Who spoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that connected.
    Client,
    /// The one that listened.
    Server,
}

/// Bytes that followed each other in one direction.
#[derive(Clone, Debug)]
pub struct Said {
    /// Connections count from 0, in the order in which they were made.
    pub connection: usize,
    pub side: Side,
    pub bytes: Vec<u8>,
    /// Lengths of the files whose descriptors came with them.
    pub descriptors: Vec<u64>,
}

/// A whole conversation, in the order in which it was heard.
#[derive(Clone, Debug, Default)]
pub struct Recording(pub Vec<Said>);

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

impl Recording {
    pub fn to_json(&self) -> Value {
        let said = |said: &Said| {
            let from = match said.side {
                Side::Client => "client",
                Side::Server => "server",
            };
            json!({
                "connection": said.connection,
                "from": from,
                "descriptors": said.descriptors,
                "bytes": hex(&said.bytes),
            })
        };
        self.0.iter().map(said).collect()
    }

    pub fn of_json(value: &Value) -> Recording {
        let said = |said: &Value| Said {
            connection: said["connection"].as_u64().unwrap() as usize,
            side: match said["from"].as_str().unwrap() {
                "client" => Side::Client,
                _ => Side::Server,
            },
            bytes: unhex(said["bytes"].as_str().unwrap()),
            descriptors: (said["descriptors"].as_array().unwrap().iter())
                .map(|len| len.as_u64().unwrap())
                .collect(),
        };
        Recording(value.as_array().unwrap().iter().map(said).collect())
    }

    /// What was said on one connection, each turn in one piece.
    fn of_connection(&self, connection: usize) -> Vec<Said> {
        let mut turns: Vec<Said> = Vec::new();
        for said in self.0.iter().filter(|said| said.connection == connection) {
            match turns.last_mut() {
                Some(last) if last.side == said.side && said.descriptors.is_empty() => {
                    last.bytes.extend_from_slice(&said.bytes);
                }
                _ => turns.push(said.clone()),
            }
        }
        turns
    }
}

/// Stands between: whoever connects to `at` talks to whoever listens at `to`.
pub struct Recorder {
    listener: UnixListener,
    thread: Option<JoinHandle<()>>,
    heard: Arc<Mutex<Recording>>,
}

impl Recorder {
    pub fn start(at: &Path, to: &Path) -> Recorder {
        let listener = UnixListener::bind(at).unwrap();
        let heard = Arc::new(Mutex::new(Recording::default()));
        let (all, there, incoming) = (
            Arc::clone(&heard),
            to.to_owned(),
            listener.try_clone().unwrap(),
        );
        let thread = std::thread::spawn(move || {
            let mut pipes = Vec::new();
            for (connection, client) in incoming.incoming().enumerate() {
                let Ok(client) = client else { break };
                let server = UnixStream::connect(&there).unwrap();
                for side in [Side::Client, Side::Server] {
                    let (from, to) = match side {
                        Side::Client => (&client, &server),
                        Side::Server => (&server, &client),
                    };
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let all = Arc::clone(&all);
                    let pipe = move || carry(&from, &to, connection, side, &all);
                    pipes.push(std::thread::spawn(pipe));
                }
            }
            pipes.into_iter().for_each(|pipe| pipe.join().unwrap());
        });
        Recorder {
            listener,
            thread: Some(thread),
            heard,
        }
    }

    /// What was said, once both sides have hung up.
    pub fn finish(mut self) -> Recording {
        let listener: OwnedFd = self.listener.into();
        UnixStream::from(listener).shutdown(Shutdown::Both).unwrap();
        self.thread.take().unwrap().join().unwrap();
        self.heard.lock().clone()
    }
}

fn carry(
    from: &UnixStream,
    to: &UnixStream,
    connection: usize,
    side: Side,
    heard: &Mutex<Recording>,
) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let (count, descriptors) = fds::recv(from, &mut bytes).unwrap_or_default();
        if count == 0 {
            // An owner keeps a worker's connection open until the worker hangs up.
            let _shut = to.shutdown(Shutdown::Both);
            return;
        }
        let len = |fd: &OwnedFd| {
            let file = File::from(fd.try_clone().unwrap());
            file.metadata().unwrap().len()
        };
        // Before it is passed on: what it leads to comes behind it.
        heard.lock().0.push(Said {
            connection,
            side,
            bytes: bytes[..count].to_vec(),
            descriptors: descriptors.iter().map(len).collect(),
        });
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if fds::send(to, &bytes[..count], &descriptors).is_err() {
            return;
        }
    }
}

/// Plays the server of a recording to whoever connects.
pub struct OldServer {
    listener: UnixListener,
    thread: Option<JoinHandle<()>>,
    wrong: Arc<Mutex<Vec<String>>>,
}

impl OldServer {
    /// With a file of its own behind each descriptor, which has what the server wrote already. To
    /// a greeting other than the recorded one it says `refusal`, as that server does.
    pub fn start(at: &Path, recording: &Recording, refusal: &[u8], medium: &[u8]) -> OldServer {
        let listener = UnixListener::bind(at).unwrap();
        let incoming = listener.try_clone().unwrap();
        let wrong = Arc::new(Mutex::new(Vec::new()));
        let path = at.with_extension("medium");
        runs::unpack(medium, &path);
        let files = Files(path);
        let (recording, refusal, noted) =
            (recording.clone(), refusal.to_owned(), Arc::clone(&wrong));
        let thread = std::thread::spawn(move || {
            std::thread::scope(|scope| {
                for (connection, client) in incoming.incoming().enumerate() {
                    let Ok(client) = client else { break };
                    let turns = recording.of_connection(connection);
                    let (refusal, noted, files) = (&refusal, &noted, &files);
                    scope.spawn(move || {
                        if let Err(error) = play_server(&client, &turns, refusal, files) {
                            noted
                                .lock()
                                .push(format!("connection {connection}: {error}"));
                        }
                    });
                }
            });
        });
        OldServer {
            listener,
            thread: Some(thread),
            wrong,
        }
    }

    /// What the clients said otherwise than the recorded one, once they have hung up.
    pub fn finish(mut self) -> Vec<String> {
        let listener: OwnedFd = self.listener.into();
        UnixStream::from(listener).shutdown(Shutdown::Both).unwrap();
        self.thread.take().unwrap().join().unwrap();
        std::mem::take(&mut self.wrong.lock())
    }
}

/// What is behind the descriptors: a medium, and what else was in memory and empty.
struct Files(PathBuf);

impl Files {
    fn of_len(&self, len: u64) -> OwnedFd {
        if len == 0 {
            return fds::memory_file("roster").unwrap();
        }
        let mut how = File::options();
        let file = how.read(true).write(true).open(&self.0).unwrap();
        assert_eq!(file.metadata().unwrap().len(), len, "another medium");
        file.into()
    }
}

fn play_server(
    client: &UnixStream,
    turns: &[Said],
    refusal: &[u8],
    files: &Files,
) -> Result<(), String> {
    client.set_read_timeout(Some(ANSWER_MAX)).unwrap();
    // What the client has said before its turn: its threads may overtake each other.
    let mut early: Vec<Vec<u8>> = Vec::new();
    for (at, said) in turns.iter().enumerate() {
        match said.side {
            Side::Client if at == 0 => {
                let hello = read(client, said.bytes.len())?;
                if hello[..16] != said.bytes[..16] {
                    let _hung_up = fds::send(client, refusal, &[]);
                    return Ok(());
                }
            }
            Side::Client => {
                for wanted in frames(&said.bytes) {
                    hear(client, wanted, &mut early, &turns[at..])?;
                }
            }
            Side::Server => {
                let lens = said.descriptors.iter();
                let fds: Vec<OwnedFd> = lens.map(|len| files.of_len(*len)).collect();
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                fds::send(client, &said.bytes, &fds).map_err(|error| error.to_string())?;
            }
        }
    }
    Ok(())
}

/// Waits for a frame, and keeps those that come before it and are recorded later.
fn hear(
    client: &UnixStream,
    wanted: &[u8],
    early: &mut Vec<Vec<u8>>,
    later: &[Said],
) -> Result<(), String> {
    if let Some(at) = early.iter().position(|frame| frame == wanted) {
        early.remove(at);
        return Ok(());
    }
    loop {
        let mut frame = read(client, HEAD)?;
        let len = u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize;
        frame.extend(read(client, len)?);
        if frame == wanted {
            return Ok(());
        }
        let mut expected = later.iter().flat_map(|said| match said.side {
            Side::Client => frames(&said.bytes),
            Side::Server => Vec::new(),
        });
        if !expected.any(|known| known == frame) {
            let (frame, wanted) = (hex(&frame), hex(wanted));
            return Err(format!("it said {frame}, recorded is {wanted}"));
        }
        early.push(frame);
    }
}

/// Bytes of a frame's head: u32 length of what follows it, and what a version makes of the rest.
const HEAD: usize = 16;

fn frames(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while let Some(len) = bytes.first_chunk::<4>() {
        let (frame, rest) = bytes.split_at(HEAD + u32::from_le_bytes(*len) as usize);
        found.push(frame);
        bytes = rest;
    }
    found
}

/// Exactly so many bytes.
fn read(socket: &UnixStream, len: usize) -> Result<Vec<u8>, String> {
    read_with_descriptors(socket, len).map(|(bytes, _)| bytes)
}

pub fn read_with_descriptors(
    socket: &UnixStream,
    len: usize,
) -> Result<(Vec<u8>, Vec<OwnedFd>), String> {
    let (mut bytes, mut all) = (vec![0; len], Vec::new());
    let mut at = 0;
    while at < len {
        let (count, fds) = fds::recv(socket, &mut bytes[at..])
            .map_err(|error| format!("{len} bytes were expected: {error}"))?;
        if count == 0 {
            return Err(format!("the end after {at} of {len} bytes"));
        }
        at += count;
        all.extend(fds);
    }
    Ok((bytes, all))
}
