//! A depot's options, from a file and from the command line.

use std::path::Path;

use kvdepot_store::config::{read_below, schema};
use kvdepot_store::option::Kind;
use serde_json::{Map, Value};

use crate::error::Error;

/// The options of the file, with those of the command line in their place; none that is given
/// `beside` them by another argument, too.
pub(super) fn read(
    file: Option<&Path>,
    options: &[String],
    pipeline: Option<&str>,
    beside: impl Fn(&str) -> Option<String>,
) -> Result<Value, Error> {
    let mut given = Value::Object(Map::new());
    for option in options {
        let Some((name, value)) = option.split_once('=').filter(|(name, _)| !name.is_empty())
        else {
            return Err(refused(
                "--option",
                option,
                "NAME=VALUE, such as cache.capacity=8GiB",
            ));
        };
        if let Some(beside) = beside(name).filter(|beside| beside != value) {
            let allowed = format!("the {name} once: {beside} is given beside it");
            return Err(refused("--option", option, &allowed));
        }
        set(&mut given, name, value_of(name, value));
    }
    if let Some(pipeline) = pipeline {
        set(&mut given, "pipeline", pipeline.into());
    }
    Ok(match file {
        Some(path) => read_below(path, given)?,
        None => given,
    })
}

/// Numbers and flags as such, all else as text, and all where the schema asks for one.
fn value_of(name: &str, value: &str) -> Value {
    let (section, option) = name.split_once('.').unwrap_or(("", name));
    let kind = schema::find(section, option).map(|spec| spec.kind);
    match (kind, value) {
        (Some(Kind::Text | Kind::Mode), _) => value.into(),
        (_, "true") => true.into(),
        (_, "false") => false.into(),
        _ => value
            .parse::<u64>()
            .map_or_else(|_| value.into(), Value::from),
    }
}

/// Sets `section.name` or `name`; what is in the way is refused by the schema.
pub(super) fn set(all: &mut Value, name: &str, value: Value) {
    let (section, name) = match name.split_once('.') {
        Some((section, name)) => (Some(section), name),
        None => (None, name),
    };
    let Some(all) = all.as_object_mut() else {
        return;
    };
    let into = match section {
        None => Some(all),
        Some(section) => {
            let inner = all
                .entry(section)
                .or_insert_with(|| Value::Object(Map::new()));
            inner.as_object_mut()
        }
    };
    if let Some(into) = into {
        into.insert(name.to_owned(), value);
    }
}

pub(super) fn refused(field: &'static str, value: &str, allowed: &str) -> Error {
    Error::Usage {
        field,
        value: value.into(),
        allowed: allowed.into(),
    }
}
