//! Prompts as large as a tier, among those that others use.

use kvdepot_store::{BlockBuffers, Depot, Key, Namespace, Outcome};

use serde_json::json;

use crate::common::{PATIENCE, Place, block, get, key, keys, namespace, put, several};

const LEN: usize = 64 << 10;
/// Blocks of a tier.
const TIER: u64 = 64;
/// Blocks of a prompt that is of usual size.
const USUAL: u64 = 8;

/// A tier of so many blocks, alone or behind a memory.
fn places() -> [Place; 6] {
    places_of(TIER)
}

fn places_of(blocks: u64) -> [Place; 6] {
    let room = format!("{}KiB", blocks * 64);
    // With the table and the superblocks.
    let medium = format!("{}KiB", blocks * 64 + 1024);
    let place = |pipeline| Place::new(pipeline, &room, &medium).with("", "admission", "all");
    // With the header of each file.
    let files = format!("{}KiB", blocks * 68);
    let files = |pipeline, section| {
        let place = place(pipeline);
        let path = place.dir().join("files");
        let mut settings = json!({"path": path.to_str().unwrap(), "capacity": files});
        if section == "ds3fs" {
            // On the mount, and not by 3FS's library. It may take longer than a machine stands
            // still.
            settings["library"] = json!("posix");
            settings["lookup_timeout"] = json!("60s");
            settings["timeout"] = json!("60s");
        }
        place.with_section(section, settings)
    };
    [
        place("Cache"),
        place("Dax"),
        place("Nvme"),
        files("Posix", "posix"),
        files("Ds3fs", "ds3fs"),
        files("Cache|Posix", "posix"),
    ]
}

fn usual(prompt: u64) -> std::ops::Range<u64> {
    1000 * prompt..1000 * prompt + USUAL
}

/// Offers what is not there of a prompt in calls of so many blocks, as an engine does.
fn offer(ns: &Namespace, prompt: std::ops::Range<u64>, call: usize) {
    let there = hits(ns, prompt.clone());
    let numbers: Vec<u64> = (prompt.start + there..prompt.end).collect();
    for some in numbers.chunks(call) {
        let after = (some[0] > prompt.start).then(|| keys([some[0] - 1])[0]);
        offer_some(ns, after, some);
    }
}

fn offer_some(ns: &Namespace, after: Option<Key>, some: &[u64]) -> Vec<Outcome> {
    offer_blocks(ns, after, some, LEN)
}

fn offer_blocks(ns: &Namespace, after: Option<Key>, some: &[u64], len: usize) -> Vec<Outcome> {
    let blocks = some.iter().map(|number| block(*number, len));
    let task = ns.put_after(
        after,
        keys(some.iter().copied()),
        BlockBuffers::whole(blocks),
    );
    let task = task.unwrap();
    task.wait(Some(PATIENCE)).unwrap();
    task.outcomes()
}

/// Offers all of a prompt in calls of so many blocks, which say what they continue.
fn offer_all(ns: &Namespace, prompt: std::ops::Range<u64>, call: usize, len: usize) {
    let numbers: Vec<u64> = prompt.clone().collect();
    for some in numbers.chunks(call) {
        let after = (some[0] > prompt.start).then(|| key(some[0] - 1));
        offer_blocks(ns, after, some, len);
    }
}

/// An arena of 64 blocks that stores whatever it is offered.
fn arena() -> Place {
    Place::new("Dax", "", "5MiB").with("", "admission", "all")
}

/// Fills a tier with blocks that nobody uses, and returns how many it has.
fn fill(depot: &Depot, ns: &Namespace) -> u64 {
    let all = depot.stats().tiers[0].capacity_bytes / LEN as u64;
    (0..all).for_each(|number| assert_eq!(put(ns, &[number], LEN), [true]));
    all
}

fn hits(ns: &Namespace, prompt: std::ops::Range<u64>) -> u64 {
    ns.prefix(&keys(prompt)).unwrap() as u64
}

