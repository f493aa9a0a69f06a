//! UCM's configuration files, opened as they are.

use std::path::{Path, PathBuf};

use crate::common::{has, namespace, put};
use kvdepot_store::config::ucm::{CONNECTOR, Fate, TOP};
use kvdepot_store::config::{read_below, read_beside, read_yaml};
use kvdepot_store::{Config, Depot};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn written(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("ucm.yaml");
    std::fs::write(&path, text).unwrap();
    path
}

fn connector(config: &str) -> String {
    format!(
        "ucm_connectors:\n  - ucm_connector_name: \"UcmPipelineStore\"\n    \
         ucm_connector_config: {config}\n"
    )
}

fn translated(text: &str) -> Result<Value, String> {
    let dir = tempfile::tempdir().unwrap();
    read_yaml(&written(dir.path(), text)).map_err(|error| error.to_string())
}

#[test]
fn the_published_file_becomes_a_pipeline() {
    let published = "ucm_connectors:\n  - ucm_connector_name: \"UcmPipelineStore\"\n    \
                     ucm_connector_config:\n      store_pipeline: \"Cache|Ds3fs\"\n      \
                     storage_backends: \"/mount/3fs\"\n\nload_only_first_rank: false\n";
    let options = translated(published).unwrap();
    assert_eq!(options["pipeline"], "Cache|Ds3fs");
    assert_eq!(options["ds3fs"], json!({"path": "/mount/3fs"}));
    assert_eq!(options["tier_timeout"], "30000ms");
    assert!(options["cache"]["capacity"].as_u64().unwrap() <= 64_000_000_000);
}

#[test]
fn keys_keep_their_meaning() {
    let given = "{store_pipeline: Cache|Ds3fs, storage_backends: /m, io_direct: true, \
                 stream_number: 8, waiting_queue_depth: 64, running_queue_depth: 2048, \
                 timeout_ms: 1500, buffer_size: 1GiB, posix_capacity_gb: 3}";
    let options = translated(&connector(given)).unwrap();
    let of_far = json!({
        "path": "/m", "capacity": 3 * GIB, "stream_number": 8, "waiting_queue_depth": 64,
        "running_queue_depth": 2048,
    });
    assert_eq!(options["ds3fs"], of_far);
    assert_eq!(options["cache"]["capacity"], GIB);
    assert_eq!(options["tier_timeout"], "1500ms");
    let given = "{store_pipeline: Cache|Posix, storage_backends: /m, io_direct: false, \
                 stream_number: 8, cache_buffer_capacity_gb: 1, posix_capacity_gb: 0}";
    let options = translated(&connector(given)).unwrap();
    assert_eq!(options["posix"], json!({"path": "/m", "direct": "false"}));
    assert_eq!(options["cache"]["capacity"], GIB);
    let alone = "{store_pipeline: Posix, storage_backends: /m, buffer_size: 64GB}";
    assert_eq!(
        translated(&connector(alone)).unwrap().get("cache"),
        None,
        "it has none"
    );
    let older = "ucm_connectors: [{ucm_connector_name: UcmNfsStore, ucm_connector_config: \
                 {storage_backends: /mnt/test, use_direct: true}}]";
    let options = translated(older).unwrap();
    assert_eq!(options["pipeline"], "Cache|Posix");
    assert_eq!(
        options["posix"],
        json!({"path": "/mnt/test", "direct": "true"})
    );
}

#[test]
fn a_cache_beyond_the_memory_is_made_smaller() {
    let given = "{store_pipeline: Cache|Posix, storage_backends: /m, buffer_size: 900TiB}";
    let options = translated(&connector(given)).unwrap();
    let taken = options["cache"]["capacity"].as_u64().unwrap();
    assert!(taken > 0 && taken < 900 << 40);
}

