//! Configuration: one schema for file, dictionary and command line.

mod arenas;
mod devices;
mod edges;
mod file;
mod pairs;
pub mod schema;
pub mod ucm;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use arenas::{ArenaConfig, DeviceConfig};
pub use edges::{EdgeConfig, LateConfig, Touch};
pub use file::{OfFile, read_below, read_beside, read_text, read_yaml};
use kvdepot_arena::Error;
use kvdepot_arena::format::GRANULE;
pub use kvdepot_arena::{Durability, Format, size};
use kvdepot_host::limits;
use kvdepot_media::CopierConfig;
pub use pairs::{set, value_of};
use serde_json::{Map, Value};
pub use words::nearest;
use words::object;

use crate::option::{OptionSpec, Parsed, Section, absolute};
use crate::tier::{Kinds, TIERS_MAX};

/// Fewest bytes of `slice_size`: below, handing a slice over costs more than moving it.
const SLICE_MIN: u64 = 64 << 10;

/// Fewest bytes of a region of the staging slab.
const REGION_MIN: u64 = 64 << 10;

/// What a put does when the write-back queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Overload {
    /// Goes at the far tier's speed.
    #[default]
    Wait,
    /// Is dropped, and counted.
    Drop,
}

/// What is stored where others have to go for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Admission {
    /// Everything.
    #[default]
    All,
    /// Not what has left before anybody asked for it.
    Learned,
}

/// Where other processes of the host find the owner.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever serves has an answer for each"
)]
pub enum Socket {
    /// In the runtime directory.
    #[default]
    Auto,
    /// Nowhere.
    Off,
    /// At this path.
    At(PathBuf),
}

/// The near tier's settings.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Bytes of memory; by default sized from the machine.
    pub capacity: Option<u64>,
}

/// A depot's validated configuration.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The tiers, near to far.
    pub pipeline: Vec<String>,
    /// Threads that move bytes.
    pub lanes: Option<usize>,
    /// Most bytes a lane takes at a time.
    pub slice_size: u64,
    /// Bytes of the staging slab.
    pub staging_slab: Option<u64>,
    /// Regions of the staging slab.
    pub staging_regions: Option<usize>,
    /// What blocks are authenticated with on media that others may write.
    pub mac_key_file: Option<PathBuf>,
    /// How long opening waits for the lock.
    pub lock_wait: Duration,
    /// What a put does when the write-back queue is full.
    pub overload: Overload,
    /// Most bytes waiting for the far tier.
    pub write_back_depth: Option<u64>,
    /// Whether far hits are copied near.
    pub promote: bool,
    /// What is stored where others have to go for it.
    pub admission: Admission,
    /// How long a close drains.
    pub close_timeout: Duration,
    /// How long a client waits for an answer.
    pub timeout: Option<Duration>,
    /// A name for the default arena.
    pub instance: Option<String>,
    /// Depots of this host that share what the defaults take of memory and disk.
    pub shares: u64,
    /// Where other processes attach.
    pub socket: Socket,
    /// Who may connect there: its permission bits.
    pub socket_mode: u32,
    /// The `cache` section.
    pub cache: CacheConfig,
    /// The `dax` section.
    pub dax: ArenaConfig,
    /// The `nvme` section.
    pub nvme: ArenaConfig,
    /// How long a lookup in a tier that may answer late may take.
    pub lookup_timeout: Duration,
    /// How long anything else there may take.
    pub tier_timeout: Duration,
    /// The kinds of tiers that it was read with.
    pub kinds: Kinds,
    /// Their sections, by the names of the tiers.
    pub sections: BTreeMap<&'static str, Section>,
    /// What goes on into a tier, by its name.
    pub edges: BTreeMap<&'static str, EdgeConfig>,
    /// How long a tier that may answer late is waited for, where its section says so.
    pub late: BTreeMap<&'static str, LateConfig>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            pipeline: vec!["Cache".into(), "Dax".into()],
            lanes: None,
            slice_size: 4 << 20,
            staging_slab: None,
            staging_regions: None,
            mac_key_file: None,
            lock_wait: Duration::from_secs(10),
            overload: Overload::default(),
            write_back_depth: None,
            promote: true,
            admission: Admission::default(),
            close_timeout: Duration::from_secs(60),
            timeout: None,
            instance: None,
            shares: 1,
            socket: Socket::default(),
            socket_mode: 0o600,
            cache: CacheConfig::default(),
            dax: ArenaConfig::default(),
            nvme: ArenaConfig::default(),
            lookup_timeout: Duration::from_secs(1),
            tier_timeout: Duration::from_secs(10),
            kinds: Kinds::default(),
            sections: BTreeMap::new(),
            edges: BTreeMap::new(),
            late: BTreeMap::new(),
        }
    }
}

