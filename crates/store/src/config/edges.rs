//! Options that the section of any tier takes: what goes on into it from the one before, and how
//! long one is waited for that may answer late.

use std::time::Duration;

use kvdepot_arena::Error;
use serde_json::Value;

use super::Config;
use super::schema::{EDGE, LATE};
use crate::option::{OptionSpec, Parsed};

/// When a block goes on into a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Touch {
    /// At its first put.
    #[default]
    First,
    /// Once it is put again, or asked for, while it is in the tier before.
    Second,
}

/// What goes on into a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EdgeConfig {
    /// When a block does.
    pub admission: Touch,
    /// Fewest bytes of one that does.
    pub block_min: u64,
    /// Most bytes of one that does.
    pub block_max: u64,
    /// Most bytes that do in an hour.
    pub write_budget_hour: Option<u64>,
    /// Most bytes that do in a day.
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

/// How long a tier is waited for that may answer late; the depot's own time-outs where it does not
/// say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LateConfig {
    /// For a lookup.
    pub lookup: Option<Duration>,
    /// For anything else.
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
            let allowed = "in the section of a tier that stands behind another one";
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
            let allowed = "a block_min of no more than block_max";
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

    /// How long a lookup in a tier that may answer late is waited for, and anything else.
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
        assert!(error("Cache|Dax", sizes).contains("no more than block_max"));
        let budget = json!({"dax": {"write_budget_hour": "1GiB", "write_budget_day": "5GiB"}});
        let read = Config::new("Cache|Dax", &budget).unwrap().edges["Dax"];
        assert_eq!(read.write_budget_hour, Some(1 << 30));
        assert_eq!(read.write_budget_day, Some(5 << 30));
        let alone = error("Dax", admission("second"));
        assert!(alone.contains("behind another one"), "{alone}");
        let cache = error("Cache|Dax", json!({"cache": {"admission": "first"}}));
        assert!(cache.contains("behind another one"), "{cache}");
        let typo = error("Cache|Dax", json!({"dax": {"admision": "first"}}));
        assert!(typo.contains("did you mean \"admission\""), "{typo}");
    }
}
