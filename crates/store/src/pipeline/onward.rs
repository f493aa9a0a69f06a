//! Where blocks enter the pipeline, and how they go on from tier to tier.

use kvdepot_arena::{Place, Token};

use super::Core;
use super::budget::Share;
use super::caller::Caller;
use super::ledger::{State, Waiter};
use crate::config::Overload;

impl Core {
    /// Sees to it that a block that is published in a tier of arenas is on its way to the next
    /// one, where it is not. False when it is gone again.
    pub(super) fn send_on(
        &self,
        ledger: &mut State,
        tier: usize,
        token: Token,
        waiters: Vec<Waiter>,
    ) -> bool {
        if let Some(others) = ledger.waiting.get_mut(&token) {
            others.waiters.extend(waiters);
            return true;
        }
        // Published, and neither there nor on its way: it had failed.
        let place = self.tiers[tier].here();
        let Some(place) = place.and_then(|arenas| arenas.pin_token(token)) else {
            return false;
        };
        // Whoever put it, it goes on by itself.
        let share = self.edges[tier].budget.take(0, place.len);
        let twice = self.send_later(ledger, tier, place, share, waiters);
        self.tiers[tier].unpin(twice.iter());
        true
    }

    /// Puts a pinned block of a tier on its way to the next one, with what it has of the queue.
    /// Answers its pin, which is not needed, when it is on its way already.
    pub(super) fn send_later(
        &self,
        ledger: &mut State,
        tier: usize,
        place: Place,
        share: Share,
        waiters: Vec<Waiter>,
    ) -> Option<Place> {
        let queued = self.ledger.enqueue(ledger, tier, place, share, waiters);
        (!queued).then_some(place)
    }

    /// The tier that a block of a put enters, with its share of the queue behind that; `None` where
    /// it is dropped. A tier can take it, and so can its queue: a full one delays, by sending what
    /// comes to the next tier, at whose speed that goes. It is one that the caller's lanes reach.
    pub(super) fn entrance(&self, caller: &Caller, len: u64) -> Option<(usize, Option<Share>)> {
        let seat = caller.seat();
        let reaches = |tier: usize| {
            let apart = self.tiers[tier].apart();
            apart.is_none_or(|apart| caller.reaches(apart))
        };
        for (tier, edge) in self.edges.iter().enumerate() {
            if self.bypasses(tier, len) || !reaches(tier) {
                continue;
            }
            match edge.budget.admit(seat, len) {
                Some(share) => return Some((tier, Some(share))),
                None if self.overload == Overload::Wait => {}
                // It stays where it is acknowledged, and goes no further.
                None if tier >= self.ack => return Some((tier, None)),
                None => return None,
            }
        }
        let last = self.edges.len();
        if reaches(last) {
            return Some((last, None));
        }
        // Where nothing further away can be written, a full queue delays nobody.
        let (near, _) = self.arenas().find(|(_, tier)| len <= tier.block_max())?;
        Some((near, self.share_of(near, len)))
    }

    /// What a block has of the queue behind a tier that it was not admitted to: room where a put
    /// waits for it, and else only where there is some.
    pub(super) fn share_of(&self, tier: usize, len: u64) -> Option<Share> {
        let edge = self.edges.get(tier)?;
        match tier < self.ack {
            true => Some(edge.budget.take(0, len)),
            false => edge.budget.admit(0, len),
        }
    }
}
