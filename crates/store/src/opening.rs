//! Opening the tiers of a configuration.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use kvdepot_arena::{Arena, Error, Inode, Opening, Options, Promised, Uses};

use crate::config::{Config, DeviceConfig};
use crate::option::Section;
use crate::tier::{Alarm, Apart, Arenas, DAX, Stage, device};

/// What opening the tiers has come to.
pub(crate) struct Opened {
    /// Near to far, with their positions in the pipeline.
    pub(crate) tiers: Vec<(usize, Stage)>,
    pub(crate) opening: Opening,
    /// Why the far tier is missing, if it is.
    pub(crate) without: Option<String>,
    /// The number of the next medium.
    pub(crate) next: u32,
    /// For tiers that may answer late; `None` where there is none.
    alarm: Option<Arc<Alarm>>,
}

impl Opened {
    /// Refuses what [`Opened::open`] would of the tiers of arenas, and opens nothing.
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
        let mut opened = Opened {
            tiers: Vec::new(),
            opening: Opening::default(),
            without: None,
            // Media are numbered near to far; tiers that are no arenas come behind those that are.
            next: u32::from(config.pipeline.iter().any(|tier| tier == "Cache")),
            alarm: None,
        };
        let first = opened.next;
        if let Some(at) = config.pipeline.iter().position(|tier| tier == DAX) {
            let count = config.dax.devices.len().max(1) as u32;
            opened.next += count;
            match devices(config, first, uses) {
                Ok((devices, opening)) => {
                    opened.opening = opening;
                    let tier = Arenas::new(DAX, devices);
                    tier.drop_doubles();
                    opened.tiers.push((at, Stage::Here(tier)));
                }
                Err(error) if may_go_without(config, &error) => {
                    tracing::warn!(%error, "opening without the default arena");
                    opened.without = Some(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        opened.open_kinds(config).inspect_err(|_| opened.close())?;
        if let Some(at) = config.pipeline.iter().position(|tier| tier == "Cache") {
            let capacity = config.cache_capacity()?;
            let arena = Arena::volatile("Cache", 0, capacity);
            let arena = arena.inspect_err(|_| opened.close())?;
            let tier = Arenas::new("Cache", vec![Arc::new(arena)]);
            opened.tiers.push((at, Stage::Here(tier)));
        }
        opened.tiers.sort_by_key(|(at, _)| *at);
        Ok(opened)
    }

    /// Opens the tiers of registered kinds.
    fn open_kinds(&mut self, config: &Config) -> Result<(), Error> {
        for (at, name) in config.pipeline.iter().enumerate() {
            let Some(kind) = config.kinds.find(name) else {
                continue;
            };
            let none = Section::default();
            let section = config.sections.get(kind.name).unwrap_or(&none);
            let tier = ((kind.open)(section, self.next)?, self.next);
            self.next += 1;
            let alarm = match &self.alarm {
                Some(alarm) => Arc::clone(alarm),
                None => Arc::new(Alarm::start()?),
            };
            self.alarm = Some(Arc::clone(&alarm));
            let limits = (config.lookup_timeout, config.tier_timeout);
            let apart = Apart::new(tier, limits, alarm);
            self.tiers.push((at, Stage::Apart(apart)));
        }
        Ok(())
    }

    fn close(&self) {
        self.tiers.iter().for_each(|(_, tier)| tier.close());
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