impl Config {
    /// A pipeline with its settings.
    ///
    /// # Errors
    /// [`Error::Config`] naming the option, the value and what is allowed.
    pub fn new(pipeline: &str, settings: &Value) -> Result<Config, Error> {
        Config::with_kinds(&Kinds::standard(), pipeline, settings)
    }

    /// As [`Config::new`], with tiers of these kinds too.
    ///
    /// # Errors
    /// As there.
    pub fn with_kinds(kinds: &Kinds, pipeline: &str, settings: &Value) -> Result<Config, Error> {
        let settings = object("settings", settings)?;
        if let Some(inner) = settings.get("pipeline")
            && inner.as_str() != Some(pipeline)
        {
            return Err(Error::config(
                "pipeline",
                inner,
                format!("{pipeline:?}, as in the call"),
            ));
        }
        let mut config = Config {
            pipeline: parse_pipeline(kinds, pipeline)?,
            kinds: kinds.clone(),
            ..Config::default()
        };
        config.apply(settings)?;
        config.dax.check_devices("dax")?;
        config.nvme.check_devices("nvme")?;
        config.check_media()?;
        config.check_twins()?;
        config.check_kinds()?;
        // How many there are unless it is said depends on the machine that it is opened on.
        config.check_slab(config.staging_regions.unwrap_or(1))?;
        Ok(config)
    }

    /// Refuses what the sections of registered kinds can never be opened with, and reads no files.
    fn check_kinds(&self) -> Result<(), Error> {
        let mut kinds = self
            .pipeline
            .iter()
            .filter_map(|name| self.kinds.find(name))
            .peekable();
        if let (Some(path), None) = (&self.mac_key_file, kinds.peek()) {
            let allowed = "a pipeline with a tier that others may write, such as Posix";
            return Err(Error::config("mac_key_file", path.display(), allowed));
        }
        kinds.try_for_each(|kind| {
            let section = self.sections.get(kind.name).cloned().unwrap_or_default();
            (kind.check)(&section, false)
        })
    }

    fn check_slab(&self, regions: usize) -> Result<(), Error> {
        match self.staging_slab {
            Some(slab) if slab / (regions as u64) < REGION_MIN => {
                let allowed = format!("at least 64KiB for each of {regions} staging_regions");
                Err(Error::config("staging_slab", size::show(slab), allowed))
            }
            _ => Ok(()),
        }
    }

    fn check_slab_fits(&self) -> Result<(), Error> {
        match (self.staging_slab, limits::memory_allowed()) {
            (Some(slab), Ok(memory)) if slab > memory => {
                let memory = size::show(memory);
                let allowed = format!("at most the {memory} of memory that this process may use");
                Err(Error::config("staging_slab", size::show(slab), allowed))
            }
            _ => Ok(()),
        }
    }

    /// The copier that is asked for.
    ///
    /// # Errors
    /// [`Error::Config`] for a slab that is too small for this machine's lanes, or larger than its
    /// memory.
    pub(crate) fn copier(&self) -> Result<CopierConfig, Error> {
        let mut copier = CopierConfig::default();
        copier.lanes = self.lanes.unwrap_or_else(default_lanes);
        copier.slice_size = self.slice_size;
        copier.staging_slab = self.staging_slab;
        copier.staging_regions = self.staging_regions;
        self.check_slab(copier.regions())?;
        self.check_slab_fits()?;
        Ok(copier)
    }

    /// Settings that may name their pipeline themselves.
    ///
    /// # Errors
    /// As [`Config::new`].
    pub fn from_value(settings: &Value) -> Result<Config, Error> {
        let pipeline = match object("settings", settings)?.get("pipeline") {
            None => "Cache|Dax".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => {
                return Err(Error::config(
                    "pipeline",
                    other,
                    pipeline_help(&Kinds::standard()),
                ));
            }
        };
        Config::new(&pipeline, settings)
    }

