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
        "Tiers of the depot, first to last, separated by `|`. Set this option in a configuration \
         file. In Python, `kvdepot.open(pipeline, …)` takes the pipeline as its first argument.",
    ),
    OptionSpec::new(
        "",
        "lanes",
        Kind::Count,
        "the number of CPUs of the control group, at most 4",
        "Number of copy threads, 1 to 256, in the process that opens the depot and in each \
         attached process. vLLM workers with a CUDA device use one copy thread per CPU by default, \
         at most 16.",
    ),
    OptionSpec::new(
        "",
        "slice_size",
        Kind::Size,
        "4MiB",
        "Maximum bytes that a copy thread processes at a time, at least 64KiB. A copy thread can \
         process several small blocks at a time.",
    ),
    OptionSpec::new(
        "",
        "copy_kernel",
        Kind::Choice(&[
            "auto",
            "avx2-4",
            "avx2-4-fetch",
            "avx2-1",
            "avx2-1-fetch",
            "avx512-4",
            "avx512-4-fetch",
            "avx512-1",
            "avx512-1-fetch",
            "portable",
        ]),
        "auto",
        "Copy kernel in the process that opens the depot: instruction set, number of blocks of at \
         most 1MiB that a copy thread copies in turns, and `fetch` for explicit prefetches. \
         `auto`: the default kernel for the first 256MiB that a process copies, then the fastest \
         kernel. kvdepot measures all kernels and stores the result in the cache directory for a \
         week. `kvdepot doctor` prints it, and `kvdepot doctor --calibrate` measures again. \
         Attached processes always use `auto`.",
    ),
    OptionSpec::new(
        "",
        "staging_slab",
        Kind::Size,
        "2MiB per region",
        "Size of the staging buffer, at least 64KiB per region and at most the memory that the \
         process may use. kvdepot copies through the staging buffer if a direct copy is \
         impossible. The first staged copy allocates it. Attached processes always use 2MiB per \
         region. \
         LMCache calls this option `retrieve_staging_slab_bytes`.",
    ),
    OptionSpec::new(
        "",
        "staging_regions",
        Kind::Count,
        "2 per copy thread, at least 3",
        "Number of regions of the staging buffer, 1 to 4096. Each region stages one slice of at \
         most `slice_size` at a time. LMCache calls this option `restore_max_regions`.",
    ),
    OptionSpec::new(
        "",
        "lock_wait",
        Kind::Duration,
        "10s",
        "Maximum time to wait at opening while another process owns the arena. After this time, \
         opening fails. `0s`: opening fails immediately.",
    ),
    OptionSpec::new(
        "",
        "mac_key_file",
        Kind::Text,
        "none; kvdepot then trusts every process that can write to the shared storage",
        "File with the keys that authenticate blocks in `Posix`, `Ds3fs`, `S3` and `Peer`; file \
         mode 0600. Each line contains a salt (`-` for namespaces without a salt) and a key of 64 \
         hexadecimal digits. All processes that share a directory or a bucket need the same keys. \
         A block without a valid message authentication code (MAC) is a miss.",
    ),
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "1s",
        "Maximum time of a lookup in an asynchronous tier (`Posix`, `Ds3fs`, `S3`, `Peer`). Keys \
         without a response within this time are misses.",
    ),
    OptionSpec::new(
        "",
        "tier_timeout",
        Kind::Duration,
        "10s",
        "Maximum time without a response from an asynchronous tier, for all operations except \
         lookups. Each response within a call restarts the time. On time-out a read is a miss and \
         a write is skipped.",
    ),
    OptionSpec::new(
        "",
        "overload",
        Kind::Choice(&["wait", "drop"]),
        "wait",
        "Behaviour of a put while the write-back queue is full. `wait`: the put waits for the \
         lower tier. `drop`: the put returns false (`dropped`) if puts wait for the lower tier. \
         Otherwise, and for reservations (`reserve`), the block is stored in the upper tier only. \
         The vLLM and LMCache connectors use `drop` by default.",
    ),
    OptionSpec::new(
        "",
        "write_back_depth",
        Kind::Size,
        "half of the first tier",
        "Maximum bytes in the write-back queue from the first to the second tier. Each further \
         queue holds at most a quarter of the tier that it comes from.",
    ),
    OptionSpec::new(
        "",
        "promote",
        Kind::Flag,
        "true",
        "Promotion of blocks: if `true`, kvdepot copies blocks that were read from a lower tier \
         into the first tier, in the background.",
    ),
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["all", "learned"]),
        "all",
        "Which new blocks may evict stored blocks, once the tier is full. `all`: every block. \
         `learned`: only blocks that are likely to be read again. `learned` declines a block that \
         was once evicted without a lookup, or whose position in the prompt is rarely looked up. A \
         put returns false (`declined`) for this block and for the later blocks of the call. With \
         `learned`, a promotion that would evict other blocks waits for the second recent read. \
         Depots with an asynchronous tier always use `all`. The vLLM connector uses `learned` by \
         default.",
    ),
    OptionSpec::new(
        "",
        "close_timeout",
        Kind::Duration,
        "60s",
        "Maximum time that `close` spends on write-back. Blocks that are still in the write-back \
         queue after this time are not written to the lower tier.",
    ),
    OptionSpec::new(
        "",
        "timeout",
        Kind::Duration,
        "the value set in the server, or 10s if the server sets none",
        "Maximum time that a client of a server (pipeline `unix:SOCKET`) waits for a response, at \
         least 1ms. After this time, the client treats the server as dead.",
    ),
    OptionSpec::new(
        "",
        "instance",
        Kind::Text,
        "none",
        "Name that distinguishes several depots of one user: at most 64 letters, digits, `-`, `_` \
         and `.`. The name becomes part of the file names of default arenas, for example \
         `arena-<instance>.kvd`.",
    ),
    OptionSpec::new(
        "",
        "shares",
        Kind::Count,
        "1",
        "Number of depots on this host that use default capacities, 1 to 1024. kvdepot divides \
         each default capacity by this number. An existing arena keeps its size. vLLM's connector \
         sets `shares` to the number of data-parallel engines on the host.",
    ),
    OptionSpec::new(
        "",
        "socket",
        Kind::Text,
        "auto",
        "Socket to which other processes of this host attach. `auto`: a socket in the runtime \
         directory. `off`: no socket. Any other value is a path that contains a `/` or ends in \
         `.sock`.",
    ),
    OptionSpec::new(
        "",
        "socket_mode",
        Kind::Mode,
        "0600",
        "Permission bits of the socket, an octal number from 0600 to 0777. In a configuration \
         file, put the number in quotes. The owner can always read and write. With `0660`, members \
         of the socket's group can also read and write all blocks.",
    ),
    OptionSpec::new(
        "cache",
        "capacity",
        Kind::Size,
        "10 % of the cgroup's memory limit, divided by `shares`, at most 8 GiB",
        "Memory of the tier, from 4KiB to the memory that the process may use. `kvdepot serve` and \
         vLLM's connector allocate all of this memory in the background at startup, with huge \
         pages if the system provides huge pages. Other processes allocate a page at the first \
         write to the page. `kvdepot doctor` reports whether the system provides huge pages.",
    ),
    OptionSpec::new(
        "dax",
        "path",
        Kind::Text,
        "kvdepot/arena.kvd in the user's cache directory",
        "DAX device (`/dev/dax0.0`), or path of a file that can be memory-mapped. kvdepot creates \
         a missing file and allocates its disk space; in `/dev`, a missing file is an error. A \
         file on a memory file system such as `/dev/shm` is lost at a reboot, and kvdepot logs \
         this.",
    ),
    capacity_of("dax"),
    OptionSpec::new(
        "dax",
        "devices",
        Kind::Devices,
        "one device at `path`",
        "List of devices or files that together form the tier, instead of `path` and `capacity`; \
         for example `[{path: /dev/dax0.0}, {path: /mnt/pmem/kv, capacity: 64GiB}]`. Each device \
         has its own arena. If one device cannot be opened, the depot does not open.",
    ),
    records_of("dax"),
    durability_of("dax"),
    format_of("dax"),
    OptionSpec::new(
        "nvme",
        "path",
        Kind::Text,
        "kvdepot/nvme.kvd in the user's cache directory",
        "Block device (`/dev/disk/by-id/…`), or path of a file on a disk. kvdepot creates a \
         missing file and allocates its disk space. I/O bypasses the page cache (`O_DIRECT`) if \
         the file system supports this.",
    ),
    capacity_of("nvme"),
    OptionSpec::new(
        "nvme",
        "devices",
        Kind::Devices,
        "one device at `path`",
        "List of devices or files that together form the tier, instead of `path` and `capacity`; \
         for example `[{path: /mnt/a/kv, capacity: 1TiB}, {path: /mnt/b/kv, capacity: 1TiB}]`. \
         Each device has its own arena. If one device cannot be opened, the depot does not open.",
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
        "the size of the existing arena or of the device; for a new file 20 % of the free disk \
         space, divided by `shares`, at most 64 GiB",
        "Size of the whole device or file, including metadata. If an existing arena has another \
         size, opening fails.",
    )
}

