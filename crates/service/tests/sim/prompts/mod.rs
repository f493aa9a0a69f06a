//! Histories of prompts that are larger than an eighth of a tier, among usual ones: what stays and
//! what is evicted, in each tier by itself and behind a memory.

mod room;
mod steps;

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use room::Room;
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
        let mut room = Room::new(&history.shape);
        let ran = room.live(&history.steps);
        *tally = std::mem::take(tally).plus(&room.tally);
        ran
    }

    fn simpler(&self, deed: &Deed) -> Vec<Deed> {
        steps::simpler(deed)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        steps::plainer(shape)
    }
}

impl Room {
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
