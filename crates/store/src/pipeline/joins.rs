//! Calls that want the same keys: each shares the outcome of the first, and takes over if that
//! aborts.

use kvdepot_arena::held::Guard;
use kvdepot_arena::{Identity, NamespaceId, Place, Refused, Reserved, Token, Wanted};

use super::Core;
use super::ledger::{Joiner, State};
use crate::task::Outcome;
use crate::tier::{Arenas, Stage};

impl Core {
    /// Reserves room in a tier, and comes back with the ledger, so that the caller registers with
    /// the reservations of others before they can end. What must go first goes while the ledger is
    /// free. A key that is being written to a nearer tier is not written here, too: the queue may
    /// have filled between two calls. (The other way round it is: whoever comes second need not
    /// keep its buffers until the first has committed.)
    pub(super) fn reserve_locked(
        &self,
        tier: usize,
        into: &Arenas,
        namespace: NamespaceId,
        blocks: &[Wanted],
    ) -> (Guard<'_, State>, Vec<Result<Reserved, Refused>>) {
        let mut spaces = None;
        let mut elsewhere = vec![None; blocks.len()];
        let mut wanted: Vec<Wanted> = blocks.to_vec();
        loop {
            let ledger = self.ledger.lock();
            let now = self.reserved_nearer(tier, namespace, blocks);
            if now != elsewhere {
                // What was made room for may be another selection of them.
                spaces = None;
                let here = blocks.iter().zip(&now).filter(|(_, there)| there.is_none());
                wanted = here.map(|(wanted, _)| *wanted).collect();
                elsewhere = now;
            }
            if let Some(answers) = into.reserve(namespace, &wanted, spaces.take()) {
                self.evict_ahead(tier);
                let mut answers = answers.into_iter();
                let each = elsewhere.into_iter();
                let answers = each.filter_map(|there| match there {
                    Some(refused) => Some(Err(refused)),
                    None => answers.next(),
                });
                return (ledger, answers.collect());
            }
            drop(ledger);
            spaces = Some(into.make_room(namespace, &wanted));
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
            let of = ended
                .iter()
                .filter_map(|place| ledger.joiners.remove(&(tier, place.token)));
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
        for identity in written {
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
            for identity in stored {
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
            let of = ended
                .iter()
                .filter_map(|identity| ledger.written.remove(&(tier, *identity)));
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
