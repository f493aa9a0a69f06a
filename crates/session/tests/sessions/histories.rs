//! Seeded histories of all that can be done with sessions, by two processes over one tier of
//! files, one within the other's saves, with files that rot and room that runs out. No wrong byte
//! comes back, what is found by a prompt is what it begins with, and what was acknowledged is there
//! where nothing has taken it.

use std::path::{Path, PathBuf};

use crate::common::spec;
use kvdepot_session::{Checkpoint, Error, Found, Reason, Saved, Sessions, export, import};
use kvdepot_store::{BlockBuffers, Buffer, Config};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::{Rng, few_rounds};
use serde_json::json;

const ROW: usize = 100;

struct World {
    home: tempfile::TempDir,
    /// Room for all, or for little.
    roomy: bool,
    stores: Vec<Sessions>,
    /// Something has rotted: what was acknowledged may be gone.
    has_rot: bool,
    rng: Rng,
}

/// What an engine that computes in a way of its own has as rows: other last bits for each `way`.
fn rows(tokens: &[u32], run: &std::ops::Range<usize>, way: u64) -> Vec<u8> {
    let one = |at: usize| {
        let seed = tokens[..=at].iter().fold(7_u64, |sum, token| {
            sum.wrapping_mul(31).wrapping_add(u64::from(*token) + 1)
        });
        let mut row = content(seed, ROW);
        row[0] ^= way as u8;
        row
    };
    run.clone().flat_map(one).collect()
}

fn open(home: &Path, roomy: bool) -> Sessions {
    let capacity = if roomy { "256MiB" } else { "1MiB" };
    let posix = json!({"path": home.join("posix"), "capacity": capacity});
    let settings = json!({"socket": "off", "lanes": 1, "lookup_timeout": "60s", "posix": posix});
    let depot = kvdepot_service::open(&Config::new("Posix", &settings).unwrap()).unwrap();
    Sessions::open(depot, &spec("w")).unwrap()
}

/// A conversation: one of a few beginnings, and one of a few ends of a few lengths.
fn conversation(rng: &mut Rng) -> Vec<u32> {
    let (begin, end) = (rng.below(3) as u32, rng.below(3) as u32);
    let shared = [0, 64, 100, 192][rng.below(4) as usize];
    let own = 1 + [0, 27, 63, 120][rng.below(4) as usize];
    let first = (0..shared).map(|at| begin * 1000 + at);
    first.chain((0..own).map(|at| end * 7000 + at)).collect()
}

/// What is rendered: each token's number.
fn text(tokens: &[u32]) -> Vec<u8> {
    let words = tokens.iter().map(|token| format!("{token} "));
    words.collect::<String>().into_bytes()
}

