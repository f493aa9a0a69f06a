//! The directory of a tier `Posix`, as tests open it and look at it from outside.

#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvdepot_store::{Config, Depot, Error};
use serde_json::{Value, json};

use crate::common::eventually;

pub(crate) const LEN: usize = 70_001;

/// What a block of that length takes.
pub(crate) const ROOM: u64 = (4096 + 70_001_u64).next_multiple_of(4096);

pub(crate) fn try_open(pipeline: &str, dir: &Path, posix: Value) -> Result<Depot, Error> {
    let mut settings = json!({"lanes": 2, "close_timeout": "10s", "socket": "off"});
    for tier in pipeline.split('|') {
        match tier {
            "Cache" => settings["cache"] = json!({"capacity": "1MiB"}),
            "Dax" => settings["dax"] = json!({"path": dir.join("dax"), "capacity": "2MiB"}),
            "Nvme" => settings["nvme"] = json!({"path": dir.join("nvme"), "capacity": "4MiB"}),
            _ => {
                // A lookup may take longer than a machine stands still.
                settings["posix"] = json!({
                    "path": dir.join("posix"), "capacity": "64MiB", "lookup_timeout": "60s",
                });
                for (name, value) in posix.as_object().unwrap() {
                    settings["posix"][name] = value.clone();
                }
            }
        }
    }
    Depot::open(&Config::new(pipeline, &settings)?)
}

pub(crate) fn open_with(pipeline: &str, dir: &Path, posix: Value) -> Depot {
    try_open(pipeline, dir, posix).unwrap()
}

pub(crate) fn open(dir: &Path) -> Depot {
    open_with("Posix", dir, json!({}))
}

/// The published files.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(dir.join("posix/blocks")).unwrap();
    let files = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap());
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

/// Which file it is: a number is used again.
pub(crate) type Which = (u64, Option<SystemTime>);

/// All files under `new` and `blocks`, with what they take: their length or what they have been
/// given, whichever is more.
pub(crate) fn look(at: &Path) -> HashMap<Which, u64> {
    let mut found = HashMap::new();
    let mut folders = vec![at.join("posix/blocks"), at.join("posix/new")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            match meta.is_dir() {
                true => folders.push(entry.path()),
                false => {
                    found.insert(which(&meta), room(&meta));
                }
            }
        }
    }
    found
}

fn which(meta: &Metadata) -> Which {
    (meta.ino(), meta.created().ok())
}

fn room(meta: &Metadata) -> u64 {
    let given = meta.blocks() * 512;
    given.max(meta.len().next_multiple_of(4096))
}

/// What its blocks take, those that are being written too.
pub(crate) fn used(at: &Path) -> u64 {
    look(at).values().sum()
}

/// What was surely there at one moment: what two looks have found.
pub(crate) fn at_once(at: &Path) -> u64 {
    let before = look(at);
    let now = look(at).into_iter();
    now.filter(|(which, _)| before.contains_key(which))
        .map(|(_, room)| room)
        .sum()
}

/// What the directory's file says is used or granted.
pub(crate) fn counted(dir: &Path) -> u64 {
    let bytes = fs::read(dir.join("posix/usage")).unwrap();
    u64::from_le_bytes(bytes[16..24].try_into().unwrap())
}

/// Waits until nothing is pinned or being written.
pub(crate) fn at_rest(depot: &Depot) {
    eventually("the end of pins and reservations", || {
        let tiers = depot.stats().tiers;
        tiers
            .iter()
            .all(|tier| tier.pinned_blocks + tier.reserved_blocks == 0)
    });
}
