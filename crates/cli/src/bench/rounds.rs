//! Interleaved rounds: in each round every contender runs once, one after the other, so that what
//! slows the machine down slows all of them. Figures are medians over the rounds, ratios medians
//! over the ratios of each round.

use std::ops::Range;

use crate::error::Error;
use crate::interrupt::Interrupt;

/// Seconds of each contender in each round.
pub(super) struct Rounds {
    /// The limits, then kvdepot, in one way or in several.
    seconds: Vec<Vec<f64>>,
    limits: usize,
}

impl Rounds {
    /// Runs `limits` + 1 contenders, the last of which is kvdepot: one round to warm up, then
    /// `rounds` that count. Contenders take turns in going first. `run` gets the contender and
    /// answers its seconds.
    pub(super) fn run(
        rounds: usize,
        limits: usize,
        interrupt: &Interrupt,
        run: impl FnMut(usize) -> Result<f64, Error>,
    ) -> Result<Rounds, Error> {
        Self::run_ways(rounds, limits, 1, interrupt, run)
    }

    /// As [`Rounds::run`], with kvdepot in so many ways.
    pub(super) fn run_ways(
        rounds: usize,
        limits: usize,
        ways: usize,
        interrupt: &Interrupt,
        mut run: impl FnMut(usize) -> Result<f64, Error>,
    ) -> Result<Rounds, Error> {
        let contenders = limits + ways;
        let mut seconds = vec![Vec::with_capacity(rounds); contenders];
        for round in 0..=rounds {
            for turn in 0..contenders {
                interrupt.check()?;
                let contender = (round + turn) % contenders;
                let time = run(contender)?;
                if round > 0 {
                    seconds[contender].push(time);
                }
            }
        }
        Ok(Rounds { seconds, limits })
    }

    /// The limits, and this contender in the place of kvdepot.
    pub(super) fn of(&self, contender: usize) -> Rounds {
        let mut seconds = self.seconds[..self.limits].to_vec();
        seconds.push(self.seconds[contender].clone());
        Rounds {
            seconds,
            limits: self.limits,
        }
    }

    /// These limits, and kvdepot.
    pub(super) fn beside(&self, limits: Range<usize>) -> Rounds {
        let count = limits.len();
        let mut seconds = self.seconds[limits].to_vec();
        seconds.push(self.ours().to_vec());
        Rounds {
            seconds,
            limits: count,
        }
    }

    /// One contender's median, in seconds.
    pub(super) fn median(&self, contender: usize) -> f64 {
        median(self.seconds[contender].clone())
    }

    /// One contender's seconds over another's, round by round.
    pub(super) fn quotient(&self, contender: usize, other: usize) -> f64 {
        let pairs = self.seconds[contender].iter().zip(&self.seconds[other]);
        median(pairs.map(|(one, other)| one / other).collect())
    }

    fn ours(&self) -> &[f64] {
        self.seconds.last().map_or(&[], Vec::as_slice)
    }

    /// Kvdepot's median, in seconds.
    pub(super) fn value(&self) -> f64 {
        median(self.ours().to_vec())
    }

    /// The best limit and its median: the best over all rounds, or else noise would choose the
    /// luckiest of each round.
    pub(super) fn best(&self) -> Option<(usize, f64)> {
        let limits = &self.seconds[..self.limits];
        let medians = limits.iter().map(|times| median(times.clone()));
        medians.enumerate().min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The best limit's seconds over kvdepot's, round by round.
    pub(super) fn ratio(&self) -> Option<f64> {
        self.by_round(|limit, ours| limit / ours)
    }

    /// One limit's median, in seconds, and its seconds over kvdepot's, round by round.
    pub(super) fn against(&self, limit: usize) -> (f64, f64) {
        let times = &self.seconds[limit];
        let ratios = times
            .iter()
            .zip(self.ours())
            .map(|(limit, ours)| limit / ours);
        (median(times.clone()), median(ratios.collect()))
    }

    /// Seconds that kvdepot takes longer than the best limit, round by round.
    pub(super) fn beyond(&self) -> Option<f64> {
        self.by_round(|limit, ours| ours - limit)
    }

    fn by_round(&self, of: impl Fn(f64, f64) -> f64) -> Option<f64> {
        let (best, _) = self.best()?;
        let pairs = self.seconds[best].iter().zip(self.ours());
        Some(median(
            pairs.map(|(limit, ours)| of(*limit, *ours)).collect(),
        ))
    }
}

/// The middle value; the mean of the two in the middle of an even number.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    match (values.get(low), values.get(high)) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        _ => f64::NAN,
    }
}

/// Returns the smallest value that a `share` of all values, 0 to 1, do not exceed.
pub(super) fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let at = (values.len() as f64 * share).ceil() as usize;
    let at = at.clamp(1, values.len().max(1)) - 1;
    values.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_limit_is_the_best_by_median_and_ratios_are_by_round() {
        let interrupt = Interrupt::catch().unwrap();
        let times = [
            vec![9.0, 5.0, 1.0, 6.0],
            vec![9.0, 2.0, 4.0, 2.0],
            vec![9.0, 4.0, 4.0, 8.0],
        ];
        let mut next = [0; 3];
        let rounds = Rounds::run(3, 2, &interrupt, |contender| {
            next[contender] += 1;
            Ok(times[contender][next[contender] - 1])
        })
        .unwrap();
        assert_eq!(rounds.best(), Some((1, 2.0)));
        assert_eq!(rounds.value(), 4.0);
        assert_eq!(rounds.ratio(), Some(0.5));
        assert_eq!(rounds.beyond(), Some(2.0));
        assert_eq!(rounds.against(0), (5.0, 0.75));
        assert_eq!(rounds.of(0).ratio(), Some(1.0 / 2.5));
        assert_eq!(rounds.beside(0..1).ratio(), Some(0.75));
        assert_eq!(rounds.beside(2..2).ratio(), None);
        assert_eq!((rounds.median(0), rounds.quotient(1, 0)), (5.0, 0.4));
    }

    #[test]
    fn medians_of_even_numbers_are_means() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn a_quantile_is_a_value_that_was_measured() {
        let mut values: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut values, 0.999), 999.0);
        assert_eq!(quantile(&mut values, 0.5), 500.0);
        assert_eq!(quantile(&mut [7.0], 0.999), 7.0);
        assert!(quantile(&mut [], 0.5).is_nan());
    }
}
