//! Calls of many blocks over the tier `S3`: their requests grow with the blocks alone.

use std::collections::BTreeMap;

use crate::bucket::Server;
use crate::common::{eventually, has, keys, namespace, put, start_put};
use kvdepot_store::Namespace;
use kvdepot_testkit::few_rounds;
use serde_json::json;

const LEN: usize = 64;

/// Keys of the first call; each next one has twice as many.
const FEWEST: u64 = 500;

/// A block that no call here stores but the first.
const FIRST: u64 = 1 << 40;

#[test]
fn the_requests_of_a_call_grow_with_its_keys_alone() {
    // 16,000 in `make test-all`: the server is a thread or two of this process.
    let most = few_rounds(1000, 800);
    let mut counts: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    let sizes = std::iter::successors(Some(FEWEST), |count| Some(count * 2));
    for count in sizes.take_while(|count| *count <= most) {
        let server = Server::start();
        let numbers: Vec<u64> = (0..count).collect();
        let all = keys(0..count);
        let mut note = |what, call: &dyn Fn(&Namespace)| {
            // What a process has just written or missed it does not look for.
            let depot = server.open_with("S3", &json!({"capacity": "1GiB"}));
            let ns = namespace(&depot);
            eventually("the first count", || put(&ns, &[FIRST], LEN) == [true]);
            let before = server.requests();
            call(&ns);
            let requests = server.requests() - before;
            counts.entry(what).or_default().push(requests);
            depot.close();
        };
        let stores = |ns: &Namespace| {
            let stored = start_put(ns, &numbers, LEN).wait(None).unwrap();
            assert!(!stored.contains(&false));
        };
        note("put", &stores);
        note("put again", &stores);
        note("contains", &|ns: &Namespace| {
            assert!(!ns.contains(&all).unwrap().contains(&false));
        });
        note("get", &|ns: &Namespace| {
            assert!(has(ns, &numbers, LEN));
        });
        note("remove", &|ns: &Namespace| {
            assert_eq!(ns.remove(&all).unwrap(), numbers.len());
        });
        note("contains none", &|ns: &Namespace| {
            assert!(!ns.contains(&all).unwrap().contains(&true));
        });
    }
    for (what, requests) in &counts {
        for pair in requests.windows(2) {
            assert!(
                pair[1] as f64 <= 2.2 * pair[0] as f64,
                "{what}: {requests:?} for {FEWEST} keys, and each for twice as many"
            );
        }
    }
    // A look at each, and its removal.
    let removal = counts["remove"][0];
    assert!(removal <= 2 * FEWEST + FEWEST / 5, "{removal} requests");
}
