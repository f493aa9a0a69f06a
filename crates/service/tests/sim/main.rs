//! The simulator of the depot: seeded histories that drive all doors at once, with faults, against
//! a twin. `docs/testing.md` says how to run it, how to replay what it finds, and how to add a
//! door.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking"
)]
#![allow(
    unreachable_pub,
    clippy::allow_attributes,
    reason = "modules of one test"
)]

#[path = "../common/mod.rs"]
mod common;
mod disk;
mod doors;
mod ends;
mod faults;
mod history;
mod hosts;
mod laws;
mod log;
mod memory;
mod opening;
mod peer;
mod processes;
mod prompts;
mod shared;
mod talks;
mod tiers;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use history::{Shape, Step};
use hosts::Hosts;
use kvdepot_testkit::sim::run::{Plan, note_panics, run};
use kvdepot_testkit::sim::tally::Tally;
use kvdepot_testkit::sim::{History, Subject, watch};
use kvdepot_testkit::{Rng, worker};
use processes::Processes;
use prompts::Prompts;
use shared::Shared;
use talks::Talks;
use tiers::Tiers;
use world::{Cause, Law, World};

/// Histories of one process without threads or clocks, and those with real ones.
struct Depots {
    scheduled: bool,
}

impl Subject for Depots {
    type Shape = Shape;
    type Step = Step;

    fn name(&self) -> &'static str {
        if self.scheduled {
            "scheduled"
        } else {
            "served"
        }
    }

    fn draw(&self, rng: &mut Rng) -> (Shape, Vec<Step>) {
        let shape = match self.scheduled {
            true => history::scheduled_shape(rng),
            false => history::served_shape(rng),
        };
        let mut shape = shape;
        let steps = history::steps(rng, &mut shape);
        (shape, steps)
    }

    fn run(&self, history: &History<Shape, Step>, tally: &mut Tally) -> Law {
        let world = Rc::new(World::new(history.seed, &history.shape, self.scheduled));
        let meanwhile = {
            let world = Rc::downgrade(&world);
            move || {
                if let Some(world) = world.upgrade() {
                    world.meanwhile();
                }
            }
        };
        world.enter(meanwhile);
        let ran = world.run(&history.steps);
        if ran.is_err() {
            // Its end may hang.
            world.abandon();
        }
        world.leave();
        disk::leave(None);
        *tally = std::mem::take(tally).plus(&world.tally.borrow());
        ran
    }

    fn failures_max(&self) -> usize {
        // Of mappings that can be watched each takes a dozen.
        if self.scheduled { usize::MAX } else { 40 }
    }

    fn simpler(&self, step: &Step) -> Vec<Step> {
        history::simpler(step)
    }

    fn plainer(&self, shape: &Shape) -> Vec<Shape> {
        history::plainer(shape)
    }
}

impl World {
    fn run(&self, steps: &[(u64, Step)]) -> Law {
        if self.rng.borrow_mut().once_in(8) {
            self.open_without_room()?;
        }
        self.open()?;
        for (number, step) in steps {
            watch::at(*number);
            self.reseed(*number);
            self.cause.replace(Cause::default());
            let said = |broken| format!("step {number}, {step:?}: {broken}");
            self.perform(step).map_err(said)?;
            self.look_softly().map_err(said)?;
            if let Some(broken) = self.broken.take() {
                return Err(format!("while step {number}, {step:?}, waited: {broken}"));
            }
            if matches!(step, Step::Settle) && self.is_scheduled() {
                self.at_rest().map_err(said)?;
            }
        }
        watch::at(0);
        self.reseed(0);
        self.finish()
            .map_err(|broken| format!("at the end: {broken}"))
    }

    /// Looks, once real threads have done what they were going to.
    pub fn look_softly(&self) -> Law {
        if !self.is_scheduled() {
            self.quiet()?;
        }
        self.look()
    }

    /// Something else happens while a call waits for the lanes.
    fn meanwhile(&self) {
        if self.nested.get() > 0 || self.broken.borrow().is_some() {
            return;
        }
        let step = {
            let Ok(mut rng) = self.rng.try_borrow_mut() else {
                return;
            };
            if !rng.once_in(4) {
                return;
            }
            history::nested(&mut rng, &self.shape)
        };
        self.nested.set(1);
        // What the waiting call has done so far is its own.
        let done = self.look().and_then(|()| {
            self.with_cause(|| {
                self.perform(&step)?;
                self.look()
            })
        });
        self.nested.set(0);
        if let Err(broken) = done {
            *self.broken.borrow_mut() = Some(format!("{step:?}: {broken}"));
        }
    }

