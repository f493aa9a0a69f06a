//! Many threads at once over tiers so small that eviction, write-back and promotion never stop:
//! no wrong bytes, nothing left over, and an end.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{
    self, PATIENCE, Place, Served, assert_at_rest, eventually, has, key, keys, namespace, put,
    start_put, verify,
};
use kvdepot_service::Mover;
use kvdepot_store::{BlockBuffers, Buffer, Error, Namespace, Outcome, Pin, Reservation, Task};
use kvdepot_testkit::bytes::content;
use kvdepot_testkit::{Rng, rounds};

const KEYS: u64 = 90;

/// Each key's block has one length, and one content: its number's.
fn len(number: u64) -> usize {
    match number % 10 {
        0 => 150_000 + number as usize,
        1..4 => 1 + number as usize * 17,
        4 => 8192,
        _ => 9_000 + number as usize * 31,
    }
}

fn run(rng: &mut Rng) -> Vec<u64> {
    let first = rng.below(KEYS);
    (first..(first + rng.between(1, 8)).min(KEYS)).collect()
}

struct Worker<'a> {
    ns: Namespace,
    mover: &'a Mover,
    rng: Rng,
    pins: Vec<Pin>,
    reserved: Vec<(u64, Reservation)>,
    hits: &'a AtomicU64,
}

impl Worker<'_> {
    fn step(&mut self) {
        match self.rng.below(16) {
            0..5 => self.put(),
            5..10 => self.get(),
            10 => {
                let number = self.rng.below(KEYS);
                self.ns.remove(&[key(number)]).unwrap();
            }
            11 => {
                let numbers = run(&mut self.rng);
                let pins = self.ns.pin(&keys(numbers), self.rng.once_in(2)).unwrap();
                self.pins.extend(pins.into_iter().flatten());
            }
            12 | 13 => self.end_pins(),
            14 if self.reserved.len() < 3 => self.reserve(),
            _ => self.end_reservation(),
        }
    }

    fn put(&mut self) {
        let numbers = run(&mut self.rng);
        let buffers = BlockBuffers::whole(
            numbers
                .iter()
                .map(|number| common::block(*number, len(*number))),
        );
        let task = self.ns.put(keys(numbers), buffers).unwrap();
        // One that holds reservations may not wait for others': they could wait for its own.
        if self.reserved.is_empty() && !self.rng.once_in(4) {
            task.wait(Some(PATIENCE)).expect("a put never ended");
            assert!(!task.outcomes().contains(&Outcome::Corrupt));
        }
    }

    fn get(&mut self) {
        let numbers = run(&mut self.rng);
        let buffers: Vec<Buffer> = numbers
            .iter()
            .map(|number| Buffer::from_vec(vec![0; len(*number)]))
            .collect();
        let task = self
            .ns
            .get(keys(numbers.clone()), BlockBuffers::whole(buffers.clone()))
            .unwrap();
        task.wait(Some(PATIENCE)).expect("a get never ended");
        for ((number, buffer), outcome) in numbers.iter().zip(buffers).zip(task.outcomes()) {
            match outcome {
                Outcome::Miss => {}
                Outcome::Done => {
                    assert_eq!(
                        buffer.to_vec(),
                        content(*number, len(*number)),
                        "wrong bytes"
                    );
                    self.hits.fetch_add(1, Ordering::Relaxed);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn end_pins(&mut self) {
        let pins = std::mem::take(&mut self.pins);
        for pin in &pins {
            let number = common::number(&pin.key());
            let buffer = Buffer::from_vec(vec![0; len(number)]);
            let blocks = BlockBuffers::whole([buffer.clone()]);
            let job = self.mover.load(&[pin.placement()], &blocks, 0).unwrap();
            assert!(
                job.wait(Some(PATIENCE)) && job.checksums()[0].is_some(),
                "pinned: {number}"
            );
            assert_eq!(buffer.to_vec(), content(number, len(number)), "wrong bytes");
        }
        self.ns.unpin(&pins, true);
    }

    fn reserve(&mut self) {
        let number = self.rng.below(KEYS);
        let parts = vec![len(number) as u64];
        let reserved = self.ns.reserve(&[(key(number), parts)]).unwrap();
        self.reserved
            .extend(reserved.into_iter().flatten().map(|one| (number, one)));
    }

    fn end_reservation(&mut self) {
        let Some((number, reserved)) = self.reserved.pop() else {
            return;
        };
        if self.rng.once_in(3) {
            self.ns.abort(&[reserved]);
            return;
        }
        let blocks = BlockBuffers::whole([common::block(number, len(number))]);
        let job = self
            .mover
            .store(&[reserved.placement()], &blocks, 0)
            .unwrap();
        assert!(job.wait(Some(PATIENCE)));
        let sum = job.checksums()[0].unwrap();
        assert_eq!(self.ns.commit(&[reserved], &[vec![sum]]).unwrap(), [true]);
    }
}

fn churn(place: &Place, name: &str) {
    let mut rng = Rng::for_test(name);
    let depot = place.serve();
    let mover = Mover::attach(&place.socket(), Some(2), true).unwrap();
    let hits = AtomicU64::new(0);
    let end = Instant::now() + Duration::from_secs(2 * rounds(1));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut worker = Worker {
                ns: namespace(&depot),
                mover: &mover,
                rng: rng.fork(),
                pins: Vec::new(),
                reserved: Vec::new(),
                hits: &hits,
            };
            scope.spawn(move || {
                while Instant::now() < end {
                    worker.step();
                }
                worker.end_pins();
                while !worker.reserved.is_empty() {
                    worker.end_reservation();
                }
            });
        }
    });
    eventually("rest", || {
        let stats = depot.stats();
        stats.write_back_bytes == 0
            && stats
                .tiers
                .iter()
                .all(|tier| tier.pinned_blocks + tier.reserved_blocks == 0)
    });
    assert_at_rest(&depot);
    let stats = depot.stats();
    assert!(hits.load(Ordering::Relaxed) > 100);
    assert!(
        stats
            .tiers
            .iter()
            .all(|tier| tier.evicted_blocks > 0 && tier.corrupt_blocks == 0)
    );
    if stats.tiers.len() == 2 {
        assert!(stats.promoted_blocks > 0 && stats.hit_blocks.iter().all(|hits| *hits > 0));
    }
    let begun = Instant::now();
    depot.close();
    assert!(begun.elapsed() < PATIENCE);
    drop(mover);
    let found = verify(&place.arena());
    assert_eq!(found.bad, []);
    assert_eq!(found.damaged_records, [] as [u32; 0]);
    let depot = place.serve();
    assert_eq!(depot.opening().outranked, 0);
    assert_at_rest(&depot);
}

