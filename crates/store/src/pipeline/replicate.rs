//! Copies of published blocks from one tier to another, verified on the way.

use kvdepot_arena::verdict::{Bytes, Moved, Verdicts};
use kvdepot_arena::{
    Cause, Error, Full, NamespaceId, Place, Refused, Reserved, Token, Wanted, parts,
};
use kvdepot_media::Copier;

use super::Core;
use crate::tier::{Devices, Tier};

/// What became of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replica {
    /// It is published there now, or was before.
    Stored,
    /// It did not verify where it came from.
    Corrupt,
    /// There was no room.
    Full,
    /// Somebody else is writing it there.
    Busy,
    /// Nothing is written there before those are gone who worked for the tier's last owner.
    Orphans,
    /// Somebody has removed it meanwhile.
    Removed,
    /// The lanes failed.
    Failed,
}

impl Core {
    /// Copies blocks that the caller has pinned in `from` into tier `tier`, by the lanes of
    /// `copier`. Blocks while it works.
    pub(super) fn replicate(
        &self,
        from: &Tier,
        tier: usize,
        places: &[Place],
        copier: &Copier,
    ) -> Vec<Replica> {
        let to = &self.tiers[tier];
        let room = |namespace, blocks: &[Wanted]| to.reserve_waiting(namespace, blocks);
        self.copy_over(from, tier, places, copier, true, room)
    }

    /// Copies blocks that the caller has pinned in `from` into room that `room` finds in tier
    /// `tier`, which may be the same.
    pub(super) fn copy_over(
        &self,
        from: &Tier,
        tier: usize,
        places: &[Place],
        copier: &Copier,
        evict: bool,
        room: impl Fn(NamespaceId, &[Wanted]) -> Vec<Result<Reserved, Refused>>,
    ) -> Vec<Replica> {
        let to = &self.tiers[tier];
        let mut replicas = vec![Replica::Failed; places.len()];
        let mut copies: Vec<(usize, Reserved)> = Vec::new();
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
            for (index, answer) in (begin..end).zip(answers) {
                match answer {
                    Ok(target) => copies.push((index, target)),
                    Err(refused) => replicas[index] = Replica::of(refused),
                }
                // It need not wait for who writes the key anew.
                let waits = matches!(replicas[index], Replica::Busy | Replica::Orphans);
                if waits && from.since(places[index].token).1 {
                    replicas[index] = Replica::Removed;
                }
            }
            begin = end;
        }
        // Who removes a block looks at its source first, and then finds the reservation.
        let mut ended: Vec<Token> = Vec::new();
        copies.retain(|(index, target)| {
            let (_, removed) = from.since(places[*index].token);
            if removed {
                replicas[*index] = Replica::Removed;
                ended.push(target.token);
            }
            !removed
        });
        let (sources, targets) = (from.devices(), to.devices());
        let mut batch = copier.batch();
        let mut verdicts = Verdicts::new(Bytes::Verified, copies.len());
        for (tag, (index, target)) in copies.iter().enumerate() {
            let source = &places[*index];
            match plan(&mut batch, &sources, &targets, source, target, tag as u32) {
                Ok(true) => verdicts.planned(tag, source.parts.into()),
                Ok(false) => verdicts.corrupt(tag),
                // Says nothing about the block.
                Err(error) => tracing::error!(%error, "a copy could not be planned"),
            }
        }
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let ticket = copier.submit(batch, move |done| {
            verdicts.count(done);
            // The receiver waits below.
            let _sent = sender.send(verdicts.all());
        });
        let _done = ticket.wait(None);
        // Where nobody has looked, nothing was moved.
        let moved = receiver.recv();
        let moved = moved.unwrap_or_else(|_| vec![Moved::Failed; copies.len()]);
        // Puts of these keys may have joined the copies.
        ended.extend(copies.iter().map(|(_, target)| target.token));
        let (mut written, mut commits) = (Vec::new(), Vec::new());
        for ((index, target), moved) in copies.into_iter().zip(moved) {
            match moved {
                Moved::Done(_) => {
                    written.push((index, target.token));
                    commits.push((target, places[index].checksum));
                }
                Moved::Corrupt => replicas[index] = Replica::Corrupt,
                Moved::Failed | Moved::Abandoned => {}
            }
        }
        let stored = to.commit(commits, false);
        for ((index, token), stored) in written.iter().zip(stored) {
            let (stamp, removed) = from.since(places[*index].token);
            if stored {
                replicas[*index] = Replica::Stored;
                to.touch_token(*token, stamp);
            } else if removed {
                replicas[*index] = Replica::Removed;
            }
        }
        self.resolve(tier, &ended);
        replicas
    }
}

impl Replica {
    /// Of a block that got no reservation.
    fn of(refused: Refused) -> Replica {
        match refused {
            Refused::Present(_) => Replica::Stored,
            Refused::Reserved(_) => Replica::Busy,
            Refused::Full(Full {
                cause: Cause::Orphans { .. },
                ..
            }) => Replica::Orphans,
            Refused::Full(_) | Refused::Declined => Replica::Full,
        }
    }
}

/// Plans one block's parts; false when its part table does not verify.
fn plan(
    batch: &mut kvdepot_media::Batch,
    from: &Devices,
    to: &Devices,
    source: &Place,
    target: &Place,
    tag: u32,
) -> Result<bool, Error> {
    let (from, to) = (from.mapping(source.token)?, to.mapping(target.token)?);
    let found = parts::read(
        &from,
        &source.identity,
        &source.extents,
        source.len,
        source.parts,
        source.checksum,
    );
    let Some(found) = found else { return Ok(false) };
    for (number, part) in found.iter().enumerate() {
        let id = parts::part_id(&source.identity, number as u32, source.parts);
        let src = parts::buffers(&from, &source.extents, part.offset, part.len)?;
        let dst = parts::buffers(&to, &target.extents, part.offset, part.len)?;
        batch.part(&id, &src, &dst, Some(part.checksum), tag)?;
    }
    if source.parts > 1 {
        parts::write_table(&to, &target.extents, target.len, &found)?;
    }
    Ok(true)
}
