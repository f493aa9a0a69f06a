//! `kvdepot bench reopen`: how soon an arena whose owner was killed serves its first block.
//!
//! A child process publishes the blocks and is killed with SIGKILL in each round, while it owns
//! the arena. Then this process opens it, and gets a block whose payload was written. The limit
//! reads the record table, checks every record, and enters the keys in a bare hash table.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use hashbrown::HashTable;
use kvdepot_media::{Access, Buffer, Mapping};
use kvdepot_store::format::layout;
use kvdepot_store::format::record::{self, Record, Slot};
use kvdepot_store::inspect::Inspection;
use kvdepot_store::{BlockBuffers, Config, Depot, Key};
use serde_json::json;

use super::media::check_blocks;
use super::media::spec;
use super::random::Random;
use super::report::{Report, Row};
use super::rounds::Rounds;
use crate::args::Reopen;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::leftovers::Scratch;
use crate::output::Output;

pub(super) const CASES: usize = 1;

/// Payload of each block.
const BLOCK: usize = 4096;
/// The last blocks have their payload written.
const WRITTEN: usize = 8;
/// What the child says when all is published.
const READY: &str = "ready";

fn blocks(args: &Reopen) -> usize {
    args.blocks
        .unwrap_or(if args.quick { 1 << 16 } else { 1_000_000 })
}

/// The blocks' keys; the same in parent and child.
fn keys(blocks: usize) -> Vec<Key> {
    let mut random = Random(13);
    (0..blocks).map(|_| random.key()).collect()
}

fn open(path: &Path, blocks: usize) -> Result<Depot, Error> {
    let records = blocks as u64 + 1024;
    let capacity = (records * (BLOCK as u64 + record::LEN as u64) + (4 << 20)) / 4096 * 4096;
    let settings = json!({
        "lanes": 1, "socket": "off",
        "dax": {"path": path, "capacity": capacity, "records": records},
    });
    Ok(kvdepot_service::open(&Config::new("Dax", &settings)?)?)
}

/// The child: owns the arena, publishes what is missing, says so, and waits to be killed.
pub(super) fn child(path: &Path, args: &Reopen, output: &mut Output) -> Result<i32, Error> {
    let blocks = blocks(args);
    let depot = open(path, blocks)?;
    let ns = depot.namespace(&spec())?;
    let keys = keys(blocks);
    let (silent, written) = keys.split_at(blocks.saturating_sub(WRITTEN));
    if depot.opening().blocks == 0 {
        super::index::publish(&ns, silent, &Interrupt::catch()?)?;
        let payload = |_: &Key| Buffer::from_vec(vec![7; BLOCK]);
        let buffers = BlockBuffers::whole(written.iter().map(payload));
        let stored = ns.put(written.to_vec(), buffers)?.wait(None)?;
        if stored.contains(&false) {
            return Err(Error::Bench("not every block was stored".into()));
        }
    }
    output.line(READY)?;
    output.flush()?;
    // The parent kills us; if it dies first, this ends.
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest)?;
    depot.close();
    Ok(crate::status::OK)
}

pub(super) fn run(args: &Reopen, program: &OsStr, report: &mut Report<'_>) -> Result<(), Error> {
    let (blocks, rounds) = (
        blocks(args),
        args.rounds.unwrap_or(if args.quick { 3 } else { 7 }),
    );
    if blocks <= WRITTEN || rounds == 0 {
        return Err(Error::Usage {
            field: "--blocks, --rounds",
            value: blocks.min(rounds).to_string(),
            allowed: format!("more than {WRITTEN} blocks and 1 round"),
        });
    }
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    check_blocks(&dir, blocks, 0, BLOCK as u64)?;
    let scratch = Scratch::new(&dir)?;
    let path = scratch.path().join("arena");
    let keys = keys(blocks);
    let wanted = &keys[blocks - WRITTEN..];
    let (mut opens, mut gets) = (Vec::new(), Vec::new());
    let times = Rounds::run(rounds, 1, &report.interrupt, |contender| {
        kill_an_owner(program, &path, blocks)?;
        if contender == 0 {
            return read_table(&path, blocks);
        }
        let start = Instant::now();
        let depot = open(&path, blocks)?;
        let opened = start.elapsed().as_secs_f64();
        let ns = depot.namespace(&spec())?;
        let buffer = Buffer::from_vec(vec![0; BLOCK]);
        let key = vec![wanted[opens.len() % WRITTEN]];
        let got = ns
            .get(key, BlockBuffers::whole([buffer.clone()]))?
            .wait(None)?;
        let seconds = start.elapsed().as_secs_f64();
        if got != [true] || buffer.to_vec() != [7; BLOCK] {
            return Err(Error::Bench("the first block was not served".into()));
        }
        let found = depot.opening();
        if found.blocks != blocks as u64 || found.created {
            return Err(Error::Bench(format!(
                "only {} of {blocks} blocks were recovered",
                found.blocks
            )));
        }
        opens.push(opened);
        gets.push(seconds - opened);
        depot.close();
        Ok(seconds)
    })?;
    let row = Row {
        bench: "reopen",
        case: json!({"blocks": blocks, "block": BLOCK, "medium": medium_of(&dir)}),
        metric: "open",
        unit: "s",
        value: times.value(),
        limit: times.best().map(|(_, seconds)| seconds),
        ratio: times.ratio(),
        rounds,
        limit_name: Some("read, check and enter every record"),
    };
    report.row(row.clone())?;
    report.row(Row {
        metric: "first_block",
        value: super::rounds::median(gets),
        limit: None,
        ratio: None,
        limit_name: None,
        ..row
    })?;
    report.case_done("reopen");
    Ok(())
}

