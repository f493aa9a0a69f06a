//! Translation of UCM's configuration files.
//!
//! Each key becomes an option, has no counterpart in kvdepot, or is rejected because it would mean
//! something else. `docs/ucm.md` has the table, which a test compares with this one.

use std::collections::BTreeMap;

use kvdepot_arena::{Error, size};
use kvdepot_host::limits;
use serde_json::{Map, Value, json};

use super::words::{nearest, object};

/// What makes a file one of UCM's.
const MARK: &str = "ucm_connectors";

/// Of one of its entries.
const NAME: &str = "ucm_connector_name";
const CONFIG: &str = "ucm_connector_config";

/// What its cache takes unless it is told: 64 GB.
const BUFFER: u64 = 64_000_000_000;

/// Of the memory that this process may use, what its cache gets at most: one part of so many. The
/// rest is the engine's.
const SHARE: u64 = 4;

/// What `timeout_ms` is unless it is given.
const TIMEOUT_MS: u64 = 30_000;

/// Treatment of a key of UCM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the page names each")]
pub enum Fate {
    /// The key becomes this option of kvdepot.
    Option(&'static str),
    /// kvdepot does this always, or in another way. Every value is accepted and logged.
    Otherwise(&'static str),
    /// Only this value is accepted. Others would require something that kvdepot does not do.
    Only(&'static str, &'static str),
}

use Fate::{Only, Option as Becomes, Otherwise};

/// Keys next to `ucm_connectors`.
pub const TOP: &[(&str, Fate)] = &[
    (
        "enable_event_sync",
        Otherwise("stores always wait for the forward pass that writes them"),
    ),
    ("enable_metrics", Otherwise("metrics are always collected")),
    (
        "enable_record_traces",
        Otherwise("lookups are logged at level debug"),
    ),
    ("hit_ratio", Only("1.0", "all tokens of a hit are used")),
    (
        "load_only_first_rank",
        Only("false", "each rank loads its own part"),
    ),
    ("load_tokens_threshold", Otherwise("every hit is loaded")),
    (
        "metrics_config_path",
        Otherwise("`GET /metrics` needs no file"),
    ),
    (
        "persist_token_threshold",
        Only("0", "short requests are also stored"),
    ),
    (
        "ucm_sparse_config",
        Only("null", "only whole blocks are stored and loaded"),
    ),
    (
        "use_layerwise",
        Otherwise("blocks are loaded between steps"),
    ),
    ("use_lite", Only("false", "blocks are always stored")),
    (
        "wa_dump_block_wise",
        Otherwise("every block of every group is stored"),
    ),
];

/// Keys of a connector.
pub const CONNECTOR: &[(&str, Fate)] = &[
    ("block_size", Otherwise("the engine determines it")),
    ("buffer_size", Becomes("cache.capacity")),
    ("cache_buffer_capacity_gb", Becomes("cache.capacity")),
    (
        "cache_io_aggregation",
        Otherwise("adjacent ranges are always transferred together"),
    ),
    (
        "cache_load_backend_only",
        Only(
            "false",
            "blocks are loaded from the first tier that has them",
        ),
    ),
    (
        "cache_sdma_direct",
        Otherwise("it applies to other devices only"),
    ),
    (
        "cache_stream_number",
        Otherwise("`lanes` depends on the number of CPUs"),
    ),
    ("device_id", Otherwise("the engine determines it")),
    ("io_direct", Becomes("posix.direct")),
    ("local_rank_size", Otherwise("the engine determines it")),
    ("posix_capacity_gb", Becomes("posix.capacity")),
    (
        "posix_commit_concurrency",
        Otherwise("the tier determines the number of threads"),
    ),
    (
        "posix_data_trans_concurrency",
        Otherwise("the tier determines the number of threads"),
    ),
    (
        "posix_gc_check_interval_sec",
        Otherwise("usage is counted at each put"),
    ),
    (
        "posix_gc_concurrency",
        Otherwise("one process evicts at a time"),
    ),
    (
        "posix_gc_max_recycle_count_per_shard",
        Otherwise("the least recently used files of all shards are evicted"),
    ),
    (
        "posix_gc_precise_mode",
        Otherwise("the least recently used files of all shards are evicted"),
    ),
    (
        "posix_gc_recycle_percent",
        Otherwise("the least recently used files are evicted from 94 % on"),
    ),
    (
        "posix_gc_shard_sample_ratio",
        Otherwise("usage is counted exactly"),
    ),
    (
        "posix_gc_task_timeout_ms",
        Otherwise("`timeout` applies to all operations"),
    ),
    (
        "posix_gc_trigger_threshold_ratio",
        Otherwise("the least recently used files are evicted from 94 % on"),
    ),
    (
        "posix_io_engine",
        Otherwise("io_uring, or threads if it is not available"),
    ),
    (
        "posix_lookup_concurrency",
        Otherwise("the tier determines the number of threads"),
    ),
    (
        "posix_open_concurrency",
        Otherwise("the tier determines the number of threads"),
    ),
    ("running_queue_depth", Becomes("ds3fs.running_queue_depth")),
    ("shard_size", Otherwise("the engine determines it")),
    (
        "share_buffer_enable",
        Otherwise("`kvdepot serve` shares one cache on a host"),
    ),
    ("storage_backends", Becomes("posix.path")),
    (
        "store_health",
        Otherwise("the circuit breaker of a tier skips it until it responds"),
    ),
    ("store_pipeline", Becomes("pipeline")),
    ("stream_number", Becomes("ds3fs.stream_number")),
    ("tensor_size", Otherwise("the engine determines it")),
    ("tensor_size_list", Otherwise("the engine determines it")),
    ("timeout_ms", Becomes("tier_timeout")),
    (
        "unique_id",
        Otherwise("namespaces are derived from model, layout and salt"),
    ),
    ("use_direct", Becomes("posix.direct")),
    ("use_gdr", Only("false", "transfers go through host memory")),
    ("waiting_queue_depth", Becomes("ds3fs.waiting_queue_depth")),
];

/// UCM's pipelines, and those of kvdepot that do the same.
const PIPELINES: &[(&str, &str)] = &[
    ("Cache|Ds3fs", "Cache|Ds3fs"),
    ("Cache|Posix", "Cache|Posix"),
    ("Cache|Empty", "Cache"),
    ("Ds3fs", "Ds3fs"),
    ("Posix", "Posix"),
];

/// Returns the level in `UC_LOGGER_LEVEL` in kvdepot's words, or `None` for values unknown to UCM.
#[must_use]
pub fn log_level() -> Option<&'static str> {
    let given = std::env::var("UC_LOGGER_LEVEL").ok()?;
    Some(match given.trim().to_ascii_lowercase().as_str() {
        "debug" => "debug",
        "info" => "info",
        "warning" | "warn" => "warn",
        "error" | "critical" => "error",
        _ => return None,
    })
}

/// What begins a pipeline whose tiers another process has.
const SERVICE: &str = "unix:";

/// The options that a file of UCM's comes to, as far as those of `given` do not take their place;
/// `None` for any other file.
///
/// # Errors
/// [`Error::Config`] for what cannot be done as it says, and for a key that UCM does not have.
pub(super) fn translate(file: &Value, given: &Value) -> Result<Option<Value>, Error> {
    let Some(connectors) = file.get(MARK) else {
        return Ok(None);
    };
    let top = object("the file", file)?;
    for (key, value) in top.iter().filter(|(key, _)| *key != MARK) {
        let _none = judge(TOP, "", key, value)?;
    }
    let one = match connectors.as_array().map(Vec::as_slice) {
        Some([one]) => object(MARK, one)?,
        _ => {
            return Err(Error::config(
                MARK,
                connectors,
                "a list with exactly one connector",
            ));
        }
    };
    if let Some(key) = one
        .keys()
        .find(|key| ![NAME, CONFIG].contains(&key.as_str()))
    {
        return Err(unknown([NAME, CONFIG].into_iter(), MARK, key));
    }
    let keys = object(CONFIG, one.get(CONFIG).unwrap_or(&Value::Null))?;
    let pipeline = pipeline(one.get(NAME), keys)?;
    let mut options = Map::new();
    options.insert("pipeline".into(), pipeline.into());
    let Tiers { ours, cache, far } = Tiers::of(pipeline, given);
    let (mut buffer, mut timeout) = ((BUFFER, None), TIMEOUT_MS);
    let mut said = BTreeMap::new();
    for (key, value) in keys {
        let Some(option) = judge(CONNECTOR, CONFIG, key, value)? else {
            continue;
        };
        let field = format!("{CONFIG}.{key}");
        // An older name and a newer one: which of them UCM takes is nothing to be guessed.
        if let Some(other) = said.insert(option, key) {
            let allowed = format!("either {other} or {key}: both set the same option");
            return Err(Error::config(field, value, allowed));
        }
        match option.split_once('.').unwrap_or(("", option)) {
            ("", "tier_timeout") => timeout = number(&field, value)?,
            ("", _) => {}
            ("cache", _) => {
                let bytes = match key.ends_with("_gb") {
                    true => gigabytes(&field, value)?,
                    false => bytes(&field, value)?,
                };
                buffer = (bytes, Some(field));
            }
            ("posix", "path") => {
                let path = backend(&field, value)?;
                if let Some(far) = &far {
                    set(&mut options, far, "path", path.into());
                }
            }
            // No limit, in UCM: here it is then what the file system has room for.
            ("posix", "capacity") if value.as_u64() == Some(0) => {}
            ("posix", "capacity") => {
                let bytes = gigabytes(&field, value)?;
                if let Some(far) = &far {
                    set(&mut options, far, "capacity", bytes.into());
                }
            }
            ("posix", name) => {
                let direct = value.as_bool();
                let direct = direct.ok_or_else(|| Error::config(field, value, "true or false"))?;
                // 3FS has its own way past the page cache.
                if far.as_deref() == Some("posix") {
                    set(&mut options, "posix", name, direct.to_string().into());
                }
            }
            (section, name) => {
                let count = number(&field, value)?;
                if far.as_deref() == Some(section) {
                    set(&mut options, section, name, count.into());
                }
            }
        }
    }
    if ours {
        options.insert("tier_timeout".into(), format!("{timeout}ms").into());
    }
    if cache {
        let taken = clamped(buffer.0, buffer.1.as_deref());
        set(&mut options, "cache", "capacity", taken);
    }
    Ok(Some(Value::Object(options)))
}

/// What tiers there will be that the file says something of.
struct Tiers {
    /// They are this process's.
    ours: bool,
    /// There is a cache, and nobody has said how large.
    cache: bool,
    /// The section of the one that keeps a file a block.
    far: Option<String>,
}

impl Tiers {
    /// Of the file's pipeline, or the one that is given.
    fn of(pipeline: &str, given: &Value) -> Tiers {
        let beside = given.get("pipeline").and_then(Value::as_str);
        let pipeline = beside.unwrap_or(pipeline);
        let mut tiers = pipeline.split('|').map(str::trim);
        let has_cache = tiers.clone().any(|tier| tier == "Cache");
        let far = tiers.rfind(|tier| ["Posix", "Ds3fs"].contains(tier));
        Tiers {
            ours: !pipeline.starts_with(SERVICE),
            cache: has_cache && given.pointer("/cache/capacity").is_none(),
            far: far.map(str::to_ascii_lowercase),
        }
    }
}

/// What a key becomes; `None` where nothing follows from it.
fn judge(
    known: &[(&'static str, Fate)],
    section: &str,
    key: &str,
    value: &Value,
) -> Result<Option<&'static str>, Error> {
    let Some((_, fate)) = known.iter().find(|(name, _)| *name == key) else {
        return Err(unknown(known.iter().map(|(name, _)| *name), section, key));
    };
    match fate {
        Becomes(option) => Ok(Some(option)),
        Otherwise(how) => {
            tracing::info!(key, %value, how, "UCM option has no equivalent");
            Ok(None)
        }
        Only(only, why) => {
            let same = serde_json::from_str(only).is_ok_and(|only: Value| match &only {
                Value::Number(only) => only.as_f64() == value.as_f64(),
                only => only == value,
            });
            match same {
                true => Ok(None),
                false => Err(Error::config(key, value, format!("{only} only: {why}"))),
            }
        }
    }
}

fn unknown<'a>(known: impl Iterator<Item = &'a str>, section: &str, key: &str) -> Error {
    let known: Vec<&str> = known.collect();
    let near = nearest(known.iter().copied(), key);
    let near = near.map_or(String::new(), |(near, _)| {
        format!("; did you mean {near:?}?")
    });
    let field = match section {
        "" => key.to_owned(),
        section => format!("{section}.{key}"),
    };
    let allowed = format!("one of {}{near}", known.join(", "));
    Error::config(field, "an unknown key", allowed)
}

/// kvdepot's pipeline.
fn pipeline(name: Option<&Value>, keys: &Map<String, Value>) -> Result<&'static str, Error> {
    let default = match name.and_then(Value::as_str) {
        Some("UcmPipelineStore") => None,
        // A file a block on a shared file system, without a pipeline of its own.
        Some("UcmNfsStore") => Some("Cache|Posix"),
        _ => {
            let given = name.unwrap_or(&Value::Null);
            return Err(Error::config(
                NAME,
                given,
                "UcmPipelineStore or UcmNfsStore",
            ));
        }
    };
    let given = keys.get("store_pipeline");
    let text = given.map_or(default, |given| given.as_str());
    let found = PIPELINES.iter().find(|(theirs, _)| Some(*theirs) == text);
    found.map(|(_, ours)| *ours).ok_or_else(|| {
        let known: Vec<&str> = PIPELINES.iter().map(|(theirs, _)| *theirs).collect();
        let field = format!("{CONFIG}.store_pipeline");
        Error::config(field, given.unwrap_or(&Value::Null), known.join(", "))
    })
}

