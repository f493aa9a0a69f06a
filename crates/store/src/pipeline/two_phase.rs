//! The two-phase verbs, for engines whose scheduler decides and whose workers move:
//! `reserve → move → commit | abort`; `pins` is the way back. A reservation belongs to the process
//! that made it; it ends by its verb or with that, never by time.

use std::sync::Arc;

use kvdepot_arena::parts::{self, Parts};
use kvdepot_arena::{
    Cause, Error, Full, Identity, Key, NamespaceId, Place, Refused, Token, Wanted,
};
use kvdepot_media::Checksum;

use super::Core;
use super::budget::Share;
use super::ledger::State;
use crate::config::Overload;
use crate::placement::{self, Holder};
use crate::tier::{Ends, FileAt, Stage};

/// Room for a block that nobody sees before it is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a reservation that nobody ends keeps its room for ever"]
pub struct Reservation {
    pub(crate) way: Way,
    /// Where it is, near to far.
    pub tier: usize,
    /// Where its bytes are.
    pub place: Place,
    pub(crate) parts: Parts,
    /// The file that is to have them, where they go into one.
    pub(crate) file: Option<FileAt>,
    /// Whose it is.
    pub holder: Holder,
}

/// What becomes of a call where one of its blocks finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum NoRoom {
    /// The others are reserved.
    Skip = 0,
    /// The call fails, and nothing stays reserved.
    Fail = 1,
    /// Nothing behind that block is reserved: without it nothing there would ever be found.
    Stop = 2,
}

/// How a block gets to where it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Into the near tier, and from there to the far one, if there is one.
    Through,
    /// Into the near tier alone: the queue to the far one is full.
    NearOnly,
    /// Round the near tier.
    Far,
}

impl Core {
    /// The first tier behind the near one that other processes can write.
    fn far_arenas(&self) -> Option<usize> {
        let mut arenas = self.arenas().map(|(at, _)| at);
        arenas.find(|at| *at > 0)
    }

    /// The tier that a way leads to first.
    fn tier_by(&self, way: Way) -> usize {
        match way {
            Way::Far => self.far_arenas().unwrap_or(1),
            _ => 0,
        }
    }
}

impl Reservation {
    /// A reservation in the tier at `tier`, of another process's depot, with the lengths of its
    /// parts.
    pub fn elsewhere(holder: Holder, tier: usize, place: Place, lens: &[u64]) -> Reservation {
        Reservation {
            // Only its owner needs to know.
            way: Way::Through,
            tier,
            place,
            parts: parts::blank(lens).into(),
            file: None,
            holder,
        }
    }

    /// The reservation of a block that goes into a file, if it does.
    pub fn in_file(self, file: Option<FileAt>) -> Reservation {
        Reservation { file, ..self }
    }

    /// Where the bytes go, for a mover: opaque, and valid until commit or abort.
    #[must_use]
    pub fn placement(&self) -> Vec<u8> {
        placement::encode(self.holder, &self.place, &self.parts, self.file.as_ref())
    }

    /// The block's key.
    #[must_use]
    pub fn key(&self) -> Key {
        self.place.identity.key
    }

    /// Parts that the commit needs checksums of.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Refuses checksums that are not one a part.
    pub fn check(&self, checksums: &[Checksum]) -> Result<(), Error> {
        if self.parts.len() == checksums.len() {
            return Ok(());
        }
        Err(Error::input(
            "checksums",
            format!("{} for a block", checksums.len()),
            format!("one a part, {}", self.parts.len()),
        ))
    }
}

