//! `kvdepot session save` and `restore`: states in files.

use std::fs;
use std::path::{Path, PathBuf};

use kvdepot_testkit::bytes::content;
use serde_json::Value;

use crate::home::{Home, Ran};

const ROW: usize = 300;

fn in_depot(home: &Home, command: &str, capacity: &str) -> Vec<String> {
    let path = format!("posix.path={}", home.path("kv").display());
    let capacity = format!("posix.capacity={capacity}");
    let words = ["session", command, "Posix", "-o", &path, "-o", &capacity];
    words.map(str::to_owned).to_vec()
}

fn session(home: &Home, command: &str, more: &[&str]) -> Ran {
    let words = in_depot(home, command, "64MiB");
    let words: Vec<&str> = words
        .iter()
        .map(String::as_str)
        .chain(more.iter().copied())
        .collect();
    home.run(&words)
}

const OF: [&str; 8] = [
    "--model",
    "m",
    "--dtype",
    "f16",
    "--weights",
    "w",
    "--piece-tokens",
    "64",
];

/// Saves a conversation of so many tokens, all but the last of which others have, too.
fn save(home: &Home, count: usize, last: u32, more: &[&str]) -> Ran {
    let mut tokens: Vec<u32> = (0..count as u32).collect();
    tokens[count - 1] = last;
    let (list, rows) = (home.path("tokens.json"), home.path("rows"));
    fs::write(&list, serde_json::to_vec(&tokens).unwrap()).unwrap();
    fs::write(&rows, rows_of(count, last)).unwrap();
    let files = [
        "--tokens",
        list.to_str().unwrap(),
        "--rows",
        rows.to_str().unwrap(),
    ];
    session(home, "save", &[&files, &OF[..], more].concat())
}

fn rows_of(count: usize, last: u32) -> Vec<u8> {
    let head = (0..count - 1).flat_map(|at| content(at as u64, ROW));
    head.chain(content(u64::from(last), ROW)).collect()
}

fn one(ran: &Ran) -> Value {
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    ran.rows().remove(0)
}

/// Files of blocks.
fn blocks(home: &Home) -> usize {
    fn count(folder: &Path) -> usize {
        let entries = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let each = entries.map(|path| if path.is_dir() { count(&path) } else { 1 });
        each.sum()
    }
    count(&home.path("kv/blocks"))
}

#[test]
fn a_state_goes_in_and_comes_back() {
    let home = Home::new();
    let (logits, text) = (home.path("logits"), home.path("text"));
    fs::write(&logits, content(7, 900)).unwrap();
    fs::write(&text, "what was said").unwrap();
    let object = format!("logits={}", logits.display());
    let more = [
        "--object",
        &object,
        "--text",
        text.to_str().unwrap(),
        "--json",
    ];
    let first = one(&save(&home, 200, 9000, &more));
    assert_eq!(
        (&first["cached_tokens"], &first["cache_write_tokens"]),
        (&0.into(), &200.into())
    );
    // What it has in common is there: three pieces of 64.
    let second = one(&save(&home, 300, 9001, &["--json", "--row-bytes", "300"]));
    assert_eq!(second["cached_tokens"], 192);
    let said = save(&home, 300, 9001, &[]).stdout;
    assert!(
        said.contains("300 tokens (300 tokens already stored)"),
        "{said}"
    );

    let out = home.path("out");
    let parts = home.path("parts");
    fs::create_dir(&parts).unwrap();
    let files = [
        "--rows",
        out.to_str().unwrap(),
        "--objects",
        parts.to_str().unwrap(),
    ];
    let id = first["session"].as_str().unwrap();
    let back = one(&session(
        &home,
        "restore",
        &[&[&id[..9]], &files[..], &["--json"]].concat(),
    ));
    assert_eq!(
        (&back["session"], &back["cached_tokens"]),
        (&id.into(), &200.into())
    );
    assert_eq!(back["cache_write_tokens"], 0);
    // It counts as those of programs do.
    assert_eq!(one(&session(&home, "show", &[id, "--json"]))["hits"], 1);
    assert!(fs::read(&out).unwrap() == rows_of(200, 9000));
    assert!(fs::read(parts.join("logits")).unwrap() == content(7, 900));

    // The longest that a prompt begins with, in numbers of four bytes.
    let mut prompt: Vec<u32> = (0..299).collect();
    prompt.extend([9001, 5, 6]);
    let list = home.path("prompt.u32");
    let words: Vec<u8> = prompt
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    fs::write(&list, words).unwrap();
    let by = [
        "--tokens",
        list.to_str().unwrap(),
        "--rows",
        out.to_str().unwrap(),
    ];
    let back = session(&home, "restore", &by);
    assert!(
        back.stdout.contains("300 tokens (87.9 KiB of rows)"),
        "{}{}",
        back.stdout,
        back.stderr
    );
    assert!(fs::read(&out).unwrap() == rows_of(300, 9001));
    // Nothing else is beside it.
    let names = [
        "cache",
        "run",
        "kv",
        "tokens.json",
        "rows",
        "logits",
        "text",
        "out",
        "parts",
    ];
    for entry in fs::read_dir(home.dir.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&&*name) || name == "prompt.u32", "{name}");
    }
}

