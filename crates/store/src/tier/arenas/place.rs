//! Where new blocks go, where a tier has several devices.
//!
//! A key that one of them has, or that is being written to one, gets no second place. The blocks of
//! a call stay together: behind the rest of their prompt where its device has room, else on the
//! device with the most room. A full tier evicts where the least recently used block of all devices
//! is, as much in one go as an arena alone would.
//!
//! A call asks twice at most: once for what fits as it is, under its own locks; and, where others
//! must go first, again with the [`Spaces`] that were made for its blocks meanwhile, off all locks.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use kvdepot_alloc::Hint;
use kvdepot_arena::held::TURN;
use kvdepot_arena::{
    Arena, Cause, Full, Key, NamespaceId, Refused, Reserved, Room, Space, Token, Wanted,
};

use super::Arenas;

/// Room that was made for the blocks of a call. Until it is used or dropped nobody else gets it,
/// and those of the call's blocks that were there stay: a prompt's head does not make room for its
/// tail.
#[must_use = "dropped, it is given back"]
pub(crate) struct Spaces {
    /// By the call's blocks; `None` for those that were there, or are being written.
    each: Vec<Option<Result<Space, Refused>>>,
    _pinned: Pinned,
}

/// The blocks of a call that names some of its keys more than once, each key once.
struct Once {
    blocks: Vec<Wanted>,
    /// For each block of the call, which of those it is, and whether it is the first of them.
    each: Vec<(usize, bool)>,
}

impl Once {
    /// `None` where no key is named twice.
    fn of(blocks: &[Wanted]) -> Option<Once> {
        let mut firsts: HashMap<&Key, usize> = HashMap::with_capacity(blocks.len());
        let mut once = Vec::new();
        let mut each = Vec::with_capacity(blocks.len());
        for wanted in blocks {
            let known = firsts.get(&wanted.key).copied();
            let at = known.unwrap_or(firsts.len());
            each.push((at, known.is_none()));
            firsts.insert(&wanted.key, at);
        }
        if firsts.len() == blocks.len() {
            return None;
        }
        let new = each.iter().zip(blocks).filter(|((_, first), _)| *first);
        once.extend(new.map(|(_, wanted)| *wanted));
        Some(Once { blocks: once, each })
    }

    /// The answers for the call: who comes second finds the reservation of the first.
    fn answers(&self, answers: Vec<Result<Reserved, Refused>>) -> Vec<Result<Reserved, Refused>> {
        let again = answers.iter().map(|answer| match answer {
            Ok(reserved) => Refused::Reserved(reserved.token),
            Err(refused) => *refused,
        });
        let again: Vec<Refused> = again.collect();
        let mut first = answers.into_iter();
        let each = self.each.iter();
        let of = |(at, is_first): &(usize, bool)| match is_first {
            true => first.next().unwrap_or(Err(again[*at])),
            false => Err(again[*at]),
        };
        each.map(of).collect()
    }
}

/// Blocks that were there, by their device.
struct Pinned(Vec<(Arc<Arena>, Vec<Token>)>);

impl Drop for Pinned {
    fn drop(&mut self) {
        for (arena, tokens) in self.0.drain(..) {
            arena.unpin(tokens.into_iter());
        }
    }
}