    /// Lets everything go: nothing is left, and all that lasts comes back.
    fn finish(&self) -> Law {
        self.turns
            .fail
            .store(0, std::sync::atomic::Ordering::Relaxed);
        self.cause.replace(Cause::default());
        self.let_go()?;
        self.rest()?;
        self.read_all(self.doors() - 1)?;
        self.rest()?;
        if self.lasts() && self.rng.borrow_mut().once_in(2) {
            self.cause.replace(Cause::default());
            self.reopen()?;
            self.read_all(0)?;
            self.rest()?;
        }
        let (cut, part, fill) = {
            let mut rng = self.rng.borrow_mut();
            (rng.once_in(4), rng.between(40, 99), rng.once_in(2))
        };
        match cut && self.lasts() {
            true => drop(self.lose_a_part(part)?),
            false if fill => self.final_fill()?,
            false => {}
        }
        self.close()
    }

    /// Whoever holds anything lets go of it.
    pub fn let_go(&self) -> Law {
        while !self.pins.borrow().is_empty() {
            self.perform(&Step::Unpin {
                pin: 0,
                count: 9,
                served: false,
            })?;
            self.look_softly()?;
        }
        while !self.groups.borrow().is_empty() {
            self.perform(&Step::Ungroup { group: 0 })?;
            self.look_softly()?;
        }
        while !self.held.borrow().is_empty() {
            self.perform(&Step::Abort { held: 0, count: 9 })?;
            self.look_softly()?;
        }
        Ok(())
    }

    pub fn rest(&self) -> Law {
        self.perform(&Step::Settle)?;
        self.look_softly()?;
        self.at_rest()
    }

    /// Leaves everything as it is: no destructor runs.
    #[expect(
        clippy::mem_forget,
        reason = "what broke a law may hang when it is closed"
    )]
    fn abandon(&self) {
        self.nested.set(9);
        if self.is_scheduled() {
            let all = (
                self.mover.take(),
                self.groups.take(),
                self.depot.take(),
                self.flying.take(),
            );
            let _broken = catch_unwind(AssertUnwindSafe(|| drop(all)));
            return;
        }
        std::mem::forget(self.mover.take());
        std::mem::forget(self.groups.take());
        std::mem::forget(self.clients.take());
        std::mem::forget(self.depot.take());
        std::mem::forget(self.flying.take());
    }
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is a number, not {value:?}")),
    )
}

fn main() {
    kvdepot_media::shorten_turns();
    if let Some((role, commands)) = worker::role() {
        return processes::players::play(&role, &commands);
    }
    disk::mount();
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let chosen = |name: &str| args.is_empty() || args.iter().any(|arg| arg == name);
    let [scheduled, served] = [true, false].map(|scheduled| Depots { scheduled });
    let names = [
        scheduled.name(),
        served.name(),
        Processes.name(),
        Tiers.name(),
        Shared.name(),
        Hosts.name(),
        Talks.name(),
        Prompts.name(),
    ];
    if std::env::args().any(|arg| arg == "--list") {
        names.iter().for_each(|name| println!("{name}: test"));
        return;
    }
    if !names.iter().any(|name| chosen(name)) {
        return;
    }
    kvdepot_transfer::install();
    log::listen();
    note_panics();
    watch::start();
    let fresh = std::env::var_os("KVDEPOT_TEST_ALL").is_some_and(|value| value != "0");
    // Short and the same each time; `KVDEPOT_TEST_ALL=1` has ten minutes of fresh ones. Of each
    // kind there is at least one however short its share is.
    let seconds = number("SIM_SECONDS").unwrap_or(if fresh { 600 } else { 12 });
    let given = number("KVDEPOT_SEED");
    let drawn = || std::process::id() as u64 ^ log::nanoseconds();
    let seed = given.unwrap_or_else(|| match fresh || number("SIM_SECONDS").is_some() {
        true => drawn() % 1_000_000_000_000,
        false => 1,
    });
    // Each kind has its share of the time, and a limit for one history.
    let plan = |share: f64, limit: u64| Plan {
        seed,
        time: Duration::from_secs(seconds).mul_f64(share),
        histories: number("SIM_HISTORIES").unwrap_or(u64::MAX),
        shrink: number("SIM_SHRINK") != Some(0),
        limit: Duration::from_secs(limit),
        command: "SIM_HISTORIES=1 cargo test -p kvdepot-service --test sim --".into(),
    };
    let mut tally = Tally::default();
    let sound = (!chosen(names[3]) || run(&Tiers, &plan(0.1, 20), &mut tally))
        && (!chosen(names[0]) || run(&scheduled, &plan(0.2, 20), &mut tally))
        && (!chosen(names[1]) || run(&served, &plan(0.16, 20), &mut tally))
        && (!chosen(names[4]) || run(&Shared, &plan(0.1, 240), &mut tally))
        && (!chosen(names[5]) || run(&Hosts, &plan(0.12, 600), &mut tally))
        && (!chosen(names[2]) || run(&Processes, &plan(0.16, 120), &mut tally))
        && (!chosen(names[6]) || run(&Talks, &plan(0.1, 240), &mut tally))
        && (!chosen(names[7]) || run(&Prompts, &plan(0.06, 60), &mut tally));
    println!("sim: seed {seed}, {seconds} s: {tally}");
    if !sound {
        std::process::exit(1);
    }
}
