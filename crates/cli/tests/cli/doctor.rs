//! `doctor`: a line for each thing, with a hint where something is amiss.

use crate::home::{Home, arena, flip, open};
use serde_json::Value;

fn check<'a>(rows: &'a [Value], name: &str) -> &'a Value {
    let row = rows.iter().find(|row| row["check"] == name);
    row.unwrap_or_else(|| panic!("no {name} in {rows:?}"))
}

#[test]
fn doctor_reports_on_every_thing() {
    let home = Home::new();
    let (status, rows) = home.json(&["doctor"]);
    assert_eq!(status, 0);
    for name in [
        "kernels",
        "processors",
        "memory",
        "default Cache",
        "DAX",
        "huge pages",
        "/dev/shm",
        "disk",
        "default arena",
        "runtime directory",
    ] {
        let row = check(&rows, name);
        assert!(
            row["value"].as_str().is_some_and(|value| !value.is_empty()),
            "{row}"
        );
        assert_eq!(row["status"] == "warn", row["hint"].is_string(), "{row}");
    }
    let arena = check(&rows, "default arena")["value"].as_str().unwrap();
    assert!(arena.starts_with("none yet; would have "), "{arena}");
    let ran = home.run(&["doctor"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    assert!(ran.stdout.starts_with("STATUS  CHECK"), "{}", ran.stdout);
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
    let (_, rows) = home.json(&["doctor"]);
    let row = check(&rows, "default arena");
    assert_eq!(row["status"], "warn");
    assert!(
        row["hint"].as_str().unwrap().contains("kvdepot verify"),
        "{row}"
    );
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let (status, rows) = home.json(&["doctor"]);
    assert_eq!(status, 0);
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
