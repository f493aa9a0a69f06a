//! `kvdepot bench cluster`: where keys live in a cluster that is only imagined, and what changes of
//! its hosts move.
//!
//! Keys are a sample: each stands for as many blocks as the depot would have of them. What a host
//! holds is counted by looking every key up, before and after each change, as the tier does.

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use kvdepot_transfer::homes::{HomeMap, Host, Point, Shift, View, ask, ideal};
use serde_json::{Value, json};

use super::random::Random;
use super::report::{Report, Row};
use super::rounds::Rounds;
use crate::args::Cluster;
use crate::error::Error;
use crate::interrupt::Interrupt;

/// Hosts of the clusters: of a rack's corner, and of a fleet.
const HOSTS: [usize; 2] = [3, 1000];
/// What the keys stand for.
const BLOCKS: u64 = 1_000_000_000;
/// Copies of each key that are looked at: one, and two of which one may be lost.
const REPLICAS: [usize; 2] = [1, 2];
const MOST: usize = 2;
/// What a host of one share offers; there are hosts of one to four shares.
const UNIT: u64 = 1 << 40;
/// Of so many keys one is followed through each change, which is some millions of them; and of so
/// many one is asked for as well.
const FOLLOWED: u64 = 4;
const ASKED: u64 = 64;
/// Keys that a thread looks up before it looks whether it shall end.
const CHUNK: u64 = 1 << 14;
/// Keys of a round that is timed, over the hosts.
const TIMED: usize = 4_000_000;

/// What happens to a cluster.
const EVENTS: [&str; 3] = ["join", "death", "capacity"];

/// Shares and three events of each, and the time of a look-up.
pub(super) const CASES: usize = HOSTS.len() * (EVENTS.len() + 2);

pub(super) fn run(args: &Cluster, report: &mut Report<'_>) -> Result<(), Error> {
    let (keys, rounds) = match args.quick {
        true => (1_000_000, 3),
        false => (20_000_000, 7),
    };
    let (keys, rounds) = (args.keys.unwrap_or(keys), args.rounds.unwrap_or(rounds));
    if keys == 0 || rounds == 0 {
        return Err(Error::Usage {
            field: "--keys, --rounds",
            value: "0".into(),
            allowed: "1 or more".into(),
        });
    }
    for hosts in HOSTS {
        let before = map(cluster(hosts), MOST);
        let after = EVENTS.map(|event| map(changed(hosts, event), MOST));
        let survey = survey(&before, &after, keys, &report.interrupt)?;
        shares(&before, &survey, report)?;
        for (at, event) in EVENTS.into_iter().enumerate() {
            moves(event, &before, &after[at], &survey.events[at], report)?;
        }
        lookups(&before, rounds, report)?;
    }
    Ok(())
}

/// Hosts whose capacities are as 1 to 4.
fn cluster(hosts: usize) -> Vec<Host> {
    let host = |number: usize| host(number, 1 + number as u64 % 4);
    (0..hosts).map(host).collect()
}

fn host(number: usize, shares: u64) -> Host {
    Host {
        name: format!("host-{number:05}"),
        address: format!("10.{}.{}.1:7700", number / 256, number % 256),
        capacity: shares * UNIT,
        incarnation: 1,
    }
}

fn changed(hosts: usize, event: &str) -> Vec<Host> {
    let mut cluster = cluster(hosts);
    match event {
        "join" => cluster.push(host(hosts, 2)),
        "death" => drop(cluster.remove(1)),
        // From one share to four.
        _ => cluster[0].capacity = 4 * UNIT,
    }
    cluster
}

fn map(hosts: Vec<Host>, replicas: usize) -> HomeMap {
    // Their names differ, as their numbers do.
    let view = View::new(1, hosts).unwrap_or_default();
    HomeMap::new(Arc::new(view), replicas)
}

/// What a sample of keys says.
struct Survey {
    keys: u64,
    /// Copies of each host before any change, for each number of replicas.
    held: [Vec<u64>; REPLICAS.len()],
    events: Vec<Event>,
}

impl Survey {
    fn new(before: &HomeMap, after: &[HomeMap]) -> Survey {
        Survey {
            keys: 0,
            held: REPLICAS.map(|_| vec![0; before.view().hosts().len()]),
            events: after
                .iter()
                .map(|after| Event::new(before, after))
                .collect(),
        }
    }

    fn add(&mut self, other: &Survey) {
        self.keys += other.keys;
        for (held, other) in self.held.iter_mut().zip(&other.held) {
            let pairs = held.iter_mut().zip(other);
            pairs.for_each(|(held, other)| *held += other);
        }
        for (event, other) in self.events.iter_mut().zip(&other.events) {
            event.add(other);
        }
    }

