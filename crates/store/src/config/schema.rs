//! Declarations of all options. They validate configurations and generate `docs/configuration.md`.

use crate::option::{Kind, OptionSpec};
use crate::tier::Kinds;

/// The tiers that every depot knows.
pub(super) const TIERS: &[&str] = &["Cache", "Dax", "Nvme"];

/// Options of the depot and of the tiers `Cache`, `Dax` and `Nvme`.
///
/// Sections are the names of the tiers in lower case.
pub const OPTIONS: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "pipeline",
        Kind::Text,
        "Cache|Dax",
        "Tiers of the pipeline, first to last, separated by `|`. For files; \
         `kvdepot.open(pipeline, …)` takes it as its first argument.",
    ),
    OptionSpec::new(
        "",
        "lanes",
        Kind::Count,
        "the number of CPUs of the control group, at most 4",
        "Number of copy threads, 1 to 256, in the process that opens the depot and in each \
         attached process. vLLM workers with a CUDA device default to one per CPU, at most 16.",
    ),
    OptionSpec::new(
        "",
        "slice_size",
        Kind::Size,
        "4MiB",
        "Maximum bytes that a copy thread processes at a time, at least 64KiB. Smaller blocks \
         share a slice.",
    ),
    OptionSpec::new(
        "",
        "staging_slab",
        Kind::Size,
        "2MiB per region",
        "Size of the staging buffer for staged gets, at least 64KiB per region. The first \
         staged get allocates it. Attached processes use 2MiB per region. LMCache's name: \
         `retrieve_staging_slab_bytes`.",
    ),
    OptionSpec::new(
        "",
        "staging_regions",
        Kind::Count,
        "2 per copy thread, at least 3",
        "Number of regions of the staging buffer, 1 to 4096: the number of slices that are \
         staged at the same time. LMCache's name: `restore_max_regions`.",
    ),
    OptionSpec::new(
        "",
        "lock_wait",
        Kind::Duration,
        "10s",
        "Maximum time that opening waits for another owner of the arena to close it.",
    ),
    OptionSpec::new(
        "",
        "mac_key_file",
        Kind::Text,
        "none: every process that can write to the shared storage is trusted",
        "File with the keys that authenticate blocks in `Posix`, `Ds3fs`, `S3` and `Peer`; mode \
         0600. Each line is a salt (`-` for namespaces without one) and 64 hexadecimal digits. \
         All processes that share a directory or a bucket need the same keys. A block without a \
         valid MAC is a miss.",
    ),
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "1s",
        "Maximum time of a lookup in an asynchronous tier. Keys without a response by then are \
         misses.",
    ),
    OptionSpec::new(
        "",
        "tier_timeout",
        Kind::Duration,
        "10s",
        "Maximum time without a response from an asynchronous tier, for all other operations. \
         On time-out a read is a miss and a write is skipped. Each response of a call with many \
         requests restarts it.",
    ),
    OptionSpec::new(
        "",
        "overload",
        Kind::Choice(&["wait", "drop"]),
        "wait",
        "Behaviour of a put while the write-back queue is full: `wait` blocks it until the \
         lower tier has space in the queue; `drop` returns false and counts it (a reservation \
         is kept in the upper tier only, if that has space). Engine connectors use `drop`.",
    ),
    OptionSpec::new(
        "",
        "write_back_depth",
        Kind::Size,
        "half of the upper tier",
        "Maximum bytes that wait in a tier to be written back to the next one.",
    ),
    OptionSpec::new(
        "",
        "promote",
        Kind::Flag,
        "true",
        "Copy blocks that were read from a lower tier into the first one, in the background.",
    ),
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["all", "learned"]),
        "all",
        "Admission policy for storing and promoting blocks when that would evict others. `all`: \
         always. `learned`: not if the block was evicted unread before, or is at a prompt depth \
         that is rarely read (the put returns false, `declined`); promote only blocks read from \
         a lower tier recently. The vLLM connector uses `learned`, so that blocks that vLLM \
         serves from its own larger cache are not written repeatedly. Always `all` with an \
         asynchronous tier.",
    ),
    OptionSpec::new(
        "",
        "close_timeout",
        Kind::Duration,
        "60s",
        "Maximum time that `close` spends on writing back the queue. Blocks that are still \
         queued then are not written.",
    ),
    OptionSpec::new(
        "",
        "timeout",
        Kind::Duration,
        "10s",
        "In a client of a served depot (`unix:`): maximum time to wait for a response, at least \
         1ms. Then the client treats the server as dead. Default of a client: the server's \
         value.",
    ),
    OptionSpec::new(
        "",
        "instance",
        Kind::Text,
        "none",
        "Name that distinguishes several depots of a user, at most 64 letters, digits, `-`, `_` \
         and `.`. The default arena is then `arena-<instance>.kvd`.",
    ),
    OptionSpec::new(
        "",
        "shares",
        Kind::Count,
        "1",
        "Number of depots on this host that use default capacities, 1 to 1024. Each default is \
         divided by it. An existing arena keeps its size. vLLM's connector sets the number of \
         data-parallel engines.",
    ),
    OptionSpec::new(
        "",
        "socket",
        Kind::Text,
        "auto",
        "Socket on which other processes of this host attach: a path (contains a `/`, or ends \
         in `.sock`), `auto` (in the runtime directory) or `off`.",
    ),
    OptionSpec::new(
        "",
        "socket_mode",
        Kind::Mode,
        "0600",
        "Permission bits of the socket, in octal (quoted in a file). With `0660`, members of \
         the group can read and write all blocks.",
    ),
    OptionSpec::new(
        "cache",
        "capacity",
        Kind::Size,
        "10 % of the memory the cgroup allows, divided by `shares`, at most 8 GiB",
        "Memory of the tier, from 4KiB to the memory that the process may use. `kvdepot serve` \
         and vLLM's connector allocate all of it in the background at startup, with huge pages \
         if the system has them (`kvdepot doctor` shows it). Otherwise pages are allocated on \
         their first write.",
    ),
    OptionSpec::new(
        "dax",
        "path",
        Kind::Text,
        "kvdepot/arena.kvd in the user's cache directory",
        "A DAX device (`/dev/dax0.0`) or any file that can be mapped. A missing file is created \
         with its disk space allocated, but not in `/dev`. A file on a memory file system such \
         as `/dev/shm` does not survive a reboot; kvdepot logs that.",
    ),
    capacity_of("dax"),
    OptionSpec::new(
        "dax",
        "devices",
        Kind::Devices,
        "one, at `path`",
        "Several media for one tier, instead of `path` and `capacity`, for example `[{path: \
         /dev/dax0.0}, {path: /mnt/pmem/kv, capacity: 64GiB}]`. Each has its own arena, and all \
         must open.",
    ),
    records_of("dax"),
    durability_of("dax"),
    format_of("dax"),
    OptionSpec::new(
        "nvme",
        "path",
        Kind::Text,
        "kvdepot/nvme.kvd in the user's cache directory",
        "A block device (`/dev/disk/by-id/…`) or a file on a disk. I/O bypasses the page cache \
         (`O_DIRECT`) if the file system supports it. A missing file is created with its disk \
         space allocated.",
    ),
    capacity_of("nvme"),
    OptionSpec::new(
        "nvme",
        "devices",
        Kind::Devices,
        "one, at `path`",
        "Several media for one tier, instead of `path` and `capacity`, for example `[{path: \
         /mnt/a/kv, capacity: 1TiB}, {path: /mnt/b/kv, capacity: 1TiB}]`. Each has its own \
         arena, and all must open.",
    ),
    records_of("nvme"),
    durability_of("nvme"),
    format_of("nvme"),
];

