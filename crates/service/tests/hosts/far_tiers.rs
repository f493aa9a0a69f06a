//! Clients and tiers that their lanes do not reach: what is only there comes into the near tier
//! when a client gets it, and nobody waits for it who has everything nearer.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, assert_at_rest, eventually, get, has, keys, namespace, put};
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, GetOptions, Outcome};
use kvdepot_testkit::etcd::free_ports;
use kvdepot_testkit::proxy::{Act, Proxy};
use serde_json::{Value, json};

const LEN: usize = 50_000;

/// Two hosts, of which the second one alone is asked, has been put blocks 0 to 39, and has about
/// half of them. The first one serves.
struct Hosts {
    served: Depot,
    other: Depot,
    between: Proxy,
}

impl Hosts {
    fn open(home: &Path, cache: &str) -> Hosts {
        kvdepot_transfer::install();
        let [a, b] = free_ports().map(|port| format!("127.0.0.1:{port}"));
        let between = Proxy::plain(b.parse().unwrap());
        let peer = |name: &str, listen: &str, b: &str| {
            json!({
                "name": name, "capacity": "64MiB", "listen": listen, "token": "only we know",
                // Another host is waited for about half as long: more than a machine stands still.
                "hosts": format!("a {a}, b {b}"), "timeout": "20s", "lookup_timeout": "20s",
            })
        };
        let open = |pipeline: &str, settings: Value| {
            kvdepot_service::open(&Config::new(pipeline, &settings).unwrap()).unwrap()
        };
        let served = json!({
            "socket": home.join("s"), "lanes": 1, "cache": {"capacity": cache},
            "peer": peer("a", &a, &between.address.to_string()),
        });
        let hosts = Hosts {
            other: open("Peer", json!({"socket": "off", "peer": peer("b", &b, &b)})),
            served: open("Cache|Peer", served),
            between,
        };
        let all: Vec<u64> = (0..40).collect();
        let stored = || put(&namespace(&hosts.other), &all, LEN);
        eventually("both hosts", || stored().iter().all(|ok| *ok));
        hosts
    }
}

fn get_prefix(ns: &kvdepot_store::Namespace, numbers: &[u64]) -> Vec<Outcome> {
    let buffer = |_: &u64| Buffer::from_vec(vec![0; LEN]);
    let buffers = BlockBuffers::whole(numbers.iter().map(buffer));
    let mut options = GetOptions::default();
    options.prefix = true;
    let task = ns
        .get_with(keys(numbers.iter().copied()), buffers, options)
        .unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    task.outcomes()
}

#[test]
fn a_client_gets_what_lies_in_the_far_tier_alone() {
    let home = tempfile::tempdir().unwrap();
    let hosts = Hosts::open(home.path(), "16MiB");
    let client = kvdepot_service::connect(&home.path().join("s"), Some(1)).unwrap();
    let ns = namespace(&client);
    // Some are near already, and none is at the end.
    assert!(has(&namespace(&hosts.served), &[3, 4], LEN));
    let asked: Vec<u64> = (0..20).chain([99]).collect();
    let mut wanted = vec![Outcome::Done; 20];
    wanted.push(Outcome::Miss);
    assert_eq!(get(&ns, &asked, LEN), wanted);
    // A prefix ends at its gap, what comes behind is not touched.
    let prefix = [3, 20, 21, 99, 22];
    let found = get_prefix(&ns, &prefix);
    assert_eq!(found[..3], [Outcome::Done; 3]);
    assert_eq!(found[3..], [Outcome::Miss; 2]);
    assert!(has(&ns, &(0..40).collect::<Vec<_>>(), LEN));
    assert_at_rest(&hosts.served);
    client.close();
    hosts.served.close();
    hosts.other.close();
}

#[test]
fn what_is_near_waits_for_no_far_tier_and_a_cache_that_is_too_small_is_no_end() {
    let home = tempfile::tempdir().unwrap();
    let hosts = Hosts::open(home.path(), "1MiB");
    let client = kvdepot_service::connect(&home.path().join("s"), Some(1)).unwrap();
    let ns = namespace(&client);
    // What has no room on its way at once comes by and by, also to two who want the same.
    let all: Vec<u64> = (0..40).collect();
    let other = kvdepot_service::connect(&home.path().join("s"), Some(1)).unwrap();
    let there = namespace(&other);
    let found = std::thread::scope(|scope| {
        let second = scope.spawn(|| get(&there, &all, LEN));
        [get(&ns, &all, LEN), second.join().unwrap()]
    });
    for found in found {
        // Of a near tier for half of them some may have left again before their turn.
        let done = found.iter().filter(|one| **one == Outcome::Done).count();
        assert!(done >= 10, "{found:?}");
    }
    other.close();
    eventually("each by itself", || {
        all.iter().all(|one| has(&ns, &[*one], LEN))
    });
    // Held near, wherever they came from.
    assert!(
        put(&namespace(&hosts.served), &[100, 101], LEN)
            .iter()
            .all(|ok| *ok)
    );
    assert!(has(&ns, &[100, 101], LEN));
    hosts.between.rule(|_, _| Act::Delay(PATIENCE));
    let near = [100, 101];
    let begun = Instant::now();
    assert!(has(&ns, &near, LEN));
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
    hosts.between.rule(|_, _| Act::Pass);
    hosts.between.cut_all();
    client.close();
    hosts.served.close();
    hosts.other.close();
}
