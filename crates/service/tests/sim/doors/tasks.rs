//! Puts, gets and prefetches.

use std::collections::BTreeSet;

use kvdepot_store::{BlockBuffers, GetOptions};
use kvdepot_testkit::sim::twin::{Id, Version};

use crate::history::KEYS;
use crate::world::{Asked, Expect, Flying, Law, PATIENCE, World, key, law};

impl World {
    pub(super) fn put(&self, door: usize, ns: u8, blocks: &[(u16, u32)], pieces: u8) -> Law {
        self.door("put");
        let mut writes: Vec<(Id, Version)> = Vec::new();
        for (number, len) in blocks {
            let id = (ns, *number);
            let version = self.version(id, &[u64::from(*len)], &writes);
            // Where calls are waited for, none may wait for a reservation.
            let waits = !self.is_scheduled() && self.held.borrow().iter().any(|one| one.id == id);
            if !waits && (version.parts.len() == 1 || self.is_single()) {
                writes.push((id, version));
            }
        }
        if writes.is_empty() {
            return Ok(());
        }
        let namespace = self.namespace(door, ns)?;
        let (home, mut buffers) = (self.home(), BlockBuffers::default());
        for (_, version) in &writes {
            buffers.push(home.memory(&version.bytes(), pieces).0);
        }
        let ids: Vec<Id> = writes.iter().map(|(id, _)| *id).collect();
        let bytes = writes.iter().map(|(_, version)| version.len()).sum::<u64>();
        let is_roomy = self.is_roomy_for(&writes);
        let after = World::after(&ids);
        let goes = is_roomy || after.is_none() && self.is_small(&writes);
        let has_room = self.all_is_free() && self.fit_easily(&writes) && goes;
        // The second of one key begins when the first has ended.
        let once = ids.iter().collect::<BTreeSet<_>>().len() == ids.len();
        self.cause.borrow_mut().needless = self.has_a_place_for(ids.len() as u64);
        let has_queue = once && self.fit_the_queue(bytes);
        self.cause.borrow_mut().own.extend(&ids);
        self.may_evict();
        let (there, unread) = {
            let (twin, unread) = (self.twin.borrow(), self.unread.borrow());
            let on_its_way = |id: &Id| !twin.writers(*id).is_empty();
            let mut before = BTreeSet::new();
            // One that the call names twice waits for itself.
            let there = ids
                .iter()
                .map(|id| !before.insert(*id) || twin.live(*id).is_some() || on_its_way(id));
            let known = |id: &Id| unread.contains(id) || on_its_way(id);
            (there.collect(), ids.iter().position(known))
        };
        // One that is there is not written again.
        self.uses(&ids, after);
        let mut writers = Vec::new();
        for (id, version) in writes {
            let number = self.number();
            let mut twin = self.twin.borrow_mut();
            twin.begin(id, number, version);
            writers.push(number);
        }
        let since = self.now();
        // It shares the outcome of those that write the same keys.
        let faults = {
            let flying = self.flying.borrow();
            let puts = flying.iter().filter(|one| one.asked == Asked::Put);
            let same = puts.filter(|one| one.ids.iter().any(|id| ids.contains(id)));
            same.fold(self.faults(), |faults, one| faults.min(one.faults))
        };
        let keys = ids.iter().map(|(_, number)| key(*number)).collect();
        let task = namespace
            .put_after(after, keys, buffers)
            .map_err(|error| format!("put: {error}"))?;
        {
            let mut counts = self.counts.borrow_mut();
            counts.put_tasks += 1;
            counts.put_blocks += ids.len() as u64;
            counts.put_bytes += bytes;
        }
        self.fly(Flying {
            writers,
            has_room,
            has_queue,
            is_roomy,
            there,
            unread,
            ..Flying::new(task, Asked::Put, ids, since, faults)
        })
    }

    /// A call is under way. Where real threads work on it, it is waited for.
    fn fly(&self, flying: Flying) -> Law {
        if !self.is_scheduled() {
            let waited = flying.task.wait(Some(PATIENCE));
            law!(
                waited.is_ok(),
                "a {:?} of {:?} does not end: {:?}",
                flying.asked,
                flying.ids,
                flying.task.outcomes()
            );
        }
        self.flying.borrow_mut().push(flying);
        Ok(())
    }

    /// What a get of a key has to answer, and which block it pins.
    fn expect(&self, id: Id) -> (Expect, Option<()>, Option<Version>) {
        let (twin, seen) = (self.twin.borrow(), self.seen.borrow());
        let Some(live) = twin.live(id) else {
            return (Expect::Miss, None, None);
        };
        let version = live.versions[0].clone();
        let sure = live.versions.iter().all(|one| one.len() == version.len());
        let rotten = seen.far.get(&id).is_some_and(|far| self.is_rotten(far));
        let expect = match () {
            () if !sure || self.nested.get() > 0 => Expect::Any,
            // Others may evict the sound copy ahead of need, so that the rotten one is found.
            () if rotten && !self.is_scheduled() => Expect::Any,
            () if seen.near.contains(&id) || !rotten => Expect::Done,
            () => Expect::Corrupt,
        };
        (expect, Some(()), Some(version))
    }