/// Stores a prompt larger than its tier among others, in calls of several sizes.
fn pass_through(place: &Place) {
    for call in [96, 7, 1] {
        let depot = place.open();
        let ns = namespace(&depot);
        // The last tier says what stays.
        let mut tiers = depot.stats().tiers;
        let last = tiers.pop().unwrap();
        let (tier, capacity) = (last.tier, last.capacity_bytes / LEN as u64);
        for prompt in 1..7 {
            assert!(
                put(&ns, &usual(prompt).collect::<Vec<_>>(), LEN)
                    .iter()
                    .all(|put| *put)
            );
        }
        let large = 100_000..100_000 + 96;
        offer(&ns, large.clone(), call);
        let left: Vec<u64> = (1..7).map(|prompt| hits(&ns, usual(prompt))).collect();
        assert_eq!(left, [USUAL; 6], "{tier}, calls of {call}");
        let first = hits(&ns, large.clone());
        // Of a directory some is kept free.
        let is_files = ["Posix", "Ds3fs"].contains(&&*tier);
        let least = if is_files { 8 } else { 16 };
        assert!(first >= least, "{tier}, calls of {call}: {first}");
        // Whoever is there again takes what nobody has used since.
        offer(&ns, large.clone(), call);
        let again = hits(&ns, large.clone());
        let least = match is_files {
            // What a memory has of a prompt beyond what the files took is displaced first.
            true if !tiers.is_empty() => 16,
            true => first + 5,
            false => 2 * first,
        };
        assert!(
            again > least,
            "{tier}, calls of {call}: {first}, {again} of {capacity}"
        );
        ns.clear().unwrap();
        drop(depot);
    }
}

#[test]
fn a_prompt_larger_than_its_tier_leaves_the_others_and_keeps_its_own_head() {
    for place in places() {
        pass_through(&place);
    }
}

#[test]
fn where_admission_is_learned_a_large_prompt_leaves_the_others_and_keeps_its_own_head() {
    // Tiers of files store whatever they are offered.
    for place in places().into_iter().take(3) {
        pass_through(&place.with("", "admission", "learned"));
    }
}

#[test]
fn what_comes_behind_a_gap_evicts_no_more_for_being_offered_again() {
    // Alone: a memory before it takes all, for a while.
    for place in places().into_iter().take(5) {
        let depot = place.open();
        let ns = namespace(&depot);
        let name = depot.stats().tiers[0].tier.clone();
        let serve = |prompts: std::ops::Range<u64>| {
            for prompt in prompts {
                offer(&ns, usual(prompt), 8);
            }
        };
        serve(1..4);
        let large = 100_000..100_000 + 96;
        offer(&ns, large.clone(), 1);
        // Its rest found no space; its head goes, and others are used there.
        let first = hits(&ns, large.clone());
        assert!((20..90).contains(&first), "{name}: {first}");
        ns.remove(&keys(large.clone())).unwrap();
        serve(1..9);
        offer(&ns, large.clone(), 1);
        let head = hits(&ns, large.clone());
        assert!((1..first).contains(&head), "{name}: {first}, {head}");
        let rest = ns.contains(&keys(large.start + head..large.end)).unwrap();
        let rest = rest.iter().filter(|there| **there).count();
        assert!(rest <= 2, "{name}: {head}, {rest}");
    }
}

#[test]
fn a_new_tier_takes_a_large_prompt_as_far_as_there_is_room() {
    for place in places() {
        let depot = place.open();
        let ns = namespace(&depot);
        offer(&ns, 0..40, 40);
        assert_eq!(hits(&ns, 0..40), 40, "{}", depot.stats().tiers[0].tier);
    }
}

