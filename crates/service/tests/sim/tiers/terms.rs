//! What goes on into a tier, and how long it may take to answer: the options of its section, and
//! what they promise.

use std::time::{Duration, Instant};

use kvdepot_store::Stats;
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::twin::Id;
use serde_json::{Value, json};

use super::world::{Flying, World};
use crate::world::{Law, law};

/// The least and the most bytes of a block that goes on into a tier, and how many bytes may go on
/// in an hour and in a day; 0 where there is no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// The tier in whose section they stand, where it is behind another one.
    pub tier: &'static str,
    pub block_min: u64,
    pub block_max: u64,
    pub hour: u64,
    pub day: u64,
}

/// How long the last tier may take for a lookup, and for anything else; `None` for the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub lookup: Duration,
    pub other: Duration,
}

/// The defaults.
pub const LIMITS: Limits = Limits {
    lookup: Duration::from_secs(1),
    other: Duration::from_secs(10),
};

/// A new hour begins for sure when so much time has passed.
const HOUR: Duration = Duration::from_secs(3600 + 120);

/// What somebody has offered to the first tier since the depot was opened, and when that was.
#[derive(Default)]
pub struct Offers {
    pub opened: Option<Instant>,
    pub offered: Vec<(Instant, u64)>,
}

impl Offers {
    /// What is under way may be let over an edge from now on only.
    pub fn are_late(&mut self) {
        let now = kvdepot_media::sim::now();
        for (at, _) in &mut self.offered {
            *at = now.unwrap_or(*at);
        }
    }
}

pub fn terms(rng: &mut Rng) -> Terms {
    let tier = *rng.pick(&["", "", "Far", "Far", "Mid", "Dax"]);
    let often = |rng: &mut Rng, each: &[u64]| *rng.pick(each);
    Terms {
        tier,
        block_min: often(rng, &[0, 0, 500, 4000]),
        block_max: often(rng, &[0, 0, 0, 8000]),
        hour: often(rng, &[0, 0, 20_000, 60_000, 200_000]),
        day: often(rng, &[0, 0, 0, 30_000, 100_000]),
    }
}

pub fn limits(rng: &mut Rng) -> Option<Limits> {
    let drawn = rng.once_in(2);
    let limits = Limits {
        lookup: Duration::from_millis(*rng.pick(&[50, 400, 3000])),
        other: Duration::from_millis(*rng.pick(&[200, 3000, 20_000])),
    };
    drawn.then_some(limits)
}

impl Terms {
    /// Into the section of its tier.
    pub fn put_into(&self, section: &mut Value) {
        let all = [
            ("block_min", self.block_min),
            ("block_max", self.block_max),
            ("write_budget_hour", self.hour),
            ("write_budget_day", self.day),
        ];
        for (name, value) in all.into_iter().filter(|(_, value)| *value > 0) {
            section[name] = json!(value);
        }
    }

    /// Whether a block of so many bytes never goes on.
    fn excludes(&self, len: u64) -> bool {
        len < self.block_min || self.block_max > 0 && len > self.block_max
    }

    fn budgets(&self) -> impl Iterator<Item = (u64, Duration)> {
        let day = Duration::from_secs(24 * 3600);
        let all = [(self.hour, Duration::from_secs(3600)), (self.day, day)];
        all.into_iter().filter(|(most, _)| *most > 0)
    }
}

impl World {
    /// The terms of a tier behind another one.
    fn terms_of(&self, tier: &str) -> Option<Terms> {
        let mut behind = self.shape.pipeline.split('|').skip(1);
        let terms = Some(self.shape.terms).filter(|terms| terms.tier == tier);
        terms.filter(|_| behind.any(|one| one == tier))
    }

    /// Somebody offers a block.
    pub fn offers(&self, len: u64) {
        if let Some(now) = kvdepot_media::sim::now() {
            self.offers.borrow_mut().offered.push((now, len));
        }
    }

