//! Hosts that come and go, in a real etcd. Where there is none these tests say that they are
//! skipped.

use std::time::{Duration, Instant};

use kvdepot_store::Depot;
use serde_json::json;

use crate::LEN;
use crate::hosts::{at_rest, count_done, eventually, get, has, namespace, open, put, share};
use crate::server::Server;

fn join(server: &Server, name: &str) -> Depot {
    let settings = json!({
        "socket": "off",
        "lanes": 2,
        "lookup_timeout": "20s",
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

/// What each holds once nothing has moved for a while; `meanwhile` does something again and again.
fn settled(depots: &[Depot], mut meanwhile: impl FnMut(u64)) -> Vec<u64> {
    let held = || -> Vec<u64> { depots.iter().map(|one| share(one).blocks).collect() };
    let (mut last, mut since, mut round) = (held(), Instant::now(), 0);
    eventually("rest", || {
        meanwhile(round);
        round += 1;
        let now = held();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        since.elapsed() > Duration::from_secs(3)
    });
    last
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
    // A quarter of them is its share, and nothing else moves: what is stored at the others comes
    // from what was put meanwhile.
    let before = settled(&depots, |_| ());
    depots.push(join(&server, "d"));
    let first = namespace(&depots[0]);
    let after = settled(&depots, |round| {
        let one = [round * 7 % 200];
        // One may go just between the questions to its two hosts.
        let found = || has(&first, &one, LEN);
        assert!(found() || found(), "on its way, too");
    });
    let all_held = |held: &[u64]| held.iter().sum::<u64>();
    assert_eq!(all_held(&after), all_held(&before));
    let mut both = before.iter().zip(&after);
    let kept = both.all(|(before, after)| after <= before);
    assert!(
        kept,
        "none moves between those that were there: {before:?}, {after:?}"
    );
    let moved: u64 = before.iter().zip(&after).map(|(old, new)| old - new).sum();
    let ideal = all_held(&before) as f64 / 4.0;
    println!(
        "moved {moved} blocks, {:.2} of the ideal",
        moved as f64 / ideal
    );
    // By chance: of some hundred blocks four deviations are a sixth of its share.
    let part = after[3] as f64 / (all_held(&after) as f64 / 4.0);
    assert!(part > 0.8 && part < 1.2, "{after:?}");
    let stored: Vec<u64> = depots.iter().map(|one| share(one).stored_blocks).collect();
    assert!(put(&namespace(&depots[0]), &all, LEN).iter().all(|ok| *ok));
    let again: Vec<u64> = depots.iter().map(|one| share(one).stored_blocks).collect();
    assert_eq!(stored, again, "all are at home");
    for depot in &depots {
        assert!(has(&namespace(depot), &all, LEN));
    }
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
