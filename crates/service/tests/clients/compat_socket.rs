//! Releases that meet at a socket: an old client and a new owner, a new client and an old owner.
//! Either they understand each other wholly, or one clear error says what to do.
//!
//! `tests/fixtures/socket-N.json` is what a client and its owner of protocol version N said to
//! each other, `socket-N.runs` the medium afterwards. They are never written again. A change of
//! the frames is a new version (`VERSION` in `frame/hello.rs`), whose recording is made once by
//!
//! ```text
//! KVDEPOT_FIXTURES=DIRECTORY cargo test -p kvdepot-service --test clients -- \
//!     --ignored compat_socket::
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::frames::{WELCOME, take_varint};
use crate::common::recording::{
    ANSWER_MAX, OldServer, Recorder, Recording, Side, hex, read_with_descriptors, unhex,
};
use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, block, get, key, keys, namespace, put,
};
use kvdepot_service::Mover;
use kvdepot_store::format::layout::Layout;
use kvdepot_store::{BlockBuffers, Buffer, Depot, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::runs;
use serde_json::{Value, json};

const LEN: usize = 5000;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The recordings that there are, by protocol version.
fn recordings() -> Vec<(u32, Fixture)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let version = name
            .strip_prefix("socket-")
            .and_then(|name| name.strip_suffix(".json"));
        if let Some(version) = version {
            let version = version.parse().unwrap();
            found.push((version, Fixture::read(version)));
        }
    }
    assert!(found.iter().any(|(version, _)| *version == 4));
    found
}

struct Fixture {
    recording: Recording,
    /// What an owner of that version says to one of another.
    refusal: Vec<u8>,
    /// A placement that it handed out.
    placement: Vec<u8>,
    /// Keys and parts of the blocks at the end, by the numbers of their contents.
    left: Vec<(u64, Vec<(u64, usize)>)>,
    medium: Vec<u8>,
}

impl Fixture {
    fn read(version: u32) -> Fixture {
        let text = std::fs::read(fixtures().join(format!("socket-{version}.json"))).unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        let bytes = |name: &str| unhex(value[name].as_str().unwrap());
        Fixture {
            recording: Recording::of_json(&value["said"]),
            refusal: bytes("refusal"),
            placement: bytes("placement"),
            left: serde_json::from_value(value["left"].clone()).unwrap(),
            medium: std::fs::read(fixtures().join(format!("socket-{version}.runs"))).unwrap(),
        }
    }
}

fn place() -> Place {
    Place::new("Dax", "", "1MiB").with("dax", "records", 32)
}

/// What the recorded client did; each call waits for its answer, so that it is said the same way
/// each time. The blocks that are left.
fn converse(client: &Depot, mover: &Mover) -> Vec<(u64, Vec<(u64, usize)>)> {
    let ns = namespace(client);
    for number in 1..=4 {
        assert_eq!(put(&ns, &[number], LEN), [true]);
    }
    assert_eq!(ns.contains(&keys([1, 9, 4])).unwrap(), [true, false, true]);
    assert_eq!(ns.prefix(&keys([1, 2, 9])).unwrap(), 2);
    assert_eq!(ns.nearest(&keys([3, 9])).unwrap(), [Some("Dax"), None]);
    assert_eq!(get(&ns, &[2], LEN), [Outcome::Done]);
    assert_eq!(get(&ns, &[9], LEN), [Outcome::Miss]);
    let pins = ns.pin(&keys([1, 9, 2]), false).unwrap();
    let pins: Vec<_> = pins.into_iter().flatten().collect();
    assert_eq!(pins.len(), 2);
    ns.unpin(&pins, true);
    let reserved = ns.reserve(&[(key(10), vec![5000, 3000])]).unwrap();
    let reserved: Vec<_> = reserved.into_iter().flatten().collect();
    let mut sums = Vec::new();
    for (part, len) in [(0, 5000), (1, 3000)] {
        let bytes = BlockBuffers::whole([block(100 + part, len)]);
        let job = mover
            .store(&[reserved[0].placement()], &bytes, part as u32)
            .unwrap();
        assert!(job.wait(Some(PATIENCE)));
        sums.push(job.checksums()[0].unwrap());
    }
    assert_eq!(ns.commit(&reserved, &[sums]).unwrap(), [true]);
    let reserved = ns.reserve(&[(key(11), vec![3000])]).unwrap();
    let reserved: Vec<_> = reserved.into_iter().flatten().collect();
    ns.abort(&reserved);
    assert!(client.gone(100).unwrap().blocks.is_empty());
    let pins = ns.pin(&keys([3]), false).unwrap();
    let pins: Vec<_> = pins.into_iter().flatten().collect();
    assert_eq!(ns.discard(&pins), 1);
    ns.unpin(&pins, false);
    assert_eq!(ns.remove(&keys([4, 9])).unwrap(), 1);
    let gone = client.gone(100).unwrap();
    assert_eq!((gone.blocks.len(), gone.overflowed), (2, false));
    assert_eq!(client.namespaces().unwrap().len(), 1);
    assert_eq!(ns.blocks().unwrap().len(), 3);
    assert!(client.drain(PATIENCE));
    assert_eq!(client.devices().unwrap().len(), 1);
    let ahead = ns.prefetch(&keys([1])).unwrap();
    assert_eq!(ahead.wait(Some(PATIENCE)).unwrap().len(), 1);
    assert_eq!(client.stats().tiers[0].blocks, 3);
    let whole = Buffer::from_vec(vec![0; 8000]);
    let task = ns
        .get(keys([10]), BlockBuffers::whole([whole.clone()]))
        .unwrap();
    assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true]);
    assert_eq!(whole.to_vec()[..5000], content(100, 5000));
    let one = |number| (number, vec![(number, LEN)]);
    vec![one(1), one(2), (10, vec![(100, 5000), (101, 3000)])]
}

