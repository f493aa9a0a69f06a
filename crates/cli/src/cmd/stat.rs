//! `kvdepot stat`: one arena in a few lines.

use std::path::Path;

use serde::Serialize;

use kvdepot_host::peer;
use kvdepot_media::Kind;
use kvdepot_store::format::owner::Owner;
use kvdepot_store::format::superblock::VERSION;
use kvdepot_store::inspect::Inspection;

use super::served;
use crate::args::Stat;
use crate::error::Error;
use crate::output::{Output, Table, bytes, count, percent, utc};

/// What the command prints.
#[derive(Serialize)]
pub(crate) struct Summary {
    path: String,
    kind: &'static str,
    pub(crate) capacity_bytes: u64,
    medium_bytes: u64,
    data_bytes: u64,
    used_bytes: u64,
    pub(crate) live_bytes: u64,
    pub(crate) blocks: u64,
    blocks_max: u64,
    pub(crate) damaged_records: usize,
    /// Offsets of superblocks that do not verify, beside the one in force.
    pub(crate) damaged_superblocks: Vec<u64>,
    namespaces: usize,
    owner: Option<Named>,
    /// Whether a process has it open as its owner now.
    pub(crate) owned: bool,
    /// Processes that worked for an earlier owner, and keep the next from storing anything.
    pub(crate) orphans: Vec<Orphan>,
    generation: u64,
    created: u64,
    created_by: String,
    uuid: String,
    format_version: u32,
}

/// A process that may still write for an owner that is gone.
#[derive(Serialize)]
pub(crate) struct Orphan {
    pub(crate) pid: u32,
    name: String,
    stopped: bool,
}

impl std::fmt::Display for Orphan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stopped = if self.stopped { ", stopped" } else { "" };
        write!(f, "{} ({}{stopped})", self.pid, self.name)
    }
}

pub(crate) fn orphans_of(inspection: &Inspection) -> Vec<Orphan> {
    let each = inspection.orphans().into_iter();
    each.map(|holder| Orphan {
        pid: holder.pid,
        name: holder.name,
        stopped: holder.stopped,
    })
    .collect()
}

/// Who opened it last.
#[derive(Serialize)]
struct Named {
    pid: u32,
    host: String,
    socket: String,
    /// Whether that process still runs; unknown from another host.
    running: Option<bool>,
}

impl From<Owner> for Named {
    fn from(owner: Owner) -> Named {
        let identity = peer::Identity {
            pid: owner.pid,
            start_ticks: owner.start_time,
        };
        let here = owner.host == peer::hostname();
        Named {
            running: here.then(|| identity.is_running().ok()).flatten(),
            pid: owner.pid,
            host: owner.host,
            socket: owner.socket,
        }
    }
}

impl Summary {
    pub(crate) fn of(inspection: &Inspection) -> Result<Summary, Error> {
        let (blocks, damaged) = inspection.blocks()?;
        let superblock = inspection.superblock();
        let (owner, owned) = inspection.owner();
        let namespaces: std::collections::HashSet<_> = blocks
            .iter()
            .map(|block| block.record.identity.namespace)
            .collect();
        Ok(Summary {
            path: inspection.path().display().to_string(),
            kind: match inspection.kind() {
                Kind::Dax => "dax",
                Kind::Block => "block",
                _ => "file",
            },
            capacity_bytes: superblock.capacity,
            medium_bytes: inspection.medium_bytes(),
            data_bytes: superblock.capacity - superblock.data,
            used_bytes: blocks.iter().map(|b| b.record.extents.room()).sum(),
            live_bytes: blocks.iter().map(|b| b.record.len).sum(),
            blocks: blocks.len() as u64,
            blocks_max: superblock.records,
            damaged_records: damaged.len(),
            damaged_superblocks: inspection.damaged_superblocks()?,
            namespaces: namespaces.len(),
            owner: owner.map(Named::from),
            owned,
            orphans: orphans_of(inspection),
            generation: superblock.generation,
            created: superblock.created,
            created_by: superblock.created_by.clone(),
            uuid: superblock.uuid.iter().map(|b| format!("{b:02x}")).collect(),
            format_version: VERSION,
        })
    }