/// The one directory.
fn backend<'a>(field: &str, value: &'a Value) -> Result<&'a str, Error> {
    let text = value.as_str().filter(|text| !text.is_empty());
    // Several are separated by colons.
    text.filter(|text| !text.contains(':')).ok_or_else(|| {
        let allowed =
            "one directory (combine several disks in one file system, or use `nvme.devices`)";
        Error::config(field, value, allowed)
    })
}

fn number(field: &str, value: &Value) -> Result<u64, Error> {
    let given = value.as_u64().filter(|number| *number > 0);
    given.ok_or_else(|| Error::config(field, value, "a whole number, 1 or more"))
}

fn gigabytes(field: &str, value: &Value) -> Result<u64, Error> {
    let bytes = number(field, value)?.checked_mul(1 << 30);
    bytes.ok_or_else(|| Error::config(field, value, "a number of GiB below 2^34"))
}

fn bytes(field: &str, value: &Value) -> Result<u64, Error> {
    let text = value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned);
    let bytes = size::size(&text).filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| Error::config(field, value, size::SIZE_HELP))
}

/// Of what the cache is to have, what this machine can give beside an engine.
fn clamped(bytes: u64, given: Option<&str>) -> Value {
    let most = limits::memory_allowed().map_or(u64::MAX, |memory| memory / SHARE);
    if bytes > most {
        tracing::warn!(
            key = given.unwrap_or("buffer_size, which is not given"),
            asked = size::show(bytes),
            taken = size::show(most),
            "UCM cache size exceeds a quarter of the available memory; using a quarter"
        );
    }
    bytes.min(most).into()
}

fn set(options: &mut Map<String, Value>, section: &str, name: &str, value: Value) {
    let section = options.entry(section).or_insert_with(|| json!({}));
    if let Value::Object(section) = section {
        section.insert(name.into(), value);
    }
}
