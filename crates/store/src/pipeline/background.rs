//! The threads of the edges, which copy blocks on and promote. What goes on comes first: it is what
//! acknowledges.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_arena::{Error, Identity, Place, clock, held};
use kvdepot_host::cpu;
use kvdepot_media::is_simulated;
use parking_lot::Mutex;

use super::budget::Share;
use super::ledger::{Promotion, Queues};
use super::replicate::{Arrival, Replica, There};
use super::spending::Spent;
use super::{Core, Edge};
use crate::config::Overload;
use crate::task::Outcome;
use crate::tier::Stage;

/// Bytes moved in one go: a few tens of milliseconds of copying, so that a close or a promotion
/// never waits long, and enough to keep all lanes busy.
const BATCH_BYTES: u64 = 64 << 20;
/// The same of promotions: their lanes get a few per cent of a busy processor, and write-backs
/// wait for the batch under way.
const PROMOTE_BYTES: u64 = 4 << 20;
const BATCH_BLOCKS: usize = 1024;
/// Promotions that are looked at for one batch, under the ledger: of small blocks there are very
/// many.
const LOOKS: usize = 1024;
/// After so many batches of others the promotion that has waited longest has its turn.
const PASSED_MAX: u32 = 8;
/// Pause before a block is tried again that somebody else is writing to the far tier.
const RETRY: Duration = Duration::from_millis(1);
/// Pause before the far tier is asked again while processes of its last owner may still write
/// there: short against an engine's start, and nothing to speak of in the meantime.
const RETRY_ORPHANS: Duration = Duration::from_millis(50);

/// The running threads.
pub(crate) struct Background {
    threads: Mutex<Vec<JoinHandle<()>>>,
}

enum Work {
    WriteBack(Vec<Place>),
    Promote(Vec<Promotion>),
}

impl Background {
    /// Starts the threads, where the pipeline has more than one tier.
    pub(crate) fn start(core: &Arc<Core>) -> Result<Background, Error> {
        let background = Background {
            threads: Mutex::default(),
        };
        let edges = core.edges.iter().enumerate().filter(|_| !is_simulated());
        for (at, edge) in edges {
            for _ in 0..edge.batches {
                let core_ = Arc::clone(core);
                let spawned = cpu::spawn("kvdepot-backgnd", move || core_.run(at));
                let spawned = spawned.map_err(|source| Error::Io {
                    path: "cannot start a thread".into(),
                    source,
                });
                let thread = spawned.inspect_err(|_| background.stop(core))?;
                background.threads.lock().push(thread);
            }
        }
        Ok(background)
    }

    /// Ends the threads, and answers everybody who still waits.
    pub(crate) fn stop(&self, core: &Core) {
        let left = core.ledger.stop();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!(
                    "internal error: write-back thread panicked; its queued blocks were not \
                     written back"
                );
            }
        }
        for (tier, place) in left {
            core.let_go(tier, place);
        }
    }
}

impl Core {
    fn run(&self, edge: usize) {
        while let Some(work) = self.next_work(edge) {
            self.work(edge, work);
        }
    }

    fn work(&self, edge: usize, work: Work) {
        match work {
            Work::WriteBack(places) => self.write_back(edge, places),
            Work::Promote(blocks) => self.promote_blocks(blocks),
        }
    }

    /// Does what a thread would do next; false when there is nothing.
    #[cfg(feature = "sim")]
    pub(crate) fn step(&self) -> bool {
        let next = {
            let mut ledger = self.ledger.lock();
            if ledger.stop {
                return false;
            }
            // One that tries the same again and again keeps the others from nothing.
            let (turn, count) = (ledger.turn, ledger.edges.len());
            let mut edges = (0..count).map(|at| (turn + at) % count);
            let goes_on = !self.gate.hurries();
            let next = edges.find_map(|at| {
                Some((at, ledger.edges[at].take_work(goes_on, self.loads.joins())?))
            });
            ledger.turn = next.as_ref().map_or(0, |(at, _)| at + 1);
            next
        };
        let Some((edge, work)) = next else {
            return false;
        };
        self.work(edge, work);
        true
    }

