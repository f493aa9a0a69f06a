//! The depot from outside: what is put comes back, wherever it is.

use std::path::Path;
use std::time::Duration;

use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Key, Namespace, NamespaceSpec, Outcome};
use serde_json::json;

fn key(number: u64) -> Key {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    Key(key)
}

fn payload(number: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (number as usize * 31 + at * 7 + at / 251) as u8)
        .collect()
}

fn config(pipeline: &str, dir: &Path, cache: &str, dax: &str) -> Config {
    let mut settings = json!({"socket": dir.join("s").to_str().unwrap(), "lock_wait": "0s"});
    if pipeline.contains("Cache") {
        settings["cache"] = json!({"capacity": cache});
    }
    if pipeline.contains("Dax") {
        settings["dax"] = json!({"path": dir.join("arena").to_str().unwrap(), "capacity": dax});
    }
    Config::new(pipeline, &settings).unwrap()
}

fn namespace(depot: &Depot) -> Namespace {
    let spec = NamespaceSpec {
        model: "m".into(),
        dtype: "float32".into(),
        block_tokens: 16,
        ..NamespaceSpec::default()
    };
    depot.namespace(&spec).unwrap()
}

fn put(ns: &Namespace, numbers: std::ops::Range<u64>, len: usize) -> Vec<bool> {
    let keys = numbers.clone().map(key).collect();
    let buffers = BlockBuffers::whole(numbers.map(|n| Buffer::from_vec(payload(n, len))));
    ns.put(keys, buffers)
        .unwrap()
        .wait(Some(Duration::from_secs(30)))
        .unwrap()
}

fn get(ns: &Namespace, numbers: std::ops::Range<u64>, len: usize) -> Vec<bool> {
    let keys = numbers.clone().map(key).collect();
    let buffers: Vec<Buffer> = numbers
        .clone()
        .map(|_| Buffer::from_vec(vec![0; len]))
        .collect();
    let task = ns.get(keys, BlockBuffers::whole(buffers.clone())).unwrap();
    let got = task.wait(Some(Duration::from_secs(30))).unwrap();
    for ((number, buffer), got) in numbers.zip(&buffers).zip(&got) {
        assert!(
            !got || buffer.to_vec() == payload(number, len),
            "wrong bytes for {number}"
        );
    }
    got
}

#[test]
fn blocks_come_back_through_every_pipeline() {
    for pipeline in ["Cache", "Dax", "Cache|Dax"] {
        for len in [1, 100, 4096, 70_000, 3 << 20] {
            let dir = tempfile::tempdir().unwrap();
            let depot = Depot::open(&config(pipeline, dir.path(), "64MiB", "64MiB")).unwrap();
            let ns = namespace(&depot);
            assert_eq!(put(&ns, 0..8, len), [true; 8], "{pipeline} {len}");
            assert_eq!(get(&ns, 0..10, len)[..8], [true; 8], "{pipeline} {len}");
            assert_eq!(get(&ns, 8..10, len), [false; 2]);
            assert_eq!(ns.prefix(&(0..10).map(key).collect::<Vec<_>>()).unwrap(), 8);
        }
    }
}

#[test]
fn a_reopened_arena_serves_what_was_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let config = config("Cache|Dax", dir.path(), "8MiB", "64MiB");
    let depot = Depot::open(&config).unwrap();
    assert_eq!(put(&namespace(&depot), 0..100, 10_000), [true; 100]);
    depot.close();
    let depot = Depot::open(&config).unwrap();
    assert_eq!(depot.opening().blocks, 100);
    let ns = namespace(&depot);
    assert_eq!(get(&ns, 0..100, 10_000), [true; 100]);
    assert_eq!(depot.stats().hit_blocks, [0, 100]);
    // Promotion runs in the background; the near tier answers once it is done.
    for _ in 0..1000 {
        if depot.stats().promoted_blocks > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(depot.stats().promoted_blocks > 0);
}

#[test]
fn a_put_larger_than_the_near_tier_bypasses_it() {
    let dir = tempfile::tempdir().unwrap();
    let depot = Depot::open(&config("Cache|Dax", dir.path(), "1MiB", "64MiB")).unwrap();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, 0..3, 4 << 20), [true; 3]);
    assert_eq!(get(&ns, 0..3, 4 << 20), [true; 3]);
    assert_eq!(
        put(&ns, 10..60, 300_000),
        [true; 50],
        "the queue overflows, nothing is lost"
    );
    assert_eq!(get(&ns, 10..60, 300_000), [true; 50]);
}

