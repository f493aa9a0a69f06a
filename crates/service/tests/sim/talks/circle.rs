//! The processes of a history, what is known of their sessions, and what must hold between deeds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::worker::Worker;
use serde_json::{Value, json};

use super::steps::{Medium, Shape, TALKERS};
use super::words::{self, Talk};
use crate::processes::heard;
use crate::world::{Law, law};

/// Longer than any call takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);

/// Until when nothing is held any more.
const SOON: Duration = Duration::from_secs(10);

/// How often a conversation is saved again that has rotted: each time a part of it may be found
/// out.
const MENDED: usize = 12;

/// What is known of a conversation.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Kinds of it that somebody has begun to save.
    pub begun: BTreeSet<u64>,
    /// A session of it was acknowledged, and nothing has happened since that may undo it.
    pub there: bool,
}

pub struct Circle {
    pub shape: Shape,
    seed: u64,
    dir: tempfile::TempDir,
    pub owner: Option<Worker>,
    pub talkers: Vec<Option<Worker>>,
    /// By its tokens.
    pub known: BTreeMap<Vec<u32>, Known>,
    /// Sessions that were removed, and not saved again.
    pub gone: BTreeSet<String>,
    /// Something has rotted.
    pub rotted: bool,
    /// The file system is full.
    pub full: bool,
    /// It was, and blocks had to go for others.
    pub was_full: bool,
    pub rng: Rng,
    pub tally: Tally,
}

impl Circle {
    pub fn new(seed: u64, shape: &Shape) -> Circle {
        let dir = tempfile::Builder::new()
            .prefix("kvsim")
            .tempdir_in(crate::disk::dir())
            .unwrap();
        Circle {
            shape: shape.clone(),
            seed,
            dir,
            owner: None,
            talkers: (0..TALKERS).map(|_| None).collect(),
            known: BTreeMap::new(),
            gone: BTreeSet::new(),
            rotted: false,
            full: false,
            was_full: false,
            rng: Rng::new(seed),
            tally: Tally::default(),
        }
    }

