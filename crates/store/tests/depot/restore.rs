//! Restores: through the staging slab, only the consecutive hits, and ahead of their use.

use std::os::unix::fs::FileExt;

use crate::common::{PATIENCE, Place, assert_at_rest, eventually, keys, namespace, put};
use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, GetOptions, Namespace, Outcome};
use kvdepot_testkit::bytes::content;
use serde_json::json;

fn staged() -> GetOptions {
    let mut options = GetOptions::default();
    options.staged = true;
    options
}

fn prefix() -> GetOptions {
    let mut options = GetOptions::default();
    options.prefix = true;
    options
}

/// Untouched memory.
const BEFORE: u8 = 0xEE;

/// Gets blocks into memory at odd addresses; panics at wrong bytes, and at bytes beside them that
/// changed. Also answers whether each buffer is as it was before.
fn get(
    ns: &Namespace,
    numbers: &[u64],
    len: usize,
    options: GetOptions,
) -> (Vec<Outcome>, Vec<bool>) {
    let around: Vec<Buffer> = numbers
        .iter()
        .map(|_| Buffer::from_vec(vec![BEFORE; len + 2]))
        .collect();
    let inner = around.iter().map(|around| around.slice(1, len).unwrap());
    let buffers = BlockBuffers::whole(inner);
    let task = ns.get_with(keys(numbers.iter().copied()), buffers, options);
    let task = task.unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    let outcomes = task.outcomes();
    let mut untouched = Vec::new();
    for ((number, around), outcome) in numbers.iter().zip(&around).zip(&outcomes) {
        let bytes = around.to_vec();
        assert_eq!([bytes[0], bytes[len + 1]], [BEFORE; 2], "block {number}");
        let right = bytes[1..=len] == content(*number, len);
        assert!(
            *outcome != Outcome::Done || right,
            "wrong bytes of block {number}"
        );
        untouched.push(bytes.iter().all(|byte| *byte == BEFORE));
    }
    (outcomes, untouched)
}

fn all(numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.collect()
}

#[test]
fn staged_gets_deliver_what_direct_ones_do() {
    for pipeline in ["Cache", "Dax", "Cache|Dax"] {
        let place = Place::new(pipeline, "64MiB", "64MiB")
            .with("", "staging_slab", "128KiB")
            .with("", "staging_regions", 2);
        let depot = place.open();
        let ns = namespace(&depot);
        for (first, len) in [(0, 1), (100, 4096), (200, 70_000), (300, 3 << 20)] {
            put(&ns, &all(first..first + 8), len);
            let (outcomes, _) = get(&ns, &all(first..first + 10), len, staged());
            assert_eq!(outcomes[..8], [Outcome::Done; 8], "{pipeline} {len}");
            assert_eq!(outcomes[8..], [Outcome::Miss; 2], "{pipeline} {len}");
        }
        assert_at_rest(&depot);
    }
}

#[test]
fn a_staged_block_that_does_not_verify_is_corrupt_and_unpublished() {
    let place = Place::new("Dax", "", "16MiB");
    let depot = place.open();
    let ns = namespace(&depot);
    let len = 300_000;
    put(&ns, &all(0..4), len);
    let arena = std::fs::read(place.arena()).unwrap();
    let begin = &content(2, len)[..64];
    let at = arena.windows(64).position(|bytes| bytes == begin).unwrap() + 100_000;
    // In the file, which the owner has mapped.
    let file = std::fs::File::options().write(true).open(place.arena());
    file.unwrap()
        .write_all_at(&[!arena[at]], at as u64)
        .unwrap();
    let (outcomes, _) = get(&ns, &all(0..4), len, staged());
    let expected = [
        Outcome::Done,
        Outcome::Done,
        Outcome::Corrupt,
        Outcome::Done,
    ];
    assert_eq!(outcomes, expected);
    assert_eq!(ns.prefix(&keys(0..4)).unwrap(), 2);
}

#[test]
fn a_prefix_get_ends_at_the_first_gap_and_touches_nothing_behind_it() {
    for (count, gap) in [(10, 0), (10, 3), (700, 40), (700, 699), (10, 10)] {
        let place = Place::new("Cache|Dax", "8MiB", "32MiB");
        let depot = place.open();
        let ns = namespace(&depot);
        let stored: Vec<u64> = (0..count).filter(|number| *number != gap).collect();
        put(&ns, &stored, 5000);
        let (outcomes, untouched) = get(&ns, &all(0..count), 5000, prefix());
        let gap = gap as usize;
        let hits = outcomes[..gap]
            .iter()
            .all(|outcome| *outcome == Outcome::Done);
        assert!(hits, "{count} {gap}");
        let misses = outcomes[gap..]
            .iter()
            .all(|outcome| *outcome == Outcome::Miss);
        assert!(misses, "{count} {gap}");
        assert!(
            untouched[gap..].iter().all(|untouched| *untouched),
            "{count} {gap}"
        );
        let (outcomes, _) = get(&ns, &all(0..count), 5000, GetOptions::default());
        let holes = outcomes.iter().filter(|outcome| **outcome == Outcome::Miss);
        assert_eq!(
            holes.count(),
            usize::from(gap < count as usize),
            "a get has holes"
        );
        assert_at_rest(&depot);
    }
}

