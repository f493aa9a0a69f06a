//! The processes of a history, what is known of their blocks, and what must hold between deeds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvdepot_store::Identity;
use kvdepot_testkit::Rng;
use kvdepot_testkit::double;
use kvdepot_testkit::s3::Troubled;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::twin::Id;
use kvdepot_testkit::worker::Worker;
use serde_json::{Value, json};

use super::steps::{KEYS, Medium, SHARERS, Shape};
use crate::history::NAMESPACES;
use crate::processes::heard;
use crate::tiers::posix::{self, SECRET};
use crate::world::{Law, key, law, spec};

/// Longer than any call takes, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How long what fails is waited for, and what one process has not heard of another.
const SOON: Duration = Duration::from_secs(15);

/// Capacities where everything fits, and where it does not.
const ROOMY: u64 = 64 << 20;
const NARROW: u64 = 1 << 20;

/// What the double of 3FS's library does wrong in a process, once or always.
const FAULTS: [&str; 8] = [
    "FAIL",
    "SHORT",
    "SHORT_ALL",
    "LOSE",
    "FULL",
    "REORDER",
    "DELAY_US",
    "REFUSE",
];

/// What is known of a block.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Somebody has begun to write it.
    pub begun: bool,
    /// It was acknowledged, and nothing has happened since that may undo it.
    pub there: bool,
    /// It was removed, and nobody has begun to write it since.
    pub absent: bool,
    /// A write had no answer: it may still happen.
    pub murky: bool,
    /// Its bytes were changed, in the file with that number.
    pub rotted: bool,
}

pub struct Fleet {
    pub shape: Shape,
    seed: u64,
    dir: tempfile::TempDir,
    pub server: Option<Troubled>,
    pub sharers: Vec<Option<Worker>>,
    /// Whether rings of each of them fail.
    pub failing: Vec<bool>,
    /// The medium fails now.
    pub trouble: bool,
    /// Answers whose bytes change on their way from the medium.
    pub changing: usize,
    /// Whoever is killed leaves what others sweep later.
    pub killed: bool,
    pub known: BTreeMap<Id, Known>,
    pub tally: Tally,
}

impl Fleet {
    pub fn new(seed: u64, shape: &Shape) -> Fleet {
        let dir = tempfile::Builder::new()
            .prefix("kvsim")
            .tempdir_in(crate::disk::dir())
            .unwrap();
        let server = (shape.medium == Medium::S3).then(|| Troubled::start(dir.path()));
        fs::create_dir(dir.path().join("mount")).unwrap();
        let digits: String = SECRET.iter().map(|byte| format!("{byte:02x}")).collect();
        let keys = dir.path().join("keys");
        fs::write(&keys, format!("- {digits}\n")).unwrap();
        fs::set_permissions(&keys, Permissions::from_mode(0o600)).unwrap();
        Fleet {
            shape: shape.clone(),
            seed,
            dir,
            server,
            sharers: (0..SHARERS).map(|_| None).collect(),
            failing: vec![false; SHARERS],
            trouble: false,
            changing: 0,
            killed: false,
            known: BTreeMap::new(),
            tally: Tally::default(),
        }
    }

    /// Where the blocks of all are.
    pub fn root(&self) -> PathBuf {
        match &self.server {
            Some(server) => server.path().join("bucket/kv"),
            None => self.dir.path().join("mount/kv"),
        }
    }

    pub fn capacity(&self) -> u64 {
        if self.shape.roomy { ROOMY } else { NARROW }
    }

    fn section(&self) -> Value {
        let mut section = json!({
            "capacity": self.capacity(), "timeout": "2s", "lookup_timeout": "2s",
        });
        if let Some(server) = &self.server {
            section["url"] = json!("s3://bucket/kv");
            section["endpoint"] = json!(server.endpoint());
            section["allow_http"] = json!(true);
            section["credentials"] = json!(server.credentials());
            return section;
        }
        section["path"] = json!(self.root());
        section["fan_out"] = json!(posix::FAN_OUT);
        if self.shape.medium == Medium::Ds3fs {
            static BUILT: OnceLock<PathBuf> = OnceLock::new();
            section["library"] = json!(BUILT.get_or_init(|| double::build("usrbio")));
            section["stream_number"] = json!(2);
        }
        section
    }

