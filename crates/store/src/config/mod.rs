//! Configuration of a depot: one schema for files, dictionaries and the command line.

mod arenas;
mod devices;
mod edges;
mod file;
mod http;
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
pub use http::{HttpAddress, HttpConfig};
use kvdepot_arena::Error;
use kvdepot_arena::format::GRANULE;
pub use kvdepot_arena::{Durability, Format, size};
use kvdepot_host::limits;
use kvdepot_media::CopierConfig;
use kvdepot_media::copy_kernel::CopyKernel;
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

/// Behaviour of a put while the write-back queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Overload {
    /// The put waits until the lower tier has taken queued blocks.
    #[default]
    Wait,
    /// The block is dropped and counted.
    Drop,
}

/// Policy for blocks that would evict others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Admission {
    /// Stores every block.
    #[default]
    All,
    /// Rejects blocks that are unlikely to be read, for example those that were evicted unread
    /// before.
    Learned,
}

/// Location of the socket on which other processes attach.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever serves has an answer for each"
)]
pub enum Socket {
    /// A path in the runtime directory.
    #[default]
    Auto,
    /// No socket.
    Off,
    /// This path.
    At(PathBuf),
}

/// Settings of the `Cache` tier.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Memory in bytes; `None` selects the default of [`Config::cache_capacity`].
    pub capacity: Option<u64>,
}

