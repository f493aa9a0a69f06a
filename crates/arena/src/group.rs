//! Blocks that belong together: kept and evicted as one, in a class.
//!
//! A block in no group is of [`Class::Ordinary`], and its stamp says when it was used. A group has
//! one time of use for all its blocks, and none of them leaves before that is the oldest there is.
//! A block in several groups is of the highest class and the latest use among them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::held::Mutex;
use crate::key::{Key, NamespaceId};

/// Eviction class of a block. Blocks of a lower class are evicted before all blocks of a higher
/// one, regardless of their use.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
#[repr(u8)]
pub enum Class {
    /// Evicted before all others, because it has been superseded.
    First = 0,
    /// Evicted by time of use, as all blocks without a group.
    #[default]
    Ordinary = 1,
    /// Evicted only if nothing else can be evicted.
    Last = 2,
}

/// A stamp has the class above the time of use, so that one comparison decides.
const TIME_BITS: u32 = 62;
const TIME: u64 = (1 << TIME_BITS) - 1;

/// The first stamp of an ordinary block.
pub(crate) const ORDINARY: u64 = Class::Ordinary.first();

impl Class {
    /// The first stamp of the class.
    pub(crate) const fn first(self) -> u64 {
        self.above(0)
    }

    const fn above(self, time: u64) -> u64 {
        (self as u64) << TIME_BITS | time
    }

    fn of(number: u8) -> Class {
        match number {
            0 => Class::First,
            1 => Class::Ordinary,
            _ => Class::Last,
        }
    }
}

/// A stamp as it would be without any group: what other tiers and devices are told.
pub(crate) fn ordinary(stamp: u64) -> u64 {
    Class::Ordinary.above(stamp & TIME)
}

/// A stamp of this class.
pub(crate) fn with_class_of(stamp: u64, other: u64) -> u64 {
    other & !TIME | stamp & TIME
}

/// Blocks of a namespace that are evicted together, on all devices of one tier.
///
/// This object has the state that the devices share. Each device also gets the list of the blocks
/// ([`Arena::join`](crate::Arena::join)).
pub struct Group {
    namespace: NamespaceId,
    keys: Mutex<Vec<Key>>,
    class: AtomicU8,
    /// When one of its blocks was used last.
    used: AtomicU64,
    /// Whether one of its blocks has been evicted, and none has come since: the rest leaves too.
    broken: AtomicBool,
    /// Whether it is no group any more.
    dissolved: AtomicBool,
    /// Whether several devices have blocks of it.
    spread: AtomicBool,
}

impl Group {
    /// Creates a group without blocks.
    #[must_use]
    pub fn new(namespace: NamespaceId, class: Class) -> Group {
        Group {
            namespace,
            keys: Mutex::default(),
            class: AtomicU8::new(class as u8),
            used: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            dissolved: AtomicBool::new(false),
            spread: AtomicBool::new(false),
        }
    }

    /// Returns the namespace of the blocks.
    pub fn namespace(&self) -> NamespaceId {
        self.namespace
    }

    /// Adds the keys of more blocks, and returns the position of the first one. Afterwards pass it
    /// to [`Arena::join`](crate::Arena::join) of each device.
    pub fn add(&self, keys: &[Key]) -> usize {
        let mut known = self.keys.lock();
        known.extend_from_slice(keys);
        known.len() - keys.len()
    }

    /// Some of its keys, in the order in which they were added.
    pub(crate) fn some(&self, from: usize, count: usize) -> Vec<Key> {
        let keys = self.keys.lock();
        keys.iter().skip(from).take(count).copied().collect()
    }

    /// Sets the class. Afterwards call [`Arena::rank_again`](crate::Arena::rank_again) on each
    /// device.
    pub fn set_class(&self, class: Class) {
        self.class.store(class as u8, Ordering::Relaxed);
    }

