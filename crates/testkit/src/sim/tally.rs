//! Counts by name: histories, doors, faults.

use std::collections::BTreeMap;
use std::fmt;

/// What was driven how often.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    histories: BTreeMap<&'static str, u64>,
    doors: BTreeMap<&'static str, u64>,
    faults: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// A history of a subject was run.
    pub fn history(&mut self, name: &'static str) {
        *self.histories.entry(name).or_default() += 1;
    }

    /// A verb was called.
    pub fn door(&mut self, name: &'static str) {
        *self.doors.entry(name).or_default() += 1;
    }

    /// Something was broken on purpose.
    pub fn fault(&mut self, name: &'static str) {
        *self.faults.entry(name).or_default() += 1;
    }

    /// The sum of two.
    #[must_use]
    pub fn plus(mut self, other: &Tally) -> Tally {
        for (mine, theirs) in [
            (&mut self.histories, &other.histories),
            (&mut self.doors, &other.doors),
            (&mut self.faults, &other.faults),
        ] {
            for (name, count) in theirs {
                *mine.entry(name).or_default() += count;
            }
        }
        self
    }

    /// All histories.
    #[must_use]
    pub fn histories(&self) -> u64 {
        self.histories.values().sum()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, counts) in [
            ("histories", &self.histories),
            ("doors", &self.doors),
            ("faults", &self.faults),
        ] {
            if name != "histories" {
                write!(f, "; ")?;
            }
            write!(f, "{} {name} (", counts.values().sum::<u64>())?;
            for (index, (name, count)) in counts.iter().enumerate() {
                let comma = if index == 0 { "" } else { ", " };
                write!(f, "{comma}{name} {count}")?;
            }
            write!(f, ")")?;
        }
        Ok(())
    }
}
