//! The tier `Peer` from outside: depots of several hosts over real sockets.

#![expect(
    unsafe_code,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and sends signals"
)]

mod faults;
mod hosts;
#[cfg(debug_assertions)]
mod linear;
mod members;
mod pressure;
#[path = "../common/raw.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod raw;
#[path = "../membership/server.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod server;

use hosts::{
    Cluster, at_rest, config, count_done, eventually, get, has, keys, namespace, put, share,
};
use kvdepot_store::Depot;
use serde_json::json;

const LEN: usize = 100_000;

#[test]
fn what_one_host_stores_all_of_them_have_and_each_holds_its_share() {
    for pipeline in ["Peer", "Cache|Peer", "Cache|Dax|Peer", "Cache|Peer|Posix"] {
        let cluster = Cluster::new(3);
        let depots = cluster.open_all(pipeline);
        let all: Vec<u64> = (0..60).collect();
        let spaces: Vec<_> = depots.iter().map(namespace).collect();
        assert!(
            put(&spaces[0], &all, LEN).iter().all(|ok| *ok),
            "{pipeline}"
        );
        if pipeline.ends_with("Peer") {
            let held = |depot: &Depot| share(depot).blocks;
            // Where `Dax` acknowledges they come here later.
            eventually("a share of each", || {
                depots.iter().map(held).sum::<u64>() == 60
            });
            let held: Vec<u64> = depots.iter().map(held).collect();
            assert!(held.iter().all(|count| *count > 8), "{pipeline}: {held:?}");
        }
        for ns in &spaces {
            assert!(has(ns, &all, LEN), "{pipeline}");
            assert_eq!(ns.contains(&keys(&all)).unwrap(), vec![true; 60]);
            assert_eq!(count_done(&get(ns, &[70, 71], LEN)), 0);
        }
        at_rest(&depots);
        let others: Vec<u64> = (100..110).collect();
        assert!(
            put(&spaces[1], &others, LEN).iter().all(|ok| *ok),
            "{pipeline}"
        );
        eventually("blocks of another host", || has(&spaces[2], &others, LEN));
        assert!(put(&spaces[2], &others, LEN).iter().all(|ok| *ok), "again");
        for depot in &depots {
            depot.close();
        }
    }
}

#[test]
fn removed_blocks_are_gone_everywhere_and_lists_are_of_all_hosts() {
    let cluster = Cluster::new(3);
    let depots = cluster.open_all("Peer");
    let spaces: Vec<_> = depots.iter().map(namespace).collect();
    let all: Vec<u64> = (0..30).collect();
    assert!(put(&spaces[0], &all, LEN).iter().all(|ok| *ok));
    let listed = spaces[1].blocks().unwrap();
    let mut listed: Vec<_> = listed.into_iter().map(|(key, _)| key).collect();
    listed.sort();
    let mut wanted = keys(&all);
    wanted.sort();
    assert_eq!(listed, wanted);
    // A repeated key counts once.
    let some = [&all[..10], &all[..5]].concat();
    assert_eq!(spaces[1].remove(&keys(&some)).unwrap(), 10);
    assert_eq!(count_done(&get(&spaces[2], &all, LEN)), 20);
    assert_eq!(spaces[2].clear().unwrap(), 20);
    assert_eq!(count_done(&get(&spaces[0], &all, LEN)), 0);
    at_rest(&depots);
}

#[test]
fn a_block_has_as_many_homes_as_replicas_and_outlives_one_of_them() {
    let cluster = Cluster::new(3).with("replicas", 2);
    let mut depots = cluster.open_all("Peer");
    let all: Vec<u64> = (0..40).collect();
    let first = namespace(&depots[0]);
    assert!(put(&first, &all, LEN).iter().all(|ok| *ok));
    let held: u64 = depots.iter().map(|depot| share(depot).blocks).sum();
    assert_eq!(held, 80);
    assert!(put(&first, &all, LEN).iter().all(|ok| *ok), "again");
    at_rest(&depots);
    depots.remove(2).close();
    for depot in &depots {
        assert!(has(&namespace(depot), &all, LEN));
    }
    // Fewer hosts than replicas of those left: what is put now has two homes all the same.
    let more: Vec<u64> = (100..120).collect();
    let stored = put(&first, &more, LEN);
    assert!(stored.iter().all(|ok| *ok), "{stored:?}");
    assert!(has(&namespace(&depots[1]), &more, LEN));
}

