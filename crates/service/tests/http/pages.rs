//! Pages, their statuses and headers, and who may read them.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use kvdepot_store::Depot;
use serde_json::Value;

use crate::common::scrape::{PROMETHEUS, Scraper};
use crate::common::{Place, Served, namespace, put};

const PLAIN: &str = "text/plain; charset=utf-8";

fn place() -> Place {
    Place::new("Cache", "1MiB", "").with("", "http", "127.0.0.1:0")
}

/// A file of tokens, which replaces one that is there.
fn store_tokens(path: &Path, text: &str, mode: u32) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::set_permissions(&new, Permissions::from_mode(mode)).unwrap();
    std::fs::rename(new, path).unwrap();
}

fn error_of(place: &Place) -> String {
    kvdepot_service::open(&place.config())
        .err()
        .unwrap()
        .to_string()
}

fn statuses(depot: &Depot, paths: &[&str], lines: &[&str]) -> Vec<u16> {
    let mut scraper = Scraper::connect(&depot.http().unwrap());
    let statuses = paths.iter().map(|path| scraper.get(path, lines).status);
    statuses.collect()
}

#[test]
fn each_page_has_its_status_and_headers() {
    let place = place();
    let depot = place.serve();
    let mut scraper = Scraper::connect(&depot.http().unwrap());
    // All on one connection.
    for (method, path, status, kind, body) in [
        (
            "GET",
            "/metrics",
            200,
            PROMETHEUS,
            "# HELP kvdepot_capacity_bytes ",
        ),
        ("GET", "/healthz", 200, PLAIN, "ok\n"),
        ("GET", "/readyz", 200, PLAIN, "ready\n"),
        ("GET", "/stats", 200, "application/json", "{\""),
        ("GET", "/metrics?name=x", 200, PROMETHEUS, "# HELP"),
        ("HEAD", "/metrics", 200, PROMETHEUS, ""),
        ("HEAD", "/healthz", 200, PLAIN, ""),
        ("GET", "/", 404, PLAIN, "This path"),
        ("GET", "/metrics/", 404, PLAIN, "This path"),
        ("HEAD", "/none", 404, PLAIN, ""),
        ("DELETE", "/metrics", 405, PLAIN, "This method"),
        ("BREW", "/stats", 405, PLAIN, "This method"),
        ("GET", "/healthz", 200, PLAIN, "ok\n"),
    ] {
        let response = scraper.ask(method, path, &["Host: localhost"]).unwrap();
        assert_eq!(response.status, status, "{method} {path}");
        assert_eq!(response.header("content-type"), Some(kind), "{path}");
        assert_eq!(response.header("cache-control"), Some("no-store"));
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"));
        assert!(response.body.starts_with(body), "{path}: {}", response.body);
        assert_eq!(response.body.is_empty(), method == "HEAD");
        assert_ne!(response.header("content-length"), Some("0"), "{path}");
        let allow = (status == 405).then_some("GET, HEAD");
        assert_eq!(response.header("allow"), allow, "{method} {path}");
        let is_sentence = response.body.lines().count() == 1;
        assert!(status < 400 || method == "HEAD" || is_sentence);
    }
}

#[test]
fn a_request_with_a_body_is_rejected() {
    let place = place();
    let depot = place.serve();
    let address = depot.http().unwrap();
    for head in ["Content-Length: 5", "Transfer-Encoding: chunked"] {
        let mut scraper = Scraper::connect(&address);
        let response = scraper.ask("GET", "/metrics", &["Host: localhost", head]);
        assert_eq!(response.unwrap().status, 413, "{head}");
    }
    let mut scraper = Scraper::connect(&address);
    let response = scraper.get("/metrics", &["Content-Length: 0"]);
    assert_eq!(response.status, 200);
}

#[test]
fn the_pages_show_the_depot() {
    let place = place();
    let depot = place.serve();
    assert_eq!(put(&namespace(&depot), &[1, 2], 5000), [true; 2]);
    let mut scraper = Scraper::connect(&depot.http().unwrap());
    let stats: Value = serde_json::from_str(&scraper.get("/stats", &[]).body).unwrap();
    let shown = format!("unix:{}", place.socket().display());
    assert_eq!(stats["depot"], shown.as_str());
    assert_eq!(stats["description"], depot.description());
    assert_eq!(stats["stats"]["tiers"][0]["blocks"], 2);
    let metrics = scraper.get("/metrics", &[]).body;
    let line = "kvdepot_live_blocks{tier=\"Cache\"} 2";
    assert!(metrics.lines().any(|one| one == line), "{metrics}");
}

