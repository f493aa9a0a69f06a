//! Copies of published blocks from one tier to another, verified on the way.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::hash_map::Entry;

use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{
    Cause, Error, Full, Identity, Key, NamespaceId, Place, Refused, Reserved, Token, Wanted, parts,
};
use kvdepot_media::Copier;

use super::Core;
use super::ledger::Written;
use super::spending::Spent;
use crate::journal::Journal;
use crate::tier::{Apart, Ends, Stage};

/// What became of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replica {
    /// It is published there now, or was before.
    Stored,
    /// It did not verify where it came from.
    Corrupt,
    /// There was no room.
    Full,
    /// It is not to go there.
    Declined,
    /// Somebody else is writing it there.
    Busy,
    /// Nothing is written there before those are gone who worked for the tier's last owner.
    Orphans,
    /// Somebody has removed it meanwhile.
    Removed,
    /// The lanes failed.
    Failed,
}

/// The reservation of a put in a tier that may answer late, which has no name.
const NOBODY: Token = Token {
    device: u32::MAX,
    slot: u32::MAX,
    sequence: 0,
};

/// What became of one block, and how it is known where it is now.
pub(super) type Arrival = (Replica, Option<There>);

/// A block where it was copied to.
#[derive(Clone, Copy, Debug)]
pub(super) enum There {
    /// It stays, for whoever takes it on.
    Pinned(Place),
    /// Until it goes.
    Named(Token),
}

impl Core {
    /// Copies blocks that the caller has pinned in tier `from` into tier `to`, by the lanes of
    /// `copier`. Blocks while it works.
    pub(super) fn replicate(
        &self,
        from: usize,
        to: usize,
        places: &[Place],
        copier: &Copier,
    ) -> Vec<Arrival> {
        let room = |namespace, blocks: &[Wanted]| match &self.tiers[to] {
            Stage::Here(arenas) => Some(arenas.reserve_waiting(namespace, blocks)),
            Stage::Apart(apart) => self.reserve_written((to, apart), namespace, blocks),
        };
        // What goes on must not leave before.
        let pinned = to > from && self.goes_on(to);
        // A tier that can hold few reservations has those of a step committed before the next.
        let most = self.tiers[to].apart().map_or(usize::MAX, Apart::step_max);
        let steps = places.chunks(most.max(1));
        let copy = |step| self.copy_over((from, to), step, copier, (true, pinned), room);
        steps.flat_map(copy).collect()
    }

