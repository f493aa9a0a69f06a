//! Histories of hosts with one tier `Peer` between them, each a process of its own: they do the
//! same to the same blocks at the same time, are killed, closed, and come back, some with an older
//! share; bytes between them are late, changed, lost or come twice; what a share holds rots.
//!
//! A key's bytes never change here, so that what anybody reads is known; what is there is known
//! as long as no more hosts were lost than it has homes.

mod deeds;
mod ring;
mod steps;

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use ring::Ring;
use steps::{Deed, Shape};

use crate::world::Law;

/// Histories of hosts.
pub struct Hosts;

impl Subject for Hosts {
    type Shape = Shape;
    type Step = Deed;

    fn name(&self) -> &'static str {
        "hosts"
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Deed>) {
        (steps::shape(rng), steps::deeds(rng))
    }

    fn run(&self, history: &History<Shape, Deed>, tally: &mut Tally) -> Law {
        let mut ring = Ring::new(history.seed, &history.shape);
        let ran = ring.live(&history.steps);
        *tally = std::mem::take(tally).plus(&ring.tally);
        ran
    }

    fn simpler(&self, deed: &Deed) -> Vec<Deed> {
        steps::simpler(deed)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        steps::plainer(shape)
    }
}

impl Ring {
    fn live(&mut self, deeds: &[(u64, Deed)]) -> Law {
        let is_logged = std::env::var_os("SIM_LOG").is_some();
        if is_logged {
            println!("{:?}", self.shape);
        }
        (0..self.count()).try_for_each(|host| self.open(host, false))?;
        for (number, deed) in deeds {
            watch::at(*number);
            if is_logged {
                println!("{number}. {deed:?}");
            }
            let said = |broken| format!("step {number}, {deed:?}: {broken}");
            self.perform(deed).map_err(said)?;
        }
        watch::at(0);
        self.finish()
            .map_err(|broken| format!("at the end: {broken}"))
    }
}
