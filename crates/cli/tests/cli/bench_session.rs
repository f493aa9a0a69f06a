//! `bench session`: every row, and nothing left behind.

use crate::bench::{check_fields, left};
use crate::home::Home;
use serde_json::Value;

#[test]
fn bench_session_measures_saves_and_restores_against_plain_files() {
    let home = Home::new();
    let dir = home.dir.path().to_str().unwrap();
    let (status, rows) = home.json(&[
        "bench",
        "session",
        "--dir",
        dir,
        "--bytes",
        "32MiB",
        "--sessions",
        "20",
        "--rounds",
        "1",
    ]);
    assert_eq!(status, 0);
    check_fields(&rows, "session");
    let of = |metric: &'static str| -> Vec<&Value> {
        rows.iter().filter(|row| row["metric"] == metric).collect()
    };
    for (metric, count) in [
        ("save_over_raw", 6),
        ("save_over_staged", 6),
        ("restore_over_raw", 4),
        ("restore_warm_over_memcpy", 3),
        ("write_amplification", 2),
    ] {
        let rows = of(metric);
        assert_eq!(rows.len(), count, "{metric}");
        for row in rows {
            assert!(
                row["limit"].is_number() && row["ratio"].is_number(),
                "{row}"
            );
        }
    }
    let peaks = of("disk_peak_over_payload");
    assert_eq!(peaks.len(), 9);
    // What is written is what there is: nothing is written twice.
    for row in of("write_amplification") {
        assert!(row["value"].as_f64() < row["limit"].as_f64(), "{row}");
    }
    // One step of 500 tokens fits, in four ways.
    let saves = of("checkpoint_save_ms");
    let paths: Vec<&Value> = saves.iter().map(|row| &row["case"]["path"]).collect();
    assert_eq!(paths, ["staged", "direct", "delta", "direct"]);
    assert_eq!(of("restore_ms").len(), 1);
    for metric in ["decode_stall_share", "decode_stall_p999_ms"] {
        let stall = of(metric)[0];
        assert_eq!(stall["case"]["bytes"], 32 << 20);
        assert_eq!(stall["case"]["slice"], 1 << 20);
        assert!(stall["limit"].is_number(), "{stall}");
    }
    assert_eq!(of("lookup_us")[0]["case"]["sessions"], 20);
    assert!(left(&home).is_empty());
}

#[test]
fn bench_session_refuses_what_it_cannot_measure() {
    let home = Home::new();
    for (option, value, allowed) in [
        ("--bytes", "1000", "whole MiB"),
        ("--bytes", "64TiB", "needed"),
        ("--rounds", "0", "1 or more"),
        ("--sessions", "0", "1 or more"),
    ] {
        let ran = home.run(&["bench", "session", option, value]);
        assert_eq!(ran.status, 2, "{option} {value}");
        assert!(ran.stderr.contains(option), "{}", ran.stderr);
        assert!(ran.stderr.contains(allowed), "{}", ran.stderr);
    }
}
