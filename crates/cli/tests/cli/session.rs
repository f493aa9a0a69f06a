//! `kvdepot session`: conversations in a depot, in and out.

use std::fs;
use std::path::PathBuf;

use kvdepot_session::ds4;
use serde_json::Value;

use crate::home::{Home, Ran};

/// A file as ds4 writes them, of so many tokens: no layers, and the ids and logits of its tokens.
fn file_of_ds4(home: &Home, name: &str, tokens: u32) -> (PathBuf, Vec<u8>) {
    let shape = [2, 4096, 128, 32, 16, 1024, tokens, 2, 8, 4, 50, 16];
    let window = 2 * 16 * 8;
    let mut words: Vec<u32> = shape.to_vec();
    words.extend((0..tokens).map(|at| at * 7919 % 1000));
    words.extend(0..50);
    words.extend([0; 4]);
    words.extend(0..window);
    let mut payload = ds4::PAYLOAD_MAGIC.to_vec();
    payload.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    let head = ds4::Head {
        quant_bits: 2,
        reason: ds4::Reason::CONTINUED,
        flags: ds4::Flags(0),
        model: 0,
        tokens,
        hits: 3,
        context: 4096,
        revision: 0,
        reserved: [0; 3],
        created: 1_780_000_000,
        last_used: 1_780_000_001,
        payload_len: payload.len() as u64,
    };
    let mut file = Vec::new();
    ds4::write(&mut file, &head, b"a rendered text", &payload[..], &b""[..]).unwrap();
    let path = home.path(name);
    fs::write(&path, &file).unwrap();
    (path, file)
}

fn session(home: &Home, command: &str, more: &[&str]) -> Ran {
    let option = format!("posix.path={}", home.path("kv").display());
    let depot = ["Posix", "-o", &option, "-o", "posix.capacity=64MiB"];
    home.run(&[&["session", command][..], &depot, more].concat())
}

fn rows(ran: &Ran) -> Vec<Value> {
    ran.rows()
}

#[test]
fn conversations_move_in_and_out_and_are_looked_after() {
    let home = Home::new();
    // A path that is mistyped is no depot without sessions.
    let absent = session(&home, "ls", &[]);
    assert_eq!(absent.status, 2);
    assert!(absent.stderr.contains("posix.path"), "{}", absent.stderr);
    assert!(!home.path("kv").exists());
    let (path, whole) = file_of_ds4(&home, "a.kv", 1500);
    let path = path.to_str().unwrap();
    let unnamed = session(&home, "import", &[path]);
    assert_eq!(unnamed.status, 2);
    assert!(unnamed.stderr.contains("--weights"), "{}", unnamed.stderr);
    let ran = session(&home, "import", &[path, "--weights", "mine", "--json"]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let id = rows(&ran)[0]["session"].as_str().unwrap().to_owned();
    let listed = rows(&session(&home, "ls", &["--json"]));
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0]["tokens"], 1500);
    assert_eq!(listed[0]["reason"], "continued");
    let shown = session(&home, "show", &[&id[..8]]);
    assert!(shown.stdout.contains("1,500 tokens"), "{}", shown.stdout);
    assert!(shown.stdout.contains("a rendered text"), "{}", shown.stdout);
    // The same cut otherwise is another session.
    let other = ["--weights", "mine", "--piece-tokens", "100", "--json"];
    let ran = session(&home, "import", &[&[path][..], &other].concat());
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let cut = rows(&ran)[0]["session"].as_str().unwrap().to_owned();
    let shown = rows(&session(&home, "show", &[&cut, "--json"]));
    assert_eq!(shown[0]["piece_tokens"], 100);
    assert_eq!(session(&home, "rm", &[&cut]).status, 0);
    let verified = session(&home, "verify", &[]);
    assert_eq!(verified.status, 0, "{}", verified.stdout);
    let back = home.path("back.kv");
    let out = session(&home, "export", &[&id, back.to_str().unwrap(), "--ds4"]);
    assert_eq!(out.status, 0, "{}", out.stderr);
    assert!(fs::read(&back).unwrap() == whole);
    let archive = home.path("a.kvs");
    let archive = archive.to_str().unwrap();
    assert_eq!(session(&home, "export", &[&id, archive]).status, 0);
    assert_eq!(session(&home, "rm", &[&id[..12]]).status, 0);
    assert!(rows(&session(&home, "ls", &["--json"])).is_empty());
    let gone = session(&home, "show", &[&id]);
    assert_eq!(gone.status, 2);
    assert!(gone.stderr.contains("no session"), "{}", gone.stderr);
    let named = session(&home, "import", &[archive, "--weights", "other"]);
    assert_eq!(named.status, 2);
    assert!(named.stderr.contains("for ds4 files"), "{}", named.stderr);
    assert_eq!(session(&home, "import", &[archive]).status, 0);
    let out = session(&home, "export", &[&id, back.to_str().unwrap(), "--ds4"]);
    assert_eq!(out.status, 0, "{}", out.stderr);
    assert!(fs::read(&back).unwrap() == whole);
}

