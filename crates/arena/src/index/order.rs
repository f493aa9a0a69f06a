//! The order of use, without a structure for each entry.
//!
//! A use stamps its entry and does no more. Evictions take from a list of those that were used
//! longest ago, which a scan over all stamps collects: a few stamps at each eviction, so that the
//! next list is there when one is used up. The order is exact, because stamps only rise, but for
//! those of groups, whose blocks are listed anew when they fall: what is not what it was when it
//! was listed is listed anew, or is above the bound of the list.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Index, STEP, Standing};

/// A list has one entry in so many, within these bounds: what the fewest evictions pay a scan, and
/// what may be put in order under a lock.
const SHARE: u64 = 64;
const FEWEST: u64 = if cfg!(test) { 8 } else { 1024 };
const MOST: u64 = 16_384;
/// Stamps that are looked at for each block that comes or goes, at least.
const GLANCE: u64 = if cfg!(test) { 3 } else { 128 };

/// When a slot was used.
type Item = (u64, u32);

/// Above every item.
const ALL: Option<Item> = Some((u64::MAX, u32::MAX));

/// Blocks that turn out to have been used since they were listed, before others who wait for the
/// lock have it.
fn looks_len() -> usize {
    kvdepot_media::items_per_turn(4, 64)
}

/// What was used longest ago, of what nobody pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Oldest {
    /// A block's slot, and its stamp.
    Block(u32, u64),
    /// The same, where all that nobody pins was used while this was looked for: it goes, whether
    /// or not it is used again.
    Used(u32, u64),
    /// There is none.
    Nothing,
    /// It was not found yet: the caller gives way, and asks again.
    NotYet,
}

/// Which published block was used longest ago.
pub(crate) struct Order {
    /// Every published block up to the bound is in it, under its stamp or an older one, or has been
    /// set aside, for as long as it is pinned.
    list: BinaryHeap<Reverse<Item>>,
    bound: Option<Item>,
    next: Option<Next>,
    /// A block that was passed since one was found, as it had been used since it was listed.
    passed: Option<Passed>,
}

struct Passed {
    slot: u32,
    /// Its stamp then.
    stamp: u64,
    /// Whether it was passed before, with an earlier one.
    again: bool,
}

/// The next list: what is above the bound of the present one.
struct Next {
    items: Vec<Item>,
    /// Nothing up to it that the scan has passed is missing.
    bound: Option<Item>,
    /// Where the scan is; `None` once it has passed all.
    at: Option<u32>,
}

impl Next {
    fn new() -> Next {
        Next {
            items: Vec::new(),
            bound: ALL,
            at: Some(0),
        }
    }

    fn offer(&mut self, item: Item, most: usize) {
        if Some(item) <= self.bound {
            self.items.push(item);
            if self.items.len() >= 2 * most {
                self.bound = cut(&mut self.items, most);
            }
        }
    }
}

/// Keeps the first `most` items, and answers the last of them.
fn cut(items: &mut Vec<Item>, most: usize) -> Option<Item> {
    items.select_nth_unstable(most - 1);
    items.truncate(most);
    items.last().copied()
}

/// Items of a list.
fn most(index: &Index) -> usize {
    (index.live() / SHARE).clamp(FEWEST, MOST) as usize
}

impl Order {
    /// That of an index without blocks.
    pub(crate) fn new() -> Order {
        Order {
            list: BinaryHeap::new(),
            bound: ALL,
            next: None,
            passed: None,
        }
    }

    /// That of the blocks of an index, which is looked through.
    pub(crate) fn of(index: &Index) -> Order {
        let mut order = Order {
            list: BinaryHeap::new(),
            bound: None,
            next: None,
            passed: None,
        };
        order.scan_on(index, u32::MAX);
        order.turn();
        order
    }

    /// Notes a block that has been published.
    pub(crate) fn entered(&mut self, index: &Index, slot: u32, stamp: u64) {
        self.offer((stamp, slot), most(index));
        self.step(index);
    }

