//! Histories of a medium that several processes share without a server of kvdepot's: a directory,
//! a directory of 3FS by its rings (over the double), a bucket of a real object store. They do the
//! same to the same blocks at the same time, and are killed; the medium fails, its bytes change.
//!
//! A key's bytes never change here, so that what anybody reads is known; what is there is known
//! where nobody met anybody.

mod deeds;
mod fleet;
pub mod steps;

use fleet::Fleet;
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use steps::{Deed, Shape};

use crate::world::Law;

/// Histories of what is shared.
pub struct Shared;

impl Subject for Shared {
    type Shape = Shape;
    type Step = Deed;

    fn name(&self) -> &'static str {
        "shared"
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Deed>) {
        (steps::shape(rng), steps::deeds(rng))
    }

    fn run(&self, history: &History<Shape, Deed>, tally: &mut Tally) -> Law {
        let mut fleet = Fleet::new(history.seed, &history.shape);
        let ran = fleet.live(&history.steps);
        *tally = std::mem::take(tally).plus(&fleet.tally);
        ran
    }

    fn simpler(&self, deed: &Deed) -> Vec<Deed> {
        steps::simpler(deed)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        steps::plainer(shape)
    }
}

impl Fleet {
    fn live(&mut self, deeds: &[(u64, Deed)]) -> Law {
        if std::env::var_os("SIM_LOG").is_some() {
            println!("{:?}", self.shape);
        }
        self.open_all()?;
        for (number, deed) in deeds {
            watch::at(*number);
            if std::env::var_os("SIM_LOG").is_some() {
                println!("{number}. {deed:?}");
            }
            let said = |broken| format!("step {number}, {deed:?}: {broken}");
            self.perform(deed).map_err(said)?;
            self.look().map_err(said)?;
        }
        watch::at(0);
        self.finish()
            .map_err(|broken| format!("at the end: {broken}"))
    }
}
