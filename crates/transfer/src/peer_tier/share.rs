//! What this host gives: an arena of its own, in memory or on a medium that outlives the process.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{
    Access, Arena, Error, Full, Key, NamespaceId, Options, Place, PromptSizes, Refused, Reserved,
    Stamps, Token, Use, Uses, Wanted,
};
use kvdepot_media::{Buffer, Checksum, checksum};
use kvdepot_store::NamespaceUsage;
use parking_lot::Mutex;

use super::hosts::Hosts;
use super::messages::TAIL_MAX;
use super::moving::{Moving, Removal};

/// How long another owner of the medium is waited for.
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Slots that are looked at for a page.
const GLANCE: u32 = 65_536;

/// The guest number of this host's own pipeline.
pub(super) const OWN: [u8; 16] = [0; 16];

/// The part of all in which a prompt evicts others each time that its rest is offered again: a host
/// does not know which blocks of the prompt are at others.
const AGAIN_PART: u64 = 8;

/// Uses by other depots that are remembered: so many of the last ones, and at most twice as many.
const USES_MAX: usize = 1 << 14;

/// The arena and the order of its uses, which is this host's own.
pub(super) struct Share {
    arena: Arc<Arena>,
    uses: Uses,
    theirs: Mutex<Theirs>,
    prompts: Arc<PromptSizes>,
    pub(super) moving: Moving,
    /// Held by whoever says what stays here, or lets something go.
    keeping: Mutex<()>,
}

/// Uses as the depots that offer and read blocks count them, with those of this host.
#[derive(Default)]
struct Theirs {
    now: HashMap<([u8; 16], u64), Stamps>,
    before: HashMap<([u8; 16], u64), Stamps>,
}

impl Theirs {
    /// The stamp here of a block that has this one there.
    fn stamp(&mut self, guest: [u8; 16], theirs: u64, uses: &Uses) -> u64 {
        let name = (guest, Use::of(theirs).began & !(1 << Use::BITS));
        if self.now.len() >= USES_MAX && !self.now.contains_key(&name) {
            self.before = std::mem::take(&mut self.now);
        }
        let before = self.before.get(&name).copied();
        let use_ = self.now.entry(name);
        let stamps = use_.or_insert_with(|| before.unwrap_or_else(|| uses.call(0)));
        stamps.like(theirs)
    }
}

