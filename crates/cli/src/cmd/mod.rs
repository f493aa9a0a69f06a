//! The commands over an arena or a depot, a file each.

pub(crate) mod doctor;
pub(crate) mod ls;
pub(crate) mod rm;
pub(crate) mod serve;
pub(crate) mod stat;
pub(crate) mod verify;

use serde::Serialize;

use kvdepot_store::inspect::{Inspection, Listed};
use kvdepot_store::{Config, NamespaceId};

use crate::args::ArenaArgs;
use crate::error::Error;

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

impl ArenaArgs {
    /// Where the arena is: PATH, or the default of the instance.
    pub(crate) fn path(&self) -> Result<std::path::PathBuf, Error> {
        if let Some(path) = &self.path {
            return Ok(path.clone());
        }
        let settings = match &self.instance {
            Some(instance) => serde_json::json!({ "instance": instance }),
            None => serde_json::Value::Null,
        };
        Ok(Config::new("Dax", &settings)?.arena_path()?)
    }

    /// Opens it for reading, whoever owns it.
    pub(crate) fn inspect(&self) -> Result<Inspection, Error> {
        let path = self.path()?;
        match Inspection::open(&path) {
            Ok(inspection) => Ok(inspection),
            Err(kvdepot_store::Error::Media(error)) if error.is_not_found() => {
                let default = self.path.is_none();
                Err(Error::NoArena { path, default })
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether a digest begins with these hexadecimal digits; no digits match all.
pub(crate) fn matches(id: NamespaceId, digits: Option<&str>) -> bool {
    digits.is_none_or(|digits| id.to_string().starts_with(&digits.to_ascii_lowercase()))
}
