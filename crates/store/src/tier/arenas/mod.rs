//! A tier of arenas: the devices that hold its blocks, and the verbs of an arena over all of them.
//!
//! Each device is a whole arena with a lock, a table and an index of its own, so that it can be
//! taken to another depot. A block lives on one of them; tokens say on which. Lookups read the list
//! of devices without a lock, and a tier of one device costs nothing beside its arena.
//!
//! `place` reserves for new blocks where `find_space` says, `devices` how devices come and go,
//! `groups` what belongs together on all of them.
//!
//! Lock order: `changing`, `placing`, `wishes`, then one arena's. Whoever only reads or describes
//! takes `wishes` alone, and waits for no call that places blocks.

mod devices;
mod find_space;
mod groups;
mod place;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use kvdepot_arena::format::directory;
use kvdepot_arena::parts::Part;
use kvdepot_arena::{
    Access, Arena, Departed, Error, Group, Key, Legacy, NamespaceId, Parting, Place, PromptSizes,
    Refused, Reserved, TierStats, Token, Wanted, held,
};
use kvdepot_media::Buffer;
use kvdepot_media::checksum::Checksum;
use parking_lot::Mutex;

use super::contract::Ends;

/// Keys of a call that are looked up at a time, and looked up again where blocks have moved
/// between devices since: as many as one turn at an index takes.
fn look_len() -> usize {
    kvdepot_media::items_per_turn(8, 512)
}

/// The keys of a call, with what was found of each, [`look_len`] at a time.
fn in_turns<'a>(
    keys: &'a [Key],
    found: &'a mut [bool],
) -> impl Iterator<Item = (&'a [Key], &'a mut [bool])> {
    keys.chunks(look_len()).zip(found.chunks_mut(look_len()))
}

/// A tier whose devices a configuration names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sort {
    pub(crate) name: &'static str,
    /// Where it names them.
    pub(crate) section: &'static str,
    pub(crate) access: Access,
    /// The name of its default file.
    pub(crate) stem: &'static str,
}

/// Mapped files and DAX devices.
pub(crate) const DAX: Sort = Sort {
    name: "Dax",
    section: "dax",
    access: Access::Mapped,
    stem: "arena",
};

/// Files on disks, by calls.
pub(crate) const NVME: Sort = Sort {
    name: "Nvme",
    section: "nvme",
    access: Access::Direct,
    stem: "nvme",
};

/// Devices that are one tier.
pub(crate) struct Arenas {
    name: &'static str,
    devices: ArcSwap<Devices>,
    /// Held while blocks are placed and while devices come or go, so that a key gets one place: for
    /// reading where there is one device, which sees to that itself.
    placing: held::RwLock<()>,
    /// Held while the list of devices changes, too.
    wishes: held::Mutex<Wishes>,
    /// Held while a device is opened or let go, which may take long. How those were left that
    /// were let go.
    changing: Mutex<Vec<Parting>>,
    /// Counts, before blocks leave a device for another, that they do.
    moves: AtomicU64,
    /// Sizes of the prompts that are offered, if this is the last tier.
    prompts: Arc<PromptSizes>,
}

/// What devices that come later are told, too, and what those have left behind that are gone.
#[derive(Default)]
struct Wishes {
    described: HashMap<NamespaceId, String>,
    /// By where each is in memory.
    groups: HashMap<usize, Arc<Group>>,
    counted: TierStats,
    departed: Legacy,
}

/// The devices at one moment.
pub(crate) struct Devices(Vec<Arc<Arena>>);

impl Devices {
    /// The device, where there is no other.
    fn only(&self) -> Option<&Arc<Arena>> {
        match self.0.as_slice() {
            [only] => Some(only),
            _ => None,
        }
    }

    /// The device that made a token.
    fn of(&self, token: Token) -> Option<&Arc<Arena>> {
        self.0.iter().find(|arena| arena.number() == token.device)
    }
}

impl Devices {
    /// The device that a pinned or reserved block lies in.
    fn holds(&self, token: Token) -> Result<&Arc<Arena>, Error> {
        self.of(token).ok_or(Error::Closed(""))
    }
}

impl Ends for Devices {
    fn buffers(
        &self,
        place: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        self.holds(place.token)?
            .buffers(place, offset..offset + len, ends)
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        Ok(self.holds(place.token)?.parts(place))
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        self.holds(place.token)?.write_parts(place, found)
    }
}

