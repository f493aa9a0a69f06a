//! Opening the tiers of a configuration.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{DAX, Tier};
use crate::Error;
use crate::arena::{Arena, Inode, Opening};
use crate::config::{Config, DaxConfig};
use crate::index::Uses;

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
        let (arena, opening) = device(first, &path, &config.dax, &field, wait, uses)?;
        return Ok((vec![arena], opening));
    }
    let mut opening = Opening {
        created: true,
        ..Opening::default()
    };
    let mut arenas: Vec<Arc<Arena>> = Vec::new();
    for (index, named) in config.dax.devices.iter().enumerate() {
        let field = |option: &str| format!("dax.devices[{index}].{option}");
        let inode = Inode::of(&named.path);
        if let Some(twin) = arenas
            .iter()
            .find(|arena| inode.is_some() && arena.inode() == inode)
        {
            let twin = twin.path().unwrap_or(&named.path).display();
            let allowed = format!("another medium than {twin}: a device is listed once");
            return Err(Error::config(field("path"), named.path.display(), allowed));
        }
        let settings = DaxConfig {
            capacity: named.capacity,
            ..config.dax.clone()
        };
        let number = first + index as u32;
        let (arena, found) = device(number, &named.path, &settings, &field, wait, uses)?;
        opening.blocks += found.blocks;
        opening.damaged += found.damaged;
        opening.outranked += found.outranked;
        opening.created &= found.created;
        arenas.push(arena);
    }
    Ok((arenas, opening))
}

/// Opens one device of the tier.
pub(super) fn device(
    number: u32,
    path: &Path,
    settings: &DaxConfig,
    field: &impl Fn(&str) -> String,
    lock_wait: Duration,
    uses: &Uses,
) -> Result<(Arc<Arena>, Opening), Error> {
    let (arena, opening) = Arena::open((DAX, number), path, settings, field, lock_wait, uses)?;
    Ok((Arc::new(arena), opening))
}
