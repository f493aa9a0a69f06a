//! Calls that want the same keys: each shares the outcome of the first, and takes over if that
//! aborts.

use kvdepot_arena::{Identity, NamespaceId, Place, Refused, Reserved, Token, Wanted};

use super::Core;
use super::ledger::Joiner;
use crate::task::Outcome;
use crate::tier::{Arenas, Stage};

impl Core {
    /// Reserves room in a tier of arenas, without the ledger. A caller that joins a reservation of
    /// another call checks under the ledger that it has not ended
    /// ([`reserved_now`](Core::reserved_now)).
    pub(super) fn reserve_here(
        &self,
        tier: usize,
        into: &Arenas,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Result<Reserved, Refused>> {
        self.unless_nearer(tier, namespace, blocks, |wanted| {
            let answers = into.reserve_waiting(namespace, wanted);
            self.evict_ahead(tier);
            answers
        })
    }

    /// Has `reserve` answer those blocks that are not being written to a nearer tier: the queue may
    /// have filled between two calls for the same key. (The other way round both are written: the
    /// second need not keep its buffers until the first has committed.)
    pub(super) fn unless_nearer(
        &self,
        tier: usize,
        namespace: NamespaceId,
        blocks: &[Wanted],
        reserve: impl FnOnce(&[Wanted]) -> Vec<Result<Reserved, Refused>>,
    ) -> Vec<Result<Reserved, Refused>> {
        let nearer = self.reserved_nearer(tier, namespace, blocks);
        let here = blocks
            .iter()
            .zip(&nearer)
            .filter(|(_, nearer)| nearer.is_none());
        let here: Vec<Wanted> = here.map(|(wanted, _)| *wanted).collect();
        let mut answers = reserve(&here).into_iter();
        let mut next = || answers.next().unwrap_or(Err(Refused::Declined));
        let each = nearer.into_iter();
        each.map(|nearer| nearer.map_or_else(&mut next, Err))
            .collect()
    }

    /// The reservation of a block in this tier or a nearer one. Under the ledger it is joined
    /// before it ends.
    pub(super) fn reserved_now(
        &self,
        tier: usize,
        namespace: NamespaceId,
        block: &Wanted,
    ) -> Option<Token> {
        let found = self.reserved_nearer(tier + 1, namespace, std::slice::from_ref(block));
        match found.first() {
            Some(Some(Refused::Reserved(token))) => Some(*token),
            _ => None,
        }
    }

    /// Which of these blocks are being written to a nearer tier than this one.
    pub(super) fn reserved_nearer(
        &self,
        tier: usize,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> Vec<Option<Refused>> {
        let mut answers = vec![None; blocks.len()];
        for nearer in self.tiers[..tier].iter().filter_map(Stage::here) {
            nearer.reserved(namespace, blocks, &mut answers);
        }
        answers
    }

    /// The tier of arenas that made a token.
    pub(super) fn tier_of(&self, token: Token) -> Option<usize> {
        let made = |tier: &Stage| tier.here().is_some_and(|arenas| arenas.made(token));
        self.tiers.iter().position(made)
    }

    /// Ends reservations for those who joined them: each starts over, finds the block published
    /// and shares its fate, or takes over if it is gone.
    pub(super) fn resolve(&self, tier: usize, ended: &[Place]) {
        if self.tiers[tier].apart().is_some() {
            let ended: Vec<Identity> = ended.iter().map(|place| place.identity).collect();
            return self.resolve_late(tier, &ended);
        }
        let joiners: Vec<Joiner> = {
            let mut ledger = self.ledger.lock();
            if ledger.joiners.is_empty() {
                return;
            }
            let of = ended.iter().enumerate().filter_map(|(at, place)| {
                ledger.take_turns(at);
                ledger.joiners.remove(&(tier, place.token))
            });
            of.flatten().collect()
        };
        start_over(joiners);
    }

    /// Reservations that nothing is written to end, and who has joined them begins anew.
    pub(super) fn give_up(&self, tier: usize, reserved: Vec<Reserved>) {
        let ended: Vec<Place> = reserved.iter().map(|one| **one).collect();
        drop(reserved);
        self.resolve(tier, &ended);
    }

    /// A tier that may answer late is about to be asked to publish these.
    pub(super) fn publishes(&self, tier: usize, written: impl Iterator<Item = Identity>) {
        let mut ledger = self.ledger.lock();
        for (at, identity) in written.enumerate() {
            ledger.take_turns(at);
            if let Some(written) = ledger.written.get_mut(&(tier, identity)) {
                written.before = written.joiners.len();
            }
        }
    }

    /// Tells those who had joined what a tier that may answer late has published: none of them asks
    /// it again, and may hear nothing.
    pub(super) fn share_done(&self, tier: usize, stored: impl Iterator<Item = Identity>) {
        if self.tiers[tier].apart().is_none() || tier < self.ack {
            return;
        }
        let joiners: Vec<Joiner> = {
            let mut ledger = self.ledger.lock();
            let mut joiners = Vec::new();
            for (at, identity) in stored.enumerate() {
                ledger.take_turns(at);
                if let Some(written) = ledger.written.get_mut(&(tier, identity)) {
                    let before = std::mem::take(&mut written.before);
                    joiners.extend(written.joiners.drain(..before));
                }
            }
            joiners
        };
        for joiner in joiners {
            joiner.call.refuse(joiner.index, Outcome::Done);
        }
    }

    /// The same of a tier that may answer late.
    pub(super) fn resolve_late(&self, tier: usize, ended: &[Identity]) {
        let joiners: Vec<Joiner> = {
            let mut ledger = self.ledger.lock();
            let of = ended.iter().enumerate().filter_map(|(at, identity)| {
                ledger.take_turns(at);
                ledger.written.remove(&(tier, *identity))
            });
            of.flat_map(|written| written.joiners).collect()
        };
        start_over(joiners);
    }
}

fn start_over(joiners: Vec<Joiner>) {
    for joiner in joiners {
        joiner.call.start_over(joiner.index);
    }
}