    pub(super) fn get(
        &self,
        door: usize,
        ns: u8,
        numbers: &[u16],
        how: (bool, bool, Option<usize>, u8),
    ) -> Law {
        let (prefix, staged, misfit, pieces) = how;
        self.door(if prefix { "get prefix" } else { "get" });
        let namespace = self.namespace(door, ns)?;
        let ids: Vec<Id> = numbers.iter().map(|number| (ns, *number)).collect();
        let stamps = self.twin.borrow_mut().stamps(ids.len());
        let (mut expects, mut pinned, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        let (home, mut blocks) = (self.home(), BlockBuffers::default());
        let before = self.owner().stats();
        let mut gap = false;
        let mut bytes = 0;
        for (index, id) in ids.iter().enumerate() {
            let (mut expect, pin, version) = self.expect(*id);
            let is_long = misfit == Some(index);
            let len = version.as_ref().map_or(100, Version::len) + u64::from(is_long);
            let one_part = version.as_ref().is_none_or(|one| one.parts.len() == 1);
            if is_long && expect == Expect::Done {
                expect = Expect::Length;
            } else if is_long && expect == Expect::Corrupt {
                // Whether its table is what rotted decides.
                expect = if one_part {
                    Expect::Length
                } else {
                    Expect::Any
                };
            }
            let mut pin = pin;
            if gap && expect != Expect::Any {
                expect = Expect::Untouched;
                pin = None;
            }
            let ends = expect == Expect::Miss || expect == Expect::Length && one_part;
            if prefix && expect == Expect::Any {
                // Nobody knows whether the hits end here.
                gap = true;
            }
            if prefix && ends {
                gap = true;
            }
            {
                let mut twin = self.twin.borrow_mut();
                // Behind a gap, blocks are pinned for a moment, or not; and where others load some
                // it may wait for those, and pin then.
                match gap && !ends || before.inflight_load_blocks > 0 {
                    true => twin.maybe_used(*id, stamps[index]),
                    false => twin.used(*id, stamps[index]),
                }
            }
            if prefix && ends && expect == Expect::Length {
                pin = None;
            }
            bytes += len;
            let (moved, seen) = home.memory(&vec![0xEE; len as usize], pieces);
            blocks.push(moved);
            buffers.push(seen);
            expects.push(expect);
            let copy = || Some((self.birth(*id)?, version.as_ref()?.stored));
            pinned.push(pin.and_then(|()| copy()));
        }
        if expects.contains(&Expect::Any) {
            expects.iter_mut().for_each(|expect| *expect = Expect::Any);
        }
        let mut options = GetOptions::default();
        (options.prefix, options.staged) = (prefix, staged);
        let (since, faults) = (self.now(), self.faults());
        // Far hits are promoted.
        if !self.is_single() {
            self.may_evict();
        }
        self.asks(ids.iter().copied());
        let keys = numbers.iter().map(|number| key(*number)).collect();
        let task = namespace.get_with(keys, blocks, options);
        let task = task.map_err(|error| format!("get: {error}"))?;
        if self.owner().stats().coalesced_blocks > before.coalesced_blocks {
            self.door("joined");
            expects.iter_mut().for_each(|expect| *expect = Expect::Any);
            pinned.iter_mut().for_each(|pin| *pin = None);
        }
        {
            let mut counts = self.counts.borrow_mut();
            counts.get_tasks += 1;
            counts.get_blocks += ids.len() as u64;
            counts.get_bytes += bytes;
        }
        self.fly(Flying {
            buffers,
            expect: expects,
            pinned,
            ..Flying::new(task, Asked::Get, ids, since, faults)
        })
    }

    /// Everything is pinned nowhere, reserved nowhere, and every block comes back.
    pub fn read_all(&self, door: usize) -> Law {
        let ids: Vec<Id> = {
            let twin = self.twin.borrow();
            twin.all_live()
                .map(|(id, _)| id)
                .filter(|id| u64::from(id.1) < KEYS)
                .collect()
        };
        for ns in [0, 1] {
            let numbers: Vec<u16> = ids
                .iter()
                .filter(|id| id.0 == ns)
                .map(|(_, number)| *number)
                .collect();
            if !numbers.is_empty() {
                self.get(door, ns, &numbers, (false, false, None, 1))?;
            }
        }
        Ok(())
    }

    pub(super) fn prefetch(&self, door: usize, ns: u8, numbers: &[u16]) -> Law {
        self.door("prefetch");
        let namespace = self.namespace(door, ns)?;
        let ids: Vec<Id> = numbers.iter().map(|number| (ns, *number)).collect();
        let stamps = self.twin.borrow_mut().stamps(ids.len());
        let mut gap = false;
        let mut expects = Vec::new();
        for (id, stamp) in ids.iter().zip(stamps) {
            let (expect, _, _) = self.expect(*id);
            gap |= expect == Expect::Miss;
            self.twin.borrow_mut().maybe_used(*id, stamp);
            let near = self.is_single() || self.seen.borrow().near.contains(id);
            expects.push(match gap {
                true => Expect::Miss,
                false if near && self.nested.get() == 0 => Expect::Done,
                false => Expect::Any,
            });
        }
        if self.nested.get() > 0 {
            expects.iter_mut().for_each(|expect| *expect = Expect::Any);
        }
        if !self.is_single() {
            self.may_evict();
        }
        let (since, faults) = (self.now(), self.faults());
        self.asks(ids.iter().copied());
        let keys: Vec<_> = numbers.iter().map(|number| key(*number)).collect();
        let task = namespace
            .prefetch(&keys)
            .map_err(|error| format!("prefetch: {error}"))?;
        self.fly(Flying {
            expect: expects,
            ..Flying::new(task, Asked::Prefetch, ids, since, faults)
        })
    }
}