    /// Dissolves the group. Afterwards call [`Arena::part`](crate::Arena::part) on each device.
    pub fn dissolve(&self) {
        self.dissolved.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_dissolved(&self) -> bool {
        self.dissolved.load(Ordering::Relaxed)
    }

    /// Sets whether several devices may have blocks of the group.
    ///
    /// If so, [`Arena::fallen`](crate::Arena::fallen) of one device reports an eviction for the
    /// others.
    pub fn spread(&self, several: bool) {
        self.spread.store(several, Ordering::Relaxed);
    }

    pub(crate) fn is_spread(&self) -> bool {
        self.spread.load(Ordering::Relaxed)
    }

    /// What is left of a group that has lost a block is of no use.
    fn class(&self) -> Class {
        match self.is_broken() {
            true => Class::First,
            false => Class::of(self.class.load(Ordering::Relaxed)),
        }
    }

    pub(crate) fn use_at(&self, stamp: u64) {
        self.used.fetch_max(stamp & TIME, Ordering::Relaxed);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Notes that one of its blocks was evicted; true for the first.
    pub(crate) fn break_up(&self) -> bool {
        !self.broken.swap(true, Ordering::Relaxed)
    }

    /// Notes that one of its blocks has come.
    pub(crate) fn mend(&self) {
        self.broken.store(false, Ordering::Relaxed);
    }
}

type Part = HashMap<(NamespaceId, Key), Vec<Arc<Group>>>;

/// The groups of an arena by the keys of their blocks, which are there or may come.
#[derive(Default)]
pub(crate) struct Groups {
    /// By the keys' first bytes: each grows by itself.
    parts: HashMap<u8, Part>,
    /// Groups that have lost a block, and the first of their keys that was not looked at since.
    pub(crate) falling: VecDeque<(Arc<Group>, usize)>,
    /// Those of several devices, of which the others have not been told.
    pub(crate) fallen: Vec<Arc<Group>>,
}

impl Groups {
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Whether what it has left is about to leave.
    pub(crate) fn is_falling(&self, group: &Arc<Group>) -> bool {
        let mut falling = self.falling.iter();
        falling.any(|(one, _)| Arc::ptr_eq(one, group))
    }

    pub(crate) fn of(&self, namespace: NamespaceId, key: &Key) -> &[Arc<Group>] {
        let part = self.parts.get(&key.0[0]);
        let groups = part.and_then(|part| part.get(&(namespace, *key)));
        groups.map_or(&[], Vec::as_slice)
    }

    pub(crate) fn add(&mut self, key: &Key, group: &Arc<Group>) {
        let part = self.parts.entry(key.0[0]).or_default();
        let groups = part.entry((group.namespace, *key)).or_default();
        if !groups.iter().any(|one| Arc::ptr_eq(one, group)) {
            groups.push(Arc::clone(group));
        }
    }

    pub(crate) fn remove(&mut self, key: &Key, group: &Arc<Group>) {
        let Some(part) = self.parts.get_mut(&key.0[0]) else {
            return;
        };
        let identity = (group.namespace, *key);
        let Some(groups) = part.get_mut(&identity) else {
            return;
        };
        groups.retain(|one| !Arc::ptr_eq(one, group));
        if groups.is_empty() {
            part.remove(&identity);
        }
        if part.is_empty() {
            self.parts.remove(&key.0[0]);
        }
    }
}

/// The stamp of a block in these groups, which had that one.
pub(crate) fn rank(stamp: u64, groups: &[Arc<Group>]) -> u64 {
    let times = groups
        .iter()
        .map(|group| group.used.load(Ordering::Relaxed));
    let time = times.fold(stamp & TIME, u64::max);
    let class = groups.iter().map(|group| group.class()).max();
    class.unwrap_or_default().above(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_decides_before_the_time_of_use() {
        let group = |class, time| {
            let group = Group::new(NamespaceId([1; 16]), class);
            group.use_at(time);
            Arc::new(group)
        };
        let [first, ordinary, last] =
            [(Class::First, 9), (Class::Ordinary, 5), (Class::Last, 1)].map(|(c, t)| group(c, t));
        let of = |groups: &[&Arc<Group>]| {
            let groups: Vec<_> = groups.iter().map(|group| Arc::clone(group)).collect();
            rank(ORDINARY + 3, &groups)
        };
        assert_eq!(of(&[]), ORDINARY + 3);
        assert!(of(&[&first]) < of(&[]) && of(&[]) < of(&[&ordinary]));
        assert!(of(&[&ordinary]) < of(&[&last]));
        assert_eq!(
            of(&[&first, &last]),
            Class::Last.above(9),
            "the highest of both"
        );
        last.break_up();
        assert!(
            of(&[&last]) < of(&[]),
            "what is left of a broken group goes first"
        );
        assert_eq!(super::ordinary(of(&[&first])), ORDINARY + 9);
    }
}