    /// A YAML file (JSON is YAML too).
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be read, [`Error::Config`] for what it says.
    pub fn from_file(path: &Path) -> Result<Config, Error> {
        Config::from_value(&read_yaml(path)?)
    }

    fn apply(&mut self, settings: &Map<String, Value>) -> Result<(), Error> {
        let kinds = self.kinds.clone();
        for (name, value) in settings {
            if let Some(tier) = tiers(&kinds).find(|tier| tier.to_ascii_lowercase() == *name) {
                if !self.pipeline.iter().any(|known| known == tier) {
                    return Err(Error::config(
                        name,
                        "a section",
                        format!(
                            "sections of the pipeline {:?} only",
                            self.pipeline.join("|")
                        ),
                    ));
                }
                for (inner, value) in object(name, value)? {
                    let options = kinds.find(tier).map(|kind| kind.options);
                    let field = format!("{name}.{inner}");
                    match (edges::find(inner), options) {
                        (Some(spec), _) => self.set_of_edge(tier, spec, &field, value)?,
                        (_, Some(_)) if self.set_late(tier, inner, &field, value)? => {}
                        (_, Some(options)) => {
                            self.set_of_kind((tier, options), name, inner, value)?;
                        }
                        (None, None) => self.set(name, inner, value)?,
                    }
                }
            } else {
                self.set("", name, value)?;
            }
        }
        Ok(())
    }

    fn set_of_kind(
        &mut self,
        (tier, options): (&'static str, &'static [OptionSpec]),
        section: &str,
        name: &str,
        value: &Value,
    ) -> Result<(), Error> {
        let field = format!("{section}.{name}");
        let spec = schema::find_among(options, section, name);
        let spec = spec.ok_or_else(|| unknown(&self.kinds, options, section, &field, name))?;
        let parsed = Parsed::new(&field, spec.kind, value)?;
        self.sections
            .entry(tier)
            .or_default()
            .set(spec.name, parsed);
        Ok(())
    }

    fn set(&mut self, section: &str, name: &str, value: &Value) -> Result<(), Error> {
        let field = if section.is_empty() {
            name.to_owned()
        } else {
            format!("{section}.{name}")
        };
        let spec = schema::find(section, name)
            .ok_or_else(|| unknown(&self.kinds, schema::OPTIONS, section, &field, name))?;
        match section {
            "dax" => return self.dax.set(&field, spec, value),
            "nvme" => return self.nvme.set(&field, spec, value),
            _ => {}
        }
        let parsed = Parsed::new(&field, spec.kind, value)?;
        match (section, name) {
            ("", "pipeline") => {}
            ("", "lanes") => self.lanes = Some(parsed.count(&field, 256)? as usize),
            ("", "slice_size") => {
                if parsed.number < SLICE_MIN {
                    return Err(Error::config(field, value, "at least 64KiB"));
                }
                self.slice_size = parsed.number;
            }
            ("", "staging_slab") => self.staging_slab = Some(parsed.number),
            ("", "staging_regions") => {
                self.staging_regions = Some(parsed.count(&field, 4096)? as usize);
            }
            ("", "mac_key_file") => self.mac_key_file = Some(absolute(&parsed.text)),
            ("", "lock_wait") => self.lock_wait = parsed.duration,
            ("", "overload") => {
                self.overload = if parsed.text == "drop" {
                    Overload::Drop
                } else {
                    Overload::Wait
                };
            }
            ("", "write_back_depth") => self.write_back_depth = Some(parsed.number),
            ("", "promote") => self.promote = parsed.flag,
            ("", "admission") => {
                self.admission = match parsed.text.as_str() {
                    "learned" => Admission::Learned,
                    _ => Admission::All,
                };
            }
            ("", "close_timeout") => self.close_timeout = parsed.duration,
            ("", "timeout") => {
                if parsed.duration < Duration::from_millis(1) {
                    return Err(Error::config(field, value, "at least 1ms"));
                }
                self.timeout = Some(parsed.duration);
            }
            ("", "lookup_timeout") => self.lookup_timeout = parsed.duration,
            ("", "tier_timeout") => self.tier_timeout = parsed.duration,
            ("", "shares") => self.shares = parsed.count(&field, 1024)?,
            ("", "instance") => {
                let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
                if parsed.text.len() > 64 || !parsed.text.chars().all(plain) {
                    let allowed = "at most 64 letters, digits, '-', '_' and '.'";
                    return Err(Error::config(field, value, allowed));
                }
                self.instance = Some(parsed.text);
            }
            ("", "socket") => {
                self.socket = match parsed.text.as_str() {
                    "auto" => Socket::Auto,
                    "off" => Socket::Off,
                    path if !path.starts_with("unix:")
                        && (path.contains('/') || path.ends_with(".sock")) =>
                    {
                        Socket::At(absolute(path))
                    }
                    _ => {
                        let allowed = "auto, off, or a path: with a / in it, or that ends in \
                                       .sock, and without unix:";
                        return Err(Error::config(field, value, allowed));
                    }
                }
            }
            ("", "socket_mode") => self.socket_mode = parsed.number as u32,
            ("cache", "capacity") => {
                if parsed.number < GRANULE {
                    return Err(Error::config(field, value, "at least 4KiB"));
                }
                self.cache.capacity = Some(parsed.number);
            }
            _ => {
                let options = schema::OPTIONS;
                return Err(unknown(&self.kinds, options, section, &field, name));
            }
        }
        Ok(())
    }
}

