//! Peers that send too much, too little or nothing: others are served, and the server keeps its
//! descriptors.

use std::io::Write;

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::common::scrape::Scraper;
use crate::common::{Place, Served, config_of};
use kvdepot_testkit::child::{self, Child};

fn place() -> Place {
    Place::new("Cache", "1MiB", "").with("", "http", "127.0.0.1:0")
}

/// Allows this process as many descriptors as the system does.
fn raise_descriptors() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    limit.current.unwrap_or(u64::MAX)
}

/// Descriptors that a process has open.
fn descriptors(pid: u32) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd"));
    entries.unwrap().count()
}

#[test]
fn an_oversized_head_is_rejected() {
    let place = place();
    let depot = place.serve();
    let address = depot.http().unwrap();
    let long = format!("X-Long: {}", "x".repeat(9000));
    let many: Vec<String> = (0..200).map(|number| format!("X-{number}: x")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    for lines in [&[long.as_str()][..], &many] {
        let lines = [&["Host: localhost"], lines].concat();
        let mut scraper = Scraper::connect(&address);
        let response = scraper.ask("GET", "/healthz", &lines).unwrap();
        assert_eq!(response.status, 431);
        assert!(scraper.has_ended());
    }
    // What is not HTTP ends its connection, with or without a response.
    for noise in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"PRI * HTTP/2.0\r\n\r\n",
    ] {
        let mut scraper = Scraper::connect(&address);
        scraper.0.write_all(noise).unwrap();
        assert_ne!(
            scraper.response(false).map(|response| response.status),
            Some(200)
        );
    }
    let mut scraper = Scraper::connect(&address);
    let fits = format!("X-Long: {}", "x".repeat(7000));
    assert_eq!(scraper.get("/healthz", &[&fits]).status, 200);
}

#[test]
fn heads_that_do_not_end_keep_nobody_out() {
    let place = place();
    let depot = place.serve();
    let address = depot.http().unwrap();
    let slow: Vec<_> = (0..100)
        .map(|_| {
            let mut scraper = Scraper::connect(&address);
            let begun = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: ";
            scraper.0.write_all(begun).unwrap();
            scraper
        })
        .collect();
    let mut scraper = Scraper::connect(&address);
    for _ in 0..3 {
        assert_eq!(scraper.get("/metrics", &[]).status, 200);
    }
    drop(slow);
}

#[test]
fn a_thousand_silent_connections_keep_nobody_out_and_few_descriptors() {
    const TEST: &str = "abuse::a_thousand_silent_connections_keep_nobody_out_and_few_descriptors";
    /// Of the server; an eighth of them may be connections.
    const DESCRIPTORS: u64 = 400;
    if child::role().is_some() {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = Some(DESCRIPTORS);
        setrlimit(Resource::Nofile, limit).unwrap();
        let depot = kvdepot_service::open(&config_of(&child::value("spec"))).unwrap();
        child::say(&depot.http().unwrap());
        child::sleep_until_killed();
    }
    let most = raise_descriptors();
    let place = place();
    let mut server = Child::start(TEST, "server", &[("spec", &place.spec())]);
    let address = server.line().unwrap();
    let idle = descriptors(server.pid());
    let count = 1000.min(most.saturating_sub(300));
    let mut silent: Vec<_> = (0..count).map(|_| Scraper::connect(&address)).collect();
    let mut scraper = Scraper::connect(&address);
    assert_eq!(scraper.get("/metrics", &[]).status, 200);
    // Now, because a head that does not end in time ends its connection, too.
    let open = descriptors(server.pid());
    assert!(open <= idle + 60, "{open} descriptors, {idle} before");
    // The first ones have ended, and the connection that is used has not.
    for oldest in silent.iter_mut().take(count as usize - 50) {
        assert!(oldest.has_ended());
    }
    assert_eq!(scraper.get("/healthz", &[]).status, 200);
}
