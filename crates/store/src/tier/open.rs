//! Opening the tiers of a configuration.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvdepot_arena::{Arena, Error, Inode, Opening, Options, Promised, Uses};

use super::{DAX, Tier};
use crate::config::{Config, DeviceConfig};

/// What opening the tiers has come to.
pub(crate) struct Opened {
    /// Near to far.
    pub(crate) tiers: Vec<Tier>,
    pub(crate) opening: Opening,
    /// Why the far tier is missing, if it is.
    pub(crate) without: Option<String>,
    /// The number of the next medium.
    pub(crate) next: u32,
}

impl Tier {
    /// Refuses what [`Tier::open`] would, and opens nothing.
    pub(crate) fn check(config: &Config) -> Result<(), Error> {
        let has = |name: &str| config.pipeline.iter().any(|tier| tier == name);
        if has("Cache") {
            Arena::check_volatile("Cache", config.cache_capacity()?)?;
        }
        if !has(DAX) {
            return Ok(());
        }
        if config.dax.devices.is_empty() {
            let field = |option: &str| format!("dax.{option}");
            let path = config.arena_path()?;
            return Arena::check(
                &path,
                &config.dax.options(),
                &field,
                &mut Promised::default(),
            );
        }
        check_twins(config)?;
        let mut promised = Promised::default();
        for (index, named) in config.dax.devices.iter().enumerate() {
            let field = |option: &str| field_of(index, option);
            Arena::check(
                &named.path,
                &settings_of(config, named),
                &field,
                &mut promised,
            )?;
        }
        Ok(())
    }

    /// Opens what a configuration names, far to near: what can be refused comes before what costs
    /// memory.
    pub(crate) fn open(config: &Config, uses: &Uses) -> Result<Opened, Error> {
        let has = |name: &str| config.pipeline.iter().any(|tier| tier == name);
        // Media are numbered near to far.
        let first = u32::from(has("Cache"));
        let mut opened = Opened {
            tiers: Vec::new(),
            opening: Opening::default(),
            without: None,
            next: first,
        };
        if has(DAX) {
            match devices(config, first, uses) {
                Ok((devices, opening)) => {
                    opened.next += devices.len() as u32;
                    opened.opening = opening;
                    let tier = Tier::new(DAX, devices);
                    tier.drop_doubles();
                    opened.tiers.push(tier);
                }
                Err(error) if may_go_without(config, &error) => {
                    tracing::warn!(%error, "opening with Cache alone");
                    opened.without = Some(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        if has("Cache") {
            let arena = Arena::volatile("Cache", 0, config.cache_capacity()?)?;
            opened
                .tiers
                .insert(0, Tier::new("Cache", vec![Arc::new(arena)]));
        }
        Ok(opened)
    }
}

/// Whether a pipeline can do without the arena that gave this error: nobody asked for it by name.
fn may_go_without(config: &Config, error: &Error) -> bool {
    let owned = matches!(error, Error::Locked { .. });
    let named = config.dax.path.is_some() || !config.dax.devices.is_empty();
    owned && !named && config.pipeline.len() > 1
}

fn devices(config: &Config, first: u32, uses: &Uses) -> Result<(Vec<Arc<Arena>>, Opening), Error> {
    let wait = config.lock_wait;
    if config.dax.devices.is_empty() {
        let field = |option: &str| format!("dax.{option}");
        let path = config.arena_path()?;
        let (arena, opening) = device(first, &path, &config.dax.options(), &field, wait, uses)?;
        return Ok((vec![arena], opening));
    }
    check_twins(config)?;
    let acquire = |(index, named): (usize, &DeviceConfig)| {
        let field = |option: &str| field_of(index, option);
        let (settings, number) = (settings_of(config, named), first + index as u32);
        Arena::acquire((DAX, number), &named.path, &settings, &field, wait)
    };
    let acquired = config.dax.devices.iter().enumerate().map(acquire);
    let acquired = acquired.collect::<Result<Vec<_>, _>>()?;
    // Side by side: each waits for its own medium.
    let opened = thread::scope(|scope| {
        let each = acquired.into_iter().map(|one| scope.spawn(|| one.read()));
        let each: Vec<_> = each.collect();
        let opened = each
            .into_iter()
            .map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
        opened.collect::<Vec<_>>()
    });
    let mut opening = Opening::default();
    opening.created = true;
    let mut arenas: Vec<Arc<Arena>> = Vec::new();
    for opened in opened {
        let (mut arena, found) = opened?;
        arena.rank(uses);
        opening.blocks += found.blocks;
        opening.damaged += found.damaged;
        opening.outranked += found.outranked;
        opening.created &= found.created;
        arenas.push(Arc::new(arena));
    }
    Ok((arenas, opening))
}

fn field_of(index: usize, option: &str) -> String {
    format!("dax.devices[{index}].{option}")
}

/// Refuses a medium that is listed twice, whatever it is called.
fn check_twins(config: &Config) -> Result<(), Error> {
    for (index, named) in config.dax.devices.iter().enumerate() {
        let (inode, place) = (Inode::of(&named.path), place_of(&named.path));
        let before = config.dax.devices[..index].iter();
        let mut before = before.map(|device| device.path.as_path());
        let is_twin =
            |path: &&Path| place_of(path) == place || (inode.is_some() && Inode::of(path) == inode);
        if let Some(twin) = before.find(is_twin) {
            let field = |option: &str| field_of(index, option);
            return Err(listed_twice(&field, &named.path, twin));
        }
    }
    Ok(())
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

fn listed_twice(field: &impl Fn(&str) -> String, path: &Path, twin: &Path) -> Error {
    let allowed = format!(
        "another medium than {}: a device is listed once",
        twin.display()
    );
    Error::config(field("path"), path.display(), allowed)
}

/// What holds for one of several devices.
fn settings_of(config: &Config, device: &DeviceConfig) -> Options {
    Options {
        capacity: device.capacity,
        ..config.dax.options()
    }
}

/// Opens one device of the tier.
pub(super) fn device(
    number: u32,
    path: &Path,
    settings: &Options,
    field: &impl Fn(&str) -> String,
    lock_wait: Duration,
    uses: &Uses,
) -> Result<(Arc<Arena>, Opening), Error> {
    let (mut arena, opening) = Arena::open((DAX, number), path, settings, field, lock_wait)?;
    arena.rank(uses);
    Ok((Arc::new(arena), opening))
}
