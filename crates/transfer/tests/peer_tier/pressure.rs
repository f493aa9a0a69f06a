//! What large prompts leave of others, and what goes first, where the blocks of each prompt lie at
//! several hosts.

use kvdepot_store::{BlockBuffers, Buffer, Depot, Namespace};
use kvdepot_testkit::bytes::content;

use serde_json::json;

use super::hosts::{Cluster, PATIENCE, key, keys, namespace, open, share};

const LEN: usize = 60_000;

/// Two hosts, each with room for 63 blocks.
fn hosts() -> (Cluster, Vec<Depot>) {
    let mut cluster = Cluster::new(2);
    cluster.capacity = "4MiB";
    let depots = cluster.open_all("Peer");
    (cluster, depots)
}

/// Offers those blocks of a prompt that are not there yet, in calls of so many.
fn offer(ns: &Namespace, prompt: &[u64], call: usize) {
    for some in prompt[hits(ns, prompt)..].chunks(call) {
        let after = (some[0] > prompt[0]).then(|| key(some[0] - 1));
        let blocks = some
            .iter()
            .map(|number| Buffer::from_vec(content(*number, LEN)));
        let task = ns.put_after(after, keys(some), BlockBuffers::whole(blocks));
        task.unwrap().wait(Some(PATIENCE)).unwrap();
    }
}

fn hits(ns: &Namespace, prompt: &[u64]) -> usize {
    ns.prefix(&keys(prompt)).unwrap()
}

fn prompt(number: u64, blocks: u64) -> Vec<u64> {
    (1000 * number..1000 * number + blocks).collect()
}

#[test]
fn a_prompt_larger_than_all_hosts_leaves_the_others_and_keeps_its_own_head() {
    for call in [192, 7] {
        let (_cluster, depots) = hosts();
        let ns = namespace(&depots[0]);
        let usual: Vec<Vec<u64>> = (1..7).map(|number| prompt(number, 8)).collect();
        for one in &usual {
            offer(&ns, one, call);
        }
        let large = prompt(100, 192);
        offer(&ns, &large, call);
        let left: Vec<usize> = usual.iter().map(|one| hits(&ns, one)).collect();
        assert_eq!(left, [8; 6], "calls of {call}");
        let first = hits(&ns, &large);
        assert!(first >= 16, "calls of {call}: {first}");
        // Whoever is there again takes what nobody has used since.
        offer(&ns, &large, call);
        let again = hits(&ns, &large);
        assert!(again > first, "calls of {call}: {first}, {again}");
    }
}

#[test]
fn of_a_prompt_that_came_in_many_calls_the_tail_goes_first() {
    let (_cluster, depots) = hosts();
    let ns = namespace(&depots[0]);
    let first = prompt(1, 96);
    offer(&ns, &first, 4);
    let other = namespace(&depots[1]);
    for number in 2..12 {
        offer(&other, &prompt(number, 8), 8);
    }
    let left = hits(&ns, &first);
    assert!((8..96).contains(&left), "{left}");
    // Each host has evicted from its end.
    let behind = ns.contains(&keys(&first[left..])).unwrap();
    let behind = behind.iter().filter(|there| **there).count();
    assert!(behind <= 16, "{left}, {behind}");
}

#[test]
fn what_may_not_evict_more_at_its_home_is_stored_nowhere_else() {
    let mut cluster = Cluster::new(2);
    cluster.capacity = "4MiB";
    let small = cluster.open("Peer", 0);
    let mut settings = cluster.settings("Peer", 1);
    settings["peer"]["capacity"] = json!("32MiB");
    let roomy = open("Peer", &settings);
    let ns = namespace(&small);
    for number in 1..7 {
        offer(&ns, &prompt(number, 8), 8);
    }
    let before = share(&roomy).blocks;
    let large = prompt(100, 192);
    offer(&ns, &large, 192);
    let stored = ns.contains(&keys(&large)).unwrap();
    let stored = stored.iter().filter(|there| **there).count() as u64;
    // Half of them have their home there, and it has room for all.
    let there = share(&roomy).blocks - before;
    assert!((70..120).contains(&there), "{there} of {stored}");
    assert!(stored < 180 && stored > there, "{there} of {stored}");
}
