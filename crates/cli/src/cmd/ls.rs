//! `kvdepot ls`: what an arena holds.

use std::collections::HashMap;

use kvdepot_store::NamespaceId;
use kvdepot_store::inspect::Listed;

use super::{Block, matches};
use crate::args::Ls;
use crate::error::Error;
use crate::output::{Output, Table, bytes, count, note, utc};

pub(crate) fn run(args: &Ls, output: &mut Output) -> Result<i32, Error> {
    let inspection = args.arena.inspect()?;
    let descriptions: HashMap<NamespaceId, String> = inspection.namespaces()?.into_iter().collect();
    let (mut blocks, damaged) = inspection.blocks()?;
    blocks.retain(|block| matches(block.record.identity.namespace, args.namespace.as_deref()));
    let before = args.before.unwrap_or(u64::MAX);
    blocks.retain(|block| block.record.sequence < before);
    blocks.reverse();
    let limit = args.limit.unwrap_or(usize::MAX);
    if output.is_json() {
        for block in blocks.iter().take(limit) {
            output.object(&Block::from(block))?;
        }
    } else if args.blocks {
        output.table(&blocks_table(&blocks[..limit.min(blocks.len())]))?;
    } else {
        output.table(&namespaces_table(&blocks, &descriptions, limit))?;
    }
    let is_cut = blocks.len() > limit && (args.blocks || output.is_json());
    if let Some(last) = limit.checked_sub(1).filter(|_| is_cut) {
        let (more, at) = (blocks.len() - limit, blocks[last].record.sequence);
        output.flush()?;
        note(&format!(
            "{more} more blocks\nhint: --before {at} lists them"
        ));
    }
    if !damaged.is_empty() {
        let path = inspection.path().display();
        output.flush()?;
        note(&format!(
            "{} damaged records count as empty\nhint: kvdepot verify {path} names them",
            damaged.len()
        ));
    }
    Ok(crate::OK)
}

fn blocks_table(blocks: &[Listed]) -> Table {
    let mut table = Table::new(&[
        "namespace",
        "key",
        ">length",
        ">parts",
        "created",
        ">slot",
        "offset+length",
    ]);
    for block in blocks {
        let record = &block.record;
        let extents: Vec<String> = record
            .extents
            .iter()
            .map(|(offset, len)| format!("{offset}+{len}"))
            .collect();
        table.row([
            record.identity.namespace.to_string(),
            record.identity.key.to_string(),
            record.len.to_string(),
            record.parts.to_string(),
            utc(record.created.into()),
            block.slot.to_string(),
            extents.join(" "),
        ]);
    }
    table
}

/// What the blocks of a namespace come to.
#[derive(Default)]
struct Sum {
    blocks: u64,
    bytes: u64,
    newest: u32,
}

fn namespaces_table(
    blocks: &[Listed],
    descriptions: &HashMap<NamespaceId, String>,
    limit: usize,
) -> Table {
    let mut sums: HashMap<NamespaceId, Sum> = HashMap::new();
    for block in blocks {
        let sum = sums.entry(block.record.identity.namespace).or_default();
        sum.blocks += 1;
        sum.bytes += block.record.len;
        sum.newest = sum.newest.max(block.record.created);
    }
    let mut sums: Vec<(NamespaceId, Sum)> = sums.into_iter().collect();
    sums.sort_unstable_by(|(a, x), (b, y)| y.bytes.cmp(&x.bytes).then(a.cmp(b)));
    let mut table = Table::new(&["namespace", ">blocks", ">size", "newest", "description"]);
    for (id, sum) in sums.into_iter().take(limit) {
        table.row([
            id.to_string(),
            count(sum.blocks),
            bytes(sum.bytes),
            utc(sum.newest.into()),
            descriptions.get(&id).cloned().unwrap_or_default(),
        ]);
    }
    table
}
