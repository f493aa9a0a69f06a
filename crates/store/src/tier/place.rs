//! Where new blocks go, where a tier has several devices.
//!
//! A key that one of them has, or that is being written to one, gets no second place. The blocks of
//! a call stay together: behind the rest of their prompt where its device has room, else on the
//! device with the most room. A full tier evicts where the least recently used block of all devices
//! is, as much in one go as an arena alone would.

use std::sync::Arc;

use super::{DAX, Tier};
use crate::NamespaceId;
use crate::arena::{Arena, Cause, Full, Refused, Reserved, Room, Token, Wanted};

impl Tier {
    /// Reserves room for blocks, given in prefix order. See [`Arena::reserve`].
    pub(crate) fn reserve(
        &self,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Result<Reserved, Refused>> {
        let _placing = self.placing.lock();
        let devices = self.devices.load();
        match devices.only() {
            Some(only) => only.reserve(namespace, blocks),
            None => spread(&devices.0, namespace, blocks),
        }
    }

    /// Reserves room on the other devices for blocks of a device.
    pub(crate) fn reserve_beside(
        &self,
        device: u32,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Result<Reserved, Refused>> {
        let _placing = self.placing.lock();
        let mut others = self.devices.load().0.clone();
        others.retain(|arena| arena.number() != device);
        spread(&others, namespace, blocks)
    }
}

fn spread(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
) -> Vec<Result<Reserved, Refused>> {
    let mut known = vec![None; blocks.len()];
    let mut pinned: Vec<Vec<Token>> = vec![Vec::new(); devices.len()];
    for (arena, pinned) in devices.iter().zip(&mut pinned) {
        arena.known(namespace, blocks, &mut known, pinned);
    }
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
        let (count, places) = place(devices, namespace, blocks, begin..end, behind);
        let placed = answers[begin..begin + count].iter_mut().zip(places);
        placed.for_each(|(answer, place)| *answer = Some(place));
        begin += count;
    }
    for (arena, pinned) in devices.iter().zip(pinned) {
        arena.unpin(pinned.into_iter());
    }
    answers.into_iter().flatten().collect()
}

/// Reserves room for the first of these blocks, as many as one device takes in one go; how many.
fn place(
    devices: &[Arc<Arena>],
    namespace: NamespaceId,
    blocks: &[Wanted],
    wanted: std::ops::Range<usize>,
    behind: Option<u32>,
) -> (usize, Vec<Result<Reserved, Refused>>) {
    let mut open: Vec<(&Arc<Arena>, Room)> = Vec::with_capacity(devices.len());
    open.extend(
        devices
            .iter()
            .filter_map(|arena| Some((arena, arena.room()?))),
    );
    let first = &blocks[wanted.start];
    let fits = |room: &Room| room.vacant > 0 && room.free >= first.room();
    // With room before full ones, and then behind the rest of the prompt, or where most is free;
    // of full ones that with the oldest block.
    open.sort_by_key(|(arena, room)| {
        let has_room = fits(room);
        let elsewhere = behind != Some(arena.number());
        let order = match has_room {
            true => (elsewhere, u64::MAX - room.free),
            false => (false, room.oldest.unwrap_or(u64::MAX)),
        };
        (!has_room, order)
    });
    let mut refused = None;
    for (arena, room) in &open {
        let (mut left, records) = match fits(room) {
            true => (room.free, room.vacant as usize),
            false => (room.ahead.max(first.room()), usize::MAX),
        };
        let takes = |block: &&Wanted| {
            let here = block.room() <= left;
            left = left.saturating_sub(block.room());
            here
        };
        let share = &blocks[wanted.clone()];
        let count = share.iter().take(records).take_while(takes).count().max(1);
        // With the block before them, if it is here, so that they lie behind it.
        let lead = usize::from(wanted.start > 0 && behind == Some(arena.number()));
        let share = &blocks[wanted.start - lead..wanted.start + count];
        let mut places = arena.reserve(namespace, share).split_off(lead);
        if !matches!(places.first(), Some(Err(Refused::Full(_)))) {
            // What did not fit here may fit elsewhere, and what is behind it goes there too.
            let is_full =
                |place: &Result<Reserved, Refused>| matches!(place, Err(Refused::Full(_)));
            places.truncate(places.iter().position(is_full).unwrap_or(places.len()));
            return (places.len(), places);
        }
        refused.get_or_insert_with(|| places.swap_remove(0));
    }
    let nowhere = || {
        Err(Refused::Full(Full {
            tier: DAX,
            requested: first.len,
            cause: Cause::Leaving,
        }))
    };
    (1, vec![refused.unwrap_or_else(nowhere)])
}
