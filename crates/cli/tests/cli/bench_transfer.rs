//! `bench transfer`: a row of every metric, and what others drive it by.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::bench::check_fields;
use crate::home::{Home, catches_signals, signal};
use serde_json::{Value, json};

/// Metrics of batches, two for each op where checksums are told apart.
const BATCHES: [(&str, usize); 6] = [
    ("batch_over_tcp", 4),
    ("cpu_s_per_gb", 4),
    ("over_memcpy", 2),
    ("total_on_over_off", 2),
    ("batch_over_one_by_one", 2),
    ("one_by_one_over_pingpong", 2),
];

#[test]
fn bench_transfer_measures_batches_against_plain_streams() {
    let home = Home::new();
    let small = [
        "bench",
        "transfer",
        "--batch",
        "1/30",
        "--message",
        "4KiB",
        "--rounds",
        "1",
    ];
    let mut args = small.to_vec();
    for (metric, _) in BATCHES {
        args.extend(["--metric", metric]);
    }
    args.extend(["--metric", "messages_per_s", "--metric", "read_rtt_us"]);
    let (status, rows) = home.json(&args);
    assert_eq!(status, 0);
    check_fields(&rows, "transfer");
    let of = |metric: &str| -> Vec<&Value> {
        let is_of = |row: &&Value| row["metric"] == metric;
        rows.iter().filter(is_of).collect()
    };
    for (metric, count) in BATCHES {
        assert_eq!(of(metric).len(), count, "{metric}");
        for row in of(metric) {
            let (case, limit) = (&row["case"], &row["limit"]);
            assert_eq!(case["bytes"], 999_990, "{row}");
            assert!(limit.is_number() && row["ratio"].is_number(), "{row}");
            for field in ["op", "transport", "streams", "checksum", "where", "plan"] {
                assert!(case.get(field).is_some(), "{field} in {row}");
            }
        }
    }
    assert_eq!(of("messages_per_s").len(), 2);
    assert_eq!(of("read_rtt_us").len(), 2);
    assert_eq!(of("read_rtt_us")[0]["case"]["bytes"], 4096);
    assert_eq!(rows.len(), 20);
}

#[test]
fn lines_tell_it_which_batches_to_move() {
    let home = Home::new();
    let mut command = home.command(&["bench", "transfer", "--drive", "1000000"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut tell = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    for line in ["write 1000 1000 off", "read 40000 25 on"] {
        writeln!(tell, "{line}").unwrap();
        let answer = lines.next().unwrap().unwrap();
        let seconds: Vec<f64> = answer
            .split(' ')
            .map(|word| word.parse().unwrap())
            .collect();
        assert!(seconds.len() == 2 && seconds[0] > 0.0, "{answer}");
    }
    writeln!(tell, "write 1000 1001 off").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2));
    let refused = home.run(&["bench", "transfer", "--batch", "1/2000"]);
    assert_eq!(json!([refused.status, refused.stdout]), json!([2, ""]));
}

/// What each end of a target comes to, with a batch that is large enough to be caught in its
/// middle.
const RESOLVE: [&str; 8] = [
    "bench",
    "transfer",
    "--metric",
    "resolve_ms",
    "--batch",
    "64/4000",
    "--rounds",
    "1",
];

fn check_resolved(rows: &[Value], place: &str) {
    check_fields(rows, "transfer");
    let rows: Vec<_> = rows
        .iter()
        .filter(|row| row["metric"] == "resolve_ms")
        .collect();
    let ends: Vec<_> = rows
        .iter()
        .map(|row| json!([row["case"]["op"], row["case"]["what"]]))
        .collect();
    let all = json!([
        ["write", "killed"],
        ["write", "stopped"],
        ["read", "killed"],
        ["read", "stopped"]
    ]);
    assert_eq!(json!(ends), all);
    for row in rows {
        assert_eq!(row["case"]["where"], place);
        assert_eq!(row["case"]["chunks"], 4000);
        assert_eq!((&row["limit"], &row["unit"]), (&json!(600.0), &json!("ms")));
        assert!(row["value"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn bench_transfer_measures_what_a_target_costs_that_ends() {
    let (status, rows) = Home::new().json(&RESOLVE);
    assert_eq!(status, 0);
    check_resolved(&rows, "loopback");
}

/// Names of network namespaces that a process has made; none where there is no `ip`.
fn spaces(pid: u32) -> Vec<String> {
    let Ok(ran) = Command::new("ip").args(["netns", "list"]).output() else {
        return Vec::new();
    };
    let listed = String::from_utf8(ran.stdout).unwrap();
    let names = listed
        .lines()
        .map(|line| line.split(' ').next().unwrap().to_owned());
    let own = format!("kvdepot-bench-{pid}-");
    names.filter(|name| name.starts_with(&own)).collect()
}

/// Why a command has no namespaces to measure between, where that is no fault of its own.
fn why_not(stderr: &str) -> Option<&str> {
    let said = stderr.split("--where veth: ").nth(1)?;
    let reasons = ["only root", "is not installed", "not permitted"];
    let is_reason = reasons.iter().any(|reason| said.contains(reason));
    is_reason.then(|| said.trim())
}

#[expect(clippy::print_stdout, reason = "who runs it may want to know")]
fn skipped(reason: &str) {
    println!("skipped: {reason}");
}

#[test]
fn bench_transfer_measures_between_network_namespaces() {
    let home = Home::new();
    let more = [
        "batch_over_tcp",
        "messages_per_s",
        "read_rtt_over_pingpong",
        "read_rtt_us",
    ];
    let mut args = RESOLVE.to_vec();
    args.extend(["--where", "veth", "--message", "4KiB", "--json"]);
    args.extend(more.iter().flat_map(|metric| ["--metric", metric]));
    let ran = home.run(&args);
    if let Some(reason) = why_not(&ran.stderr) {
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""));
        return skipped(reason);
    }
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let rows = ran.rows();
    check_resolved(&rows, "veth");
    for (metric, count) in more.into_iter().zip([4, 2, 1, 1]) {
        let of: Vec<_> = rows.iter().filter(|row| row["metric"] == metric).collect();
        assert_eq!(of.len(), count, "{metric}");
        for row in of {
            let case = &row["case"];
            assert_eq!(
                json!([case["where"], case["transport"]]),
                json!(["veth", "tcp"])
            );
            assert!(
                row["limit"].is_number() && row["ratio"].is_number(),
                "{row}"
            );
        }
    }
    assert_eq!(rows.len(), 12);
    let refused = home.run(&[
        "bench",
        "transfer",
        "--where",
        "veth",
        "--metric",
        "submit_ns",
    ]);
    assert_eq!(refused.status, 2);
    assert!(
        refused.stderr.contains("--metric: submit_ns"),
        "{}",
        refused.stderr
    );
}

#[test]
fn an_interrupted_bench_transfer_leaves_no_network_namespaces() {
    let home = Home::new();
    let mut args = RESOLVE;
    *args.last_mut().unwrap() = "1000";
    let mut command = home.command(&args);
    command.args(["--where", "veth"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pid = child.id();
    let is_measuring = || spaces(pid).len() >= 2 && catches_signals(pid);
    while !is_measuring() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(10));
    }
    if child.try_wait().unwrap().is_none() {
        signal(pid, "-INT");
    }
    let ran = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    match why_not(&stderr) {
        Some(reason) => skipped(reason),
        None => assert!(stderr.contains("interrupted"), "{stderr}"),
    }
    assert_eq!(spaces(pid), Vec::<String>::new());
}