    /// Takes the next work of an edge, or `None` at the end.
    fn next_work(&self, edge: usize) -> Option<Work> {
        let mut ledger = self.ledger.lock();
        loop {
            if ledger.stop {
                return None;
            }
            let queues = &mut ledger.edges[edge];
            let rested = queues.rest_until.is_none_or(|end| end <= clock::now());
            // Once the time of a close is over nothing goes on: the end answers what is left.
            let goes_on = rested && !self.gate.hurries();
            if let Some(work) = queues.take_work(goes_on, self.loads.joins()) {
                return Some(work);
            }
            match queues.rest_until.filter(|_| !rested) {
                Some(end) => {
                    ledger.wait_until(&self.ledger.work[edge], end);
                }
                None => ledger.wait(&self.ledger.work[edge]),
            }
        }
    }

    /// Copies blocks of the nearer tier of an edge to the other one.
    fn write_back(&self, edge: usize, places: Vec<Place>) {
        let near = &self.tiers[edge];
        let (mut again, mut pause) = (Vec::new(), RETRY);
        // Where the queue behind the other tier is full, this one waits for it.
        let waits = self.overload == Overload::Wait && self.goes_on(edge + 1);
        let mut shares: Vec<Option<Share>> = Vec::with_capacity(places.len());
        let mut admitted = places;
        let behind = self.edges.get(edge + 1);
        admitted.retain(|place| {
            let goes_on =
                behind.filter(|behind| behind.keeps(&place.identity, place.len).is_none());
            let share = goes_on.and_then(|_| self.share_of(edge + 1, place.len));
            let fits = |edge: &Edge| place.len <= edge.budget.depth();
            let is_late = share.is_none() && waits && goes_on.is_some_and(fits);
            match is_late {
                true => again.push(*place),
                false => shares.push(share),
            }
            !is_late
        });
        let places = &admitted;
        let (mut ended, mut corrupt) = (Vec::new(), Vec::new());
        let arrivals = self.send_over(edge, places);
        for ((place, share), (to, (replica, there))) in places.iter().zip(shares).zip(arrivals) {
            let outcome = match replica {
                // Whoever put it did so before it was removed.
                Replica::Stored | Replica::Removed => Outcome::Done,
                Replica::Full => Outcome::Full,
                Replica::Declined => Outcome::Declined,
                // A close has no more time for it.
                Replica::Failed if self.gate.hurries() => {
                    again.push(*place);
                    continue;
                }
                Replica::Failed => Outcome::Dropped,
                Replica::Corrupt => {
                    tracing::warn!(key = %place.identity.key, tier = near.name(),
                        "checksum mismatch during write-back; block removed");
                    corrupt.push(*place);
                    continue;
                }
                Replica::Busy | Replica::Orphans => {
                    if replica == Replica::Orphans {
                        pause = RETRY_ORPHANS;
                    }
                    again.push(*place);
                    continue;
                }
            };
            // What the queue behind the next tier has for it.
            let share = share.filter(|_| to == edge + 1);
            ended.push((*place, outcome, to, there, share));
        }
        let full = ended
            .iter()
            .filter(|(_, outcome, ..)| *outcome == Outcome::Full);
        self.note_not_written(&full.map(|(place, ..)| place).collect::<Vec<_>>());
        near.unpin(ended.iter().map(|(place, ..)| place));
        for (place, outcome, to, there, share) in ended {
            let there = there.and_then(|there| self.keep(to, &place, there));
            let behind = self.edges.get(to);
            let passage = behind.filter(|_| there.is_some());
            let passage = passage.map(|edge| edge.admits(&place.identity, place.len));
            let stays = matches!(passage, Some(Err(_)));
            let share = share.or_else(|| self.share_of(to, place.len));
            match there.zip(share).zip(passage.and_then(Result::ok)) {
                Some(((there, share), spent)) => {
                    self.arrive((edge, to), &place, there, (share, spent));
                }
                None => {
                    self.tiers[to].unpin(there.iter());
                    let outcome = match to < self.ack && outcome == Outcome::Done {
                        true if stays => Outcome::Declined,
                        // One that waits to go on has been lost on its way.
                        true => Outcome::Dropped,
                        false => outcome,
                    };
                    self.come_to_rest(edge, &place, outcome);
                }
            }
        }
        if !again.is_empty() {
            self.try_again(edge, again, pause);
        }
        near.discard_and_unpin(&corrupt);
        for place in corrupt {
            self.come_to_rest(edge, &place, Outcome::Corrupt);
        }
    }

