//! Every option, declared once: what validates a configuration also writes
//! `docs/configuration.md`.

use crate::option::{Kind, OptionSpec};
use crate::tier::Kinds;

/// The tiers that every depot knows.
pub(super) const TIERS: &[&str] = &["Cache", "Dax", "Nvme"];

/// All options. Sections are the tiers' names in lower case.
pub const OPTIONS: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "pipeline",
        Kind::Text,
        "Cache|Dax",
        "Tiers chained near to far. In a file; \
        `kvdepot.open(pipeline, …)` gives it as its first argument.",
    ),
    OptionSpec::new(
        "",
        "lanes",
        Kind::Count,
        "the CPUs that the control group allows, at most 4",
        "Threads that move bytes, here and in each process that attaches; at most 256. vLLM's \
        workers on a CUDA device have one for each processor, at most 16, unless it is given.",
    ),
    OptionSpec::new(
        "",
        "slice_size",
        Kind::Size,
        "4MiB",
        "Most bytes that a lane takes at a time, at least 64KiB; blocks smaller than it share a \
        slice.",
    ),
    OptionSpec::new(
        "",
        "staging_slab",
        Kind::Size,
        "2MiB for each region",
        "Memory that staged gets go through, at least 64KiB for each region; taken by the first \
        one. A process that attaches has 2MiB for each region. LMCache calls it `retrieve_staging_slab_bytes`.",
    ),
    OptionSpec::new(
        "",
        "staging_regions",
        Kind::Count,
        "2 for each lane, at least 3",
        "Regions of the staging slab, at most 4096: so many slices are staged at a time. LMCache \
        calls it `restore_max_regions`.",
    ),
    OptionSpec::new(
        "",
        "lock_wait",
        Kind::Duration,
        "10s",
        "How long opening waits for another owner of the arena to go.",
    ),
    OptionSpec::new(
        "",
        "mac_key_file",
        Kind::Text,
        "none: who can write a medium that is shared is trusted",
        "A file of keys, of mode 0600, by which blocks of `Posix`, `Ds3fs`, `S3` and `Peer` are \
        authenticated: lines of a salt, or `-` for namespaces that have none, and 64 hexadecimal \
        digits. All who share a directory or a bucket have the same keys. A block there without a \
        MAC, or with another one, is a miss.",
    ),
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "1s",
        "How long a lookup in a tier that may answer late may take; what it has not found by then is a \
         miss.",
    ),
    OptionSpec::new(
        "",
        "tier_timeout",
        Kind::Duration,
        "10s",
        "How long such a tier may be silent in anything else: a block is not stored there then. A call \
         that takes many requests goes on as long as they are answered.",
    ),
    OptionSpec::new(
        "",
        "overload",
        Kind::Choice(&["wait", "drop"]),
        "wait",
        "What a put does when the write-back queue is full: `wait` for the far tier, or `drop` \
         the block (false, counted; a reservation is kept in the near tier alone, where it has \
         room). Engine connectors use `drop`.",
    ),
    OptionSpec::new(
        "",
        "write_back_depth",
        Kind::Size,
        "half of the near tier",
        "Most bytes that wait in the near tier for the far one.",
    ),
    OptionSpec::new(
        "",
        "promote",
        Kind::Flag,
        "true",
        "Copy blocks that were read from a far tier into the near one, in the background.",
    ),
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["all", "learned"]),
        "all",
        "What is stored and brought near where others have to go for it: `all`, or (`learned`) not \
        what has left before anybody asked for it, nor what lies so deep in its call that it is \
        seldom asked for (the put is false, and counted), and near only what was read far lately \
        before. The vLLM connector uses `learned`: what an engine serves from a larger cache of \
        its own is not stored again and again. A pipeline with a tier that is none of arenas \
        takes all: what lies there is not known at once.",
    ),
    OptionSpec::new(
        "",
        "close_timeout",
        Kind::Duration,
        "60s",
        "How long a close drains the write-back queue before it gives up the rest.",
    ),
    OptionSpec::new(
        "",
        "timeout",
        Kind::Duration,
        "10s",
        "In a process that uses a served depot (`unix:`): longest wait for the answer to a call, \
        at least 1ms. An owner that takes longer is taken for one that is gone. Where the client's \
        own settings have none, its owner's holds.",
    ),
    OptionSpec::new(
        "",
        "instance",
        Kind::Text,
        "none",
        "A name that tells apart several depots of a user: the default arena is then \
         `arena-<instance>.kvd`. At most 64 letters, digits, `-`, `_` and `.`.",
    ),
    OptionSpec::new(
        "",
        "shares",
        Kind::Count,
        "1",
        "Number of depots of this host that take default capacities, 1 to 1024: each gets so small a \
        part of the memory and of the free disk. An arena that exists keeps its size. vLLM's \
        connector gives the number of data-parallel engines.",
    ),
    OptionSpec::new(
        "",
        "socket",
        Kind::Text,
        "auto",
        "Where other processes of this host attach: a path (with a `/`, or that ends in `.sock`), \
         `auto` (the runtime directory) or `off`.",
    ),
    OptionSpec::new(
        "",
        "socket_mode",
        Kind::Mode,
        "0600",
        "Who may attach: the socket's permission bits in octal, in quotes in a file. `0660` lets \
         the group in, which can then read and write every block.",
    ),
    OptionSpec::new(
        "cache",
        "capacity",
        Kind::Size,
        "10 % of the memory the cgroup allows, divided by `shares`, at most 8 GiB",
        "The tier's whole memory, at least 4KiB and at most what the process may use. \
         `kvdepot serve` and vLLM's connector make all of it resident at the start, in the \
         background, of huge pages where the system gives them (`kvdepot doctor` says so); else \
         pages are taken when they are first written.",
    ),
    OptionSpec::new(
        "dax",
        "path",
        Kind::Text,
        "kvdepot/arena.kvd in the user's cache directory",
        "A device (`/dev/dax0.0`) or any file that can be mapped. A missing file is created with \
         its space really allocated, but never in `/dev`; one in a file system of memory \
         (`/dev/shm`) is gone at the next boot, which the log says.",
    ),
    capacity_of("dax"),
    OptionSpec::new(
        "dax",
        "devices",
        Kind::Devices,
        "one, at `path`",
        "Several media as one tier, instead of `path` and `capacity`: \
        `[{path: /dev/dax0.0}, {path: /mnt/pmem/kv, capacity: 64GiB}]`. Each is an arena of its \
        own, and all must open.",
    ),
    records_of("dax"),
    durability_of("dax"),
    format_of("dax"),
    OptionSpec::new(
        "nvme",
        "path",
        Kind::Text,
        "kvdepot/nvme.kvd in the user's cache directory",
        "A block device (`/dev/disk/by-id/…`), or a file on a disk; both are read and written past \
        the page cache, where a file's system lets it. A missing file is created with its space \
        really allocated.",
    ),
    capacity_of("nvme"),
    OptionSpec::new(
        "nvme",
        "devices",
        Kind::Devices,
        "one, at `path`",
        "Several media as one tier, instead of `path` and `capacity`: \
        `[{path: /mnt/a/kv, capacity: 1TiB}, {path: /mnt/b/kv, capacity: 1TiB}]`. Each is an arena \
        of its own, and all must open.",
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
        "what the arena has; for a new file 20 % of the free disk, divided by `shares`, at most \
        64 GiB",
        "The whole medium. An existing arena of another capacity is refused.",
    )
}

