//! `kvdepot rm`: blocks, an arena, or everything that kvdepot made.

use std::collections::{BTreeMap, HashSet};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use kvdepot_store::inspect::{Inspection, Listed};
use kvdepot_store::{Config, Key, NamespaceId};
use serde::Serialize;

use super::{matches, only, served};
use crate::args::Rm;
use crate::error::Error;
use crate::leftovers;
use crate::output::{Output, bytes, note, some};

/// What was removed, or why it was not.
#[derive(Serialize)]
struct Removed {
    kind: &'static str,
    path: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<u64>,
    bytes: u64,
    removed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

pub(crate) fn run(args: &Rm, output: &mut Output) -> Result<i32, Error> {
    if args.all {
        return remove_all(args.yes, output);
    }
    let named = args.arena.path.is_some() || args.arena.instance.is_some();
    if args.namespace.is_some() || !args.keys.is_empty() {
        return match args.arena.socket() {
            Some(socket) => remove_served(args, &socket, output),
            None => remove_blocks(args, output),
        };
    }
    if !named {
        return Err(Error::Nameless);
    }
    let path = args.arena.path()?;
    if !path.exists() {
        return Err(Error::Absent(path));
    }
    // Before the question, whose answer would be in vain.
    kvdepot_store::check_erasable(&path)?;
    if !args.yes && !confirmed(&format!("remove the arena {}?", path.display()))? {
        return Err(Error::Unconfirmed);
    }
    let bytes = kvdepot_store::erase(&path).map_err(owned)?;
    report(removed("arena", &path, bytes), output)?;
    Ok(crate::status::OK)
}

/// Without the advice to wait longer, which has no option here.
fn owned(error: kvdepot_store::Error) -> Error {
    match error {
        kvdepot_store::Error::Locked {
            path, pid, host, ..
        } => Error::Owned { path, pid, host },
        other => other.into(),
    }
}

fn removed(kind: &'static str, path: &Path, bytes: u64) -> Removed {
    Removed {
        kind,
        path: path.into(),
        blocks: None,
        bytes,
        removed: true,
        reason: None,
    }
}

fn report(item: Removed, output: &mut Output) -> Result<(), Error> {
    if output.is_json() {
        return output.object(&item);
    }
    let path = item.path.display().to_string();
    let bytes = bytes(item.bytes);
    output.line(&match (item.blocks, item.reason) {
        (_, Some(reason)) => match reason.strip_prefix(&path) {
            Some(rest) => format!("kept {} {path}{rest}", item.kind),
            None => format!("kept {} {path}: {reason}", item.kind),
        },
        (Some(blocks), None) => format!("removed {}, {bytes}, from {path}", some(blocks, "block")),
        (None, None) => format!("removed {} {path}, {bytes}", item.kind),
    })
}

/// Removes blocks through the process that has the depot open.
fn remove_served(args: &Rm, socket: &Path, output: &mut Output) -> Result<i32, Error> {
    let cleared = served::rm(args, socket)?;
    let item = Removed {
        blocks: Some(cleared.blocks),
        ..removed(
            "blocks",
            Path::new(&format!("unix:{}", socket.display())),
            cleared.bytes,
        )
    };
    report(item, output)?;
    end(cleared.missing, output)
}

fn end(missing: bool, output: &mut Output) -> Result<i32, Error> {
    if missing {
        output.flush()?;
        note("some keys had no block");
    }
    Ok(if missing {
        crate::status::PROBLEMS
    } else {
        crate::status::OK
    })
}

/// Removes blocks as the arena's owner, or through it.
fn remove_blocks(args: &Rm, output: &mut Output) -> Result<i32, Error> {
    let inspection = args.arena.inspect()?;
    if let (Some(owner), true) = inspection.owner()
        && !owner.socket.is_empty()
    {
        return remove_served(args, Path::new(&owner.socket), output);
    }
    let path = inspection.path().to_path_buf();
    let doomed = doomed(&inspection, args)?;
    drop(inspection);
    let settings = serde_json::json!({
        "socket": "off", "lock_wait": "0s", "lanes": 1, "dax": {"path": &path},
    });
    // Also when nothing is to be removed: an arena in use is an error either way.
    let depot = kvdepot_service::open(&Config::new("Dax", &settings)?).map_err(owned)?;
    let (mut blocks, mut bytes) = (0, 0);
    for (id, listed) in &doomed {
        let namespace = depot.namespace_by_id(*id);
        blocks += if args.keys.is_empty() {
            namespace.clear()?
        } else {
            let keys: Vec<Key> = listed.iter().map(|b| b.record.identity.key).collect();
            namespace.remove(&keys)?
        } as u64;
        bytes += listed.iter().map(|block| block.record.len).sum::<u64>();
    }
    depot.close();
    let item = Removed {
        blocks: Some(blocks),
        ..removed("blocks", &path, bytes)
    };
    report(item, output)?;
    let found = doomed
        .values()
        .flatten()
        .map(|block| block.record.identity.key);
    let (found, given): (HashSet<Key>, HashSet<Key>) =
        (found.collect(), args.keys.iter().copied().collect());
    end(!given.is_subset(&found), output)
}

/// The blocks to remove, by namespace.
fn doomed(inspection: &Inspection, args: &Rm) -> Result<BTreeMap<NamespaceId, Vec<Listed>>, Error> {
    let (blocks, _) = inspection.blocks()?;
    let mut doomed: BTreeMap<NamespaceId, Vec<Listed>> = BTreeMap::new();
    for block in blocks {
        let identity = block.record.identity;
        if matches(identity.namespace, args.namespace.as_deref()) {
            let wanted = args.keys.is_empty() || args.keys.contains(&identity.key);
            let of = doomed.entry(identity.namespace).or_default();
            if wanted {
                of.push(block);
            }
        }
    }
    let Some(digits) = &args.namespace else {
        return Ok(doomed);
    };
    let found: Vec<NamespaceId> = doomed.keys().copied().collect();
    only(&found, digits, &inspection.path().display())?;
    Ok(doomed)
}

fn remove_all(yes: bool, output: &mut Output) -> Result<i32, Error> {
    let found = leftovers::find()?;
    if found.is_empty() {
        note("nothing to remove");
        return Ok(crate::status::OK);
    }
    if !yes {
        for item in &found {
            note(&format!("{} {}", item.kind.name(), item.path.display()));
        }
        if !confirmed("remove all of these?")? {
            return Err(Error::Unconfirmed);
        }
    }
    let mut status = crate::status::OK;
    for item in &found {
        let kind = item.kind.name();
        let row = item.remove().map_or_else(
            |error| Removed {
                removed: false,
                reason: Some(error.to_string()),
                ..removed(kind, &item.path, 0)
            },
            |bytes| removed(kind, &item.path, bytes),
        );
        if !row.removed {
            status = crate::status::PROBLEMS;
        }
        report(row, output)?;
    }
    leftovers::remove_empty_directories();
    Ok(status)
}

/// Whether a person says yes; no where there is none.
fn confirmed(question: &str) -> Result<bool, Error> {
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    let mut stderr = std::io::stderr().lock();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