const fn records_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "records",
        Kind::Count,
        "one per 4 KiB of the first 4 GiB, and one per 32 KiB beyond",
        "Maximum number of blocks in a new arena, at most 4294967294. Each block needs one record \
         of the arena's record table.",
    )
}

const fn durability_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "durability",
        Kind::Choice(&["process", "power"]),
        "process",
        "Failures that an acknowledged block survives. `process`: termination of the process. \
         `power`: also a power loss; puts are slower than with `process`.",
    )
}

const fn format_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "format",
        Kind::Choice(&["false", "true", "force"]),
        "false",
        "When kvdepot may create a new arena, which destroys the content of the device or file. \
         `false`: only if the device or file is all zeros. `true`: only if it holds no valid \
         arena; otherwise opening fails. `force`: at every start, whatever it holds.",
    )
}

/// Options in the section of every tier except the first of a pipeline.
pub const EDGE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["first", "second"]),
        "first",
        "Access at which kvdepot writes a block back into this tier. `first`: the first put. \
         `second`: the second access (put, lookup, get or pin). With `second`, the first put of a \
         block returns false (`declined`) if puts wait for this tier or a lower tier.",
    ),
    OptionSpec::new(
        "",
        "block_min",
        Kind::Size,
        "none",
        "Minimum size of blocks that are written back into this tier. Smaller blocks stay in the \
         previous tier. A put of such a block returns false (`declined`) if puts wait for this \
         tier or a lower tier.",
    ),
    OptionSpec::new(
        "",
        "block_max",
        Kind::Size,
        "none",
        "Maximum size of blocks that are written back into this tier. Larger blocks stay in the \
         previous tier. A put of such a block returns false (`declined`) if puts wait for this \
         tier or a lower tier.",
    ),
    OptionSpec::new(
        "",
        "write_budget_hour",
        Kind::Size,
        "none",
        "Maximum bytes that the process writes to this tier within any hour, to limit flash wear. \
         A block beyond the budget stays in the previous tier until the next put of the block. A \
         put of such a block returns false (`declined`) if puts wait for this tier or a lower \
         tier. Reserved space counts as written. The count starts at 0 when the process starts.",
    ),
    OptionSpec::new(
        "",
        "write_budget_day",
        Kind::Size,
        "none",
        "Maximum bytes that the process writes to this tier within any 24 hours. kvdepot treats \
         blocks beyond this budget like blocks beyond `write_budget_hour`.",
    ),
];