impl Arenas {
    pub(crate) fn new(name: &'static str, devices: Vec<Arc<Arena>>) -> Arenas {
        Arenas {
            name,
            devices: ArcSwap::from_pointee(Devices(devices)),
            placing: held::RwLock::default(),
            wishes: held::Mutex::default(),
            changing: Mutex::default(),
            moves: AtomicU64::new(0),
            prompts: Arc::default(),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Whether what it holds outlives the process.
    pub(crate) fn lasts(&self) -> bool {
        self.devices
            .load()
            .0
            .iter()
            .any(|arena| arena.path().is_some())
    }

    /// The devices as they are now.
    pub(crate) fn devices(&self) -> Arc<Devices> {
        self.devices.load_full()
    }

    /// Their arenas.
    pub(crate) fn arenas(&self) -> Vec<Arc<Arena>> {
        self.devices.load().0.clone()
    }

    /// How often blocks have begun to leave one device for another.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Acquire)
    }

    /// Bytes of the largest block that fits.
    pub(crate) fn block_max(&self) -> u64 {
        let devices = self.devices.load();
        let each = devices.0.iter().map(|arena| arena.layout().data_len());
        each.max().unwrap_or(0)
    }

    pub(crate) fn stats(&self) -> TierStats {
        // No device leaves meanwhile: what it has counted is counted once.
        let wishes = self.wishes.lock();
        let each = self.devices.load();
        let each = each.0.iter().map(|arena| arena.stats());
        let now = each.reduce(TierStats::plus).unwrap_or_default();
        now.plus(wishes.counted.clone())
    }

    /// As [`Arena::departed`], of all devices that there were.
    pub(crate) fn departed(&self, listener: u64, limit: usize) -> Departed {
        let mut wishes = self.wishes.lock();
        let mut departed = wishes.departed.departed(listener);
        for arena in &self.devices.load().0 {
            departed.add(arena.departed(listener, limit));
        }
        departed
    }

    /// As [`Arena::forget_listener`].
    pub(crate) fn forget_listener(&self, listener: u64) {
        let mut wishes = self.wishes.lock();
        let _untold = wishes.departed.departed(listener);
        for arena in &self.devices.load().0 {
            arena.forget_listener(listener);
        }
    }

    /// Asks the devices, and again while blocks go from one to another: a lookup may have been at
    /// the one before they came, and at the other when they had left. Calls of many keys ask for
    /// [some](look_len) at a time: what was found before stands.
    fn settled<R>(&self, mut ask: impl FnMut(&Devices) -> R) -> R {
        loop {
            let before = self.moves.load(Ordering::Acquire);
            let answer = ask(&self.devices.load());
            if self.moves.load(Ordering::Acquire) == before {
                return answer;
            }
        }
    }

    pub(crate) fn contains(&self, namespace: NamespaceId, keys: &[Key], found: &mut [bool]) {
        for (keys, found) in in_turns(keys, found) {
            self.settled(|devices| {
                for arena in &devices.0 {
                    arena.contains(namespace, keys, found);
                }
            });
        }
    }

    /// How many of the first keys are published without a gap, as far as one look at each device
    /// goes: whoever asks again may learn of more.
    pub(crate) fn prefix(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        let mut count = 0;
        for keys in keys.chunks(look_len()) {
            let here = self.settled(|devices| {
                let each = devices.0.iter();
                each.fold(0, |count, arena| {
                    count + arena.prefix(namespace, &keys[count..])
                })
            });
            count += here;
            if here < keys.len() {
                break;
            }
        }
        count
    }

    pub(crate) fn find_again(
        &self,
        namespace: NamespaceId,
        key: &Key,
        stamp: u64,
    ) -> Option<Place> {
        let find = |arena: &Arc<Arena>| arena.find_again(namespace, key, stamp);
        self.settled(|devices| devices.0.iter().find_map(find))
    }

    /// As [`Arena::stamp_of`].
    pub(crate) fn stamp_of(&self, namespace: NamespaceId, key: &Key) -> Option<u64> {
        let devices = self.devices.load();
        let mut each = devices.0.iter();
        each.find_map(|arena| arena.stamp_of(namespace, key))
    }

    pub(crate) fn touch<'a>(
        &self,
        namespace: NamespaceId,
        used: impl Iterator<Item = (&'a Key, u64)> + Clone,
    ) {
        for arena in &self.devices.load().0 {
            arena.touch(namespace, used.clone());
        }
    }

    pub(crate) fn touch_token(&self, token: Token, stamp: u64) {
        if let Some(arena) = self.devices.load().of(token) {
            arena.touch_token(token, stamp);
        }
    }

    pub(crate) fn since(&self, token: Token) -> (u64, bool) {
        let devices = self.devices.load();
        let arena = devices.of(token);
        arena.map_or((0, false), |arena| arena.since(token))
    }

    /// As [`Arena::pin`]. What is pinned stays where it is, and so does its device.
    pub(crate) fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[Key],
        found: &mut [bool],
        stamp: impl Fn(usize) -> u64,
        mut each: impl FnMut(usize, Place),
    ) {
        for (turn, (keys, found)) in in_turns(keys, found).enumerate() {
            let from = turn * look_len();
            let stamp = |at: usize| stamp(from + at);
            let mut each = |at: usize, place| each(from + at, place);
            self.settled(|devices| {
                for arena in &devices.0 {
                    arena.pin(namespace, keys, found, stamp, &mut each);
                }
            });
        }
    }