/// Says what to do, in one sentence.
fn assert_clear(version: u32, text: &str) {
    assert!(
        text.contains(&format!("protocol version {version}")) && text.contains("use the same"),
        "{text}"
    );
}

// ---- an old owner and this client -----------------------------------------------------------

#[test]
fn a_client_understands_an_earlier_owner_or_says_what_to_do() {
    for (version, fixture) in recordings() {
        let place = place();
        let begun = Instant::now();
        let owner = OldServer::start(
            &place.socket(),
            &fixture.recording,
            &fixture.refusal,
            &fixture.medium,
        );
        match kvdepot_service::connect(&place.socket(), Some(1)) {
            Ok(client) => {
                let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
                let talk = || converse(&client, &mover);
                let left = std::panic::catch_unwind(std::panic::AssertUnwindSafe(talk));
                drop(mover);
                client.close();
                // Frames that have changed are a new version.
                assert_eq!(owner.finish(), [] as [String; 0], "version {version}");
                assert_eq!(left.unwrap(), fixture.left);
            }
            Err(error) => {
                assert_clear(version, &error.to_string());
                for write in [false, true] {
                    let error = Mover::attach(&place.socket(), Some(1), write)
                        .err()
                        .unwrap();
                    assert_clear(version, &error.to_string());
                }
                assert_eq!(owner.finish(), [] as [String; 0]);
            }
        }
        assert!(begun.elapsed() < PATIENCE);
    }
}

// ---- an old client and this owner -----------------------------------------------------------

/// Frames of one connection, as they come.
struct Heard {
    verb: u16,
    status: u16,
    number: u64,
    body: Vec<u8>,
}

const COMMIT: u16 = 9;
const MOVED: u16 = 34;
const STEP: u16 = 49;
/// Answers in JSON: statistics, the depot, its devices.
const IN_JSON: [u16; 3] = [14, 16, 36];

fn frames(bytes: &mut VecDeque<u8>) -> Vec<Heard> {
    let mut found = Vec::new();
    loop {
        let head: Vec<u8> = bytes.iter().take(16).copied().collect();
        let Ok(head) = <[u8; 16]>::try_from(head) else {
            return found;
        };
        let len = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
        if bytes.len() < 16 + len {
            return found;
        }
        let frame: Vec<u8> = bytes.drain(..16 + len).collect();
        found.push(Heard {
            verb: u16::from_le_bytes(head[4..6].try_into().unwrap()),
            status: u16::from_le_bytes(head[6..8].try_into().unwrap()),
            number: u64::from_le_bytes(head[8..].try_into().unwrap()),
            body: frame[16..].to_vec(),
        });
    }
}

/// What the steps of each task come to: released blocks, and each key's outcome.
type Steps = BTreeMap<u64, (u32, BTreeMap<u32, u8>)>;

fn step(steps: &mut Steps, frame: &Heard) {
    let task = steps.entry(frame.number).or_default();
    let mut rest = &frame.body[..];
    task.0 += take_varint(&mut rest) as u32;
    assert_eq!(take_varint(&mut rest), rest.len() as u64);
    for row in rest.as_chunks::<5>().0 {
        let [index @ .., outcome] = *row;
        task.1.insert(u32::from_le_bytes(index), outcome);
    }
}

/// One connection of the old client.
struct Line {
    socket: UnixStream,
    greeted: bool,
    /// Recorded bytes that are no whole frame yet.
    recorded: VecDeque<u8>,
    /// What steps of this owner have said so far, and what recorded ones have.
    steps: [Steps; 2],
}

