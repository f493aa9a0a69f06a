//! `kill -9` at any instruction loses no acknowledged block, and makes none visible that was not
//! committed. A child puts, removes and reserves; the parent kills it, reopens what is left, and
//! compares with what the child had said.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Place, assert_at_rest, config_of, get, key, keys, namespace, number, verify};
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{BlockBuffers, Depot, Namespace, Outcome};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, few_rounds};

/// Small, so that eviction runs all the time.
const ARENA: &str = "3MiB";
const RECORDS: u64 = 96;
/// Keys from here on are only ever reserved.
const RESERVED_ONLY: u64 = 1 << 40;

#[test]
fn crash_kill9_of_a_far_tier_alone() {
    kill_in_a_loop("Dax", "crash_kill9::crash_kill9_of_a_far_tier_alone");
}

#[test]
fn crash_kill9_behind_a_near_tier() {
    kill_in_a_loop("Cache|Dax", "crash_kill9::crash_kill9_behind_a_near_tier");
}

#[test]
fn crash_kill9_of_an_arena_on_a_disk() {
    kill_in_a_loop("Nvme", "crash_kill9::crash_kill9_of_an_arena_on_a_disk");
}

#[test]
fn crash_kill9_of_an_arena_on_a_disk_behind_a_near_tier() {
    let test = "crash_kill9::crash_kill9_of_an_arena_on_a_disk_behind_a_near_tier";
    kill_in_a_loop("Cache|Nvme", test);
}

/// What the child has said, over all rounds of one arena.
#[derive(Default)]
struct Said {
    /// Length of every block whose put has begun; keys are used once.
    begun: HashMap<u64, usize>,
    /// The same keys, oldest first.
    order: Vec<u64>,
    acknowledged: HashSet<u64>,
    /// A removal has begun.
    removing: HashSet<u64>,
    /// A removal has ended.
    removed: HashSet<u64>,
}

impl Said {
    fn hear(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "put" => {
                self.begun.insert(number(1), number(2) as usize);
                self.order.push(number(1));
            }
            "ack" => {
                self.acknowledged.insert(number(1));
            }
            "remove" => {
                self.removing.insert(number(1));
            }
            "removed" => {
                self.removed.insert(number(1));
            }
            "open" => {}
            other => panic!("{other:?}"),
        }
    }

    /// The acknowledged blocks that cannot have been evicted: since their puts began, less was put
    /// than half of the arena and of its table. The other half is more than eviction ahead,
    /// fragments and reservations take.
    fn must_be_there(&self, data: u64) -> Vec<u64> {
        let mut room = data / 2;
        let mut slots = RECORDS / 2;
        let fits = |key: &&u64| {
            let len = (self.begun[*key] as u64).next_multiple_of(4096);
            let fits = len <= room && slots > 0;
            room = room.saturating_sub(len);
            slots = slots.saturating_sub(1);
            fits
        };
        let newest = self.order.iter().rev().take_while(fits).copied();
        newest
            .filter(|key| self.acknowledged.contains(key) && !self.removing.contains(key))
            .collect()
    }
}

fn kill_in_a_loop(pipeline: &str, test: &str) {
    if let Some(role) = child::role() {
        assert_eq!(role, "writer");
        return write_until_killed();
    }
    let mut rng = Rng::for_test(test);
    let section = match pipeline.contains("Nvme") {
        true => "nvme",
        false => "dax",
    };
    let fresh = || Place::new(pipeline, "512KiB", ARENA).with(section, "records", RECORDS);
    let mut place = fresh();
    let mut said = Said::default();
    let (mut checked, mut opening) = (0, 0);
    // A disk is waited for: it has fewer to store.
    let each = if section == "nvme" { 1 } else { 5 };
    // `make test-all` kills 4000.
    let kills = few_rounds(80, 200);
    for round in 0..5 * kills {
        // Until a writer was killed while it opened, too.
        if round >= kills && opening > 0 {
            break;
        }
        if round % 20 == 0 {
            place = fresh();
            said = Said::default();
        }
        let spec = place.spec();
        let values = [
            ("spec", spec.as_str()),
            ("seed", &rng.bits().to_string()),
            ("first", &(round << 20).to_string()),
        ];
        let mut writer = Child::start(test, "writer", &values);
        // Anywhere in its beginning, opening and making the file included, or in its work.
        let (word, within) = match rng.once_in(6) {
            true => ("begins", 5_000),
            false => ("open", 25_000),
        };
        writer.expect(word);
        // As often before anything is stored as behind that. Short times as often as long ones.
        let stored = match word == "open" && rng.once_in(2) {
            true => rng.below(4 * each),
            false => 0,
        };
        let within = within >> rng.below(8);
        let more = Duration::from_micros(rng.below(within));
        let heard = writer.kill_after("ack", stored, more);
        opening += u64::from(word == "begins" && !heard.iter().any(|line| line == "open"));
        heard.iter().for_each(|line| said.hear(line));
        checked += check(&place, &said);
    }
    assert!(
        checked > each * kills,
        "only {checked} acknowledged blocks were checked"
    );
    assert!(opening > 0, "none was killed while it opened");
}

