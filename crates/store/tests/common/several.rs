//! Several devices as one tier.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_store::inspect::Inspection;
use kvdepot_store::{Depot, DeviceState, Error, Namespace};
use serde_json::{Value, json};

use super::{Place, number, put};

/// Payload of the blocks here: four granules.
pub const LEN: usize = 16 << 10;
/// Longer than a test waits for what ends at once, shorter than anybody notices.
pub const SHORT: Duration = Duration::from_millis(50);

/// Two devices of 1 MiB, a and b.
pub fn two() -> Place {
    several(&["a", "b"], "1MiB")
}

pub fn several(names: &[&str], capacity: &str) -> Place {
    let place = Place::new("Dax", "", capacity);
    let path = |name: &&str| place.dir().join(name);
    let device = |name| json!({"path": path(name), "capacity": capacity});
    let list: Vec<Value> = names.iter().map(device).collect();
    let section = json!({ "devices": list, "records": 256 });
    place.with_section("dax", section)
}

pub fn at(place: &Place, name: &str) -> PathBuf {
    place.dir().join(name)
}

/// The keys that the record table of a device has as live.
pub fn on(path: &Path) -> HashSet<u64> {
    let (blocks, _) = Inspection::open(path).unwrap().blocks().unwrap();
    let of = blocks
        .iter()
        .map(|block| number(&block.record.identity.key));
    of.collect()
}

/// Puts blocks in calls of eight.
pub fn fill(ns: &Namespace, numbers: std::ops::Range<u64>) {
    let numbers: Vec<u64> = numbers.collect();
    for call in numbers.chunks(8) {
        assert_eq!(put(ns, call, LEN), vec![true; call.len()]);
    }
}

pub fn state(depot: &Depot, path: &Path) -> DeviceState {
    let devices = depot.devices().unwrap();
    let found = devices.iter().find(|device| device.path == path);
    found.unwrap().state
}

pub fn says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}