// What the sections of all tiers of arenas take.

const fn capacity_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "capacity",
        Kind::Size,
        "the size of the existing arena; for a new file 20 % of the free disk, divided by \
         `shares`, at most 64 GiB",
        "Size of the whole medium. An existing arena of another size is an error.",
    )
}

const fn records_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "records",
        Kind::Count,
        "one per 4 KiB of the first 4 GiB, and one per 32 KiB beyond",
        "Number of records of a new arena: the maximum number of blocks.",
    )
}

const fn durability_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "durability",
        Kind::Choice(&["process", "power"]),
        "process",
        "Failures that an acknowledged block survives: `process` (termination of the process) \
         or `power` (also a power loss; slower).",
    )
}

const fn format_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "format",
        Kind::Choice(&["false", "true", "force"]),
        "false",
        "Create a new arena on the medium and lose its content. `false`: only if the medium is \
         all zeros. `true`: also if it does not hold a valid arena; an error if it does. \
         `force`: always, at every start.",
    )
}

/// Options in the section of every tier except the first of a pipeline.
pub const EDGE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["first", "second"]),
        "first",
        "When to write a block back into this tier: on its `first` put, or on its `second` \
         access (put, lookup, get or pin) in the previous tier. Until then, puts that need this \
         tier or a later one for their acknowledgement return false (`declined`). The same \
         holds for the next four options.",
    ),
    OptionSpec::new(
        "",
        "block_min",
        Kind::Size,
        "none",
        "Minimum block size in bytes. Smaller blocks stay in the previous tier.",
    ),
    OptionSpec::new(
        "",
        "block_max",
        Kind::Size,
        "none",
        "Maximum block size in bytes. Larger blocks stay in the previous tier.",
    ),
    OptionSpec::new(
        "",
        "write_budget_hour",
        Kind::Size,
        "none",
        "Maximum bytes written to this tier in any hour, to limit flash wear. Blocks over the \
         budget stay in the previous tier until the next put. Reservations count until they are \
         released. Counted since process start.",
    ),
    OptionSpec::new(
        "",
        "write_budget_day",
        Kind::Size,
        "none",
        "Maximum bytes written to this tier in any 24 hours; otherwise as `write_budget_hour`.",
    ),
];