#[test]
fn blocks_whose_home_was_away_go_there_when_it_is_back() {
    let cluster = Cluster::new(3);
    let mut depots = cluster.open_all("Peer");
    let all: Vec<u64> = (0..90).collect();
    let first = namespace(&depots[0]);
    assert!(put(&first, &all, LEN).iter().all(|ok| *ok));
    let its = share(&depots[2]).blocks;
    assert!(its > 12);
    assert_eq!(first.remove(&keys(&all)).unwrap(), 90);
    depots.pop().unwrap().close();
    eventually("puts that pass it over", || {
        put(&first, &all, LEN).iter().all(|ok| *ok)
    });
    assert_eq!(depots.iter().map(|one| share(one).blocks).sum::<u64>(), 90);
    depots.push(cluster.open("Peer", 2));
    eventually("the share of the third, and one home of each", || {
        let shares = depots.iter().map(|one| share(one).blocks);
        share(&depots[2]).blocks == its && shares.sum::<u64>() == 90
    });
    // A host that has not met the third again yet does not ask it.
    for depot in &depots {
        eventually("all of them", || has(&namespace(depot), &all, LEN));
    }
    at_rest(&depots);
    assert_eq!(namespace(&depots[1]).remove(&keys(&all)).unwrap(), 90);
    assert_eq!(count_done(&get(&first, &all, LEN)), 0);
}

#[test]
fn a_lost_copy_is_made_again() {
    let cluster = Cluster::new(3).with("replicas", 2);
    let mut depots = cluster.open_all("Peer");
    let all: Vec<u64> = (0..60).collect();
    assert!(put(&namespace(&depots[0]), &all, LEN).iter().all(|ok| *ok));
    depots.pop().unwrap().close();
    let left: u64 = depots.iter().map(|one| share(one).blocks).sum();
    depots.push(cluster.open("Peer", 2));
    let held = || depots.iter().map(|one| share(one).blocks).sum::<u64>();
    assert!(left < 120);
    // Whoever asks it for something notices that it was away.
    eventually("two copies of all", || {
        assert!(has(&namespace(&depots[0]), &all, LEN));
        held() == 120
    });
    at_rest(&depots);
}

#[test]
fn what_cannot_be_is_refused_by_field_value_and_what_may_be() {
    let cluster = Cluster::new(2);
    let refused = |name: &str, value: serde_json::Value| {
        let mut settings = cluster.settings("Peer", 0);
        match value.is_null() {
            true => drop(settings["peer"].as_object_mut().unwrap().remove(name)),
            false => settings["peer"][name] = value,
        }
        let opened = config("Peer", &settings).and_then(|config| Depot::open(&config));
        opened.err().unwrap().to_string()
    };
    let said = refused("name", json!("nobody"));
    assert!(
        said.contains("peer.name") && said.contains("nobody"),
        "{said}"
    );
    for (name, value) in [
        ("name", json!(null)),
        ("hosts", json!(null)),
        ("capacity", json!(null)),
        ("hosts", json!("a 127.0.0.1:1 32MiB, b 127.0.0.1:2 64MiB")),
        ("hosts", json!("a 127.0.0.1:x")),
        ("hosts", json!("a 127.0.0.1:1, a 127.0.0.1:2")),
        ("etcd", json!("http://127.0.0.1:1")),
        ("etcd_ttl", json!("5s")),
        ("replicas", json!(9)),
        ("listen", json!("nowhere")),
        ("advertise", json!("127.0.0.1:1")),
        ("token_file", json!("/nowhere")),
    ] {
        let said = refused(name, value.clone());
        assert!(said.contains("peer."), "{name} {value}: {said}");
    }
    let mut open = cluster.settings("Peer", 0);
    open["peer"].as_object_mut().unwrap().remove("token");
    open["peer"]["listen"] = json!("0.0.0.0:0");
    let said = config("Peer", &open).and_then(|config| Depot::open(&config));
    let said = said.err().unwrap().to_string();
    assert!(
        said.contains("peer.listen") && said.contains("token"),
        "{said}"
    );
}