/// Lanes where nobody has chosen their number.
pub fn default_lanes() -> usize {
    // A few threads saturate a machine's memory; the rest of the CPUs are the engine's.
    limits::cpus_of_group().unwrap_or(1).clamp(1, 4)
}

/// Splits and checks a pipeline.
fn parse_pipeline(kinds: &Kinds, text: &str) -> Result<Vec<String>, Error> {
    let tiers: Vec<String> = text.split('|').map(|tier| tier.trim().to_owned()).collect();
    let refuse = |allowed| Error::config("pipeline", format!("{text:?}"), allowed);
    if tiers.len() > TIERS_MAX {
        return Err(refuse(format!("at most {TIERS_MAX} tiers")));
    }
    for (at, tier) in tiers.iter().enumerate() {
        let is_known = schema::TIERS.contains(&tier.as_str()) || kinds.find(tier).is_some();
        if !is_known || tiers[..at].contains(tier) {
            return Err(refuse(pipeline_help(kinds)));
        }
        if tier == "Cache" && at > 0 {
            let why = "it dies with the process, and what is before it is no slower";
            return Err(refuse(format!(
                "Cache as the first tier, as in \"Cache|Dax\": {why}"
            )));
        }
    }
    Ok(tiers)
}

fn tiers(kinds: &Kinds) -> impl Iterator<Item = &'static str> {
    schema::TIERS.iter().copied().chain(kinds.names())
}

fn pipeline_help(kinds: &Kinds) -> String {
    let known: Vec<&str> = tiers(kinds).collect();
    format!(
        "tiers among {} chained near to far with |, each once, such as \"Cache|Dax\"",
        known.join(", ")
    )
}

