//! Calls of many keys over the socket: the work of client and server grows with the keys alone.

use std::collections::BTreeMap;

use crate::common::{
    PATIENCE, Place, Served, assert_at_rest, eventually, has, keys, namespace, pin_all, put,
};
use kvdepot_store::{Depot, Namespace, TierStats, work};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::few_rounds;

const LEN: usize = 64;

/// Keys of the first call; each next one has twice as many.
const FEWEST: u64 = 1000;

/// Calls of each kind, in their order.
type Works = Vec<(&'static str, u64)>;

/// The work of all threads for a call of a client, and for what follows it at the server.
fn work_of(server: &Depot, call: &dyn Fn()) -> u64 {
    let before = work().all;
    call();
    let mine = work().mine;
    assert!(server.drain(PATIENCE));
    let is_held = |tier: &TierStats| tier.pinned_blocks + tier.reserved_blocks > 0;
    eventually("the end of what it held", || {
        let stats = server.stats();
        stats.inflight_load_blocks == 0 && !stats.tiers.iter().any(is_held)
    });
    let after = work();
    // These looks are no part of it.
    after.all - before - (after.mine - mine)
}

/// Makes calls of each kind with so many keys.
fn round(server: &Depot, ns: &Namespace, count: u64) -> Works {
    let numbers: Vec<u64> = (0..count).collect();
    let all = keys(0..count);
    let mut works = Works::new();
    let mut note = |what, call: &dyn Fn()| works.push((what, work_of(server, call)));
    let stores = || assert!(!put(ns, &numbers, LEN).contains(&false));
    note("put", &stores);
    note("put again", &stores);
    note("get", &|| assert!(has(ns, &numbers, LEN)));
    note("pin", &|| {
        let pins = pin_all(ns, 0..count);
        assert_eq!(pins.len(), numbers.len());
        ns.unpin(&pins, true);
    });
    note("contains", &|| {
        assert!(!ns.contains(&all).unwrap().contains(&false));
    });
    note("remove", &|| {
        assert_eq!(ns.remove(&all).unwrap(), numbers.len());
    });
    note("contains none", &|| {
        assert!(!ns.contains(&all).unwrap().contains(&true));
    });
    works
}

fn grows_with_the_keys(pipeline: &str) {
    // 8,000 in `make test-all`.
    let most = few_rounds(4000, 400);
    let room = format!("{}KiB", 10 * most);
    let place = Place::new(pipeline, &room, &room);
    let place = match pipeline {
        "Cache" => place,
        _ => place.with("dax", "records", most * 5 / 2),
    };
    let server = place.serve();
    let client = kvdepot_service::connect(&place.socket(), Some(2)).unwrap();
    let ns = namespace(&client);
    // Tables have grown by then.
    round(&server, &ns, most);
    let mut works: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    let mut count = FEWEST;
    while count <= most {
        for (what, work) in round(&server, &ns, count) {
            works.entry(what).or_default().push(work);
        }
        count *= 2;
    }
    for (what, works) in &works {
        // What other threads do is cut into batches by chance: at most a tenth more each time.
        let doublings = works.len() as i32 - 1;
        let (first, last) = (works[0] as f64, works[works.len() - 1] as f64);
        assert!(
            first > 0.0 && last <= 2.2_f64.powi(doublings) * first,
            "{pipeline}: {what}: {works:?} for {FEWEST} keys, and each for twice as many"
        );
    }
    client.close();
    assert_at_rest(&server);
}

/// Runs in a process of its own: all threads are counted.
#[test]
fn the_work_of_a_clients_call_grows_with_its_keys_alone() {
    let test = "linear::the_work_of_a_clients_call_grows_with_its_keys_alone";
    match child::role() {
        None => Child::start(test, "alone", &[]).expect("well"),
        Some(_) => {
            for pipeline in ["Cache", "Dax", "Cache|Dax"] {
                grows_with_the_keys(pipeline);
            }
            child::say("well");
        }
    }
}
