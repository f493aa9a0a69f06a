//! `kill -9` at any moment of a save into a file: the file is there whole or not at all, one that
//! was there before stays, and nothing is left beside it once somebody saves or opens there again.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use crate::parts::{Parts, checkpoint, mover, names, namespace};
use kvdepot_session::file::{FileOptions, FilesSpec, SessionFile, SessionFiles, save_file};
use kvdepot_store::Durability;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, rounds};

fn parts_of(seed: u64) -> Parts {
    let mut rng = Rng::new(seed);
    let len = |rng: &mut Rng| 1 + rng.below(300_000) as usize;
    let pieces = (0..1 + rng.below(4)).map(|_| len(&mut rng)).collect();
    Parts {
        seed,
        pieces,
        objects: vec![len(&mut rng)],
    }
}

fn files(home: &str) -> SessionFiles {
    let spec = FilesSpec {
        namespace: namespace("w"),
        capacity: 64 << 20,
        evicts: true,
        options: FileOptions::default(),
    };
    SessionFiles::open(Path::new(home), spec).unwrap()
}

/// Replaces one of three files again and again, or saves into a directory of them.
fn save_until_killed(role: &str) {
    let (home, spec) = (child::value("home"), namespace("w"));
    let mover = mover(true, Durability::Process);
    let first: u64 = child::value("first").parse().unwrap();
    let store = (role == "store").then(|| files(&home));
    child::say("open");
    for seed in first.. {
        let parts = parts_of(seed);
        let (prompt, pieces, objects) = (parts.tokens(), parts.pieces(0), parts.objects(0));
        let checkpoint = checkpoint(&spec, &prompt);
        child::say(&format!("save {seed}"));
        match &store {
            Some(store) => drop(store.save(&checkpoint, &pieces, &objects).unwrap()),
            None => {
                let path = Path::new(&home).join(format!("{}.kvs", seed % 3));
                save_file(&mover, &path, &checkpoint, &pieces, &objects).unwrap();
            }
        }
        child::say(&format!("saved {seed}"));
    }
}

/// Lets a writer work for a while and kills it; what it said it has saved, and what it was saving.
fn work_and_kill(
    (name, role): (&str, &str),
    home: &Path,
    first: u64,
    rng: &mut Rng,
) -> (Vec<u64>, Option<u64>) {
    let first = first.to_string();
    let values = [("home", home.to_str().unwrap()), ("first", &*first)];
    let mut writer = Child::start(name, role, &values);
    writer.expect("open");
    let (mut saved, mut begun) = (Vec::new(), None);
    let (count, more) = (rng.below(3), Duration::from_micros(rng.below(30_000)));
    for line in writer.kill_after("saved", count, more) {
        let (what, seed) = line.split_once(' ').unwrap();
        let seed = seed.parse().unwrap();
        match what {
            "save" => begun = Some(seed),
            _ => {
                begun = None;
                saved.push(seed);
            }
        }
    }
    (saved, begun)
}

#[test]
fn a_file_that_is_replaced_is_the_old_one_or_the_new_one() {
    let name = "crash_files::a_file_that_is_replaced_is_the_old_one_or_the_new_one";
    if let Some(role) = child::role() {
        return save_until_killed(&role);
    }
    let mut rng = Rng::for_test(name);
    let home = tempfile::tempdir().unwrap();
    let mover = mover(true, Durability::Process);
    let mut there: HashMap<u64, u64> = HashMap::new();
    let (mut torn, mut looked) = (0, 0);
    for round in 0..rounds(100) {
        let begin = round * 1000;
        let (saved, begun) = work_and_kill((name, "file"), home.path(), begin, &mut rng);
        there.extend(saved.iter().map(|seed| (seed % 3, *seed)));
        for (number, seed) in &mut there {
            let path = home.path().join(format!("{number}.kvs"));
            let file = SessionFile::open(&mover, &path).unwrap();
            // The save that was killed may have been through.
            let is_new = begun
                .filter(|begun| begun % 3 == *number && file.about().tokens[0] == *begun as u32);
            *seed = is_new.unwrap_or(*seed);
            let parts = parts_of(*seed);
            assert_eq!(parts.restore(&file), (parts.tokens().len(), true));
            looked += 1;
        }
        if let Some(seed) = begun.filter(|seed| !there.contains_key(&(seed % 3))) {
            let path = home.path().join(format!("{}.kvs", seed % 3));
            if path.exists() {
                let parts = parts_of(seed);
                let file = SessionFile::open(&mover, &path).unwrap();
                assert_eq!(parts.restore(&file), (parts.tokens().len(), true));
                there.insert(seed % 3, seed);
            }
        }
        torn += usize::from(begun.is_some());
        // Whoever saves next beside them removes what is left.
        let (spec, parts) = (namespace("w"), parts_of(7));
        let prompt = parts.tokens();
        let path = home.path().join("other");
        save_file(
            &mover,
            &path,
            &checkpoint(&spec, &prompt),
            &parts.pieces(0),
            &parts.objects(0),
        )
        .unwrap();
        let left = names(home.path());
        assert!(left.iter().all(|name| !name.ends_with(".tmp")), "{left:?}");
    }
    assert!(
        torn > 10 && looked > 50,
        "{torn} saves were killed, {looked} files looked at"
    );
}

#[test]
fn a_directory_has_what_was_acknowledged_and_nothing_else() {
    let name = "crash_files::a_directory_has_what_was_acknowledged_and_nothing_else";
    if let Some(role) = child::role() {
        return save_until_killed(&role);
    }
    let mut rng = Rng::for_test(name);
    let home = tempfile::tempdir().unwrap();
    let (mut torn, mut left) = (0, 0);
    for round in 0..rounds(60) {
        let begin = 1 + round * 1000;
        let (saved, begun) = work_and_kill((name, "store"), home.path(), begin, &mut rng);
        torn += usize::from(begun.is_some());
        let is_temporary = |name: &String| name.ends_with(".tmp");
        left += names(home.path())
            .iter()
            .filter(|name| is_temporary(name))
            .count();
        let files = files(home.path().to_str().unwrap());
        assert!(!names(home.path()).iter().any(is_temporary));
        for (seed, is_certain) in saved
            .iter()
            .rev()
            .take(5)
            .map(|seed| (*seed, true))
            .chain(begun.map(|seed| (seed, false)))
        {
            let parts = parts_of(seed);
            let found = files.lookup(&parts.tokens(), 1).unwrap().pop();
            let found = found.filter(|file| file.about().tokens == parts.tokens());
            match found {
                Some(file) => assert_eq!(parts.restore(&file), (parts.tokens().len(), true)),
                None => assert!(!is_certain, "{seed} was acknowledged"),
            }
        }
        for listed in files.list() {
            assert!(files.verify(listed.id).unwrap().missing.is_empty());
            if rng.once_in(2) {
                files.remove(listed.id).unwrap();
            }
        }
    }
    assert!(torn > 10, "only {torn} saves were killed");
    assert!(left > 0, "no file was left to be swept");
}