/// Looks at what is left, from outside and as the new owner; how many blocks had to be there.
fn check(place: &Place, said: &Said) -> u64 {
    if place.arena().exists() {
        let found = verify(&place.arena());
        assert_eq!(found.bad, [], "whole or absent");
        let (blocks, _) = Inspection::open(&place.arena()).unwrap().blocks().unwrap();
        for block in &blocks {
            let key = number(&block.record.identity.key);
            let len = said.begun.get(&key).copied();
            assert_eq!(len, Some(block.record.len as usize), "{key} was never put");
            assert!(!said.removed.contains(&key), "{key} was removed");
        }
    } else {
        assert!(
            said.acknowledged.is_empty(),
            "acknowledged without an arena"
        );
    }
    let depot = place.open();
    assert_eq!(
        depot.opening().outranked,
        0,
        "two records of the same bytes"
    );
    assert_at_rest(&depot);
    let ns = namespace(&depot);
    let must = said.must_be_there(depot.stats().tiers.last().unwrap().capacity_bytes);
    for number in &must {
        let outcome = get(&ns, &[*number], said.begun[number]);
        assert_eq!(
            outcome,
            [Outcome::Done],
            "acknowledged block {number} is lost"
        );
    }
    for (number, len) in &said.begun {
        let there = ns.contains(&[key(*number)]).unwrap()[0];
        let wanted = if there { Outcome::Done } else { Outcome::Miss };
        assert_eq!(get(&ns, &[*number], *len), [wanted]);
    }
    depot.close();
    must.len() as u64
}

/// The child.
fn write_until_killed() {
    child::end_with_any_panic();
    child::say("begins");
    let depot = Depot::open(&config_of(&child::value("spec"))).unwrap();
    child::say("open");
    let mut rng = Rng::new(child::value("seed").parse().unwrap());
    let next = Arc::new(AtomicU64::new(child::value("first").parse().unwrap()));
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let (ns, next, rng) = (namespace(&depot), Arc::clone(&next), rng.fork());
            std::thread::spawn(move || write(&ns, &next, rng))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

fn write(ns: &Namespace, next: &AtomicU64, mut rng: Rng) {
    let mut stored = Vec::new();
    let mut left_open = 0;
    loop {
        match rng.below(10) {
            0 => {
                let number = RESERVED_ONLY + next.fetch_add(1, Ordering::Relaxed);
                let parts = vec![rng.between(1, 9000); rng.between(1, 3) as usize];
                let reserved = ns.reserve(&[(key(number), parts)]).unwrap();
                let kept = reserved.into_iter().flatten().collect::<Vec<_>>();
                if left_open == 4 || rng.once_in(2) {
                    ns.abort(&kept);
                } else {
                    left_open += 1;
                }
            }
            1 if !stored.is_empty() => {
                let at = rng.below(stored.len() as u64) as usize;
                let number: u64 = stored.swap_remove(at);
                child::say(&format!("remove {number}"));
                ns.remove(&[key(number)]).unwrap();
                child::say(&format!("removed {number}"));
            }
            _ => stored.extend(put_some(ns, next, &mut rng)),
        }
    }
}

fn put_some(ns: &Namespace, next: &AtomicU64, rng: &mut Rng) -> Vec<u64> {
    let count = rng.between(1, 4);
    let first = next.fetch_add(count, Ordering::Relaxed);
    let numbers: Vec<u64> = (first..first + count).collect();
    let mut buffers = BlockBuffers::default();
    for number in &numbers {
        let len = if rng.once_in(8) { 150_000 } else { 20_000 };
        let len = rng.between(1, len) as usize;
        child::say(&format!("put {number} {len}"));
        buffers.push([kvdepot_store::Buffer::from_vec(content(*number, len))]);
    }
    let task = ns.put(keys(numbers.iter().copied()), buffers).unwrap();
    let mut done = task.wait(None).unwrap().into_iter();
    let stored: Vec<u64> = numbers
        .into_iter()
        .filter(|_| done.next().unwrap())
        .collect();
    for number in &stored {
        child::say(&format!("ack {number}"));
    }
    stored
}
