//! `kvdepot ls`: what an arena holds.

use std::collections::HashMap;

use kvdepot_store::NamespaceId;
use kvdepot_store::inspect::Listed;

use super::{Block, Listing, cut, matches, served};
use crate::args::Ls;
use crate::error::Error;
use crate::output::{Output, Table, note, some, utc};

pub(crate) fn run(args: &Ls, output: &mut Output) -> Result<i32, Error> {
    if let Some(socket) = args.arena.socket() {
        return served::ls(args, &socket, output);
    }
    if args.names_nothing() {
        return served::live(output);
    }
    let inspection = args.arena.inspect()?;
    let descriptions: HashMap<NamespaceId, String> = inspection.namespaces()?.into_iter().collect();
    let (mut blocks, damaged) = inspection.blocks()?;
    blocks.retain(|block| matches(block.record.identity.namespace, args.namespace.as_deref()));
    let before = args.before.unwrap_or(u64::MAX);
    blocks.retain(|block| block.record.sequence < before);
    blocks.reverse();
    let limit = args.limit.unwrap_or(usize::MAX);
    if !args.blocks {
        let mut found = namespaces(&blocks, descriptions);
        let of = found.len() as u64;
        found.truncate(limit);
        Listing::print(&found, output)?;
        cut(limit, of, "namespace", output)?;
    } else if output.is_json() {
        for block in blocks.iter().take(limit) {
            output.object(&Block::from(block))?;
        }
    } else {
        output.table(&blocks_table(&blocks[..limit.min(blocks.len())]))?;
    }
    let is_cut = blocks.len() > limit && args.blocks;
    if let Some(last) = limit.checked_sub(1).filter(|_| is_cut) {
        cut(limit, blocks.len() as u64, "block", output)?;
        let at = blocks[last].record.sequence;
        note(&format!("hint: --before {at} lists the next blocks"));
    }
    if !damaged.is_empty() {
        let path = inspection.path().display();
        output.flush()?;
        note(&format!(
            "{} ignored\nhint: kvdepot verify {path} lists the damage",
            some(damaged.len() as u64, "damaged record")
        ));
    }
    Ok(crate::status::OK)
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

/// The namespaces of these blocks, the largest first.
fn namespaces(blocks: &[Listed], mut descriptions: HashMap<NamespaceId, String>) -> Vec<Listing> {
    let mut sums: HashMap<NamespaceId, Sum> = HashMap::new();
    for block in blocks {
        let sum = sums.entry(block.record.identity.namespace).or_default();
        sum.blocks += 1;
        sum.bytes += block.record.len;
        sum.newest = sum.newest.max(block.record.created);
    }
    let mut sums: Vec<(NamespaceId, Sum)> = sums.into_iter().collect();
    sums.sort_unstable_by(|(a, x), (b, y)| y.bytes.cmp(&x.bytes).then(a.cmp(b)));
    let listing = |(id, sum): (NamespaceId, Sum)| Listing {
        namespace: id.to_string(),
        blocks: sum.blocks,
        bytes: sum.bytes,
        newest: Some(sum.newest.into()),
        description: descriptions.remove(&id),
    };
    sums.into_iter().map(listing).collect()
}