#[test]
fn a_full_arena_evicts_tails_of_old_prompts_first() {
    let dir = tempfile::tempdir().unwrap();
    let depot = Depot::open(&config("Dax", dir.path(), "", "4MiB")).unwrap();
    let ns = namespace(&depot);
    for prompt in 0..12 {
        assert_eq!(put(&ns, prompt * 10..prompt * 10 + 5, 90_000), [true; 5]);
    }
    let kept = |prompt: u64| {
        let keys: Vec<Key> = (prompt * 10..prompt * 10 + 5).map(key).collect();
        let found = ns.contains(&keys).unwrap();
        let kept = found.iter().take_while(|found| **found).count();
        assert!(
            found[kept..].iter().all(|found| !found),
            "tails go before heads: {found:?}"
        );
        kept
    };
    let kept: Vec<usize> = (0..12).map(kept).collect();
    assert_eq!(kept[0], 0, "{kept:?}");
    assert_eq!(kept[4..], [5; 8], "{kept:?}");
    assert!(
        kept.is_sorted() && kept.iter().any(|kept| (1..5).contains(kept)),
        "{kept:?}"
    );
}

#[test]
fn wrong_lengths_and_absent_keys_name_their_reason() {
    let dir = tempfile::tempdir().unwrap();
    let depot = Depot::open(&config("Cache", dir.path(), "4MiB", "")).unwrap();
    let ns = namespace(&depot);
    put(&ns, 0..1, 1000);
    let buffers = BlockBuffers::whole([999, 1000].map(|len| Buffer::from_vec(vec![0; len])));
    let task = ns.get(vec![key(0), key(1)], buffers).unwrap();
    assert_eq!(task.wait(None).unwrap(), [false, false]);
    assert_eq!(task.outcomes(), [Outcome::Length, Outcome::Miss]);
}

#[test]
fn a_put_of_a_key_that_is_stored_is_true_and_keeps_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let depot = Depot::open(&config("Cache|Dax", dir.path(), "1MiB", "4MiB")).unwrap();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, 0..1, 5000), [true]);
    let other = BlockBuffers::whole([Buffer::from_vec(payload(1, 5000))]);
    let task = ns.put(vec![key(0)], other).unwrap();
    assert_eq!(task.wait(Some(Duration::from_secs(30))).unwrap(), [true]);
    assert_eq!(get(&ns, 0..1, 5000), [true]);
}

#[test]
fn a_repeated_key_is_removed_and_counted_once_whatever_the_tiers_are() {
    for pipeline in [
        "Cache",
        "Dax",
        "Nvme",
        "Cache|Dax",
        "Cache|Nvme",
        "Posix",
        "Ds3fs",
        "Cache|Posix",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = json!({"socket": "off", "lanes": 2});
        for tier in pipeline.split('|') {
            let section = tier.to_lowercase();
            settings[&section] = json!({"capacity": "8MiB"});
            if tier != "Cache" {
                settings[&section]["path"] = json!(dir.path().join(&section));
            }
            if tier == "Ds3fs" {
                // On a mount of another file system.
                settings[&section]["library"] = json!("posix");
            }
        }
        // It may take longer than a machine stands still.
        settings["lookup_timeout"] = json!("60s");
        settings["tier_timeout"] = json!("60s");
        let depot = Depot::open(&Config::new(pipeline, &settings).unwrap()).unwrap();
        let ns = namespace(&depot);
        assert_eq!(put(&ns, 0..4, 5000), [true; 4], "{pipeline}");
        let some = [1, 9, 2, 1, 9, 1, 2].map(key);
        assert_eq!(ns.remove(&some).unwrap(), 2, "{pipeline}");
        assert_eq!(ns.remove(&some).unwrap(), 0, "{pipeline}");
        let left = ns.contains(&[0, 1, 2, 3].map(key)).unwrap();
        assert_eq!(left, [true, false, false, true], "{pipeline}");
        depot.close();
    }
}
