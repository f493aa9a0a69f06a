//! Calls of many blocks over the tier `Peer`: the work of all hosts, and the requests that they
//! send each other, grow with the blocks alone.

use std::collections::BTreeMap;

use kvdepot_store::{Depot, Namespace, work};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::few_rounds;

use super::hosts::{Cluster, at_rest, has, keys, namespace, put, share};

const LEN: usize = 64;

/// Keys of the first call; each next one has twice as many. With fewer, the order of use has fewer
/// blocks to look at for each block than it may.
const FEWEST: u64 = 1000;

/// Calls of a kind and size, of which the cheapest counts: a host looks at all of its blocks now
/// and then.
const CALLS: usize = 3;

/// Units of work, and requests to other hosts.
type Cost = [u64; 2];

/// Costs of calls of each kind, by their sizes.
type Costs = BTreeMap<&'static str, Vec<u64>>;

/// The cost of a call at all hosts, and of what follows it.
fn cost_of(depots: &[Depot], call: &dyn Fn()) -> Cost {
    let requests = || -> u64 { depots.iter().map(|depot| share(depot).requests).sum() };
    let (sent, before) = (requests(), work().all);
    call();
    let mine = work().mine;
    // Its pins end at the other host behind it.
    at_rest(depots);
    let (sent, after) = (requests() - sent, work());
    // These looks are no part of it.
    [after.all - before - (after.mine - mine), sent]
}

/// Makes calls of each kind with so many keys.
fn round(depots: &[Depot], ns: &Namespace, count: u64) -> Vec<(&'static str, Cost)> {
    let numbers: Vec<u64> = (0..count).collect();
    let all = keys(&numbers);
    let mut costs = Vec::new();
    let mut note = |what, call: &dyn Fn()| costs.push((what, cost_of(depots, call)));
    let stores = || assert!(!put(ns, &numbers, LEN).contains(&false));
    note("put", &stores);
    note("put again", &stores);
    note("get", &|| assert!(has(ns, &numbers, LEN)));
    note("contains", &|| {
        assert!(!ns.contains(&all).unwrap().contains(&false));
    });
    note("remove", &|| {
        assert_eq!(ns.remove(&all).unwrap(), numbers.len());
    });
    note("contains none", &|| {
        assert!(!ns.contains(&all).unwrap().contains(&true));
    });
    costs
}

fn grows_with_the_keys() {
    // 16,000 in `make test-all`.
    let most = few_rounds(4000, 800);
    // More than a machine stands still.
    let cluster = Cluster::new(2).with("timeout", "60s");
    let cluster = cluster.with("lookup_timeout", "60s");
    let depots = cluster.open_all("Peer");
    let ns = namespace(&depots[0]);
    // Tables have grown by then, and the hosts have met.
    round(&depots, &ns, most);
    let (mut works, mut requests) = (Costs::new(), Costs::new());
    let mut count = FEWEST;
    while count <= most {
        let mut least: BTreeMap<&str, Cost> = BTreeMap::new();
        for _ in 0..CALLS {
            for (what, cost) in round(&depots, &ns, count) {
                let known = least.entry(what).or_insert(cost);
                *known = [known[0].min(cost[0]), known[1].min(cost[1])];
            }
        }
        for (what, [work, sent]) in least {
            works.entry(what).or_default().push(work);
            // Blocks that are copied are committed, and unpinned, as many at a time as have come
            // by then.
            if !["put", "get"].contains(&what) {
                requests.entry(what).or_default().push(sent);
            }
        }
        count *= 2;
    }
    for (costs, of) in [(&works, "units of work"), (&requests, "requests")] {
        for (what, costs) in costs {
            // What other threads do is cut into batches by chance: at most a tenth more each time.
            let doublings = costs.len() as i32 - 1;
            let (first, last) = (costs[0] as f64, costs[costs.len() - 1] as f64);
            assert!(
                first > 0.0 && last <= 2.2_f64.powi(doublings) * first,
                "{what}: {costs:?} {of} for {FEWEST} keys, and each for twice as many"
            );
        }
    }
    depots.iter().for_each(Depot::close);
}

/// Runs in a process of its own: all threads are counted.
#[test]
fn the_work_and_the_requests_of_a_call_grow_with_its_keys_alone() {
    let test = "linear::the_work_and_the_requests_of_a_call_grow_with_its_keys_alone";
    match child::role() {
        None => Child::start(test, "alone", &[]).expect("well"),
        Some(_) => {
            grows_with_the_keys();
            child::say("well");
        }
    }
}
