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
use std::sync::Arc;

use kvdepot_arena::held::turn_len;
use kvdepot_arena::{Arena, Key, NamespaceId, Refused, Reserved, Space, Token, Wanted};

use super::Arenas;
use super::find_space::{each_run, find_free, make_some, nowhere};

/// Room that was made for the blocks of a call. Until it is used or dropped nobody else gets it,
/// and those of the call's blocks that were there stay: a prompt's head does not make room for its
/// tail.
#[must_use = "dropped, it is given back"]
pub(crate) struct Spaces {
    /// By the call's blocks; `None` for those that were there, or are being written.
    each: Vec<Option<Result<Space, Refused>>>,
    /// What those were answered when they were looked for.
    seen: Vec<Option<Refused>>,
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
        if spaces.is_none() {
            self.note_sizes(blocks);
        }
        let once = !alone || spaces.is_some() || blocks.len() > turn_len();
        let once = once.then(|| Once::of(blocks));
        let once = once.flatten();
        let wanted = once.as_ref().map_or(blocks, |once| &once.blocks);
        let answers = match alone {
            false => self.reserve_among(None, namespace, wanted, spaces),
            true => {
                // Calls for one device do not wait for one another here.
                let placing = self.placing.share();
                let devices = self.devices.load();
                let Some(only) = devices.only() else {
                    // A second one has come meanwhile.
                    drop(placing);
                    return self.reserve(namespace, blocks, spaces);
                };
                match spaces {
                    None => only.reserve(namespace, wanted),
                    Some(mut spaces) => spaces.complete(&devices.0, namespace, wanted).then(|| {
                        let Spaces { each, seen, .. } = &mut spaces;
                        settle(&devices.0, namespace, wanted, (each, seen))
                    }),
                }
            }
        };
        match once {
            Some(once) => answers.map(|answers| once.answers(answers)),
            None => answers,
        }
    }

    /// Notes the sizes of the prompts that these blocks are of, if this is the last tier.
    fn note_sizes(&self, blocks: &[Wanted]) {
        if let Some(last) = self
            .devices
            .load()
            .0
            .first()
            .filter(|arena| arena.is_last())
        {
            let blocks_in = |part, wanted: &Wanted| last.blocks_in(part, wanted);
            self.prompts.note(blocks, blocks_in);
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
        let some = |run: &[Wanted], behind| Some(make_some(&devices.0, namespace, run, behind));
        let each = each_run(&devices.0, blocks, &known, some).unwrap_or_default();
        self.tell_fallen();
        Spaces {
            each,
            seen: known,
            _pinned: pinned,
        }
    }

    /// Reserves room on the other devices for blocks of a device; nothing is evicted for them.
    pub(crate) fn reserve_beside(
        &self,
        device: u32,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Result<Reserved, Refused>> {
        let reserved = self.reserve_among(Some(device), namespace, blocks, None);
        reserved.unwrap_or_default()
    }

    /// As [`Arenas::reserve`], among all devices but one. Others place blocks in between: each
    /// block is looked for again, on all devices, in the turn in which it is reserved.
    fn reserve_among(
        &self,
        without: Option<u32>,
        namespace: NamespaceId,
        blocks: &[Wanted],
        spaces: Option<Spaces>,
    ) -> Option<Vec<Result<Reserved, Refused>>> {
        let devices = || {
            let mut devices = self.devices.load().0.clone();
            devices.retain(|arena| Some(arena.number()) != without);
            devices
        };
        let mut spaces = match spaces {
            None => Spaces::free(&devices(), namespace, blocks)?,
            Some(mut spaces) => {
                let is_whole = spaces.complete(&devices(), namespace, blocks);
                is_whole.then_some(spaces)?
            }
        };
        let mut turns = Vec::with_capacity(blocks.len().div_ceil(turn_len()));
        // The last ones first: sequences fall along the prompt.
        let seen = spaces.seen.chunks(turn_len());
        let each = spaces.each.chunks_mut(turn_len()).zip(seen);
        let each = blocks.chunks(turn_len()).zip(each);
        for (blocks, spaces) in each.rev() {
            let _placing = self.placing.write();
            turns.push(settle(&devices(), namespace, blocks, spaces));
        }
        Some(turns.into_iter().rev().flatten().collect())
    }
}

impl Spaces {
    /// Free space for those of the blocks that no device has; `None` where others must go first.
    fn free(devices: &[Arc<Arena>], namespace: NamespaceId, blocks: &[Wanted]) -> Option<Spaces> {
        let (known, _pinned) = look_up(devices, namespace, blocks);
        let each = find_free(devices, namespace, blocks, &known)?;
        Some(Spaces {
            each,
            seen: known,
            _pinned,
        })
    }

    /// Finds free space for those of the blocks that were there when space was made for the
    /// others, and are gone by now, or whose device is. False where others must go first: nobody
    /// has seen a reservation that ends with this, and waits for it.
    fn complete(
        &mut self,
        devices: &[Arc<Arena>],
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> bool {
        let (known, _pinned) = look_up(devices, namespace, blocks);
        complete(devices, namespace, (blocks, &known), &mut self.each)
    }
}

/// As [`Spaces::complete`], for blocks that have been looked for.
fn complete(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    (blocks, known): (&[Wanted], &[Option<Refused>]),
    spaces: &mut [Option<Result<Space, Refused>>],
) -> bool {
    let is_made = |space: &Option<Result<Space, Refused>>| match space {
        Some(Ok(space)) => devices.iter().any(|arena| arena.number() == space.device()),
        other => other.is_some(),
    };
    let bare = |at: &usize| known[*at].is_none() && !is_made(&spaces[*at]);
    let bare: Vec<usize> = (0..blocks.len()).filter(bare).collect();
    if bare.is_empty() {
        return true;
    }
    let wanted: Vec<Wanted> = bare.iter().map(|at| blocks[*at]).collect();
    let unknown = vec![None; wanted.len()];
    let Some(found) = find_free(devices, namespace, &wanted, &unknown) else {
        return false;
    };
    let each = bare.into_iter().zip(found);
    each.for_each(|(at, space)| spaces[at] = space);
    true
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

/// The space that was found for a block; `None` for one that was there, or is being written.
type Found = Option<Result<Space, Refused>>;

/// Reserves blocks in the space that was found for them. A block that is gone since then, without
/// space, finds what is free, or none.
fn settle(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
    (spaces, seen): (&mut [Found], &[Option<Refused>]),
) -> Vec<Result<Reserved, Refused>> {
    let (known, _pinned) = look_up(devices, namespace, blocks);
    let _as_far_as_free = complete(devices, namespace, (blocks, &known), spaces);
    let mut answers: Vec<Option<Result<Reserved, Refused>>> =
        known.into_iter().map(|known| known.map(Err)).collect();
    for arena in devices {
        let (mut here, mut chosen) = (Vec::new(), Vec::new());
        for (index, space) in spaces.iter_mut().enumerate() {
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
    let rest = answers.into_iter().zip(spaces).zip(seen.iter().zip(blocks));
    let answer = rest.map(
        |((answer, space), (seen, wanted))| match (answer, space, seen) {
            (Some(answer), ..) => answer,
            (None, Some(Err(refused)), _) => Err(*refused),
            // It has just ended: whoever wants to join it looks again.
            (None, None, Some(Refused::Present(token) | Refused::Reserved(token))) => {
                Err(Refused::Reserved(*token))
            }
            _ => Err(nowhere(devices, wanted.len)),
        },
    );
    answer.collect()
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

    #[test]
    fn a_block_whose_writer_gives_up_while_its_call_is_placed_is_not_refused() {
        let arena = |number| Arc::new(Arena::volatile("Cache", number, 64 << 10).unwrap());
        let tier = Arenas::new("Cache", (0..2).map(arena).collect());
        let first = reserve(&tier, 0);
        for key in 1..=31 {
            let sum = Checksum([0; 16]);
            assert_eq!(tier.commit(vec![(reserve(&tier, key), sum)], false), [true]);
        }
        assert_eq!(tier.stats().free_bytes, 0);
        let both = [wanted(0), wanted(100)].concat();
        let mut spaces = tier.make_room(NAMESPACE, &both);
        drop(first);
        // Others take what is free.
        let mut others = Vec::new();
        for device in tier.arenas() {
            for key in 101.. {
                match device.find_spaces(NAMESPACE, &wanted(key), None, false) {
                    Some(found) => others.push(found),
                    None => break,
                }
            }
        }
        let devices = tier.devices.load_full();
        let Spaces { each, seen, .. } = &mut spaces;
        let answers = settle(&devices.0, NAMESPACE, &both, (each, seen));
        assert!(
            !matches!(answers[0], Err(Refused::Full(_))),
            "{:?}, while {} blocks may go",
            answers[0].as_ref().err(),
            tier.stats().blocks
        );
        drop(others);
    }
}
