//! The commands over an arena or a depot, a file each.

pub(crate) mod doctor;
pub(crate) mod ls;
mod options;
pub(crate) mod quarantine;
pub(crate) mod rm;
pub(crate) mod serve;
pub(crate) mod served;
pub(crate) mod session;
pub(crate) mod stat;
pub(crate) mod verify;

use serde::Serialize;

use kvdepot_store::inspect::{Inspection, Listed};
use kvdepot_store::{Config, NamespaceId};

use crate::args::ArenaArgs;
use crate::error::Error;
use crate::output::{Output, Table, bytes, count, note, some, utc};

/// One live block, with the fields of the format document's reader, and its slot.
#[derive(Serialize)]
pub(crate) struct Block {
    namespace: String,
    key: String,
    length: u64,
    parts: u16,
    sequence: u64,
    created: u32,
    extents: Vec<(u64, u64)>,
    checksum: String,
    slot: u32,
}

impl From<&Listed> for Block {
    fn from(listed: &Listed) -> Block {
        let record = &listed.record;
        Block {
            namespace: record.identity.namespace.to_string(),
            key: record.identity.key.to_string(),
            length: record.len,
            parts: record.parts,
            sequence: record.sequence,
            created: record.created,
            extents: record.extents.iter().collect(),
            checksum: record.checksum.to_string(),
            slot: listed.slot,
        }
    }
}

/// What a namespace has.
#[derive(Serialize)]
pub(crate) struct Listing {
    pub(crate) namespace: String,
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    /// When its newest block was stored, in Unix seconds, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) newest: Option<u64>,
    pub(crate) description: Option<String>,
}

impl Listing {
    /// A line for each.
    pub(crate) fn print(rows: &[Listing], output: &mut Output) -> Result<(), Error> {
        if output.is_json() {
            return rows.iter().try_for_each(|row| output.object(row));
        }
        let mut table = Table::new(&["namespace", ">blocks", ">size", "newest", "description"]);
        for row in rows {
            table.row([
                row.namespace.clone(),
                count(row.blocks),
                bytes(row.bytes),
                row.newest.map_or_else(|| "-".into(), utc),
                one_line(row.description.as_deref().unwrap_or_default()),
            ]);
        }
        output.table(&table)
    }
}

/// Most characters of a text in a table. All of it is in the JSON.
const WIDTH: usize = 72;

/// The beginning of a text, without what would leave its line.
pub(crate) fn one_line(text: &str) -> String {
    let mut line: String = text
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    if let Some((at, _)) = line.char_indices().nth(WIDTH) {
        line.truncate(at);
        line.push('…');
    }
    line
}

/// Says where --limit has cut a list.
pub(crate) fn cut(limit: usize, of: u64, noun: &str, output: &mut Output) -> Result<(), Error> {
    if of > limit as u64 {
        output.flush()?;
        let (limit, of) = (count(limit as u64), some(of, noun));
        note(&format!("{limit} of {of} shown (--limit)"));
    }
    Ok(())
}

/// Refuses digits that name no namespace, or several.
pub(crate) fn only(
    found: &[NamespaceId],
    digits: &str,
    place: &dyn std::fmt::Display,
) -> Result<(), Error> {
    let refused = |allowed| Error::Usage {
        field: "--namespace",
        value: digits.to_owned(),
        allowed,
    };
    match found {
        [_] => Ok(()),
        [] => Err(refused(format!("the digest of a namespace in {place}"))),
        several => {
            let names: Vec<String> = several.iter().map(ToString::to_string).collect();
            let names = names.join(", ");
            Err(refused(format!(
                "a prefix that matches only one of {names}"
            )))
        }
    }
}

impl ArenaArgs {
    /// The socket of a depot, where PATH is one.
    pub(crate) fn socket(&self) -> Option<std::path::PathBuf> {
        let text = self.path.as_ref()?.to_str()?;
        text.strip_prefix("unix:").map(Into::into)
    }

    /// Where the arena is: PATH, or the default of the instance, of `Nvme` where only that has one.
    pub(crate) fn path(&self) -> Result<std::path::PathBuf, Error> {
        if let Some(socket) = self.socket() {
            return Err(Error::NotServed(socket));
        }
        if let Some(path) = &self.path {
            return Ok(path.clone());
        }
        let settings = match &self.instance {
            Some(instance) => serde_json::json!({ "instance": instance }),
            None => serde_json::Value::Null,
        };
        let config = Config::new("Dax", &settings)?;
        let (dax, nvme) = (config.arena_path()?, config.nvme_path()?);
        Ok(if !dax.exists() && nvme.exists() {
            nvme
        } else {
            dax
        })
    }

    /// Opens it for reading, whoever owns it.
    pub(crate) fn inspect(&self) -> Result<Inspection, Error> {
        let path = self.path()?;
        match Inspection::open(&path) {
            Ok(inspection) => Ok(inspection),
            Err(kvdepot_store::Error::Media(error)) if error.is_not_found() => {
                Err(Error::NoArena {
                    path,
                    default: self.path.is_none(),
                    instance: self.instance.clone(),
                })
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether a digest begins with these hexadecimal digits; no digits match all.
pub(crate) fn matches(id: NamespaceId, digits: Option<&str>) -> bool {
    digits.is_none_or(|digits| id.to_string().starts_with(&digits.to_ascii_lowercase()))
}