/// Validated configuration of a depot.
///
/// # Examples
///
/// ```
/// use kvdepot_store::Config;
/// use serde_json::json;
///
/// let settings = json!({
///     "cache": {"capacity": "512MiB"},
///     "dax": {"path": "/var/tmp/kvdepot.arena", "capacity": "4GiB"},
/// });
/// let config = Config::new("Cache|Dax", &settings)?;
/// assert_eq!(config.cache.capacity, Some(512 << 20));
///
/// // An unknown option is an error.
/// let error = Config::new("Cache", &json!({"cache": {"capactiy": "1GiB"}})).unwrap_err();
/// assert!(error.to_string().contains("cache.capactiy"));
/// # Ok::<(), kvdepot_store::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Names of the tiers, first to last.
    pub pipeline: Vec<String>,
    /// Number of copy threads, 1 to 256; `None` selects [`default_lanes`].
    pub lanes: Option<usize>,
    /// Maximum bytes that a copy thread processes at a time, at least 64 KiB; default: 4 MiB.
    pub slice_size: u64,
    /// Copy kernel; `None`: the fastest one on this machine.
    pub copy_kernel: Option<CopyKernel>,
    /// Size of the staging buffer in bytes, at least 64 KiB per region; `None`: 2 MiB per region.
    pub staging_slab: Option<u64>,
    /// Number of regions of the staging buffer, 1 to 4096; `None`: 2 per copy thread, at least 3.
    pub staging_regions: Option<usize>,
    /// File with the keys that authenticate blocks on shared media, see
    /// [`Keyring`](crate::Keyring).
    ///
    /// `None`: every process that can write there is trusted.
    pub mac_key_file: Option<PathBuf>,
    /// Maximum time that opening waits for the lock of an arena; default: 10 s.
    pub lock_wait: Duration,
    /// Behaviour of a put while the write-back queue is full; default: [`Overload::Wait`].
    pub overload: Overload,
    /// Maximum bytes that wait in a tier for write-back; `None`: half of the upper tier.
    pub write_back_depth: Option<u64>,
    /// True if blocks that were read from a lower tier are promoted; default: true.
    pub promote: bool,
    /// Policy for blocks that would evict others; default: [`Admission::All`].
    pub admission: Admission,
    /// Maximum time that a close spends on write-back; default: 60 s.
    pub close_timeout: Duration,
    /// Maximum time that a client waits for a response, at least 1 ms; `None`: 10 s.
    pub timeout: Option<Duration>,
    /// Name that distinguishes several depots of a user; part of the name of the default arena.
    pub instance: Option<String>,
    /// Number of depots of this host that share the default capacities, 1 to 1024; default: 1.
    pub shares: u64,
    /// Socket on which other processes attach; default: [`Socket::Auto`].
    pub socket: Socket,
    /// Permission bits of the socket; default: 0600.
    pub socket_mode: u32,
    /// Settings of the HTTP server; default: no HTTP server.
    pub http: HttpConfig,
    /// Settings in the section `cache`.
    pub cache: CacheConfig,
    /// Settings in the section `dax`.
    pub dax: ArenaConfig,
    /// Settings in the section `nvme`.
    pub nvme: ArenaConfig,
    /// Maximum time of a lookup in an asynchronous tier; default: 1 s.
    pub lookup_timeout: Duration,
    /// Maximum time without a response from an asynchronous tier, for other operations; default: 10
    /// s.
    pub tier_timeout: Duration,
    /// Kinds of asynchronous tiers that were known when the configuration was read.
    pub kinds: Kinds,
    /// Settings of asynchronous tiers, by the names of the tiers.
    pub sections: BTreeMap<&'static str, Section>,
    /// Write-back settings, by the names of the tiers that the blocks are written to.
    pub edges: BTreeMap<&'static str, EdgeConfig>,
    /// Time-outs in the sections of asynchronous tiers, by the names of the tiers.
    pub late: BTreeMap<&'static str, LateConfig>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            pipeline: vec!["Cache".into(), "Dax".into()],
            lanes: None,
            slice_size: 4 << 20,
            copy_kernel: None,
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
            http: HttpConfig::default(),
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
    /// Creates a configuration from a pipeline, such as `Cache|Dax`, and its settings.
    ///
    /// `settings` is a JSON object of the options in `docs/configuration.md`, or null. If it
    /// contains `pipeline`, the value must equal `pipeline`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with the option, its value and the allowed values.
    pub fn new(pipeline: &str, settings: &Value) -> Result<Config, Error> {
        Config::with_kinds(&Kinds::standard(), pipeline, settings)
    }

    /// Creates a configuration like [`Config::new`], for pipelines with asynchronous tiers of
    /// `kinds`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with the option, its value and the allowed values.
    pub fn with_kinds(kinds: &Kinds, pipeline: &str, settings: &Value) -> Result<Config, Error> {
        let settings = object("settings", settings)?;
        if let Some(inner) = settings.get("pipeline")
            && inner.as_str() != Some(pipeline)
        {
            return Err(Error::config(
                "pipeline",
                inner,
                format!("{pipeline:?}, the pipeline argument of the call (or omit this option)"),
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
            let allowed = "this option only for a pipeline with shared storage, such as Posix";
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
                let allowed = format!("at least 64KiB per region ({regions} staging_regions)");
                Err(Error::config("staging_slab", size::show(slab), allowed))
            }
            _ => Ok(()),
        }
    }

    fn check_slab_fits(&self) -> Result<(), Error> {
        match (self.staging_slab, limits::memory_allowed()) {
            (Some(slab), Ok(memory)) if slab > memory => {
                let memory = size::show(memory);
                let allowed = format!("at most {memory}, the memory that this process may use");
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
        copier.kernel = self.copy_kernel;
        copier.staging_slab = self.staging_slab;
        copier.staging_regions = self.staging_regions;
        self.check_slab(copier.regions())?;
        self.check_slab_fits()?;
        Ok(copier)
    }

    /// Creates a configuration from settings that may contain `pipeline`; default: `Cache|Dax`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with the option, its value and the allowed values.
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

    /// Reads a configuration from a YAML file (JSON is YAML too).
    ///
    /// Configuration files of UCM are translated.
    ///
    /// # Errors
    ///
    /// * [`Error::Io`] if the file cannot be read.
    /// * [`Error::Config`] with the option, its value and the allowed values.
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
                            "sections of the tiers of the pipeline {:?} only",
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
            ("", "copy_kernel") if parsed.text == "auto" => self.copy_kernel = None,
            ("", "copy_kernel") => {
                let kernel = CopyKernel::from_name(&parsed.text);
                let kernel = kernel.ok_or_else(|| {
                    let here: Vec<&str> = CopyKernel::all()
                        .into_iter()
                        .map(CopyKernel::name)
                        .collect();
                    let allowed = format!("auto, or a kernel of this machine: {}", here.join(", "));
                    Error::config(field, value, allowed)
                })?;
                self.copy_kernel = Some(kernel);
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
                    let allowed = "1 to 64 characters: letters, digits, '-', '_' and '.'";
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
                        let allowed = "auto, off, or a path that contains a / or ends in .sock \
                                       (without unix:)";
                        return Err(Error::config(field, value, allowed));
                    }
                }
            }
            ("", "socket_mode") => self.socket_mode = parsed.number as u32,
            ("", "http" | "http_token_file" | "http_hosts") => {
                self.http.set(name, value, &parsed.text)?;
            }
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

/// Returns the default number of copy threads: the CPUs of the control group, at most 4.
pub fn default_lanes() -> usize {
    // A few threads saturate a machine's memory; the rest of the CPUs are the engine's.
    limits::cpus_of_group().unwrap_or(1).clamp(1, 4)
}

/// Splits and checks a pipeline.
fn parse_pipeline(kinds: &Kinds, text: &str) -> Result<Vec<String>, Error> {
    let tiers: Vec<String> = text.split('|').map(|tier| tier.trim().to_owned()).collect();
    let refuse = |allowed| Error::config("pipeline", format!("{text:?}"), allowed);
    if tiers.len() > TIERS_MAX {
        return Err(refuse(format!("a pipeline of at most {TIERS_MAX} tiers")));
    }
    for (at, tier) in tiers.iter().enumerate() {
        let is_known = schema::TIERS.contains(&tier.as_str()) || kinds.find(tier).is_some();
        if !is_known || tiers[..at].contains(tier) {
            return Err(refuse(pipeline_help(kinds)));
        }
        if tier == "Cache" && at > 0 {
            let why = "a cache in memory after another tier would not be faster than that tier";
            return Err(refuse(format!(
                "Cache as the first tier only, as in \"Cache|Dax\": {why}"
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
        "a list of different tiers, first to last, separated by |, such as \"Cache|Dax\"; known \
         tiers: {}",
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
        Some((word, distance)) if distance <= 2 => format!("; did you mean {word:?}?"),
        _ => String::new(),
    };
    Error::config(
        field,
        "an unknown option",
        format!("one of {}{hint}", known.join(", ")),
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
                    "http" => "127.0.0.1:0",
                    "http_hosts" => "x.example",
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
