//! What is there, how much of it, and what left.

use std::time::{Duration, Instant};

use crate::common::{
    self, PATIENCE, Place, eventually, get, key, keys, namespace, namespace_of, put,
};
use kvdepot_store::{Cursor, Depot, DrainTo, Gone, Namespace, NamespaceId, Outcome};

const LEN: usize = 9000;

/// Blocks and bytes of a namespace, as its depot counts them.
fn share(depot: &Depot, ns: &Namespace) -> (u64, u64) {
    let all = depot.namespaces().unwrap();
    let one = all.iter().find(|one| one.id == ns.id()).unwrap();
    (one.blocks, one.bytes)
}

fn numbers(gone: &Gone) -> Vec<u64> {
    let mut numbers: Vec<u64> = gone
        .blocks
        .iter()
        .map(|(identity, _)| common::number(&identity.key))
        .collect();
    numbers.sort_unstable();
    numbers
}

fn fill(ns: &Namespace, numbers: std::ops::Range<u64>) {
    for number in numbers {
        assert_eq!(put(ns, &[number], LEN), [true]);
    }
}

#[test]
fn a_namespace_is_listed_and_counted_also_after_a_restart() {
    let place = Place::new("Cache|Dax", "1MiB", "4MiB");
    let depot = place.open();
    let (a, b) = (namespace_of(&depot, "a"), namespace_of(&depot, "b"));
    put(&a, &[1, 2, 3], LEN);
    assert!(depot.drain(PATIENCE));
    assert_eq!(share(&depot, &a), (3, 3 * LEN as u64));
    put(&b, &[4], LEN);
    assert!(depot.drain(PATIENCE));
    a.remove(&[key(2)]).unwrap();
    assert_eq!(share(&depot, &a), (2, 2 * LEN as u64));
    assert_eq!(share(&depot, &b), (1, LEN as u64));
    depot.close();
    drop((depot, a, b));
    let depot = place.open();
    let (a, b) = (namespace_of(&depot, "a"), namespace_of(&depot, "b"));
    assert_eq!(share(&depot, &a), (2, 2 * LEN as u64));
    assert_eq!(share(&depot, &b), (1, LEN as u64));
    assert_eq!(
        a.blocks().unwrap(),
        [(key(1), LEN as u64), (key(3), LEN as u64)]
    );
    let described = depot.namespaces().unwrap();
    assert!(described.iter().any(|one| {
        let text = one.description.as_deref().unwrap_or_default();
        one.id == a.id() && text.starts_with("model=a ")
    }));
}

#[test]
fn what_leaves_one_tier_and_is_in_another_is_not_gone() {
    let place = Place::new("Cache|Dax", "1MiB", "64MiB").with("", "promote", false);
    let depot = place.open();
    let ns = namespace(&depot);
    assert_eq!(depot.gone(1000).unwrap(), Gone::default());
    let many: Vec<u64> = (0..400).collect();
    many.chunks(40).for_each(|some| {
        put(&ns, some, LEN);
        assert!(depot.drain(PATIENCE));
    });
    assert!(depot.stats().tiers[0].evicted_blocks > 0);
    assert_eq!(depot.gone(1000).unwrap(), Gone::default());
    // The last one is in both tiers.
    ns.remove(&keys([7, 8, 399])).unwrap();
    assert_eq!(numbers(&depot.gone(1000).unwrap()), [7, 8, 399]);
    assert_eq!(depot.gone(1000).unwrap(), Gone::default());
}

#[test]
fn evictions_are_noted_once_somebody_asked_and_no_more_than_asked() {
    let depot = Place::new("Dax", "", "2MiB").open();
    let ns = namespace(&depot);
    fill(&ns, 0..200);
    assert_eq!(depot.gone(1000).unwrap(), Gone::default());
    fill(&ns, 200..400);
    let gone = depot.gone(1000).unwrap();
    assert!(!gone.overflowed);
    let there: Vec<u64> = ns
        .blocks()
        .unwrap()
        .iter()
        .map(|(key, _)| common::number(key))
        .collect();
    assert!(numbers(&gone).iter().all(|number| !there.contains(number)));
    assert_eq!(share(&depot, &ns).0, there.len() as u64);
    fill(&ns, 400..600);
    let _unlimited = depot.gone(5).unwrap();
    fill(&ns, 600..700);
    let gone = depot.gone(5).unwrap();
    assert!(gone.overflowed && gone.blocks.len() == 5);
    get(&ns, &[699], LEN);
}

