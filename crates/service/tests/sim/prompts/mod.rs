//! Histories of prompts that are larger than an eighth of a tier, among usual ones: what stays and
//! what is evicted, in each tier by itself and behind a memory.

mod depot;
mod steps;

use depot::PromptDepot;
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use steps::{Deed, Shape};

use crate::world::Law;

/// Histories of large prompts.
pub struct Prompts;

impl Subject for Prompts {
    type Shape = Shape;
    type Step = Deed;

    fn name(&self) -> &'static str {
        "prompts"
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Deed>) {
        (steps::shape(rng), steps::deeds(rng))
    }

    fn run(&self, history: &History<Shape, Deed>, tally: &mut Tally) -> Law {
        let mut depot = PromptDepot::new(&history.shape);
        let ran = depot.live(&history.steps);
        *tally = std::mem::take(tally).plus(&depot.tally);
        ran
    }

    fn simpler(&self, deed: &Deed) -> Vec<Deed> {
        steps::simpler(deed)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        steps::plainer(shape)
    }
}

impl PromptDepot {
    fn live(&mut self, deeds: &[(u64, Deed)]) -> Law {
        self.open()?;
        for (number, deed) in deeds {
            watch::at(*number);
            let said = |broken| format!("step {number}, {deed:?}: {broken}");
            self.perform(deed).map_err(said)?;
        }
        watch::at(0);
        self.close();
        Ok(())
    }
}