impl Arenas {
    /// Reserves room for blocks, given in prefix order, at once. `None`, and nothing is reserved,
    /// where others must go first: then the caller lets go of its locks, has
    /// [room made](Arenas::make_room), and asks again with that. It is answered then, unless a
    /// block that was there when room was made for the others is gone by now.
    pub(crate) fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
        spaces: Option<Spaces>,
    ) -> Option<Vec<Result<Reserved, Refused>>> {
        let alone = self.devices.load().only().is_some();
        let once = !alone || spaces.is_some() || blocks.len() > TURN;
        let once = once.then(|| Once::of(blocks));
        let once = once.flatten();
        let wanted = once.as_ref().map_or(blocks, |once| &once.blocks);
        // Calls for one device do not wait for one another here.
        let (shared, sole) = match alone {
            true => (Some(self.placing.share()), None),
            false => (None, Some(self.placing.write())),
        };
        let devices = self.devices.load();
        let answers = match (spaces, devices.only()) {
            (spaces, None) if alone => {
                // A second one has come meanwhile.
                drop((shared, sole));
                return self.reserve(namespace, blocks, spaces);
            }
            (Some(spaces), _) => settle(&devices.0, namespace, wanted, spaces),
            (None, Some(only)) => only.reserve(namespace, wanted),
            (None, None) => spread(&devices.0, namespace, wanted),
        };
        match once {
            Some(once) => answers.map(|answers| once.answers(answers)),
            None => answers,
        }
    }

    /// As [`Arenas::reserve`], for callers without locks: waits for the room that is made.
    pub(crate) fn reserve_waiting(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Result<Reserved, Refused>> {
        let mut spaces = None;
        loop {
            if let Some(answers) = self.reserve(namespace, blocks, spaces.take()) {
                return answers;
            }
            spaces = Some(self.make_room(namespace, blocks));
        }
    }

    /// Makes room for those of the blocks that are neither there nor being written. Waits for the
    /// media.
    pub(crate) fn make_room(&self, namespace: NamespaceId, blocks: &[Wanted]) -> Spaces {
        kvdepot_arena::held::may_wait();
        // As the reservation counts them.
        let once = Once::of(blocks);
        let blocks = once.as_ref().map_or(blocks, |once| &once.blocks);
        let devices = self.devices.load_full();
        let (known, pinned) = look_up(&devices.0, namespace, blocks);
        let mut each: Vec<Option<Result<Space, Refused>>> = Vec::with_capacity(blocks.len());
        each.resize_with(blocks.len(), || None);
        let is_absent = |at: &usize| known[*at].is_none();
        let mut behind: Option<(u32, Option<u64>)> = None;
        let mut begin = 0;
        while begin < blocks.len() {
            if let Some(known) = &known[begin] {
                if let Refused::Present(token) = known {
                    behind = Some((token.device, None));
                }
                begin += 1;
                continue;
            }
            let end = begin + (begin..blocks.len()).take_while(is_absent).count();
            let run = &blocks[begin..end];
            let made = make_some(&devices.0, namespace, run, behind);
            if let Some(Ok(space)) = made.last() {
                behind = Some((space.device(), space.last()));
            }
            let count = made.len();
            each[begin..begin + count]
                .iter_mut()
                .zip(made)
                .for_each(|(each, made)| *each = Some(made));
            begin += count;
        }
        self.tell_fallen();
        let _pinned = pinned;
        Spaces { each, _pinned }
    }

    /// Reserves room on the other devices for blocks of a device; nothing is evicted for them.
    pub(crate) fn reserve_beside(
        &self,
        device: u32,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Result<Reserved, Refused>> {
        let _placing = self.placing.write();
        let mut others = self.devices.load().0.clone();
        others.retain(|arena| arena.number() != device);
        spread(&others, namespace, blocks).unwrap_or_default()
    }
}

/// What those of the blocks are answered that a device has or that are being written to one. The
/// former stay there meanwhile.
fn look_up(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
) -> (Vec<Option<Refused>>, Pinned) {
    let mut known = vec![None; blocks.len()];
    let mut pinned = Pinned(Vec::with_capacity(devices.len()));
    for arena in devices {
        let mut here = Vec::new();
        arena.known(namespace, blocks, &mut known, &mut here);
        pinned.0.push((Arc::clone(arena), here));
    }
    (known, pinned)
}

/// Reserves what finds room as it is; `None`, and nothing, where others must go first.
fn spread(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
) -> Option<Vec<Result<Reserved, Refused>>> {
    let (known, _pinned) = look_up(devices, namespace, blocks);
    let mut answers: Vec<Option<Result<Reserved, Refused>>> =
        known.into_iter().map(|known| known.map(Err)).collect();
    let mut begin = 0;
    while begin < blocks.len() {
        if answers[begin].is_some() {
            begin += 1;
            continue;
        }
        let rest = &answers[begin..];
        let end = begin + rest.iter().take_while(|answer| answer.is_none()).count();
        // Whose last block these continue.
        let behind = match begin
            .checked_sub(1)
            .and_then(|before| answers[before].as_ref())
        {
            Some(Ok(reserved)) => Some(reserved.token.device),
            Some(Err(Refused::Present(token))) => Some(token.device),
            _ => None,
        };
        let places = place(devices, namespace, blocks, begin..end, behind)?;
        let count = places.len();
        let placed = answers[begin..begin + count].iter_mut().zip(places);
        placed.for_each(|(answer, place)| *answer = Some(place));
        begin += count;
    }
    Some(answers.into_iter().flatten().collect())
}

/// Reserves room for the first of these blocks, as many as one device takes in one go.
fn place(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
    wanted: Range<usize>,
    behind: Option<u32>,
) -> Option<Vec<Result<Reserved, Refused>>> {
    let run = &blocks[wanted.clone()];
    let mut refused = None;
    let mut lacks = false;
    for (arena, room) in candidates(devices, &run[0], behind) {
        let count = share(&room, run);
        // With the block before them, if it is here, so that they lie behind it.
        let lead = usize::from(wanted.start > 0 && behind == Some(arena.number()));
        let share = &blocks[wanted.start - lead..wanted.start + count];
        let Some(mut places) = arena.reserve(namespace, share) else {
            lacks = true;
            continue;
        };
        places.drain(..lead);
        if !matches!(places.first(), Some(Err(Refused::Full(_)))) {
            // What did not fit here may fit elsewhere, and what is behind it goes there too.
            let is_full =
                |place: &Result<Reserved, Refused>| matches!(place, Err(Refused::Full(_)));
            places.truncate(places.iter().position(is_full).unwrap_or(places.len()));
            return Some(places);
        }
        refused.get_or_insert_with(|| places.swap_remove(0));
    }
    (!lacks).then(|| vec![refused.unwrap_or_else(|| Err(nowhere(devices, run[0].len)))])
}

/// Makes room for the first of these blocks, as many as one device takes in one go; `behind` says
/// on which device those before them are, and where it ends.
fn make_some(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    run: &[Wanted],
    behind: Option<(u32, Option<u64>)>,
) -> Vec<Result<Space, Refused>> {
    let mut refused = None;
    for (arena, room) in candidates(devices, &run[0], behind.map(|(device, _)| device)) {
        let share = &run[..share(&room, run)];
        let mut hint = Hint {
            behind: behind
                .filter(|(device, _)| *device == arena.number())
                .and_then(|(_, last)| last),
            followed_by: share.iter().map(Wanted::room).fold(0, u64::saturating_add),
        };
        let mut made = Vec::with_capacity(share.len());
        for wanted in share {
            hint.followed_by = hint.followed_by.saturating_sub(wanted.room());
            match arena.make_space(namespace, wanted, hint) {
                Ok(space) => {
                    hint.behind = space.last();
                    made.push(Ok(space));
                }
                Err(full) => {
                    refused.get_or_insert(full);
                    break;
                }
            }
        }
        if !made.is_empty() {
            return made;
        }
    }
    vec![Err(refused.unwrap_or_else(|| nowhere(devices, run[0].len)))]
}

/// Reserves blocks in the room that was made for them; `None`, and nothing, where others must go
/// for one that was there when it was made.
fn settle(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
    mut spaces: Spaces,
) -> Option<Vec<Result<Reserved, Refused>>> {
    let (known, _pinned) = look_up(devices, namespace, blocks);
    let mut answers: Vec<Option<Result<Reserved, Refused>>> =
        known.into_iter().map(|known| known.map(Err)).collect();
    let is_made = |space: &Option<Result<Space, Refused>>| match space {
        Some(Ok(space)) => devices.iter().any(|arena| arena.number() == space.device()),
        other => other.is_some(),
    };
    // Those that were there when room was made, and are gone by now, or whose device is. Before the
    // others: where these need more, nobody has seen a reservation that ends with this, and waits
    // for it.
    let bare = |at: &usize| answers[*at].is_none() && !is_made(&spaces.each[*at]);
    let bare: Vec<usize> = (0..blocks.len()).filter(bare).collect();
    if !bare.is_empty() {
        let wanted: Vec<Wanted> = bare.iter().map(|at| blocks[*at]).collect();
        let found = match devices {
            [only] => only.reserve(namespace, &wanted),
            several => spread(several, namespace, &wanted),
        };
        let each = bare.iter().zip(found?);
        each.for_each(|(at, answer)| answers[*at] = Some(answer));
    }
    for arena in devices {
        let (mut here, mut chosen) = (Vec::new(), Vec::new());
        for (index, space) in spaces.each.iter_mut().enumerate() {
            let is_here = |made: &mut Result<Space, Refused>| {
                made.as_ref()
                    .is_ok_and(|space| space.device() == arena.number())
            };
            if answers[index].is_none()
                && let Some(Ok(space)) = space.take_if(is_here)
            {
                here.push(index);
                chosen.push((blocks[index], space));
            }
        }
        if !here.is_empty() {
            let reserved = arena.reserve_in(namespace, chosen);
            let each = here.into_iter().zip(reserved);
            each.for_each(|(index, answer)| answers[index] = Some(answer));
        }
    }
    let rest = answers.into_iter().zip(spaces.each.drain(..)).zip(blocks);
    let answer = |((answer, space), wanted): ((Option<_>, Option<_>), &Wanted)| {
        let refused = || match space {
            Some(Err(full)) => Err(full),
            _ => Err(nowhere(devices, wanted.len)),
        };
        answer.unwrap_or_else(refused)
    };
    Some(rest.map(answer).collect())
}

/// The devices that can be written, in the order in which they are asked: with room before full
/// ones, and then behind the rest of the prompt, or where most is free; of full ones that with the
/// oldest block.
fn candidates<'a>(
    devices: &'a [Arc<Arena>],
    first: &Wanted,
    behind: Option<u32>,
) -> Vec<(&'a Arc<Arena>, Room)> {
    let open = devices
        .iter()
        .filter_map(|arena| Some((arena, arena.room()?)));
    let mut open: Vec<(&Arc<Arena>, Room)> = open.collect();
    for (_, room) in &mut open {
        room.fits = room.vacant > 0 && room.free >= first.room();
    }
    open.sort_by_key(|(arena, room)| {
        let elsewhere = behind != Some(arena.number());
        let order = match room.fits {
            true => (elsewhere, u64::MAX - room.free),
            false => (false, room.oldest.unwrap_or(u64::MAX)),
        };
        (!room.fits, order)
    });
    open
}