#[test]
fn a_prompt_larger_than_the_nearer_tier_passes_through_it() {
    let [.., place] = places();
    let place = place.with("cache", "capacity", "512KiB");
    let depot = place.open();
    let ns = namespace(&depot);
    for prompt in [0..20, 100..120] {
        offer(&ns, prompt.clone(), 4);
        assert_eq!(hits(&ns, prompt), 20);
    }
    assert!(depot.drain(PATIENCE));
    assert_eq!(hits(&ns, 0..20), 20);
}

#[test]
fn a_prompt_that_is_used_in_memory_is_offered_again_to_the_tier_behind() {
    // With a queue for 5 blocks, each read writes that many at most.
    for (last, queue, reads) in [
        ("Dax", "4MiB", 4),
        ("Posix", "4MiB", 4),
        ("Dax", "320KiB", 40),
        ("Posix", "320KiB", 40),
    ] {
        let place = Place::new(&format!("Cache|{last}"), "8MiB", "9MiB");
        let files = place.dir().join("files");
        let files = json!({"path": files.to_str().unwrap(), "capacity": "8704KiB"});
        let place = match last {
            "Posix" => place.with_section("posix", files),
            _ => place,
        };
        let place = place.with("", "admission", "all");
        let place = place.with("", "write_back_depth", queue);
        let prompt = 700_000..700_040;
        let depot = place.open();
        let ns = namespace(&depot);
        for other in 1..31 {
            put(&ns, &usual(other).collect::<Vec<_>>(), LEN);
        }
        offer(&ns, prompt.clone(), 4);
        // It is read, and the memory has it.
        for _ in 0..reads {
            let all: Vec<u64> = prompt.clone().collect();
            assert_eq!(get(&ns, &all, LEN), [Outcome::Done; 40]);
            assert!(depot.drain(PATIENCE));
        }
        depot.close();
        let depot = place.open();
        assert_eq!(hits(&namespace(&depot), prompt), 40, "{last}, {queue}");
    }
}

#[test]
fn two_large_prompts_at_once_leave_what_was_used_just_before() {
    for place in places() {
        let depot = place.open();
        let ns = namespace(&depot);
        // The tier is full of what was stored before, and one of them is used.
        for prompt in 1..20 {
            put(&ns, &usual(prompt).collect::<Vec<_>>(), LEN);
        }
        let hot = usual(19);
        assert_eq!(hits(&ns, hot.clone()), USUAL);
        let large = [200_000..200_128, 300_000..300_128];
        for at in (0..128).step_by(6) {
            for prompt in &large {
                let some: Vec<u64> = (prompt.start + at..prompt.end).take(6).collect();
                let after = (at > 0).then(|| keys([some[0] - 1])[0]);
                offer_some(&ns, after, &some);
            }
        }
        let tier = depot.stats().tiers[0].tier.clone();
        assert_eq!(hits(&ns, hot), USUAL, "{tier}");
        for prompt in large {
            assert!(
                hits(&ns, prompt.clone()) >= 6,
                "{tier}: {}",
                hits(&ns, prompt)
            );
        }
    }
}

#[test]
fn what_goes_of_a_prompt_is_its_tail_whatever_calls_brought_it() {
    for place in places() {
        let depot = place.open();
        let ns = namespace(&depot);
        let prompt = 0..24;
        offer(&ns, prompt.clone(), 5);
        let mut last = 24;
        for other in 1..40 {
            put(&ns, &usual(other).collect::<Vec<_>>(), LEN);
            let there = ns.contains(&keys(prompt.clone())).unwrap();
            let left = there.iter().filter(|there| **there).count() as u64;
            assert_eq!(hits(&ns, prompt.clone()), left, "a gap: {there:?}");
            assert!(left <= last);
            last = left;
        }
        assert_eq!(last, 0, "others are stored meanwhile");
    }
}

