//! Histories of sessions: engines in processes of their own save conversations, find them, bring
//! them back, remove them and carry them in files, through the depot of an owner that is killed, or
//! each through its own over one directory.
//!
//! Of each byte of a conversation it is known what it has to be, and of a session what one save of
//! it wrote.

mod circle;
mod deeds;
mod steps;
pub mod talker;
mod words;

use circle::Circle;
use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use steps::{Deed, Shape};

use crate::world::Law;

/// Histories of engines with sessions.
pub struct Talks;

impl Subject for Talks {
    type Shape = Shape;
    type Step = Deed;

    fn name(&self) -> &'static str {
        "talks"
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Deed>) {
        (steps::shape(rng), steps::deeds(rng))
    }

    fn run(&self, history: &History<Shape, Deed>, tally: &mut Tally) -> Law {
        let mut circle = Circle::new(history.seed, &history.shape);
        let ran = circle.live(&history.steps);
        crate::disk::leave(None);
        *tally = std::mem::take(tally).plus(&circle.tally);
        ran
    }

    fn simpler(&self, deed: &Deed) -> Vec<Deed> {
        steps::simpler(deed)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        steps::plainer(shape)
    }
}

impl Circle {
    fn live(&mut self, deeds: &[(u64, Deed)]) -> Law {
        let logs = std::env::var_os("SIM_LOG").is_some();
        if logs {
            println!("{:?}", self.shape);
        }
        self.open_all()?;
        for (number, deed) in deeds {
            watch::at(*number);
            if logs {
                println!("{number}. {deed:?}");
            }
            let said = |broken| format!("step {number}, {deed:?}: {broken}");
            self.reseed(*number);
            self.perform(deed).map_err(said)?;
            self.at_rest().map_err(said)?;
        }
        watch::at(0);
        self.finish()
            .map_err(|broken| format!("at the end: {broken}"))
    }
}