#[test]
fn two_tiers_that_wait() {
    let place = Place::new("Cache|Dax", "600KiB", "1200KiB").with("", "write_back_depth", "300KiB");
    churn(&place, "concurrency::two_tiers_that_wait");
}

#[test]
fn two_tiers_that_drop() {
    let place = Place::new("Cache|Dax", "600KiB", "1200KiB").with("", "overload", "drop");
    churn(&place, "concurrency::two_tiers_that_drop");
}

#[test]
fn a_queue_so_short_that_most_puts_go_round_it() {
    let place = Place::new("Cache|Dax", "600KiB", "1200KiB").with("", "write_back_depth", "20KiB");
    churn(
        &place,
        "concurrency::a_queue_so_short_that_most_puts_go_round_it",
    );
}

#[test]
fn one_tier_for_power_cuts() {
    let place = Place::new("Dax", "", "1200KiB")
        .with("dax", "durability", "power")
        .with("dax", "records", 40);
    churn(&place, "concurrency::one_tier_for_power_cuts");
}

#[test]
fn closing_in_the_middle_of_everything_waits_and_ends() {
    let mut rng = Rng::for_test("concurrency::closing_in_the_middle_of_everything_waits_and_ends");
    for round in 0..rounds(20) {
        let place = Place::new("Cache|Dax", "600KiB", "1200KiB");
        let depot = place.serve();
        let tasks: Mutex<Vec<Task>> = Mutex::new(Vec::new());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let (ns, tasks, stop, mut rng) = (namespace(&depot), &tasks, &stop, rng.fork());
                scope.spawn(move || {
                    loop {
                        let numbers = run(&mut rng);
                        let blocks = BlockBuffers::whole(
                            numbers
                                .iter()
                                .map(|number| common::block(*number, len(*number))),
                        );
                        let closed = stop.load(Ordering::SeqCst);
                        let task = if rng.once_in(2) {
                            ns.put(keys(numbers), blocks)
                        } else {
                            ns.get(keys(numbers), blocks)
                        };
                        match task {
                            Ok(task) => tasks.lock().unwrap().push(task),
                            Err(Error::Closed(_)) => return,
                            Err(error) => panic!("{error}"),
                        }
                        assert!(!closed, "a call after close succeeded");
                    }
                });
            }
            std::thread::sleep(Duration::from_micros(rng.below(30_000)));
            depot.close();
            // Everything that had begun is over, and nobody touches a buffer any more.
            for task in tasks.lock().unwrap().iter() {
                assert!(task.is_done(), "round {round}: {:?}", task.outcomes());
            }
            stop.store(true, Ordering::SeqCst);
        });
        let next = place.serve();
        assert_at_rest(&next);
        next.close();
        assert_eq!(verify(&place.arena()).bad, []);
    }
}

