//! Calls of many keys: no lock is held for all of them.

use kvdepot_arena::held;
use kvdepot_store::{Checksum, Key, Reservation};
use kvdepot_testkit::few_rounds;

use crate::common::{Place, get, key, keys, namespace, start_put};

/// Steps under a lock: far more than a turn takes, and far fewer than all keys.
const MOST: u32 = 1000;

fn in_turns<R>(pipeline: &str, call: &str, ask: impl FnOnce() -> R) -> R {
    held::most_steps();
    let answer = ask();
    let most = held::most_steps();
    assert!(
        (1..MOST).contains(&most),
        "{pipeline}, {call}: {most} steps"
    );
    answer
}

#[test]
fn no_lock_is_held_for_all_keys_of_a_call() {
    // 256,000 in `make test-all`.
    let count = few_rounds(4000, 12_800);
    let room = format!("{}KiB", 10 * count);
    for pipeline in ["Cache", "Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, &room, &room);
        let place = match pipeline {
            "Cache" => place,
            _ => place.with("dax", "records", 2 * count),
        };
        let depot = place.open();
        let ns = namespace(&depot);
        let numbers: Vec<u64> = (0..count).collect();
        let blocks: Vec<(Key, Vec<u64>)> = numbers.iter().map(|at| (key(*at), vec![16])).collect();
        let reserve = || ns.reserve(&blocks).unwrap().into_iter().flatten();
        let reserve = || reserve().collect::<Vec<Reservation>>();

        let reserved = in_turns(pipeline, "reserve", reserve);
        assert_eq!(reserved.len(), count as usize);
        let others = in_turns(pipeline, "reserve what others have reserved", reserve);
        assert_eq!(others, []);
        let joined = in_turns(pipeline, "put what others have reserved", || {
            start_put(&ns, &numbers, 16)
        });
        in_turns(pipeline, "abort", || ns.abort(&reserved));
        let stored = joined.wait(None).unwrap();
        assert!(!stored.contains(&false), "puts take over what is aborted");
        let again = in_turns(pipeline, "put what is stored", || {
            start_put(&ns, &numbers, 16)
        });
        assert!(!again.wait(None).unwrap().contains(&false));
        let known = in_turns(pipeline, "reserve what is stored", reserve);
        assert_eq!(known, []);
        in_turns(pipeline, "get", || get(&ns, &numbers, 16));

        assert_eq!(ns.remove(&keys(0..count)).unwrap(), count as usize);
        let reserved = reserve();
        assert_eq!(reserved.len(), count as usize);
        let sums = vec![vec![Checksum([7; 16])]; reserved.len()];
        let stored = in_turns(pipeline, "commit", || ns.commit(&reserved, &sums));
        assert!(!stored.unwrap().contains(&false));
        depot.close();
    }
}
