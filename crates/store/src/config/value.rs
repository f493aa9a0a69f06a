//! What a file or a caller has given, read as the schema asks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_arena::Error;
use serde_json::Value;

use super::schema::Kind;
use super::{devices, size};

/// Reads a YAML file into a neutral value.
///
/// # Errors
/// [`Error::Io`] and [`Error::Config`].
pub fn read_yaml(path: &Path) -> Result<Value, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
        path: path.into(),
        source,
    })?;
    let refused =
        |value: String, allowed| Error::config(path.display().to_string(), value, allowed);
    let once = "a YAML mapping in which each option stands once";
    // By YAML's own value, in which no name stands twice.
    let read: serde_yaml_ng::Value =
        serde_yaml_ng::from_str(&text).map_err(|error| refused(unreadable(&error), once))?;
    if read.is_null() {
        let allowed = "options such as pipeline: Cache|Dax (docs/configuration.md has them)";
        return Err(refused("a file without any".into(), allowed));
    }
    if !read.is_mapping() {
        // What it holds may be long, and no part of it was meant for this.
        let kind = if read.is_sequence() {
            "a list"
        } else {
            "a plain value"
        };
        return Err(refused(
            kind.into(),
            "a YAML mapping of options to their values",
        ));
    }
    serde_json::to_value(read).map_err(|error| refused(unreadable(&error), once))
}

fn unreadable(error: &dyn std::error::Error) -> String {
    format!("a file that is no such mapping ({error})")
}

/// What permission bits may be, for messages. As a number they would be read as a decimal one.
const MODE_HELP: &str = "permission bits in octal and in quotes, from \"0600\" to \"0777\"";

pub(super) fn expand_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.into(),
    }
}

/// A path from the root on. Media and sockets are known by theirs wherever they are named, in
/// listings, labels and notes, and to processes in other directories.
pub(super) fn absolute(path: &str) -> PathBuf {
    let path = expand_home(path);
    // Without a working directory the opening says so.
    std::path::absolute(&path).unwrap_or(path)
}

/// A value read as its kind asks; only the field of that kind is set.
#[derive(Default)]
pub(super) struct Parsed {
    pub(super) number: u64,
    pub(super) duration: Duration,
    pub(super) flag: bool,
    pub(super) text: String,
}

impl Parsed {
    pub(super) fn new(field: &str, kind: Kind, value: &Value) -> Result<Parsed, Error> {
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
                _ => return refuse("a whole number from 1"),
            },
            Kind::Flag => match value {
                Value::Bool(flag) => parsed.flag = *flag,
                _ => return refuse("true or false"),
            },
            Kind::Text => match value {
                Value::String(text) if !text.is_empty() => parsed.text.clone_from(text),
                _ => return refuse("a text that is not empty"),
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
            Kind::Devices => return refuse(devices::HELP),
        }
        Ok(parsed)
    }

    pub(super) fn count(&self, field: &str, most: u64) -> Result<u64, Error> {
        if self.number > most {
            return Err(Error::config(field, self.number, format!("at most {most}")));
        }
        Ok(self.number)
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn a_file_says_each_thing_once_and_says_something() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("depot.yaml");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Config::from_file(&path).map_err(|error| error.to_string())
        };
        for (text, says) in [
            ("", "without any"),
            ("# dax:\n", "without any"),
            ("null", "without any"),
            ("lanes: 1\nlanes: 2\n", "\"lanes\""),
            (
                "cache:\n  capacity: 1MiB\n  capacity: 2MiB\n",
                "\"capacity\"",
            ),
            ("{\"lanes\": 1, \"lanes\": 2}", "\"lanes\""),
            (
                "# ports\n---\nssh 22\n---\nftp 21\n",
                "a file that is no such mapping",
            ),
            ("- lanes", "a list is not allowed; allowed: a YAML mapping"),
            (
                "some words",
                "a plain value is not allowed; allowed: a YAML mapping",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
        assert_eq!(read("lanes: 2\ncache:\n").unwrap().lanes, Some(2));
    }
}