impl Line {
    /// A recorded step that has not come yet.
    fn behind(&self) -> Option<String> {
        let [now, then] = &self.steps;
        let late = then.iter().find(|(task, (released, outcomes))| {
            let come = now.get(task).cloned().unwrap_or_default();
            let said = |(key, outcome): (&u32, &u8)| come.1.get(key) == Some(outcome);
            come.0 < *released || !outcomes.iter().all(said)
        });
        late.map(|(task, then)| format!("task {task}: {then:?}, of {:?}", now.get(task)))
    }
}

/// The recorded client, at a living owner.
struct OldClient<'a> {
    place: &'a Place,
    lines: BTreeMap<usize, Line>,
    /// Its number, as this owner gave it.
    number: Vec<u8>,
    /// The medium as it was after the recorded conversation, to be written as its lanes did.
    medium: PathBuf,
    writable: Option<File>,
}

/// Why the owner does not go on with it.
struct Refused(String);

impl OldClient<'_> {
    fn play(&mut self, recording: &Recording) -> Result<(), Refused> {
        for said in &recording.0 {
            match said.side {
                Side::Client => self.say(said.connection, &said.bytes),
                Side::Server => self.hear(said.connection, &said.bytes)?,
            }
        }
        Ok(())
    }

    fn say(&mut self, connection: usize, bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        if !self.lines.contains_key(&connection) {
            let socket = UnixStream::connect(self.place.socket()).unwrap();
            socket.set_read_timeout(Some(ANSWER_MAX)).unwrap();
            let line = Line {
                socket,
                greeted: false,
                recorded: VecDeque::new(),
                steps: [Steps::new(), Steps::new()],
            };
            self.lines.insert(connection, line);
            if bytes[12] == 3 {
                // The second connection of a client names the client.
                bytes[16..24].copy_from_slice(&self.number);
            }
        } else {
            self.await_steps();
            for frame in frames(&mut bytes.iter().copied().collect()) {
                if matches!(frame.verb, MOVED | COMMIT) {
                    self.move_bytes();
                }
            }
        }
        let mut socket = &self.lines[&connection].socket;
        socket.write_all(&bytes).unwrap();
    }

    /// What the old client's lanes and workers did before they said that they had.
    fn move_bytes(&self) {
        let layout = Layout::new(1 << 20, 32).unwrap();
        let bytes = std::fs::read(&self.medium).unwrap();
        let data = &bytes[layout.data as usize..];
        let file = self.writable.as_ref().unwrap();
        file.write_all_at(data, layout.data).unwrap();
    }

    /// Steps come when they come, but what the client waited for before it went on has come.
    fn await_steps(&mut self) {
        for line in self.lines.values_mut() {
            while let Some(behind) = line.behind() {
                let frame = hear(&line.socket);
                assert_eq!(frame.verb, STEP, "awaited: {behind}");
                step(&mut line.steps[0], &frame);
            }
        }
    }

    fn hear(&mut self, connection: usize, recorded: &[u8]) -> Result<(), Refused> {
        let line = self.lines.get_mut(&connection).unwrap();
        let mut recorded = recorded;
        if !line.greeted {
            line.greeted = true;
            let (head, mut fds) = read_with_descriptors(&line.socket, 16).unwrap();
            let status = u32::from_le_bytes(head[12..16].try_into().unwrap());
            if status > 0 {
                let (text, _) = read_with_descriptors(&line.socket, status as usize).unwrap();
                let rest = line.socket.read(&mut [0]).unwrap_or(0);
                assert_eq!(rest, 0, "the owner hangs up");
                return Err(Refused(String::from_utf8(text).unwrap()));
            }
            let count = recorded[WELCOME - 4] as usize;
            let (welcome, later) = recorded.split_at(WELCOME + count * 16);
            let (rest, _) = read_with_descriptors(&line.socket, welcome.len() - 16).unwrap();
            // All but the session and the client's number.
            assert_eq!(rest[16..], welcome[32..], "another welcome");
            if self.number.is_empty() {
                self.number = rest[8..16].to_vec();
            }
            if count > 0 && self.writable.is_none() {
                self.writable = fds.pop().map(File::from);
            }
            recorded = later;
        }
        line.recorded.extend(recorded);
        for then in frames(&mut line.recorded) {
            if then.verb == STEP {
                step(&mut line.steps[1], &then);
                continue;
            }
            let now = next(&line.socket, &mut line.steps[0]);
            let name = format!("connection {connection}, verb {}", then.verb);
            assert_eq!(
                (now.verb, now.status, now.number),
                (then.verb, then.status, then.number),
                "{name}"
            );
            let same = IN_JSON.contains(&now.verb) || now.body == then.body;
            assert!(same, "{name}: {}, then {}", hex(&now.body), hex(&then.body));
        }
        Ok(())
    }
}

fn hear(socket: &UnixStream) -> Heard {
    let (head, _) = read_with_descriptors(socket, 16).unwrap();
    let len = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
    let (body, _) = read_with_descriptors(socket, len).unwrap();
    frames(&mut head.into_iter().chain(body).collect()).remove(0)
}