    /// Nothing goes over an edge but what its terms let, and no more than its budgets.
    pub fn within_terms(&self) -> Law {
        let Some(depot) = self.depot.borrow().clone() else {
            return Ok(());
        };
        for shelf in &self.shelves {
            let Some(terms) = self.terms_of(self.section(shelf.name)) else {
                continue;
            };
            let arrived = shelf.arrived();
            for len in &arrived {
                law!(
                    !terms.excludes(*len),
                    "a block of {len} bytes has gone into {}: {terms:?}",
                    shelf.name
                );
            }
            self.within_budgets(shelf.name, &terms, arrived.iter().sum())?;
        }
        // What is read further away comes into it, too.
        if let Some(terms) = self.terms_of("Dax").filter(|_| !self.shape.promote) {
            let stored = stored_of(&depot.stats(), if self.shape.disk { "Nvme" } else { "Dax" });
            self.within_budgets("Dax", &terms, stored)?;
        }
        Ok(())
    }

    /// What was let over an edge in one hour may come in another, so all hours are looked at
    /// together.
    fn within_budgets(&self, name: &str, terms: &Terms, arrived: u64) -> Law {
        let opened = self.offers.borrow().opened;
        let passed = opened.zip(kvdepot_media::sim::now());
        let passed = passed.map_or(Duration::ZERO, |(then, now)| now - then);
        for (most, span) in terms.budgets() {
            let spans = passed.as_secs() / span.as_secs() + 1;
            law!(
                arrived <= most * spans,
                "{arrived} bytes have gone into {name} in {passed:?}: {terms:?}"
            );
        }
        Ok(())
    }

    /// A put was declined: there is a reason, and the block stays where it is.
    pub fn declined(&self, one: &Flying, id: Id) -> Law {
        let len = self.payload(id);
        let refused = self.shelves.iter().any(|shelf| shelf.has_refused());
        let second = self.shape.pipeline.split('|').skip(1);
        let is_first = second.clone().any(|tier| tier == self.shape.second);
        let terms = second.filter_map(|tier| self.terms_of(tier)).next();
        let may = terms.is_some_and(|terms| terms.excludes(len) || self.may_be_spent(&terms));
        law!(
            refused || is_first || may,
            "a put of {id:?}, {len} bytes, was declined for no reason"
        );
        let Some(depot) = self.depot.borrow().clone() else {
            return Ok(());
        };
        let stats = depot.stats();
        let stays = one.idle
            && self.shape.pipeline.starts_with("Cache|")
            && self.shape.cache >= 1024
            && self.storms.get() == one.storms
            && self.inner.get() == one.inner
            && self.block(id).disturbed < one.since
            && stats.tiers[0].evicted_blocks == 0;
        law!(
            !stays || self.are_near(id.0, &[id.1])?[0],
            "a put of {id:?} was declined, and the block has not stayed near"
        );
        Ok(())
    }

    /// Whether so much was offered that a budget may be used up.
    fn may_be_spent(&self, terms: &Terms) -> bool {
        let now = kvdepot_media::sim::now();
        let offers = self.offers.borrow();
        let all: u64 = offers.offered.iter().map(|(_, len)| len).sum();
        let lately = offers.offered.iter();
        let lately = lately.filter(|(at, _)| now.is_none_or(|now| now - *at <= HOUR));
        let lately: u64 = lately.map(|(_, len)| len).sum();
        terms.hour > 0 && lately > terms.hour || terms.day > 0 && all > terms.day
    }

    /// A tier as pipelines of histories name it.
    fn section(&self, name: &'static str) -> &'static str {
        match name {
            "Posix" => "Far",
            other => other,
        }
    }
}

fn stored_of(stats: &Stats, tier: &str) -> u64 {
    let tier = stats.tiers.iter().find(|one| one.tier == tier);
    tier.map_or(0, |tier| tier.stored_bytes)
}
