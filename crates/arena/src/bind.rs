//! Groups in an arena: which of its blocks are in them, and how they leave.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::body::{Arena, State};
use crate::bury::{Dying, bite_len};
use crate::group::Group;
use crate::held::turn_len;
use crate::index::Entry;
use crate::key::Key;

/// Blocks that have left because others of their groups did.
#[derive(Clone, Copy, Default)]
pub(crate) struct Fallen {
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

impl Arena {
    /// Adds the blocks with the keys of `group`, starting at position `from`, to the group.
    ///
    /// This includes blocks that are stored later. Repeating the call has no effect.
    pub fn join(&self, group: &Arc<Group>, from: usize) {
        self.each_of(group, from, |state, key, slot| {
            if group.is_dissolved() {
                return;
            }
            state.groups.add(key, group);
            if let Some(slot) = slot {
                self.index.join(slot, std::slice::from_ref(group));
            }
        });
    }

    /// Removes all blocks of this arena from `group`, which has been [dissolved](Group::dissolve).
    pub fn part(&self, group: &Arc<Group>) {
        self.each_of(group, 0, |state, key, slot| {
            state.groups.remove(key, group);
            if let Some(slot) = slot {
                self.index.part(slot, group);
            }
        });
    }

    /// Updates the eviction order of the blocks in `group` after a change of its class.
    pub fn rank_again(&self, group: &Arc<Group>) {
        self.each_of(group, 0, |_, _, _| ());
    }

    /// Does something with each key of a group, and the slot of its block if that is here, which is
    /// listed anew: it may rank lower than before.
    fn each_of(
        &self,
        group: &Arc<Group>,
        mut from: usize,
        mut each: impl FnMut(&mut State, &Key, Option<u32>),
    ) {
        let mut state = self.state.lock();
        loop {
            let keys = group.some(from, turn_len());
            from += keys.len();
            if keys.is_empty() {
                break;
            }
            for key in &keys {
                let slot = self.slot_of(group, key);
                each(&mut state, key, slot);
                if let Some(slot) = slot {
                    state.order.keep(&self.index, slot);
                }
            }
            state.give_way();
        }
    }

    /// Returns the groups on several devices that have lost a block here since the last call.
    ///
    /// The caller passes them to [`Arena::let_fall`] of the other devices.
    pub fn fallen(&self) -> Vec<Arc<Group>> {
        std::mem::take(&mut self.state.lock().groups.fallen)
    }

    /// Evicts the blocks of `group` in this arena, because the group has lost a block on another
    /// device.
    pub fn let_fall(&self, group: &Arc<Group>) {
        let mut state = self.state.lock();
        state.groups.falling.push_back((Arc::clone(group), 0));
        self.evict_blocks(&mut state, &[]);
    }

    fn slot_of(&self, group: &Group, key: &Key) -> Option<u32> {
        let number = self.index.number(group.namespace())?;
        self.index.find(number, key)
    }

    /// Puts a block that has just been published into its groups; its stamp then.
    pub(crate) fn join_published(&self, state: &State, slot: u32, entry: &Entry) -> u64 {
        if state.groups.is_empty() {
            return entry.stamp;
        }
        let namespace = self.index.id(entry.namespace);
        let groups = state.groups.of(namespace, &entry.key);
        if groups.is_empty() {
            return entry.stamp;
        }
        groups.iter().for_each(|group| group.mend());
        self.index.join(slot, groups);
        self.index.ranked(slot)
    }

    /// A block has been evicted: what is in a group with it leaves as well.
    pub(crate) fn break_groups(&self, state: &mut State, slot: u32) {
        for group in self.index.loosen(slot) {
            if group.break_up() {
                self.counters.evicted_groups.fetch_add(1, Ordering::Relaxed);
                if group.is_spread() {
                    state.groups.fallen.push(Arc::clone(&group));
                }
            } else if state.groups.is_falling(&group) {
                continue;
            }
            // Of one that broke long ago, what was pinned then goes now.
            state.groups.falling.push_back((group, 0));
        }
    }

