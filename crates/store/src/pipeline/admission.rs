//! Which blocks are not stored, and not brought near, where others would have to go for them
//! (`admission: learned`). Free room is always used.
//!
//! *Left unread.* An engine whose own cache is the larger one serves from that what it stores here,
//! and stores it again as soon as it is gone. So a block that has left without anybody having asked
//! for it is not stored again before somebody has: any lookup counts, hit or miss.
//!
//! *Deep in a prompt.* Where blocks that lie deep in what a call adds are asked for less often than
//! others, they are not stored ([`Chances`]).
//!
//! What follows a block that is not stored in its call is not stored either, because nobody would
//! find it without its head; and where the first that is not there is wanted, nothing that follows
//! it counts as unread.
//!
//! *Read once.* A block of the far tier is brought near when it was read there lately before.

use kvdepot_arena::{Key, NamespaceId};

use super::Core;
use super::ledger::Promotion;
use crate::chances::{Chances, UNKNOWN};
use crate::ghosts::{Ghosts, ROUND};
use crate::tier::Stage;

/// A block is brought near when, since it was last read far, so many steps at most of the near
/// tier's clock have passed, which counts the bytes of such reads: half of what the tier holds.
const LATELY: u64 = ROUND / 2;

/// Blocks of which what is known is fetched before the first of them is judged.
const GROUP: usize = 32;

/// What is known of the blocks that pass by.
pub(crate) struct Learned {
    /// What was offered and not asked for since.
    offered: Ghosts,
    chances: Chances,
    /// What was read in a far tier; `None` where there is but one.
    read_far: Option<Ghosts>,
}

impl Learned {
    /// For tiers, near to far, as they are now.
    pub(crate) fn new(tiers: &[Stage]) -> Learned {
        let ghosts = |tier: &Stage| {
            let stats = tier.stats();
            Ghosts::new(stats.blocks_max, stats.capacity_bytes)
        };
        Learned {
            offered: ghosts(&tiers[tiers.len() - 1]),
            chances: Chances::new(),
            read_far: (tiers.len() > 1).then(|| ghosts(&tiers[0])),
        }
    }
}

/// What a call may take without others having to go.
struct Room {
    /// Bytes and blocks that are left.
    spare: (u64, u64),
    /// Which blocks of the call, from the first that is not there on, need none of it.
    there: Vec<bool>,
    /// The first block of the call that it has not been asked for.
    next: usize,
}

impl Room {
    /// Whether there is room for the blocks up to `at`, of which `from` is the first that needs it.
    fn holds(&mut self, from: usize, at: usize, len: impl Fn(usize) -> u64) -> bool {
        for next in self.next..=at {
            if self.there[next - from] {
                continue;
            }
            let left = |has: u64, wanted| has.checked_sub(wanted);
            let (bytes, records) = self.spare;
            match left(bytes, len(next)).zip(left(records, 1)) {
                Some(spare) => self.spare = spare,
                None => return false,
            }
        }
        self.next = at + 1;
        true
    }
}

