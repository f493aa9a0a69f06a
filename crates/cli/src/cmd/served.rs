//! What the commands ask of a depot that a process has open, at its socket.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_host::{dirs, socket};
use kvdepot_store::{Depot, Key, NamespaceId, NamespaceUsage, Pin};
use serde::Serialize;

use super::{Listing, cut, matches, one_line, only};
use crate::args::{Ls, Rm, Stat};
use crate::error::Error;
use crate::output::{Output, Table, bytes, count, note, percent};

/// How long one depot among many may take to answer: one that is stopped is named as such.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Blocks of a page.
const PAGE: usize = 4096;

/// Attaches to the depot at a socket.
pub(crate) fn connect(socket: &Path) -> Result<Depot, Error> {
    if socket.as_os_str().is_empty() {
        return Err(Error::Usage {
            field: "PATH",
            value: "unix:".into(),
            allowed: "unix: followed by the path of a socket".into(),
        });
    }
    Ok(kvdepot_service::connect_within(socket, Some(1), None)?)
}

/// A depot that a process of this user has open.
#[derive(Serialize)]
struct Live {
    depot: String,
    /// `None` where nobody knows.
    blocks: Option<u64>,
    bytes: u64,
    capacity_bytes: u64,
    tiers: Vec<String>,
    description: String,
    /// Why nothing more is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl Live {
    fn of(socket: &Path) -> Live {
        let mut live = Live {
            depot: format!("unix:{}", socket.display()),
            blocks: None,
            bytes: 0,
            capacity_bytes: 0,
            tiers: Vec::new(),
            description: String::new(),
            problem: None,
        };
        match kvdepot_service::connect_within(socket, Some(1), Some(PATIENCE)) {
            Ok(depot) => {
                live.tiers = depot.tiers().into_iter().map(str::to_owned).collect();
                live.description = depot.description().to_owned();
                if let Some(last) = depot.stats().tiers.last() {
                    live.blocks = (!last.uncounted).then_some(last.blocks);
                    live.bytes = last.live_bytes;
                    live.capacity_bytes = last.capacity_bytes;
                }
                depot.close();
            }
            Err(error) => live.problem = Some(error.to_string()),
        }
        live
    }
}

/// In the place of a number that is not known.
fn unknown() -> String {
    "-".to_owned()
}

/// Lists the depots that processes of this user have open.
pub(crate) fn live(output: &mut Output) -> Result<i32, Error> {
    let found: Vec<Live> = sockets()?.iter().map(|path| Live::of(path)).collect();
    if output.is_json() {
        found.iter().try_for_each(|live| output.object(live))?;
    } else if found.is_empty() {
        note(
            "no running depot found among the sockets in this user's runtime directory or with \
             kvdepot in their name\nhint: kvdepot ls PATH lists an arena, kvdepot stat shows the \
             default arena",
        );
    } else {
        let mut table = Table::new(&["depot", ">blocks", ">size", "tiers"]);
        for live in &found {
            let about = live.problem.as_ref().unwrap_or(&live.description);
            table.row([
                live.depot.clone(),
                live.blocks.map_or_else(unknown, count),
                bytes(live.bytes),
                one_line(about),
            ]);
        }
        output.table(&table)?;
    }
    let silent = found.iter().any(|live| live.problem.is_some());
    Ok(if silent {
        crate::status::PROBLEMS
    } else {
        crate::status::OK
    })
}

/// Sockets where somebody listens: all of the runtime directory, and others by their name.
pub(super) fn sockets() -> Result<Vec<PathBuf>, Error> {
    let runtime = dirs::runtime_dir()?;
    let here = fs::read_dir(&runtime).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = here.map(|entry| entry.path()).collect();
    found.retain(|path| path.extension().is_some_and(|name| name == "sock"));
    // Elsewhere, as the kernel names them: the last word of a line is the path.
    let all = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let listening = all.lines().filter(|line| line.contains(" 00010000 0001 "));
    let paths = listening.filter_map(|line| Some(PathBuf::from(&line[line.find(" /")? + 1..])));
    found.extend(paths.filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.contains("kvdepot") && is_own(path)
    }));
    found.retain(|path| !socket::is_deserted(path));
    found.sort();
    found.dedup();
    Ok(found)
}

fn is_own(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let own = kvdepot_host::peer::own_uid();
    fs::symlink_metadata(path).is_ok_and(|at| at.uid() == own)
}

/// One block of a depot.
#[derive(Serialize)]
struct Block {
    namespace: String,
    key: String,
    length: u64,
}

/// `ls unix:SOCKET`.
pub(crate) fn ls(args: &Ls, socket: &Path, output: &mut Output) -> Result<i32, Error> {
    if let Some(before) = args.before {
        return Err(Error::Usage {
            field: "--before",
            value: before.to_string(),
            allowed:
                "this option only with the path of an arena (a running depot lists its blocks in \
                 no order)"
                    .into(),
        });
    }
    let depot = connect(socket)?;
    let mut found = depot.namespaces()?;
    found.retain(|one| matches(one.id, args.namespace.as_deref()));
    found.sort_unstable_by(|a, b| b.bytes.cmp(&a.bytes).then(a.id.cmp(&b.id)));
    let limit = args.limit.unwrap_or(usize::MAX);
    let (blocks_of, namespaces) = (found.iter().map(|one| one.blocks).sum::<u64>(), found.len());
    if args.blocks {
        let listed = blocks(&depot, &found, limit, output)?;
        if listed == limit {
            cut(limit, blocks_of, "block", output)?;
        }
    } else {
        let rows = found.into_iter().take(limit).map(|one| Listing {
            namespace: one.id.to_string(),
            blocks: one.blocks,
            bytes: one.bytes,
            newest: None,
            description: one.description,
        });
        Listing::print(&rows.collect::<Vec<_>>(), output)?;
        cut(limit, namespaces as u64, "namespace", output)?;
    }
    depot.close();
    Ok(crate::status::OK)
}