    pub(crate) fn pin_token(&self, token: Token) -> Option<Place> {
        self.devices.load().of(token)?.pin_token(token)
    }

    pub(crate) fn unpin(&self, tokens: impl Iterator<Item = Token>) {
        let devices = self.devices.load();
        if let Some(only) = devices.only() {
            return only.unpin(tokens);
        }
        let tokens: Vec<Token> = tokens.collect();
        self.share_out(
            &tokens,
            |token| *token,
            |arena, _, share| {
                arena.unpin(share.iter().copied());
            },
        );
    }

    /// Gives each device its share of a batch: their positions, and the items.
    fn share_out<T: Copy>(
        &self,
        items: &[T],
        token: impl Fn(&T) -> Token,
        mut verb: impl FnMut(&Arena, &[usize], &[T]),
    ) {
        for arena in &self.devices.load().0 {
            let mine = |at: &usize| token(&items[*at]).device == arena.number();
            let mine: Vec<usize> = (0..items.len()).filter(mine).collect();
            let share: Vec<T> = mine.iter().map(|at| items[*at]).collect();
            if !mine.is_empty() {
                verb(arena, &mine, &share);
            }
        }
    }

    /// As [`Arena::reserved`].
    pub(crate) fn reserved(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        answers: &mut [Option<Refused>],
    ) {
        for arena in &self.devices.load().0 {
            arena.reserved(namespace, blocks, answers);
        }
    }

    /// Whether it is here that a token was made.
    pub(crate) fn made(&self, token: Token) -> bool {
        self.devices.load().of(token).is_some()
    }

    pub(crate) fn claim(&self, tokens: &[Token]) -> Vec<bool> {
        let mut claimed = vec![false; tokens.len()];
        self.share_out(
            tokens,
            |token| *token,
            |arena, mine, share| {
                let answers = mine.iter().zip(arena.claim(share));
                answers.for_each(|(at, answer)| claimed[*at] = answer);
            },
        );
        claimed
    }

    pub(crate) fn unclaim(&self, tokens: &[Token]) {
        self.share_out(
            tokens,
            |token| *token,
            |arena, _, share| arena.unclaim(share),
        );
    }

    /// As [`Arena::commit`]. The reservations end, committed or not.
    pub(crate) fn commit(&self, written: Vec<(Reserved, Checksum)>, pinned: bool) -> Vec<bool> {
        let blocks = written.into_iter();
        let blocks = blocks.map(|(mut reserved, sum)| (reserved.hand_out().token, sum));
        let blocks: Vec<(Token, Checksum)> = blocks.collect();
        let mut stored = vec![false; blocks.len()];
        self.share_out(
            &blocks,
            |(token, _)| *token,
            |arena, mine, share| {
                let answers = mine.iter().zip(arena.commit(share, pinned));
                answers.for_each(|(at, answer)| stored[*at] = answer);
            },
        );
        stored
    }

    pub(crate) fn commit_claimed(&self, blocks: &[(Token, Checksum)], pinned: bool) -> Vec<bool> {
        let mut stored = vec![false; blocks.len()];
        self.share_out(
            blocks,
            |(token, _)| *token,
            |arena, mine, share| {
                let answers = mine.iter().zip(arena.commit_claimed(share, pinned));
                answers.for_each(|(at, answer)| stored[*at] = answer);
            },
        );
        stored
    }