impl Share {
    /// Opens it: in memory, or on a medium, which bears that number. Of a last tier no other has
    /// what it evicts.
    pub(super) fn open(
        (name, number): (&'static str, u32),
        path: Option<PathBuf>,
        (capacity, is_last): (u64, bool),
    ) -> Result<Share, Error> {
        let uses = Uses::default();
        let arena = match path {
            None => Arena::volatile(name, number, capacity)?,
            Some(path) => {
                let options = Options {
                    capacity: Some(capacity),
                    access: Access::Mapped,
                    ..Options::default()
                };
                let field = |option: &str| format!("peer.{option}");
                let (mut arena, _) =
                    Arena::open((name, number), &path, &options, &field, LOCK_WAIT)?;
                arena.rank(&uses);
                arena
            }
        };
        let (arena, prompts) = (Arc::new(arena), Arc::default());
        if is_last {
            arena.set_last_part((1, 1), &prompts);
        }
        Ok(Share {
            arena,
            uses,
            theirs: Mutex::default(),
            prompts,
            moving: Moving::default(),
            keeping: Mutex::new(()),
        })
    }

    /// Notes which part of all it is: how large prompts are is known of all.
    pub(super) fn spread(&self, hosts: &Hosts) {
        if self.arena.is_last()
            && let Some(part) = hosts.part()
        {
            self.arena.set_last_part(part, &self.prompts);
        }
    }

    /// Closes it: blocks of a medium are there the next time.
    pub(super) fn close(&self) {
        self.arena.close();
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(super) fn contains(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let mut found = vec![false; keys.len()];
        self.arena.contains(namespace, keys, &mut found);
        found
    }

    /// Pins blocks, which a guest uses with these stamps, or does not use.
    pub(super) fn pin(
        &self,
        (guest, used): ([u8; 16], &[u64]),
        namespace: NamespaceId,
        keys: &[Key],
    ) -> Vec<Option<Place>> {
        let (mut found, mut places) = (vec![false; keys.len()], vec![None; keys.len()]);
        let stamps: Vec<u64> = used.iter().map(|used| self.stamp(guest, *used)).collect();
        self.arena.pin(
            namespace,
            keys,
            &mut found,
            |index| stamps.get(index).copied().unwrap_or(0),
            |index, place| places[index] = Some(place),
        );
        places
    }

    /// The stamp here of a guest's block. Others have their turn between two blocks.
    fn stamp(&self, guest: [u8; 16], theirs: u64) -> u64 {
        self.theirs.lock().stamp(guest, theirs, &self.uses)
    }

    /// Pins a block that nobody uses: it grows as old as if it had not been looked at.
    pub(super) fn hold(&self, namespace: NamespaceId, key: Key) -> Option<Place> {
        let mut held = None;
        let hold = |_, place| held = Some(place);
        self.arena.pin(namespace, &[key], &mut [false], |_| 0, hold);
        held
    }

    pub(super) fn unpin(&self, token: Token) {
        self.arena.unpin(std::iter::once(token));
    }

    /// Makes room for a guest's blocks, in prefix order. Waits for the medium.
    pub(super) fn reserve(
        &self,
        guest: [u8; 16],
        namespace: NamespaceId,
        mut blocks: Vec<Wanted>,
    ) -> Vec<Result<Reserved, Refused>> {
        let moved = self.uses.asked();
        for (index, wanted) in blocks.iter_mut().enumerate() {
            wanted.stamp = match wanted.stamp {
                0 => moved.of(index),
                theirs => self.stamp(guest, theirs),
            };
        }
        if self.arena.is_last() {
            let blocks_in = |part, wanted: &Wanted| self.arena.blocks_in(part, wanted);
            self.prompts.note(&blocks, blocks_in);
            for wanted in &mut blocks {
                let (use_, most) = (Use::of(wanted.stamp), blocks_in(AGAIN_PART, wanted));
                wanted.evict &= !use_.is_again || use_.depth < most;
            }
        }
        let mut seen = HashSet::new();
        let once = blocks.iter().all(|wanted| seen.insert(wanted.key));
        if once && let Some(answers) = self.arena.reserve(namespace, &blocks) {
            return answers;
        }
        // The last one that found no room: those behind it find none either.
        let mut refused: Option<(Wanted, Full)> = None;
        let each = blocks.into_iter().map(|one| {
            if let Some((before, full)) = &refused
                && one.needs_as_much_as(before)
                && !self.contains(namespace, &[one.key])[0]
            {
                return Err(Refused::Full(Full {
                    requested: one.len,
                    ..*full
                }));
            }
            let answer = self.reserve_one(namespace, one);
            if let Err(Refused::Full(full)) = &answer {
                refused = Some((one, *full));
            }
            answer
        });
        each.collect()
    }

    fn reserve_one(&self, namespace: NamespaceId, wanted: Wanted) -> Result<Reserved, Refused> {
        let declined = Err(Refused::Declined);
        if let Some(mut answer) = self.arena.reserve(namespace, &[wanted]) {
            return answer.pop().unwrap_or(declined);
        }
        let space = self
            .arena
            .make_space(namespace, &wanted, Default::default())?;
        let mut answer = self.arena.reserve_in(namespace, vec![(wanted, space)]);
        answer.pop().unwrap_or(declined)
    }

    pub(super) fn commit(&self, mut reserved: Reserved, sum: Checksum, pinned: bool) -> bool {
        let token = reserved.hand_out().token;
        self.arena.commit(&[(token, sum)], pinned) == [true]
    }

    pub(super) fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
    ) -> Result<Vec<Buffer>, Error> {
        let mut buffers = Vec::new();
        let end = offset.checked_add(len).filter(|end| *end <= place.len);
        let end = end.ok_or_else(|| Error::input("len", len, "a range within the block"))?;
        self.arena.buffers(place, offset..end, &mut buffers)?;
        Ok(buffers)
    }

    /// Whether all bytes of a block that is pinned are those that its record says.
    pub(super) fn verifies(&self, place: &Place) -> bool {
        let parts = match parts::single(place) {
            Some(one) => Some(one.to_vec()),
            None => self.arena.parts(place),
        };
        let is_right = |(number, part): (u32, Part)| {
            let id = parts::part_id(&place.identity, number, place.parts);
            let buffers = self.buffers(place, part.offset, part.len);
            buffers.is_ok_and(|buffers| checksum::of_buffers(&id, &buffers) == part.checksum)
        };
        parts.is_some_and(|parts| (0..).zip(parts).all(is_right))
    }

    /// The last `len` bytes of a block that is pinned.
    pub(super) fn tail(&self, place: &Place, len: u64) -> Option<Vec<u8>> {
        if len == 0 {
            return Some(Vec::new());
        }
        let begin = place
            .len
            .checked_sub(len)
            .filter(|_| len <= TAIL_MAX.into())?;
        let buffers = self.buffers(place, begin, len).ok()?;
        Some(buffers.iter().flat_map(Buffer::to_vec).collect())
    }

    /// Writes the last bytes of a block that is reserved; whether they are there.
    pub(super) fn write_tail(&self, place: &Place, tail: &[u8]) -> bool {
        let len = tail.len() as u64;
        let Some(begin) = place.len.checked_sub(len) else {
            return false;
        };
        if tail.is_empty() {
            return true;
        }
        let Ok(buffers) = self.buffers(place, begin, len) else {
            return false;
        };
        let mut rest = tail;
        buffers.iter().all(|buffer| {
            let (now, later) = rest.split_at(buffer.len().min(rest.len()));
            rest = later;
            buffer.write_at(0, now).is_ok()
        })
    }

    /// Whether a block that is pinned has not been removed or replaced since.
    pub(super) fn is_there(&self, place: &Place) -> bool {
        let here = self.arena.pin_token(place.token);
        here.iter().for_each(|here| self.unpin(here.token));
        here.is_some()
    }

    /// Which blocks are here and stay, by what `is_home` says: it is asked while nothing goes.
    pub(super) fn keep(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        is_home: impl Fn(Key) -> bool,
    ) -> Vec<bool> {
        let _order = self.keeping.lock();
        let found = self.contains(namespace, keys).into_iter().zip(keys);
        found.map(|(found, key)| found && is_home(*key)).collect()
    }

    /// Lets blocks go that are elsewhere, as they were when they were pinned, unless it `may` not
    /// any more.
    pub(super) fn leave(&self, tokens: &[Token], may: impl FnOnce() -> bool) {
        let _order = self.keeping.lock();
        if may() {
            self.arena.drop_these(tokens);
        }
    }

    pub(super) fn clear(&self, namespace: NamespaceId) -> usize {
        let clear = || self.arena.clear(namespace);
        self.moving.remove(Removal::All(namespace), clear)
    }

    /// Removes blocks; for each key, whether this call has removed one.
    pub(super) fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> Vec<bool> {
        let what = Removal::Keys(namespace, keys.iter().copied().collect());
        // One call for all of them: each goes over the removed blocks that are still pinned.
        let remove = || self.arena.remove_each(namespace, keys);
        self.moving.remove(what, remove)
    }

    /// Some blocks from a slot on, and the slot where the next page begins.
    pub(super) fn list(
        &self,
        namespace: NamespaceId,
        from: u32,
        limit: usize,
    ) -> (Vec<(Key, u64)>, Option<u32>) {
        let mut blocks = Vec::new();
        let next = self
            .arena
            .glance(namespace, from, GLANCE, limit, &mut blocks);
        (blocks, next)
    }

    pub(super) fn namespaces(&self) -> Vec<NamespaceUsage> {
        let described = self.arena.descriptions().unwrap_or_default();
        let text = |id: NamespaceId| {
            let mut all = described.iter();
            all.find(|(other, _)| *other == id)
                .map(|(_, text)| text.clone())
        };
        let usage = |(id, (blocks, bytes)): (NamespaceId, (u64, u64))| {
            let mut usage = NamespaceUsage::described(id, text(id));
            (usage.blocks, usage.bytes) = (blocks, bytes);
            usage
        };
        self.arena.shares().into_iter().map(usage).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);

    fn key(number: u64) -> Key {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        Key(key)
    }

    /// A share with these blocks, each of which is pinned.
    fn share_of(keys: &[Key]) -> Share {
        let share = Share::open(("Peer", 0), None, (16 << 20, false)).unwrap();
        let wanted = |key: &Key| Wanted {
            key: *key,
            len: 64,
            parts: 1,
            stamp: 0,
            copy: false,
            evict: true,
        };
        let reserved = share.reserve(OWN, NAMESPACE, keys.iter().map(wanted).collect());
        for reserved in reserved {
            assert!(share.commit(reserved.unwrap(), Checksum::default(), false));
        }
        let pinned = share.pin((OWN, &[]), NAMESPACE, keys);
        assert!(pinned.iter().all(Option::is_some));
        share
    }

    #[test]
    fn a_removal_says_of_each_key_whether_it_has_removed_its_block() {
        // More than an arena removes together.
        const COUNT: u64 = 1500;
        let all: Vec<Key> = (0..COUNT).chain([0, 1]).map(key).collect();
        let is_stored = |number: u64| number.is_multiple_of(3);
        let stored = (0..COUNT).filter(|number| is_stored(*number)).map(key);
        let share = share_of(&stored.collect::<Vec<_>>());
        let removed = share.remove(NAMESPACE, &all);
        let mut wanted: Vec<bool> = (0..COUNT).map(is_stored).collect();
        // A repeated key has been removed by then.
        wanted.extend([false, false]);
        assert_eq!(removed, wanted);
        assert!(!share.remove(NAMESPACE, &all).contains(&true));
    }

    /// Work is counted in debug builds.
    #[test]
    #[cfg(debug_assertions)]
    fn the_work_of_a_removal_of_pinned_blocks_grows_with_its_keys() {
        use kvdepot_arena::held::work;

        let cost = |count: u64| {
            let keys: Vec<Key> = (0..count).map(key).collect();
            let share = share_of(&keys);
            let before = work().mine;
            assert!(!share.remove(NAMESPACE, &keys).contains(&false));
            work().mine - before
        };
        let (some, twice) = (cost(500), cost(1000));
        assert!(some > 0 && 2 * twice < 5 * some, "{some}, {twice}");
    }
}