    fn offer(&mut self, item: Item, most: usize) {
        if Some(item) > self.bound {
            if let Some(next) = &mut self.next {
                next.offer(item, most);
            }
            return;
        }
        self.list.push(Reverse(item));
        if self.list.len() >= 2 * most {
            let items = std::mem::take(&mut self.list).into_iter();
            let mut items: Vec<Item> = items.map(|Reverse(item)| item).collect();
            items.select_nth_unstable(most - 1);
            let above = items.split_off(most);
            self.bound = items.last().copied();
            self.list = items.into_iter().map(Reverse).collect();
            // A scan that is under way has taken them for listed.
            let next = self.next.get_or_insert_with(Next::new);
            above.into_iter().for_each(|item| next.offer(item, most));
        }
    }

    /// A part of the scan: with as many as there are blocks in a list, all of it.
    fn step(&mut self, index: &Index) {
        let most = most(index);
        let count = (2 * index.live() / most as u64).max(GLANCE);
        self.scan(index, most, count as u32);
    }

    fn scan(&mut self, index: &Index, most: usize, mut count: u32) {
        let bound = self.bound;
        let Some(next) = &mut self.next else { return };
        while count > 0
            && let Some(from) = next.at
        {
            let mut items = Vec::new();
            let least = next.bound;
            let (seen, at) = index.stamps(from, count.min(STEP), |slot, stamp| {
                let item = Some((stamp, slot));
                if item > bound && item <= least {
                    items.push((stamp, slot));
                }
            });
            items.into_iter().for_each(|item| next.offer(item, most));
            next.at = at;
            // An empty shard is a step, too.
            count = count.saturating_sub(seen.max(1));
        }
    }

    /// Goes on with the scan, as far as so many stamps; whether it has passed all.
    fn scan_on(&mut self, index: &Index, count: u32) -> bool {
        self.next.get_or_insert_with(Next::new);
        self.scan(index, most(index), count);
        self.next.as_ref().is_some_and(|next| next.at.is_none())
    }

    /// The next list, for which all was scanned, becomes the present one.
    fn turn(&mut self) {
        if let Some(next) = self.next.take() {
            self.list = next.items.into_iter().map(Reverse).collect();
            self.bound = next.bound;
            self.next = (self.bound != ALL).then(Next::new);
        }
    }

    /// The least recently used block that nobody pins, which stays listed.
    pub(crate) fn look(&mut self, index: &Index) -> Oldest {
        let returned = index.take_returned(looks_len());
        let count = returned.len();
        returned.into_iter().for_each(|slot| self.keep(index, slot));
        if count == looks_len() {
            return Oldest::NotYet;
        }
        if index.evictable_bytes() == 0 {
            return Oldest::Nothing;
        }
        for _ in 0..looks_len() {
            let Some(Reverse((stamp, slot))) = self.list.peek().copied() else {
                if self.bound == ALL {
                    return Oldest::Nothing;
                }
                if !self.scan_on(index, STEP) {
                    return Oldest::NotYet;
                }
                self.turn();
                continue;
            };
            let standing = index.standing(slot).filter(|standing| !standing.pinned);
            if let Some(Standing { stamp: now, .. }) = standing {
                if now == stamp {
                    self.give_up();
                    return Oldest::Block(slot, stamp);
                }
                if self.is_always_used(slot, stamp, now) {
                    self.give_up();
                    return Oldest::Used(slot, now);
                }
            }
            self.list.pop();
            self.step(index);
            self.keep(index, slot);
        }
        Oldest::NotYet
    }

    /// Whether a block that was listed under a stamp, and has another one now, has been passed
    /// twice before, and used each time since. Then what was used before the second time has come
    /// up, so all that is left was used while this was looked for. (A use of one block is one of
    /// all in its group: who waited until none is used would wait for as long as somebody uses
    /// one.)
    fn is_always_used(&mut self, slot: u32, listed: u64, now: u64) -> bool {
        let again = match &self.passed {
            Some(passed) if passed.slot == slot && listed >= passed.stamp => {
                if passed.again {
                    return true;
                }
                true
            }
            Some(passed) if listed <= passed.stamp => return false,
            // That one has left, or is pinned.
            _ => false,
        };
        let stamp = now;
        self.passed = Some(Passed { slot, stamp, again });
        false
    }

    /// Looks for no block any more.
    pub(crate) fn give_up(&mut self) {
        self.passed = None;
    }

    /// Lists a block, if it is published, that has been taken from the list and stays.
    pub(crate) fn keep(&mut self, index: &Index, slot: u32) {
        let Some(standing) = index.standing(slot) else {
            return;
        };
        // Its last unpin reports it.
        if !standing.pinned || !index.set_aside(slot) {
            self.offer((standing.stamp, slot), most(index));
        }
    }