#[test]
fn a_prefix_goes_on_in_another_tier_and_ends_where_a_buffer_does_not_fit() {
    let place = Place::new("Cache|Dax", "8MiB", "32MiB").with("", "promote", false);
    let depot = place.open();
    put(&namespace(&depot), &[0, 1, 2, 3, 6], 5000);
    depot.close();
    let depot = place.open();
    let ns = namespace(&depot);
    // Now far; these are near too.
    put(&ns, &[4, 5], 5000);
    let (outcomes, _) = get(&ns, &all(0..7), 5000, prefix());
    assert_eq!(outcomes, [Outcome::Done; 7]);
    put(&ns, &[7], 100);
    put(&ns, &[8], 5000);
    let (outcomes, untouched) = get(&ns, &all(5..9), 5000, prefix());
    let expected = [Outcome::Done, Outcome::Done, Outcome::Length, Outcome::Miss];
    assert_eq!(outcomes, expected);
    assert_eq!(untouched, [false, false, true, true]);
    assert_at_rest(&depot);
}

/// A depot whose blocks are all far.
fn far(cache: &str, numbers: &[u64], len: usize) -> (Place, Depot) {
    let place = Place::new("Cache|Dax", cache, "64MiB").with("", "promote", false);
    let depot = place.open();
    assert!(put(&namespace(&depot), numbers, len).iter().all(|put| *put));
    depot.close();
    let depot = place.open();
    (place, depot)
}

#[test]
fn a_prefetch_brings_the_consecutive_hits_near() {
    let stored: Vec<u64> = all(0..40).into_iter().chain(50..60).collect();
    let (_place, depot) = far("32MiB", &stored, 70_000);
    let ns = namespace(&depot);
    assert_eq!(ns.nearest(&keys(0..2)).unwrap(), [Some("Dax"); 2]);
    let task = ns.prefetch(&keys(0..60)).unwrap();
    task.wait_released(Some(std::time::Duration::ZERO)).unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    let outcomes = task.outcomes();
    assert_eq!(outcomes[..40], [Outcome::Done; 40]);
    assert_eq!(outcomes[40..], [Outcome::Miss; 20]);
    assert_eq!(ns.nearest(&keys(0..40)).unwrap(), [Some("Cache"); 40]);
    assert_eq!(ns.nearest(&keys(50..60)).unwrap(), [Some("Dax"); 10]);
    assert_eq!(depot.stats().promoted_blocks, 40);
    // Again: they are there.
    let again = ns.prefetch(&keys(0..40)).unwrap();
    assert!(again.is_done(), "nothing is waited for");
    assert!(again.wait(None).unwrap().iter().all(|near| *near));
    let (outcomes, _) = get(&ns, &all(0..40), 70_000, GetOptions::default());
    assert_eq!(outcomes, [Outcome::Done; 40]);
    assert_eq!(depot.stats().hit_blocks, [40, 0]);
    assert_at_rest(&depot);
}

#[test]
fn a_prefetch_of_more_than_the_near_tier_takes_is_answered() {
    let (_place, depot) = far("4MiB", &all(0..30), 1 << 20);
    let ns = namespace(&depot);
    let task = ns.prefetch(&keys(0..30)).unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    let outcomes = task.outcomes();
    assert_eq!(outcomes[0], Outcome::Done);
    assert_eq!(outcomes[29], Outcome::Dropped);
    assert!(ns.prefetch(&[]).unwrap().wait(None).unwrap().is_empty());
    assert_at_rest(&depot);
}

#[test]
fn a_close_answers_prefetches_under_way() {
    let (_place, depot) = far("48MiB", &all(0..40), 512 << 10);
    let ns = namespace(&depot);
    let task = ns.prefetch(&keys(0..40)).unwrap();
    depot.close();
    eventually("the end of the task", || task.is_done());
    let known = [Outcome::Done, Outcome::Closed, Outcome::Dropped];
    assert!(
        task.outcomes()
            .iter()
            .all(|outcome| known.contains(outcome))
    );
    assert!(ns.prefetch(&keys(0..1)).is_err());
}

#[test]
fn staging_options_are_checked() {
    let refused = |settings| Config::new("Cache", &settings).unwrap_err().to_string();
    let text = refused(json!({"staging_slab": "1MiB", "staging_regions": 17}));
    assert!(
        text.contains("staging_slab") && text.contains("17"),
        "{text}"
    );
    let text = refused(json!({"staging_regions": 5000}));
    assert!(
        text.contains("staging_regions") && text.contains("4096"),
        "{text}"
    );
    let place = Place::new("Cache", "1MiB", "").with("", "staging_slab", "64KiB");
    let text = Depot::open(&place.config())
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(text.contains("staging_slab"), "regions by lanes: {text}");
}
