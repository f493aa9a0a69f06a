//! Formats of the metrics, as their specifications define them.

use std::collections::{HashMap, HashSet};

use crate::common::scrape::{OPEN_METRICS, PROMETHEUS, Scraper};
use crate::common::{Place, Served, namespace, put};

/// The name, labels and value of a line.
fn sample(line: &str) -> (&str, &str, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    assert!(labels.ends_with('}'), "{line}");
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    assert!(
        name.starts_with("kvdepot_") && name.chars().all(is_name),
        "{line}"
    );
    (name, labels, value.parse().unwrap())
}

/// Reads a text as a scraper does; its samples by name and labels.
fn parse(text: &str, is_open: bool) -> HashMap<(String, String), f64> {
    let (mut helps, mut types) = (HashMap::new(), HashMap::new());
    let (mut samples, mut finished) = (HashMap::new(), HashSet::new());
    let mut last = "";
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(description) = line.strip_prefix("# ") {
            if description == "EOF" {
                assert!(is_open && text.ends_with("# EOF\n"));
                continue;
            }
            let mut words = description.splitn(3, ' ');
            let [word, name, rest] = [(); 3].map(|()| words.next().unwrap());
            let known = match word {
                "HELP" => helps.insert(name, rest),
                "TYPE" => types.insert(name, rest),
                "UNIT" => {
                    assert!(is_open && name.ends_with(&format!("_{rest}")), "{line}");
                    None
                }
                _ => panic!("{line}"),
            };
            assert_eq!(known, None, "described twice: {line}");
            continue;
        }
        let (name, labels, value) = sample(line);
        let kind = if name.ends_with("_total") {
            "counter"
        } else {
            "gauge"
        };
        let family = match is_open {
            true => name.strip_suffix("_total").unwrap_or(name),
            false => name,
        };
        assert!(helps.contains_key(family), "no HELP: {line}");
        assert_eq!(types.get(family), Some(&kind), "{line}");
        // The samples of a family follow each other.
        if family != last {
            assert!(
                finished.insert(last) && !finished.contains(family),
                "{line}"
            );
            last = family;
        }
        let known = samples.insert((name.to_owned(), labels.to_owned()), value);
        assert_eq!(known, None, "twice: {line}");
        assert!(value >= 0.0, "{line}");
    }
    assert_eq!(helps.len(), types.len());
    assert_eq!(text.contains("# EOF"), is_open);
    samples
}

#[test]
fn both_formats_describe_the_same_samples() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB").with("", "http", "127.0.0.1:0");
    let depot = place.serve();
    assert_eq!(put(&namespace(&depot), &[1, 2, 3], 5000), [true; 3]);
    let mut scraper = Scraper::connect(&depot.http().unwrap());
    let mut scrape = |accept: &str, kind: &str| {
        let response = scraper.get("/metrics", &[&format!("Accept: {accept}")]);
        assert_eq!(response.status, 200);
        assert_eq!(response.header("content-type"), Some(kind), "{accept}");
        parse(&response.body, kind == OPEN_METRICS)
    };
    let open = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
    let plain = scrape("text/plain;version=0.0.4", PROMETHEUS);
    let open = scrape(open, OPEN_METRICS);
    assert!(plain.len() > 60, "{}", plain.len());
    let names = |samples: &HashMap<(String, String), f64>| -> HashSet<(String, String)> {
        samples.keys().cloned().collect()
    };
    assert_eq!(names(&plain), names(&open));
    let stored = ("kvdepot_blocks_total".to_owned(), "op=\"put\"}".to_owned());
    assert_eq!((plain[&stored], open[&stored]), (3.0, 3.0));
    scrape("*/*", PROMETHEUS);
}
