//! `bench files`: every row of every tier, and nothing left behind.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::bench::{check_fields, left};
use crate::home::{Home, Ran};
use kvdepot_testkit::double;
use kvdepot_testkit::s3::Server;
use serde_json::{Value, json};

#[test]
fn bench_files_measures_every_tier_against_raw_files() {
    let home = Home::new();
    let dir = home.dir.path().to_str().unwrap();
    let (status, rows) = home.json(&[
        "bench", "files", "--dir", dir, "--size", "4MiB", "--batch", "1MiB", "--block", "64KiB",
        "--depth", "1", "--depth", "8", "--rounds", "1",
    ]);
    assert_eq!(status, 0);
    check_fields(&rows, "files");
    let of = |metric: &'static str| rows.iter().filter(move |row| row["metric"] == metric);
    let moved = |metric: &'static str| -> Vec<Value> {
        let case = |row: &Value| {
            let case = &row["case"];
            assert_eq!(case["block"], 65536, "{row}");
            assert!(
                row["limit"].is_number() && row["ratio"].is_number(),
                "{row}"
            );
            json!([case["tier"], case["direct"], case["depth"]])
        };
        of(metric).map(case).collect()
    };
    let (cached, direct) = ([false], [true, false]);
    let posix = |directs: &[bool]| -> Vec<Value> {
        let each = directs.iter();
        each.flat_map(|direct| [1, 8].map(|depth| json!(["Posix", direct, depth])))
            .collect()
    };
    let mut all = posix(&direct);
    all.extend([1, 8].map(|depth| json!(["Nvme", true, depth])));
    for metric in ["dump", "load_cold", "cpu_s_per_gib"] {
        assert_eq!(moved(metric), all, "{metric}");
    }
    assert_eq!(moved("load_warm"), posix(&cached));
    let commits: Vec<_> = of("commit_us")
        .map(|row| &row["case"]["durability"])
        .collect();
    assert_eq!(commits, ["process", "power", "process", "power"]);
    for (metric, count) in [("lookup_hit", 1), ("lookup_miss", 1), ("lookup_filter", 2)] {
        assert_eq!(of(metric).count(), count, "{metric}");
    }
    assert_eq!(of("hot_through_pipeline").count(), 1);
    for (metric, unit) in [("keyed_over_plain", "GB/s"), ("keyed_cpu_s_per_gib", "s")] {
        let told = of(metric).map(|row| {
            assert!(
                row["limit"].is_number() && row["ratio"].is_number(),
                "{row}"
            );
            json!([row["case"]["block"], row["case"]["depth"], row["unit"]])
        });
        let expected = [1, 8].map(|depth| json!([1 << 20, depth, unit]));
        assert_eq!(told.collect::<Vec<_>>(), expected, "{metric}");
    }
    assert_eq!(left(&home), Vec::<String>::new());
}

/// How many there are below a folder.
fn files(path: &Path) -> usize {
    let Ok(names) = std::fs::read_dir(path) else {
        return 1;
    };
    names.map(|name| files(&name.unwrap().path())).sum()
}

#[test]
fn bench_files_measures_a_bucket_against_a_plain_client_and_leaves_it_empty() {
    const KEY: (&str, &str) = ("me", "secret");
    let home = Home::new();
    let root = home.path("objects");
    std::fs::create_dir_all(root.join("bucket")).unwrap();
    let server = Server::start(&root, KEY, 2);
    let args = [
        "bench",
        "files",
        "--tier",
        "S3",
        "--url",
        "s3://bucket/kv",
        "--size",
        "2MiB",
        "--batch",
        "1MiB",
        "--block",
        "64KiB",
        "--depth",
        "4",
        "--rounds",
        "1",
        "--json",
    ];
    let mut command = home.command(&args);
    command
        .env("AWS_ENDPOINT", server.endpoint())
        .env("AWS_ACCESS_KEY_ID", KEY.0)
        .env("AWS_SECRET_ACCESS_KEY", KEY.1);
    let ran = Ran::of(command.output().unwrap());
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let rows = ran.rows();
    check_fields(&rows, "files");
    let metrics: Vec<_> = rows.iter().map(|row| &row["metric"]).collect();
    let of_both = ["cpu_s_per_gib", "requests_per_block"];
    let hung = ["hung_over_cache"; 2];
    let wanted = [
        ["load_cold"].as_slice(),
        &of_both,
        &["dump"],
        &of_both,
        &hung,
    ]
    .concat();
    assert_eq!(metrics, wanted);
    check_hung(&rows[6..], "Cache|S3");
    for row in &rows {
        assert!(
            row["metric"] == hung[0] || row["case"]["tier"] == "S3",
            "{row}"
        );
        assert!(
            row["limit"].is_number() && row["ratio"].is_number(),
            "{row}"
        );
    }
    assert_eq!(files(&root.join("bucket")), 0, "objects are left");
    let ran = home.run(&["bench", "files", "--tier", "S3"]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("--url"), "{}", ran.stderr);
    let ran = home.run(&["bench", "files", "--url", "s3://bucket/kv"]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("with --tier S3"), "{}", ran.stderr);
    let ran = home.run(&["bench", "files", "--tier", "S3", "--url", "bucket/kv"]);
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("s3.url"), "{}", ran.stderr);
}

