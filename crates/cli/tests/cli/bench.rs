//! `bench`: rows with the fields that tools rely on, and nothing left behind.

use crate::home::Home;
use serde_json::{Value, json};

const FIELDS: [&str; 8] = [
    "bench", "case", "metric", "unit", "value", "limit", "ratio", "rounds",
];

pub(crate) fn check_fields(rows: &[Value], bench: &str) {
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
    // And one beside the loops with a checksum, where the machine has any.
    let is_fused = |row: &&Value| row["metric"] == "throughput_with_checksum";
    let fused = rows.iter().filter(is_fused).count();
    assert!(fused == 0 || fused == 8, "{fused}");
    assert_eq!(rows.len(), 12 + fused);
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
    assert!(lines[0].starts_with("CASE"), "{}", ran.stdout);
    assert!(lines[1].starts_with("block=65536 op=put threads=1 tier=Cache  throughput "));
    let others = &lines[2..];
    let is_fused = |line: &&str| line.contains(" throughput_with_checksum ");
    assert!(
        others.len() <= 1 && others.iter().all(is_fused),
        "{}",
        ran.stdout
    );
}

#[test]
fn bench_memory_refuses_what_cannot_be_measured() {
    let home = Home::new();
    for (args, says) in [
        (&["--block", "5000"][..], "a multiple of 4096"),
        (&["--block", "1GiB"], "at most --batch"),
        (&["--block", "lots"], "a size above zero"),
        (&["--size", "100TiB"], "--size: 100 TiB"),
        (&["--size", "1KiB"], "--size: 1024"),
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
fn a_benchmark_makes_nothing_beside_the_nodes_of_devices() {
    let home = Home::new();
    for bench in ["memory", "restore", "reopen", "churn", "files", "scale"] {
        let mut args = vec!["bench", bench, "--dir", "/dev"];
        match bench {
            "memory" => args.extend(["--size", "16MiB", "--batch", "4MiB", "--rounds", "1"]),
            "restore" => args.extend(["--blocks", "64", "--block", "64KiB"]),
            "files" => args.extend(["--size", "1MiB", "--batch", "1MiB", "--block", "64KiB"]),
            "reopen" | "scale" => args.extend(["--blocks", "9000", "--rounds", "1"]),
            _ => args.extend(["--requests", "10"]),
        }
        let ran = home.run(&args);
        assert_eq!(ran.status, 2, "{bench}: {}", ran.stderr);
        assert!(
            ran.stderr.contains("--dir: /dev is not allowed"),
            "{}",
            ran.stderr
        );
    }
    let names = std::fs::read_dir("/dev")
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    assert!(
        !names
            .into_iter()
            .any(|name| name.to_string_lossy().starts_with("kvdepot-bench-"))
    );
}

#[test]
fn bench_alloc_measures_every_workload_against_its_limits() {
    let home = Home::new();
    let (status, rows) = home.json(&["bench", "alloc", "--quick", "--operations", "5000"]);
    assert_eq!(status, 0);
    check_fields(&rows, "alloc");
    let figure = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
    for row in &rows {
        assert!(figure(&row["value"]), "{row}");
        assert_eq!(row["limit"].is_null(), row["ratio"].is_null(), "{row}");
        assert!(row["ratio"].is_null() || figure(&row["ratio"]), "{row}");
    }
    let of = |workload: &str, metric: &str, max_extents: u64| -> Vec<&Value> {
        let wanted = |row: &&Value| {
            let case = &row["case"];
            case["workload"] == workload
                && row["metric"] == metric
                && case["max_extents"] == max_extents
        };
        rows.iter().filter(wanted).collect()
    };
    // Other allocators are measured beside unless this build has none.
    let peers = cfg!(feature = "peers");
    for (workload, max_extents) in [
        ("uniform", 1),
        ("random", 1),
        ("random", 2),
        ("random", 4),
        ("random", 8),
        ("paired", 1),
        ("paired", 4),
        ("trace", 1),
        ("trace", 4),
    ] {
        for metric in ["min", "p99", "p90", "p50", "max", "avg"] {
            let metric = format!("utilisation_{metric}");
            let found = of(workload, &metric, max_extents);
            let expected = if workload == "uniform" { 7 } else { 1 };
            assert_eq!(found.len(), expected, "{workload} {metric} {max_extents}");
            for row in found {
                assert!(row["case"]["pool"].is_u64(), "{row}");
                assert!(row["value"].as_f64().unwrap() <= 1.0, "{row}");
                assert_eq!(row["ratio"].is_number(), peers, "{row}");
            }
            let reference = format!("reference_{metric}");
            assert_eq!(!of(workload, &reference, 1).is_empty(), peers, "{workload}");
        }
        let timed = matches!(max_extents, 1 | 4);
        let time = of(workload, "time", max_extents);
        assert_eq!(!time.is_empty(), timed, "{workload} {max_extents}");
        assert!(time.iter().all(|row| row["ratio"].is_number() == peers));
        let extents = of(workload, "extents_per_allocation", max_extents);
        assert_eq!(extents.len(), usize::from(max_extents > 1), "{workload}");
        for row in extents {
            let extents = row["value"].as_f64().unwrap();
            assert!((1.0..=max_extents as f64).contains(&extents), "{row}");
        }
    }
    for row in of("uniform", "utilisation_min", 1) {
        let (pool, size) = (&row["case"]["pool"], &row["case"]["size"]);
        let (pool, size) = (pool.as_u64().unwrap(), size.as_u64().unwrap());
        let whole = (pool / size * size) as f64 / pool as f64;
        // JSON is read with an error in the last digit.
        let most = whole + 1e-12;
        assert!(row["value"].as_f64().unwrap() <= most, "{row}");
        if peers {
            let best = row["limit"].as_f64().unwrap();
            assert!(whole - 1e-12 <= best && best <= most, "{row}");
        }
    }
    let with = |metric: &str, key: &str| -> Vec<&Value> {
        let rows = rows.iter().filter(|row| row["metric"] == metric);
        rows.filter_map(|row| row["case"].get(key)).collect()
    };
    for metric in ["scaling", "scaling_over_mutex", "utilisation_avg"] {
        assert_eq!(with(metric, "threads"), [1, 2, 4, 8], "{metric}");
    }
    assert_eq!(with("rebuild", "extents"), [5000; 4]);
    assert!(!with("bytes_per_allocation", "size").is_empty());
    let spans = with("spans_hinted_over_unhinted", "turn");
    assert_eq!(spans, [&json!("prompt"), &json!(16), &json!(1)]);
}

#[test]
fn bench_alloc_plays_the_requests_of_a_file() {
    let home = Home::new();
    let path = home.dir.path().join("requests.jsonl");
    let line = |id: u64| {
        format!(
            "{{\"timestamp\": {id}, \"hash_ids\": [0, {id}, {}]}}\n",
            id + 1
        )
    };
    let lines: String = (1..400).map(line).collect();
    std::fs::write(&path, lines).unwrap();
    let file = path.to_str().unwrap();
    let args = ["bench", "alloc", "--workload", "spans", "--trace", file];
    let (status, rows) = home.json(&args);
    assert_eq!(status, 0);
    check_fields(&rows, "alloc");
    let metrics: Vec<&Value> = rows.iter().map(|row| &row["metric"]).collect();
    let spans = [
        "blocks_per_restore",
        "spans_hinted",
        "spans_unhinted",
        "spans_hinted_over_unhinted",
    ];
    assert_eq!(metrics, spans.repeat(3));
    assert!(rows.iter().all(|row| row["case"]["requests"] == 399));
    // Of each prompt two of three blocks are there.
    assert!((rows[0]["value"].as_f64().unwrap() - 2.0).abs() < 0.1);

    std::fs::write(&path, "{\"hash_ids\": [1]}\n{\"ids\": [2]}\n").unwrap();
    let ran = home.run(&args);
    assert_eq!((ran.status, ran.stdout.as_str()), (2, ""));
    assert!(ran.stderr.contains("requests.jsonl:2"), "{}", ran.stderr);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let home = Home::new();
    for (args, says) in [
        (&["alloc", "--rounds", "0"][..], "1 or more"),
        (&["alloc", "--operations", "0"], "1 or more"),
        (&["alloc", "--size", "2GiB"], "at most 268435456"),
        (&["alloc", "--workload", "tape"], "rebuild, spans"),
        (&["alloc", "--trace", "/nowhere/trace"], "/nowhere/trace"),
        (&["churn", "--requests", "0"], "1 or more"),
        (
            &["churn", "--trace", "/dev/null"],
            "at least one request that has blocks",
        ),
        (&["reopen", "--blocks", "99999999999999"], "that fits into"),
        (&["scale", "--blocks", "99999999999999"], "that fits into"),
    ] {
        let all: Vec<&str> = ["bench"].iter().chain(args).copied().collect();
        let ran = home.run(&all);
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(ran.stderr.contains(says), "{args:?}: {}", ran.stderr);
    }
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
fn bench_cluster_moves_what_must_and_asks_two_hosts() {
    let home = Home::new();
    let args = ["bench", "cluster", "--keys", "20000", "--rounds", "1"];
    let (status, rows) = home.json(&args);
    assert_eq!(status, 0);
    check_fields(&rows, "cluster");
    let of = |metric: &str, hosts: u64| -> Vec<f64> {
        let rows = rows.iter();
        rows.filter(|row| row["metric"] == metric && row["case"]["hosts"] == hosts)
            .map(|row| row["value"].as_f64().unwrap())
            .collect()
    };
    for hosts in [3, 1000] {
        let moved = of("moved_over_ideal", hosts);
        // Of 1,000 hosts one that changes has few of so few keys.
        let most = if hosts == 3 { 1.1 } else { 3.0 };
        assert!(
            moved.len() == 6 && moved.iter().all(|moved| *moved < most),
            "{moved:?}"
        );
        assert!(
            of("hosts_asked_max", hosts)
                .iter()
                .all(|asked| *asked <= 2.0)
        );
        assert_eq!(of("found_before_moving", hosts), [1.0; 3]);
        assert!(of("bytes_per_host", hosts)[0] < 400.0);
        assert_eq!(of("lookup_ns", hosts).len(), 1);
    }
    let [least, most] = ["least_over_share", "most_over_share"].map(|metric| of(metric, 3));
    assert!(least[0] > 0.9 && most[0] < 1.1, "{least:?} {most:?}");
    let ran = home.run(&["bench", "cluster", "--keys", "0"]);
    assert_eq!(ran.status, 2, "{}", ran.stderr);
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
fn bench_scale_has_a_row_for_each_figure() {
    let home = Home::new();
    let dir = home.dir.path().to_str().unwrap();
    let args = [
        "bench", "scale", "--quick", "--blocks", "9000", "--rounds", "1", "--path", dir,
    ];
    let (status, rows) = home.json(&args);
    assert_eq!(status, 0);
    check_fields(&rows, "scale");
    let of = |metric: &str| rows.iter().filter(|row| row["metric"] == metric).count();
    let metrics = [
        ("bytes_per_block", 2),
        ("peak_bytes_per_block", 1),
        ("open_s", 1),
        ("lookups_over_table", 4),
        ("wait_ms", 2),
        ("wait_over_unlocked_ms", 2),
        ("lock_hold_ms", 5),
        ("add_device_s", 1),
        ("blocks_page_ms", 1),
        ("puts_over_one_thread", 4),
        ("puts", 6),
    ];
    for (metric, count) in metrics {
        assert_eq!(of(metric), count, "{metric}");
    }
    let of_puts = |row: &&Value| row["metric"].as_str().unwrap().starts_with("puts");
    let (puts, others): (Vec<&Value>, Vec<&Value>) = rows.iter().partition(of_puts);
    assert!(others.iter().all(|row| row["case"]["blocks"] == 9000));
    assert!(puts.iter().all(|row| row["ratio"].as_f64().unwrap() > 0.0));
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
    assert!(ran.stderr.contains("error: a signal"), "{}", ran.stderr);
    assert_eq!(left(&home), Vec::<String>::new());

    let ran = home.interrupt(&["bench", "alloc", "--workload", "paired"]);
    assert_eq!(ran.status, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("error: a signal"), "{}", ran.stderr);

    let dir = home.dir.path().to_str().unwrap();
    let args = [
        "bench", "reopen", "--blocks", "2000", "--rounds", "1000000", "--dir", dir,
    ];
    let ran = home.interrupt(&args);
    assert_eq!(ran.status, 2, "{}", ran.stderr);
    assert_eq!(left(&home), Vec::<String>::new());
}

/// What benchmarks left in the home.
pub(crate) fn left(home: &Home) -> Vec<String> {
    let entries = std::fs::read_dir(home.dir.path()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| name.starts_with("kvdepot-bench"))
        .collect()
}

fn restore(home: &Home, more: &[&str]) -> (i32, Vec<Value>) {
    let dir = home.dir.path().to_str().unwrap();
    let args = [
        "bench",
        "restore",
        "--dir",
        dir,
        "--cold",
        "8MiB",
        "--rounds",
        "1",
        "--workers",
        "2",
        "--blocks",
        "64",
    ];
    home.json(&[&args[..], more].concat())
}

#[test]
fn bench_restore_has_every_metric_of_every_case() {
    let home = Home::new();
    let (status, rows) = restore(&home, &["--block", "64KiB", "--quick"]);
    assert_eq!(status, 0);
    check_fields(&rows, "restore");
    for (metric, unit) in [
        ("processes_over_one", "GB/s"),
        ("first_hit", "ms"),
        ("pin_over_echo", "us"),
    ] {
        let row = rows.iter().find(|row| row["metric"] == metric).unwrap();
        assert_eq!(row["unit"], unit, "{row}");
    }
    for order in ["adjacent", "shuffled", "gapped"] {
        let of = |metric: &str, mode: Option<&str>| {
            let fits = |row: &&Value| {
                let case = &row["case"];
                let here =
                    case["order"] == order && case.get("mode").and_then(Value::as_str) == mode;
                here && row["metric"] == metric
            };
            let mut found = rows.iter().filter(fits);
            let row = found
                .next()
                .unwrap_or_else(|| panic!("{order} {metric} {mode:?}"));
            assert!(found.next().is_none(), "{order} {metric} {mode:?} twice");
            let case = &row["case"];
            assert_eq!(
                [&case["blocks"], &case["block"], &case["workers"]],
                [64, 65536, 2]
            );
            assert!(row["value"].as_f64().unwrap() > 0.0 && row["ratio"].as_f64().unwrap() > 0.0);
            row.clone()
        };
        for mode in ["direct", "staged"] {
            let row = of("throughput", Some(mode));
            assert_eq!(row["unit"], "GB/s");
            // The limit is a rate like the value, and its ratio in the round there was.
            let [value, limit, ratio] =
                ["value", "limit", "ratio"].map(|field| row[field].as_f64().unwrap());
            assert!((value / limit - ratio).abs() < 1e-6 * ratio, "{row}");
            of("cpu_over_copy", Some(mode));
        }
        let quotient = of("staged_over_direct", None)["value"].as_f64().unwrap();
        let speed = |mode| of("throughput", Some(mode))["value"].as_f64().unwrap();
        let expected = speed("staged") / speed("direct");
        assert!((quotient - expected).abs() < 1e-6 * expected, "{order}");
    }
    assert_eq!(rows.len(), 15 + 3);
    assert_eq!(left(&home), Vec::<String>::new());
}

#[test]
fn bench_restore_measures_what_was_asked_for_and_refuses_what_cannot_be() {
    let home = Home::new();
    let narrow = [
        "--block",
        "4KiB",
        "--order",
        "gapped",
        "--metric",
        "staged_over_direct",
    ];
    let (status, rows) = restore(&home, &narrow);
    assert_eq!((status, rows.len()), (0, 1));
    for (args, field) in [
        (&["--block", "5000"][..], "--block"),
        (&["--block", "64MiB"], "--blocks, --block"),
        (&["--block", "4KiB", "--order", "sideways"], "--order"),
    ] {
        let dir = home.dir.path().to_str().unwrap();
        let base = ["bench", "restore", "--dir", dir, "--blocks", "64"];
        let ran = home.run(&[&base[..], args].concat());
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(ran.stderr.contains(field), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn bench_churn_counts_what_is_stored_and_served_beside_exact_lru() {
    let home = Home::new();
    let dir = home.dir.path().to_str().unwrap();
    let (status, rows) = home.json(&["bench", "churn", "--requests", "300", "--dir", dir]);
    assert_eq!(status, 0);
    check_fields(&rows, "churn");
    let of = |engine: &str, policy: &str, metric: &str| {
        let fits = |row: &&Value| {
            let case = &row["case"];
            case["engine_cache"] == engine && case["policy"] == policy && row["metric"] == metric
        };
        let row = rows.iter().find(fits);
        row.map(|row| row["value"].as_f64().unwrap())
    };
    let stored = |policy| of("large", policy, "stored_over_capacity").unwrap();
    assert!(stored("lru") > 3.0 && stored("learned") < 2.0, "{rows:?}");
    for policy in ["lru", "learned"] {
        assert!(of("large", policy, "token_hit_rate").is_none());
        let rate = of("none", policy, "token_hit_rate").unwrap();
        let lru = of("none", "lru", "token_hit_rate").unwrap();
        assert!(rate > 0.95 * lru, "{rows:?}");
        assert!(of("none", policy, "promoted_over_hit").is_some());
    }
    let trace = home.dir.path().join("trace");
    let lines = r#"{"hash_ids": [1, 2, 3]}
{"hash_ids": [1, 4]}
{"hash_ids": [1, 2, 3, 5]}"#;
    std::fs::write(&trace, lines).unwrap();
    let trace = trace.to_str().unwrap();
    let (status, rows) = home.json(&["bench", "churn", "--trace", trace, "--dir", dir]);
    assert_eq!((status, rows.len()), (0, 12));
    assert_eq!(left(&home), Vec::<String>::new());
}

#[test]
fn bench_pressure_says_what_large_prompts_and_calls_do_to_the_others() {
    let home = Home::new();
    let dir = home.dir.path().to_str().unwrap();
    let trace = home.dir.path().join("trace");
    let lines: Vec<String> = (0..300)
        .map(|at| json!({"hash_ids": [0, 1, at % 20 + 2]}).to_string())
        .collect();
    std::fs::write(&trace, lines.join("\n")).unwrap();
    let trace = trace.to_str().unwrap();
    let args = [
        "bench", "pressure", "--quick", "--dir", dir, "--trace", trace, "--tier", "Dax",
    ];
    let (status, rows) = home.json(&args);
    assert_eq!(status, 0);
    check_fields(&rows, "pressure");
    let of = |metric: &str| rows.iter().filter(|row| row["metric"] == metric).count();
    let metrics = ["head_kept", "small_p99_ms", "call_ms", "token_hit_rate"];
    assert_eq!(metrics.map(of), [2, 16, 12, 1]);
    for row in rows.iter().filter(|row| row["metric"] == "head_kept") {
        assert_eq!(row["value"], 1.0, "{row}");
    }
    assert_eq!(left(&home), Vec::<String>::new());
}
