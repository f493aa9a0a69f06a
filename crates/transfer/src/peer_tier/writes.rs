//! Storing blocks: room at each of a block's homes, the same bytes to all of them, and published at
//! all of them or not said to be stored.

use std::collections::HashMap;
use std::sync::Arc;

use kvdepot_arena::parts::ENTRY;
use kvdepot_arena::{Cause, Full, Identity, NamespaceId, Place, Refused, Reserved, Wanted};
use kvdepot_media::{Checksum, Mac};
use kvdepot_store::Reply;

use super::desk::gather;
use super::held::{Copy, MAC, New, Own, Pinned, Room, Site, Span, rooms_of, tail_of};
use super::home::{wanted_of, why_of};
use super::hosts::Whom;
use super::messages::{Ask, Block, KEYS_MAX, Said, Why, Written};
use super::share::{OWN, Share};
use super::target::Far;
use super::wire::{Line, Lines};
use super::{Common, NAME};
use crate::grant::Rights;
use crate::remote::Lender;

/// How often other hosts are asked in the place of those that refuse or do not answer.
const ROUNDS: usize = 3;

/// A block that is being given room.
struct Making {
    wanted: Wanted,
    block: Block,
    /// Who may have it, and who of them is next.
    order: Vec<Whom>,
    next: usize,
    rooms: Vec<Room>,
    /// Homes that have it.
    present: usize,
    is_reserved: bool,
    /// It may not evict more at one of its homes, and is stored nowhere else instead.
    is_limited: bool,
    full: Option<Cause>,
}

impl Making {
    /// How many homes it is to have.
    fn least(&self, replicas: usize) -> usize {
        replicas.min(self.order.len()).max(1)
    }

    fn lacks(&self, replicas: usize) -> usize {
        match self.is_reserved || self.is_limited {
            true => 0,
            false => self
                .least(replicas)
                .saturating_sub(self.rooms.len() + self.present),
        }
    }

    fn note(&mut self, answer: Result<Room, Why>) {
        match answer {
            Ok(room) => self.rooms.push(room),
            Err(Why::Present) => self.present += 1,
            Err(Why::Reserved) => self.is_reserved = true,
            Err(Why::Full(free, capacity)) => self.full = Some(Cause::Space { free, capacity }),
            Err(Why::Limit) => (self.is_limited, self.full) = (true, Some(Cause::Limit)),
            Err(Why::Declined) => {}
        }
    }
}

/// A reservation under way.
struct Reserving {
    common: Arc<Common>,
    namespace: NamespaceId,
    blocks: Vec<Making>,
    reply: Reply<Vec<Result<Reserved, Refused>>>,
}

pub(super) fn reserve(
    common: &Arc<Common>,
    namespace: NamespaceId,
    blocks: &[Wanted],
    reply: Reply<Vec<Result<Reserved, Refused>>>,
) {
    let macs = common.held.macs_of(namespace);
    let making = |wanted: &Wanted| Making {
        wanted: *wanted,
        block: Block {
            key: wanted.key.0,
            len: wanted
                .len
                .saturating_add(u64::from(wanted.parts) * macs as u64),
            parts: wanted.parts,
            copy: wanted.copy,
            evict: wanted.evict,
            stamp: wanted.stamp,
        },
        order: common.hosts.to_put(&Identity {
            namespace,
            key: wanted.key,
        }),
        next: 0,
        rooms: Vec::new(),
        present: 0,
        is_reserved: false,
        is_limited: false,
        full: None,
    };
    let reserving = Reserving {
        common: Arc::clone(common),
        namespace,
        blocks: blocks.iter().map(making).collect(),
        reply,
    };
    reserving.round(ROUNDS);
}