    /// As [`Arena::abort`].
    pub(crate) fn abort(&self, tokens: &[Token]) -> Vec<bool> {
        let mut ended = vec![false; tokens.len()];
        self.share_out(
            tokens,
            |token| *token,
            |arena, mine, share| {
                let answers = mine.iter().zip(arena.abort(share));
                answers.for_each(|(at, answer)| ended[*at] = answer);
            },
        );
        ended
    }

    pub(crate) fn discard(&self, tokens: &[Token]) -> usize {
        let mut count = 0;
        self.share_out(
            tokens,
            |token| *token,
            |arena, _, share| {
                count += arena.discard(share);
            },
        );
        count
    }

    pub(crate) fn remove(&self, namespace: NamespaceId, keys: &[Key]) -> usize {
        // No block leaves a device for another where it is alone, and each call waits for burials.
        let turn = match self.devices.load().only() {
            Some(_) => keys.len().max(1),
            None => look_len(),
        };
        let some = keys.chunks(turn);
        some.map(|keys| self.everywhere(|arena| arena.remove(namespace, keys)))
            .sum()
    }

    pub(crate) fn clear(&self, namespace: NamespaceId) -> usize {
        self.everywhere(|arena| arena.clear(namespace))
    }

    /// Removes from every device, and then once more: a block on its way from one to another finds
    /// its source removed, or has arrived where the next step looks.
    fn everywhere(&self, remove: impl Fn(&Arena) -> usize) -> usize {
        let mut count = 0;
        self.settled(|devices| {
            count += devices.0.iter().map(|arena| remove(arena)).sum::<usize>();
            if devices.only().is_none() {
                count += devices.0.iter().map(|arena| remove(arena)).sum::<usize>();
            }
        });
        count
    }

    pub(crate) fn describe(&self, namespace: NamespaceId, description: &str) {
        let mut wishes = self.wishes.lock();
        if wishes.described.len() < directory::ENTRIES as usize {
            // As much as an entry of the directory holds, and more.
            let text = || description.chars().take(directory::LEN).collect();
            wishes.described.entry(namespace).or_insert_with(text);
        }
        // Whoever adds a device now sees the wish.
        let devices = self.devices.load_full();
        drop(wishes);
        for arena in &devices.0 {
            arena.describe(namespace, description);
        }
    }

    /// Evicts ahead of need what one burial takes, where there was need before: of several devices
    /// on the one that has the oldest block, wherever the need was. False when there is nothing to
    /// do.
    pub(crate) fn evict_ahead(&self) -> bool {
        let devices = self.devices.load_full();
        if let Some(only) = devices.only() {
            return only.evict_ahead();
        }
        // Each is asked.
        let needs = devices.0.iter().filter_map(|arena| arena.hear_need());
        let Some(need) = needs.max() else {
            return false;
        };
        let oldest = |arena: &&Arc<Arena>| arena.room().and_then(|room| room.oldest);
        let aged = devices
            .0
            .iter()
            .filter_map(|arena| Some((oldest(&arena)?, arena)));
        let first = aged.min_by_key(|(stamp, _)| *stamp);
        let evicted = first.is_some_and(|(_, arena)| arena.evict_ahead_for_all(need));
        self.tell_fallen();
        evicted
    }

    /// Whether eviction shall run ahead somewhere now.
    pub(crate) fn is_low(&self) -> bool {
        self.devices.load().0.iter().any(|arena| arena.is_low())
    }

    /// Whether somebody holds what a verb of the index waits for.
    pub(crate) fn is_busy(&self) -> bool {
        self.devices.load().0.iter().any(|arena| arena.is_busy())
    }

    pub(crate) fn close(&self) {
        self.devices.load().0.iter().for_each(|arena| {
            arena.close();
            arena.let_go();
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_reads_counters_waits_for_no_call_that_places_blocks() {
        let arena = Arc::new(Arena::volatile("Cache", 0, 64 << 10).unwrap());
        let tier = Arc::new(Arenas::new("Cache", vec![arena]));
        let placing = tier.placing.write();
        let (tell, told) = mpsc::channel();
        let reads = {
            let tier = Arc::clone(&tier);
            move || {
                let (stats, departed) = (tier.stats(), tier.departed(1, 1));
                tier.forget_listener(1);
                tier.describe(NamespaceId([1; 16]), "of a test");
                tell.send(stats.blocks + departed.blocks.len() as u64)
            }
        };
        std::thread::spawn(reads);
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(0));
        drop(placing);
    }
}
