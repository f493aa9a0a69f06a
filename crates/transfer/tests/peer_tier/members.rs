//! Hosts that come and go, in a real etcd. Where there is none these tests say that they are
//! skipped.

use kvdepot_store::Depot;
use serde_json::json;

use crate::LEN;
use crate::hosts::{at_rest, count_done, eventually, get, has, namespace, open, put, share};
use crate::server::Server;

fn join(server: &Server, name: &str) -> Depot {
    let settings = json!({
        "socket": "off",
        "lanes": 2,
        "lookup_timeout": "5s",
        "peer": {
            "name": name,
            "capacity": "64MiB",
            "etcd": server.url(),
            "etcd_ttl": "2s",
            "token": "only we know",
        },
    });
    open("Peer", &settings)
}

/// Waits until what one host puts has homes at all of them.
fn meet(depots: &[Depot], next: &mut u64) {
    for depot in depots {
        let ns = namespace(depot);
        eventually("all are homes", || {
            let before: Vec<u64> = depots.iter().map(|one| share(one).stored_blocks).collect();
            let some: Vec<u64> = (*next..*next + 30).collect();
            *next += 30;
            let _some = put(&ns, &some, 1000);
            let after = depots.iter().map(|one| share(one).stored_blocks);
            after.zip(before).all(|(after, before)| after > before)
        });
    }
}

#[test]
fn who_joins_has_all_that_was_stored_and_who_leaves_takes_only_its_own() {
    let Some(server) = Server::start() else {
        return;
    };
    let mut depots: Vec<Depot> = ["a", "b", "c"].map(|name| join(&server, name)).into();
    let mut next = 10_000;
    meet(&depots, &mut next);
    let all: Vec<u64> = (0..200).collect();
    assert!(put(&namespace(&depots[0]), &all, LEN).iter().all(|ok| *ok));
    for depot in &depots {
        assert!(has(&namespace(depot), &all, LEN));
    }
    depots.push(join(&server, "d"));
    meet(&depots, &mut next);
    for depot in &depots {
        assert!(has(&namespace(depot), &all, LEN), "at former homes, too");
    }
    // What is put again has its new home where that has changed, and no other.
    let before = share(&depots[3]).stored_blocks;
    let others = |depots: &[Depot]| -> Vec<u64> {
        depots[..3]
            .iter()
            .map(|one| share(one).stored_blocks)
            .collect()
    };
    let (old, still) = (others(&depots), all.len() as f64 / 4.0);
    assert!(put(&namespace(&depots[0]), &all, LEN).iter().all(|ok| *ok));
    assert_eq!(
        others(&depots),
        old,
        "none moves between those that were there"
    );
    let moved = (share(&depots[3]).stored_blocks - before) as f64;
    // A quarter is its share; of 200 blocks drawn by chance three deviations are 18.
    assert!(moved > still - 18.0 && moved < still + 18.0, "{moved}");
    at_rest(&depots);
    // One that leaves takes its own with it, but for those that came to it and have old copies.
    let left = depots.remove(1);
    let its = share(&left).blocks;
    left.close();
    drop(left);
    let found = count_done(&get(&namespace(&depots[0]), &all, LEN));
    assert!(
        found < all.len() && (all.len() - found) as u64 <= its,
        "{found}, {its}"
    );
    eventually("others are homes", || {
        put(&namespace(&depots[0]), &all, LEN).iter().all(|ok| *ok)
    });
    for depot in &depots {
        eventually("all again", || has(&namespace(depot), &all, LEN));
    }
}