    fn spec(&self) -> String {
        let (name, section) = match self.shape.medium {
            Medium::Posix => ("Posix", "posix"),
            Medium::Ds3fs => ("Ds3fs", "ds3fs"),
            Medium::S3 => ("S3", "s3"),
        };
        let mut settings = json!({"socket": "off", "lanes": 2, "close_timeout": "1s"});
        settings[section] = self.section();
        if self.shape.cached {
            settings["cache"] = json!({"capacity": "1MiB"});
        }
        if self.shape.keyed {
            settings["mac_key_file"] = json!(self.dir.path().join("keys"));
        }
        let pipeline = match self.shape.cached {
            true => format!("Cache|{name}"),
            false => name.to_owned(),
        };
        json!([pipeline, settings]).to_string()
    }

    pub fn open_all(&mut self) -> Law {
        (0..SHARERS).try_for_each(|by| self.open(by, 0, 0))
    }

    /// Opens one, with a fault of its rings, if any.
    pub fn open(&mut self, by: usize, kind: u8, number: u8) -> Law {
        self.tally.door("open sharer");
        let mount = self.dir.path().join("mount");
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let mut variables = vec![("KVDEPOT_DOUBLE_3FS".to_owned(), text(mount))];
        let fault = FAULTS.get(usize::from(kind).wrapping_sub(1));
        let fault = fault.filter(|_| self.shape.medium == Medium::Ds3fs);
        if let Some(fault) = fault {
            self.tally.fault(fault);
            let number = match *fault {
                "DELAY_US" => u64::from(number) * 100,
                "REFUSE" => u64::from(number) % 4,
                _ => u64::from(number),
            };
            variables.push((format!("KVDEPOT_DOUBLE_3FS_{fault}"), number.to_string()));
        }
        self.failing[by] = fault.is_some();
        let role = format!("sharer {}", self.spec());
        let mut worker = Worker::start_with(&role, &variables);
        // An object store that fails now is found to do so later.
        worker.tell("open");
        let said = heard(worker.answer(PATIENCE), "sharer")?;
        law!(said == "open", "open: {said}");
        self.sharers[by] = Some(worker);
        Ok(())
    }

    pub fn close(&mut self, by: usize) -> Law {
        self.tally.door("close sharer");
        let said = self.ask(by, "close")?;
        law!(said == "closed", "close: {said}");
        self.sharers[by] = None;
        Ok(())
    }

    pub fn ask(&mut self, by: usize, command: &str) -> Law<String> {
        self.tell(by, command);
        self.hear(by)
    }

    pub fn tell(&mut self, by: usize, command: &str) {
        self.sharers[by].as_mut().unwrap().tell(command);
    }

    pub fn hear(&mut self, by: usize) -> Law<String> {
        let said = heard(
            self.sharers[by].as_mut().unwrap().answer(PATIENCE),
            "sharer",
        );
        if std::env::var_os("SIM_LOG").is_some() {
            println!("  {by}: {said:?}");
        }
        said
    }

    /// Whether nothing fails for that one.
    pub fn is_calm(&self, by: usize) -> bool {
        !self.trouble && !self.failing[by]
    }

    /// Whether bytes may change in a read and in the one after it, which removes the block: after
    /// one of both alone it stays.
    pub fn rots(&self) -> bool {
        self.changing > 1
    }

    pub fn calm(&mut self) {
        (self.trouble, self.changing) = (false, 0);
        if let Some(server) = &self.server {
            server.calm();
        }
    }

    pub fn known(&mut self, id: Id) -> &mut Known {
        self.known.entry(id).or_default()
    }

    /// Bytes of a block: always the same.
    pub fn len(&self, id: Id) -> u64 {
        let mut rng = Rng::new(self.content(id));
        match rng.below(8) {
            0 => rng.between(1, 200),
            1 => rng.between(4080, 4112),
            // A directory takes no block of more than a part of it.
            2 => rng.between(100_000, if self.shape.roomy { 300_000 } else { 120_000 }),
            _ => rng.between(5_000, 60_000),
        }
    }