#[test]
fn what_rots_is_no_state_and_the_next_best_is() {
    let home = Home::new();
    let short = one(&save(&home, 128, 127, &["--json"]));
    one(&save(&home, 190, 9000, &["--json"]));
    // A piece that only the longer one has.
    let last = content(9000, ROW);
    let mut files: Vec<PathBuf> = Vec::new();
    for folder in fs::read_dir(home.path("kv/blocks")).unwrap() {
        let entries = fs::read_dir(folder.unwrap().path()).unwrap();
        files.extend(entries.map(|entry| entry.unwrap().path()));
    }
    let mut bytes = Vec::new();
    let held = files.iter().find_map(|path| {
        bytes = fs::read(path).unwrap();
        let at = bytes.windows(ROW).position(|some| some == last)?;
        Some((path, at))
    });
    let (path, at) = held.unwrap();
    bytes[at] ^= 1;
    fs::write(path, &bytes).unwrap();
    let (list, out) = (home.path("tokens.json"), home.path("out"));
    let by = [
        "--tokens",
        list.to_str().unwrap(),
        "--rows",
        out.to_str().unwrap(),
        "--json",
    ];
    let back = session(&home, "restore", &by);
    assert!(back.stderr.contains("incomplete"), "{}", back.stderr);
    assert_eq!(one(&back)["session"], short["session"]);
    assert!(fs::read(&out).unwrap() == rows_of(128, 127));
    fs::remove_file(&out).unwrap();
    // Alone it is a problem, and no file.
    let id = short["session"].as_str().unwrap().to_owned();
    assert_eq!(session(&home, "rm", &[&id]).status, 0);
    let back = session(&home, "restore", &by);
    assert_ne!(back.status, 0);
    assert!(!out.exists());
}

#[test]
fn what_cannot_be_is_refused_by_its_name() {
    let home = Home::new();
    let ran = save(&home, 100, 1, &["--row-bytes", "299"]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("--rows: 30000 bytes"), "{}", ran.stderr);
    let ran = save(&home, 100, 1, &["--object", "logits"]);
    assert!(ran.stderr.contains("NAME=FILE"), "{}", ran.stderr);
    let ran = save(&home, 100, 1, &["--object", "logits=/nowhere/logits"]);
    assert!(ran.stderr.contains("/nowhere/logits"), "{}", ran.stderr);
    let rows = home.path("rows");
    let odd = home.path("odd");
    fs::write(&odd, [1; 7]).unwrap();
    for (tokens, reason) in [(&odd, "4-byte"), (&rows, "a size that is a multiple of")] {
        let files = [
            "--tokens",
            tokens.to_str().unwrap(),
            "--rows",
            odd.to_str().unwrap(),
        ];
        let ran = session(&home, "save", &[&files, &OF[..]].concat());
        assert_eq!(ran.status, 2);
        assert!(ran.stderr.contains(reason), "{}", ran.stderr);
    }
    assert_eq!(blocks(&home), 0);
    let of = save(&home, 100, 1, &["--object", "../up=odd", "--json"]);
    let id = one(&of)["session"].as_str().unwrap().to_owned();
    let out = ["--rows", "out", "--objects", "run"];
    let ran = session(&home, "restore", &[&[&id[..]], &out[..]].concat());
    assert!(ran.stderr.contains("../up"), "{}", ran.stderr);
    assert!(!home.path("out").exists() && !home.path("up").exists());
    let plain = save(&home, 100, 2, &["--object", "part=odd", "--json"]);
    let plain = one(&plain)["session"].as_str().unwrap().to_owned();
    fs::create_dir_all(home.path("full/part")).unwrap();
    let out = [&plain, "--rows", "out", "--objects", "full"];
    let ran = session(&home, "restore", &out);
    assert!(
        ran.stderr.contains("--objects: full/part"),
        "{}",
        ran.stderr
    );
    assert!(!home.path("out").exists());
    let files = ["--tokens", "tokens.json", "--rows", "rows"];
    let many = [&files, &OF[..7], &["1048577"]].concat();
    let ran = session(&home, "save", &many);
    assert!(
        ran.stderr.contains("--piece-tokens: 1048577"),
        "{}",
        ran.stderr
    );
    let ran = session(&home, "restore", &["--rows", "out"]);
    assert_eq!(ran.status, 2);
    let ran = session(&home, "restore", &[&id, "--rows", "run"]);
    assert!(ran.stderr.contains("--rows: run"), "{}", ran.stderr);
    let ran = session(&home, "restore", &["--tokens", "odd", "--rows", "out"]);
    assert!(ran.stderr.contains("4-byte"), "{}", ran.stderr);
}

#[test]
fn ctrl_c_leaves_nothing() {
    let home = Home::new();
    let tokens: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
    fs::write(home.path("tokens"), tokens).unwrap();
    // Two gigabytes that are not on the disk, in pieces of half a megabyte.
    let rows = fs::File::create(home.path("rows")).unwrap();
    rows.set_len(2 << 30).unwrap();
    let files = ["--tokens", "tokens", "--rows", "rows"];
    let mut words = in_depot(&home, "save", "3GiB");
    words.extend(files.iter().chain(&OF).map(|word| (*word).to_owned()));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let ran = home.interrupt(&words);
    assert_eq!(ran.status, 2, "{}{}", ran.stdout, ran.stderr);
    let listed = session(&home, "ls", &["--json"]);
    assert!(listed.rows().is_empty());
    assert_eq!(blocks(&home), 0);
}
