//! What goes on into a tier from the one before it: options that the section of any tier takes.

use kvdepot_arena::Error;
use serde_json::Value;

use super::Config;
use super::schema::EDGE;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EdgeConfig {
    /// When a block does.
    pub admission: Touch,
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
        edge.admission = match parsed.text.as_str() {
            "second" => Touch::Second,
            _ => Touch::First,
        };
        Ok(())
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
        let alone = error("Dax", admission("second"));
        assert!(alone.contains("behind another one"), "{alone}");
        let cache = error("Cache|Dax", json!({"cache": {"admission": "first"}}));
        assert!(cache.contains("behind another one"), "{cache}");
        let typo = error("Cache|Dax", json!({"dax": {"admision": "first"}}));
        assert!(typo.contains("did you mean \"admission\""), "{typo}");
    }
}