impl Reserving {
    /// Asks as many hosts for each block as it lacks homes, and others in the place of those that
    /// have no room.
    fn round(mut self, left: usize) {
        let replicas = self.common.hosts.replicas();
        let mut groups: HashMap<usize, (Whom, Vec<usize>)> = HashMap::new();
        for (at, block) in self.blocks.iter_mut().enumerate() {
            for _ in 0..block.lacks(replicas) {
                if let Some(whom) = block.order.get(block.next) {
                    let group = groups.entry(whom.number());
                    group
                        .or_insert_with(|| (whom.clone(), Vec::new()))
                        .1
                        .push(at);
                    block.next += 1;
                }
            }
        }
        if groups.is_empty() || left == 0 {
            return self.end();
        }
        let mut asked = Vec::new();
        for (whom, at) in groups.into_values() {
            let parts = at.chunks(KEYS_MAX);
            asked.extend(parts.map(|part| (whom.clone(), part.to_vec())));
        }
        let wanted = |part: &[usize]| part.iter().map(|at| self.blocks[*at].block).collect();
        let wanted: Vec<Vec<Block>> = asked.iter().map(|(_, part)| wanted(part)).collect();
        let parts: Vec<Vec<usize>> = asked.iter().map(|(_, part)| part.clone()).collect();
        let (common, namespace) = (Arc::clone(&self.common), self.namespace);
        let next = move |answers: Vec<Option<Vec<Result<Room, Why>>>>| {
            for (part, answers) in parts.into_iter().zip(answers) {
                let answers = answers.into_iter().flatten();
                for (at, answer) in part.into_iter().zip(answers) {
                    self.blocks[at].note(answer);
                }
            }
            self.round(left - 1);
        };
        let slots = gather(asked.len(), next);
        for ((slot, (whom, _)), wanted) in slots.into_iter().zip(asked).zip(wanted) {
            match whom {
                Whom::Own => {
                    let share = Arc::clone(&common.share);
                    common.own.run(move || {
                        let wanted = wanted.iter().map(wanted_of).collect();
                        let rooms = share.reserve(OWN, namespace, wanted).into_iter();
                        let room = |room: Result<Reserved, Refused>| match room {
                            Ok(reserved) => Ok((Copy::Here(reserved), None)),
                            Err(refused) => Err(why_of(refused)),
                        };
                        slot.say(Some(rooms.map(room).collect()));
                    });
                }
                Whom::Far(target) => {
                    let lens: Vec<u64> = wanted.iter().map(|block| block.len).collect();
                    let ask = Ask::Reserve {
                        namespace: namespace.0,
                        call: common.hosts.net().number(),
                        blocks: wanted,
                    };
                    let asked = Arc::clone(&target);
                    target.ask(ask, move |said| {
                        slot.say(
                            said.and_then(|said| rooms_of(said, &lens, |id| Far::new(&asked, id))),
                        );
                    });
                }
            }
        }
    }

    fn end(self) {
        let Reserving {
            common,
            namespace,
            blocks,
            reply,
        } = self;
        let replicas = common.hosts.replicas();
        let end = |making: Making| {
            let nowhere = common.held.nowhere();
            if making.is_reserved {
                return Err(Refused::Reserved(nowhere));
            }
            if making.is_limited || making.lacks(replicas) > 0 {
                return Err(refusal(&making));
            }
            if making.rooms.is_empty() {
                return Err(Refused::Present(nowhere));
            }
            Ok(make(&common, namespace, making))
        };
        reply.answer(blocks.into_iter().map(end).collect());
    }
}

/// Why a block gets no room, as the pipeline knows it.
fn refusal(making: &Making) -> Refused {
    match making.full {
        Some(cause) => Refused::Full(Full {
            tier: NAME,
            requested: making.wanted.len,
            cause,
        }),
        None => Refused::Declined,
    }
}