    fn look(&mut self, before: &HomeMap, after: &[HomeMap], number: u64, point: Point) {
        let old = before.homes(point);
        self.keys += 1;
        for (held, replicas) in self.held.iter_mut().zip(REPLICAS) {
            for host in &old[..replicas] {
                held[*host as usize] += 1;
            }
        }
        if !number.is_multiple_of(FOLLOWED) {
            return;
        }
        for (after, event) in after.iter().zip(&mut self.events) {
            let new = after.homes(point);
            for (shift, replicas) in event.shifts.iter_mut().zip(REPLICAS) {
                shift.count(&old[..replicas], &new[..replicas]);
            }
            if number.is_multiple_of(ASKED) {
                event.look_up(before, after, point, &old);
            }
        }
    }
}

/// One change: what it moved, for each number of replicas, and whom look-ups asked before anything
/// had moved.
#[derive(Clone)]
struct Event {
    shifts: Vec<Shift>,
    lookups: u64,
    /// Of those look-ups, the ones for blocks of which a copy was left.
    there: u64,
    found: u64,
    asked: u64,
    asked_most: u64,
}

impl Event {
    fn new(before: &HomeMap, after: &HomeMap) -> Event {
        Event {
            shifts: REPLICAS.map(|_| Shift::new(before, after)).to_vec(),
            lookups: 0,
            there: 0,
            found: 0,
            asked: 0,
            asked_most: 0,
        }
    }

    fn add(&mut self, other: &Event) {
        for (shift, other) in self.shifts.iter_mut().zip(&other.shifts) {
            shift.add(other);
        }
        self.lookups += other.lookups;
        self.there += other.there;
        self.found += other.found;
        self.asked += other.asked;
        self.asked_most = self.asked_most.max(other.asked_most);
    }

    /// Asks as the tier does, one host after the other until one has it: as yet, those that had it
    /// before.
    fn look_up(&mut self, before: &HomeMap, after: &HomeMap, point: Point, held: &[u32]) {
        let place = |host: &u32| {
            let name = &before.view().hosts()[*host as usize].name;
            after.view().find(name).map(|place| place as u32)
        };
        let holders: Vec<u32> = held.iter().filter_map(place).collect();
        let asked = ask(after, Some(before), point);
        let found = asked.iter().position(|host| holders.contains(host));
        self.lookups += 1;
        self.there += u64::from(!holders.is_empty());
        self.found += u64::from(found.is_some());
        let asked = found.map_or(asked.len(), |at| at + 1) as u64;
        self.asked += asked;
        self.asked_most = self.asked_most.max(asked);
    }
}

/// Looks every key up, on all processors.
fn survey(
    before: &HomeMap,
    after: &[HomeMap],
    keys: u64,
    interrupt: &Interrupt,
) -> Result<Survey, Error> {
    let threads = thread::available_parallelism().map_or(1, usize::from) as u64;
    let work = |thread: u64| {
        let mut survey = Survey::new(before, after);
        let chunks = (0..keys.div_ceil(CHUNK)).filter(|chunk| chunk % threads == thread);
        for chunk in chunks {
            if interrupt.came() {
                break;
            }
            let mut random = Random(chunk << 32);
            for number in chunk * CHUNK..((chunk + 1) * CHUNK).min(keys) {
                let point = Point::of(&random.key().0);
                survey.look(before, after, number, point);
            }
        }
        survey
    };
    let mut survey = Survey::new(before, after);
    thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let joined = spawned.into_iter().map(thread::ScopedJoinHandle::join);
        joined.flatten().for_each(|part| survey.add(&part));
    });
    interrupt.check()?;
    match survey.keys == keys {
        true => Ok(survey),
        false => Err(Error::Bench("a key was not looked up".into())),
    }
}

/// What each host holds over its share by capacity: of the hosts with the most and the least.
fn shares(before: &HomeMap, survey: &Survey, report: &mut Report<'_>) -> Result<(), Error> {
    let hosts = before.view().hosts().len();
    for (held, replicas) in survey.held.iter().zip(REPLICAS) {
        // Two copies by capacity are not to be had where one host has more than half of it.
        if hosts < 2 * replicas {
            continue;
        }
        let copies = (survey.keys * replicas as u64) as f64;
        let held = held.iter().enumerate();
        let ratios = held.map(|(host, held)| *held as f64 / (copies * before.share(host)));
        let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
        for ratio in ratios {
            (least, most) = (least.min(ratio), most.max(ratio));
        }
        let case = json!({
            "hosts": hosts, "replicas": replicas, "keys": survey.keys, "blocks": BLOCKS,
        });
        report.row(row(&case, "least_over_share", "", least))?;
        report.row(row(&case, "most_over_share", "", most))?;
    }
    let bytes = (before.bytes() + before.view().bytes()) as f64 / hosts as f64;
    report.row(row(&json!({"hosts": hosts}), "bytes_per_host", "B", bytes))?;
    report.case_done("shares");
    Ok(())
}