impl World {
    fn save(&mut self, who: usize, tokens: &[u32], nested: bool) -> Option<Saved> {
        let way = self.rng.below(3);
        let exact = self.rng.once_in(3);
        let objects = match self.rng.below(3) {
            0 => Vec::new(),
            which => vec![("window".to_owned(), Buffer::from_vec(content(which, 300)))],
        };
        let with_text = self.rng.once_in(2);
        let rendered = text(tokens);
        let checkpoint = Checkpoint {
            tokens,
            text: if with_text { &rendered } else { b"" },
            reason: Reason::Asked,
            context_tokens: 0,
            objects,
            // What is exact can be told from what may have any of the ways.
            note: if exact {
                format!("{way}")
            } else {
                String::new()
            },
            created: self.rng.below(4),
            exact,
        };
        let other = conversation(&mut self.rng);
        let meanwhile = nested.then(|| self.rng.below(4));
        let mut inner = Rng::new(self.rng.bits());
        let [one, two] = &self.stores[..] else {
            unreachable!()
        };
        let (saver, beside) = if who == 0 { (one, two) } else { (two, one) };
        let saved = saver.save(
            checkpoint,
            Box::new(|runs| {
                match meanwhile {
                    Some(0) => drop(simple(beside, tokens, inner.below(3))),
                    Some(1) => drop(simple(beside, &other, inner.below(3))),
                    Some(2) => remove_one(beside, &mut inner),
                    _ => {}
                }
                let each = runs
                    .iter()
                    .map(|run| Buffer::from_vec(rows(tokens, run, way)));
                Ok(BlockBuffers::whole(each))
            }),
        );
        match saved {
            Ok(saved) => {
                assert_eq!(saved.cached_tokens + saved.cache_write_tokens, tokens.len());
                if self.roomy {
                    let found = saver.lookup(tokens, 1).unwrap();
                    let found = found.first().expect("what was acknowledged is found");
                    assert_eq!(found.tokens.len(), tokens.len());
                    let is_whole = self.restore(who, found);
                    assert!(is_whole || self.has_rot);
                }
                Some(saved)
            }
            Err(Error::NotStored { .. }) => {
                // What the other has removed lately this one may have taken for there: it knows
                // now.
                if self.roomy && meanwhile.is_none() && !self.has_rot {
                    assert!(simple(&self.stores[who], tokens, way).is_some());
                }
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Brings a session back; whether it came whole. What has come is right.
    fn restore(&self, who: usize, found: &Found) -> bool {
        let store = &self.stores[who];
        let buffer = |len: u64| Buffer::from_vec(vec![0xEE; len as usize]);
        let pieces: Vec<Buffer> = found.pieces.iter().map(|(_, len)| buffer(*len)).collect();
        let objects: Vec<Buffer> = found.objects.iter().map(|one| buffer(one.bytes)).collect();
        let into = |all: &[Buffer]| BlockBuffers::whole(all.iter().cloned());
        let listed = store.list().into_iter().find(|one| one.id == found.id);
        let note = listed.map(|one| one.note).unwrap_or_default();
        let restored = store.restore(found, into(&pieces), into(&objects)).unwrap();
        for ((run, _), piece) in found.pieces.iter().zip(&pieces) {
            if run.end > restored.cached_tokens {
                break;
            }
            let piece = piece.to_vec();
            let is_of = |way: u64| piece == rows(&found.tokens, run, way);
            match note.parse() {
                Ok(way) => assert!(is_of(way), "exact, {run:?}"),
                Err(_) => assert!((0..3).any(is_of), "{run:?}"),
            }
        }
        if restored.whole {
            for object in &objects {
                let object = object.to_vec();
                assert!([1, 2].iter().any(|which| object == content(*which, 300)));
            }
        }
        restored.whole
    }

    fn ask(&mut self, who: usize) {
        let mut prompt = conversation(&mut self.rng);
        prompt.extend(0..self.rng.below(50) as u32);
        let found = self.stores[who].lookup(&prompt, 3).unwrap();
        assert!(found.is_sorted_by(|one, next| one.tokens.len() >= next.tokens.len()));
        for one in &found {
            assert!(prompt.starts_with(&one.tokens));
            self.restore(who, one);
        }
        let rendered = text(&prompt);
        for one in self.stores[who].lookup_text(&rendered, 3).unwrap() {
            assert!(rendered.starts_with(&text(&one.tokens)));
            assert_eq!(one.text_bytes, text(&one.tokens).len());
            self.restore(who, &one);
        }
        let prefix = self.stores[who].prefix(&prompt).unwrap();
        assert!(prefix <= prompt.len());
    }

    /// A session goes to a file, and comes back from it to either.
    fn travel(&mut self, who: usize) {
        let Some(id) = any(&self.stores[who], &mut self.rng) else {
            return;
        };
        let file = self.home.path().join("one.kvs");
        match export(&self.stores[who], id, &file) {
            Ok(_) => {}
            // Gone, in part or whole, since it was listed.
            Err(Error::Unknown(_) | Error::Malformed { .. }) => return,
            Err(error) => panic!("{error}"),
        }
        let to = self.rng.below(2) as usize;
        match import(&self.stores[to], &file) {
            Ok(_) => {}
            Err(Error::NotStored { .. }) => assert!(!self.roomy || self.has_rot),
            Err(error) => panic!("{error}"),
        }
    }

    /// A bit of a file of a block changes.
    fn rot(&mut self) {
        let all = files(&self.home.path().join("posix/blocks"));
        if all.is_empty() {
            return;
        }
        let path = self.rng.pick(&all).clone();
        let Ok(mut bytes) = std::fs::read(&path) else {
            return;
        };
        let at = self.rng.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << self.rng.below(8);
        std::fs::write(&path, bytes).unwrap();
        self.has_rot = true;
    }
}

/// A save as any engine does it.
fn simple(store: &Sessions, tokens: &[u32], way: u64) -> Option<Saved> {
    let checkpoint = Checkpoint {
        tokens,
        text: b"",
        reason: Reason::Continued,
        context_tokens: 0,
        objects: Vec::new(),
        note: String::new(),
        created: 2,
        exact: false,
    };
    let saved = store.save(
        checkpoint,
        Box::new(|runs| {
            let each = runs
                .iter()
                .map(|run| Buffer::from_vec(rows(tokens, run, way)));
            Ok(BlockBuffers::whole(each))
        }),
    );
    match saved {
        Ok(saved) => Some(saved),
        Err(Error::NotStored { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn any(store: &Sessions, rng: &mut Rng) -> Option<kvdepot_session::Id> {
    let all = store.list();
    (!all.is_empty()).then(|| rng.pick(&all).id)
}

fn remove_one(store: &Sessions, rng: &mut Rng) {
    if let Some(id) = any(store, rng) {
        match store.remove(id) {
            Ok(()) | Err(Error::Unknown(_) | Error::Malformed { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for entry in entries.flatten() {
        match entry.path() {
            path if path.is_dir() => all.extend(files(&path)),
            path => all.push(path),
        }
    }
    all.sort();
    all
}

#[test]
fn whatever_two_processes_do_no_wrong_byte_comes_back() {
    let name = "histories::whatever_two_processes_do_no_wrong_byte_comes_back";
    let mut rng = Rng::for_test(name);
    // `make test-all` has 800.
    for history in 0..few_rounds(16, 40) {
        let home = tempfile::tempdir().unwrap();
        let roomy = history % 2 == 0;
        let stores = (0..2).map(|_| open(home.path(), roomy)).collect();
        let mut world = World {
            home,
            roomy,
            stores,
            has_rot: false,
            rng: Rng::new(rng.bits()),
        };
        let rots = history % 4 > 1;
        for _ in 0..60 {
            let who = world.rng.below(2) as usize;
            match world.rng.below(10) {
                0..4 => {
                    let tokens = conversation(&mut world.rng);
                    let nested = world.rng.once_in(3);
                    world.save(who, &tokens, nested);
                }
                4 | 5 => world.ask(who),
                6 => world.stores[who].refresh().unwrap(),
                7 => {
                    let World { stores, rng, .. } = &mut world;
                    remove_one(&stores[who], rng);
                }
                8 => world.travel(who),
                _ if rots && world.rng.once_in(2) => world.rot(),
                _ => {
                    world.stores[who].depot().close();
                    world.stores[who] = open(world.home.path(), roomy);
                }
            }
        }
        for who in 0..2 {
            world.stores[who].refresh().unwrap();
            world.ask(who);
            for one in world.stores[who].list() {
                world.stores[who].verify(one.id).unwrap();
            }
            world.stores[who].depot().close();
        }
    }
}
