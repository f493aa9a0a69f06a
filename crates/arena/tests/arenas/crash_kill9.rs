//! `kill -9` at any instruction loses no committed block, and makes none visible that was not
//! committed, whichever way the medium is written. A child puts, removes and reserves; the parent
//! kills it, opens what is left, by either way, and compares with what the child had said.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{ACCESSES, Open, Site};
use kvdepot_arena::{Access, Options};
use kvdepot_testkit::child::{self, Child};
use kvdepot_testkit::{Rng, rounds};

/// Small, so that eviction runs all the time.
const CAPACITY: u64 = 3 << 20;
const RECORDS: u64 = 96;

#[test]
fn crash_kill9_of_a_mapped_arena() {
    kill_in_a_loop(Access::Mapped, "crash_kill9::crash_kill9_of_a_mapped_arena");
}

#[test]
fn crash_kill9_of_an_arena_without_addresses() {
    kill_in_a_loop(
        Access::Direct,
        "crash_kill9::crash_kill9_of_an_arena_without_addresses",
    );
}

/// What the child has said, over all rounds of one arena.
#[derive(Default)]
struct Said {
    /// Length of every block whose put has begun, in that order; keys are used once.
    begun: Vec<(u64, usize)>,
    committed: HashSet<u64>,
    removing: HashSet<u64>,
    removed: HashSet<u64>,
}

impl Said {
    fn hear(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "put" => self.begun.push((number(1), number(2) as usize)),
            "stored" => drop(self.committed.insert(number(1))),
            "remove" => drop(self.removing.insert(number(1))),
            "removed" => drop(self.removed.insert(number(1))),
            "open" => {}
            other => panic!("{other:?}"),
        }
    }

    /// The committed blocks that cannot have been evicted: since their puts began, less was put
    /// than half of the arena and of its table.
    fn must_be_there(&self) -> Vec<u64> {
        let (mut room, mut slots) = (CAPACITY / 2, RECORDS / 2);
        let fits = |(_, len): &&(u64, usize)| {
            let len = (*len as u64).next_multiple_of(4096);
            let fits = len <= room && slots > 0;
            (room, slots) = (room.saturating_sub(len), slots.saturating_sub(1));
            fits
        };
        let newest = self.begun.iter().rev().take_while(fits);
        let kept = newest.map(|(number, _)| *number);
        kept.filter(|one| self.committed.contains(one) && !self.removing.contains(one))
            .collect()
    }
}

fn kill_in_a_loop(access: Access, test: &str) {
    if let Some(role) = child::role() {
        assert_eq!(role, "writer");
        return write_until_killed(access);
    }
    let mut rng = Rng::for_test(test);
    let mut site = Site::new(access, CAPACITY, RECORDS);
    let mut said = Said::default();
    let (kills, mut checked, mut opening) = (rounds(60), 0, 0);
    for round in 0..5 * kills {
        // Until a writer was killed while it opened, too.
        if round >= kills && opening > 0 {
            break;
        }
        if round % 20 == 0 {
            site = Site::new(access, CAPACITY, RECORDS);
            said = Said::default();
        }
        let path = site.path();
        let values = [
            ("path", path.to_str().unwrap()),
            ("seed", &rng.bits().to_string()),
            ("first", &((round + 1) << 20).to_string()),
        ];
        let mut writer = Child::start(test, "writer", &values);
        // Anywhere in its beginning, where the file is made, or in its work.
        let (word, within) = match rng.once_in(6) {
            true => ("begins", 5_000),
            false => ("open", 25_000),
        };
        writer.expect(word);
        // As often before anything is stored as behind that. Short times as often as long ones.
        let stored = match word == "open" && rng.once_in(2) {
            true => rng.below(12),
            false => 0,
        };
        let within = within >> rng.below(8);
        let more = Duration::from_micros(rng.below(within));
        let heard = writer.kill_after("stored", stored, more);
        opening += u64::from(word == "begins" && !heard.iter().any(|line| line == "open"));
        heard.iter().for_each(|line| said.hear(line));
        site.options.access = *rng.pick(&ACCESSES);
        checked += check(&site, &said);
    }
    assert!(checked > 3 * kills, "only {checked} blocks were checked");
    assert!(opening > 0, "none was killed while it opened");
}

/// Looks at what is left; how many blocks had to be there.
fn check(site: &Site, said: &Said) -> u64 {
    let open = site.open();
    assert_eq!(open.opening.outranked, 0, "two records of the same bytes");
    let lens: HashMap<u64, usize> = said.begun.iter().copied().collect();
    let must = said.must_be_there();
    for number in &must {
        assert!(open.serves(*number), "committed block {number} is lost");
    }
    let mut count = 0;
    for (number, len) in &lens {
        if open.serves(*number) {
            count += 1;
            assert_eq!(open.get(*number).unwrap().len(), *len);
            assert!(!said.removed.contains(number), "{number} was removed");
        }
    }
    assert_eq!(open.arena.stats().blocks, count, "something was never put");
    open.assert_at_rest();
    must.len() as u64
}

/// The child.
fn write_until_killed(access: Access) {
    let options = Options {
        capacity: Some(CAPACITY),
        records: Some(RECORDS),
        access,
        ..Options::default()
    };
    child::end_with_any_panic();
    child::say("begins");
    let open = Open::at(&PathBuf::from(child::value("path")), &options);
    child::say("open");
    let mut rng = Rng::new(child::value("seed").parse().unwrap());
    let next = AtomicU64::new(child::value("first").parse().unwrap());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (open, next, rng) = (&open, &next, rng.fork());
            scope.spawn(move || write(open, next, rng));
        }
    });
}

fn write(open: &Open, next: &AtomicU64, mut rng: Rng) {
    let mut stored: Vec<u64> = Vec::new();
    let mut kept = Vec::new();
    loop {
        match rng.below(10) {
            // Filled, and never committed.
            0 => {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let reserved = open.reserve(&[(number, rng.between(1, 9000) as usize)]);
                let places: Vec<_> = reserved.iter().map(|one| **one).collect();
                open.fill(&places);
                kept.extend(reserved);
                kept.truncate(4);
            }
            1 if !stored.is_empty() => {
                let at = rng.below(stored.len() as u64) as usize;
                let number = stored.swap_remove(at);
                child::say(&format!("remove {number}"));
                open.remove(number);
                child::say(&format!("removed {number}"));
            }
            _ => {
                let count = rng.between(1, 4);
                let first = next.fetch_add(count, Ordering::Relaxed);
                let mut len = || {
                    let most = if rng.once_in(8) { 150_000 } else { 20_000 };
                    rng.between(1, most) as usize
                };
                let blocks: Vec<(u64, usize)> =
                    (first..first + count).map(|one| (one, len())).collect();
                for (number, len) in &blocks {
                    child::say(&format!("put {number} {len}"));
                }
                for number in open.put(&blocks) {
                    child::say(&format!("stored {number}"));
                    stored.push(number);
                }
            }
        }
    }
}
