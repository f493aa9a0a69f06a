//! `admission: learned`: what is not stored, or not brought near, where others would have to go.

use crate::common::{PATIENCE, Place, get, key, keys, namespace, pin_all, put, start_put};
use kvdepot_store::{Key, Namespace, NamespaceSpec, Outcome, SAVED};

#[test]
fn what_left_unread_is_not_stored_again_before_somebody_asks_and_free_room_is_always_used() {
    let place = Place::new("Dax", "", "1MiB").with("", "admission", "learned");
    let depot = place.open();
    let ns = namespace(&depot);
    let blocks = depot.stats().tiers[0].capacity_bytes / 4096;
    let (first, second): (Vec<u64>, Vec<u64>) =
        ((0..blocks).collect(), (500..500 + blocks).collect());
    let all = |numbers: &[u64]| {
        // What is larger than an eighth of the arena finds room when it is offered again.
        put(&ns, numbers, 4096);
        put(&ns, numbers, 4096).iter().all(|stored| *stored)
    };
    assert!(all(&first) && all(&second), "what is new is stored");
    // Eviction ahead of need may leave some room: all is held.
    let pins = pin_all(&ns, 500..500 + blocks);
    let room = (2000..).map(|number| ns.reserve(&[(key(number), vec![4096])]).unwrap().remove(0));
    let held: Vec<_> = room.map_while(|reserved| reserved).collect();
    let before = depot.stats().tiers[0].clone();
    let outcomes = |numbers: &[u64]| {
        let task = start_put(&ns, numbers, 4096);
        let _stored = task.wait(Some(PATIENCE)).unwrap();
        task.outcomes()
    };
    let declined = |outcome: &Outcome| *outcome == Outcome::Declined;
    assert!(outcomes(&first).iter().all(declined));
    let stats = depot.stats();
    assert_eq!(stats.put_declined_blocks, blocks);
    assert_eq!(stats.tiers[0].stored_blocks, before.stored_blocks);
    // Nothing is kept behind what is declined, and what is there stays.
    let task = start_put(&ns, &[500, 0, 900, 501], 4096);
    assert_eq!(
        task.wait(Some(PATIENCE)).unwrap(),
        [true, false, false, true]
    );
    // A reservation is the same.
    let wanted = [
        (key(500), vec![4096]),
        (key(0), vec![4096]),
        (key(900), vec![4096]),
    ];
    assert_eq!(ns.reserve_strict(&wanted).unwrap(), [None, None, None]);
    // Whoever inspects asks for nothing.
    assert_eq!(ns.nearest(&keys([0])).unwrap(), [None]);
    assert_eq!(put(&ns, &[0], 4096), [false]);
    // Asked for, a block is wanted, whoever asks.
    let asks: [fn(&Namespace, &[Key]); 4] = [
        |ns, keys| assert_eq!(ns.contains(keys).unwrap(), [false]),
        |ns, keys| assert_eq!(ns.pin(keys, false).unwrap(), [None]),
        |ns, keys| drop(ns.prefetch(keys).unwrap().wait(Some(PATIENCE)).unwrap()),
        |ns, _| assert_eq!(get(ns, &[73], 4096), [Outcome::Miss]),
    ];
    for (number, ask) in (70..).zip(asks) {
        assert_eq!(outcomes(&[number]), [Outcome::Declined]);
        ask(&ns, &keys([number]));
        assert_eq!(outcomes(&[number]), [Outcome::Full], "{number}");
    }
    ns.unpin(&pins, false);
    ns.abort(&held);
    // What follows it is, too.
    assert_eq!(ns.prefix(&keys([0])).unwrap(), 0);
    assert_eq!(put(&ns, &[0, 1, 2], 4096), [true, true, true]);
    // Where nothing has to go everything is stored.
    assert!(ns.remove(&keys(second)).unwrap() > 0);
    assert!(
        put(&ns, &(2..50).collect::<Vec<_>>(), 4096)
            .iter()
            .all(|stored| *stored)
    );
    // What is there needs no room: two that left unread have some, before and behind it.
    let there: Vec<u64> = (500..400 + blocks).collect();
    assert!(all(&there));
    let around = [&[60][..], &there, &[61]].concat();
    assert!(all(&around));
    depot.close();
}