#[test]
fn a_listing_in_pages_has_every_block_once_for_each_tier() {
    let place = Place::new("Cache|Dax", "1MiB", "8MiB")
        .with("", "promote", false)
        .with("dax", "records", 2048);
    let depot = place.open();
    let (ns, other) = (namespace_of(&depot, "a"), namespace_of(&depot, "b"));
    fill(&other, 0..50);
    for numbers in (0..400).collect::<Vec<u64>>().chunks(40) {
        put(&ns, numbers, LEN);
        assert!(depot.drain(PATIENCE));
    }
    let near = depot.stats().tiers[0].blocks as usize;
    for limit in [1, 7, 100, 16_384, usize::MAX] {
        let (mut listed, mut from, mut pages) = (Vec::new(), None, 0);
        loop {
            let page = ns.blocks_page(from, limit).unwrap();
            assert!(page.blocks.len() <= limit);
            listed.extend(page.blocks);
            pages += 1;
            // What a caller keeps of it as bytes.
            from = page.next.map(|next| Cursor::from_bytes(&next.to_bytes()));
            if from.is_none() {
                break;
            }
        }
        assert_eq!(listed.len(), 400 + near, "in pages of {limit}");
        assert!(pages >= listed.len() / limit.max(1));
        listed.sort_unstable();
        listed.dedup();
        assert_eq!(listed, ns.blocks().unwrap());
    }
    assert!(ns.blocks_page(None, 0).is_err());
    // Cursors that no listing has answered.
    for byte in [1, 0x7F, 0xFF] {
        let from = Cursor::from_bytes(&[byte; 20]);
        assert!(ns.blocks_page(Some(from), 100).unwrap().blocks.len() <= 100);
    }
}

#[test]
fn a_block_that_goes_to_another_device_while_it_is_listed_is_not_missed() {
    let place = Place::new("Dax", "", "8MiB").with("dax", "records", 2048);
    let depot = place.open();
    let ns = namespace(&depot);
    fill(&ns, 0..300);
    let second = place.dir().join("second");
    depot.add_device(&second, Some(16 << 20)).unwrap();
    let listed = ns.blocks().unwrap();
    let first = ns.blocks_page(None, 100).unwrap();
    depot
        .drain_device(&place.arena(), DrainTo::Others, PATIENCE)
        .unwrap();
    let mut met = first.blocks;
    let mut from = first.next;
    while from.is_some() {
        let page = ns.blocks_page(from, 100).unwrap();
        met.extend(page.blocks);
        from = page.next;
    }
    met.sort_unstable();
    met.dedup();
    assert_eq!(met, listed);
}

#[test]
fn endless_namespaces_cost_no_more_than_the_blocks_there_is_room_for() {
    let place = Place::new("Cache", "8MiB", "");
    let depot = place.open();
    let nth = |number: u64| {
        let mut id = [7; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        depot.namespace_by_id(NamespaceId(id))
    };
    let one_round = |rounds: std::ops::Range<u64>| {
        let begun = Instant::now();
        for number in rounds {
            assert_eq!(put(&nth(number), &[number], 100), [true]);
        }
        begun.elapsed()
    };
    let first = one_round(0..10_000);
    one_round(10_000..90_000);
    let last = one_round(90_000..100_000);
    assert!(
        last < first * 4 + Duration::from_secs(1),
        "{first:?}, then {last:?}"
    );
    // 2,048 blocks have room.
    let all = depot.namespaces().unwrap();
    assert!(all.len() <= 8192, "{} namespaces", all.len());
    // Eviction may still run ahead, between the two.
    eventually("the namespaces' blocks are the tier's", || {
        let all = depot.namespaces().unwrap().into_iter();
        all.map(|one| one.blocks).sum::<u64>() == depot.stats().tiers[0].blocks
    });
    let newest = nth(99_999);
    assert_eq!(newest.blocks().unwrap(), [(key(99_999), 100)]);
    assert_eq!(get(&newest, &[99_999], 100), [Outcome::Done]);
    assert!(nth(5).blocks().unwrap().is_empty());
}