/// Hits that wait for nothing: none takes a time-out.
fn check_hung(rows: &[Value], pipeline: &str) {
    let hits: Vec<_> = rows.iter().map(|row| &row["case"]["hits"]).collect();
    assert_eq!(hits, ["median", "p99"]);
    for row in rows {
        assert_eq!([&row["case"]["pipeline"], &row["unit"]], [pipeline, "us"]);
        assert!(
            row["limit"].is_number() && row["ratio"].is_number(),
            "{row}"
        );
        assert!(row["value"].as_f64().unwrap() < 100_000.0, "{row}");
    }
}

/// The command over the double of 3FS's library, of which a folder of this home is the mount.
fn over_3fs(home: &Home, args: &[&str]) -> (Command, PathBuf) {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| double::build("usrbio"));
    let mount = home.path("mount");
    std::fs::create_dir_all(&mount).unwrap();
    let first = ["bench", "files", "--tier", "Ds3fs", "--json", "--path"];
    let mut command = home.command(&first);
    command
        .args([&mount, Path::new("--library"), library])
        .args(args)
        .env("KVDEPOT_DOUBLE_3FS", &mount);
    (command, mount)
}

#[test]
fn bench_files_measures_a_3fs_against_posix_on_its_file_system() {
    let home = Home::new();
    let small = ["--size", "2MiB", "--batch", "1MiB", "--rounds", "1"];
    let cases = ["--block", "64KiB", "--depth", "1", "--depth", "4"];
    for direct in ["0", "1"] {
        let (mut command, mount) = over_3fs(&home, &[small.as_slice(), &cases].concat());
        command.env("KVDEPOT_DOUBLE_3FS_DIRECT", direct);
        let ran = Ran::of(command.output().unwrap());
        assert_eq!(ran.status, 0, "{}", ran.stderr);
        let rows = ran.rows();
        check_fields(&rows, "files");
        let named = |row: &Value| json!([row["case"]["depth"], row["metric"], row["case"]["op"]]);
        let each = |depth: u64| {
            let cpu = |op: &str| json!([depth, "cpu_s_per_gib", op]);
            let rate = |metric: &str| json!([depth, metric, null]);
            [rate("load_cold"), cpu("load"), rate("dump"), cpu("dump")]
        };
        let found: Vec<Value> = rows.iter().map(named).collect();
        assert_eq!(found, [each(1), each(4)].concat());
        for row in &rows {
            assert_eq!(
                [&row["case"]["tier"], &row["limit_name"]],
                ["Ds3fs", "Posix"]
            );
            assert!(
                row["value"].as_f64().unwrap() > 0.0 && row["ratio"].is_number(),
                "{row}"
            );
        }
        let names = std::fs::read_dir(&mount).unwrap();
        let names: Vec<_> = names.map(|name| name.unwrap().file_name()).collect();
        assert_eq!(names, ["3fs-virt"], "files are left");
    }
    for (args, says) in [
        (&["--tier", "Ds3fs"][..], "--path"),
        (&["--tier", "Ds3fs", "--path", "."], "ds3fs.library"),
    ] {
        let ran = home.run(&[&["bench", "files", "--block", "64KiB"], args, &small].concat());
        assert_eq!(ran.stdout, "", "{args:?}");
        assert!(
            ran.status != 0 && ran.stderr.contains(says),
            "{args:?}: {}",
            ran.stderr
        );
    }
    assert_eq!(left(&home), Vec::<String>::new());
}

#[test]
fn bench_files_measures_hits_before_a_3fs_that_hangs_and_no_other() {
    let home = Home::new();
    let small = ["--size", "2MiB", "--batch", "1MiB", "--rounds", "1"];
    let case = ["--block", "64KiB", "--metric", "hung_over_cache"];
    let args = [small.as_slice(), &case].concat();
    let (mut command, _) = over_3fs(&home, &args);
    let ran = Ran::of(command.output().unwrap());
    assert!(
        ran.status != 0 && ran.stderr.contains("Ds3fs responded"),
        "{}",
        ran.stderr
    );
    command.env("KVDEPOT_DOUBLE_3FS_LOSE_ALL", "1");
    let ran = Ran::of(command.output().unwrap());
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    check_fields(&ran.rows(), "files");
    check_hung(&ran.rows(), "Cache|Ds3fs");
    assert_eq!(left(&home), Vec::<String>::new());
}

#[test]
fn bench_files_says_how_much_room_it_needs() {
    let home = Home::new();
    let dir = home.dir.path().to_str().unwrap();
    for (args, says) in [
        (["--size", "1024TiB", "--block", "64KiB"], " needed, "),
        (
            ["--size", "1MiB", "--block", "1MiB"],
            "at least 2 MiB (two blocks)",
        ),
        (["--rounds", "0", "--block", "64KiB"], "--rounds"),
        (["--size", "1MiB", "--block", "1000"], "a multiple of 4096"),
    ] {
        let ran = home.run(&[&["bench", "files", "--dir", dir], &args[..]].concat());
        assert_eq!((ran.status, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(ran.stderr.contains(says), "{args:?}: {}", ran.stderr);
    }
    assert_eq!(left(&home), Vec::<String>::new());
}
