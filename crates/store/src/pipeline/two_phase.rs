//! The two-phase verbs, for engines whose scheduler decides and whose workers move:
//! `reserve → move → commit | abort`; `pins` is the way back. A reservation belongs to the process
//! that made it; it ends by its verb or with that, never by time.

mod call;
mod ending;

use std::sync::Arc;

use kvdepot_arena::parts::{self, Parts};
use kvdepot_arena::{Cause, Error, Full, Identity, Key, NamespaceId, Place, Refused, Reserved};
use kvdepot_media::Checksum;

use super::Core;
use super::budget::Share;
use super::ledger::{Dues, Held, State};
use crate::config::Overload;
use crate::placement::{self, Holder};
use crate::tier::{Outside, Stage};
use call::{Call, Mine};

/// Space for a block that lookups find only after its commit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a reservation that nobody ends keeps its room for ever"]
pub struct Reservation {
    pub(crate) way: Way,
    /// Position of its tier in the pipeline.
    pub tier: usize,
    /// Location of its bytes.
    pub place: Place,
    pub(crate) parts: Parts,
    /// Where they go, where that is in no medium.
    pub(crate) outside: Option<Outside>,
    /// Holder of the reservation.
    pub holder: Holder,
}

/// Result of a call in which a block finds no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever asks has an answer for each"
)]
pub enum NoRoom {
    /// The other blocks are reserved.
    Skip = 0,
    /// The call fails, and all of its reservations are released.
    Fail = 1,
    /// Blocks after that one are not reserved: lookups of the prompt would never reach them.
    Stop = 2,
}

/// How a block gets to where it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Into the near tier, and from there to the far one, if there is one.
    Through,
    /// Into the near tier alone: the queue to the far one is full.
    NearOnly,
    /// Round the near tier, into this one.
    Far(usize),
}

impl Way {
    /// The tier that it leads to first.
    fn tier(self) -> usize {
        match self {
            Way::Far(tier) => tier,
            Way::Through | Way::NearOnly => 0,
        }
    }
}

impl Core {
    /// The first tier behind the near one that other processes can write and that takes a block of
    /// so many bytes; or none takes it, and the first of those says why.
    fn far_reached(&self, len: u64) -> Option<usize> {
        let reached = |at: &usize| self.takes_puts(*at) && is_reached(&self.tiers[*at]);
        let far = (1..self.tiers.len()).filter(reached);
        let takes = |at: &usize| !self.bypasses(*at, len);
        far.clone().find(takes).or_else(|| far.clone().next())
    }

    /// All ways, with those that lead to the same tier side by side.
    fn ways(&self) -> impl Iterator<Item = Way> {
        let far = (1..self.tiers.len()).map(Way::Far);
        [Way::Through, Way::NearOnly].into_iter().chain(far)
    }
}

/// Whether other processes can write into a tier.
fn is_reached(tier: &Stage) -> bool {
    match tier {
        Stage::Here(_) => true,
        Stage::Apart(apart) => apart.directory().is_some(),
    }
}

impl Reservation {
    /// Creates a reservation in the tier at `tier` of another process's depot.
    ///
    /// `lens` has the lengths of its parts in bytes.
    pub fn elsewhere(holder: Holder, tier: usize, place: Place, lens: &[u64]) -> Reservation {
        Reservation {
            // Only its owner needs to know.
            way: Way::Through,
            tier,
            place,
            parts: parts::blank(lens).into(),
            outside: None,
            holder,
        }
    }

    /// Returns the reservation with the location of a block outside of all media.
    pub fn outside(self, outside: Option<Outside>) -> Reservation {
        Reservation { outside, ..self }
    }

    /// Returns the location of the bytes for a worker.
    ///
    /// It is opaque, and valid until commit or abort.
    #[must_use]
    pub fn placement(&self) -> Vec<u8> {
        placement::encode(self.holder, &self.place, &self.parts, self.outside.as_ref())
    }

    /// Returns the location of a block outside of all media, or `None` for a block in a medium.
    #[must_use]
    pub fn place_outside(&self) -> Option<&Outside> {
        self.outside.as_ref()
    }

    /// Returns the key of the block.
    #[must_use]
    pub fn key(&self) -> Key {
        self.place.identity.key
    }

