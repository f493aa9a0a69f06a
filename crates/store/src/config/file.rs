//! Configuration files.

use std::path::Path;

use kvdepot_arena::Error;
use serde_json::Value;

use super::ucm;

/// Options of a configuration file.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "plain values")]
pub struct OfFile {
    /// Options by their names and sections, as the schema defines them.
    pub options: Value,
    /// True if the file is one of UCM, which was translated to these options.
    pub is_ucms: bool,
}

/// Reads the options of a YAML file.
///
/// A configuration file of UCM is translated to equivalent options.
///
/// # Errors
///
/// * [`Error::Io`] if the file cannot be read.
/// * [`Error::Config`] if the content is not a mapping of options.
pub fn read_yaml(path: &Path) -> Result<Value, Error> {
    Ok(read_beside(path, &Value::Null)?.options)
}

/// Reads the options of a file and overrides them with those of `given`, section by section.
///
/// # Errors
///
/// Those of [`read_yaml`].
pub fn read_below(path: &Path, given: Value) -> Result<Value, Error> {
    let mut all = read_beside(path, &given)?.options;
    override_with(&mut all, given);
    Ok(all)
}

/// Reads the options of a file without overriding them with those of `given`.
///
/// A file of UCM is translated for the pipeline in `given`, if there is one.
///
/// # Errors
///
/// Those of [`read_yaml`].
pub fn read_beside(path: &Path, given: &Value) -> Result<OfFile, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
        path: path.into(),
        source,
    })?;
    of_text(&path.display().to_string(), &text, given)
}

/// Parses a text as a configuration file and overrides its options with those of `given`.
///
/// Error messages call the text `name`.
///
/// # Errors
///
/// [`Error::Config`] if the content is not a mapping of options.
pub fn read_text(name: &str, text: &str, given: Value) -> Result<Value, Error> {
    let mut all = of_text(name, text, &given)?.options;
    override_with(&mut all, given);
    Ok(all)
}

fn of_text(name: &str, text: &str, given: &Value) -> Result<OfFile, Error> {
    let refused = |value: String, allowed| Error::config(name, value, allowed);
    let once = "a YAML mapping in which each option occurs once";
    // By YAML's own value, in which no name stands twice.
    let mut read: serde_yaml_ng::Value =
        serde_yaml_ng::from_str(text).map_err(|error| refused(unreadable(&error), once))?;
    if read.is_null() {
        let allowed = "options such as pipeline: Cache|Dax (docs/configuration.md lists them)";
        return Err(refused("an empty file".into(), allowed));
    }
    if !read.is_mapping() {
        // What it holds may be long, and no part of it was meant for this.
        let kind = if read.is_sequence() {
            "a list"
        } else {
            "a scalar"
        };
        return Err(refused(
            kind.into(),
            "a YAML mapping of options to their values",
        ));
    }
    show_infinite(&mut read);
    let read = serde_json::to_value(read).map_err(|error| refused(unreadable(&error), once))?;
    let translated = ucm::translate(&read, given)?;
    Ok(OfFile {
        is_ucms: translated.is_some(),
        options: translated.unwrap_or(read),
    })
}

/// What no JSON has, `.inf` and `.nan`, is refused by its own name, and not as nothing.
fn show_infinite(value: &mut serde_yaml_ng::Value) {
    use serde_yaml_ng::Value;
    match value {
        Value::Number(number) if !number.is_finite() => *value = number.to_string().into(),
        Value::Sequence(items) => items.iter_mut().for_each(show_infinite),
        Value::Mapping(options) => options.values_mut().for_each(show_infinite),
        _ => {}
    }
}

/// Options of `given` take the place of those in `all`, section by section.
fn override_with(all: &mut Value, given: Value) {
    match (all, given) {
        (Value::Object(all), Value::Object(given)) => {
            for (name, value) in given {
                match all.get_mut(&name) {
                    Some(known) if known.is_object() && value.is_object() => {
                        override_with(known, value);
                    }
                    _ => {
                        all.insert(name, value);
                    }
                }
            }
        }
        (all @ Value::Null, given) => *all = given,
        // Not a mapping: the schema's refusal says so.
        _ => {}
    }
}

fn unreadable(error: &dyn std::error::Error) -> String {
    format!("a file that is not valid ({error})")
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
            ("", "an empty file"),
            ("# dax:\n", "an empty file"),
            ("null", "an empty file"),
            ("lanes: 1\nlanes: 2\n", "\"lanes\""),
            (
                "cache:\n  capacity: 1MiB\n  capacity: 2MiB\n",
                "\"capacity\"",
            ),
            ("{\"lanes\": 1, \"lanes\": 2}", "\"lanes\""),
            (
                "# ports\n---\nssh 22\n---\nftp 21\n",
                "a file that is not valid",
            ),
            ("- lanes", "a list is not allowed; allowed: a YAML mapping"),
            (
                "some words",
                "a scalar is not allowed; allowed: a YAML mapping",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
        assert_eq!(read("lanes: 2\ncache:\n").unwrap().lanes, Some(2));
        let endless = read("close_timeout: .inf\n").unwrap_err();
        assert!(endless.contains("close_timeout: \".inf\""), "{endless}");
    }
}