    /// Evicts a few blocks whose groups have all lost one; false when there is no such group. What
    /// is pinned stays, and so does what is in a whole one.
    pub(crate) fn evict_fallen(
        &self,
        state: &mut State,
        dying: &mut Dying,
        fallen: &mut Fallen,
    ) -> bool {
        let Some((group, from)) = state.groups.falling.front_mut() else {
            return false;
        };
        let group = Arc::clone(group);
        let keys = group.some(*from, bite_len());
        *from += keys.len();
        if keys.is_empty() || !group.is_broken() || group.is_dissolved() {
            state.groups.falling.pop_front();
            return true;
        }
        for slot in keys.iter().filter_map(|key| self.slot_of(&group, key)) {
            let room = self.index.get(slot).extents.room();
            if !self.index.is_left_over(slot) {
                // It may rank lower than before.
                state.order.keep(&self.index, slot);
            } else if self.evict(state, (slot, None), dying) {
                fallen.bytes += room;
                fallen.blocks += 1;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use kvdepot_alloc::Hint;
    use kvdepot_media::checksum::Checksum;
    use kvdepot_testkit::seed::{Rng, rounds};

    use super::*;
    use crate::format::GRANULE;
    use crate::group::Class;
    use crate::index::Uses;
    use crate::key::NamespaceId;
    use crate::place::{Token, Wanted};

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);

    fn key(number: u64) -> Key {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        Key(bytes)
    }

    fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<Key> {
        numbers.into_iter().map(key).collect()
    }

    fn arena(granules: u64) -> Arc<Arena> {
        Arc::new(Arena::volatile("Cache", 0, granules * GRANULE).unwrap())
    }

    fn put(arena: &Arc<Arena>, number: u64, stamp: u64) {
        let wanted = Wanted {
            key: key(number),
            len: GRANULE,
            parts: 1,
            stamp,
            copy: false,
            evict: true,
        };
        let mut made = match arena.reserve(NAMESPACE, &[wanted]) {
            Some(made) => made,
            None => {
                let space = arena.make_space(NAMESPACE, &wanted, Hint::default());
                arena.reserve_in(NAMESPACE, vec![(wanted, space.ok().unwrap())])
            }
        };
        let token = made.pop().unwrap().ok().unwrap().hand_out().token;
        assert_eq!(arena.commit(&[(token, Checksum([0; 16]))], false), [true]);
    }

    fn touch(arena: &Arena, number: u64, stamp: u64) {
        arena.touch(NAMESPACE, [(&key(number), stamp)].into_iter());
    }

    fn pin(arena: &Arena, number: u64, stamp: u64) -> Option<Token> {
        let mut pinned = None;
        let each = |_, place: crate::Place| pinned = Some(place.token);
        arena.pin(NAMESPACE, &[key(number)], &mut [false], |_| stamp, each);
        pinned
    }

    fn there(arena: &Arena, numbers: u64) -> BTreeSet<u64> {
        let mut found = vec![false; numbers as usize];
        arena.contains(NAMESPACE, &keys(0..numbers), &mut found);
        (0..numbers).filter(|at| found[*at as usize]).collect()
    }

    fn group(arena: &Arena, class: Class, numbers: impl IntoIterator<Item = u64>) -> Arc<Group> {
        let group = Arc::new(Group::new(NAMESPACE, class));
        let keys = keys(numbers);
        group.add(&keys);
        arena.join(&group, 0);
        group
    }

    fn dissolve(arena: &Arena, group: &Arc<Group>) {
        group.dissolve();
        arena.part(group);
    }

    /// The same by looking at everything each time.
    #[derive(Default)]
    struct Twin {
        /// By key: the last use, and pins.
        blocks: BTreeMap<u64, (u64, Vec<Token>)>,
        groups: Vec<Naive>,
    }

    struct Naive {
        group: Arc<Group>,
        keys: BTreeSet<u64>,
        class: Class,
        used: u64,
        broken: bool,
    }

    impl Twin {
        fn of(&self, key: u64) -> impl Iterator<Item = &Naive> {
            self.groups
                .iter()
                .filter(move |group| group.keys.contains(&key))
        }

        fn rank(&self, key: u64) -> (Class, u64) {
            let class = |group: &Naive| match group.broken {
                true => Class::First,
                false => group.class,
            };
            let used = self.of(key).map(|group| group.used).max().unwrap_or(0);
            let class = self.of(key).map(class).max().unwrap_or_default();
            (class, used.max(self.blocks[&key].0))
        }

        fn use_groups(&mut self, key: u64, stamp: u64, comes: bool) {
            let is_shared = self.of(key).count() > 1;
            for group in &mut self.groups {
                if group.keys.contains(&key) {
                    if !is_shared {
                        group.used = group.used.max(stamp);
                    }
                    group.broken &= !comes;
                }
            }
        }

        fn join(&mut self, at: usize, keys: &[u64]) {
            for key in keys {
                let rank = self.blocks.contains_key(key).then(|| self.rank(*key).1);
                self.groups[at].keys.insert(*key);
                if let (Some(rank), 1) = (rank, self.of(*key).count()) {
                    self.groups[at].used = self.groups[at].used.max(rank);
                }
            }
        }

        /// What would be left, for each block that may be the next to go.
        fn evictions(&self) -> Vec<(u64, BTreeSet<u64>)> {
            let free = || self.blocks.iter().filter(|(_, (_, pins))| pins.is_empty());
            let oldest = free().map(|(key, _)| self.rank(*key)).min();
            let firsts = free().filter(|(key, _)| Some(self.rank(**key)) == oldest);
            let left = |key: u64| {
                let broken = |group: &Naive| group.broken || group.keys.contains(&key);
                let mut gone = BTreeSet::from([key]);
                // With each go others of its groups, also what was pinned when one broke.
                loop {
                    let falls = |group: &Naive| !group.keys.is_disjoint(&gone);
                    let leaves = |other: &u64| {
                        self.blocks[other].1.is_empty()
                            && self.of(*other).any(falls)
                            && self.of(*other).all(broken)
                    };
                    let others = self.blocks.keys().copied();
                    let more: Vec<u64> = others
                        .filter(|other| !gone.contains(other) && leaves(other))
                        .collect();
                    if more.is_empty() {
                        break;
                    }
                    gone.extend(more);
                }
                let stays = |other: &u64| !gone.contains(other);
                self.blocks.keys().copied().filter(stays).collect()
            };
            firsts.map(|(key, _)| (*key, left(*key))).collect()
        }

        fn evict(&mut self, key: u64, left: &BTreeSet<u64>) {
            self.blocks.retain(|key, _| left.contains(key));
            for group in &mut self.groups {
                group.broken |= group.keys.contains(&key);
            }
        }
    }

    struct World {
        rng: Rng,
        uses: Uses,
        arena: Arc<Arena>,
        twin: Twin,
        keys: u64,
    }

    impl World {
        fn some_keys(&mut self) -> Vec<u64> {
            let count = self.rng.between(1, self.keys / 4);
            (0..count).map(|_| self.rng.below(self.keys)).collect()
        }

        fn class(&mut self) -> Class {
            *self.rng.pick(&[Class::First, Class::Ordinary, Class::Last])
        }

        fn step(&mut self) {
            let number = self.rng.below(self.keys);
            let stamp = self.uses.asked().of(0);
            let known = self.twin.blocks.contains_key(&number);
            match self.rng.below(20) {
                0..6 if !known => {
                    put(&self.arena, number, stamp);
                    self.twin.blocks.insert(number, (stamp, Vec::new()));
                    self.twin.use_groups(number, stamp, true);
                }
                0..8 if known => {
                    touch(&self.arena, number, stamp);
                    self.twin
                        .blocks
                        .entry(number)
                        .and_modify(|block| block.0 = stamp);
                    self.twin.use_groups(number, stamp, false);
                }
                8 if known => {
                    let token = pin(&self.arena, number, stamp).unwrap();
                    let block = self.twin.blocks.get_mut(&number).unwrap();
                    block.0 = stamp;
                    block.1.push(token);
                    self.twin.use_groups(number, stamp, false);
                }
                9 | 10 => {
                    let mut pinned = self.twin.blocks.values_mut();
                    let token = pinned.find_map(|(_, pins)| pins.pop());
                    self.arena.unpin(token.into_iter());
                }
                11 if known && self.twin.blocks[&number].1.is_empty() => {
                    assert_eq!(self.arena.remove(NAMESPACE, &[key(number)]), 1);
                    self.twin.blocks.remove(&number);
                }
                12 | 13 => self.change_groups(),
                _ => self.evict(),
            }
        }

        fn change_groups(&mut self) {
            let at = self.rng.below(self.twin.groups.len().max(1) as u64) as usize;
            let class = self.class();
            match self.rng.below(5) {
                0 | 1 if self.twin.groups.len() < 8 => {
                    let some = self.some_keys();
                    self.twin.groups.push(Naive {
                        group: group(&self.arena, class, some.iter().copied()),
                        keys: BTreeSet::new(),
                        class,
                        used: 0,
                        broken: false,
                    });
                    self.twin.join(self.twin.groups.len() - 1, &some);
                }
                _ if self.twin.groups.is_empty() => {}
                2 => {
                    let some = self.some_keys();
                    let group = &self.twin.groups[at].group;
                    let from = group.add(&keys(some.iter().copied()));
                    self.arena.join(group, from);
                    self.twin.join(at, &some);
                }
                3 => {
                    let naive = &mut self.twin.groups[at];
                    naive.class = class;
                    naive.group.set_class(class);
                    self.arena.rank_again(&naive.group);
                }
                _ => {
                    let there: Vec<u64> = self.twin.blocks.keys().copied().collect();
                    for key in there {
                        let (_, used) = self.twin.rank(key);
                        if self.twin.groups[at].keys.contains(&key) {
                            self.twin
                                .blocks
                                .entry(key)
                                .and_modify(|block| block.0 = used);
                        }
                    }
                    dissolve(&self.arena, &self.twin.groups.remove(at).group);
                }
            }
        }

        fn evict(&mut self) {
            let may = self.twin.evictions();
            assert_eq!(self.arena.evict_one(), !may.is_empty());
            let left = there(&self.arena, self.keys);
            if !may.is_empty() {
                let which = may.iter().find(|(_, one)| *one == left);
                let (key, _) = which.unwrap_or_else(|| panic!("{left:?} of {may:?}"));
                self.twin.evict(*key, &left);
            }
        }
    }

    #[test]
    fn what_leaves_is_what_a_look_at_everything_would_choose() {
        let mut rng = Rng::for_test("what_leaves_is_what_a_look_at_everything_would_choose");
        for keys in [6, 24, 200] {
            for _ in 0..rounds(8) {
                let mut world = World {
                    rng: rng.fork(),
                    uses: Uses::default(),
                    arena: arena(1024),
                    twin: Twin::default(),
                    keys,
                };
                for _ in 0..2000 {
                    world.step();
                }
                while let Some(naive) = world.twin.groups.pop() {
                    dissolve(&world.arena, &naive.group);
                }
                assert_eq!(world.arena.stats().grouped_blocks, 0);
                assert!(world.arena.state.lock().groups.is_empty());
            }
        }
    }

    #[test]
    fn a_group_leaves_as_one_and_what_another_one_needs_or_somebody_reads_stays() {
        let (arena, uses) = (arena(1024), Uses::default());
        for number in 0..40 {
            put(&arena, number, uses.asked().of(0));
        }
        let old = group(&arena, Class::Ordinary, (0..20).chain([100]));
        let new = group(&arena, Class::Last, 15..30);
        let pinned = [3, 4].map(|number| pin(&arena, number, 0).unwrap());
        // The one that was used last.
        touch(&arena, 7, uses.asked().of(0));
        for gone in 30..40 {
            assert!(arena.evict_one());
            assert!(!there(&arena, 40).contains(&gone));
        }
        assert!(arena.evict_one());
        let left: BTreeSet<u64> = [3, 4].into_iter().chain(15..30).collect();
        assert_eq!(there(&arena, 40), left);
        assert!(arena.evict_one());
        assert_eq!(there(&arena, 40), [3, 4].into());
        arena.unpin(pinned.into_iter());
        // What was read when its group left goes as one too.
        assert!(arena.evict_one());
        assert_eq!(arena.stats().blocks, 0);
        assert_eq!(arena.stats().evicted_groups, 2);
        // What comes makes it a group again.
        put(&arena, 100, uses.asked().of(0));
        put(&arena, 50, uses.asked().of(0));
        assert!(arena.evict_one());
        assert!(there(&arena, 101).contains(&50));
        dissolve(&arena, &old);
        dissolve(&arena, &new);
    }

    #[test]
    fn what_shares_a_head_with_what_was_used_is_not_used_with_it() {
        let (arena, uses) = (arena(1024), Uses::default());
        for number in 0..10 {
            put(&arena, number, uses.asked().of(0));
        }
        let group = |numbers: &[u64]| group(&arena, Class::Ordinary, numbers.iter().copied());
        let groups = [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]].map(|numbers| group(&numbers));
        let stamps = uses.asked();
        (0..4).for_each(|at| touch(&arena, at, stamps.of(at as usize)));
        for gone in [4..7, 7..10] {
            assert!(arena.evict_one());
            let left = there(&arena, 10);
            assert!(
                gone.clone().all(|number| !left.contains(&number)),
                "{left:?}"
            );
            assert!((0..4).all(|number| left.contains(&number)), "{left:?}");
        }
        groups.iter().for_each(|group| dissolve(&arena, group));
    }

    #[test]
    fn a_group_that_is_dissolved_while_it_leaves_keeps_what_has_not_left() {
        for round in 0..rounds(50) {
            let (arena, uses) = (arena(1024), Uses::default());
            for number in 0..200 {
                put(&arena, number, uses.asked().of(0));
            }
            let group = group(&arena, Class::First, 0..200);
            std::thread::scope(|scope| {
                scope.spawn(|| arena.evict_one());
                scope.spawn(|| {
                    (0..round).for_each(|number| touch(&arena, number, uses.asked().of(0)));
                    dissolve(&arena, &group);
                });
            });
            let stats = arena.stats();
            assert_eq!(
                (stats.grouped_blocks, stats.blocks + stats.evicted_blocks),
                (0, 200)
            );
            while arena.evict_one() {}
            assert_eq!(
                (arena.stats().blocks, arena.stats().evicted_blocks),
                (0, 200)
            );
        }
    }
}
