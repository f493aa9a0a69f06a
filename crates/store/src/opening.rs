//! Opening the tiers of a configuration.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use kvdepot_arena::{Arena, Error, Opening, Options, Promised, Uses};

use crate::config::Config;
use crate::keyring::Keyring;
use crate::option::Section;
use crate::tier::{Alarm, Apart, Arenas, Sort, Stage, Terms};

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
    pub(crate) alarm: Option<Arc<Alarm>>,
    /// What blocks are authenticated with, where tiers do that.
    pub(crate) keys: Option<Arc<Keyring>>,
}

impl Opened {
    /// Refuses what [`Opened::open`] would of settings and of arenas, and opens nothing.
    pub(crate) fn check(config: &Config) -> Result<(), Error> {
        let has = |name: &str| config.pipeline.iter().any(|tier| tier == name);
        if has("Cache") {
            Arena::check_volatile("Cache", config.cache_capacity()?)?;
        }
        keys_of(config)?;
        for kind in config
            .pipeline
            .iter()
            .filter_map(|name| config.kinds.find(name))
        {
            let section = config.sections.get(kind.name).cloned().unwrap_or_default();
            (kind.check)(&section, true)?;
        }
        let mut promised = Promised::default();
        for (_, sort) in config.arenas() {
            let section = config.section(sort);
            let each = media(config, sort)?.into_iter().enumerate();
            for (index, (path, options)) in each {
                let field = |option: &str| section.field(sort, index, option);
                Arena::check(&path, &options, &field, &mut promised)?;
            }
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
            keys: keys_of(config)?,
        };
        let mut all: Option<Opening> = None;
        // There must be something left.
        let mut missing = None;
        for (at, sort) in config.arenas() {
            let first = opened.next;
            opened.next += config.section(sort).devices.len().max(1) as u32;
            match devices(config, sort, first, uses) {
                Ok((devices, opening)) => {
                    all = Some(all.map_or(opening, |before| before.and(opening)));
                    let tier = Arenas::new(sort.name, devices);
                    tier.drop_doubles();
                    opened.tiers.push((at, Stage::Here(tier)));
                }
                Err(error) if may_go_without(config, sort, &error) => {
                    tracing::warn!(%error,
                        "cannot open the default arena; opening the depot without it");
                    let why = opened.without.take();
                    let why = why.map_or_else(String::new, |before| before + "; ");
                    opened.without = Some(format!("{why}{error}"));
                    missing = Some(error);
                }
                Err(error) => {
                    opened.close();
                    return Err(error);
                }
            }
        }
        opened.opening = all.unwrap_or_default();
        opened.open_kinds(config).inspect_err(|_| opened.close())?;
        if let Some(at) = config.pipeline.iter().position(|tier| tier == "Cache") {
            let capacity = config.cache_capacity()?;
            let arena = Arena::volatile("Cache", 0, capacity);
            let arena = arena.inspect_err(|_| opened.close())?;
            let tier = Arenas::new("Cache", vec![Arc::new(arena)]);
            opened.tiers.push((at, Stage::Here(tier)));
        }
        if let Some(error) = missing.filter(|_| opened.tiers.is_empty()) {
            return Err(error);
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
            let limits = config.patience(name);
            let is_last = at + 1 == config.pipeline.len();
            let terms = Terms::new(self.next, limits, self.keys.clone(), is_last);
            let tier = ((kind.open)(section, terms)?, self.next);
            self.next += 1;
            let alarm = match &self.alarm {
                Some(alarm) => Arc::clone(alarm),
                None => Arc::new(Alarm::start()?),
            };
            self.alarm = Some(Arc::clone(&alarm));
            let apart = Apart::new(tier, limits, alarm);
            self.tiers.push((at, Stage::Apart(apart)));
        }
        Ok(())
    }

    fn close(&self) {
        self.tiers.iter().for_each(|(_, tier)| tier.close());
    }
}

/// The keys that a configuration names. Tiers of arenas are this host's own.
fn keys_of(config: &Config) -> Result<Option<Arc<Keyring>>, Error> {
    let Some(path) = &config.mac_key_file else {
        return Ok(None);
    };
    Keyring::read(path).map(|keys| Some(Arc::new(keys)))
}

/// Whether a pipeline can do without the arena that gave this error: nobody asked for it by name.
fn may_go_without(config: &Config, sort: Sort, error: &Error) -> bool {
    let owned = matches!(error, Error::Locked { .. });
    let section = config.section(sort);
    let named = section.path.is_some() || !section.devices.is_empty();
    owned && !named && config.pipeline.len() > 1
}

fn devices(
    config: &Config,
    sort: Sort,
    first: u32,
    uses: &Uses,
) -> Result<(Vec<Arc<Arena>>, Opening), Error> {
    let (section, wait) = (config.section(sort), config.lock_wait);
    let acquire = |((index, number), (path, options)): ((usize, u32), (PathBuf, Options))| {
        let field = |option: &str| section.field(sort, index, option);
        Arena::acquire((sort.name, number), &path, &options, &field, wait)
    };
    let each = (0..).zip(first..).zip(media(config, sort)?);
    let acquired = each.map(acquire).collect::<Result<Vec<_>, _>>()?;
    // Side by side: each waits for its own medium.
    let opened = thread::scope(|scope| {
        let each = acquired.into_iter().map(|one| scope.spawn(|| one.read()));
        let each: Vec<_> = each.collect();
        let opened = each
            .into_iter()
            .map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
        opened.collect::<Vec<_>>()
    });
    let mut all: Option<Opening> = None;
    let mut arenas: Vec<Arc<Arena>> = Vec::new();
    for opened in opened {
        let (mut arena, found) = opened?;
        arena.rank(uses);
        all = Some(all.map_or(found, |before| before.and(found)));
        arenas.push(Arc::new(arena));
    }
    Ok((arenas, all.unwrap_or_default()))
}

/// The media of a tier, with what holds for each.
fn media(config: &Config, sort: Sort) -> Result<Vec<(PathBuf, Options)>, Error> {
    let section = config.section(sort);
    let options = section.options(sort.access, config.shares);
    if section.devices.is_empty() {
        return Ok(vec![(config.path_of(sort)?, options)]);
    }
    let each = section.devices.iter().map(|device| {
        let capacity = device.capacity;
        let options = Options {
            capacity,
            ..options.clone()
        };
        (device.path.clone(), options)
    });
    Ok(each.collect())
}
