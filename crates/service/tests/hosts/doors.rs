//! Workers that read, by themselves, what their depot has pinned on another host.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::{self, PATIENCE, eventually, key, keys, namespace, put};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, Namespace, Pin};
use kvdepot_testkit::etcd::free_ports;
use kvdepot_testkit::proxy::{Act, Proxy, Way};
use serde_json::{Value, json};

const LEN: usize = 50_000;

/// About twice as long as other hosts are waited for, and that longer than a machine stands still.
const LIMIT: &str = "20s";

/// Blocks of the depots: about half of them are on either host.
const BLOCKS: u64 = 40;

/// Two hosts that have been put blocks; the first one serves workers.
struct Hosts {
    served: Depot,
    other: Depot,
    /// On the way from the first to the second.
    between: Proxy,
    socket: PathBuf,
}

impl Hosts {
    fn open(home: &Path) -> Hosts {
        Hosts::open_with(home, &json!({}), LIMIT)
    }

    /// Whose tier waits so long for another host: about half of the limit.
    fn open_with(home: &Path, more: &Value, limit: &str) -> Hosts {
        kvdepot_transfer::install();
        let [a, b] = free_ports().map(|port| format!("127.0.0.1:{port}"));
        let between = Proxy::plain(b.parse().unwrap());
        let peer = |name: &str, listen: &str, b: &str| {
            json!({
                "name": name, "capacity": "64MiB", "listen": listen, "token": "only we know",
                "hosts": format!("a {a}, b {b}"), "timeout": limit, "lookup_timeout": limit,
            })
        };
        let open = |pipeline: &str, mut settings: Value| {
            for (name, value) in more.as_object().unwrap() {
                settings[name] = value.clone();
            }
            kvdepot_service::open(&Config::new(pipeline, &settings).unwrap()).unwrap()
        };
        let socket = home.join("s");
        let served = json!({
            "socket": socket, "lanes": 1, "cache": {"capacity": "16MiB"},
            "peer": peer("a", &a, &between.address.to_string()),
        });
        let hosts = Hosts {
            other: open("Peer", json!({"socket": "off", "peer": peer("b", &b, &b)})),
            served: open("Cache|Peer", served),
            between,
            socket,
        };
        let all: Vec<u64> = (0..BLOCKS).collect();
        let stored = || put(&namespace(&hosts.other), &all, LEN);
        eventually("both hosts", || stored().iter().all(|ok| *ok));
        hosts
    }

    fn mover(&self) -> Mover {
        Mover::attach(&self.socket, Some(1), true).unwrap()
    }

    fn close(&self) {
        self.served.close();
        self.other.close();
    }
}

fn pin(ns: &Namespace, numbers: impl Iterator<Item = u64>) -> Vec<Option<Pin>> {
    ns.pin(&keys(numbers), false).unwrap()
}

/// Which of these pins a worker has read the right bytes of; wrong ones it must not have.
fn load(mover: &Mover, pins: &[&Pin], numbers: &[u64]) -> (Vec<bool>, Vec<bool>) {
    let buffers: Vec<Buffer> = pins
        .iter()
        .map(|_| Buffer::from_vec(vec![0; LEN]))
        .collect();
    let placements: Vec<Vec<u8>> = pins.iter().map(|pin| pin.placement()).collect();
    let whole = BlockBuffers::whole(buffers.clone());
    let job = mover.load(&placements, &whole, 0).unwrap();
    assert!(job.wait(Some(PATIENCE)));
    let there = job.checksums().into_iter().map(|sum| sum.is_some());
    let there: Vec<bool> = there.collect();
    for ((there, buffer), number) in there.iter().zip(&buffers).zip(numbers) {
        let right = common::block(*number, LEN).to_vec();
        assert!(!there || buffer.to_vec() == right, "block {number}");
    }
    (there, job.corrupt())
}

fn load_all(mover: &Mover, pins: &[Option<Pin>]) -> Vec<bool> {
    let pins: Vec<&Pin> = pins.iter().flatten().collect();
    let numbers: Vec<u64> = (0..pins.len() as u64).collect();
    load(mover, &pins, &numbers).0
}

fn reads(depot: &Depot) -> u64 {
    depot.stats().tiers[0].blocks
}

#[test]
fn a_worker_reads_what_is_pinned_on_any_host_without_a_copy_near() {
    let home = tempfile::tempdir().unwrap();
    let hosts = Hosts::open(home.path());
    let ns = namespace(&hosts.served);
    let mover = hosts.mover();
    let pins = pin(&ns, 0..BLOCKS);
    assert!(pins.iter().all(Option::is_some));
    assert!(pins.iter().flatten().all(|pin| pin.tier() == "Peer"));
    assert_eq!(load_all(&mover, &pins), [true; BLOCKS as usize]);
    // Parts of a block, and blocks in another order, are read as well.
    let chosen: Vec<&Pin> = pins.iter().flatten().rev().step_by(3).collect();
    let numbers: Vec<u64> = (0..BLOCKS).rev().step_by(3).collect();
    assert!(load(&mover, &chosen, &numbers).0.iter().all(|there| *there));
    assert_eq!(reads(&hosts.served), 0, "nothing was brought near");
    // What was read once stays where it is, what is read again comes near.
    let pins: Vec<Pin> = pins.into_iter().flatten().collect();
    ns.unpin(&pins, true);
    let again: Vec<Pin> = pin(&ns, 0..10).into_iter().flatten().collect();
    assert_eq!(again.len(), 10);
    assert!(again.iter().all(|pin| pin.tier() == "Peer"));
    ns.unpin(&again, true);
    eventually("what is read twice is near", || reads(&hosts.served) == 10);
    mover.close();
    hosts.close();
}