fn unknown(kinds: &Kinds, options: &[OptionSpec], section: &str, field: &str, name: &str) -> Error {
    let sections: Vec<String> = tiers(kinds).map(str::to_ascii_lowercase).collect();
    let mut known: Vec<&str> = options
        .iter()
        .filter(|option| option.section == section)
        .map(|option| option.name)
        .collect();
    match section {
        "" => known.extend(sections.iter().map(String::as_str)),
        // Which is never behind another tier.
        "cache" => {}
        _ => {
            let late = schema::LATE
                .iter()
                .filter(|_| !["dax", "nvme"].contains(&section));
            known.extend(schema::EDGE.iter().chain(late).map(|option| option.name));
        }
    }
    let hint = match nearest(known.iter().copied(), name) {
        Some((word, distance)) if distance <= 2 => format!("did you mean {word:?}? "),
        _ => String::new(),
    };
    Error::config(
        field,
        "an unknown option",
        format!("{hint}known are {}", known.join(", ")),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::option::Kind;

    use super::*;

    fn error(pipeline: &str, settings: Value) -> String {
        Config::new(pipeline, &settings).unwrap_err().to_string()
    }

    #[test]
    fn sizes_units_and_sections_are_read() {
        let settings = json!({
            "overload": "drop", "lock_wait": "500ms", "cache": {"capacity": "512MiB"},
            "dax": {"path": "/dev/dax0.0", "capacity": "64GiB", "durability": "power"},
        });
        let config = Config::new("Cache|Dax", &settings).unwrap();
        assert_eq!(config.cache.capacity, Some(512 << 20));
        assert_eq!(config.dax.capacity, Some(64 << 30));
        assert_eq!(config.dax.durability, Durability::Power);
        assert_eq!(config.overload, Overload::Drop);
        assert_eq!(config.lock_wait, Duration::from_millis(500));
    }

    #[test]
    fn mistakes_name_the_field_the_value_and_what_is_allowed() {
        let typo = error("Cache|Dax", json!({"dax": {"capactiy": "1GiB"}}));
        assert!(
            typo.contains("dax.capactiy") && typo.contains("\"capacity\""),
            "{typo}"
        );
        for forgotten in [json!(1.5), json!("1.5")] {
            let text = error("Cache", json!({"cache": {"capacity": forgotten}}));
            assert!(text.contains("a whole number of bytes"), "{text}");
        }
        let zero = error("Cache", json!({"cache": {"capacity": 0}}));
        assert!(
            zero.contains("cache.capacity") && zero.contains("above zero"),
            "{zero}"
        );
        let word = error("Cache", json!({"overload": "explode"}));
        assert!(
            word.contains("explode") && word.contains("wait, drop"),
            "{word}"
        );
        let slice = error("Cache", json!({"slice_size": "1KiB"}));
        assert!(
            slice.contains("slice_size: \"1KiB\"") && slice.contains("at least 64KiB"),
            "{slice}"
        );
        for small in [
            json!({"staging_slab": "1KiB"}),
            json!({"staging_slab": "100KiB", "staging_regions": 2}),
            json!({"cache": {"capacity": "1KiB"}}),
        ] {
            let text = error("Cache", small);
            assert!(text.contains("at least "), "{text}");
        }
        let section = error("Cache|Ds3fs", json!({"d3fs": {"path": "/x"}}));
        assert!(section.contains("did you mean \"ds3fs\"?"), "{section}");
        let section = error("Cache", json!({"dax": {"path": "/x"}}));
        assert!(section.contains("dax"), "{section}");
    }

    #[test]
    fn a_socket_is_a_path_or_one_of_two_words() {
        for word in ["on", "true", "yes", "none", "Off"] {
            let text = error("Cache", json!({ "socket": word }));
            assert!(text.contains("auto, off, or a path"), "{text}");
        }
        let here = std::env::current_dir().unwrap();
        for (path, is) in [
            ("/run/x", "/run/x".into()),
            ("./x", here.join("x")),
            ("x.sock", here.join("x.sock")),
        ] {
            let config = Config::new("Cache", &json!({ "socket": path })).unwrap();
            assert_eq!(config.socket, Socket::At(is));
        }
    }

    #[test]
    fn unknown_or_misordered_pipelines_are_refused() {
        for pipeline in ["", "Dax|Cache", "Cache|Cache", "Cache|Tape", "cache"] {
            let text = error(pipeline, json!({}));
            assert!(
                text.contains("pipeline") && text.contains("Cache|Dax"),
                "{text}"
            );
        }
    }

    #[test]
    fn every_option_of_the_schema_is_understood() {
        for option in schema::OPTIONS {
            let value = match option.kind {
                Kind::Size => json!("1MiB"),
                Kind::Duration => json!("1s"),
                Kind::Count => json!(7),
                Kind::Flag => json!(true),
                Kind::Text => json!(match option.name {
                    "pipeline" => "Cache|Dax|Nvme|Posix",
                    "instance" => "x-1",
                    _ => "/x",
                }),
                Kind::Mode => json!("0660"),
                Kind::Choice(words) => json!(words[0]),
                Kind::Devices => json!([{"path": "/x"}, {"path": "/y", "capacity": "1MiB"}]),
            };
            let mut settings = match option.section {
                "" => json!({ option.name: value }),
                section => json!({ section: { option.name: value } }),
            };
            settings["posix"] = json!({"path": "/x"});
            Config::new("Cache|Dax|Nvme|Posix", &settings).unwrap();
        }
    }
}