    /// The choices of a deed depend on its number alone.
    pub fn reseed(&mut self, number: u64) {
        self.rng = Rng::new(self.seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What is stored outlives its owner.
    pub fn lasts(&self) -> bool {
        self.shape.medium != Medium::Served("Cache")
    }

    pub fn is_served(&self) -> bool {
        matches!(self.shape.medium, Medium::Served(_))
    }

    /// Nothing is taken for want of room, and all of it verifies.
    pub fn keeps_all(&self) -> bool {
        self.shape.roomy && !self.rotted && !self.was_full
    }

    fn pipeline(&self) -> String {
        match self.shape.medium {
            Medium::Served(pipeline) if self.shape.disk => pipeline.replace("Dax", "Nvme"),
            Medium::Served(pipeline) => pipeline.into(),
            Medium::Shared if self.shape.cached => "Cache|Posix".into(),
            Medium::Shared => "Posix".into(),
        }
    }

    fn spec(&self) -> String {
        let (shape, pipeline) = (&self.shape, self.pipeline());
        let durability = if shape.power { "power" } else { "process" };
        let socket: Value = match self.is_served() {
            true => json!(self.file("s")),
            false => json!("off"),
        };
        let mut settings = json!({
            "socket": socket, "lock_wait": "15s", "lanes": 2, "close_timeout": "1s",
        });
        if pipeline.contains("Cache") {
            let is_roomy = shape.roomy && !(shape.tight && self.lasts());
            let kib = if is_roomy { 16 << 10 } else { 256 };
            settings["cache"] = json!({"capacity": kib << 10});
        }
        for (tier, section) in [("Dax", "dax"), ("Nvme", "nvme")] {
            if pipeline.contains(tier) {
                let kib = if shape.roomy { 16 << 10 } else { 512 };
                settings[section] = json!({
                    "path": self.file("arena"),
                    "capacity": kib << 10,
                    "records": if shape.roomy { 2048 } else { 64 },
                    "durability": durability,
                });
            }
        }
        if pipeline.contains("Posix") {
            settings["posix"] = json!({
                "path": self.file("posix"),
                "capacity": if shape.roomy { "256MiB" } else { "1MiB" },
                "durability": durability,
            });
        }
        json!([pipeline, settings]).to_string()
    }

    pub fn open_all(&mut self) -> Law {
        if self.is_served() {
            self.open_owner()?;
        }
        (0..TALKERS).try_for_each(|by| self.open(by))
    }

    pub fn open_owner(&mut self) -> Law {
        self.tally.door("open");
        let mut owner = Worker::start(&format!("owner {}", self.spec()));
        owner.tell("open");
        let said = heard(owner.answer(PATIENCE), "owner")?;
        law!(said.starts_with("open "), "open: {said}");
        self.owner = Some(owner);
        Ok(())
    }

    /// Whoever was there finds the owner that is there now.
    pub fn is_found(&mut self) -> Law {
        for by in 0..TALKERS {
            if self.talkers[by].is_some() {
                let said = self.ask(by, "found")?;
                law!(said == "connected true", "{by} has no owner: {said}");
            }
        }
        Ok(())
    }

    pub fn open(&mut self, by: usize) -> Law {
        self.tally.door("open sessions");
        let role = match self.is_served() {
            true => format!("talker 10000 {}", self.file("s").display()),
            false => format!("talker own {}", self.spec()),
        };
        self.talkers[by] = Some(Worker::start(&role));
        let said = self.ask(by, "open")?;
        law!(said == "open" || self.full, "open: {said}");
        if said != "open" {
            self.talkers[by] = None;
        }
        Ok(())
    }

    pub fn close(&mut self, by: usize) -> Law {
        if self.talkers[by].is_none() {
            return Ok(());
        }
        self.tally.door("close sessions");
        let said = self.ask(by, "close")?;
        law!(said == "closed", "close: {said}");
        self.talkers[by] = None;
        Ok(())
    }

    pub fn close_owner(&mut self) -> Law {
        self.tally.door("close");
        let mut owner = self.owner.take().unwrap();
        owner.tell("close");
        let said = heard(owner.answer(PATIENCE), "owner")?;
        law!(said == "closed", "close: {said}");
        self.ended();
        Ok(())
    }

    /// An owner is no more.
    pub fn ended(&mut self) {
        if !self.lasts() {
            self.forget();
        }
    }

    /// Nobody knows any more what is there.
    pub fn forget(&mut self) {
        self.known
            .values_mut()
            .for_each(|known| known.there = false);
    }

    pub fn ask(&mut self, by: usize, command: &str) -> Law<String> {
        self.tell(by, command);
        self.hear(by)
    }

    pub fn tell(&mut self, by: usize, command: &str) {
        self.talkers[by].as_mut().unwrap().tell(command);
    }

    pub fn hear(&mut self, by: usize) -> Law<String> {
        let said = self.talkers[by].as_mut().unwrap().answer(PATIENCE);
        if std::env::var_os("SIM_LOG").is_some() {
            println!("  {by}: {said:?}");
        }
        heard(said, "talker")
    }

    pub fn known(&mut self, tokens: Vec<u32>) -> &mut Known {
        self.known.entry(tokens).or_default()
    }

    /// Between deeds nobody holds anything, and nothing is left that a save has begun.
    pub fn at_rest(&mut self) -> Law {
        let by = match self.is_served() {
            true => 0..1,
            false => 0..TALKERS,
        };
        by.filter(|by| self.talkers[*by].is_some())
            .collect::<Vec<_>>()
            .into_iter()
            .try_for_each(|by| self.holds_nothing(by))
    }

    fn holds_nothing(&mut self, by: usize) -> Law {
        let begun = Instant::now();
        loop {
            let said = self.ask(by, "held")?;
            if said == "held 0 0" || self.full {
                return Ok(());
            }
            law!(begun.elapsed() < SOON, "after a call {by} says {said}");
            sleep(Duration::from_millis(2));
        }
    }

    /// A block's file goes; whether there is one.
    pub fn evict(&self, which: usize) -> bool {
        let blocks = files(&self.file("posix/blocks"));
        let one = blocks.get(which % blocks.len().max(1));
        one.is_some_and(|path| fs::remove_file(path).is_ok())
    }

    /// A bit of a block turns over; whether there is one.
    pub fn rot(&self, which: usize, at: usize) -> bool {
        let blocks = files(&self.file("posix/blocks"));
        if !blocks.is_empty() {
            let path = &blocks[which % blocks.len()];
            let Ok(bytes) = fs::read(path) else {
                return false;
            };
            flip(path, at * 7 % bytes.len(), &bytes);
            return true;
        }
        let arena = self.file("arena");
        let Ok(bytes) = fs::read(&arena) else {
            return false;
        };
        // The rows of the last token of some conversation, but for the byte that tells the way.
        let all: Vec<&Vec<u32>> = self.known.keys().collect();
        let Some(tokens) = all.get(which % all.len().max(1)) else {
            return false;
        };
        let last = tokens.len() - 1..tokens.len();
        let row = &words::rows(tokens, &last, 0)[1..];
        let found = bytes.windows(row.len()).position(|some| some == row);
        found.is_some_and(|found| {
            flip(&arena, found + at % row.len(), &bytes);
            true
        })
    }

    /// Everything can be saved, and comes back, also by the next ones.
    pub fn finish(&mut self) -> Law {
        crate::disk::leave(None);
        self.full = false;
        for by in 0..TALKERS {
            if self.talkers[by].is_none() {
                self.open(by)?;
            }
        }
        let all: Vec<Vec<u32>> = self.known.keys().cloned().collect();
        if self.keeps_all() {
            for tokens in &all {
                let known = self.known(tokens.clone()).there;
                law!(
                    !known || self.comes_whole(1, tokens)?,
                    "LOST: {tokens:?}, acknowledged, does not come back"
                );
            }
        }
        let reopens = self.rng.once_in(2);
        (0..TALKERS).try_for_each(|by| self.close(by))?;
        if reopens && self.is_served() {
            self.close_owner()?;
            self.open_owner()?;
        }
        (0..TALKERS).try_for_each(|by| self.open(by))?;
        if self.shape.roomy {
            all.iter().try_for_each(|tokens| self.mends(tokens))?;
        }
        self.at_rest()?;
        (0..TALKERS).try_for_each(|by| self.close(by))?;
        match self.is_served() {
            true => self.close_owner(),
            false => Ok(()),
        }
    }

    /// What was there comes back; what was lost does once it is saved again, how often parts of it
    /// are found to be wrong.
    fn mends(&mut self, tokens: &[u32]) -> Law {
        let was_there = self.known(tokens.to_vec()).there && self.keeps_all();
        if self.comes_whole(0, tokens)? {
            return Ok(());
        }
        law!(
            !was_there,
            "LOST: {tokens:?} does not come back to the next one"
        );
        for _ in 0..MENDED {
            let talk = self.talk(tokens);
            let said = self.ask(0, &format!("save {talk} 1 9"))?;
            law!(
                said.starts_with("saved") || said.starts_with("not"),
                "saved again: {said}"
            );
            self.known(tokens.to_vec()).begun.insert(1);
            if said.starts_with("saved") && self.comes_whole(0, tokens)? {
                return Ok(());
            }
        }
        Err(format!("{tokens:?}, saved again and again, is not whole"))
    }

    /// A talk of just these tokens.
    fn talk(&self, tokens: &[u32]) -> String {
        let mut rng = Rng::new(7);
        loop {
            let talk = Talk::draw(&mut rng);
            if talk.tokens() == tokens {
                return talk.word();
            }
        }
    }

    fn comes_whole(&mut self, by: usize, tokens: &[u32]) -> Law<bool> {
        let talk = self.talk(tokens);
        let said = self.ask(by, &format!("ask {talk} 0 anew tokens"))?;
        let all = self.judge_found(tokens, &said)?;
        Ok(all
            .iter()
            .any(|come| come.tokens == tokens.len() && come.whole))
    }
}

fn flip(path: &Path, at: usize, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[bytes[at] ^ 4], at as u64).unwrap();
}

/// All files below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries
        .flat_map(|entry| match entry.path() {
            path if path.is_dir() => files(&path),
            path => vec![path],
        })
        .collect();
    all.sort();
    all
}
