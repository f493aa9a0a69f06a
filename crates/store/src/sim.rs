//! What a simulation needs beside the public face: a depot that is opened by a thread which has
//! entered a [`Schedule`] has neither lanes nor threads; the simulation takes their steps, by
//! [`Schedule::step`], [`Depot::step_background`](crate::Depot::step_background) and
//! [`Depot::step_evictor`](crate::Depot::step_evictor). What tiers that may answer late are asked
//! has its limit in the schedule's time: [`Schedule::ring`], [`Schedule::pass`].

pub use kvdepot_media::sim::{Entered, Schedule, Turn, current};

use crate::pipeline::Core;

/// More steps than any history leaves: what is not done by then waits for somebody.
const STEPS_MAX: usize = 10_000;

impl Core {
    /// Takes all steps before a close waits for them: nobody else would.
    ///
    /// # Panics
    /// When a call stays inside although nothing is left to do, where a close would hang.
    pub(crate) fn settle(&self) {
        let Some(schedule) = current() else { return };
        for number in 0..STEPS_MAX {
            let works = schedule.step() || self.step();
            // What is tried again and again may wait for time to pass.
            let rings = (!works || number % 16 == 0) && schedule.ring();
            if !works && !rings {
                break;
            }
        }
        assert!(
            self.gate.wait_empty(std::time::Duration::ZERO),
            "a close would wait for ever: a call is under way, and nobody works on it"
        );
    }
}