#[test]
fn metrics_need_a_token_where_there_is_one_and_health_checks_do_not() {
    let place = place();
    let file = place.dir().join("tokens");
    let place = place.with("", "http_token_file", file.to_str().unwrap());
    assert!(error_of(&place).contains("http_token_file"));
    store_tokens(&file, "first\n", 0o644);
    assert!(error_of(&place).contains("0600"));
    store_tokens(&file, "first\n", 0o600);
    let depot = place.serve();
    let pages = ["/metrics", "/stats", "/healthz", "/readyz"];
    let none: &[&str] = &[];
    for lines in [
        none,
        &["Authorization: Bearer fir"],
        &["Authorization: Bearer first1"],
        &["Authorization: Basic first"],
        &["Authorization: first"],
    ] {
        assert_eq!(statuses(&depot, &pages, lines), [401, 401, 200, 200]);
    }
    let mut scraper = Scraper::connect(&depot.http().unwrap());
    let refusal = scraper.get("/metrics", &[]);
    let challenge = refusal.header("www-authenticate").unwrap();
    assert!(challenge.starts_with("Bearer"), "{challenge}");
    let first = ["Authorization: Bearer first"];
    assert_eq!(statuses(&depot, &pages, &first), [200; 4]);
    // As it is rotated: both are valid, and then the new one.
    let second = ["authorization: bearer second"];
    store_tokens(&file, "first\nsecond\n", 0o600);
    for lines in [&first, &second] {
        assert_eq!(statuses(&depot, &pages[..1], lines), [200]);
    }
    store_tokens(&file, "second\n", 0o600);
    assert_eq!(statuses(&depot, &pages[..1], &first), [401]);
    assert_eq!(statuses(&depot, &pages[..1], &second), [200]);
}

#[test]
fn other_hosts_and_sites_are_rejected() {
    let place = place().with("", "http_hosts", "proxy.example");
    let depot = place.serve();
    let address = depot.http().unwrap();
    let status = |lines: &[&str]| {
        let response = Scraper::connect(&address).ask("GET", "/metrics", lines);
        response.unwrap().status
    };
    let host = format!("Host: {address}");
    for (lines, expected) in [
        (&[host.as_str()][..], 200),
        (&["Host: localhost"], 200),
        (&["Host: proxy.example"], 200),
        (&["Host: evil.example"], 421),
        (&["Host: 192.0.2.1"], 421),
        (&[], 400),
        (&["Host: localhost", "Host: localhost"], 400),
        (
            &["Host: proxy.example", "Origin: https://proxy.example"],
            200,
        ),
        (
            &["Host: proxy.example", "Origin: https://evil.example"],
            403,
        ),
        (&["Host: proxy.example", "Origin: null"], 403),
    ] {
        assert_eq!(status(lines), expected, "{lines:?}");
    }
}

#[test]
fn a_selected_port_is_published_next_to_the_socket() {
    let place = place();
    let mut file = place.socket().into_os_string();
    file.push(".http");
    let file = Path::new(&file);
    // Of a killed server.
    std::fs::write(file, "127.0.0.1:1\n").unwrap();
    let depot = place.serve();
    let address = depot.http().unwrap();
    assert_eq!(
        std::fs::read_to_string(file).unwrap(),
        format!("{address}\n")
    );
    let again = place.with("", "http", address.as_str());
    let other = again.dir().join("t");
    let again = again.with("", "socket", other.to_str().unwrap());
    let error = error_of(&again);
    assert!(
        error.contains(&address) && error.contains("no other program"),
        "{error}"
    );
    assert!(!other.exists());
    depot.close();
    assert!(!file.exists());
    // A chosen port is not published.
    let depot = again.serve();
    assert_eq!(depot.http(), Some(address));
    assert!(!again.dir().join("t.http").exists());
}

#[test]
fn a_unix_socket_serves_the_pages_too() {
    let place = Place::new("Cache", "1MiB", "");
    let path = place.dir().join("h.sock");
    let address = format!("unix:{}", path.display());
    let place = place.with("", "http", address.as_str());
    let place = place.with("", "socket_mode", "0660");
    let depot = place.serve();
    assert_eq!(depot.http(), Some(address.clone()));
    let mode = path.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let mut scraper = Scraper::connect_unix(&address);
    assert_eq!(scraper.get("/readyz", &[]).body, "ready\n");
    assert!(scraper.get("/metrics", &[]).body.contains("kvdepot_"));
    depot.close();
    assert!(scraper.has_ended() && !path.exists());
}

#[test]
fn options_without_a_server_are_rejected() {
    for (name, value) in [("http_token_file", "/none"), ("http_hosts", "a.example")] {
        let place = Place::new("Cache", "1MiB", "").with("", name, value);
        let error = error_of(&place);
        assert!(
            error.contains(name) && error.contains("with the option http"),
            "{error}"
        );
    }
    let error = error_of(&place().with("", "socket", "off"));
    assert!(error.contains("socket is off"), "{error}");
    let error = error_of(&place().with("", "http", "unix:/none/such/h.sock"));
    assert!(error.contains("existing, writable directory"), "{error}");
}

#[test]
fn a_client_that_sends_its_request_in_pieces_is_answered() {
    let place = place();
    let depot = place.serve();
    let mut scraper = Scraper::connect(&depot.http().unwrap());
    for piece in [
        "GET /heal",
        "thz HTTP/1.1\r",
        "\nHost: local",
        "host\r\n\r",
        "\n",
    ] {
        scraper.0.write_all(piece.as_bytes()).unwrap();
        scraper.0.flush().unwrap();
    }
    assert_eq!(scraper.response(false).unwrap().body, "ok\n");
}