    /// As [`Order::look`]; the caller takes the block out of the index, or [keeps](Order::keep) it.
    pub(crate) fn oldest(&mut self, index: &Index) -> Oldest {
        let oldest = self.look(index);
        if let Oldest::Block(..) | Oldest::Used(..) = oldest {
            self.list.pop();
            self.step(index);
        }
        oldest
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use kvdepot_media::checksum::Checksum;
    use kvdepot_testkit::seed::Rng;

    use super::*;
    use crate::format::record::Packed;
    use crate::group::{Class, Group};
    use crate::index::{Entry, Stage};
    use crate::key::{Key, NamespaceId};

    fn live(index: &Index, order: &mut Order, number: u64, stamp: u64) -> u32 {
        let extents = Packed::new(&[(number * 4096, 4096)]).unwrap();
        let mut key = Key([0; 32]);
        key.0[..8].copy_from_slice(&number.to_le_bytes());
        let mut entry = Entry::new(key, 0, extents, 1);
        (entry.stage, entry.stamp, entry.sequence) = (Stage::Reserved, stamp, number);
        let slot = index.enter(&entry).unwrap();
        index.publish(slot, Checksum([0; 16]), false);
        order.entered(index, slot, stamp);
        slot
    }

    /// The block that is taken, however often that is asked for.
    fn take(index: &Index, order: &mut Order) -> Option<(u32, u64)> {
        loop {
            match order.oldest(index) {
                Oldest::Block(slot, stamp) => return Some((slot, stamp)),
                Oldest::Used(..) => panic!("nobody uses any meanwhile"),
                Oldest::Nothing => return None,
                Oldest::NotYet => {}
            }
        }
    }

    fn stamp_of_oldest(index: &Index, order: &mut Order) -> Option<u64> {
        loop {
            match order.look(index) {
                Oldest::Block(_, stamp) => return Some(stamp),
                Oldest::Used(..) => panic!("nobody uses any meanwhile"),
                Oldest::Nothing => return None,
                Oldest::NotYet => {}
            }
        }
    }

    #[test]
    fn what_was_used_since_it_was_listed_is_passed_some_at_a_time() {
        let (index, mut order) = (Index::new(1000), Order::new());
        let slots = (0..1000).map(|number| live(&index, &mut order, number, number));
        let slots: Vec<u32> = slots.collect();
        for (stamp, slot) in (1000..).zip(&slots[..999]) {
            index.touch(*slot, index.get(*slot).sequence, stamp);
        }
        let mut asked = 1;
        while order.oldest(&index) == Oldest::NotYet {
            asked += 1;
        }
        assert!(asked > FEWEST as usize / looks_len(), "{asked}");
        let pinned = slots[..500].iter();
        pinned.clone().for_each(|slot| {
            index.pin_slot(*slot, index.get(*slot).sequence).unwrap();
        });
        assert_eq!(take(&index, &mut order), Some((slots[500], 1500)));
        pinned.for_each(|slot| {
            index.unpin(*slot, index.get(*slot).sequence).unwrap();
        });
        assert_eq!(order.oldest(&index), Oldest::NotYet);
        assert_eq!(take(&index, &mut order), Some((slots[0], 1000)));
    }

    #[test]
    fn what_is_used_at_every_moment_is_found_once_all_else_was_looked_at() {
        let (index, mut order) = (Index::new(1000), Order::new());
        let slots = (0..1000).map(|number| live(&index, &mut order, number, number));
        let slots: Vec<u32> = slots.collect();
        let group = Arc::new(Group::new(NamespaceId([1; 16]), Class::Ordinary));
        for slot in &slots[..999] {
            index.join(*slot, std::slice::from_ref(&group));
            order.keep(&index, *slot);
        }
        let mut now = 1000;
        let mut find = || {
            for _ in 0..1000 {
                now += 1;
                index.touch(slots[500], index.get(slots[500]).sequence, now);
                match order.oldest(&index) {
                    Oldest::NotYet => {}
                    found => return found,
                }
            }
            panic!("it is looked for as long as it is used");
        };
        assert_eq!(find(), Oldest::Block(slots[999], 999));
        assert!(matches!(find(), Oldest::Used(..)));
    }

    fn go(index: &Index, slot: u32) {
        index.unpublish(slot, Some(None)).unwrap();
        index.forget(slot);
    }

    #[test]
    fn slots_that_come_and_go_without_evictions_leave_nothing_behind() {
        let (index, mut order) = (Index::new(8), Order::new());
        let kept = live(&index, &mut order, 0, 0);
        for stamp in 1..10_000 {
            let slot = live(&index, &mut order, stamp, stamp);
            go(&index, slot);
        }
        assert!(order.list.len() < 100, "{}", order.list.len());
        assert_eq!(take(&index, &mut order), Some((kept, 0)));
        go(&index, kept);
        assert_eq!(take(&index, &mut order), None);
        assert_eq!(index.evictable_bytes(), 0);
    }

    /// Blocks of a history, by stamp: their slots, and whether they are pinned.
    type Naive = BTreeMap<u64, (u32, bool)>;

    fn oldest(naive: &Naive) -> Option<(u64, u32)> {
        let mut free = naive.iter().filter(|(_, (_, pinned))| !pinned);
        free.next().map(|(stamp, (slot, _))| (*stamp, *slot))
    }

    fn any(rng: &mut Rng, naive: &Naive) -> Option<(u64, u32, bool)> {
        let at = rng.below(naive.len().max(1) as u64) as usize;
        let (stamp, (slot, pinned)) = naive.iter().nth(at)?;
        Some((*stamp, *slot, *pinned))
    }

    /// A stamp that no block has: most are of now, as those of puts are, and some are old, as
    /// those of copies are.
    fn stamp(rng: &mut Rng, naive: &Naive, now: u64) -> u64 {
        let old = rng.below(now);
        match rng.once_in(4) && !naive.contains_key(&old) {
            true => old,
            false => now,
        }
    }

    #[test]
    fn the_oldest_stamp_goes_first_whatever_was_touched_or_pinned_since() {
        let mut rng = Rng::for_test("order");
        for records in [8, 100, 5000] {
            let (index, mut order) = (Index::new(records), Order::new());
            let mut naive = Naive::new();
            for now in 1..20_000_u64 {
                let room = (naive.len() as u64) < records.min(600);
                match (rng.below(10), any(&mut rng, &naive)) {
                    (0..4, _) if room => {
                        let stamp = stamp(&mut rng, &naive, now);
                        let slot = live(&index, &mut order, now, stamp);
                        naive.insert(stamp, (slot, false));
                    }
                    (4..6, Some((before, slot, pinned))) => {
                        let stamp = stamp(&mut rng, &naive, now).max(before);
                        index.touch(slot, index.get(slot).sequence, stamp);
                        naive.remove(&before);
                        naive.insert(stamp, (slot, pinned));
                    }
                    (6, Some((stamp, slot, false))) => {
                        index.pin_slot(slot, index.get(slot).sequence).unwrap();
                        naive.insert(stamp, (slot, true));
                    }
                    (6 | 7, Some((stamp, slot, true))) => {
                        index.unpin(slot, index.get(slot).sequence).unwrap();
                        naive.insert(stamp, (slot, false));
                    }
                    (8, Some((stamp, slot, false))) => {
                        go(&index, slot);
                        naive.remove(&stamp);
                    }
                    _ => {
                        let expected = oldest(&naive);
                        assert_eq!(
                            stamp_of_oldest(&index, &mut order),
                            expected.map(|(stamp, _)| stamp)
                        );
                        assert_eq!(
                            take(&index, &mut order).map(|(slot, _)| slot),
                            expected.map(|(_, slot)| slot)
                        );
                        let Some((stamp, slot)) = expected else {
                            continue;
                        };
                        if rng.once_in(8) {
                            order.keep(&index, slot);
                        } else {
                            go(&index, slot);
                            naive.remove(&stamp);
                        }
                    }
                }
            }
            let mut again = Order::of(&index);
            while let Some((stamp, slot)) = oldest(&naive) {
                assert_eq!(take(&index, &mut order), Some((slot, stamp)));
                assert_eq!(take(&index, &mut again), Some((slot, stamp)));
                go(&index, slot);
                naive.remove(&stamp);
            }
            assert_eq!(
                (take(&index, &mut order), index.evictable_bytes()),
                (None, 0)
            );
        }
    }
}
