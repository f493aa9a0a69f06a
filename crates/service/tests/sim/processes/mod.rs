//! Histories between processes: the owner, its clients and a mover are processes of their own,
//! which are stopped, cut off and killed in the middle of what they do.
//!
//! One call is under way at a time, so that what each may answer is known; what meets is the call
//! and what happens to its process, and to its owner.

mod crowd;
mod deeds;
mod lanes;
pub mod players;
mod signal;
mod steps;

use crowd::Crowd;
pub use crowd::heard;
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use steps::{Deed, Shape};

use crate::world::Law;

/// Histories of several processes.
pub struct Processes;

impl Subject for Processes {
    type Shape = Shape;
    type Step = Deed;

    fn name(&self) -> &'static str {
        "processes"
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Deed>) {
        let shape = steps::shape(rng);
        let deeds = steps::deeds(rng, &shape);
        (shape, deeds)
    }

    fn run(&self, history: &History<Shape, Deed>, tally: &mut Tally) -> Law {
        let mut crowd = Crowd::new(history.seed, &history.shape);
        let ran = crowd.live(&history.steps);
        if ran.is_err() {
            crowd.abandon();
        }
        crate::disk::leave(None);
        *tally = std::mem::take(tally).plus(&crowd.tally);
        ran
    }

    fn simpler(&self, deed: &Deed) -> Vec<Deed> {
        steps::simpler(deed)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        steps::plainer(shape)
    }
}

impl Crowd {
    fn live(&mut self, deeds: &[(u64, Deed)]) -> Law {
        self.open()?;
        for (number, deed) in deeds {
            watch::at(*number);
            if std::env::var_os("SIM_LOG").is_some() {
                println!("{number}. {deed:?}");
            }
            let said = |broken| format!("step {number}, {deed:?}: {broken}");
            self.perform(deed).map_err(said)?;
            self.come_to_rest().map_err(said)?;
        }
        watch::at(0);
        self.finish()
            .map_err(|broken| format!("at the end: {broken}"))
    }
}
