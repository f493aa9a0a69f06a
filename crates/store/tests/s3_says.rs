//! What the log says of a bucket that refuses: a line when that begins, and one when it is over.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/bucket.rs"]
mod bucket;
mod common;

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use bucket::{LEN, Server, Trouble};
use common::{eventually, has, namespace, put};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The warnings' words.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Visit for &Log {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut &*self);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_store_that_refuses_says_so_once_and_when_that_is_over() {
    const REFUSES: &str = "the object store rejected a request; the tier finds and stores no \
                           blocks until requests succeed";
    const MENDED: &str = "object store accepts requests again";
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let server = Server::start();
    let depot = server.open();
    let ns = namespace(&depot);
    assert_eq!(put(&ns, &[1], LEN), [true]);
    let said = |words: &str| {
        let all = log.0.lock().unwrap();
        all.iter().filter(|line| *line == words).count()
    };
    for round in 1..4 {
        let refused = Trouble::Answer(403, "AccessDenied");
        server.trouble(None, "/blocks/", usize::MAX, refused);
        let numbers: Vec<u64> = (100 * round..100 * round + 20).collect();
        assert!(!put(&ns, &numbers, LEN).contains(&true));
        server.calm();
        eventually("the block", || has(&ns, &[1], LEN));
        // It is out of order again within the minute, which is only counted.
        assert_eq!((said(REFUSES), said(MENDED)), (1, 1), "round {round}");
    }
    let faults = depot.stats().tiers[0].request_errors.clone();
    assert!(faults["access_denied"] >= 60, "{faults:?}");
    let all = log.0.lock().unwrap();
    assert!(all.len() <= 4, "{all:?}");
    drop(all);
    depot.close();
}