#[test]
fn a_client_and_its_worker_read_them_too() {
    let home = tempfile::tempdir().unwrap();
    let hosts = Hosts::open(home.path());
    let client = kvdepot_service::connect(&hosts.socket, Some(1)).unwrap();
    let mover = hosts.mover();
    let pins = pin(&namespace(&client), 0..BLOCKS);
    assert!(pins.iter().all(Option::is_some));
    assert_eq!(load_all(&mover, &pins), [true; BLOCKS as usize]);
    mover.close();
    client.close();
    hosts.close();
}

#[test]
fn a_pin_that_has_ended_lends_nothing() {
    let home = tempfile::tempdir().unwrap();
    let hosts = Hosts::open(home.path());
    let ns = namespace(&hosts.served);
    let mover = hosts.mover();
    let pins: Vec<Pin> = pin(&ns, 0..BLOCKS).into_iter().flatten().collect();
    let (own, far): (Vec<&Pin>, Vec<&Pin>) =
        pins.iter().partition(|pin| pin.place.extents.room() > 0);
    assert!(!own.is_empty() && !far.is_empty());
    let number = |pin: &&Pin| (0..BLOCKS).find(|one| key(*one) == pin.key()).unwrap();
    let numbers: Vec<u64> = far.iter().map(number).collect();
    assert!(load(&mover, &far, &numbers).0.iter().all(|there| *there));
    ns.unpin(&pins, false);
    // Its home is told in the background.
    eventually("no pin is lent", || {
        let (there, corrupt) = load(&mover, &far, &numbers);
        assert_eq!(corrupt, vec![false; far.len()]);
        there.iter().all(|there| !there)
    });
    mover.close();
    hosts.close();
}

#[test]
fn a_home_that_hangs_is_a_miss_in_time_and_one_that_is_back_is_read() {
    let home = tempfile::tempdir().unwrap();
    let hosts = Hosts::open_with(home.path(), &json!({}), "2s");
    let ns = namespace(&hosts.served);
    let mover = hosts.mover();
    let mut pins: Vec<Option<Pin>> = Vec::new();
    eventually("pins", || {
        ns.unpin(&pins.drain(..).flatten().collect::<Vec<Pin>>(), false);
        pins = pin(&ns, 0..BLOCKS);
        pins.iter().all(Option::is_some)
    });
    hosts
        .between
        .rule(|_, _| Act::Delay(Duration::from_secs(3600)));
    let begun = Instant::now();
    let there = load_all(&mover, &pins);
    assert!(
        begun.elapsed() < Duration::from_secs(60),
        "{:?}",
        begun.elapsed()
    );
    // This host's own share needs no way there.
    assert!(there.contains(&true) && there.contains(&false));
    hosts.between.rule(|_, _| Act::Pass);
    hosts.between.cut_all();
    eventually("it is read again", || {
        let again = pin(&ns, 0..BLOCKS);
        let all = again.iter().all(Option::is_some)
            && load_all(&mover, &again).iter().all(|there| *there);
        ns.unpin(&again.into_iter().flatten().collect::<Vec<_>>(), false);
        all
    });
    mover.close();
    hosts.close();
}

#[test]
fn bytes_that_change_on_the_way_are_corrupt_and_stay_where_they_are() {
    let home = tempfile::tempdir().unwrap();
    let hosts = Hosts::open(home.path());
    let ns = namespace(&hosts.served);
    let mover = hosts.mover();
    let pins: Vec<Pin> = pin(&ns, 0..BLOCKS).into_iter().flatten().collect();
    let all: Vec<u64> = (0..BLOCKS).collect();
    hosts.between.rule(|chunk, bytes| match chunk.way {
        // Answers that have a payload: heads and short answers stay whole.
        Way::Back if bytes.len() > 16_384 => Act::Flip(bytes.len() as u64 * 4),
        _ => Act::Pass,
    });
    let refs: Vec<&Pin> = pins.iter().collect();
    let (there, corrupt) = load(&mover, &refs, &all);
    assert!(corrupt.contains(&true) || there.contains(&false));
    let wrong: Vec<Pin> = pins
        .iter()
        .zip(&corrupt)
        .filter(|(_, corrupt)| **corrupt)
        .map(|(pin, _)| pin.clone())
        .collect();
    hosts.between.rule(|_, _| Act::Pass);
    // Where it lies it verifies: only its way was at fault.
    assert_eq!(ns.discard(&wrong), 0);
    ns.unpin(&pins, false);
    let again = pin(&ns, 0..BLOCKS);
    assert_eq!(load_all(&mover, &again), [true; BLOCKS as usize]);
    mover.close();
    hosts.close();
}

#[test]
fn blocks_under_a_key_come_near_first() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys");
    std::fs::write(&keys, format!("- {}\n", "ab".repeat(32))).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&keys, mode).unwrap();
    let hosts = Hosts::open_with(home.path(), &json!({"mac_key_file": keys}), LIMIT);
    let ns = namespace(&hosts.served);
    let all: Vec<u64> = (0..BLOCKS).collect();
    assert!(pin(&ns, 0..BLOCKS).iter().all(Option::is_none));
    let task = ns.prefetch(&common::keys(all.iter().copied())).unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    let mover = hosts.mover();
    let pins = pin(&ns, 0..BLOCKS);
    assert!(pins.iter().flatten().all(|pin| pin.tier() == "Cache"));
    assert_eq!(load_all(&mover, &pins), [true; BLOCKS as usize]);
    mover.close();
    hosts.close();
}