    /// Returns the number of parts for which a commit needs checksums.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Checks that `checksums` has one checksum per part.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] for another number of checksums.
    pub fn check(&self, checksums: &[Checksum]) -> Result<(), Error> {
        if self.parts.len() == checksums.len() {
            return Ok(());
        }
        Err(Error::input(
            "checksums",
            format!("{} checksums for a block", checksums.len()),
            format!("one checksum per part, {} in total", self.parts.len()),
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
        after: Option<Key>,
        blocks: &[(Key, Vec<u64>)],
    ) -> Result<Vec<Result<Reservation, Refused>>, Error> {
        let _pass = self.gate.enter_as("reserve", blocks.len())?;
        for (_, lengths) in blocks {
            parts::check(lengths)?;
        }
        let keys: Vec<Key> = blocks.iter().map(|(key, _)| *key).collect();
        let mut call = Call {
            core: self,
            holder,
            namespace,
            blocks,
            stamps: self.stamps_after(namespace, after, &keys),
            answers: vec![None; blocks.len()],
            ways: Vec::with_capacity(blocks.len()),
            again: Vec::new(),
        };
        let len = |at: usize| parts::payload_len(&blocks[at].1);
        let declined = self.declined(namespace, &keys, len).unwrap_or_default();
        call.choose(&declined);
        // What may not be written further away any more is reserved near after all.
        for way in self.ways().chain([Way::Through]) {
            let mine = call.ways.extract_if(.., |(_, other, _)| *other == way);
            let mine: Vec<Mine> = mine.map(|(index, _, share)| (index, share)).collect();
            if !mine.is_empty() {
                call.reserve(way, mine);
            }
        }
        let Call {
            answers,
            again,
            stamps,
            ..
        } = call;
        self.touch(namespace, &again);
        let is_full = |answer: &_| matches!(answer, Some(Err(Refused::Full(_))));
        let is_declined = |answer: &_| matches!(answer, Some(Err(Refused::Declined)));
        let first = answers.iter().position(is_full);
        if first.is_some() || answers.iter().any(is_declined) {
            self.note_refused(namespace, &keys, first, stamps);
        }
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
        let far = self.far_reached(len);
        let over = |tier: usize| self.edges[..tier].iter();
        if self.bypasses(0, len) {
            let Some(tier) = far else {
                return Err(self.refused(1, len, Some(Cause::Apart)));
            };
            if over(tier).all(|edge| edge.lets_by(identity, len).is_ok()) {
                return Ok((Way::Far(tier), None));
            }
            self.metrics.put_outcome(crate::Outcome::Declined);
            return Err(Refused::Declined);
        }
        // It stays near, and needs nothing of the queue.
        if self.edges[0].keeps(identity, len).is_some() {
            return Ok((Way::Through, None));
        }
        Ok(match self.edges[0].budget.admit(seat, len) {
            Some(share) => (Way::Through, Some(share)),
            // Where nothing further away can be written by others, a full queue delays nobody.
            // Nor where it does not go so far.
            None if self.overload == Overload::Wait => match far {
                Some(tier) if over(tier).all(|edge| edge.lets_by(identity, len).is_ok()) => {
                    (Way::Far(tier), None)
                }
                _ => (Way::Through, Some(self.edges[0].budget.take(seat, len))),
            },
            None => {
                self.metrics.put_outcome(crate::Outcome::Dropped);
                (Way::NearOnly, None)
            }
        })
    }

    /// The refusal of a block by a tier that was not asked (`cause`) or gave no answer (`None`).
    fn refused(&self, tier: usize, requested: u64, cause: Option<Cause>) -> Refused {
        cause.map_or(Refused::Declined, |cause| {
            Refused::Full(Full {
                tier: self.tiers[tier].name(),
                requested,
                cause,
            })
        })
    }

    /// Enters what a tier has answered for a block. What is given up is to be dropped without the
    /// ledger.
    fn note(
        &self,
        ledger: &mut State,
        way: Way,
        dues: Dues,
        answer: Result<Reserved, Refused>,
        given_up: &mut Vec<Reserved>,
    ) -> Result<Place, Refused> {
        let tier = way.tier();
        match answer {
            // Nobody may commit it any more, and who has joined it would wait for ever.
            Ok(reserved) if ledger.closing => {
                given_up.push(reserved);
                Err(Refused::Declined)
            }
            Ok(mut reserved) => {
                // It is the caller's, and as long as the caller's process.
                let (place, reserved) = match self.tiers[tier] {
                    Stage::Here(_) => (reserved.hand_out(), None),
                    Stage::Apart(_) => (*reserved, Some(reserved)),
                };
                let held = Box::new(Held { dues, reserved });
                ledger.held.insert((tier, place.token), held);
                Ok(place)
            }
            Err(Refused::Present(token)) => {
                if dues.share.is_some() {
                    // Unless it is gone again, in which case the next store writes it anew.
                    let _sent = self.send_on(ledger, tier, token, Vec::new());
                }
                Err(Refused::Present(token))
            }
            Err(Refused::Full(full)) if way == Way::NearOnly => Err(Refused::Full(Full {
                cause: Cause::Queue {
                    depth: self.edges[0].budget.depth(),
                },
                ..full
            })),
            Err(refused) => Err(refused),
        }
    }
}
