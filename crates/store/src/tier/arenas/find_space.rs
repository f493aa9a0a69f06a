//! Which device has space for the blocks of a call, as it is or by eviction.
//!
//! The blocks of a call stay together, and those that no device has are found space in runs: a call
//! looks at each block once, however many find none.

use std::sync::Arc;

use kvdepot_alloc::Hint;
use kvdepot_arena::held::worked;
use kvdepot_arena::{Arena, Cause, Full, NamespaceId, Refused, Room, Space, Wanted};

/// Where the block before others is: its device, and where it ends there, if that is known.
pub(super) type Behind = Option<(u32, Option<u64>)>;

/// Finds space for the blocks that are not known. `some` finds it for the first of a run of them,
/// as many as one device takes in one go; where it answers `None`, this does.
pub(super) fn each_run(
    devices: &[Arc<Arena>],
    blocks: &[Wanted],
    known: &[Option<Refused>],
    mut some: impl FnMut(&[Wanted], Behind) -> Option<Vec<Result<Space, Refused>>>,
) -> Option<Vec<Option<Result<Space, Refused>>>> {
    let mut each: Vec<Option<Result<Space, Refused>>> = Vec::with_capacity(blocks.len());
    let mut behind: Behind = None;
    let mut last_refused = LastRefused::default();
    let mut end = 0;
    while each.len() < blocks.len() {
        let begin = each.len();
        if known[begin].is_some() {
            each.push(None);
            continue;
        }
        if let Some(refused) = last_refused.refuses(devices, &blocks[begin]) {
            each.push(Some(Err(refused)));
            continue;
        }
        if let Some(Some(Refused::Present(token))) = begin.checked_sub(1).map(|at| known[at]) {
            let arena = devices.iter().find(|one| one.number() == token.device);
            behind = arena.map(|arena| (token.device, arena.end_of(token)));
        }
        if begin >= end {
            end = begin + known[begin..].iter().take_while(|one| is_none(one)).count();
        }
        let found = some(&blocks[begin..end], behind)?;
        match found.last() {
            Some(Ok(space)) => behind = Some((space.device(), space.last())),
            Some(Err(refused)) => last_refused.note(&blocks[begin], *refused),
            None => {}
        }
        each.extend(found.into_iter().map(|space| match space {
            // It has come since, and may have gone when it is looked for again.
            Err(Refused::Present(_) | Refused::Reserved(_)) => None,
            space => Some(space),
        }));
    }
    Some(each)
}

/// Whether a block is not known: a visit.
fn is_none(known: &Option<Refused>) -> bool {
    worked();
    known.is_none()
}

/// Finds space for the blocks that are not known, as it is; `None` where others must go first.
pub(super) fn find_free(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
    known: &[Option<Refused>],
) -> Option<Vec<Option<Result<Space, Refused>>>> {
    each_run(devices, blocks, known, |run, behind| {
        free_some(devices, namespace, run, behind)
    })
}

/// Finds space for the first of these blocks, as many as one device takes in one go.
fn free_some(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    run: &[Wanted],
    behind: Behind,
) -> Option<Vec<Result<Space, Refused>>> {
    let (mut refused, mut lacks) = (None, false);
    for (arena, room) in candidates(devices, &run[0], behind.map(|(device, _)| device)) {
        let share = &run[..share(&room, run)];
        let Some(mut found) = arena.find_spaces(namespace, share, end_on(arena, behind), true)
        else {
            lacks = true;
            continue;
        };
        // What does not fit here may fit elsewhere, and what is behind it goes there too.
        let is_full = |space: &_| matches!(space, Err(Refused::Full(_)));
        match found.iter().position(is_full) {
            Some(0) => {
                refused.get_or_insert_with(|| found.swap_remove(0));
            }
            full => {
                found.truncate(full.unwrap_or(found.len()));
                return Some(found);
            }
        }
    }
    (!lacks).then(|| vec![refused.unwrap_or_else(|| Err(nowhere(devices, run[0].len)))])
}

fn end_on(arena: &Arena, behind: Behind) -> Option<u64> {
    let here = behind.filter(|(device, _)| *device == arena.number());
    here.and_then(|(_, end)| end)
}

/// Makes room for the first of these blocks, as many as one device takes in one go; `behind` says
/// on which device those before them are, and where it ends.
pub(super) fn make_some(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    run: &[Wanted],
    behind: Behind,
) -> Vec<Result<Space, Refused>> {
    let mut refused = None;
    for (arena, room) in candidates(devices, &run[0], behind.map(|(device, _)| device)) {
        let share = &run[..share(&room, run)];
        let mut hint = Hint {
            behind: end_on(arena, behind),
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

/// A block of a call for which no device had space. Those after it that need as much are refused
/// like it, so that a call of which many find none looks for space once.
#[derive(Default)]
struct LastRefused(Option<(Wanted, Full)>);

impl LastRefused {
    fn note(&mut self, wanted: &Wanted, refused: Refused) {
        if let Refused::Full(full) = refused {
            self.0 = Some((*wanted, full));
        }
    }

    fn refuses(&self, devices: &[Arc<Arena>], wanted: &Wanted) -> Option<Refused> {
        let (refused, full) = self.0.as_ref()?;
        let first = devices.first()?;
        let again = wanted.needs_as_much_as(refused);
        again.then(|| first.refuse_like(*full, wanted.len))
    }
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
pub(super) fn nowhere(devices: &[Arc<Arena>], requested: u64) -> Refused {
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
