//! The sections `posix` and `ds3fs`: one layout, reached in two ways.

use std::path::PathBuf;

use kvdepot_arena::{Durability, Error, size};

use crate::option::{Kind, OptionSpec, Section};

pub(super) const POSIX: &[OptionSpec] = &[
    OptionSpec::new(
        "posix",
        "path",
        Kind::Text,
        "none (required)",
        "Directory on a POSIX file system; kvdepot creates a missing directory. Any number of \
         processes and hosts can share the directory. Set the same `capacity` in all of them: if \
         the values differ, the smallest value applies.",
    ),
    capacity_of("posix"),
    OptionSpec::new(
        "posix",
        "direct",
        Kind::Choice(&["auto", "true", "false"]),
        "auto",
        "Direct I/O (`O_DIRECT`), which bypasses the page cache. `auto`: if the file system \
         supports direct I/O. `true`: always; opening fails if the file system does not support \
         direct I/O. `false`: never.",
    ),
    OptionSpec::durability("posix"),
    fan_out_of("posix"),
];

pub(super) const DS3FS: &[OptionSpec] = &[
    OptionSpec::new(
        "ds3fs",
        "path",
        Kind::Text,
        "none (required)",
        "Directory below a 3FS mount; kvdepot creates a missing directory. Any number of processes \
         and hosts can share the directory. Set the same `capacity` in all of them: if the values \
         differ, the smallest value applies.",
    ),
    capacity_of("ds3fs"),
    OptionSpec::new(
        "ds3fs",
        "library",
        Kind::Text,
        "libhf3fs_api_shared.so, found by the system's loader",
        "Path or name of 3FS's library for user-space I/O (USRBIO). With the value `posix`, \
         kvdepot uses no library, and all I/O goes through the mount.",
    ),
    OptionSpec::new(
        "ds3fs",
        "stream_number",
        Kind::Count,
        "one per CPU, at most 32",
        "Number of I/O rings for reads, 1 to 64. kvdepot creates the same number of I/O rings for \
         writes.",
    ),
    OptionSpec::new(
        "ds3fs",
        "waiting_queue_depth",
        Kind::Count,
        "1024",
        "Maximum number of waiting requests per direction (read or write), 1 to 65536, in addition \
         to the requests in flight. Requests beyond this number fail: a read is a miss, a write is \
         skipped.",
    ),
    OptionSpec::new(
        "ds3fs",
        "running_queue_depth",
        Kind::Count,
        "32768",
        "Maximum number of requests in flight, 1 to 65536.",
    ),
    OptionSpec::durability("ds3fs"),
    fan_out_of("ds3fs"),
];

// What both take.

const fn capacity_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "capacity",
        Kind::Size,
        "the capacity of the existing directory; for a new directory 80 % of its file system",
        "Maximum total size of the files of all processes that share the directory, at least 1MiB. \
         kvdepot starts to evict the least recently used files at 94 % of this size.",
    )
}

const fn fan_out_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "fan_out",
        Kind::Count,
        "256, or as in the existing directory",
        "Number of subdirectories, 1 to 4096. Increase the number for millions of files. An \
         existing directory keeps its number.",
    )
}

/// Fewest bytes of a directory: some blocks, and the grants of a few processes.
const CAPACITY_MIN: u64 = 1 << 20;

pub(super) const FAN_OUT: u32 = 256;
const FAN_OUT_MAX: u64 = 4096;

/// 3FS's library.
const LIBRARY: &str = "libhf3fs_api_shared.so";

/// In its place: none.
const NO_LIBRARY: &str = "posix";

/// As UCM has them.
const STREAMS: usize = 32;
const STREAMS_MAX: u64 = 64;
const WAITING: u64 = 1024;
const RUNNING: u64 = 32_768;
const RUNNING_MAX: u64 = 65_536;

/// Whether files bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectIo {
    Auto,
    Yes,
    No,
}

/// How the bytes of blocks are reached. Names always are through the file system.
#[derive(Clone, Debug)]
pub(super) enum Reach {
    /// By reads and writes of files.
    Files(DirectIo),
    /// By the rings of a 3FS.
    Rings(Rings),
}

/// What rings there are.
#[derive(Clone, Debug)]
pub(super) struct Rings {
    pub(super) library: PathBuf,
    pub(super) streams: usize,
    pub(super) waiting: usize,
    pub(super) running: usize,
}

pub(super) struct Options {
    /// The tier's name, and that of its section.
    pub(super) name: &'static str,
    pub(super) section: &'static str,
    pub(super) path: PathBuf,
    pub(super) capacity: Option<u64>,
    pub(super) reach: Reach,
    /// It is on another host's medium, whatever its file system looks like.
    pub(super) is_far: bool,
    pub(super) durability: Durability,
    /// `None`: that of the directory, or the default for a new one.
    pub(super) fan_out: Option<u32>,
}

impl Options {
    pub(super) fn posix(section: &Section) -> Result<Options, Error> {
        let direct = match section.text("direct") {
            Some("true") => DirectIo::Yes,
            Some("false") => DirectIo::No,
            _ => DirectIo::Auto,
        };
        Options::read(("Posix", "posix"), section, Reach::Files(direct))
    }

    pub(super) fn ds3fs(section: &Section) -> Result<Options, Error> {
        let bounded = |name: &str, usual: u64, most: u64| match section.number(name) {
            Some(given) if given > most => {
                let field = format!("ds3fs.{name}");
                Err(Error::config(field, given, format!("at most {most}")))
            }
            given => Ok(given.unwrap_or(usual) as usize),
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let rings = Rings {
            library: section.text("library").unwrap_or(LIBRARY).into(),
            streams: bounded("stream_number", processors.min(STREAMS) as u64, STREAMS_MAX)?,
            waiting: bounded("waiting_queue_depth", WAITING, RUNNING_MAX)?,
            running: bounded("running_queue_depth", RUNNING, RUNNING_MAX)?,
        };
        let reach = match section.text("library") {
            Some(NO_LIBRARY) => Reach::Files(DirectIo::Auto),
            _ => Reach::Rings(rings),
        };
        Options::read(("Ds3fs", "ds3fs"), section, reach)
    }

    fn read(
        (name, key): (&'static str, &'static str),
        section: &Section,
        reach: Reach,
    ) -> Result<Options, Error> {
        let field = |option: &str| format!("{key}.{option}");
        let path = section.path("path");
        let path = path.ok_or_else(|| Error::config(field("path"), "missing", "a directory"))?;
        let capacity = section.number("capacity");
        if let Some(given) = capacity.filter(|given| *given < CAPACITY_MIN) {
            let (given, allowed) = (size::show(given), "at least 1MiB");
            return Err(Error::config(field("capacity"), given, allowed));
        }
        let fan_out = section.number("fan_out");
        if let Some(fan_out) = fan_out.filter(|fan_out| *fan_out > FAN_OUT_MAX) {
            let allowed = format!("at most {FAN_OUT_MAX}");
            return Err(Error::config(field("fan_out"), fan_out, allowed));
        }
        Ok(Options {
            name,
            section: key,
            path,
            capacity,
            is_far: name == "Ds3fs",
            reach,
            durability: match section.text("durability") {
                Some("power") => Durability::Power,
                _ => Durability::Process,
            },
            fan_out: fan_out.map(|fan_out| fan_out as u32),
        })
    }
}
