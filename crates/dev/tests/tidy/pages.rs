//! The pages name what there is.

use kvdepot_store::{Config, Depot};
use serde_json::json;

#[test]
fn every_metric_of_a_depot_stands_on_its_page() {
    let dir = std::env::temp_dir().join(format!("kvdepot-pages-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let settings = json!({
        "socket": "off",
        "cache": {"capacity": "1MiB"},
        "dax": {"path": dir.join("arena"), "capacity": "1MiB"},
    });
    let depot = Depot::open(&Config::new("Cache|Dax", &settings).unwrap()).unwrap();
    let text = depot.stats().prometheus();
    depot.close();
    std::fs::remove_dir_all(&dir).unwrap();
    let page = include_str!("../../../../docs/metrics.md");
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names: Vec<&str> = types.filter_map(|line| line.split(' ').next()).collect();
    assert!(names.len() > 20, "{text}");
    let missing: Vec<&&str> = names.iter().filter(|name| !page.contains(**name)).collect();
    assert!(missing.is_empty(), "not in docs/metrics.md: {missing:?}");
}
