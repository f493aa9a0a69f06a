//! `quarantine`: what engines have written is listed, and released.

use crate::home::Home;

const ONE: &str = "4343b7b21fe06bef1f2b96a7b340cd8d";
const TWO: &str = "43d7df798aac515733198cbda3153f78";

#[test]
fn namespaces_in_quarantine_are_listed_and_released() {
    let home = Home::new();
    let ran = home.run(&["quarantine", "list"]);
    assert_eq!((ran.status, ran.stdout.as_str()), (0, ""));
    assert_eq!(ran.stderr, "no namespace is in quarantine\n");
    let directory = home.path("cache").join("kvdepot/quarantine");
    std::fs::create_dir_all(&directory).unwrap();
    let text =
        r#"{"since": 951782399, "engine": "vllm", "reason": "a block differs", "process": 7}"#;
    std::fs::write(directory.join(format!("{ONE}.json")), text).unwrap();
    // Written by nobody that is known.
    std::fs::write(directory.join(format!("{TWO}.json")), "{").unwrap();
    std::fs::write(directory.join("tmpabc"), text).unwrap();

    let (status, rows) = home.json(&["quarantine", "list"]);
    assert_eq!((status, rows.len()), (0, 2));
    assert_eq!(rows[0]["namespace"], ONE);
    assert_eq!(rows[0]["reason"], "a block differs");
    let ran = home.run(&["quarantine", "list"]);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(
        lines[1..],
        [
            format!("{ONE}  2000-02-28 23:59:59Z  vllm    a block differs"),
            format!("{TWO}  -                     -       unknown"),
        ]
    );

    for (given, says) in [("43", "only one of"), ("", "DIGEST"), ("ff", "only one of")] {
        let ran = home.run(&["quarantine", "release", given]);
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{given}");
        assert!(ran.stderr.contains(says), "{}", ran.stderr);
    }
    let ran = home.run(&["quarantine", "release", "4343B"]);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    assert_eq!(ran.stdout, format!("released namespace {ONE}\n"));
    let (status, rows) = home.json(&["quarantine", "release", "--all"]);
    assert_eq!((status, rows.len()), (0, 1));
    assert_eq!(rows[0]["namespace"], TWO);
    let (status, rows) = home.json(&["quarantine", "list"]);
    assert_eq!((status, rows.len()), (0, 0));
}
