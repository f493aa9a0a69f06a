//! `bench transfer`: a row of every metric, and what others drive it by.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use crate::bench::check_fields;
use crate::home::Home;
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
