//! `doctor`: a line for each thing, with a hint where something is amiss.

use crate::home::{Home, arena, flip, open};
use crate::serve::Service;
use serde_json::Value;

fn check<'a>(rows: &'a [Value], name: &str) -> &'a Value {
    let row = rows.iter().find(|row| row["check"] == name);
    row.unwrap_or_else(|| panic!("no {name} in {rows:?}"))
}

#[test]
fn doctor_reports_on_every_thing() {
    let home = Home::new();
    let (status, rows) = home.json(&["doctor"]);
    let amiss = rows.iter().any(|row| row["status"] == "warn");
    assert_eq!(status, i32::from(amiss));
    for name in [
        "copy kernel",
        "processors",
        "memory",
        "default Cache",
        "DAX",
        "huge pages",
        "/dev/shm",
        "io_uring",
        "disk",
        "default arena",
        "runtime directory",
    ] {
        let row = check(&rows, name);
        assert!(
            row["value"].as_str().is_some_and(|value| !value.is_empty()),
            "{row}"
        );
        assert_eq!(row["status"] != "ok", row["hint"].is_string(), "{row}");
    }
    let arena = check(&rows, "default arena")["value"].as_str().unwrap();
    assert!(
        arena.starts_with("not created yet; its size would be "),
        "{arena}"
    );
    // A path that is not there yet lies where the nearest folder above it does.
    let there = std::env::temp_dir().join("kvdepot-doctor/none/yet");
    let (_, rows) = home.json(&["doctor", there.to_str().unwrap()]);
    let direct = check(&rows, "direct I/O")["value"].as_str().unwrap();
    assert!(
        direct.ends_with(&*std::env::temp_dir().to_string_lossy()),
        "{direct}"
    );
    let ran = home.run(&["doctor"]);
    // Its own: live depots of other tests come and go meanwhile, and are looked at as well.
    let amiss = ran.stdout.lines().any(|line| line.starts_with("warn "));
    let says = (ran.status, ran.stderr.as_str());
    assert_eq!(says, (i32::from(amiss), ""), "{}", ran.stdout);
    assert!(ran.stdout.starts_with("STATUS  CHECK"), "{}", ran.stdout);
}

#[test]
fn doctor_measures_the_copy_kernels_and_the_result_is_kept() {
    let home = Home::new();
    let kernel = |args: &[&str]| {
        let (_, rows) = home.json(args);
        let of = rows.iter().filter(|row| row["check"] == "copy kernel");
        of.map(|row| row["value"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let before = kernel(&["doctor"]);
    if before == ["portable"] {
        return;
    }
    assert!(before[0].ends_with(" (not measured yet)"), "{before:?}");
    let measured = kernel(&["doctor", "--calibrate"]);
    // Four lines at least: two kernels, with leaves of two lengths.
    assert!(measured.len() > 4, "{measured:?}");
    assert!(measured[0].contains(" GB/s"), "{measured:?}");
    assert_eq!(kernel(&["doctor"]), measured[measured.len() - 1..]);
}

#[test]
fn a_default_arena_that_no_start_could_make_is_a_problem() {
    let home = Home::new();
    home.run(&["doctor"]);
    std::os::unix::fs::symlink("nowhere", home.default_arena()).unwrap();
    let (status, rows) = home.json(&["doctor"]);
    let row = check(&rows, "default arena");
    assert_eq!((status, &row["status"]), (1, &"warn".into()), "{row}");
    let value = row["value"].as_str().unwrap();
    assert!(value.contains("symbolic link"), "{value}");
    let ran = home.run(&["serve", "Dax"]);
    assert!(ran.stderr.contains(value), "{}", ran.stderr);
}

#[test]
fn doctor_looks_into_the_default_arena() {
    let home = Home::new();
    // The command makes the private directory.
    home.run(&["doctor"]);
    let path = home.default_arena();
    arena(&path);
    let depot = open(&path, "1MiB");
    let (_, rows) = home.json(&["doctor"]);
    let value = check(&rows, "default arena")["value"].as_str().unwrap();
    assert!(value.starts_with("7 blocks"), "{value}");
    assert!(
        value.contains(&format!("process {}", std::process::id())),
        "{value}"
    );
    depot.close();
    flip(&path, (64 << 10) + 8);
    let (status, rows) = home.json(&["doctor"]);
    let row = check(&rows, "default arena");
    assert_eq!((status, &row["status"]), (1, &"warn".into()));
    assert!(
        row["hint"].as_str().unwrap().contains("kvdepot verify"),
        "{row}"
    );
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let (status, rows) = home.json(&["doctor"]);
    assert_eq!(status, 1);
    assert!(
        check(&rows, "default arena")["hint"]
            .as_str()
            .unwrap()
            .contains("kvdepot rm")
    );
}

#[test]
fn doctor_warns_of_a_directory_that_others_can_read() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new();
    let dir = home.path("run/kvdepot");
    std::fs::create_dir(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (_, rows) = home.json(&["doctor"]);
    let row = check(&rows, "runtime directory");
    assert_eq!(row["status"], "warn");
    assert!(row["value"].as_str().unwrap().contains("755"), "{row}");
}

#[test]
fn doctor_names_who_may_still_write_to_any_arena_that_it_finds() {
    use kvdepot_host::lock::{self, Kind};
    let home = Home::new();
    // The command makes the private directory.
    home.run(&["doctor"]);
    let instance = home.path("cache/kvdepot/arena-dp1.kvd");
    let named = home.path("named.kvd");
    // This process stands for a worker of an owner that is gone: it has the writers' lock.
    let held = [&instance, &named].map(|path| {
        arena(path);
        let file = std::fs::File::options().read(true).write(true).open(path);
        let file = file.unwrap();
        assert!(lock::try_lock(&file, 1, Kind::Shared).unwrap());
        file
    });
    let orphaned = || {
        let (_, rows) = home.json(&["doctor"]);
        let rows = rows.into_iter().filter(|row| row["check"] == "orphans");
        rows.map(|row| {
            (
                row["value"].as_str().unwrap().to_owned(),
                row["hint"].to_string(),
            )
        })
        .collect::<Vec<_>>()
    };
    let dax = format!("dax.path={}", named.display());
    let service = Service::start(&home, &["Dax", "-o", &dax]);
    let found = orphaned();
    let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, [instance.to_str().unwrap(), named.to_str().unwrap()]);
    let pid = std::process::id().to_string();
    assert!(
        found.iter().all(|(_, hint)| hint.contains(&pid)),
        "{found:?}"
    );
    drop(held);
    assert_eq!(orphaned(), []);
    assert_eq!(service.end(), 0);
}