/// The next frame but the steps, which count on the way.
fn next(socket: &UnixStream, steps: &mut Steps) -> Heard {
    loop {
        let frame = hear(socket);
        if frame.verb != STEP {
            return frame;
        }
        step(steps, &frame);
    }
}

#[test]
fn an_owner_serves_an_earlier_client_or_says_what_to_do() {
    for (version, fixture) in recordings() {
        let place = place();
        let owner = place.serve();
        let medium = place.dir().join("recorded");
        runs::unpack(&fixture.medium, &medium);
        let mut client = OldClient {
            place: &place,
            lines: BTreeMap::new(),
            number: Vec::new(),
            medium,
            writable: None,
        };
        let left = match client.play(&fixture.recording) {
            Ok(()) => fixture.left,
            Err(Refused(text)) => {
                assert_clear(version, &text);
                Vec::new()
            }
        };
        drop(client);
        // Whatever it was told: the others are served, and nothing is held for it.
        let other = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
        let ns = namespace(&other);
        assert_eq!(put(&ns, &[500], LEN), [true]);
        assert_eq!(ns.blocks().unwrap().len(), left.len() + 1);
        for (number, parts) in left {
            let bytes: Vec<u8> = parts
                .iter()
                .flat_map(|(n, len)| content(*n, *len))
                .collect();
            let buffer = Buffer::from_vec(vec![0; bytes.len()]);
            let task = ns
                .get(keys([number]), BlockBuffers::whole([buffer.clone()]))
                .unwrap();
            assert_eq!(task.wait(Some(PATIENCE)).unwrap(), [true], "{number}");
            assert!(buffer.to_vec() == bytes, "wrong bytes for block {number}");
        }
        other.close();
        assert_at_rest(&owner);
    }
}

#[test]
fn a_worker_refuses_a_placement_of_an_earlier_owner() {
    for (version, fixture) in recordings() {
        let place = place();
        let owner = place.serve();
        let mover = Mover::attach(&place.socket(), Some(1), true).unwrap();
        let buffers = BlockBuffers::whole([block(1, 5000)]);
        for job in [
            mover.store(std::slice::from_ref(&fixture.placement), &buffers, 0),
            mover.hash(std::slice::from_ref(&fixture.placement), 0, true),
        ] {
            match job {
                Ok(job) => {
                    assert!(job.wait(Some(PATIENCE)));
                    assert_eq!(job.checksums(), [None], "version {version}");
                    assert!(job.error().unwrap().contains("another depot"));
                }
                Err(error) => assert!(error.to_string().contains("placements"), "{error}"),
            }
        }
        drop(mover);
        assert_at_rest(&owner);
    }
}

// ---- how they are made ----------------------------------------------------------------------

#[test]
#[ignore = "writes the recording of a protocol version, once"]
fn record_the_conversation_of_this_version() {
    let Some(folder) = std::env::var_os("KVDEPOT_FIXTURES").map(PathBuf::from) else {
        return;
    };
    let place = place();
    let owner = place.serve();
    let between = place.dir().join("between");
    let recorder = Recorder::start(&between, &place.socket());
    let client = kvdepot_service::connect(&between, Some(1)).unwrap();
    let mover = Mover::attach(&between, Some(1), true).unwrap();
    let left = converse(&client, &mover);
    drop(mover);
    client.close();
    let recording = recorder.finish();
    let packed = runs::pack(&place.arena());
    let hello = recording.0[0].bytes.clone();
    let version = u32::from_le_bytes(hello[8..12].try_into().unwrap());
    // One of the next version, as far as this one can know it.
    let mut stranger = UnixStream::connect(place.socket()).unwrap();
    stranger
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut strange = hello;
    strange[8..12].copy_from_slice(&(version + 1).to_le_bytes());
    stranger.write_all(&strange).unwrap();
    let mut refusal = Vec::new();
    let _ended = stranger.read_to_end(&mut refusal);
    let pin = namespace(&owner).pin(&keys([1]), false).unwrap();
    let pin: Vec<_> = pin.into_iter().flatten().collect();
    let placement = pin[0].placement();
    namespace(&owner).unpin(&pin, false);
    let recorded = json!({
        "made_by": format!("kvdepot {}", env!("CARGO_PKG_VERSION")),
        "version": version,
        "refusal": hex(&refusal),
        "placement": hex(&placement),
        "left": left,
        "said": recording.to_json(),
    });
    let text = serde_json::to_string_pretty(&recorded).unwrap() + "\n";
    std::fs::write(folder.join(format!("socket-{version}.json")), text).unwrap();
    std::fs::write(folder.join(format!("socket-{version}.runs")), packed).unwrap();
}