const fn records_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "records",
        Kind::Count,
        "one for each 4 KiB of the first 4 GiB, and one for each 32 KiB beyond",
        "Entries of the record table of a new arena: the most blocks it can hold.",
    )
}

const fn durability_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "durability",
        Kind::Choice(&["process", "power"]),
        "process",
        "What an acknowledged block outlives: the `process`, or a `power` cut too (slower).",
    )
}

const fn format_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "format",
        Kind::Choice(&["false", "true", "force"]),
        "false",
        "Make a new arena of what the path holds, which is lost: `true`, unless it is a sound \
         arena; `force`, whatever it is, at each start. A medium of zeros needs neither.",
    )
}

/// What the section of any tier takes that stands behind another one.
pub const EDGE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["first", "second"]),
        "first",
        "When a block goes on into this tier from the one before it: at its `first` put, or at \
         the `second` touch: once it is put again, or asked for (a lookup, a get, a pin), while it \
         is there. Where this tier, or one behind it, is what acknowledges, a put of a block that \
         stays is false (`declined`); so it is with the next four options.",
    ),
    OptionSpec::new(
        "",
        "block_min",
        Kind::Size,
        "none",
        "Blocks of fewer bytes stay in the tier before.",
    ),
    OptionSpec::new(
        "",
        "block_max",
        Kind::Size,
        "none",
        "Blocks of more bytes stay in the tier before.",
    ),
    OptionSpec::new(
        "",
        "write_budget_hour",
        Kind::Size,
        "none",
        "Most bytes that go on into this tier in any hour, for disks that wear out: what comes \
         beyond it stays in the tier before, until it is put again. What is reserved here counts \
         until it is given up. Counted from the start of the process.",
    ),
    OptionSpec::new(
        "",
        "write_budget_day",
        Kind::Size,
        "none",
        "The same for any 24 hours.",
    ),
];

