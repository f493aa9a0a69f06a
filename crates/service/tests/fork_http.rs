//! A forked child keeps neither the port of the HTTP server nor a connection. Alone in its process,
//! because it forks.

#![expect(unsafe_code, reason = "forks")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/sleeper.rs"]
mod sleeper;

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};

use common::scrape::Scraper;
use common::{Place, Served};
use sleeper::fork_a_sleeper;

#[test]
fn a_forked_child_keeps_neither_the_port_nor_a_connection() {
    let place = Place::new("Cache", "1MiB", "").with("", "http", "127.0.0.1:0");
    let depot = place.serve();
    let address = depot.http().unwrap();
    let mut scraper = Scraper::connect(&address);
    assert_eq!(scraper.get("/readyz", &[]).status, 200);
    let child = fork_a_sleeper();
    // The parent goes on, with the connection from before and with new ones.
    assert_eq!(scraper.get("/metrics", &[]).status, 200);
    assert_eq!(Scraper::connect(&address).get("/metrics", &[]).status, 200);
    depot.close();
    let has_ended = scraper.has_ended();
    let refused = TcpStream::connect(&address).map_err(|error| error.kind());
    let listener = TcpListener::bind(&address);
    // SAFETY: a child of this process, which has not been waited for.
    let killed = unsafe { libc::kill(child, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: waits for that child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(killed, 0);
    assert!(
        libc::WIFSIGNALED(status),
        "the child has ended before: proves nothing"
    );
    assert!(has_ended, "the child keeps the connection");
    assert_eq!(refused.err(), Some(ErrorKind::ConnectionRefused));
    assert!(listener.is_ok(), "the child keeps the port");
}
