//! Histories of pipelines with tiers that stand apart: answers that come late, too late or not at
//! all, refusals, ends that break, payloads that rot, and tiers that are closed and opened again.
//!
//! There are neither threads nor clocks: an answer is a step of the schedule, and so is the end of
//! its time.

mod deeds;
mod directory;
mod laws;
mod memory;
mod own;
pub mod posix;
mod sharer;
mod shelf;
mod steps;
mod stored;
mod terms;
mod two_phase;
mod verbs;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use kvdepot_testkit::Rng;
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use steps::{Shape, Step};
use world::World;

use crate::world::{Law, law};

/// Histories of tiers that stand apart.
pub struct Tiers;

impl Subject for Tiers {
    type Shape = Shape;
    type Step = Step;

    fn name(&self) -> &'static str {
        "tiers"
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Step>) {
        let shape = steps::shape(rng);
        (shape, steps::steps(rng))
    }

    fn run(&self, history: &History<Shape, Step>, tally: &mut Tally) -> Law {
        crate::log::expect_broken_ends(true);
        let world = Rc::new(World::new(history.seed, &history.shape));
        let weak = Rc::downgrade(&world);
        world.enter(move || {
            weak.upgrade().iter().for_each(|world| world.meanwhile());
        });
        let ran = world.run(&history.steps);
        // What happened first, while a call waited.
        let ran = world.broken.take().map_or(ran, Err);
        if ran.is_err() {
            world.abandon();
        }
        world.leave();
        crate::log::expect_broken_ends(false);
        *tally = std::mem::take(tally).plus(&world.tally.borrow());
        ran
    }

    fn simpler(&self, step: &Step) -> Vec<Step> {
        steps::simpler(step)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        steps::plainer(shape)
    }
}

impl World {
    fn run(&self, steps: &[(u64, Step)]) -> Law {
        self.reseed(0);
        self.open()?;
        self.open_sharer()?;
        for shelf in &self.shelves {
            shelf.set_mood(self.shape.mood);
        }
        for (number, step) in steps {
            watch::at(*number);
            self.reseed(*number);
            let said = |broken| format!("step {number}, {step:?}: {broken}");
            self.perform(step).map_err(said)?;
            self.look().map_err(said)?;
            if self.broken.borrow().is_some() {
                return Ok(());
            }
        }
        watch::at(0);
        self.reseed(0);
        let said = |broken| format!("at the end: {broken}");
        self.finish().map_err(said)
    }

    /// Something else happens while a call waits.
    fn meanwhile(&self) {
        if self.nested.get() > 1 || self.broken.borrow().is_some() {
            return;
        }
        let step = {
            let Ok(mut rng) = self.rng.try_borrow_mut() else {
                return;
            };
            if !rng.once_in(4) {
                return;
            }
            steps::nested(&mut rng)
        };
        self.nested.set(self.nested.get() + 1);
        self.inner.set(self.inner.get() + 1);
        let done = self.perform(&step).and_then(|()| self.look());
        self.nested.set(self.nested.get() - 1);
        if let Err(broken) = done {
            let broken = format!("{step:?}, while a call waited: {broken}");
            self.broken.borrow_mut().get_or_insert(broken);
        }
    }

    /// Once all tiers answer, all that was acknowledged is there, also after the next opening.
    fn finish(&self) -> Law {
        self.rest()?;
        self.alone(|| self.calm_down())?;
        // What is read comes near, and might hide what a further tier forgets.
        let reads = self.rng.borrow_mut().once_in(2);
        if reads {
            self.read_all()?;
        }
        if reads {
            self.end_sharer(false)?;
        }
        self.close()?;
        self.open()?;
        self.calm_down()?;
        self.read_all()?;
        self.bring_one()?;
        self.rest()?;
        self.end_sharer(false)?;
        self.close()
    }

    fn read_all(&self) -> Law {
        for id in World::all_ids() {
            // By its file, or where it is near, before what is read comes near.
            self.pin(id.0, &[id.1], false)?;
            self.load(0)?;
            self.let_go()?;
            let lasting = self.block(id).lasting;
            self.perform(&Step::Get {
                ns: id.0,
                keys: vec![id.1],
                prefix: false,
            })?;
            // Whatever a look says: it was acknowledged.
            if let Some(get) = self.flying.borrow_mut().last_mut().filter(|_| lasting) {
                get.expect = vec![world::Expect::There];
            }
            self.look()?;
        }
        self.rest()
    }

    /// There is room on the way near for any block of the further tiers.
    fn bring_one(&self) -> Law {
        let near = self.owner().stats().tiers[0].capacity_bytes;
        if !self.shape.pipeline.starts_with("Cache|") {
            return Ok(());
        }
        let mut all = World::all_ids().filter(|id| self.payload(*id) <= near / 2);
        let Some(id) = all.find(|id| self.block(*id).lasting) else {
            return Ok(());
        };
        // What others have prefetched and not read leaves room after ten seconds.
        self.schedule.pass(std::time::Duration::from_secs(10));
        let namespace = self.namespace(id.0)?;
        let task = namespace.prefetch(&[crate::world::key(id.1)]);
        let task = task.map_err(|error| format!("prefetch: {error}"))?;
        self.alone(|| self.settle())?;
        let outcomes = task.outcomes();
        law!(
            outcomes == [kvdepot_store::Outcome::Done],
            "a last prefetch of {id:?} ended as {outcomes:?}"
        );
        Ok(())
    }

    /// Leaves everything as it is.
    fn abandon(&self) {
        self.nested.set(9);
        let held = (self.mover.take(), self.held.take(), self.pins.take());
        let depots = (self.depot.take(), self.sharer.take());
        let all = (held, depots, self.flying.take());
        let _broken = catch_unwind(AssertUnwindSafe(|| drop(all)));
    }
}