/// The reservation of a block that has room at its homes.
fn make(common: &Arc<Common>, namespace: NamespaceId, making: Making) -> Reserved {
    let Wanted {
        key,
        len,
        parts,
        stamp,
        ..
    } = making.wanted;
    let place = Place {
        len,
        parts,
        stamp,
        ..Place::of(Identity { namespace, key })
    };
    let stored = making.block.len;
    let mut wire = None;
    let (mut copies, mut lines) = (Vec::new(), Vec::new());
    for (copy, remote) in making.rooms {
        match (&copy, remote) {
            (Copy::There(far), Some(remote)) => {
                wire.get_or_insert_with(|| Arc::clone(&far.target.wire));
                lines.push(Line::There(remote));
            }
            (Copy::Here(reserved), _) => {
                let buffers = common.share.buffers(reserved, 0, stored);
                lines.push(Line::Here(buffers.unwrap_or_default()));
            }
            (Copy::There(_), None) => continue,
        }
        copies.push(copy);
    }
    let span = wire.map(|wire| Span::new(&wire, Lines::new(lines, len)));
    let new = New {
        copies,
        span,
        table: Vec::new(),
        macs: Vec::new(),
    };
    common.held.reserve(place, new)
}

/// A block that is being published.
struct Publishing {
    place: Place,
    table: Vec<u8>,
    macs: Vec<Mac>,
    /// Homes that it has room at, and those of them that have it now.
    copies: usize,
    stored: usize,
    /// Where the first of them can be read.
    read: Option<Site>,
}

/// What one copy has come to: whether it is there, and where it can be read.
type Outcome = (bool, Option<Site>);

/// What one host is asked to publish: the block, its copy, and what it is told.
type Part = Vec<(usize, Copy, Written)>;

/// A publication under way.
struct Committing {
    common: Arc<Common>,
    blocks: Vec<Option<Publishing>>,
    reply: Reply<Vec<bool>>,
}

pub(super) fn commit(
    common: &Arc<Common>,
    written: Vec<(Reserved, Checksum)>,
    pinned: bool,
    reply: Reply<Vec<bool>>,
) {
    let mut blocks: Vec<Option<Publishing>> = Vec::with_capacity(written.len());
    let mut groups: HashMap<(usize, bool), Part> = HashMap::new();
    for (at, (mut reserved, checksum)) in written.into_iter().enumerate() {
        let place = reserved.hand_out();
        let new = common.held.take(&place);
        let publishing = new
            .filter(|new| is_complete(common, &place, new))
            .map(|new| {
                let tail = tail_of(&new);
                let copies = new.copies.len();
                for (number, copy) in new.copies.into_iter().enumerate() {
                    // What was not written whole ends with its value.
                    let span = new.span.as_ref();
                    if span.is_none_or(|span| span.lines.is_whole(number)) {
                        let word = Written {
                            id: copy.id(),
                            checksum: checksum.0,
                            tail: tail.clone(),
                        };
                        let group = (copy.whose(), pinned && number == 0);
                        groups.entry(group).or_default().push((at, copy, word));
                    }
                }
                Publishing {
                    place,
                    table: new.table,
                    macs: new.macs,
                    copies,
                    stored: 0,
                    read: None,
                }
            });
        blocks.push(publishing);
    }
    let mut asked = Vec::new();
    for ((_, reads), mut part) in groups {
        while !part.is_empty() {
            let rest = part.split_off(part.len().min(KEYS_MAX));
            asked.push((reads, std::mem::replace(&mut part, rest)));
        }
    }
    let committing = Committing {
        common: Arc::clone(common),
        blocks,
        reply,
    };
    let whose = asked
        .iter()
        .map(|(_, part)| part.iter().map(|(at, ..)| *at).collect());
    let whose: Vec<Vec<usize>> = whose.collect();
    let lens: Vec<Vec<u64>> = asked
        .iter()
        .map(|(_, part)| {
            part.iter()
                .map(|(at, ..)| committing.stored_len(*at))
                .collect()
        })
        .collect();
    let next = move |outcomes| committing.end(&whose, outcomes, pinned);
    let slots = gather(asked.len(), next);
    for ((slot, (reads, part)), lens) in slots.into_iter().zip(asked).zip(lens) {
        let far = match part.first() {
            Some((_, Copy::There(far), _)) => Some(Arc::clone(&far.target)),
            _ => None,
        };
        match far {
            None => {
                let share = Arc::clone(&common.share);
                common
                    .own
                    .run(move || slot.say(Some(publish_here(&share, part, reads))));
            }
            Some(target) => {
                let blocks = part.iter().map(|(_, _, word)| word.clone()).collect();
                let ask = Ask::Commit {
                    blocks,
                    pinned: reads,
                };
                target.ask(ask, move |said| {
                    slot.say(said.and_then(|said| published_there(said, part, &lens, reads)));
                });
            }
        }
    }
}