    /// Puts blocks back into the queue of an edge, which rests for that long.
    fn try_again(&self, edge: usize, again: Vec<Place>, pause: Duration) {
        let mut ledger = self.ledger.lock();
        if ledger.stop {
            drop(ledger);
            return self.tiers[edge].unpin(again.iter());
        }
        let queues = &mut ledger.edges[edge];
        queues.outward.extend(again);
        // Promotions have their turn meanwhile.
        queues.rest_until = clock::now().checked_add(pause);
    }

    /// Copies blocks over an edge, each with the tier that it came to. What passes a tier by,
    /// because that does not answer, has no room or does not take it, goes over the edge behind it
    /// all the same: where it is still to be acknowledged, to one that may do that.
    fn send_over(&self, edge: usize, places: &[Place]) -> Vec<(usize, Arrival)> {
        let arrived = self.replicate(edge, edge + 1, places, &self.copier);
        let mut arrived: Vec<_> = arrived.into_iter().map(|one| (edge + 1, one)).collect();
        let refused = |(_, (replica, _)): &(usize, Arrival)| {
            matches!(replica, Replica::Full | Replica::Failed | Replica::Declined)
        };
        let mut passing: Vec<usize> = (0..places.len()).collect();
        for to in edge + 2..self.tiers.len() {
            let over = &self.edges[to - 1];
            passing.retain(|at| {
                let place = &places[*at];
                if !refused(&arrived[*at]) {
                    return false;
                }
                let passes = over.lets_by(&place.identity, place.len).is_ok();
                if !passes {
                    arrived[*at].1.0 = Replica::Declined;
                }
                passes
            });
            if passing.is_empty() {
                break;
            }
            if edge < self.ack && !self.takes_puts(to) {
                continue;
            }
            let these: Vec<Place> = passing.iter().map(|at| places[*at]).collect();
            let further = self.replicate(edge, to, &these, &self.copier);
            for (at, one) in passing.iter().zip(further) {
                arrived[*at] = (to, one);
            }
        }
        arrived
    }

    /// A block goes no further than behind an edge.
    fn come_to_rest(&self, edge: usize, place: &Place, outcome: Outcome) {
        self.count_at_rest(edge, place, outcome);
        self.ledger.finish(place, outcome);
    }

    /// Counts what became of a put, at the edge to where it is acknowledged.
    fn count_at_rest(&self, edge: usize, place: &Place, outcome: Outcome) {
        if edge >= self.ack {
            return;
        }
        if outcome != Outcome::Done {
            // It has not left unread: it did not arrive.
            self.forget(place.identity.namespace, &[place.identity.key]);
        }
        self.metrics.put_outcome(outcome);
    }

    /// Pins a block that has come to a tier, if it goes on from there and is not gone again.
    fn keep(&self, tier: usize, place: &Place, there: There) -> Option<Place> {
        let Identity { namespace, key } = place.identity;
        match (there, &self.tiers[tier]) {
            (There::Pinned(place), _) => Some(place),
            _ if !self.goes_on(tier) => None,
            (There::Named(token), Stage::Here(arenas)) => arenas.pin_token(token),
            (There::Named(_), Stage::Apart(apart)) => {
                let pinned = apart.pin(namespace, &[key], &[]).wait();
                pinned.and_then(|pinned| pinned.into_iter().next().flatten())
            }
        }
    }

    /// A block has come over an edge to a tier from which it goes on, and is pinned there.
    fn arrive(
        &self,
        (edge, tier): (usize, usize),
        place: &Place,
        there: Place,
        paid: (Share, Spent),
    ) {
        let waits = tier < self.ack;
        // Used when it was used where it comes from.
        let there = Place {
            stamp: place.stamp,
            ..there
        };
        let mut ended = Vec::new();
        let twice = {
            let mut ledger = self.ledger.lock();
            // Who comes from now on finds it on its way from here.
            let before = ledger.waiting.remove(&place.token);
            match ledger.stop {
                // Who waits has been told.
                true => Some(there),
                false => {
                    let mut waiters = before.map(|before| before.waiters).unwrap_or_default();
                    if !waits {
                        ended = std::mem::take(&mut waiters);
                    }
                    self.send_later(&mut ledger, tier, there, paid, waiters)
                }
            }
        };
        self.tiers[tier].unpin(twice.iter());
        if !waits {
            self.count_at_rest(edge, place, Outcome::Done);
        }
        for waiter in ended {
            waiter.task.acknowledge(waiter.index, Outcome::Done);
        }
        // What has been sent from there since is not ended by this.
        self.ledger.look_drained();
    }
}