    /// Who keeps the next owner from storing anything, in words.
    pub(crate) fn orphans(&self) -> Option<String> {
        let names: Vec<String> = self.orphans.iter().map(Orphan::to_string).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// Who has it, in words.
    pub(crate) fn owner(&self) -> String {
        match (&self.owner, self.owned) {
            (None, false) => "none".into(),
            (None, true) => "a process that has not recorded its ID yet".into(),
            (Some(owner), false) => {
                format!("none (last: process {} on {})", owner.pid, owner.host)
            }
            (Some(owner), true) => {
                let state = match owner.running {
                    Some(true) => "running",
                    // The lock is held, so somebody lives: in another pid namespace, or a
                    // successor that has not written its name yet.
                    Some(false) => "running, not visible from this process",
                    None => "on another host",
                };
                format!("process {} on {}, {state}", owner.pid, owner.host)
            }
        }
    }
}

/// What is said of a superblock that does not verify.
pub(crate) fn dead_superblock(at: u64) -> String {
    format!(
        "the copy at {at} is damaged; the other copy is used, and the next owner repairs this one"
    )
}

pub(crate) fn run(args: &Stat, output: &mut Output) -> Result<i32, Error> {
    if let Some(socket) = args.arena.socket() {
        return served::stat(args, &socket, output);
    }
    let inspection = args.arena.inspect()?;
    if args.metrics {
        let socket = match inspection.owner() {
            (Some(owner), true) if !owner.socket.is_empty() => owner.socket,
            _ => {
                return Err(Error::Usage {
                    field: "--metrics",
                    value: inspection.path().display().to_string(),
                    allowed: "the arena of a running depot that has a socket".into(),
                });
            }
        };
        return served::stat(args, Path::new(&socket), output);
    }
    let summary = Summary::of(&inspection)?;
    if output.is_json() {
        output.object(&summary)?;
        return Ok(crate::status::OK);
    }
    let mut table = Table::pairs();
    let mut row = |name: &str, value: String| table.row([name.into(), value]);
    row("path", summary.path.clone());
    row("kind", summary.kind.into());
    row("capacity", bytes(summary.capacity_bytes));
    if summary.medium_bytes < summary.capacity_bytes {
        row("truncated", format!("to {}", bytes(summary.medium_bytes)));
    }
    let fill = percent(summary.used_bytes, summary.data_bytes);
    let of = bytes(summary.data_bytes);
    row(
        "used",
        format!("{} of {of} ({fill})", bytes(summary.used_bytes)),
    );
    row("payload", bytes(summary.live_bytes));
    row("blocks", count(summary.blocks));
    let fill = percent(summary.blocks, summary.blocks_max);
    row(
        "records",
        format!("{} ({fill} used)", count(summary.blocks_max)),
    );
    row("damaged records", count(summary.damaged_records as u64));
    for at in &summary.damaged_superblocks {
        row("superblock", dead_superblock(*at));
    }
    row("namespaces", count(summary.namespaces as u64));
    row("owner", summary.owner());
    if let (Some(owner), true) = (&summary.owner, summary.owned)
        && !owner.socket.is_empty()
    {
        row("socket", owner.socket.clone());
    }
    if let Some(orphans) = summary.orphans() {
        let says = "may still write for an earlier owner; nothing is stored until they exit";
        row("orphans", format!("{orphans}: {says}"));
    }
    row("generation", count(summary.generation));
    let by = &summary.created_by;
    row("created", format!("{} by {by}", utc(summary.created)));
    row("uuid", summary.uuid.clone());
    output.table(&table)?;
    Ok(crate::status::OK)
}
