//! Tests that look at the clock: a machine may stand still for longer than any of them waits.
//!
//! A test waits for an event, takes turns, or has a time-out that is long against a stall. What was
//! there before is in `crates/dev/real_time.txt`, which may only shrink.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use kvdepot_dev::root;

use crate::tree::{File, holds, notices};

/// Each file and how often it looks.
const LIST: &str = "crates/dev/real_time.txt";

/// Words of a line that waits for a time, or decides by one.
const RUST: [&str; 5] = ["sleep(", "elapsed() <", "took <", "alarm(", "kill_after("];
const PYTHON: [&str; 4] = [
    "time.sleep(",
    "signal.alarm(",
    "asyncio.sleep(",
    "setitimer(",
];
const C: [&str; 2] = ["sleep(", "alarm("];

/// The part of a file that is a test, and what to look for in it.
fn tested(file: &File) -> Option<(&str, &'static [&'static str])> {
    let path = &file.path;
    if path.starts_with("crates/dev/tests/tidy/") {
        return None;
    }
    match path.rsplit_once('.')?.1 {
        "rs" if file.is_test() => Some((&file.text, &RUST)),
        "rs" => Some((&file.text[file.code().len()..], &RUST)),
        "py" if file.is_test() => Some((&file.text, &PYTHON)),
        "c" | "h" | "cpp" if file.is_test() => Some((&file.text, &C)),
        _ => None,
    }
}

/// Whether a line decides by time.
fn looks(line: &str, words: &[&str]) -> bool {
    let line = line.trim_start();
    let is_comment = ["//", "#", "/*", "* "]
        .iter()
        .any(|one| line.starts_with(one));
    let asserts = line.contains("assert") && line.contains("Duration::from_millis");
    !is_comment && (asserts || words.iter().any(|word| line.contains(word)))
}

fn counts(files: &[File]) -> BTreeMap<&str, usize> {
    let count = |file| {
        let (text, words): (&str, _) = tested(file)?;
        let count = text.lines().filter(|line| looks(line, words)).count();
        (count > 0).then_some((&*file.path, count))
    };
    files.iter().filter_map(count).collect()
}

fn clocks_are_known(files: &[File]) -> Vec<String> {
    let found = counts(files);
    let list = files.iter().find(|file| file.path == LIST);
    let list = list.map_or("", |file| &file.text);
    let listed: BTreeMap<&str, usize> = list
        .lines()
        .filter_map(|line| line.split_once(": "))
        .filter_map(|(path, count)| Some((path, count.parse().ok()?)))
        .collect();
    let mut offences = Vec::new();
    for (path, count) in &found {
        match listed.get(path) {
            Some(known) if known == count => {}
            Some(known) if known > count => {
                offences.push(format!("{LIST}: {path} looks {count} times now: say so"));
            }
            known => offences.push(format!(
                "{path}: waits for a time, or decides by one, {count} times, {} are known: wait \
                 for an event",
                known.unwrap_or(&0)
            )),
        }
    }
    let gone = listed.keys().filter(|path| !found.contains_key(*path));
    offences.extend(gone.map(|path| format!("{LIST}: {path} looks no more, or is not there")));
    offences
}

/// The list as it would be now, for who has moved a file.
fn as_it_is(files: &[File]) -> String {
    let mut list = String::new();
    for (path, count) in counts(files) {
        let _infallible = writeln!(list, "{path}: {count}");
    }
    list
}

#[test]
fn no_test_is_added_that_decides_by_time() {
    if std::env::var_os("KVDEPOT_REAL_TIME").is_some() {
        // Written anew; what grew is seen in the change.
        let list = as_it_is(&crate::tree::tree());
        std::fs::write(root().join(LIST), list).unwrap();
    }
    holds(clocks_are_known);
    for (path, text) in [
        ("crates/a/tests/a.rs", "    std::thread::sleep(TICK);\n"),
        (
            "crates/a/tests/a.rs",
            "    assert!(begun.elapsed() < LIMIT);\n",
        ),
        (
            "crates/a/src/a.rs",
            "x\n#[cfg(test)]\nmod tests {\n    sleep(TICK);\n}\n",
        ),
        ("tests/python/test_a.py", "    time.sleep(1)\n"),
        ("crates/a/tests/c/a.c", "    usleep(1);\n"),
        (LIST, "crates/a/tests/a.rs: 1\n"),
    ] {
        notices(clocks_are_known, &[File::new(path, text)]);
    }
    let fine = File::new(
        "crates/a/tests/a.rs",
        "// Does not sleep(1).\n    wait(PATIENCE);\n",
    );
    assert!(clocks_are_known(&[fine]).is_empty());
}