impl Queues {
    /// Position of the next promotion that gets wait for, when there have been so many `joins`. All
    /// are looked at once more after a join, [`LOOKS`] of them for each batch, however many come in
    /// the meantime.
    fn next_joined(&mut self, joins: u64) -> Option<usize> {
        for _ in 0..LOOKS {
            if self.looked >= self.round {
                if self.joins != joins {
                    (self.joins, self.looked) = (joins, 0);
                }
                self.round = self.promotions.len();
            }
            let one = self.promotions.get(self.looked)?;
            held::worked();
            if one.is_joined() {
                return Some(self.looked);
            }
            self.looked += 1;
        }
        None
    }

    /// What is to be done next; what goes on only when those that could not be written have
    /// `rested`.
    fn take_work(&mut self, rested: bool, joins: u64) -> Option<Work> {
        // What gets wait for and what goes on take turns.
        let is_due = self.passed >= PASSED_MAX && !self.promotions.is_empty();
        let joined = self.next_joined(joins).filter(|_| !is_due);
        let went_on = std::mem::take(&mut self.went_on);
        if rested && !self.outward.is_empty() && !(is_due || went_on && joined.is_some()) {
            self.went_on = true;
            self.passed = match self.promotions.is_empty() {
                true => 0,
                false => self.passed + 1,
            };
            let mut bytes = 0;
            let fits = |place: &&Place| {
                bytes += place.len;
                bytes <= BATCH_BYTES
            };
            let batch = self.outward.iter().take(BATCH_BLOCKS);
            let count = batch.take_while(fits).count();
            return Some(Work::WriteBack(
                self.outward.drain(..count.max(1)).collect(),
            ));
        }
        let at = joined.unwrap_or(0);
        self.passed = if at > 0 { self.passed + 1 } else { 0 };
        let first = self.promotions.get(at)?;
        let (tier, awaited) = (first.tier, first.is_awaited());
        let most = if awaited { BATCH_BYTES } else { PROMOTE_BYTES };
        let mut bytes = first.place.len;
        let fits = |next: &&Promotion| {
            bytes += next.place.len;
            next.tier == tier && next.is_awaited() == awaited && bytes <= most
        };
        let more = self.promotions.range(at + 1..).take_while(fits);
        let end = at + 1 + more.count();
        for count in [&mut self.looked, &mut self.round] {
            *count -= end.min(*count).saturating_sub(at);
        }
        Some(Work::Promote(self.promotions.drain(at..end).collect()))
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_arena::{Key, NamespaceId};

    use super::*;
    use crate::pipeline::Loads;
    use crate::pipeline::loads::Load;

    fn promotion(number: u8, load: Option<Load>) -> Promotion {
        let place = Place::of(Identity {
            namespace: NamespaceId([0; 16]),
            key: Key([number; 32]),
        });
        Promotion {
            tier: 1,
            place,
            waiter: None,
            busy_until: None,
            load,
        }
    }

    #[test]
    fn no_promotion_waits_for_ever_behind_others() {
        let loads = Loads::of_one_tier();
        for joins in [false, true] {
            let mut queues = Queues::default();
            queues.promotions.push_back(promotion(0, None));
            let mut batches = 0;
            let first = loop {
                batches += 1;
                assert!(batches < 100, "others come first for ever");
                queues.outward.push_back(promotion(1, None).place);
                if joins {
                    let load = loads.joined(promotion(batches, None).place.identity);
                    queues.promotions.push_back(promotion(batches, Some(load)));
                }
                match queues.take_work(true, loads.joins()) {
                    Some(Work::Promote(blocks)) if blocks[0].place.identity.key.0 == [0; 32] => {
                        break blocks;
                    }
                    other => assert!(other.is_some()),
                }
            };
            assert_eq!(
                first.len(),
                1,
                "those that are waited for have their own batches"
            );
            assert_eq!(u32::from(batches), PASSED_MAX + 1);
        }
    }

    #[test]
    fn a_promotion_is_looked_at_once_unless_somebody_has_joined_one() {
        const MANY: u64 = 1000;
        let loads = Loads::of_one_tier();
        let _elsewhere = loads.joined(promotion(1, None).place.identity);
        let mut queues = Queues::default();
        for number in 0..MANY {
            let mut one = promotion(0, None);
            one.place.identity.key.0[1..9].copy_from_slice(&number.to_le_bytes());
            // Four are a batch.
            one.place.len = PROMOTE_BYTES / 4;
            one.load = loads.claim(1, one.place.identity);
            queues.promotions.push_back(one);
        }
        let mut next = || match queues.take_work(true, loads.joins()) {
            Some(Work::Promote(blocks)) => blocks,
            other => {
                assert!(other.is_none());
                Vec::new()
            }
        };
        let before = held::work().mine;
        let first = next();
        assert_eq!((first.len(), first[0].is_joined()), (4, false));
        // One in the middle of those that nobody had joined.
        let mut identity = promotion(0, None).place.identity;
        identity.key.0[1..9].copy_from_slice(&(MANY / 2).to_le_bytes());
        loads.join(identity);
        let joined = next();
        assert_eq!((joined.len(), joined[0].place.identity), (1, identity));
        let mut left = MANY as usize - 5;
        while left > 0 {
            let batch = next().len();
            assert!(batch > 0);
            left -= batch;
        }
        let work = held::work().mine - before;
        assert!(work < 4 * MANY, "{work} steps for {MANY} promotions");
    }

    #[test]
    fn a_promotion_that_is_joined_late_waits_for_no_others_that_come_behind_it() {
        let loads = Loads::of_one_tier();
        let of = |number| promotion(number, None).place.identity;
        let mut queues = Queues::default();
        for number in [0, 1] {
            let load = loads.claim(1, of(number));
            queues.promotions.push_back(promotion(number, load));
        }
        // Before each batch one arrives that was joined before; number 1 is joined after the first
        // batch.
        let mut found = Vec::new();
        for number in 2..5 {
            let load = loads.joined(of(number));
            queues.promotions.push_back(promotion(number, Some(load)));
            match queues.take_work(true, loads.joins()) {
                Some(Work::Promote(blocks)) => found.push(blocks[0].place.identity),
                _ => panic!("there are promotions"),
            }
            if number == 2 {
                loads.join(of(1));
            }
        }
        assert_eq!(found, [2, 1, 4].map(of));
    }

    #[test]
    fn a_batch_looks_at_few_promotions_however_many_there_are_and_are_joined() {
        const MANY: u64 = 8 * LOOKS as u64;
        let loads = Loads::of_one_tier();
        let name = |number: u64| {
            let mut identity = promotion(0, None).place.identity;
            identity.key.0[1..9].copy_from_slice(&number.to_le_bytes());
            identity
        };
        let mut queues = Queues::default();
        for number in 0..MANY {
            let mut one = promotion(0, None);
            one.place.identity = name(number);
            // Four are a batch.
            one.place.len = PROMOTE_BYTES / 4;
            one.load = loads.claim(1, one.place.identity);
            queues.promotions.push_back(one);
        }
        let mut next = || {
            let before = held::work().mine;
            let work = queues.take_work(true, loads.joins());
            let looks = held::work().mine - before;
            assert!(looks <= LOOKS as u64, "{looks} looks");
            match work {
                Some(Work::Promote(blocks)) => blocks,
                _ => panic!("there are promotions"),
            }
        };
        // Somebody joins a load before each batch, and at last one that has been looked at.
        let mut joined = Vec::new();
        for number in 0..3 {
            joined.push(loads.joined(name(MANY + number)));
            assert_eq!(next().len(), 4);
        }
        loads.join(name(100));
        let mut found = Vec::new();
        for number in 3..5 + MANY / LOOKS as u64 {
            joined.push(loads.joined(name(MANY + number)));
            found.extend(next().into_iter().filter(Promotion::is_joined));
        }
        let found: Vec<_> = found.iter().map(|one| one.place.identity).collect();
        assert_eq!(found, [name(100)]);
        drop(joined);
    }
}