/// How many of these blocks a device takes in one go.
fn share(room: &Room, run: &[Wanted]) -> usize {
    let (mut left, records) = match room.fits {
        true => (room.free, room.vacant as usize),
        false => (room.ahead.max(run[0].room()), usize::MAX),
    };
    let takes = |block: &&Wanted| {
        let here = block.room() <= left;
        left = left.saturating_sub(block.room());
        here
    };
    run.iter().take(records).take_while(takes).count().max(1)
}

/// Why a block finds no room on any device.
fn nowhere(devices: &[Arc<Arena>], requested: u64) -> Refused {
    let causes = devices.iter().filter_map(|arena| arena.closed_to_writes());
    let mut causes: Vec<Cause> = causes.collect();
    // Those end by themselves.
    let orphans = causes
        .iter()
        .position(|cause| matches!(cause, Cause::Orphans { .. }));
    let at = orphans.unwrap_or(0);
    Refused::Full(Full {
        tier: devices.first().map_or("", |arena| arena.name()),
        requested,
        cause: match causes.is_empty() {
            true => Cause::Leaving,
            false => causes.swap_remove(at),
        },
    })
}

#[cfg(test)]
mod tests {
    use kvdepot_media::checksum::Checksum;

    use super::*;

    const NAMESPACE: NamespaceId = NamespaceId([1; 16]);

