//! The sections of tiers of arenas: `dax` and `nvme`, which take the same.

use std::path::{Path, PathBuf};

use kvdepot_arena::{Access, Durability, Error, Format, Inode, Options, default_path};
use serde_json::Value;

use super::{Config, devices};
use crate::option::{Kind, OptionSpec, Parsed, absolute};
use crate::placement::MEDIA_MAX;
use crate::tier::{DAX, NVME, Sort};

/// Settings of a tier on a medium: `Dax`, which maps it, or `Nvme`, which uses read and write
/// calls.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ArenaConfig {
    /// Path of the device or file; `None`: a file in the user's cache directory.
    pub path: Option<PathBuf>,
    /// Size of the medium in bytes; `None`: the size of the existing arena, or a share of the free
    /// disk.
    pub capacity: Option<u64>,
    /// Number of records of a new arena, which is the maximum number of blocks; `None`: by its
    /// size.
    pub records: Option<u64>,
    /// Failures that an acknowledged block survives.
    pub durability: Durability,
    /// Condition for creating a new arena on a medium with content.
    pub format: Format,
    /// Several media of one tier; empty if `path` and `capacity` apply.
    pub devices: Vec<DeviceConfig>,
}

impl Config {
    /// The tiers of arenas that last, with their positions in the pipeline.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = (usize, Sort)> {
        let sort = |name: &String| [DAX, NVME].into_iter().find(|sort| sort.name == name);
        let each = self.pipeline.iter().enumerate();
        each.filter_map(move |(at, name)| Some((at, sort(name)?)))
    }

    /// All media together are handed to other processes in one message.
    pub(super) fn check_media(&self) -> Result<(), Error> {
        let each = self
            .arenas()
            .map(|(_, sort)| self.section(sort).devices.len().max(1));
        let count: usize = each.sum();
        // Beside them there may be a `Cache`.
        if count >= MEDIA_MAX {
            let allowed = format!("at most {} devices in all tiers combined", MEDIA_MAX - 1);
            return Err(Error::config("devices", count, allowed));
        }
        Ok(())
    }

    /// Refuses a medium that is named twice, whatever it is called.
    pub(super) fn check_twins(&self) -> Result<(), Error> {
        let mut before: Vec<&Path> = Vec::new();
        for (_, sort) in self.arenas() {
            let section = self.section(sort);
            let several = section.devices.iter().map(|device| device.path.as_path());
            let each = several.chain(section.path.as_deref());
            for (index, path) in each.enumerate() {
                let (inode, place) = (Inode::of(path), place_of(path));
                let is_twin = |other: &&&Path| {
                    place_of(other) == place || (inode.is_some() && Inode::of(other) == inode)
                };
                if let Some(twin) = before.iter().find(is_twin) {
                    let twin = twin.display();
                    let allowed = format!("a medium other than {twin}, which is already listed");
                    let field = section.field(sort, index, "path");
                    return Err(Error::config(field, path.display(), allowed));
                }
                before.push(path);
            }
        }
        Ok(())
    }

    /// What stands in a tier's section.
    pub(crate) fn section(&self, sort: Sort) -> &ArenaConfig {
        match sort.access {
            Access::Direct => &self.nvme,
            _ => &self.dax,
        }
    }

    /// Where a tier lies that is not several devices: its `path`, or the default for the instance.
    ///
    /// # Errors
    /// [`Error::Config`] when it is not given and the user has no cache directory, or not alone.
    pub(crate) fn path_of(&self, sort: Sort) -> Result<PathBuf, Error> {
        match &self.section(sort).path {
            Some(path) => Ok(path.clone()),
            None => default_path(sort.stem, self.instance.as_deref()).map_err(|error| {
                let allowed = format!(
                    "a path, because this user has no cache directory for the default arena (set \
                     XDG_CACHE_HOME, or set this option): {error}"
                );
                Error::config(format!("{}.path", sort.section), "missing", allowed)
            }),
        }
    }
}

impl ArenaConfig {
    pub(super) fn set(
        &mut self,
        field: &str,
        spec: &OptionSpec,
        value: &Value,
    ) -> Result<(), Error> {
        if spec.kind == Kind::Devices {
            self.devices = devices::parse(field, value)?;
            return Ok(());
        }
        let parsed = Parsed::new(field, spec.kind, value)?;
        match spec.name {
            "path" => self.path = Some(absolute(&parsed.text)),
            "capacity" => self.capacity = Some(parsed.number),
            "records" => self.records = Some(parsed.count(field, u64::from(u32::MAX) - 1)?),
            "durability" => {
                self.durability = match parsed.text.as_str() {
                    "power" => Durability::Power,
                    _ => Durability::Process,
                };
            }
            _ => {
                self.format = match parsed.text.as_str() {
                    "true" => Format::Once,
                    "force" => Format::Always,
                    _ => Format::Never,
                };
            }
        }
        Ok(())
    }

    /// How an option of the medium at that place in the list is called.
    pub(crate) fn field(&self, sort: Sort, index: usize, option: &str) -> String {
        match self.devices.is_empty() {
            true => format!("{}.{option}", sort.section),
            false => format!("{}.devices[{index}].{option}", sort.section),
        }
    }

    /// What holds for each of its media.
    pub(crate) fn options(&self, access: Access, sharers: u64) -> Options {
        Options {
            capacity: self.capacity,
            records: self.records,
            durability: self.durability,
            format: self.format,
            access,
            sharers,
        }
    }
}

/// One of several media of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// Path of the device or file.
    pub path: PathBuf,
    /// Size of the medium in bytes; `None`: the size of the existing arena, or a share of the free
    /// disk.
    pub capacity: Option<u64>,
}

/// A path by which a file that is still to be made is known, however its directory is named.
fn place_of(path: &Path) -> PathBuf {
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    };
    match (parent.canonicalize(), path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        _ => path.into(),
    }
}