#[test]
fn puts_of_one_key_from_everywhere_all_end_alike() {
    for (pipeline, depth) in [
        ("Cache", 0),
        ("Dax", 0),
        ("Cache|Dax", 20_000),
        ("Cache|Dax", 400_000),
    ] {
        let mut place = Place::new(pipeline, "600KiB", "1200KiB");
        if depth > 0 {
            place = place.with("", "write_back_depth", depth);
        }
        let depot = place.serve();
        for round in 0..rounds(100) {
            let barrier = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    let (ns, barrier) = (namespace(&depot), &barrier);
                    scope.spawn(move || {
                        let numbers = [round, round, 100 + round % 7];
                        barrier.wait();
                        let task = start_put(&ns, &numbers, 15_000);
                        let stored = task.wait(Some(PATIENCE)).expect("a put never ended");
                        assert_eq!(stored, [true; 3], "{:?}", task.outcomes());
                    });
                }
            });
        }
        assert_at_rest(&depot);
    }
}

#[test]
fn what_is_put_after_a_removal_is_there_and_what_is_removed_last_is_not() {
    let place = Place::new("Cache|Dax", "8MiB", "8MiB");
    let depot = place.serve();
    let ns = namespace(&depot);
    let mut rng = Rng::for_test("what_is_put_after_a_removal_is_there");
    for _ in 0..rounds(300) {
        // On its way to the far tier, and on its way back.
        let under_way = start_put(&ns, &[1, 2], 200_000);
        under_way.wait_released(Some(PATIENCE)).unwrap();
        std::thread::sleep(Duration::from_micros(rng.below(300)));
        ns.remove(&keys([1, 2])).unwrap();
        assert_eq!(put(&ns, &[1], 200_000), [true]);
        assert_eq!(under_way.wait(Some(PATIENCE)).unwrap(), [true; 2]);
        assert!(depot.drain(PATIENCE));
        assert_eq!(ns.contains(&keys([1, 2])).unwrap(), [true, false]);
        assert!(has(&ns, &[1], 200_000));
    }
    assert_at_rest(&depot);
}

/// Who closes takes it that nothing is touched any more, whoever began to close.
#[test]
fn whoever_closes_again_waits_for_the_first() {
    const LEN: usize = 16 << 20;
    let place = Place::new("Cache", "20MiB", "").with("", "lanes", 1);
    let owner = place.serve();
    assert_eq!(put(&namespace(&owner), &[1], LEN), [true]);
    let client = kvdepot_service::connect(&place.socket(), Some(1)).unwrap();
    for (who, depot) in [("a client", client), ("the owner", owner)] {
        let ns = namespace(&depot);
        // One lane fills it again and again.
        let out = Buffer::from_vec(vec![0; LEN]);
        let get = || ns.get(keys([1]), BlockBuffers::whole([out.clone()]));
        let gets: Vec<Task> = (0..40).map(|_| get().unwrap()).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| depot.close());
            while ns.contains(&[key(1)]).is_ok() {
                std::thread::yield_now();
            }
            depot.close();
            let done = gets.iter().filter(|task| task.is_done()).count();
            assert_eq!(done, gets.len(), "{who}");
        });
    }
}
