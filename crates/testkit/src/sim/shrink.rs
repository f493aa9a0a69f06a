//! The shortest history that still fails: steps are left out in ever smaller runs, then each is
//! made simpler, then the shape plainer, until nothing of that fails any more.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use super::{History, Subject};

/// Shrinks a history that fails. Gives up what is left to try after `limit`.
pub fn shrink<S: Subject>(
    subject: &S,
    history: History<S::Shape, S::Step>,
    limit: Duration,
    fails: impl Fn(&History<S::Shape, S::Step>) -> bool,
) -> History<S::Shape, S::Step> {
    let begun = Instant::now();
    let late = || begun.elapsed() > limit;
    let mut best = history;
    loop {
        let before = (best.steps.len(), format!("{best:?}"));
        leave_out(&mut best, &fails, &late);
        simplify(subject, &mut best, &fails, &late);
        for shape in subject.plainer(&best.shape) {
            let candidate = History {
                shape,
                ..best.clone()
            };
            if !late() && fails(&candidate) {
                best = candidate;
            }
        }
        if late() || before == (best.steps.len(), format!("{best:?}")) {
            return best;
        }
    }
}

/// What each of these changes makes of a step or shape, as far as it makes another one of it.
#[must_use]
pub fn changed<T: Clone + Debug>(of: &T, changes: &[fn(&mut T)]) -> Vec<T> {
    let before = format!("{of:?}");
    let made = changes.iter().map(|change| {
        let mut made = of.clone();
        change(&mut made);
        made
    });
    // Those that change nothing would be tried for ever.
    made.filter(|made| format!("{made:?}") != before).collect()
}

/// A step with one thing less of the `count` that it names: at least one stays.
pub fn one_less<T: Clone>(of: &T, count: usize, leave_out: impl Fn(&mut T, usize)) -> Vec<T> {
    let places = (0..count).rev().filter(|_| count > 1);
    let less = places.map(|at| {
        let mut less = of.clone();
        leave_out(&mut less, at);
        less
    });
    less.collect()
}

fn leave_out<Shape: Clone, Step: Clone>(
    best: &mut History<Shape, Step>,
    fails: &impl Fn(&History<Shape, Step>) -> bool,
    late: &impl Fn() -> bool,
) {
    let mut run = best.steps.len().div_ceil(2);
    while run > 0 {
        let mut end = best.steps.len();
        // From the end: what follows the failure is the first to go.
        while end > 0 && !late() {
            let begin = end.saturating_sub(run);
            let mut candidate = best.clone();
            candidate.steps.drain(begin..end);
            if fails(&candidate) {
                *best = candidate;
            }
            end = begin.min(best.steps.len());
        }
        run = if run == 1 { 0 } else { run.div_ceil(2) };
    }
}

fn simplify<S: Subject>(
    subject: &S,
    best: &mut History<S::Shape, S::Step>,
    fails: &impl Fn(&History<S::Shape, S::Step>) -> bool,
    late: &impl Fn() -> bool,
) {
    for index in 0..best.steps.len() {
        for step in subject.simpler(&best.steps[index].1) {
            let mut candidate = best.clone();
            candidate.steps[index].1 = step;
            if !late() && fails(&candidate) {
                *best = candidate;
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tally::Tally;
    use super::*;
    use crate::seed::Rng;

    /// Fails when a 7 comes before something above 50.
    struct Numbers;

    impl Subject for Numbers {
        type Shape = u64;
        type Step = u64;

        fn name(&self) -> &'static str {
            "numbers"
        }

        fn draw(&self, rng: &mut Rng) -> (u64, Vec<u64>) {
            let mut steps: Vec<u64> = (0..60).map(|_| rng.below(50)).collect();
            steps[20] = 7;
            steps[40] = 90;
            (9, steps)
        }

        fn run(&self, history: &History<u64, u64>, _: &mut Tally) -> Result<(), String> {
            let steps: Vec<u64> = history.steps.iter().map(|(_, step)| *step).collect();
            let seven = steps.iter().position(|step| *step == 7);
            let high = steps.iter().rposition(|step| *step > 50);
            match (seven, high) {
                (Some(a), Some(b)) if a < b => Err("found".into()),
                _ => Ok(()),
            }
        }

        fn simpler(&self, step: &u64) -> Vec<u64> {
            vec![step / 2, step.saturating_sub(1)]
        }

        fn plainer(&self, shape: &u64) -> Vec<u64> {
            vec![shape.saturating_sub(1)]
        }
    }

    #[test]
    fn what_has_no_part_in_the_failure_is_left_out() {
        let (shape, steps) = Numbers.draw(&mut Rng::new(3));
        let steps = (0..).zip(steps).collect();
        let history = History {
            seed: 3,
            shape,
            steps,
        };
        let fails = |one: &History<u64, u64>| Numbers.run(one, &mut Tally::default()).is_err();
        let short = shrink(&Numbers, history, Duration::from_secs(60), fails);
        let steps: Vec<u64> = short.steps.iter().map(|(_, step)| *step).collect();
        assert_eq!((short.shape, steps), (0, vec![7, 51]));
        assert!(short.steps[0].0 < 40 && short.steps[1].0 == 40);
    }
}