/// Options in the section of every asynchronous tier.
pub const LATE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "the depot's",
        "Maximum time of a lookup in this tier. Keys without a response by then are misses.",
    ),
    OptionSpec::new(
        "",
        "timeout",
        Kind::Duration,
        "the depot's `tier_timeout`",
        "Maximum time without a response from this tier, for all operations other than lookups.",
    ),
];

/// Returns the declaration of option `name` in `section`.
#[must_use]
pub fn find(section: &str, name: &str) -> Option<&'static OptionSpec> {
    find_among(OPTIONS, section, name)
}

/// The option of that name in that section, among these.
pub(super) fn find_among(
    options: &'static [OptionSpec],
    section: &str,
    name: &str,
) -> Option<&'static OptionSpec> {
    let mut options = options.iter();
    options.find(|option| option.section == section && option.name == name)
}

/// Returns the reference page of a program that knows these `kinds` of tiers.
#[must_use]
pub fn reference(kinds: &Kinds) -> String {
    let mut page = String::from(
        "# Configuration\n\nThis page lists every option of a depot. It is generated from \
         `crates/store/src/config/schema.rs`, which also validates configurations (`make docs`).\
         \n\nThe same options are valid in a YAML or JSON file (`kvdepot.open(\"FILE\")`, \
         `kvdepot serve --config FILE`), in a Python dictionary, and on the command line \
         (`-o NAME=VALUE`; lists only in files and dictionaries). Sizes have units in upper or \
         lower case: `64GiB`, `64Gi` and `64G` are 64 × 2³⁰ bytes, `64GB` is 64 × 10⁹ bytes; K, M \
         and T work the same way. Durations have units too: `500us`, `500ms`, `10s`, `2min` or \
         `2m`, `1h`; a number without a unit is seconds. An unknown name is an error.\n\n\
         ```yaml\npipeline: Cache|Dax\noverload: wait\n\
         cache:\n  capacity: 512MiB\ndax:\n  path: /var/tmp/kvdepot.arena  # or /dev/dax0.0\n\
         \x20 capacity: 4GiB\n```\n",
    );
    let known = [""].into_iter().chain(TIERS.iter().copied());
    for section in known.chain(kinds.names()) {
        let key = section.to_ascii_lowercase();
        let title = if section.is_empty() {
            "The depot".to_owned()
        } else {
            format!("Tier `{section}` (section `{key}`)")
        };
        page += &format!(
            "\n## {title}\n\n| option | value | default | what it does |\n| --- | --- | --- | --- |\n"
        );
        let options = kinds.find(section).map_or(OPTIONS, |kind| kind.options);
        let own = options.iter().filter(|option| option.section == key);
        // Nothing stands before a `Cache`.
        let edge = EDGE.iter().filter(|_| !["", "Cache"].contains(&section));
        let late = LATE.iter().filter(|_| kinds.find(section).is_some());
        for option in own.chain(late).chain(edge) {
            let kind = match option.kind {
                Kind::Size => "size".to_owned(),
                Kind::Duration => "duration".to_owned(),
                Kind::Count => "whole number from 1".to_owned(),
                Kind::Flag => "true, false".to_owned(),
                Kind::Text => "text".to_owned(),
                Kind::Mode => "permission bits".to_owned(),
                Kind::Choice(words) => words.join(", "),
                Kind::Devices => "list".to_owned(),
            };
            page += &format!(
                "| `{}` | {kind} | {} | {} |\n",
                option.name,
                option.default.replace('|', "\\|"),
                option.help.replace('|', "\\|"),
            );
        }
    }
    page + ENVIRONMENT
}

/// Environment variables, which apply to whole processes.
const ENVIRONMENT: &str = "\n## Environment\n\n| variable | what it does |\n| --- | --- |\n\
    | `KVDEPOT_LOG` | Log level (stderr): `off`, `error`, `warn` (default), `info`, `debug` or \
    `trace`. |\n\
    | `UC_LOGGER_LEVEL` | The log level in UCM's words, if `KVDEPOT_LOG` is not set. |\n\
    | `XDG_RUNTIME_DIR` | Sockets are in its directory `kvdepot`. If it is not a directory of the \
    user, they are in `/tmp/kvdepot-UID`, or in `/dev/shm/kvdepot-UID` if `/tmp` is not \
    writable. |\n\
    | `XDG_CACHE_HOME` | Default arenas are in its directory `kvdepot` [default: `~/.cache`]. If \
    it is not writable (for example no home directory, or a read-only root), they are in \
    `kvdepot-UID/cache` of `$TMPDIR` or `/tmp`, and kvdepot logs it. |\n";
