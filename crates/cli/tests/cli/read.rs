//! `ls`, `stat` and `verify`: reading an arena that may belong to another process.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use kvdepot_store::{Config, NamespaceSpec};
use serde_json::json;

use crate::home::{Home, arena, flip, key, open, put, spec};

#[test]
fn ls_sums_up_namespaces_with_their_description() {
    let home = Home::new();
    let path = home.path("arena");
    arena(&path);
    let ran = home.run(&["ls", path.to_str().unwrap()]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{}", ran.stdout);
    assert!(lines[0].starts_with("NAMESPACE") && lines[0].ends_with("DESCRIPTION"));
    let a = spec("a").id().unwrap().to_string();
    assert!(lines[1].starts_with(&a), "the largest first: {}", lines[1]);
    assert!(lines[1].contains(" 5 ") && lines[1].contains("model=a dtype=float32"));
    assert!(lines[2].contains(" 2 ") && lines[2].contains("model=b"));
}

#[test]
fn ls_has_a_line_for_each_namespace_and_all_of_it_in_json() {
    let home = Home::new();
    let path = home.path("arena");
    let depot = open(&path, "1MiB");
    let mut long = spec("a");
    long.layout = Some(format!("{{\n  \"x\": \"{}\"\n}}", "y".repeat(200)));
    put(&depot.namespace(&long).unwrap(), 0..2, 300);
    let path = path.to_str().unwrap();
    let ran = home.run(&["ls", path]);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{}", ran.stdout);
    assert!(
        lines[1].len() < 180 && lines[1].ends_with('…'),
        "{}",
        lines[1]
    );
    let (status, rows) = home.json(&["ls", path]);
    assert_eq!((status, rows.len()), (0, 1));
    assert_eq!(rows[0]["namespace"], long.id().unwrap().to_string());
    assert_eq!(
        (&rows[0]["blocks"], &rows[0]["bytes"]),
        (&2.into(), &600.into())
    );
    assert!(rows[0]["description"].as_str().unwrap().len() > 200);
}

#[test]
fn ls_json_has_an_object_for_each_live_block() {
    let home = Home::new();
    let path = home.path("arena");
    arena(&path);
    let (status, rows) = home.json(&["ls", path.to_str().unwrap(), "--blocks"]);
    assert_eq!((status, rows.len()), (0, 7));
    let a = spec("a").id().unwrap().to_string();
    let first = rows
        .iter()
        .find(|row| row["namespace"] == a && row["key"] == key(0).to_string())
        .unwrap();
    assert_eq!(first["length"], 5000);
    assert_eq!(first["parts"], 1);
    assert_eq!(first["extents"][0][1], 8192);
    assert_eq!(first["checksum"].as_str().unwrap().len(), 32);
    let sequences: Vec<u64> = rows
        .iter()
        .map(|r| r["sequence"].as_u64().unwrap())
        .collect();
    assert!(
        sequences.is_sorted_by(|a, b| a > b),
        "newest first: {sequences:?}"
    );
}

#[test]
fn ls_filters_and_limits() {
    let home = Home::new();
    let path = home.path("arena");
    let path = path.to_str().unwrap();
    arena(path.as_ref());
    let b = spec("b").id().unwrap().to_string();
    let (_, rows) = home.json(&["ls", path, "--blocks", "--namespace", &b[..6]]);
    assert_eq!(rows.len(), 2);
    let (_, rows) = home.json(&["ls", path, "--blocks", "--limit", "3"]);
    assert_eq!(rows.len(), 3);
    let ran = home.run(&["ls", path, "--blocks", "--limit", "4"]);
    assert_eq!(ran.stdout.lines().count(), 5, "{}", ran.stdout);
    assert!(ran.stdout.contains("OFFSET+LENGTH"));
    let ran = home.run(&["ls", path, "--limit", "1"]);
    assert_eq!(ran.stdout.lines().count(), 2, "{}", ran.stdout);
    assert_eq!(ran.stderr, "1 of 2 namespaces shown (--limit)\n");
    let ran = home.run(&["ls", path, "--blocks", "--limit", "6"]);
    let (says, hint) = ran.stderr.split_once('\n').unwrap();
    assert_eq!(says, "6 of 7 blocks shown (--limit)");
    let before = hint.split(' ').nth(2).unwrap();
    let (_, rest) = home.json(&["ls", path, "--blocks", "--before", before]);
    assert_eq!(rest.len(), 1, "{hint}");
    let ran = home.run(&["ls", path, "--namespace", "xyz"]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("hexadecimal"), "{}", ran.stderr);
}

#[test]
fn without_a_path_the_default_arena_is_read() {
    let home = Home::new();
    let ran = home.run(&["stat"]);
    assert_eq!(ran.status, 2);
    assert!(
        ran.stderr.contains("arena.kvd: no arena found"),
        "{}",
        ran.stderr
    );
    assert!(
        ran.stderr.contains("hint: the first engine"),
        "{}",
        ran.stderr
    );
    let ran = home.run(&["ls", "--instance", "dp1"]);
    assert!(ran.stderr.contains("with instance: dp1"), "{}", ran.stderr);
    arena(&home.default_arena());
    assert_eq!(home.json(&["ls", "--blocks"]).1.len(), 7);
    arena(&home.path("cache/kvdepot/arena-dp1.kvd"));
    let (status, rows) = home.json(&["stat", "--instance", "dp1"]);
    assert_eq!(status, 0);
    assert!(rows[0]["path"].as_str().unwrap().ends_with("arena-dp1.kvd"));
}

#[test]
fn what_is_no_arena_is_an_error_with_its_path() {
    let home = Home::new();
    let path = home.path("text");
    std::fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
    let empty = home.path("empty");
    std::fs::write(&empty, "").unwrap();
    let note = home.path("note");
    std::fs::write(&note, "mine").unwrap();
    for command in ["ls", "stat", "verify"] {
        for (path, says) in [
            (path.clone(), "not a kvdepot arena"),
            (home.path("absent"), "no arena found"),
            (home.dir.path().into(), "directory"),
            (
                empty.clone(),
                "the file is empty, so it is not a kvdepot arena",
            ),
            (
                note.clone(),
                "the file is too small (4 B) to be a kvdepot arena\n",
            ),
            ("/proc/self/mem".into(), "a virtual file of the kernel"),
        ] {
            let path = path.to_str().unwrap();
            let ran = home.run(&[command, path]);
            assert_eq!(
                (ran.status, ran.stdout.as_str()),
                (2, ""),
                "{command} {path}"
            );
            assert!(ran.stderr.contains(path), "{}", ran.stderr);
            assert!(
                ran.stderr.contains(says),
                "{command} {path}: {}",
                ran.stderr
            );
        }
    }
}

#[test]
fn stat_says_how_full_it_is_and_whose() {
    let home = Home::new();
    let path = home.path("arena");
    let path = path.to_str().unwrap();
    let depot = open(path.as_ref(), "1MiB");
    put(&depot.namespace(&spec("a")).unwrap(), 0..5, 5000);
    let (status, rows) = home.json(&["stat", path]);
    assert_eq!((status, rows.len()), (0, 1));
    let stat = &rows[0];
    assert_eq!(stat["capacity_bytes"], 1 << 20);
    assert_eq!(stat["live_bytes"], 25_000);
    assert_eq!(stat["used_bytes"], 5 * 8192);
    assert_eq!(stat["blocks"], 5);
    assert_eq!(stat["owned"], true);
    assert_eq!(stat["owner"]["pid"], std::process::id());
    assert_eq!(stat["owner"]["running"], true);
    assert_eq!(stat["generation"], 1);
    let ran = home.run(&["stat", path]);
    let pid = std::process::id();
    assert!(
        ran.stdout.contains(&format!("process {pid} on ")),
        "{}",
        ran.stdout
    );
    assert!(ran.stdout.contains(", running"), "{}", ran.stdout);
    depot.close();
    let (_, rows) = home.json(&["stat", path]);
    assert_eq!(rows[0]["owned"], false);
    let ran = home.run(&["stat", path]);
    assert!(ran.stdout.contains("none (last: process"), "{}", ran.stdout);
}

#[test]
fn verify_finds_nothing_in_a_sound_arena_while_it_is_owned() {
    let home = Home::new();
    let path = home.path("arena");
    let path = path.to_str().unwrap();
    let depot = open(path.as_ref(), "1MiB");
    put(&depot.namespace(&spec("a")).unwrap(), 0..5, 5000);
    for wrong in ["0", "257", "two"] {
        let ran = home.run(&["verify", path, "--threads", wrong]);
        assert_eq!(ran.status, 2);
        assert!(ran.stderr.contains("--threads"), "{}", ran.stderr);
    }
    let (status, rows) = home.json(&["verify", path, "--threads", "1"]);
    assert_eq!((status, rows.len()), (0, 1));
    assert_eq!(rows[0]["blocks"], 5);
    assert_eq!(rows[0]["sound"], 5);
    assert_eq!(rows[0]["bad"], 0);
    assert_eq!(rows[0]["bytes"], 25_000);
    assert_eq!(rows[0]["complete"], true);
    let ran = home.run(&["verify", path]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    assert!(ran.stdout.contains("5 blocks checked") && ran.stdout.contains("0 bad"));
}

#[test]
fn verify_names_bad_blocks_and_damaged_records() {
    let home = Home::new();
    let path = home.path("arena");
    arena(&path);
    let text = path.to_str().unwrap();
    let (_, blocks) = home.json(&["ls", text, "--blocks"]);
    let bad = &blocks[3];
    flip(&path, bad["extents"][0][0].as_u64().unwrap() + 77);
    let (status, rows) = home.json(&["verify", text]);
    assert_eq!((status, rows.len()), (1, 2));
    assert_eq!(rows[0]["key"], bad["key"]);
    assert_eq!(rows[0]["slot"], bad["slot"]);
    assert!(rows[0]["fault"].is_string());
    assert_eq!(rows[1]["bad"], 1);
    assert_eq!(rows[1]["sound"], 6);
    let ran = home.run(&["verify", text]);
    assert_eq!(ran.status, 1);
    let offset = format!(
        "slot {}, 5000 bytes at {}+8192",
        bad["slot"], bad["extents"][0][0]
    );
    assert!(ran.stdout.contains(&offset), "{}", ran.stdout);
    assert!(
        ran.stdout.contains(bad["key"].as_str().unwrap()),
        "{}",
        ran.stdout
    );
    // The hint does what it says.
    let hint = ran.stderr.split("kvdepot ").nth(1).unwrap();
    let hint = hint.split(" removes").next().unwrap();
    let line = hint.replace("KEY", bad["key"].as_str().unwrap());
    let line = line.replace("DIGEST", bad["namespace"].as_str().unwrap());
    let words: Vec<&str> = line.split(' ').collect();
    let removed = home.run(&words);
    assert_eq!(removed.status, 0, "{line}: {}", removed.stderr);
    let (status, rows) = home.json(&["verify", text]);
    assert_eq!((status, rows[0]["blocks"].as_u64()), (0, Some(6)));
    let (_, blocks) = home.json(&["ls", text, "--blocks"]);

    let slot = blocks[0]["slot"].as_u64().unwrap();
    flip(&path, (64 << 10) + 128 * slot + 40);
    let (status, rows) = home.json(&["verify", text]);
    assert_eq!(status, 1);
    assert_eq!(rows[0]["damaged_records"][0], slot);
    assert_eq!(rows[0]["blocks"], 5);
    let ran = home.run(&["verify", text]);
    assert!(
        ran.stdout
            .contains(&format!("damaged record: slot {slot} ")),
        "{}",
        ran.stdout
    );
    let ran = home.run(&["ls", text]);
    assert!(ran.stderr.contains("1 damaged record"), "{}", ran.stderr);
}

#[test]
fn what_is_torn_is_said_and_mended_by_the_next_owner() {
    let home = Home::new();
    let path = home.path("arena");
    arena(&path);
    let text = path.to_str().unwrap();
    drop(open(&path, "1MiB"));
    assert_eq!(home.json(&["verify", text]).0, 0);
    let (_, blocks) = home.json(&["ls", text, "--blocks"]);
    let slot = blocks[0]["slot"].as_u64().unwrap();
    flip(&path, (64 << 10) + 128 * slot + 40);
    flip(&path, 4096 + 40);
    let ran = home.run(&["verify", text]);
    assert_eq!(ran.status, 1);
    for says in [
        "damaged record: slot",
        "damaged superblock: the copy at 4096",
    ] {
        assert!(ran.stdout.contains(says), "{}", ran.stdout);
    }
    let (_, rows) = home.json(&["verify", text]);
    assert_eq!(rows[0]["damaged_superblocks"], serde_json::json!([4096]));
    let ran = home.run(&["stat", text]);
    assert!(
        ran.stdout.contains("the copy at 4096 is damaged"),
        "{}",
        ran.stdout
    );
    drop(open(&path, "1MiB"));
    let (status, rows) = home.json(&["verify", text]);
    assert_eq!(status, 0, "{rows:?}");
    assert_eq!(
        home.json(&["stat", text]).1[0]["damaged_superblocks"],
        serde_json::json!([])
    );
}

#[test]
fn a_truncated_arena_is_verified_as_far_as_it_goes() {
    let home = Home::new();
    let path = home.path("arena");
    put(
        &open(&path, "1MiB").namespace(&spec("a")).unwrap(),
        0..7,
        100_000,
    );
    let text = path.to_str().unwrap();
    let (_, blocks) = home.json(&["ls", text, "--blocks"]);
    let last = blocks
        .iter()
        .map(|b| b["extents"][0][0].as_u64().unwrap())
        .max()
        .unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(last)
        .unwrap();
    let ran = home.run(&["verify", text, "--json"]);
    let rows = ran.rows();
    assert_eq!(ran.status, 1, "{}", ran.stderr);
    let totals = rows.last().unwrap();
    assert_eq!(
        (totals["blocks"].as_u64(), totals["bad"].as_u64()),
        (Some(7), Some(1))
    );
    assert_eq!(totals["truncated_bytes"].as_u64(), Some((1 << 20) - last));
    for command in ["stat", "verify"] {
        let ran = home.run(&[command, text]);
        assert!(ran.stdout.contains("truncated"), "{}", ran.stdout);
    }
}

#[test]
fn ctrl_c_ends_verify_with_what_was_checked() {
    let home = Home::new();
    let path = home.path("arena");
    let depot = open(&path, "300MiB");
    let ns = depot.namespace(&spec("a")).unwrap();
    // Four steps of reading; the payloads are never written, and so do not verify.
    let blocks: Vec<_> = (0..4).map(|n| (key(n), vec![64 << 20])).collect();
    let reserved: Vec<_> = ns.reserve(&blocks).unwrap().into_iter().flatten().collect();
    let checksums = vec![vec![kvdepot_store::Checksum::default()]; 4];
    assert_eq!(ns.commit(&reserved, &checksums).unwrap(), [true; 4]);
    depot.close();
    let ran = home.interrupt(&["verify", path.to_str().unwrap(), "--threads", "1", "--json"]);
    assert_eq!(ran.status, 2, "{}", ran.stderr);
    let totals = ran.rows().pop().unwrap();
    assert_eq!(totals["complete"], false);
    assert_eq!(totals["blocks"], 4);
    let checked = totals["checked"].as_u64().unwrap();
    assert!((1..4).contains(&checked), "{totals}");
    assert!(
        ran.stderr.contains(&format!("interrupted: {checked} of 4")),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let home = Home::new();
    let path = home.path("arena");
    arena(&path);
    let mut command = home.command(&["ls", path.to_str().unwrap(), "--json"]);
    let mut child = command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ran = crate::home::Ran::of(child.wait_with_output().unwrap());
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
}

#[test]
fn usage_is_refused_with_status_two_and_help_is_data() {
    let home = Home::new();
    for args in [
        &["lss"][..],
        &["ls", "a", "b"],
        &["ls", "--limit", "x"],
        &[],
    ] {
        let ran = home.run(args);
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(ran.stderr.contains("--help"), "{}", ran.stderr);
    }
    let ran = home.run(&["help"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    assert!(ran.stdout.contains("Exit status"));
    let ran = home.run(&["--version"]);
    assert_eq!(
        ran.stdout,
        concat!("kvdepot ", env!("CARGO_PKG_VERSION"), "\n")
    );
}

#[test]
fn verify_reads_blocks_in_files_and_names_the_rotten_mib() {
    const MIB: usize = 1 << 20;
    let home = Home::new();
    let path = home.path("blocks");
    let settings = json!({"socket": "off", "posix": {"path": path, "capacity": "64MiB"}});
    let depot = kvdepot_service::open(&Config::new("Posix", &settings).unwrap()).unwrap();
    put(&depot.namespace(&spec("a")).unwrap(), 0..2, 3 * MIB);
    depot.close();
    let text = path.to_str().unwrap();
    let ran = home.run(&["verify", text]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    assert!(
        ran.stdout.starts_with("2 files checked, 6 MiB in "),
        "{}",
        ran.stdout
    );
    let folders = std::fs::read_dir(path.join("blocks")).unwrap();
    let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
    let file = files.map(|file| file.unwrap().path()).next().unwrap();
    flip(&file, 4096 + MIB as u64 + 9);
    for place in [text, file.to_str().unwrap()] {
        let ran = home.run(&["verify", place]);
        let says = "bytes 1048576 to 2097151 of the payload";
        assert!(
            ran.status == 1 && ran.stdout.contains(says),
            "{}",
            ran.stdout
        );
        assert!(
            ran.stdout.contains(file.to_str().unwrap()),
            "{}",
            ran.stdout
        );
        let (status, rows) = home.json(&["verify", place]);
        assert_eq!((status, rows.len()), (1, 2));
        assert_eq!(rows[0]["rotten"], json!([[MIB, MIB]]));
        assert_eq!(rows[1]["bad"], 1);
    }
    // A header that has rotted.
    flip(&file, 40);
    let ran = home.run(&["verify", file.to_str().unwrap()]);
    assert!(
        ran.status == 1 && ran.stdout.contains("its header is damaged"),
        "{}",
        ran.stdout
    );
}

#[test]
fn verify_asks_for_macs_where_it_has_keys() {
    let home = Home::new();
    let path = home.path("blocks");
    let keys = |name: &str, lines: &str| {
        let file = home.path(name);
        std::fs::write(&file, lines).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (ours, theirs) = ("1b".repeat(32), "2c".repeat(32));
    let right = keys("right", &format!("- {theirs}\na {ours}\n"));
    let other = keys("other", &format!("a {theirs}\n"));
    let put_with = |name: &str, key_file: Option<&str>| {
        let posix = json!({"path": path, "capacity": "64MiB"});
        let mut settings = json!({"socket": "off", "posix": posix});
        if let Some(file) = key_file {
            settings["mac_key_file"] = json!(file);
        }
        let depot = kvdepot_service::open(&Config::new("Posix", &settings).unwrap()).unwrap();
        let spec = NamespaceSpec {
            salt: Some("a".into()),
            ..spec(name)
        };
        put(&depot.namespace(&spec).unwrap(), 0..2, 3 << 20);
        depot.close();
    };
    put_with("a", Some(&right));
    let text = path.to_str().unwrap();
    for (args, bad) in [
        (&["verify", text][..], 0),
        (&["verify", text, "--mac-key-file", &right], 0),
        (&["verify", text, "--mac-key-file", &other], 2),
    ] {
        let (status, rows) = home.json(args);
        let said = (status, rows.last().unwrap()["bad"].clone());
        assert_eq!(said, (i32::from(bad > 0), json!(bad)), "{args:?}");
    }
    // Without a key anybody can write what only the other checksum covers.
    put_with("b", None);
    let ran = home.run(&["verify", text, "--mac-key-file", &right]);
    let named = ran.stdout.matches("it has no MAC").count();
    assert_eq!((ran.status, named), (1, 2), "{}", ran.stdout);
    let at = home.path("arena");
    arena(&at);
    let ran = home.run(&["verify", at.to_str().unwrap(), "--mac-key-file", &right]);
    assert!(
        ran.status == 2 && ran.stderr.contains("arenas have no MACs"),
        "{}",
        ran.stderr
    );
}