#[test]
fn a_whole_prompt_that_is_offered_again_to_a_directory_grows_until_it_is_stored() {
    let place = Place::new("Posix", "", "");
    let path = place.dir().join("files");
    let path = path.to_str().unwrap().to_owned();
    let place = place.with_section("posix", json!({"path": path, "capacity": "8MiB"}));
    let depot = place.open();
    let ns = namespace(&depot);
    for prompt in 1..31 {
        put(&ns, &usual(prompt).collect::<Vec<_>>(), LEN);
    }
    let large = 500_000..500_040;
    let all: Vec<u64> = large.clone().collect();
    let offers = (1..=20).find(|_| {
        offer_some(&ns, None, &all);
        hits(&ns, large.clone()) == 40
    });
    assert!(offers.is_some_and(|offers| offers > 1), "{offers:?}");
}

#[test]
fn a_strict_reservation_that_comes_again_evicts_cold_blocks() {
    let depot = arena().open();
    let ns = namespace(&depot);
    let all = fill(&depot, &ns);
    let numbers = 900_000..900_000 + all * 3 / 4;
    let wanted: Vec<_> = numbers.map(|at| (key(at), vec![LEN as u64])).collect();
    let refused = ns.reserve_strict(&wanted).unwrap_err().to_string();
    assert!(refused.contains("usual size of prompts"), "{refused}");
    let reserved = ns.reserve_strict(&wanted).unwrap();
    assert!(reserved.iter().all(Option::is_some));
    ns.abort(&reserved.into_iter().flatten().collect::<Vec<_>>());
}

#[test]
fn a_prompt_evicts_an_eighth_of_all_devices_of_a_tier() {
    for added in [false, true] {
        let names = ["a", "b", "c", "d"];
        let place = several::several(if added { &names[..1] } else { &names }, "2MiB");
        let place = place.with("", "admission", "all");
        let depot = place.open();
        for name in names.iter().filter(|_| added).skip(1) {
            let path = several::at(&place, name);
            depot.add_device(&path, Some(2 << 20)).unwrap();
        }
        let ns = namespace(&depot);
        let all = depot.stats().tiers[0].capacity_bytes / LEN as u64;
        // Prompts of this size are usual.
        (0..9).for_each(|prompt| offer(&ns, 1000 * prompt..1000 * prompt + all / 8, 4));
        let large = 900_000..900_000 + all / 4;
        offer_all(&ns, large.clone(), 4, LEN);
        let stored = hits(&ns, large);
        assert!(stored >= all / 8, "{stored} of {all}, added: {added}");
    }
}

#[test]
fn blocks_of_a_prompt_that_the_queue_drops_do_not_make_it_several() {
    let place = Place::new("Cache|Dax", "4MiB", "5MiB")
        .with("", "admission", "all")
        .with("", "write_back_depth", 4 * LEN as u64)
        .with("", "overload", "drop")
        .with("", "promote", false);
    let depot = place.open();
    let ns = namespace(&depot);
    let offer = |prompt: std::ops::Range<u64>, call: usize| {
        let numbers: Vec<u64> = prompt.clone().collect();
        for some in numbers.chunks(call) {
            let after = (some[0] > prompt.start).then(|| key(some[0] - 1));
            offer_some(&ns, after, some);
            assert!(depot.drain(PATIENCE));
        }
    };
    (1..7).for_each(|prompt| offer(usual(prompt), 4));
    let of_usual = || {
        let there = several::on(&place.arena());
        let left = (1..7)
            .flat_map(usual)
            .filter(|number| there.contains(number));
        left.count()
    };
    assert_eq!(of_usual(), 48);
    offer(500_000..500_240, 8);
    assert_eq!(of_usual(), 48);
}

#[test]
fn a_call_that_continues_a_block_that_is_nowhere_takes_free_space_alone() {
    let depot = arena().open();
    let ns = namespace(&depot);
    let all = fill(&depot, &ns);
    let behind: Vec<u64> = (900_001..900_005).collect();
    for _ in 0..2 {
        let ended = offer_some(&ns, Some(key(900_000)), &behind);
        assert_eq!(ended, [Outcome::Full; 4]);
    }
    assert_eq!(hits(&ns, 0..all), all);
    // The first block closes the gap.
    assert_eq!(offer_some(&ns, None, &[900_000]), [Outcome::Done]);
    let ended = offer_some(&ns, Some(key(900_000)), &behind);
    assert_eq!(ended, [Outcome::Done; 4]);
}