#[test]
fn what_is_saved_on_purpose_is_stored_again_whatever_left_unread() {
    let place = Place::new("Dax", "", "1MiB").with("", "admission", "learned");
    let depot = place.open();
    let spec = |group: String| NamespaceSpec {
        model: "m".into(),
        dtype: "f16".into(),
        block_tokens: 16,
        group: Some(group),
        ..NamespaceSpec::default()
    };
    let blocks = depot.stats().tiers[0].capacity_bytes / 4096;
    for (group, stores) in [(format!("{SAVED}x"), true), ("x".to_owned(), false)] {
        let ns = depot.namespace(&spec(group)).unwrap();
        for from in [0, 500] {
            let numbers: Vec<u64> = (from..from + blocks).collect();
            put(&ns, &numbers, 4096);
            assert!(put(&ns, &numbers, 4096).iter().all(|stored| *stored));
        }
        assert_eq!(put(&ns, &[0, 1, 2], 4096), [stores; 3]);
    }
    depot.close();
}

#[test]
fn what_lies_deep_is_not_stored_while_it_is_asked_for_less_than_the_rest() {
    let place = Place::new("Dax", "", "4MiB").with("", "admission", "learned");
    let depot = place.open();
    let ns = namespace(&depot);
    // New prompts of 31 blocks, which are asked for as far as `read`: how many of the last 64 were
    // stored whole. The others lost what lies deep, and nothing before it.
    let prompts = |calls: std::ops::Range<u64>, read: u64| {
        let last = calls.end - 64;
        let whole = calls.filter(|call| {
            let begin = call * 31;
            let task = start_put(&ns, &(begin..begin + 31).collect::<Vec<_>>(), 4096);
            let stored = task.wait(Some(PATIENCE)).unwrap();
            assert!(stored.is_sorted_by(|one, next| one >= next) && stored[22]);
            let gone = |outcome: &Outcome| matches!(outcome, Outcome::Done | Outcome::Declined);
            assert!(task.outcomes().iter().all(gone));
            // What can never be stored makes nobody forget.
            let giant = [(key(1 << 32 | call), vec![1 << 34])];
            assert_eq!(ns.reserve(&giant).unwrap(), [None]);
            let _hits = ns.prefix(&keys(begin..begin + read)).unwrap();
            *call >= last && stored[30]
        });
        whole.count()
    };
    let whole = prompts(0..200, 8);
    assert!((2..=8).contains(&whole), "{whole}: one in 32 is not judged");
    assert!(depot.stats().put_declined_blocks >= 8 * 56);
    let whole = prompts(200..400, 31);
    assert!(whole >= 56, "{whole}: all are asked for alike");
    depot.close();
}

#[test]
fn a_far_block_takes_the_place_of_others_near_when_it_was_read_far_lately_before() {
    let place = Place::new("Cache|Dax", "1MiB", "16MiB").with("", "admission", "learned");
    let depot = place.open();
    let ns = namespace(&depot);
    let near = depot.stats().tiers[0].capacity_bytes / 4096;
    for begin in (0..4 * near).step_by(32) {
        let numbers: Vec<u64> = (begin..begin + 32).collect();
        assert!(put(&ns, &numbers, 4096).iter().all(|stored| *stored));
    }
    let mut prefetched = near..;
    let mut promoted = |numbers: &[u64]| {
        let before = depot.stats().promoted_blocks;
        let got = get(&ns, numbers, 4096);
        assert!(got.iter().all(|outcome| *outcome == Outcome::Done));
        // It comes behind what the get has sent on its way, and is the last there.
        let last = ns.prefetch(&keys(prefetched.next())).unwrap();
        assert_eq!(last.wait(Some(PATIENCE)).unwrap(), [true]);
        depot.stats().promoted_blocks - before - 1
    };
    // Eviction ahead of need may leave some room.
    let (some, most) = (0..8, 16..=24);
    let numbers: Vec<u64> = (0..24).collect();
    let each = [promoted(&numbers), promoted(&numbers)];
    assert!(
        some.contains(&each[0]) && most.contains(&each[1]),
        "{each:?}"
    );
    // Not where more than half of the near tier was read far since.
    let numbers: Vec<u64> = (24..48).collect();
    let others: Vec<u64> = (48..48 + near * 3 / 5).collect();
    let each = [promoted(&numbers), promoted(&others), promoted(&numbers)];
    assert!(each.iter().all(|count| some.contains(count)), "{each:?}");
    depot.close();
}
