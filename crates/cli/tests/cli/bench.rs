//! `bench`: rows with the fields that tools rely on, and nothing left behind.

use crate::home::Home;
use serde_json::Value;

const FIELDS: [&str; 8] = [
    "bench", "case", "metric", "unit", "value", "limit", "ratio", "rounds",
];

fn check_fields(rows: &[Value], bench: &str) {
    for row in rows {
        for field in FIELDS {
            assert!(row.get(field).is_some(), "{field} in {row}");
        }
        assert_eq!(row["bench"], bench);
        assert!(row["case"].is_object() && row["value"].is_number(), "{row}");
    }
}

fn small(home: &Home) -> Vec<String> {
    let dir = home.dir.path().to_str().unwrap();
    let words = [
        "bench", "memory", "--dir", dir, "--size", "16MiB", "--batch", "4MiB", "--rounds", "2",
    ];
    words.map(str::to_owned).into()
}

fn run(home: &Home, more: &[&str]) -> (i32, Vec<Value>) {
    let args = small(home);
    let args: Vec<&str> = args
        .iter()
        .map(String::as_str)
        .chain(more.iter().copied())
        .collect();
    home.json(&args)
}

#[test]
fn bench_memory_measures_every_case_against_the_best_copy() {
    let home = Home::new();
    let (status, rows) = run(
        &home,
        &["--block", "4KiB", "--block", "1MiB", "--threads", "2"],
    );
    assert_eq!(status, 0);
    check_fields(&rows, "memory");
    // Two operations on two tiers: a row each for the large block, two for the small one.
    assert_eq!(rows.len(), 12);
    for op in ["get", "put"] {
        for tier in ["Dax", "Cache"] {
            let of = |block: u64, metric: &str| {
                let row = rows.iter().find(|row| {
                    let case = &row["case"];
                    case["op"] == op
                        && case["tier"] == tier
                        && case["block"] == block
                        && row["metric"] == metric
                });
                row.unwrap_or_else(|| panic!("{op} {tier} {block} {metric}"))
                    .clone()
            };
            for block in [4096, 1 << 20] {
                let row = of(block, "throughput");
                assert_eq!(row["unit"], "GB/s");
                assert_eq!(row["case"]["threads"], 2);
                assert_eq!(row["rounds"], 2);
                assert!(row["value"].as_f64().unwrap() > 0.0);
                assert!(row["limit"].as_f64().unwrap() > 0.0 && row["ratio"].is_number());
            }
            let overhead = of(4096, "overhead");
            assert_eq!(overhead["unit"], "ns/block");
            assert!(overhead["limit"].is_null() && overhead["ratio"].is_null());
        }
    }
    assert_eq!(left(&home), Vec::<String>::new());
}

#[test]
fn bench_memory_prints_a_table_of_what_was_asked_for() {
    let home = Home::new();
    let mut args = small(&home);
    let more = [
        "--op",
        "put",
        "--tier",
        "Cache",
        "--block",
        "64KiB",
        "--threads",
        "1",
    ];
    args.extend(more.map(str::to_owned));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let ran = home.run(&args);
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{}", ran.stdout);
    assert!(lines[0].starts_with("CASE"), "{}", ran.stdout);
    assert!(lines[1].starts_with("block=65536 op=put threads=1 tier=Cache  throughput"));
}

#[test]
fn bench_memory_refuses_what_cannot_be_measured() {
    let home = Home::new();
    for (args, says) in [
        (&["--block", "5000"][..], "a multiple of 4096"),
        (&["--block", "1GiB"], "at most --batch"),
        (&["--block", "lots"], "a size above zero"),
        (&["--size", "100TiB"], "--size: 100 TiB"),
        (&["--tier", "Tape"], "Dax, Cache"),
        (&["--threads", "0"], "--threads"),
    ] {
        let mut all = small(&home);
        all.truncate(4);
        let all: Vec<&str> = all
            .iter()
            .map(String::as_str)
            .chain(args.iter().copied())
            .collect();
        let ran = home.run(&all);
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(ran.stderr.contains(says), "{args:?}: {}", ran.stderr);
    }
    assert_eq!(left(&home), Vec::<String>::new());
}

#[test]
fn bench_index_finds_every_key_with_both_verbs() {
    let home = Home::new();
    let args = [
        "bench", "index", "--blocks", "3000", "--rounds", "1", "--batch", "100",
    ];
    let (status, rows) = home.json(&args);
    assert_eq!((status, rows.len()), (0, 2));
    check_fields(&rows, "index");
    for (row, op) in rows.iter().zip(["contains", "prefix"]) {
        assert_eq!(row["case"]["op"], op);
        assert_eq!(row["case"]["blocks"], 3000);
        assert_eq!(row["metric"], "lookups");
        assert_eq!(row["unit"], "keys/s");
    }
}

#[test]
fn bench_reopen_serves_a_block_after_each_kill() {
    let home = Home::new();
    let dir = home.dir.path().to_str().unwrap();
    let args = [
        "bench", "reopen", "--blocks", "2000", "--rounds", "2", "--path", dir,
    ];
    let (status, rows) = home.json(&args);
    assert_eq!((status, rows.len()), (0, 2));
    check_fields(&rows, "reopen");
    let (open, first) = (&rows[0], &rows[1]);
    assert_eq!(open["metric"], "open");
    assert_eq!(open["unit"], "s");
    assert_eq!(open["case"]["blocks"], 2000);
    assert!(open["limit"].is_number() && open["ratio"].is_number());
    assert_eq!(first["metric"], "first_block");
    let seconds = |row: &Value| row["value"].as_f64().unwrap();
    assert!(
        seconds(open) > seconds(first),
        "opening includes the first block"
    );
    assert_eq!(left(&home), Vec::<String>::new());
}

#[test]
fn ctrl_c_ends_a_benchmark_and_leaves_nothing() {
    let home = Home::new();
    let mut args = small(&home);
    args.extend(["--rounds", "1000000"].map(str::to_owned));
    args.drain(8..10);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let ran = home.interrupt(&args);
    assert_eq!(ran.status, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("error: interrupted"), "{}", ran.stderr);
    assert_eq!(left(&home), Vec::<String>::new());

    let dir = home.dir.path().to_str().unwrap();
    let args = [
        "bench", "reopen", "--blocks", "2000", "--rounds", "1000000", "--dir", dir,
    ];
    let ran = home.interrupt(&args);
    assert_eq!(ran.status, 2, "{}", ran.stderr);
    assert_eq!(left(&home), Vec::<String>::new());
}

/// What benchmarks left in the home.
fn left(home: &Home) -> Vec<String> {
    let entries = std::fs::read_dir(home.dir.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| name.starts_with("kvdepot-bench"))
        .collect()
}