/// What the section of any tier takes that may answer late.
pub const LATE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "the depot's",
        "How long a lookup here may take; what it has not found by then is a miss.",
    ),
    OptionSpec::new(
        "",
        "timeout",
        Kind::Duration,
        "the depot's `tier_timeout`",
        "How long the tier may be silent in anything else.",
    ),
];

/// The option of that name in that section.
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

/// The reference page, of a program that knows these kinds of tiers.
#[must_use]
pub fn reference(kinds: &Kinds) -> String {
    let mut page = String::from(
        "# Configuration\n\nGenerated from `crates/store/src/config/schema.rs`, which also \
         validates; `cargo run -p kvdepot-dev -- generate` writes it.\n\nOne schema for a YAML \
         file (`kvdepot.open(\"FILE\")`, `kvdepot serve --config FILE`), a Python dictionary and \
         the command line, which takes all but lists. Sizes take units, in \
         either case: `64GiB`, `64Gi` and `64G` are 64 × 2³⁰ bytes, `64GB` is 64 × 10⁹; so it is \
         with K, M and T. Durations take them too: `500us`, `500ms`, `10s`, `2min` or \
         `2m`, `1h`; a number alone is seconds. A name that is not in these tables is an error, \
         never ignored.\n\n```yaml\npipeline: Cache|Dax\noverload: wait\n\
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

/// What is no option, because it holds for whole processes.
const ENVIRONMENT: &str = "\n## Environment\n\n| variable | what it does |\n| --- | --- |\n\
    | `KVDEPOT_LOG` | From which level on is logged, to stderr: `off`, `error`, `warn` (the \
    default), `info`, `debug`, `trace`. |\n\
    | `UC_LOGGER_LEVEL` | The same where `KVDEPOT_LOG` is not set, in UCM's words. |\n\
    | `XDG_RUNTIME_DIR` | Sockets are in its `kvdepot`; in `/tmp/kvdepot-UID` where it is no \
    directory of the user, and in `/dev/shm/kvdepot-UID` where that cannot be written. |\n\
    | `XDG_CACHE_HOME` | Default arenas are in its `kvdepot`; `~/.cache/kvdepot` where it is not \
    set. Where neither can be written (no home, a read-only root), they are in \
    `kvdepot-UID/cache` of `$TMPDIR` or `/tmp`, and the log says so. |\n";
