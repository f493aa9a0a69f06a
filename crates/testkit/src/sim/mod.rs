//! A simulator: seeded histories against a twin, and the shortest history that still fails.
//!
//! A [`Subject`] draws a [`History`] from a seed, runs it, and says which law it broke. [`run`]
//! does so for as long as it is told, prints a failing history's seed and the command that replays
//! it, and [shrinks](shrink) it. [`tally`] counts what was driven, [`watch`] turns a hang into a
//! failure, and [`twin`] knows what a depot may hold and answer.

pub mod run;
pub mod shrink;
pub mod tally;
pub mod twin;
pub mod watch;

use std::fmt::Debug;

use crate::seed::Rng;
use tally::Tally;

/// What happens, in order. The seed also decides what the steps leave open.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a plain list of a test")]
pub struct History<Shape, Step> {
    /// Where it was drawn from.
    pub seed: u64,
    /// What it happens to.
    pub shape: Shape,
    /// Each step with its number in the history that was drawn: what it leaves open depends on
    /// that, and so does not change when others are left out.
    pub steps: Vec<(u64, Step)>,
}

/// What is simulated.
pub trait Subject {
    /// What a history happens to: sizes, settings.
    type Shape: Clone + Debug;
    /// One thing that happens.
    type Step: Clone + Debug;

    /// What it is called on the command line.
    fn name(&self) -> &'static str;

    /// A history.
    fn draw(&self, rng: &mut Rng) -> (Self::Shape, Vec<Self::Step>);

    /// Lets it happen and checks all laws.
    ///
    /// # Errors
    /// The law that was broken, and how. A panic counts as one.
    fn run(
        &self,
        history: &History<Self::Shape, Self::Step>,
        tally: &mut Tally,
    ) -> Result<(), String>;

    /// How many failing runs this process can bear: what broke a law is not closed, and keeps what
    /// it holds.
    fn failures_max(&self) -> usize {
        usize::MAX
    }

    /// Steps that do less than this one, the least first.
    fn simpler(&self, step: &Self::Step) -> Vec<Self::Step>;

    /// Shapes that are plainer than this one.
    fn plainer(&self, shape: &Self::Shape) -> Vec<Self::Shape>;
}
