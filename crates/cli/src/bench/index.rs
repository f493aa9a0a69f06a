//! `kvdepot bench index`: lookups in a large index, against the same lookups in a bare hash table.
//!
//! The blocks are reserved and published without touching their payload, so the index is as large
//! as it is in a full arena while the machine needs no memory for the blocks. The limit is a hash
//! table of the same crate from keys to numbers, whose hash is eight bytes of the key: no lock, no
//! namespaces, no answer to allocate.

use std::time::Instant;

use hashbrown::HashTable;
use kvdepot_store::{Checksum, Config, Key, Namespace};
use serde_json::json;

use super::media::spec;
use super::random::Random;
use super::report::{Report, Row};
use super::rounds::Rounds;
use crate::args::Index;
use crate::error::Error;

/// `contains` and `prefix`.
pub(super) const CASES: usize = 2;

/// Payload of each block, which nobody touches.
const BLOCK: u64 = 4096;

pub(super) fn run(args: &Index, report: &mut Report<'_>) -> Result<(), Error> {
    let (blocks, rounds) = if args.quick {
        (1 << 16, 5)
    } else {
        (1_000_000, 15)
    };
    let blocks = args.blocks.unwrap_or(blocks);
    let (batch, rounds) = (args.batch, args.rounds.unwrap_or(rounds));
    if blocks == 0 || batch == 0 || rounds == 0 {
        return Err(Error::Usage {
            field: "--blocks, --batch, --rounds",
            value: "0".into(),
            allowed: "1 or more".into(),
        });
    }
    let settings = json!({
        "lanes": 1, "socket": "off", "cache": {"capacity": blocks as u64 * BLOCK},
    });
    let depot = kvdepot_service::open(&Config::new("Cache", &settings)?)?;
    let ns = depot.namespace(&spec())?;
    let mut random = Random(11);
    let mut keys: Vec<Key> = (0..blocks).map(|_| random.key()).collect();
    publish(&ns, &keys, &report.interrupt)?;
    let table = bare(&keys);
    random.shuffle(&mut keys);
    for op in ["contains", "prefix"] {
        let times = Rounds::run(rounds, 1, &report.interrupt, |contender| {
            let start = Instant::now();
            let found: usize = keys
                .chunks(batch)
                .map(|keys| match (contender, op) {
                    (0, _) => Ok(keys.iter().filter(|key| is_in(&table, key)).count()),
                    (_, "contains") => Ok(ns
                        .contains(keys)?
                        .into_iter()
                        .filter(|found| *found)
                        .count()),
                    _ => ns.prefix(keys),
                })
                .sum::<Result<usize, kvdepot_store::Error>>()?;
            let seconds = start.elapsed().as_secs_f64();
            if found != blocks {
                return Err(Error::Bench(format!(
                    "only {found} of {blocks} blocks were found"
                )));
            }
            Ok(seconds)
        })?;
        report.row(Row {
            bench: "index",
            case: json!({"op": op, "blocks": blocks, "batch": batch}),
            metric: "lookups",
            unit: "keys/s",
            value: blocks as f64 / times.value(),
            limit: times.best().map(|(_, seconds)| blocks as f64 / seconds),
            ratio: times.ratio(),
            rounds,
            limit_name: Some("bare hash table"),
        })?;
        report.case_done(op);
    }
    depot.close();
    Ok(())
}

/// Publishes blocks whose payload is never written nor read.
pub(super) fn publish(
    ns: &Namespace,
    keys: &[Key],
    interrupt: &crate::interrupt::Interrupt,
) -> Result<(), Error> {
    for keys in keys.chunks(4096) {
        interrupt.check()?;
        let blocks: Vec<_> = keys.iter().map(|key| (*key, vec![BLOCK])).collect();
        let reserved: Vec<_> = ns.reserve_strict(&blocks)?.into_iter().flatten().collect();
        let checksums = vec![vec![Checksum::default()]; reserved.len()];
        let committed = ns.commit(&reserved, &checksums)?;
        if committed.len() < keys.len() || committed.contains(&false) {
            return Err(Error::Bench("not every block was published".into()));
        }
    }
    Ok(())
}

/// A table that is only read.
pub(super) fn bare(keys: &[Key]) -> HashTable<(Key, u32)> {
    let mut table = HashTable::with_capacity(keys.len());
    for (number, key) in keys.iter().enumerate() {
        table.insert_unique(hash(key), (*key, number as u32), |(key, _)| hash(key));
    }
    table
}

pub(super) fn is_in(table: &HashTable<(Key, u32)>, key: &Key) -> bool {
    table.find(hash(key), |(other, _)| other == key).is_some()
}

fn hash(key: &Key) -> u64 {
    let (words, _) = key.0.as_chunks::<8>();
    u64::from_le_bytes(words[0])
}
