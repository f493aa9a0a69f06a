//! `kvdepot quarantine`: namespaces that the engines of this user do not use any more.
//!
//! Each is a file `quarantine/DIGEST.json` in the cache directory, which an engine has written
//! (`python/kvdepot/engine/quarantine.py`). A file that cannot be read counts as one, too.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kvdepot_host::dirs;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::one_line;
use crate::args::QuarantineCommand;
use crate::error::Error;
use crate::output::{Output, Table, note, utc};
use crate::status::OK;

/// A namespace in quarantine.
#[derive(Serialize)]
struct Entry {
    /// The digest.
    namespace: String,
    #[serde(flatten)]
    said: Said,
    path: PathBuf,
}

/// Fields of the engine's file; those that cannot be read are absent.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Said {
    /// Unix seconds.
    since: Option<u64>,
    engine: Option<String>,
    reason: Option<String>,
}

/// Runs the command.
pub(crate) fn run(command: QuarantineCommand, output: &mut Output) -> Result<i32, Error> {
    let found = entries(&dirs::cache_dir()?.join("quarantine"))?;
    match command {
        QuarantineCommand::List => list(&found, output),
        QuarantineCommand::Release { namespace, all } => {
            let digits = namespace.unwrap_or_default();
            release(&found, &digits, all, output)
        }
    }
}

fn list(found: &[Entry], output: &mut Output) -> Result<i32, Error> {
    if output.is_json() {
        found.iter().try_for_each(|entry| output.object(entry))?;
        return Ok(OK);
    }
    if found.is_empty() {
        note("no namespace is in quarantine");
        return Ok(OK);
    }
    let mut table = Table::new(&["namespace", "since", "engine", "reason"]);
    for Entry {
        namespace, said, ..
    } in found
    {
        table.row([
            namespace.clone(),
            said.since.map_or_else(|| "-".into(), utc),
            said.engine.clone().unwrap_or_else(|| "-".into()),
            one_line(said.reason.as_deref().unwrap_or("unknown")),
        ]);
    }
    output.table(&table)?;
    Ok(OK)
}

fn release(found: &[Entry], digits: &str, all: bool, output: &mut Output) -> Result<i32, Error> {
    let digits = digits.to_ascii_lowercase();
    let named = |entry: &&Entry| all || entry.namespace.starts_with(&digits);
    let chosen: Vec<&Entry> = found.iter().filter(named).collect();
    if !all && chosen.len() != 1 {
        let names: Vec<&str> = found.iter().map(|entry| entry.namespace.as_str()).collect();
        return Err(Error::Usage {
            field: "DIGEST",
            value: digits,
            allowed: match names.as_slice() {
                [] => "no DIGEST, because no namespace is in quarantine".into(),
                names => format!("a prefix that matches only one of {}", names.join(", ")),
            },
        });
    }
    for entry in chosen {
        fs::remove_file(&entry.path).map_err(Error::io(&entry.path))?;
        if output.is_json() {
            output.object(&json!({ "namespace": entry.namespace, "released": true }))?;
        } else {
            output.line(&format!("released namespace {}", entry.namespace))?;
        }
    }
    Ok(OK)
}

/// The namespaces in quarantine, by digest.
fn entries(directory: &Path) -> Result<Vec<Entry>, Error> {
    let listed = match fs::read_dir(directory) {
        Ok(listed) => listed,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(directory)(error)),
    };
    let mut found = Vec::new();
    for listed in listed {
        let path = listed.map_err(Error::io(directory))?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let is_entry = path.extension().is_some_and(|end| end == "json");
        let Some(namespace) = stem.filter(|_| is_entry).map(str::to_owned) else {
            continue;
        };
        let said = fs::read(&path).ok();
        let said = said.and_then(|text| serde_json::from_slice(&text).ok());
        found.push(Entry {
            namespace,
            said: said.unwrap_or_default(),
            path,
        });
    }
    found.sort_by(|one, other| one.namespace.cmp(&other.namespace));
    Ok(found)
}