/// Options in the section of every asynchronous tier.
pub const LATE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "the depot's `lookup_timeout`",
        "Maximum time of a lookup in this tier. Keys without a response within this time are \
         misses.",
    ),
    OptionSpec::new(
        "",
        "timeout",
        Kind::Duration,
        "the depot's `tier_timeout`",
        "Maximum time without a response from this tier, for all operations except lookups. On \
         time-out a read is a miss and a write is skipped.",
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
         `2m`, `1h`; a number without a unit is seconds. A size must be at least 1 byte. An \
         unknown name is an error, and so is a value outside the range of its option.\n\n\
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
            "\n## {title}\n\n| option | value | default | description |\n| --- | --- | --- | --- |\n"
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
const ENVIRONMENT: &str = "\n## Environment\n\n| variable | description |\n| --- | --- |\n\
    | `KVDEPOT_LOG` | Log level of messages on stderr: `off`, `error`, `warn` (default), `info`, \
    `debug` or `trace`. |\n\
    | `UC_LOGGER_LEVEL` | Log level with the names of UCM; used if `KVDEPOT_LOG` is not set. |\n\
    | `XDG_RUNTIME_DIR` | Parent of the runtime directory `kvdepot`, which contains the sockets. \
    If the variable does not name a directory of the user, the sockets are in `/tmp/kvdepot-UID`, \
    or in `/dev/shm/kvdepot-UID` if `/tmp` is not writable. |\n\
    | `XDG_CACHE_HOME` | Parent of the cache directory `kvdepot`, which contains the default \
    arenas [default: `~/.cache`]. If this parent is not writable (for example, because the user \
    has no home directory), the default arenas are in `kvdepot-UID/cache` of `$TMPDIR` or `/tmp`, \
    and kvdepot logs this. |\n";