fn row(case: &Value, metric: &'static str, unit: &'static str, value: f64) -> Row {
    Row {
        bench: "cluster",
        case: case.clone(),
        metric,
        unit,
        value,
        limit: None,
        ratio: None,
        rounds: 1,
        limit_name: None,
    }
}

/// Copies that have to move over those that must, and whom look-ups ask meanwhile.
fn moves(
    name: &str,
    before: &HomeMap,
    after: &HomeMap,
    event: &Event,
    report: &mut Report<'_>,
) -> Result<(), Error> {
    let hosts = before.view().hosts().len();
    for (shift, replicas) in event.shifts.iter().zip(REPLICAS) {
        let case = |ideal| {
            json!({
                "event": name, "hosts": hosts, "replicas": replicas, "keys": shift.points,
                "ideal": ideal,
            })
        };
        let (case, ideal) = match hosts < 2 * replicas {
            true => (case("held"), grown(before, after, shift)),
            false => {
                let one = |map: &HomeMap| HomeMap::new(Arc::clone(map.view()), replicas);
                let ideal = ideal(&one(before), &one(after)) * shift.points as f64;
                (case("capacity"), ideal)
            }
        };
        let moved = shift.moved as f64 / ideal;
        report.row(row(&case, "moved_over_ideal", "", moved))?;
    }
    let case = json!({"event": name, "hosts": hosts, "replicas": MOST, "keys": event.lookups});
    let mean = event.asked as f64 / event.lookups as f64;
    report.row(row(&case, "hosts_asked", "", mean))?;
    report.row(row(&case, "hosts_asked_max", "", event.asked_most as f64))?;
    let found = event.found as f64 / event.there as f64;
    report.row(row(&case, "found_before_moving", "", found))?;
    report.case_done(name);
    Ok(())
}

/// What hosts hold more than before: no placement where they hold that much moves less.
fn grown(before: &HomeMap, after: &HomeMap, shift: &Shift) -> f64 {
    let held = after.view().hosts().iter().zip(&shift.held_after);
    let grown = held.map(|(host, held)| {
        let old = before.view().find(&host.name);
        let old = old.map_or(0, |place| shift.held_before[place]);
        held.saturating_sub(old)
    });
    grown.sum::<u64>() as f64
}

/// The time of one look-up for one home, beside a race in which every host's logarithm is taken.
fn lookups(map: &HomeMap, rounds: usize, report: &mut Report<'_>) -> Result<(), Error> {
    let hosts = map.view().hosts();
    let plain: Vec<(u64, f64)> = hosts
        .iter()
        .map(|host| {
            (
                Point::of(host.name.as_bytes()).0,
                1.0 / host.capacity as f64,
            )
        })
        .collect();
    let count = TIMED / hosts.len();
    let mut random = Random(5);
    let points: Vec<Point> = (0..count).map(|_| Point(random.next())).collect();
    let times = Rounds::run(rounds, 1, &report.interrupt, |contender| {
        let start = Instant::now();
        for point in &points {
            match contender {
                0 => drop(black_box(race(&plain, *point))),
                _ => drop(black_box(map.first(*point, 1).first().copied())),
            }
        }
        Ok(start.elapsed().as_secs_f64() / count as f64)
    })?;
    report.row(Row {
        value: times.value() * 1e9,
        limit: times.best().map(|(_, seconds)| seconds * 1e9),
        ratio: times.ratio(),
        rounds,
        limit_name: Some("a logarithm a host"),
        ..row(&json!({"hosts": hosts.len()}), "lookup_ns", "ns", 0.0)
    })?;
    report.case_done("look-ups");
    Ok(())
}

/// Weighted rendezvous as it is written down.
fn race(hosts: &[(u64, f64)], point: Point) -> Option<usize> {
    let time = |(seed, pace): &(u64, f64)| {
        let drawn = Random(point.0 ^ seed).next() >> 11;
        -((drawn as f64 + 0.5) / (1_u64 << 53) as f64).ln() * pace
    };
    let times = hosts.iter().map(time).enumerate();
    let first = times.min_by(|one, other| one.1.total_cmp(&other.1));
    first.map(|(host, _)| host)
}