/// Lets a child own the arena, and kills it.
fn kill_an_owner(program: &OsStr, path: &Path, blocks: usize) -> Result<(), Error> {
    let program = this_command(program);
    let mut child = Command::new(&program)
        .args([
            "bench",
            "reopen",
            "--blocks",
            &blocks.to_string(),
            "--child",
        ])
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(Error::io(program))?;
    let ready = wait_for_ready(&mut child);
    // Also when it has ended by itself: a zombie would stay.
    let killed = child.kill();
    let ended = child.wait();
    if !ready {
        return Err(Error::Bench(
            "the process that fills the arena ended early".into(),
        ));
    }
    killed
        .and_then(|()| ended.map(drop))
        .map_err(Error::io("the arena's owner"))
}

fn wait_for_ready(child: &mut Child) -> bool {
    let Some(stdout) = child.stdout.take() else {
        return false;
    };
    let mut line = String::new();
    let read = BufReader::new(stdout).read_line(&mut line);
    read.is_ok() && line.trim_end() == READY
}

/// What to run for the same command: this program, or the script that loaded us into another one.
pub(super) fn this_command(program: &OsStr) -> PathBuf {
    match std::env::current_exe() {
        Ok(this) if this.file_stem().is_some_and(|name| name == "kvdepot") => this,
        _ => program.into(),
    }
}

/// The limit: everything that reopening cannot do without.
fn read_table(path: &Path, blocks: usize) -> Result<f64, Error> {
    let superblock = Inspection::open(path)?.superblock().clone();
    let start = Instant::now();
    let mapping = Mapping::open(path, Access::ReadOnly)?;
    let len = superblock.records as usize * record::LEN;
    mapping.populate_read(layout::TABLE, len as u64)?;
    let hash = |key: &Key| u64::from_le_bytes(key.0.as_chunks::<8>().0[0]);
    let mut table: HashTable<(Key, u32)> = HashTable::with_capacity(blocks);
    let mut chunk = vec![0; 1 << 20];
    let mut slot = 0;
    for at in (0..len).step_by(chunk.len()) {
        let part = chunk.len().min(len - at);
        mapping.read_into(layout::TABLE + at as u64, &mut chunk[..part])?;
        for bytes in chunk[..part].as_chunks::<{ record::LEN }>().0 {
            if let Slot::Used(found) = Record::decode(bytes, record::seed(&superblock.uuid, slot)) {
                let key = found.identity.key;
                table.insert_unique(hash(&key), (key, slot), |(key, _)| hash(key));
            }
            slot += 1;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    if table.len() < blocks {
        return Err(Error::Bench(format!(
            "only {} of {blocks} records were read",
            table.len()
        )));
    }
    Ok(seconds)
}

/// `tmpfs` or `disk`.
fn medium_of(dir: &Path) -> &'static str {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.into());
    let of = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (at, kind) = (fields.next()?.to_owned(), fields.next()? == "tmpfs");
        dir.starts_with(&at).then_some((at.len(), kind))
    };
    let nearest = mounts.lines().filter_map(of).max_by_key(|(len, _)| *len);
    if nearest.is_some_and(|(_, tmpfs)| tmpfs) {
        "tmpfs"
    } else {
        "disk"
    }
}
