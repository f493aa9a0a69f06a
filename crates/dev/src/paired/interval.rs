//! What pairs of figures say: a ratio with its interval, and whether it will do. Pure.

/// Lower end of a command's mean that will do.
pub const MEAN_LEAST: f64 = 0.97;
/// A case whose interval lies wholly below this is slower, whatever the mean says.
pub const CASE_LEAST: f64 = 0.95;

/// A ratio and the ends of its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The geometric mean of the pairs' ratios.
    pub mean: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Interval {
    /// The geometric mean of ratios, with Student's interval of their logarithms: ratios spread
    /// about evenly there. Nothing from fewer than two.
    #[must_use]
    pub fn of(logs: &[f64]) -> Option<Interval> {
        let count = logs.len() as f64;
        if logs.len() < 2 {
            return None;
        }
        let mean = logs.iter().sum::<f64>() / count;
        let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
        let error = (squares / (count - 1.0) / count).sqrt();
        let reach = student(logs.len() - 1) * error;
        Some(Interval {
            mean: mean.exp(),
            low: (mean - reach).exp(),
            high: (mean + reach).exp(),
        })
    }

    /// Whether the mean of a command will do.
    #[must_use]
    pub fn mean_holds(&self) -> bool {
        self.low >= MEAN_LEAST
    }

    /// Whether one case will do.
    #[must_use]
    pub fn case_holds(&self) -> bool {
        self.high >= CASE_LEAST
    }
}

/// How many standard errors hold 95 % with so many degrees of freedom: exact for the first three,
/// then the expansion about the normal distribution, which is right to a hundredth from four on.
fn student(freedom: usize) -> f64 {
    const NORMAL: f64 = 1.959_964;
    let (z, n) = (NORMAL, freedom as f64);
    match freedom {
        0 => f64::INFINITY,
        1 => 12.706,
        2 => 4.303,
        3 => 3.182,
        _ => {
            let first = (z.powi(3) + z) / 4.0;
            let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
            let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
            z + first / n + second / n.powi(2) + third / n.powi(3)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_students_distribution() {
        for (freedom, known) in [
            (1, 12.706),
            (4, 2.776),
            (9, 2.262),
            (29, 2.045),
            (120, 1.980),
        ] {
            assert!((student(freedom) - known).abs() < 0.01, "{freedom}");
        }
    }

    #[test]
    fn a_ratio_stands_in_its_interval_as_worked_out_by_hand() {
        // Logarithms of mean 0 and standard deviation 0.1, from three: 0.1 / √3 · 4.303.
        let pairs = Interval::of(&[-0.1, 0.0, 0.1]).unwrap();
        let reach: f64 = 0.1 / 3f64.sqrt() * 4.303;
        assert!((pairs.mean - 1.0).abs() < 1e-12);
        assert!((pairs.low - (-reach).exp()).abs() < 1e-9);
        assert!((pairs.high - reach.exp()).abs() < 1e-9);
        assert_eq!(Interval::of(&[0.0]), None);
    }

    #[test]
    fn slower_fails_and_noise_alone_fails_no_case() {
        let steady = |ratio: f64| Interval::of(&[ratio.ln(), ratio.ln()]).unwrap();
        assert!(steady(0.98).mean_holds() && !steady(0.96).mean_holds());
        assert!(steady(0.96).case_holds() && !steady(0.94).case_holds());
        let noisy = Interval::of(&[-0.5, 0.2, 0.1, -0.1]).unwrap();
        assert!(noisy.case_holds() && !noisy.mean_holds());
    }
}