    fn wanted(key: u8) -> [Wanted; 1] {
        [Wanted {
            key: Key([key; 32]),
            len: 4096,
            parts: 1,
            stamp: u64::from(key),
            copy: false,
            evict: true,
        }]
    }

    fn reserve(tier: &Arenas, key: u8) -> Reserved {
        let mut answers = tier.reserve_waiting(NAMESPACE, &wanted(key));
        answers.pop().unwrap().ok().unwrap()
    }

    #[test]
    fn a_block_that_was_being_written_when_room_was_made_finds_room_like_any_other() {
        for devices in 1..=2 {
            let arena = |number| Arc::new(Arena::volatile("Cache", number, 64 << 10).unwrap());
            let tier = Arenas::new("Cache", (0..devices).map(arena).collect());
            let first = reserve(&tier, 0);
            // Whoever wants it too waits for that one.
            let spaces = tier.make_room(NAMESPACE, &wanted(0));
            drop(first);
            for key in 1..=16 * devices as u8 {
                assert_eq!(tier.stats().evicted_blocks, 0);
                let sum = Checksum([0; 16]);
                assert_eq!(tier.commit(vec![(reserve(&tier, key), sum)], false), [true]);
            }
            assert_eq!(tier.stats().free_bytes, 0);
            let answers = tier.reserve(NAMESPACE, &wanted(0), Some(spaces));
            assert!(answers.is_none(), "others must go first");
            drop(reserve(&tier, 0));
            assert_eq!(tier.stats().reserved_blocks, 0);
        }
    }
    #[test]
    fn where_others_must_go_first_nobody_has_seen_a_reservation_that_ends_with_it() {
        let arena = Arc::new(Arena::volatile("Cache", 0, 64 << 10).unwrap());
        let tier = Arenas::new("Cache", vec![arena]);
        let store = |key| {
            let reserved = reserve(&tier, key);
            let sequence = reserved.token.sequence;
            let stored = tier.commit(vec![(reserved, Checksum([0; 16]))], false);
            assert_eq!(stored, [true]);
            sequence
        };
        for key in 0..16 {
            store(key);
        }
        let both = [wanted(0), wanted(16)].concat();
        let spaces = tier.make_room(NAMESPACE, &both);
        // Nothing is free but what was made for one of them, and the other goes.
        let mut last = 0;
        for key in 17.. {
            if tier.stats().free_bytes == 0 {
                break;
            }
            last = store(key);
        }
        assert_eq!(tier.remove(NAMESPACE, &[Key([0; 32])]), 1);
        assert!(tier.reserve(NAMESPACE, &both, Some(spaces)).is_none());
        assert_eq!(store(100), last + 1, "one was reserved in between");
        assert_eq!(tier.stats().reserved_blocks, 0);
    }
}