#[test]
fn what_is_no_session_is_refused_by_its_name() {
    let home = Home::new();
    let path = home.path("nothing.kvs");
    fs::write(&path, b"nothing of this kind").unwrap();
    let refused = session(&home, "import", &[path.to_str().unwrap()]);
    assert_eq!(refused.status, 2);
    assert!(refused.stderr.contains("nothing.kvs"), "{}", refused.stderr);
    let absent = session(&home, "import", &["/nowhere/a.kvs"]);
    assert!(
        absent.stderr.contains("/nowhere/a.kvs"),
        "{}",
        absent.stderr
    );
    assert_eq!(session(&home, "ls", &[]).status, 0);
    let empty = home.path("empty.kvs");
    fs::write(&empty, b"").unwrap();
    let refused = session(&home, "import", &[empty.to_str().unwrap()]);
    assert!(
        refused.stderr.contains("not a session file"),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_directory_that_is_no_depot_is_not_made_one_by_a_look() {
    let home = Home::new();
    fs::create_dir(home.path("kv")).unwrap();
    let looked = session(&home, "ls", &[]);
    assert_eq!(looked.status, 2);
    assert!(looked.stderr.contains("posix.path"), "{}", looked.stderr);
    assert_eq!(fs::read_dir(home.path("kv")).unwrap().count(), 0);
}

#[test]
fn sessions_that_are_files_need_no_depot() {
    let home = Home::new();
    let (path, whole) = file_of_ds4(&home, "a.kv", 600);
    let path = path.to_str().unwrap();
    let ran = session(&home, "import", &[path, "--weights", "mine", "--json"]);
    let kept = rows(&ran)[0]["session"].as_str().unwrap().to_owned();
    let (one, dir) = (home.path("one.kvs"), home.path("files"));
    let (one, dir) = (one.to_str().unwrap(), dir.to_str().unwrap());
    assert_eq!(session(&home, "export", &[&kept, one]).status, 0);
    let run = |args: &[&str]| home.run(&[&["session"][..], args].concat());

    let listed = run(&["ls", one, "--json"]).rows();
    assert_eq!((listed.len(), &listed[0]["file"]), (1, &one.into()));
    assert_eq!(listed[0]["tokens"], 600);
    let id = listed[0]["session"].as_str().unwrap();
    let shown = run(&["show", one]);
    assert!(shown.stdout.contains("600 tokens"), "{}", shown.stdout);
    assert!(shown.stdout.contains("a rendered text"), "{}", shown.stdout);
    let looked = run(&["verify", one]);
    assert!(looked.stdout.contains("complete"), "{}", looked.stdout);

    // Into a directory, and out of it.
    let copied = run(&["import", dir, one, "--json"]).rows();
    assert_eq!(copied[0]["session"], id);
    let named = home.path("files").join(format!("{id}.kvs"));
    assert_eq!(fs::read(&named).unwrap(), fs::read(one).unwrap());
    let other = home.path("other.kvs");
    let other = other.to_str().unwrap();
    assert_eq!(run(&["export", dir, &id[..9], other]).status, 0);
    assert_eq!(fs::read(other).unwrap(), fs::read(one).unwrap());
    assert_eq!(run(&["ls", dir, "--json"]).rows().len(), 1);
    assert_eq!(run(&["show", dir, &id[..9]]).status, 0);
    let refused = run(&["export", dir, &id[..9], other, "--ds4"]);
    assert!(refused.stderr.contains("--ds4"), "{}", refused.stderr);
    // And back, byte for byte.
    let ran = session(&home, "import", &[other, "--json"]);
    let again = rows(&ran)[0]["session"].as_str().unwrap().to_owned();
    let back = home.path("back.kv");
    let to = back.to_str().unwrap();
    assert_eq!(session(&home, "export", &[&again, to, "--ds4"]).status, 0);
    assert!(fs::read(&back).unwrap() == whole);

    // What an empty variable of a script names is not the only one.
    for place in [one, dir] {
        let refused = run(&["rm", place, ""]);
        assert_eq!(refused.status, 2);
        assert!(
            refused.stderr.contains("SESSION: an empty ID"),
            "{}",
            refused.stderr
        );
    }
    assert_eq!(run(&["show", one, &id.to_ascii_uppercase()]).status, 0);
    let refused = run(&["import", one, other]);
    assert!(refused.stderr.contains("a directory"), "{}", refused.stderr);
    let refused = run(&["import", dir, other, "--weights", "mine"]);
    assert!(refused.stderr.contains("--weights"), "{}", refused.stderr);

    let mut changed = fs::read(&named).unwrap();
    changed[5000] ^= 1;
    fs::write(&named, &changed).unwrap();
    let looked = run(&["verify", dir]);
    assert_eq!(looked.status, 1);
    assert!(
        looked.stdout.contains("corrupt: piece 0"),
        "{}",
        looked.stdout
    );
    let copied = run(&["import", "./more", named.to_str().unwrap()]);
    assert!(
        copied.stderr.contains(&format!("{id}.kvs: it fails")),
        "{}",
        copied.stderr
    );
    changed[9] ^= 1;
    fs::write(&named, &changed).unwrap();
    let looked = run(&["verify", dir]);
    assert_eq!(looked.status, 1, "{}", looked.stdout);
    assert!(looked.stderr.contains("version"), "{}", looked.stderr);
    assert_eq!(run(&["ls", dir]).status, 1);
    fs::copy(one, &named).unwrap();
    assert_eq!(
        run(&["rm", dir, "ffffffffffffffffffffffffffffffff0"]).status,
        2
    );
    assert_eq!(run(&["rm", dir, &id[..9]]).status, 0);
    assert!(!named.exists());
    let absent = run(&["ls", "./nowhere"]);
    assert!(absent.stderr.contains("nowhere"), "{}", absent.stderr);
}

#[test]
fn a_directory_keeps_its_number_of_folders_and_errors_name_the_path() {
    let home = Home::new();
    let (path, _) = file_of_ds4(&home, "a.kv", 300);
    let path = path.to_str().unwrap();
    let more = [path, "--weights", "mine", "-o", "posix.fan_out=1024"];
    assert_eq!(session(&home, "import", &more).status, 0);
    // The option is not given again, and the hint's command works where it is printed.
    let refused = home.run(&["stat", "kv"]);
    let hinted = "kvdepot session ls ./kv lists";
    assert!(refused.stderr.contains(hinted), "{}", refused.stderr);
    let listed = home.run(&["session", "ls", "./kv", "--json"]);
    assert_eq!(rows(&listed).len(), 1, "{}", listed.stderr);
    // What cannot be read is no mistyped name.
    let unreadable = home.run(&["session", "ls", &format!("{path}/below")]);
    assert_eq!(unreadable.status, 2);
    let says = "Not a directory";
    assert!(unreadable.stderr.contains(says), "{}", unreadable.stderr);
}