impl Core {
    /// Reserves room for blocks with parts of these lengths, in prefix order, or says why not: the
    /// block is stored, another call is writing it, or it finds no room.
    pub(super) fn reserve_each(
        self: &Arc<Core>,
        holder: Holder,
        namespace: NamespaceId,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Result<Reservation, Refused>>, Error> {
        let _pass = self.gate.enter()?;
        for (_, lengths) in blocks {
            parts::check(lengths)?;
        }
        let stamps = self.uses.call(blocks.len());
        let mut answers: Vec<Option<Result<Reservation, Refused>>> = vec![None; blocks.len()];
        let mut ways = Vec::with_capacity(blocks.len());
        let keys: Vec<Key> = blocks.iter().map(|(key, _)| *key).collect();
        let len = |at: usize| parts::payload_len(&blocks[at].1);
        let declined = self.declined(namespace, &keys, len).unwrap_or_default();
        // What is stored, and does not go on by itself.
        let mut again = Vec::new();
        for (index, (key, lengths)) in blocks.iter().enumerate() {
            if declined.get(index) == Some(&true) {
                self.metrics.put_outcome(crate::Outcome::Declined);
                answers[index] = Some(Err(Refused::Declined));
                continue;
            }
            let identity = Identity {
                namespace,
                key: *key,
            };
            match self.way_of(holder.seat, &identity, lengths, stamps.of(index)) {
                Ok((way, share)) => ways.push((index, way, share)),
                Err(refused) => {
                    again.push(*key);
                    answers[index] = Some(Err(refused));
                }
            }
        }
        for way in [Way::Through, Way::NearOnly, Way::Far] {
            let mine = ways.extract_if(.., |(_, other, _)| *other == way);
            let mine: Vec<(usize, _)> = mine.map(|(index, _, share)| (index, share)).collect();
            if mine.is_empty() {
                continue;
            }
            let wanted = mine.iter().map(|(index, _)| Wanted {
                key: blocks[*index].0,
                len: parts::payload_len(&blocks[*index].1),
                parts: blocks[*index].1.len() as u16,
                stamp: stamps.of(*index),
                copy: false,
                evict: true,
            });
            let wanted: Vec<Wanted> = wanted.collect();
            let tier = self.tier_by(way);
            let Some(arenas) = self.tiers.get(tier).and_then(Stage::here) else {
                // Other processes write to arenas only.
                for ((index, _), wanted) in mine.into_iter().zip(&wanted) {
                    answers[index] = Some(Err(self.unreachable(tier, wanted.len)));
                }
                continue;
            };
            let (mut ledger, places) = self.reserve_locked(tier, arenas, namespace, &wanted);
            for ((index, share), place) in mine.into_iter().zip(places) {
                // It is the caller's, and as long as the caller's process.
                let place = place.map(|mut reserved| reserved.hand_out());
                if matches!(place, Err(Refused::Present(_))) && share.is_none() {
                    again.push(blocks[index].0);
                }
                let place = self.note(&mut ledger, way, share, place);
                answers[index] = Some(place.map(|place| Reservation {
                    way,
                    tier: self.tier_by(way),
                    place,
                    parts: parts::blank(&blocks[index].1).into(),
                    file: None,
                    holder,
                }));
            }
        }
        self.touch(namespace, &again);
        for answer in answers.iter().flatten() {
            match answer {
                Err(Refused::Present(_)) => self.metrics.reserve_present(),
                Err(Refused::Reserved(_)) => self.metrics.reserve_pending(),
                _ => {}
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Where a block is to be reserved, with its share of the queue where it will be in it; or
    /// where it is already, for good.
    fn way_of(
        &self,
        seat: u64,
        identity: &Identity,
        lengths: &[u64],
        stamp: u64,
    ) -> Result<(Way, Option<Share>), Refused> {
        if !self.acknowledges_far() {
            return Ok((Way::Through, None));
        }
        let mut lasting = self.tiers[self.ack..].iter().filter_map(Stage::here);
        let found =
            lasting.find_map(|tier| tier.find_again(identity.namespace, &identity.key, stamp));
        if let Some(place) = found {
            return Err(Refused::Present(place.token));
        }
        let len = parts::payload_len(lengths);
        let far = self.far_arenas().is_some();
        if self.bypasses(0, len) {
            let mut over = self.edges[..self.tier_by(Way::Far)].iter();
            if over.all(|edge| edge.lets_by(identity, len)) {
                return Ok((Way::Far, None));
            }
            self.metrics.put_outcome(crate::Outcome::Declined);
            return Err(Refused::Declined);
        }
        // It stays near, and needs nothing of the queue.
        if self.edges[0].is_first(identity) {
            return Ok((Way::Through, None));
        }
        Ok(match self.edges[0].budget.admit(seat, len) {
            Some(share) => (Way::Through, Some(share)),
            None if self.overload == Overload::Wait && far => (Way::Far, None),
            // Where nothing further away can be written by others, a full queue delays nobody.
            None if self.overload == Overload::Wait => {
                (Way::Through, Some(self.edges[0].budget.take(seat, len)))
            }
            None => {
                self.metrics.put_outcome(crate::Outcome::Dropped);
                (Way::NearOnly, None)
            }
        })
    }

    /// Why a block finds no room in a tier that other processes cannot write.
    fn unreachable(&self, tier: usize, requested: u64) -> Refused {
        Refused::Full(Full {
            tier: self.tiers.get(tier).map_or("", Stage::name),
            requested,
            cause: Cause::Apart,
        })
    }

    /// Enters what a tier has answered for a block.
    fn note(
        &self,
        ledger: &mut State,
        way: Way,
        share: Option<Share>,
        answer: Result<Place, Refused>,
    ) -> Result<Place, Refused> {
        match &answer {
            Ok(place) => {
                ledger.held.insert((self.tier_by(way), place.token), share);
                return answer;
            }
            Err(Refused::Present(token)) if share.is_some() => {
                // Unless it is gone again, in which case the next store writes it anew.
                let _sent = self.send_on(ledger, self.tier_by(way), *token, Vec::new());
            }
            _ => {}
        }
        match answer {
            Err(Refused::Full(full)) if way == Way::NearOnly => Err(Refused::Full(Full {
                cause: Cause::Queue {
                    depth: self.edges[0].budget.depth(),
                },
                ..full
            })),
            answer => answer,
        }
    }

    /// Publishes reservations whose parts are all in place; `checksums` has one a part. False for
    /// one that is no reservation any more.
    pub fn commit(
        &self,
        reservations: &[Reservation],
        checksums: &[Vec<Checksum>],
    ) -> Result<Vec<bool>, Error> {
        let _pass = self.gate.enter()?;
        for (reservation, checksums) in reservations.iter().zip(checksums) {
            reservation.check(checksums)?;
        }
        let mut stored = vec![false; reservations.len()];
        for way in [Way::Through, Way::NearOnly, Way::Far] {
            let tier = self.tier_by(way);
            let mine: Vec<usize> = (0..reservations.len())
                .filter(|index| reservations[*index].way == way)
                .collect();
            if mine.is_empty() {
                continue;
            }
            let ended = mine.clone().into_iter();
            let ended = ended.map(|index| reservations[index].place);
            let tokens: Vec<Token> = mine
                .iter()
                .map(|index| reservations[*index].place.token)
                .collect();
            // From here on nobody can end these: the part tables go into room that is theirs.
            let Some(arenas) = self.tiers[tier].here() else {
                continue;
            };
            let claims = arenas.claim(&tokens);
            let mine = mine.into_iter().zip(claims);
            let mine: Vec<usize> = mine
                .filter_map(|(index, claimed)| claimed.then_some(index))
                .collect();
            // Another call may have claimed the others.
            let of = |index: &usize| reservations[*index].place.token;
            let claimed: Vec<Token> = mine.iter().map(of).collect();
            let mut written = Vec::with_capacity(mine.len());
            for index in &mine {
                let Reservation { place, parts, .. } = &reservations[*index];
                let mut parts = parts.to_vec();
                for (part, checksum) in parts.iter_mut().zip(&checksums[*index]) {
                    part.checksum = *checksum;
                }
                if parts.len() > 1 {
                    let ends = arenas.devices();
                    ends.write_parts(place, &parts)
                        .inspect_err(|_| arenas.unclaim(&claimed))?;
                }
                written.push((place.token, parts::record_checksum(&place.identity, &parts)));
            }
            let goes_on = way != Way::NearOnly && self.goes_on(tier);
            let committed = arenas.commit_claimed(&written, goes_on);
            let mut stay = Vec::new();
            let mut ledger = self.ledger.lock();
            for ((index, (_, checksum)), ok) in mine.iter().zip(&written).zip(&committed) {
                stored[*index] = *ok;
                let Identity { namespace, key } = &reservations[*index].place.identity;
                if *ok {
                    self.note_stored(*namespace, key, reservations[*index].place.len);
                }
                let place = Place {
                    checksum: *checksum,
                    ..reservations[*index].place
                };
                let share = ledger.held.remove(&(tier, place.token)).flatten();
                if goes_on && *ok && !self.edges[tier].admits(&place.identity, place.len) {
                    stay.push(place);
                } else if goes_on && *ok {
                    let share = share.or_else(|| self.share_of(tier, place.len));
                    stay.extend(match share {
                        Some(share) => self.send_later(&mut ledger, tier, place, share, Vec::new()),
                        None => Some(place),
                    });
                }
            }
            for token in &tokens {
                ledger.held.remove(&(tier, *token));
            }
            drop(ledger);
            self.tiers[tier].unpin(stay.iter());
            let ended: Vec<Place> = ended.collect();
            self.resolve(tier, &ended);
        }
        Ok(stored)
    }

    /// Gives reservations back. Every mover that had one of their placements must have stopped.
    pub fn abort(&self, reservations: &[Reservation]) {
        if self.gate.forked() {
            return;
        }
        for way in [Way::Through, Way::NearOnly, Way::Far] {
            let tier = self.tier_by(way);
            let mine = reservations
                .iter()
                .filter(|reservation| reservation.way == way);
            let places: Vec<Place> = mine.map(|reservation| reservation.place).collect();
            if places.is_empty() {
                continue;
            }
            let tokens: Vec<_> = places.iter().map(|place| place.token).collect();
            let arenas = self.tiers[tier].here();
            arenas.iter().for_each(|arenas| {
                arenas.abort(&tokens);
            });
            let mut ledger = self.ledger.lock();
            for token in &tokens {
                ledger.held.remove(&(tier, *token));
            }
            drop(ledger);
            self.resolve(tier, &places);
        }
    }
}