    pub fn content(&self, id: Id) -> u64 {
        (self.seed << 24) ^ u64::from(id.0) << 8 ^ u64::from(id.1)
    }

    pub fn identity(id: Id) -> Identity {
        Identity {
            namespace: spec(id.0).id().unwrap(),
            key: key(id.1),
        }
    }

    pub fn all() -> impl Iterator<Item = Id> {
        (0..NAMESPACES as u8).flat_map(|ns| (0..KEYS as u16).map(move |key| (ns, key)))
    }

    /// What is true of the medium at any time: it has nothing but whole blocks that somebody has
    /// begun to write, and no more of them than it may.
    pub fn look(&mut self) -> Law {
        for by in 0..SHARERS {
            if self.sharers[by].is_some() && !self.failing[by] {
                self.is_at_rest(by)?;
            }
        }
        let names: BTreeMap<String, Id> = Fleet::all()
            .map(|id| (posix::name_of(&Fleet::identity(id)), id))
            .collect();
        let (mut used, mut found) = (0, BTreeSet::new());
        let folders = fs::read_dir(self.root().join("blocks"));
        for folder in folders.into_iter().flatten().flatten() {
            for file in fs::read_dir(folder.path()).into_iter().flatten() {
                let file = file.unwrap();
                let name = file.file_name().into_string().unwrap();
                // What a server puts beside its objects until they are whole.
                let Some(id) = names.get(&name) else {
                    law!(
                        self.server.is_some(),
                        "{name} lies there, which nobody has put"
                    );
                    continue;
                };
                used += file.metadata().map_or(0, |about| about.size());
                found.insert(*id);
            }
        }
        for id in found {
            let known = self.known.get(&id).cloned().unwrap_or_default();
            law!(known.begun, "{id:?} is there, and nobody wrote it");
            // The server writes attributes before or after the object, and so do we.
            if known.rotted || known.murky || self.server.is_some() {
                continue;
            }
            let identity = Fleet::identity(id);
            let stored = posix::read(&self.root(), &identity);
            law!(
                stored.is_some_and(|stored| stored.is_sound(&identity)),
                "{id:?} is published, and not whole"
            );
        }
        let most = self.capacity() + self.capacity() / 20;
        law!(
            used <= most,
            "{used} bytes lie there for {}",
            self.capacity()
        );
        Ok(())
    }

    /// Nobody holds anything between calls.
    fn is_at_rest(&mut self, by: usize) -> Law {
        let begun = Instant::now();
        loop {
            let said = self.ask(by, "held")?;
            if said == "held 0 0" {
                return Ok(());
            }
            law!(begun.elapsed() < SOON, "after a call {by} says {said}");
            sleep(Duration::from_millis(2));
        }
    }

    /// What must hold soon.
    pub fn soon(&mut self, mut look: impl FnMut(&mut Fleet) -> Law) -> Law {
        let begun = Instant::now();
        loop {
            match look(self) {
                Err(_) if begun.elapsed() < SOON => sleep(Duration::from_millis(20)),
                answer => return answer,
            }
        }
    }

    /// Nothing fails any more: what was acknowledged comes back, to those who were there and to
    /// those who come.
    pub fn finish(&mut self) -> Law {
        self.calm();
        for by in 0..SHARERS {
            if self.failing[by] {
                self.close(by)?;
                self.open(by, 0, 0)?;
            }
        }
        self.read_all(1)?;
        self.look()?;
        for by in 0..SHARERS {
            self.close(by)?;
        }
        self.open(0, 0, 0)?;
        self.read_all(0)?;
        self.look()?;
        self.write_all(0)?;
        self.close(0)?;
        self.left()
    }

    /// Whoever has ended has left nothing behind.
    fn left(&self) -> Law {
        let new = fs::read_dir(self.root().join("new"));
        let files = new.into_iter().flatten().flatten();
        let files: Vec<PathBuf> = files
            .flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten().flatten())
            .map(|file| file.path())
            .filter(|file| !file.ends_with("alive"))
            .collect();
        law!(
            self.killed || files.is_empty(),
            "all are closed, and there is {files:?}"
        );
        Ok(())
    }
}
