//! What a file or a caller has given, read as an option asks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_arena::{Error, size};
use serde_json::Value;

use super::spec::Kind;

/// What permission bits may be, for messages. As a number they would be read as a decimal one.
const MODE_HELP: &str = "permission bits in octal and in quotes, \"0600\" to \"0777\"";

/// Allowed values of a text, for messages.
const TEXT_HELP: &str = "text of at least one character";

pub(crate) fn expand_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.into(),
    }
}

/// A path from the root on. Media and sockets are known by theirs wherever they are named, in
/// listings, labels and notes, and to processes in other directories.
pub(crate) fn absolute(path: &str) -> PathBuf {
    let path = expand_home(path);
    // Without a working directory the opening says so.
    std::path::absolute(&path).unwrap_or(path)
}

/// A value read as its kind asks; only the field of that kind is set.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Parsed {
    pub(crate) number: u64,
    pub(crate) duration: Duration,
    pub(crate) flag: bool,
    pub(crate) text: String,
}

impl Parsed {
    pub(crate) fn new(field: &str, kind: Kind, value: &Value) -> Result<Parsed, Error> {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let refuse = |allowed: &str| Err(Error::config(field, value, allowed));
        let mut parsed = Parsed::default();
        match kind {
            Kind::Size => match size::size(&text) {
                Some(bytes) if bytes > 0 => parsed.number = bytes,
                _ => return refuse(size::SIZE_HELP),
            },
            Kind::Duration => match size::duration(&text) {
                Some(duration) => parsed.duration = duration,
                None => return refuse(size::DURATION_HELP),
            },
            Kind::Count => match text.parse() {
                Ok(count) if count > 0 => parsed.number = count,
                _ => return refuse("a whole number, 1 or more"),
            },
            Kind::Flag => match value {
                Value::Bool(flag) => parsed.flag = *flag,
                _ => return refuse("true or false"),
            },
            Kind::Text => match value {
                Value::String(text) if !text.is_empty() => parsed.text.clone_from(text),
                Value::String(_) | Value::Null | Value::Bool(_) => return refuse(TEXT_HELP),
                // It may be a list with a token.
                _ => return Err(Error::config(field, "(not shown)", TEXT_HELP)),
            },
            Kind::Mode => {
                let text = value.as_str().unwrap_or_default();
                let bits = u64::from_str_radix(text, 8).ok();
                match bits.filter(|bits| bits & !0o777 == 0 && bits & 0o600 == 0o600) {
                    Some(bits) => parsed.number = bits,
                    None => return refuse(MODE_HELP),
                }
            }
            Kind::Choice(words) => match words.iter().find(|word| **word == text) {
                Some(word) => parsed.text = (*word).to_owned(),
                None => return refuse(&format!("one of {}", words.join(", "))),
            },
            Kind::Devices => return refuse("a list of devices"),
        }
        Ok(parsed)
    }

    pub(crate) fn count(&self, field: &str, most: u64) -> Result<u64, Error> {
        if self.number > most {
            return Err(Error::config(field, self.number, format!("at most {most}")));
        }
        Ok(self.number)
    }
}

/// Settings of one tier's section, parsed by the types of its options.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section(BTreeMap<&'static str, Parsed>);

impl Section {
    pub(crate) fn set(&mut self, name: &'static str, parsed: Parsed) {
        self.0.insert(name, parsed);
    }

    /// Returns the option `name` as a size in bytes or a whole number, or `None` if it is not set.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        self.0.get(name).map(|parsed| parsed.number)
    }

    /// Returns the option `name` as a duration, or `None` if it is not set.
    #[must_use]
    pub fn duration(&self, name: &str) -> Option<Duration> {
        self.0.get(name).map(|parsed| parsed.duration)
    }

    /// Returns the option `name` as `true` or `false`, or `None` if it is not set.
    #[must_use]
    pub fn flag(&self, name: &str) -> Option<bool> {
        self.0.get(name).map(|parsed| parsed.flag)
    }

    /// Returns the option `name` as a text or the word of a choice, or `None` if it is not set.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|parsed| parsed.text.as_str())
    }

    /// Returns the option `name` as an absolute path, or `None` if it is not set.
    #[must_use]
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.text(name).map(absolute)
    }
}
