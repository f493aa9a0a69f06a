//! A depot's options, from a file and from the command line.

use std::path::Path;

use kvdepot_store::config::{read_below, set, value_of};
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
            let allowed = format!("{name} only once; {beside} is given as an argument");
            return Err(refused("--option", option, &allowed));
        }
        set(&mut given, name, value_of(name, value));
    }
    if let Some(pipeline) = pipeline {
        set(&mut given, "pipeline", pipeline.into());
    }
    Ok(match file {
        Some(path) => read_below(path, given).map_err(|error| match error {
            kvdepot_store::Error::Io { source, .. } => Error::unreadable("--config", path)(source),
            other => other.into(),
        })?,
        None => given,
    })
}

pub(super) fn refused(field: &'static str, value: &str, allowed: &str) -> Error {
    Error::Usage {
        field,
        value: value.into(),
        allowed: allowed.into(),
    }
}