impl Core {
    /// Has the processor fetch what is known of blocks that are about to be [noted as
    /// stored](Core::note_stored).
    pub(super) fn fetch_known<'a>(&self, id: NamespaceId, keys: impl Iterator<Item = &'a Key>) {
        if let Some(learned) = &self.learned {
            learned.offered.fetch(id, keys);
        }
    }

    /// Notes that a block was stored.
    pub(super) fn note_stored(&self, id: NamespaceId, key: &Key, len: u64) {
        if let Some(learned) = &self.learned {
            learned.offered.offered(id, key, len, UNKNOWN, true);
        }
    }

    /// Notes that somebody asks for blocks.
    pub(super) fn note_asked(&self, id: NamespaceId, keys: &[Key]) {
        let Some(learned) = &self.learned else { return };
        for some in keys.chunks(GROUP) {
            learned.offered.fetch(id, some.iter());
            for key in some {
                if let Some((class, steps)) = learned.offered.take(id, key) {
                    learned.chances.asked(class, steps);
                }
            }
        }
    }

    /// Blocks that did not get to where they were going, or were removed, have not left unread.
    pub(super) fn forget(&self, id: NamespaceId, keys: &[Key]) {
        let Some(learned) = &self.learned else { return };
        for key in keys {
            let _class = learned.offered.take(id, key);
        }
    }

    /// Forgets what has not been asked for.
    pub(super) fn forget_all(&self) {
        if let Some(learned) = &self.learned {
            learned.offered.clear();
        }
    }

    /// Which of these blocks, given in prefix order with their bytes, are not stored; `None` where
    /// all are that find room.
    pub(super) fn declined(
        &self,
        id: NamespaceId,
        keys: &[Key],
        len: impl Fn(usize) -> u64,
    ) -> Option<Vec<bool>> {
        let learned = self.learned.as_ref()?;
        let (offered, chances) = (&learned.offered, &learned.chances);
        let from = self.stored_run(id, keys);
        if from == keys.len() {
            return None;
        }
        let is_unread = offered.has(id, &keys[from]);
        let judges = chances.judges();
        let largest = self.tiers[self.tiers.len() - 1].block_max();
        let mut end = keys.len();
        let mut room = None;
        for (at, key) in keys.iter().enumerate().skip(from) {
            if (at - from).is_multiple_of(GROUP) {
                offered.fetch(id, keys[at..].iter().take(GROUP));
            }
            let class = Chances::class(at - from, at + 1 == keys.len());
            let is_poor = is_unread || judges && chances.are_poor(class);
            if at < end && is_poor {
                // Asked for late: it takes locks, and most calls need not know.
                let room = room.get_or_insert_with(|| Room {
                    spare: self.spare(self.tiers.len() - 1),
                    there: self.stored(id, &keys[from..]),
                    next: from,
                });
                if !room.holds(from, at, &len) {
                    end = at;
                }
            }
            // One that the tier can never take tells nothing of its time.
            let may_be = len(at) <= largest;
            if may_be && offered.offered(id, key, len(at), class, at >= end) {
                chances.offered(class);
            }
        }
        chances.pass(offered.now());
        let behind = room.map(|room| room.there).unwrap_or_default();
        let behind = behind.into_iter().skip(end - from).map(|there| !there);
        let declined: Vec<bool> = std::iter::repeat_n(false, end).chain(behind).collect();
        declined.contains(&true).then_some(declined)
    }

    /// Those of these blocks of a far tier that are to be brought near, and the others.
    pub(super) fn worth_promoting(
        &self,
        blocks: Vec<Promotion>,
    ) -> (Vec<Promotion>, Vec<Promotion>) {
        let read_far = self.learned.as_ref();
        let Some(read_far) = read_far.and_then(|learned| learned.read_far.as_ref()) else {
            return (blocks, Vec::new());
        };
        let (mut bytes, mut records) = self.spare(0);
        blocks.into_iter().partition(|Promotion { place, .. }| {
            let (id, key) = (place.identity.namespace, &place.identity.key);
            let before = read_far.take(id, key);
            read_far.offered(id, key, place.len, UNKNOWN, true);
            let fits = records > 0 && place.len <= bytes;
            if fits {
                bytes -= place.len;
                records -= 1;
            }
            fits || before.is_some_and(|(_, steps)| steps <= LATELY)
        })
    }

    /// Bytes and blocks that a tier takes without others having to go.
    fn spare(&self, tier: usize) -> (u64, u64) {
        let Some(arenas) = self.tiers[tier].here() else {
            let stats = self.tiers[tier].stats();
            return (
                stats.free_bytes,
                stats.blocks_max.saturating_sub(stats.blocks),
            );
        };
        let each = arenas.arenas();
        let each = each.iter().map(|arena| arena.spare());
        let (bytes, records) = each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        // What waits for the far tier is as good as there.
        let waiting = if tier > 0 { self.queued_bytes() } else { 0 };
        (bytes.saturating_sub(waiting), records)
    }
}