#[test]
fn what_is_given_beside_it_holds_and_only_its_tiers_are_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let config = "{store_pipeline: Cache|Ds3fs, storage_backends: /m, stream_number: 8, \
                  buffer_size: 900TiB, timeout_ms: 1500}";
    let path = written(dir.path(), &connector(config));
    let with = |given: Value| read_below(&path, given).unwrap();
    let given = json!({"cache": {"capacity": "2GiB"}, "ds3fs": {"fan_out": 16}});
    let options = with(given);
    assert_eq!(options["cache"], json!({"capacity": "2GiB"}));
    assert_eq!(options["ds3fs"]["fan_out"], 16);
    assert_eq!(options["ds3fs"]["path"], "/m");
    for (pipeline, expected) in [
        (
            "Ds3fs",
            json!({"ds3fs": {"path": "/m", "stream_number": 8}, "tier_timeout": "1500ms"}),
        ),
        (
            "Posix",
            json!({"posix": {"path": "/m"}, "tier_timeout": "1500ms"}),
        ),
        ("Dax", json!({"tier_timeout": "1500ms"})),
        ("unix:/run/kvdepot.sock", json!({})),
    ] {
        let mut options = with(json!({"pipeline": pipeline}));
        let given = options.as_object_mut().unwrap().remove("pipeline");
        assert_eq!(given, Some(pipeline.into()));
        assert_eq!(options, expected, "{pipeline}");
    }
    // Given before, it is not said how much of it there could be.
    let given = json!({"cache": {"capacity": "2GiB"}});
    let read = read_beside(&path, &given).unwrap();
    assert!(read.is_ucms && read.options.get("cache").is_none());
    std::fs::write(&path, "lanes: 2").unwrap();
    assert!(!read_beside(&path, &given).unwrap().is_ucms);
}

#[test]
fn what_cannot_be_done_as_it_says_is_refused_by_name() {
    let base = "store_pipeline: Cache|Posix, storage_backends: /m";
    let with = |more: &str| connector(&format!("{{{base}, {more}}}"));
    for (text, says) in [
        (with("strem_number: 3"), "did you mean \"stream_number\"?"),
        (with("stream_number: 0"), "a whole number, 1 or more"),
        (with("io_direct: maybe"), "io_direct"),
        (with("use_gdr: true"), "use_gdr"),
        (with("buffer_size: much"), "buffer_size"),
        (
            with("buffer_size: 1GiB, cache_buffer_capacity_gb: 1"),
            "either buffer_size or cache_buffer_capacity_gb",
        ),
        (
            with("io_direct: true, use_direct: true"),
            "io_direct or use_direct",
        ),
        (
            with("posix_capacity_gb: 99999999999999"),
            "posix_capacity_gb",
        ),
        (
            connector("{store_pipeline: Posix, storage_backends: /m, buffer_size: much}"),
            "64GiB",
        ),
        (
            connector("{store_pipeline: Cache|Tape}"),
            "Cache|Ds3fs, Cache|Posix",
        ),
        (connector("{storage_backends: /m}"), "store_pipeline"),
        (
            connector("{store_pipeline: Posix, storage_backends: \"/a:/b\"}"),
            "one directory",
        ),
        (format!("{}use_lite: true\n", with("")), "use_lite"),
        (
            format!("{}load_only_first_rank: true\n", with("")),
            "load_only_first_rank",
        ),
        (
            format!("{}use_layerwize: true\n", with("")),
            "did you mean \"use_layerwise\"?",
        ),
        ("ucm_connectors: []\n".into(), "exactly one connector"),
        (
            "ucm_connectors: [{ucm_connector_name: X}]\n".into(),
            "UcmPipelineStore",
        ),
        (
            "ucm_connectors: [{ucm_conector_name: X}]\n".into(),
            "\"ucm_connector_name\"",
        ),
    ] {
        let error = translated(&text).unwrap_err();
        assert!(error.contains(says), "{text}: {error}");
    }
}

#[test]
fn a_file_of_ucms_opens_and_keeps_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let backend = dir.path().join("backend");
    let given = format!(
        "{{store_pipeline: Cache|Posix, storage_backends: {}, io_direct: true, \
         cache_buffer_capacity_gb: 1, timeout_ms: 20000, posix_io_engine: aio}}",
        backend.display()
    );
    let path = written(dir.path(), &connector(&given));
    for round in 0..2 {
        let depot = Depot::open(&Config::from_file(&path).unwrap()).unwrap();
        let space = namespace(&depot);
        if round == 0 {
            assert_eq!(put(&space, &[7], 70_000), [true]);
        }
        // The second finds it on the disk, and the capacity that the first has chosen.
        assert!(has(&space, &[7], 70_000));
        depot.close();
    }
}

/// The page has a row for every key, and no others.
#[test]
fn the_page_says_what_becomes_of_every_key() {
    let page = include_str!("../../../../docs/ucm.md");
    let mut rows = Vec::new();
    for (key, fate) in TOP.iter().chain(CONNECTOR) {
        let row = match fate {
            Fate::Option(option) => format!("| `{key}` | `{option}`"),
            Fate::Otherwise(how) => format!("| `{key}` | nothing: {how} |"),
            Fate::Only(only, why) => format!("| `{key}` | `{only}` only: {why} |"),
        };
        assert!(page.contains(&row), "docs/ucm.md lacks: {row}");
        rows.push(row);
    }
    assert_eq!(page.matches("\n| `").count(), rows.len());
}
