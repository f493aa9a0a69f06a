//! What a benchmark writes with `--json`, and which of two figures is the better.

use std::collections::BTreeMap;
use std::io;

use serde_json::Value;

/// Figures of one run, by case.
pub type Figures = BTreeMap<String, f64>;

/// Whether more of a metric is better.
fn more_is_better(metric: &str, unit: &str) -> io::Result<bool> {
    match (metric, unit) {
        ("cpu_over_copy", _) | (_, "s" | "ms" | "us" | "ns" | "ns/block") => Ok(false),
        (_, "ratio") => Ok(true),
        (_, unit) if unit.ends_with("/s") => Ok(true),
        _ => Err(io::Error::other(format!(
            "{metric} in {unit}: whether more is better is not known"
        ))),
    }
}

/// Reads the rows of one run. A figure of which less is better is turned round, so that more
/// always is.
///
/// # Errors
/// A row that is no row of a benchmark.
pub fn read(text: &str) -> io::Result<(Vec<Value>, Figures)> {
    let mut figures = Figures::new();
    let mut rows = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let row: Value = serde_json::from_str(line)?;
        let text = |name: &str| row[name].as_str().unwrap_or_default();
        let (metric, unit) = (text("metric"), text("unit"));
        let value = row["value"].as_f64();
        let value =
            value.ok_or_else(|| io::Error::other(format!("a row without value: {line}")))?;
        let fields = row["case"].as_object().into_iter().flatten();
        let fields = fields.map(|(name, value)| format!("{name}={value}").replace('"', ""));
        let case = fields.collect::<Vec<_>>().join(" ");
        let value = match more_is_better(metric, unit)? {
            true => value,
            false => value.recip(),
        };
        figures.insert(format!("{metric} {case}"), value);
        rows.push(row);
    }
    Ok((rows, figures))
}

/// Rounds of one command: what the base reached, and what the working tree did.
#[derive(Debug, Default)]
pub struct Pairs {
    rounds: Vec<(Figures, Figures)>,
}

/// One case over all rounds.
#[derive(Debug, PartialEq)]
pub struct Case {
    /// The metric and the parameters.
    pub name: String,
    /// Logarithms of new over old: above 0 is better. Of the rounds in which both were above 0:
    /// a difference of two times may be below.
    pub logs: Vec<f64>,
    /// A round in which the base has had it and the tree has not.
    pub gone: bool,
}

impl Pairs {
    /// Takes a round.
    pub fn add(&mut self, old: Figures, new: Figures) {
        self.rounds.push((old, new));
    }

    /// Every case that either of them has had.
    #[must_use]
    pub fn cases(&self) -> Vec<Case> {
        let both = self.rounds.iter().flat_map(|(old, new)| [old, new]);
        let mut names: Vec<&String> = both.flat_map(BTreeMap::keys).collect();
        names.sort_unstable();
        names.dedup();
        let case = |name: &String| Case {
            gone: self
                .rounds
                .iter()
                .any(|(old, new)| old.contains_key(name) && !new.contains_key(name)),
            name: name.clone(),
            logs: self
                .rounds
                .iter()
                .filter_map(|round| log(round, name))
                .collect(),
        };
        names.into_iter().map(case).collect()
    }

    /// The mean over all cases of each round: what the machine does to a whole round stays one
    /// deviation, and is not counted once a case.
    #[must_use]
    pub fn means(&self) -> Vec<f64> {
        let mean = |round: &(Figures, Figures)| {
            let logs: Vec<f64> = round.0.keys().filter_map(|name| log(round, name)).collect();
            (!logs.is_empty()).then(|| logs.iter().sum::<f64>() / logs.len() as f64)
        };
        self.rounds.iter().filter_map(mean).collect()
    }
}

fn log((old, new): &(Figures, Figures), name: &str) -> Option<f64> {
    let ratio = new.get(name)? / old.get(name)?;
    let positive = new[name] > 0.0 && ratio > 0.0 && ratio.is_finite();
    positive.then(|| ratio.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(metric: &str, unit: &str, value: f64) -> String {
        format!(
            r#"{{"case":{{"op":"get","block":4096}},"metric":"{metric}","unit":"{unit}","value":{value}}}"#
        )
    }

    fn round(old: &str, new: &str) -> Pairs {
        let mut pairs = Pairs::default();
        pairs.add(read(old).unwrap().1, read(new).unwrap().1);
        pairs
    }

    #[test]
    fn above_nought_is_better_for_rates_and_for_times() {
        for (metric, unit, old, new) in [
            ("throughput", "GB/s", 2.0, 4.0),
            ("open", "s", 4.0, 2.0),
            ("cpu_over_copy", "ratio", 0.5, 0.25),
            ("staged_over_direct", "ratio", 1.0, 2.0),
        ] {
            let pairs = round(&row(metric, unit, old), &row(metric, unit, new));
            let [case] = &pairs.cases()[..] else {
                panic!("one case")
            };
            assert_eq!(case.name, format!("{metric} block=4096 op=get"));
            assert!((case.logs[0] - 2f64.ln()).abs() < 1e-12, "{metric}");
            assert!((pairs.means()[0] - 2f64.ln()).abs() < 1e-12);
        }
    }

    #[test]
    fn a_round_without_a_positive_figure_has_no_ratio_and_the_case_is_still_named() {
        let pairs = round(&row("pin", "us", -1.0), &row("pin", "us", 2.0));
        assert_eq!(pairs.cases()[0].logs, [0.0; 0]);
        assert!(pairs.means().is_empty());
        assert!(!pairs.cases()[0].gone);
        let gone = round(&row("pin", "us", 1.0), "");
        assert!(gone.cases()[0].gone && gone.cases()[0].logs.is_empty());
        assert!(!round("", &row("pin", "us", 1.0)).cases()[0].gone);
    }

    #[test]
    fn a_unit_without_a_direction_is_refused() {
        assert!(read(&row("x", "apples", 1.0)).is_err());
        assert!(read("{\"metric\":\"x\",\"unit\":\"s\"}").is_err());
    }
}
