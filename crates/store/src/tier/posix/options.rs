//! The section `posix`, and who opens the tier.

use std::path::PathBuf;

use kvdepot_arena::{Durability, Error, size};

use crate::option::{Kind, OptionSpec, Section};

pub(super) const OPTIONS: &[OptionSpec] = &[
    OptionSpec::new(
        "posix",
        "path",
        Kind::Text,
        "none: it must be given",
        "A directory on any POSIX file system, which any number of processes and hosts may share; \
         made where there is none. All who share it name the same `capacity` and `fan_out`.",
    ),
    OptionSpec::new(
        "posix",
        "capacity",
        Kind::Size,
        "what the directory has been shared with; for a new one 80 % of its file system",
        "Most bytes of all its files together, whoever writes them: at least 1MiB. The oldest go \
         from 94 % on.",
    ),
    OptionSpec::new(
        "posix",
        "direct",
        Kind::Choice(&["auto", "true", "false"]),
        "auto",
        "Whether files are read and written past the page cache: `auto` where the file system can.",
    ),
    OptionSpec::new(
        "posix",
        "durability",
        Kind::Choice(&["process", "power"]),
        "process",
        "What an acknowledged block outlives: the `process`, or a `power` cut too (slower).",
    ),
    OptionSpec::new(
        "posix",
        "fan_out",
        Kind::Count,
        "256",
        "Folders that the files are spread over, at most 4096: for millions of files, more.",
    ),
];

/// Fewest bytes of a directory: some blocks, and the grants of a few processes.
const CAPACITY_MIN: u64 = 1 << 20;

const FAN_OUT: u64 = 256;
const FAN_OUT_MAX: u64 = 4096;

/// Whether files bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectIo {
    Auto,
    Yes,
    No,
}

pub(super) struct Options {
    pub(super) path: PathBuf,
    pub(super) capacity: Option<u64>,
    pub(super) direct: DirectIo,
    pub(super) durability: Durability,
    pub(super) fan_out: u32,
}

impl Options {
    pub(super) fn read(section: &Section) -> Result<Options, Error> {
        let path = section.path("path");
        let path = path.ok_or_else(|| Error::config("posix.path", "missing", "a directory"))?;
        let capacity = section.number("capacity");
        if let Some(given) = capacity.filter(|given| *given < CAPACITY_MIN) {
            let allowed = "at least 1MiB";
            return Err(Error::config("posix.capacity", size::show(given), allowed));
        }
        let fan_out = section.number("fan_out").unwrap_or(FAN_OUT);
        if fan_out > FAN_OUT_MAX {
            let allowed = format!("at most {FAN_OUT_MAX}");
            return Err(Error::config("posix.fan_out", fan_out, allowed));
        }
        Ok(Options {
            path,
            capacity,
            direct: match section.text("direct") {
                Some("true") => DirectIo::Yes,
                Some("false") => DirectIo::No,
                _ => DirectIo::Auto,
            },
            durability: match section.text("durability") {
                Some("power") => Durability::Power,
                _ => Durability::Process,
            },
            fan_out: fan_out as u32,
        })
    }
}
