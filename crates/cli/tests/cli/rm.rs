//! `rm`: as the owner only, and nothing that is not kvdepot's.

use crate::home::{Home, arena, key, open, put, spec};

#[test]
fn rm_path_deletes_the_arena() {
    let home = Home::new();
    let path = home.path("arena");
    arena(&path);
    // Nobody is there to be asked.
    let ran = home.run(&["rm", path.to_str().unwrap()]);
    assert_eq!((ran.status, ran.stdout.as_str()), (2, ""));
    assert!(ran.stderr.contains("hint: --yes"), "{}", ran.stderr);
    assert!(path.exists());
    let ran = home.run(&["rm", path.to_str().unwrap(), "--yes"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    assert_eq!(
        ran.stdout,
        format!("removed arena {}, 1 MiB\n", path.display())
    );
    assert!(!path.exists());
    let ran = home.run(&["rm", path.to_str().unwrap()]);
    assert_eq!(ran.status, 2);
    let says = format!("{}: no arena found; nothing was removed\n", path.display());
    assert!(ran.stderr.contains(&says), "{}", ran.stderr);
}

#[test]
fn rm_refuses_what_a_process_owns_and_names_it() {
    let home = Home::new();
    let path = home.path("arena");
    let path = path.to_str().unwrap();
    let depot = open(path.as_ref(), "1MiB");
    put(&depot.namespace(&spec("a")).unwrap(), 0..5, 5000);
    let digest = spec("a").id().unwrap().to_string();
    let key = key(1).to_string();
    for args in [
        &["rm", path, "--yes"][..],
        &["rm", path, "--namespace", &digest],
        &["rm", path, "--key", &key],
    ] {
        let ran = home.run(args);
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{args:?}");
        let owner = format!("process {}", std::process::id());
        assert!(ran.stderr.contains(&owner), "{}", ran.stderr);
        assert!(ran.stderr.contains("hint: "), "{}", ran.stderr);
        assert!(!ran.stderr.contains("lock_wait"), "{}", ran.stderr);
    }
    assert_eq!(home.json(&["ls", path, "--blocks"]).1.len(), 5);
}

#[test]
fn rm_keeps_files_that_are_no_arenas() {
    let home = Home::new();
    let path = home.path("notes");
    for text in ["mine", ""] {
        std::fs::write(&path, text).unwrap();
        let ran = home.run(&["rm", path.to_str().unwrap(), "--yes"]);
        assert_eq!(ran.status, 2);
        assert!(ran.stderr.contains("not a kvdepot arena"), "{}", ran.stderr);
        assert_eq!(std::fs::read(&path).unwrap(), text.as_bytes());
    }
}

#[test]
fn rm_namespace_removes_its_blocks_alone() {
    let home = Home::new();
    let path = home.path("arena");
    let path = path.to_str().unwrap();
    arena(path.as_ref());
    let b = spec("b").id().unwrap().to_string();
    let (status, rows) = home.json(&["rm", path, "--namespace", &b[..8]]);
    assert_eq!((status, rows.len()), (0, 1));
    assert_eq!(rows[0]["blocks"], 2);
    assert_eq!(rows[0]["bytes"], 600);
    assert_eq!(rows[0]["removed"], true);
    let (_, left) = home.json(&["ls", path, "--blocks"]);
    assert_eq!(left.len(), 5);
    assert!(left.iter().all(|block| block["namespace"] != b));
    let ran = home.run(&["rm", path, "--namespace", &b]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains(&b), "{}", ran.stderr);
    assert_eq!(home.json(&["verify", path]).0, 0);
}

#[test]
fn rm_key_removes_a_block_from_every_namespace_or_from_one() {
    let home = Home::new();
    let path = home.path("arena");
    let path = path.to_str().unwrap();
    arena(path.as_ref());
    let a = spec("a").id().unwrap().to_string();
    let (zero, one, absent) = (key(0).to_string(), key(1).to_string(), key(99).to_string());
    let (status, rows) = home.json(&["rm", path, "--key", &zero, "--key", &absent]);
    assert_eq!((status, rows[0]["blocks"].as_u64()), (1, Some(2)));
    let (status, rows) = home.json(&["rm", path, "--key", &one, "--namespace", &a]);
    assert_eq!((status, rows[0]["blocks"].as_u64()), (0, Some(1)));
    assert_eq!(home.json(&["ls", path, "--blocks"]).1.len(), 4);
    let ran = home.run(&["rm", path, "--key", &absent]);
    assert_eq!(ran.status, 1);
    assert!(ran.stdout.contains("removed 0 blocks"), "{}", ran.stdout);
    // Each key counts, however many blocks it has and however often it is given.
    let (two, three) = (key(2).to_string(), key(3).to_string());
    let ran = home.run(&["rm", path, "--key", &two, "--key", &two, "--key", &three]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    for wrong in ["12", &"x".repeat(64)] {
        let ran = home.run(&["rm", path, "--key", wrong]);
        assert_eq!(ran.status, 2);
        assert!(
            ran.stderr.contains("64 hexadecimal digits"),
            "{}",
            ran.stderr
        );
    }
}

#[test]
fn rm_alone_removes_nothing() {
    let home = Home::new();
    arena(&make_default(&home));
    let ran = home.run(&["rm"]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("PATH"), "{}", ran.stderr);
    assert!(home.default_arena().exists());
    let ran = home.run(&["rm", "--yes"]);
    assert_eq!(ran.status, 2);
}

#[test]
fn rm_all_asks_and_removes_all_that_nobody_uses() {
    let home = Home::new();
    arena(&make_default(&home));
    let held = home.path("cache/kvdepot/arena-dp1.kvd");
    let depot = open(&held, "1MiB");
    let foreign = home.path("cache/kvdepot/arena-notes.txt");
    std::fs::write(&foreign, "mine").unwrap();
    let unfinished = [".arena.kvd.unfinished", ".arena-dp2.kvd.unfinished"]
        .map(|name| home.path("cache/kvdepot").join(name));
    for path in &unfinished {
        std::fs::write(path, [0; 5000]).unwrap();
    }
    std::fs::create_dir(home.path("run/kvdepot")).unwrap();
    private(&home.path("run/kvdepot"));
    let stale = home.path("run/kvdepot/0123.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let live = home.path("run/kvdepot/4567.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&live).unwrap();
    let scratch = home.path("kvdepot-bench-999999999-1");
    std::fs::create_dir(&scratch).unwrap();

    let ran = home.run(&["rm", "--all"]);
    assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("arena.kvd") && ran.stderr.contains("--yes"),
        "{}",
        ran.stderr
    );
    assert!(home.default_arena().exists());

    let (status, rows) = home.json(&["rm", "--all", "--yes"]);
    assert_eq!(status, 1, "the arena in use is a problem");
    let removed = |path: &std::path::Path| {
        let row = rows
            .iter()
            .find(|row| row["path"] == path.to_str().unwrap());
        row.map(|row| row["removed"].as_bool().unwrap())
    };
    assert_eq!(removed(&home.default_arena()), Some(true));
    assert_eq!(removed(&held), Some(false));
    for path in &unfinished {
        assert_eq!(removed(path), Some(true));
        assert!(!path.exists());
    }
    assert_eq!(removed(&stale), Some(true));
    assert_eq!(removed(&live), Some(false));
    assert_eq!(removed(&scratch), Some(true));
    assert_eq!(removed(&foreign), None);
    assert!(!home.default_arena().exists() && !stale.exists() && !scratch.exists());
    assert!(held.exists() && live.exists() && foreign.exists());

    let ran = home.run(&["rm", "--all", "--yes"]);
    let says = format!(
        "kept socket {}: another process is listening on this socket\n",
        live.display()
    );
    assert!(ran.stdout.contains(&says), "{}", ran.stdout);
    depot.close();
    std::fs::remove_file(&foreign).unwrap();
    std::fs::remove_file(&live).unwrap();
    let ran = home.run(&["rm", "--all", "--yes"]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    assert!(!home.path("cache/kvdepot").exists() && !home.path("run/kvdepot").exists());
    let ran = home.run(&["rm", "--all", "--yes"]);
    assert_eq!(
        (ran.status, ran.stderr.as_str()),
        (0, "nothing to remove\n")
    );
}

/// The default arena's path, in the private directory that it needs.
fn make_default(home: &Home) -> std::path::PathBuf {
    let path = home.default_arena();
    let dir = path.parent().unwrap();
    std::fs::create_dir_all(dir).unwrap();
    private(dir);
    path
}

fn private(dir: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn the_default_arena_of_nvme_is_looked_at_checked_and_removed_like_that_of_dax() {
    let home = Home::new();
    home.run(&["doctor"]);
    let path = home.default_arena().with_file_name("nvme.kvd");
    assert_eq!(home.run(&["stat"]).status, 2);
    arena(&path);
    let shown = path.to_str().unwrap();
    let (status, rows) = home.json(&["stat"]);
    assert_eq!((status, &rows[0]["path"]), (0, &shown.into()), "{rows:?}");
    assert_eq!(home.json(&["ls", "--blocks"]).1.len(), 7);
    let checks = || {
        let (_, rows) = home.json(&["doctor"]);
        let all = rows.into_iter();
        let mut mine = all.filter(|row| row["check"] == "default Nvme arena");
        mine.next().unwrap()
    };
    let check = checks();
    assert_eq!(check["status"], "ok", "{check}");
    assert!(
        check["value"].as_str().unwrap().starts_with("7 blocks"),
        "{check}"
    );
    std::fs::write(&path, "no arena").unwrap();
    assert_eq!(checks()["status"], "warn");
    std::fs::remove_file(&path).unwrap();
    arena(&path);
    arena(&path.with_file_name("nvme-x.kvd"));
    assert_eq!(home.json(&["stat", "--instance", "x"]).0, 0);
    let (status, rows) = home.json(&["rm", "--all", "--yes"]);
    assert_eq!(status, 0, "{rows:?}");
    let gone = rows.iter().any(|row| row["path"] == shown);
    assert!(gone && !path.exists(), "{rows:?}");
    assert!(!path.with_file_name("nvme-x.kvd").exists());
}
