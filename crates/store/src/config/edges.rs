//! Options that the section of any tier takes: what goes on into it from the one before, and how
//! long one is waited for that may answer late.

use std::time::Duration;

use kvdepot_arena::Error;
use serde_json::Value;

use super::Config;
use super::schema::{EDGE, LATE};
use crate::option::{OptionSpec, Parsed};

/// Access that starts the write-back of a block into a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Touch {
    /// The first put.
    #[default]
    First,
    /// The second access (put, lookup, get or pin) while the block is in the previous tier.
    Second,
}

/// Conditions for the write-back of blocks into a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EdgeConfig {
    /// Access that starts the write-back of a block.
    pub admission: Touch,
    /// Minimum size of a block in bytes; default: 0.
    pub block_min: u64,
    /// Maximum size of a block in bytes; default: `u64::MAX`.
    pub block_max: u64,
    /// Maximum bytes written to the tier in any hour; `None`: unlimited.
    pub write_budget_hour: Option<u64>,
    /// Maximum bytes written to the tier in any 24 hours; `None`: unlimited.
    pub write_budget_day: Option<u64>,
}

impl Default for EdgeConfig {
    fn default() -> EdgeConfig {
        EdgeConfig {
            admission: Touch::First,
            block_min: 0,
            block_max: u64::MAX,
            write_budget_hour: None,
            write_budget_day: None,
        }
    }
}

/// Time-outs in the section of an asynchronous tier; `None` selects the time-out of the depot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LateConfig {
    /// Time-out of lookups.
    pub lookup: Option<Duration>,
    /// Time-out of all other operations.
    pub other: Option<Duration>,
}

/// The option of that name that the section of any tier takes.
pub(super) fn find(name: &str) -> Option<&'static OptionSpec> {
    EDGE.iter().find(|option| option.name == name)
}

impl Config {
    pub(super) fn set_of_edge(
        &mut self,
        tier: &'static str,
        spec: &OptionSpec,
        field: &str,
        value: &Value,
    ) -> Result<(), Error> {
        if self.pipeline.first().is_some_and(|first| first == tier) {
            let allowed = "this option only for tiers after the first one of the pipeline";
            return Err(Error::config(field, value, allowed));
        }
        let parsed = Parsed::new(field, spec.kind, value)?;
        let edge = self.edges.entry(tier).or_default();
        match spec.name {
            "admission" => {
                edge.admission = match parsed.text.as_str() {
                    "second" => Touch::Second,
                    _ => Touch::First,
                };
            }
            "block_min" => edge.block_min = parsed.number,
            "block_max" => edge.block_max = parsed.number,
            "write_budget_hour" => edge.write_budget_hour = Some(parsed.number),
            _ => edge.write_budget_day = Some(parsed.number),
        }
        if edge.block_min > edge.block_max {
            let allowed = "a block_min that is at most block_max";
            return Err(Error::config(field, value, allowed));
        }
        Ok(())
    }

    /// Sets an option of tiers that may answer late; false where it is none of them.
    pub(super) fn set_late(
        &mut self,
        tier: &'static str,
        name: &str,
        field: &str,
        value: &Value,
    ) -> Result<bool, Error> {
        let Some(spec) = LATE.iter().find(|option| option.name == name) else {
            return Ok(false);
        };
        let limit = Some(Parsed::new(field, spec.kind, value)?.duration);
        let late = self.late.entry(tier).or_default();
        match name {
            "lookup_timeout" => late.lookup = limit,
            _ => late.other = limit,
        }
        Ok(true)
    }

    /// Returns the time-outs of the asynchronous tier `tier`: for lookups, and for all other
    /// operations.
    #[must_use]
    pub fn patience(&self, tier: &str) -> (Duration, Duration) {
        let late = self.late.get(tier).copied().unwrap_or_default();
        (
            late.lookup.unwrap_or(self.lookup_timeout),
            late.other.unwrap_or(self.tier_timeout),
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_tier_says_what_goes_on_into_it() {
        let admission = |word| json!({"dax": {"admission": word}});
        let read = |word| Config::new("Cache|Dax", &admission(word)).unwrap().edges["Dax"];
        assert_eq!(read("second").admission, Touch::Second);
        assert_eq!(read("first"), EdgeConfig::default());
        let error = |pipeline, settings| Config::new(pipeline, &settings).unwrap_err().to_string();
        let third = error("Cache|Dax", admission("third"));
        assert!(
            third.contains("dax.admission") && third.contains("first, second"),
            "{third}"
        );
        let sizes = json!({"dax": {"block_max": "1MiB", "block_min": "2MiB"}});
        assert!(error("Cache|Dax", sizes).contains("at most block_max"));
        let budget = json!({"dax": {"write_budget_hour": "1GiB", "write_budget_day": "5GiB"}});
        let read = Config::new("Cache|Dax", &budget).unwrap().edges["Dax"];
        assert_eq!(read.write_budget_hour, Some(1 << 30));
        assert_eq!(read.write_budget_day, Some(5 << 30));
        let alone = error("Dax", admission("second"));
        assert!(alone.contains("after the first one"), "{alone}");
        let cache = error("Cache|Dax", json!({"cache": {"admission": "first"}}));
        assert!(cache.contains("after the first one"), "{cache}");
        let typo = error("Cache|Dax", json!({"dax": {"admision": "first"}}));
        assert!(typo.contains("did you mean \"admission\""), "{typo}");
    }
}