#[test]
fn a_prompt_of_small_blocks_leaves_the_others_when_records_run_out() {
    let place = Place::new("Dax", "", "64MiB")
        .with("dax", "records", 64)
        .with("", "admission", "all");
    let depot = place.open();
    let ns = namespace(&depot);
    for prompt in 1..8 {
        let usual: Vec<u64> = usual(prompt).collect();
        assert_eq!(put(&ns, &usual, 4096), [true; 8]);
    }
    offer_all(&ns, 500_000..500_200, 8, 4096);
    assert_eq!(hits(&ns, 500_000..500_200), 64 / 8);
    (1..8).for_each(|prompt| assert_eq!(hits(&ns, usual(prompt)), USUAL));
}

#[test]
fn blocks_that_are_there_are_no_new_ones_in_any_call() {
    let depot = arena().open();
    let ns = namespace(&depot);
    let all = depot.stats().tiers[0].capacity_bytes / LEN as u64;
    let prompt = 500_000..500_032;
    offer_all(&ns, prompt.clone(), 4, LEN);
    (0..all - 32).for_each(|number| assert_eq!(put(&ns, &[number], LEN), [true]));
    offer_all(&ns, prompt.clone(), 4, LEN);
    let ended = offer_some(&ns, Some(key(500_031)), &[500_032]);
    assert_eq!(ended, [Outcome::Done]);
    assert_eq!(hits(&ns, prompt), 32);
}

#[test]
fn rare_large_prompts_evict_no_more_than_a_usual_prompt() {
    for place in places_of(256) {
        let depot = place.open();
        let ns = namespace(&depot);
        let tier = depot.stats().tiers.pop().unwrap().tier;
        // Each request continues a stored prefix with blocks of its own.
        let mut fresh = (1_000_000..).step_by(1000);
        let mut request = |prompt: u64| {
            let head: Vec<u64> = (1000 * prompt..1000 * prompt + 4).collect();
            let there = hits(&ns, head[0]..head[0] + 4);
            get(&ns, &head[..there as usize], LEN);
            let new = head[there as usize..].iter().copied();
            let new: Vec<u64> = new.chain((fresh.next().unwrap()..).take(2)).collect();
            let before = there.checked_sub(1).map(|last| key(head[last as usize]));
            offer_some(&ns, before, &new);
            there
        };
        for round in 0..5 {
            for prompt in 0..32 {
                let there = request(prompt);
                assert!(round < 3 || there == 4, "{tier}: {there} in round {round}");
                if prompt % 10 == 9 {
                    let document = 10_000_000 + 1000 * (32 * round + prompt);
                    offer(&ns, document..document + 384, 16);
                    assert!(depot.drain(PATIENCE));
                }
            }
        }
    }
}

#[test]
fn a_large_prompt_is_not_old_when_it_has_just_filled_its_tier() {
    let depot = arena().open();
    let ns = namespace(&depot);
    let all = depot.stats().tiers[0].capacity_bytes / LEN as u64;
    let first = 500_000..500_000 + 2 * all;
    offer(&ns, first.clone(), 4);
    let there = hits(&ns, first.clone());
    assert!(there >= all - 2, "{there} of {all}");
    // As many bytes as the tier has were stored since it began.
    (1..3).for_each(|prompt| offer(&ns, usual(prompt), 4));
    let before = hits(&ns, first.clone());
    offer(&ns, 900_000..900_000 + 2 * all, 4);
    let left = hits(&ns, first);
    assert!(left + all / 8 + 2 >= before, "{left} of {before}");
}