/// Whether all is there that stands behind the payload: who has a key reads nothing without MACs.
fn is_complete(common: &Common, place: &Place, new: &New) -> bool {
    let parts = usize::from(place.parts);
    let macs = match common.held.macs_of(place.identity.namespace) {
        0 => 0,
        _ => parts,
    };
    let table = match parts {
        1 => 0,
        many => many * ENTRY as usize,
    };
    new.macs.len() == macs && new.table.len() == table
}

/// Publishes copies of this host's own.
fn publish_here(share: &Arc<Share>, part: Part, reads: bool) -> Vec<Outcome> {
    let one = |(_, copy, word): (usize, Copy, Written)| {
        let Copy::Here(reserved) = copy else {
            return (false, None);
        };
        let place = Place {
            checksum: Checksum(word.checksum),
            ..*reserved
        };
        let whole = share.write_tail(&place, &word.tail);
        let stored = whole && share.commit(reserved, place.checksum, reads);
        let site = (stored && reads).then(|| Site::Here(Own::new(share, place)));
        (stored, site)
    };
    part.into_iter().map(one).collect()
}

/// What another host has published.
fn published_there(
    (said, lender): (Said, Lender),
    part: Part,
    lens: &[u64],
    reads: bool,
) -> Option<Vec<Outcome>> {
    let Said::Stored(stored) = said else {
        return None;
    };
    if stored.len() != part.len() {
        return None;
    }
    let one = |(copy, stored, len): (Copy, Option<u32>, u64)| {
        let (Copy::There(mut far), Some(grant)) = (copy, stored) else {
            return (false, None);
        };
        if !reads {
            far.is_over();
            return (true, None);
        }
        let remote = lender.lent(grant, len, Rights::READ);
        let lines = Lines::new(vec![Line::There(remote)], len);
        let span = Span::new(&far.target.wire, lines);
        (true, Some(Site::There(span, far)))
    };
    let each = part.into_iter().zip(stored).zip(lens);
    let each = each.map(|(((_, copy, _), stored), len)| one((copy, stored, *len)));
    Some(each.collect())
}

impl Committing {
    /// Bytes of a block with all that stands behind its payload.
    fn stored_len(&self, at: usize) -> u64 {
        let block = self.blocks[at].as_ref();
        block.map_or(0, |block| block.place.len + (block.macs.len() * MAC) as u64)
    }

    /// A block is stored where all its homes have it.
    fn end(mut self, whose: &[Vec<usize>], outcomes: Vec<Option<Vec<Outcome>>>, pinned: bool) {
        for (part, outcomes) in whose.iter().zip(outcomes) {
            for (at, (stored, site)) in part.iter().zip(outcomes.into_iter().flatten()) {
                if let Some(block) = &mut self.blocks[*at] {
                    block.stored += usize::from(stored);
                    block.read = block.read.take().or(site);
                }
            }
        }
        let held = &self.common.held;
        let one = |block: Option<Publishing>| {
            let Some(block) = block else { return false };
            let is_stored = block.stored == block.copies;
            match (is_stored, pinned, block.read) {
                (true, true, Some(site)) => {
                    let (table, macs) = (block.table, block.macs);
                    held.published(&block.place, Pinned { site, table, macs });
                    true
                }
                (true, pinned, _) => !pinned,
                (false, ..) => false,
            }
        };
        self.reply
            .answer(self.blocks.into_iter().map(one).collect());
    }
}