/// The blocks of these namespaces, each once, up to a limit; how many there were.
fn blocks(
    depot: &Depot,
    namespaces: &[NamespaceUsage],
    limit: usize,
    output: &mut Output,
) -> Result<usize, Error> {
    let mut table = Table::new(&["namespace", "key", ">length"]);
    let mut listed = 0;
    for one in namespaces {
        let namespace = depot.namespace_by_id(one.id);
        let mut from = None;
        // A page has a block for each tier that it is in.
        let mut seen = HashSet::new();
        while listed < limit {
            let mut page = namespace.blocks_page(from, PAGE)?;
            page.blocks.retain(|(key, _)| seen.insert(*key));
            page.blocks.truncate(limit - listed);
            for (key, length) in &page.blocks {
                let (id, key) = (one.id.to_string(), key.to_string());
                if output.is_json() {
                    let (namespace, length) = (id, *length);
                    output.object(&Block {
                        namespace,
                        key,
                        length,
                    })?;
                } else {
                    table.row([id, key, length.to_string()]);
                }
            }
            listed += page.blocks.len();
            from = page.next;
            if from.is_none() {
                break;
            }
        }
    }
    if !output.is_json() {
        output.table(&table)?;
    }
    Ok(listed)
}

/// `stat unix:SOCKET`.
pub(crate) fn stat(args: &Stat, socket: &Path, output: &mut Output) -> Result<i32, Error> {
    let depot = connect(socket)?;
    let stats = depot.stats();
    if args.metrics {
        stats
            .prometheus()
            .lines()
            .try_for_each(|line| output.line(line))?;
    } else if output.is_json() {
        let path = depot.path();
        output.object(&stats.report(socket, depot.description(), path.as_deref()))?;
    } else {
        let mut table = Table::pairs();
        let mut row = |name: &str, value: String| table.row([name.into(), value]);
        row("depot", format!("unix:{}", socket.display()));
        row("tiers", depot.description().into());
        for (index, tier) in stats.tiers.iter().enumerate() {
            let used = tier.capacity_bytes.saturating_sub(tier.free_bytes);
            let fill = percent(used, tier.capacity_bytes);
            let of = bytes(tier.capacity_bytes);
            row(&tier.tier, format!("{} of {of} ({fill})", bytes(used)));
            let blocks = match tier.uncounted {
                true => unknown(),
                false => count(tier.blocks),
            };
            let live = format!("{blocks}, {}", bytes(tier.live_bytes));
            row("  blocks", live);
            row("  evicted", count(tier.evicted_blocks));
            let hits = stats.hit_blocks.get(index).copied().unwrap_or_default();
            row("  hits", count(hits));
        }
        for device in stats.devices.iter().filter(|_| stats.devices.len() > 1) {
            let state = device.state.name();
            let path = device.path.display();
            row(
                "device",
                format!("{path}, {state}, {}", bytes(device.used_bytes)),
            );
        }
        row("missed", count(stats.missed_blocks));
        row("write-back", bytes(stats.write_back_bytes));
        output.table(&table)?;
    }
    depot.close();
    Ok(crate::status::OK)
}

/// What `rm` removed from a depot.
pub(crate) struct Cleared {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    /// Whether a key had no block.
    pub(crate) missing: bool,
}

/// `rm unix:SOCKET` with `--namespace` or `--key`: by the process that has the depot open.
pub(crate) fn rm(args: &Rm, socket: &Path) -> Result<Cleared, Error> {
    let depot = connect(socket)?;
    let mut found = depot.namespaces()?;
    found.retain(|one| matches(one.id, args.namespace.as_deref()));
    if let Some(digits) = &args.namespace {
        let ids: Vec<NamespaceId> = found.iter().map(|one| one.id).collect();
        only(&ids, digits, &socket.display())?;
    }
    let mut cleared = Cleared {
        blocks: 0,
        bytes: 0,
        missing: false,
    };
    let mut absent: Vec<Key> = args.keys.clone();
    for one in &found {
        let namespace = depot.namespace_by_id(one.id);
        if args.keys.is_empty() {
            // In all tiers, each once.
            let lengths = namespace.blocks()?.into_iter().map(|(_, length)| length);
            cleared.bytes += lengths.sum::<u64>();
            cleared.blocks += namespace.clear()? as u64;
            continue;
        }
        let there = namespace.contains(&args.keys)?;
        let keys = args.keys.iter().zip(there).filter(|(_, there)| *there);
        let keys: Vec<Key> = keys.map(|(key, _)| *key).collect();
        absent.retain(|key| !keys.contains(key));
        let pins: Vec<Pin> = namespace.pin(&keys, false)?.into_iter().flatten().collect();
        cleared.bytes += pins.iter().map(Pin::bytes).sum::<u64>();
        namespace.unpin(&pins, false);
        cleared.blocks += namespace.remove(&keys)? as u64;
    }
    cleared.missing = !absent.is_empty();
    depot.close();
    Ok(cleared)
}
