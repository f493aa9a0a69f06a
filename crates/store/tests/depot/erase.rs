//! Removing an arena as a whole.

use kvdepot_store::inspect::Inspection;
use kvdepot_store::{Config, Depot, Error, erase};
use serde_json::json;

fn config(path: &std::path::Path) -> Config {
    let settings = json!({
        "socket": "off", "lock_wait": "0s", "dax": {"path": path, "capacity": "1MiB"},
    });
    Config::new("Dax", &settings).unwrap()
}

#[test]
fn an_arena_in_use_stays_and_goes_once_it_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    let depot = Depot::open(&config(&path)).unwrap();
    assert!(matches!(erase(&path), Err(Error::Locked { pid, .. }) if pid == std::process::id()));
    assert!(Inspection::open(&path).is_ok());
    depot.close();
    assert_eq!(erase(&path).unwrap(), 1 << 20);
    assert!(!path.exists());
}

#[test]
fn a_damaged_arena_goes_and_another_file_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    Depot::open(&config(&path)).unwrap().close();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    bytes[4096 + 40] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(
        Inspection::open(&path),
        Err(Error::Corrupt { .. })
    ));
    erase(&path).unwrap();
    let other = dir.path().join("notes");
    for content in [&b"short"[..], &[7; 1 << 20]] {
        std::fs::write(&other, content).unwrap();
        assert!(matches!(erase(&other), Err(Error::Corrupt { .. })));
        assert_eq!(std::fs::read(&other).unwrap(), content);
    }
}