    /// Reserves in a tier that may answer late, and waits for that. Puts that want the same blocks
    /// there join; what one of them is writing is busy.
    pub(super) fn reserve_written(
        &self,
        (tier, apart): (usize, &Apart),
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Option<Vec<Result<Reserved, Refused>>> {
        let identity = |wanted: &Wanted| Identity {
            namespace,
            key: wanted.key,
        };
        let mine: Vec<bool> = {
            let mut ledger = self.ledger.lock();
            let names = blocks.iter().map(|wanted| (tier, identity(wanted)));
            let mut claim = |(at, name)| {
                ledger.take_turns(at);
                match ledger.written.entry(name) {
                    Entry::Occupied(_) => false,
                    Entry::Vacant(vacant) => {
                        vacant.insert(Written::default());
                        true
                    }
                }
            };
            names.enumerate().map(&mut claim).collect()
        };
        let each = blocks.iter().zip(&mine);
        let asked: Vec<Wanted> = each
            .filter(|(_, mine)| **mine)
            .map(|(one, _)| *one)
            .collect();
        let answers = match asked.is_empty() {
            true => Some(Vec::new()),
            false => apart.reserve(namespace, &asked).wait(),
        };
        let silent = answers.is_none();
        let mut answers = answers.unwrap_or_default().into_iter();
        let mut ended = Vec::new();
        let answers: Vec<_> = blocks
            .iter()
            .zip(mine)
            .map(|(wanted, mine)| {
                if !mine {
                    return Err(Refused::Reserved(NOBODY));
                }
                let answer = answers.next().unwrap_or(Err(Refused::Declined));
                if answer.is_err() {
                    ended.push(identity(wanted));
                }
                answer
            })
            .collect();
        self.resolve_late(tier, &ended);
        (!silent).then_some(answers)
    }

    /// Copies blocks that the caller has pinned in `from` into room that `room` finds in tier
    /// `tier`, which may be the same.
    pub(super) fn copy_over(
        &self,
        (from, tier): (usize, usize),
        places: &[Place],
        copier: &Copier,
        (evict, pinned): (bool, bool),
        room: impl Fn(NamespaceId, &[Wanted]) -> Option<Vec<Result<Reserved, Refused>>>,
    ) -> Vec<Arrival> {
        let mut replicas: Vec<Arrival> = vec![(Replica::Failed, None); places.len()];
        let mut copies: Vec<(usize, Reserved)> = Vec::new();
        // Of what passes a tier by nothing was taken before; and what others may have joined, where
        // nothing is left for it.
        let mut spent: Vec<Spent> = Vec::new();
        spent.resize_with(places.len(), Spent::default);
        let passes = tier > from + 1;
        let mut unpaid: Vec<Reserved> = Vec::new();
        let mut begin = 0;
        // Runs of one namespace: a prompt's blocks are reserved together, and lie together.
        while begin < places.len() {
            let namespace = places[begin].identity.namespace;
            let same = |place: &&Place| place.identity.namespace == namespace;
            let end = begin + places[begin..].iter().take_while(same).count();
            let wanted = places[begin..end].iter().map(|place| Wanted {
                key: place.identity.key,
                len: place.len,
                parts: place.parts,
                stamp: place.stamp,
                copy: true,
                evict,
            });
            let answers = room(namespace, &wanted.collect::<Vec<_>>());
            self.evict_ahead(tier);
            for (index, answer) in (begin..end).zip(answers.into_iter().flatten()) {
                match answer {
                    Ok(target) if passes => match self.spend(tier, target.len) {
                        Some(taken) => {
                            spent[index] = taken;
                            copies.push((index, target));
                        }
                        None => {
                            self.edges[tier - 1].declines();
                            replicas[index] = arrival_of(Refused::Declined);
                            unpaid.push(target);
                        }
                    },
                    Ok(target) => copies.push((index, target)),
                    Err(refused) => replicas[index] = arrival_of(refused),
                }
                // It need not wait for who writes the key anew.
                let waits = matches!(replicas[index].0, Replica::Busy | Replica::Orphans);
                if waits && self.since(from, places[index].token).1 {
                    replicas[index].0 = Replica::Removed;
                }
            }
            begin = end;
        }
        // Who removes a block looks at its source first, and then finds the reservation.
        let mut ended: Vec<Place> = unpaid.iter().map(|target| **target).collect();
        drop(unpaid);
        let gone = self.removed(from, places, &copies);
        let mut is_gone = gone.into_iter();
        copies.retain(|(index, target)| {
            replicas[*index].0 = match is_gone.next().flatten() {
                Some(false) => return true,
                Some(true) => Replica::Removed,
                None => Replica::Failed,
            };
            ended.push(**target);
            false
        });
        let (sources, targets) = (self.tiers[from].ends(), self.tiers[tier].ends());
        let mut batch = copier.batch();
        let is_apart = self.tiers[tier].apart().is_some();
        if is_apart {
            batch.keep_leaves();
        }
        let mut verdicts = Verdicts::new(Bytes::Verified, copies.len());
        for (tag, (index, target)) in copies.iter().enumerate() {
            let source = &places[*index];
            let ends = (sources.as_ref(), targets.as_ref());
            match plan(&mut batch, ends, source, target, tag as u32) {
                Ok(true) => verdicts.planned(tag, source.parts.into()),
                Ok(false) => verdicts.corrupt(tag),
                // Says nothing about the block.
                Err(error) => tracing::error!(%error,
                    "internal error: cannot plan a copy between tiers; the block is not promoted \
                     or written back"),
            }
        }
        let journal = self.journal((from, tier), places, &copies);
        let verdicts = verdicts.of_batch(batch, copier);
        // Puts of these keys may have joined the copies.
        ended.extend(copies.iter().map(|(_, target)| **target));
        let copied: Vec<usize> = copies.iter().map(|(index, _)| *index).collect();
        let (mut written, mut commits) = (Vec::new(), Vec::new());
        for (tag, (index, target)) in copies.into_iter().enumerate() {
            match verdicts.of(tag) {
                Moved::Done(_) => {
                    if is_apart {
                        targets.note_leaves(&target, verdicts.leaves(tag));
                        targets.note_macs(&target, verdicts.macs(tag));
                    }
                    let checksum = places[index].checksum;
                    written.push((
                        index,
                        Place {
                            checksum,
                            ..*target
                        },
                    ));
                    commits.push((target, places[index].checksum));
                }
                Moved::Corrupt => replicas[index].0 = Replica::Corrupt,
                Moved::Failed | Moved::Abandoned => {}
            }
        }
        let stored = match &self.tiers[tier] {
            Stage::Here(arenas) => Some(arenas.commit(commits, pinned)),
            Stage::Apart(_) if commits.is_empty() => None,
            Stage::Apart(apart) => {
                self.publishes(tier, written.iter().map(|(_, place)| place.identity));
                apart.commit(commits, false).wait()
            }
        };
        // What a tier does not answer for may be there.
        let mut answers = stored.iter().flatten();
        let paid = written.iter();
        let paid = paid.filter(|_| answers.next() != Some(&false));
        let paid = paid.map(|(index, _)| *index);
        if passes {
            paid.for_each(|index| spent[index].written());
        } else if tier > from && self.edges[from].is_bounded() {
            self.ledger.written(paid.map(|index| places[index].token));
        }
        for ((index, place), stored) in written.iter().zip(stored.into_iter().flatten()) {
            let (stamp, removed) = self.since(from, places[*index].token);
            if stored {
                let to = self.tiers[tier].here();
                let there = match to {
                    Some(_) if pinned => There::Pinned(*place),
                    _ => There::Named(place.token),
                };
                replicas[*index] = (Replica::Stored, Some(there));
                to.iter().for_each(|to| to.touch_token(place.token, stamp));
            } else if removed {
                replicas[*index].0 = Replica::Removed;
            }
        }
        let stored = copied.into_iter();
        let stored = stored.filter(|index| replicas[*index].0 == Replica::Stored);
        if let Some(journal) = journal {
            journal.finished(stored.clone().count());
        }
        self.share_done(tier, stored.map(|index| places[index].identity));
        self.resolve(tier, &ended);
        replicas
    }

    /// Logs that blocks are about to be copied, if any are.
    fn journal(
        &self,
        (from, tier): (usize, usize),
        places: &[Place],
        copies: &[(usize, Reserved)],
    ) -> Option<Journal> {
        let (op, name) = match from.cmp(&tier) {
            Less => ("write_back", self.tier_name(tier)),
            Equal => ("drain", self.tier_name(tier)),
            Greater => ("promote", self.tier_name(from)),
        };
        let bytes = copies.iter().map(|(index, _)| places[*index].len).sum();
        (!copies.is_empty()).then(|| Journal::in_background(op, name, copies.len(), bytes))
    }

    /// When a block that is pinned in a tier was used last, and whether it was removed since.
    fn since(&self, tier: usize, token: Token) -> (u64, bool) {
        let arenas = self.tiers[tier].here();
        arenas.map_or((0, false), |arenas| arenas.since(token))
    }

    /// Which blocks that are about to be copied were removed where they come from. A tier that may
    /// answer late is asked for what it has now, which may be put anew since; `None` where it has
    /// nothing to say.
    fn removed(
        &self,
        from: usize,
        places: &[Place],
        copies: &[(usize, Reserved)],
    ) -> Vec<Option<bool>> {
        let Some(apart) = self.tiers[from].apart() else {
            let each = copies.iter();
            let gone = each.map(|(index, _)| Some(self.since(from, places[*index].token).1));
            return gone.collect();
        };
        let mut gone = Vec::with_capacity(copies.len());
        let of = |(index, _): &(usize, Reserved)| places[*index].identity;
        // A few at a time: the blocks are pinned already, and a tier may have few pins left.
        let few = (apart.step_max() / 4).max(1);
        let runs = copies.chunk_by(|a, b| of(a).namespace == of(b).namespace);
        for run in runs.flat_map(|run| run.chunks(few)) {
            let keys: Vec<Key> = run.iter().map(|copy| of(copy).key).collect();
            let there = apart.pin(of(&run[0]).namespace, &keys, &[]).wait();
            let there = there.unwrap_or_default();
            self.tiers[from].unpin(there.iter().flatten());
            let same = |(there, (index, _)): (Option<Place>, &(usize, Reserved))| {
                let sum = places[*index].checksum;
                there.map(|there| there.checksum != sum)
            };
            let each = there.into_iter().zip(run).map(same);
            gone.extend(each.chain(std::iter::repeat(None)).take(run.len()));
        }
        gone
    }
}

/// Of a block that got no reservation.
fn arrival_of(refused: Refused) -> Arrival {
    match refused {
        Refused::Present(token) => (Replica::Stored, Some(There::Named(token))),
        Refused::Reserved(_) => (Replica::Busy, None),
        Refused::Full(Full {
            cause: Cause::Orphans { .. },
            ..
        }) => (Replica::Orphans, None),
        Refused::Full(_) => (Replica::Full, None),
        Refused::Declined => (Replica::Declined, None),
    }
}

/// Plans one block's parts; false when its part table does not verify, or not each has its MAC.
fn plan(
    batch: &mut kvdepot_media::Batch,
    (from, to): (&dyn Ends, &dyn Ends),
    source: &Place,
    target: &Place,
    tag: u32,
) -> Result<bool, Error> {
    let Some(found) = from.parts(source)? else {
        return Ok(false);
    };
    let (mut src, mut dst) = (Vec::new(), Vec::new());
    // Both have the key of one namespace.
    let (proven, proof) = (from.proof(source), to.proof(target));
    if proven.as_ref().is_some_and(|proof| !proof.is_of(source)) {
        return Ok(false);
    }
    for (number, part) in found.iter().enumerate() {
        let id = parts::part_id(&source.identity, number as u32, source.parts);
        from.buffers(source, part.offset, part.len, &mut src)?;
        to.buffers(target, part.offset, part.len, &mut dst)?;
        let index = batch.part(&id, &src, &dst, Some(part.checksum), tag)?;
        if let Some(proof) = proven.as_ref().or(proof.as_ref()) {
            let mac = proof.macs.get(number).copied();
            batch.authenticate(index, &proof.key, mac);
        }
    }
    if source.parts > 1 {
        to.write_parts(target, &found)?;
    }
    Ok(true)
}
