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
        "Storage tiers of the depot, first to last, separated by `|`. Set `pipeline` in a \
         configuration file. In Python, the pipeline is the first argument of `kvdepot.open`.",
    ),
    OptionSpec::new(
        "",
        "lanes",
        Kind::Count,
        "the number of CPUs of the control group, at most 4",
        "Number of threads that copy and hash blocks, 1 to 256, in the process that opens the \
         depot and in each [attached process](glossary.md#attached-process). By default, vLLM \
         workers with a CUDA device use one copy thread per CPU, at most 16.",
    ),
    OptionSpec::new(
        "",
        "slice_size",
        Kind::Size,
        "4MiB",
        "Maximum number of bytes that a [copy thread](glossary.md#copy-thread) processes at a \
         time, at least 64KiB: a part of a large block, or several small blocks.",
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
        "Memory-copy routine (kernel) in the process that opens the depot; attached processes \
         always use `auto`. `auto`: the default kernel for the first 256MiB that a process copies, \
         then the fastest kernel. kvdepot measures all kernels and stores the result in the \
         cache directory for a week; `kvdepot doctor --calibrate` measures again. Every other \
         value except `portable` consists of the instruction set, the number of blocks (of at most \
         1MiB) that a copy thread copies in turns, and optionally `fetch` (explicit prefetches).",
    ),
    OptionSpec::new(
        "",
        "staging_slab",
        Kind::Size,
        "2MiB per region",
        "Size of the [staging buffer](glossary.md#staging-buffer), at least 64KiB per region and \
         at most the memory that the process may use. kvdepot allocates the buffer at the first \
         copy that cannot be direct. Attached processes always use 2MiB per region. LMCache's name \
         of the option is `retrieve_staging_slab_bytes`.",
    ),
    OptionSpec::new(
        "",
        "staging_regions",
        Kind::Count,
        "2 per copy thread, at least 3",
        "Number of regions of the [staging buffer](glossary.md#staging-buffer), 1 to 4096. Each \
         region holds at most `slice_size` bytes at a time. LMCache's name of the option is \
         `restore_max_regions`.",
    ),
    OptionSpec::new(
        "",
        "lock_wait",
        Kind::Duration,
        "10s",
        "Maximum time that a process waits to open the depot while another process owns the \
         [arena](glossary.md#arena). After this time, or immediately with `0s`, opening fails.",
    ),
    OptionSpec::new(
        "",
        "mac_key_file",
        Kind::Text,
        "none; kvdepot then trusts every process that can write to the shared storage",
        "File (mode 0600) with the keys that authenticate blocks in `Posix`, `Ds3fs`, `S3` and \
         `Peer`. Each line contains a [salt](glossary.md#salt) (`-` for namespaces without a salt) \
         and a key of 64 hexadecimal digits. All processes that share a directory or a bucket need \
         the same keys. A block without a valid message authentication code (MAC) is a miss.",
    ),
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "1s",
        "Maximum time of a lookup in an asynchronous tier (`Posix`, `Ds3fs`, `S3`, `Peer`). Keys \
         without a response after this time are misses.",
    ),
    OptionSpec::new(
        "",
        "tier_timeout",
        Kind::Duration,
        "10s",
        "Maximum time without a response from an asynchronous tier (`Posix`, `Ds3fs`, `S3`, \
         `Peer`), for all operations except lookups. Each response within a call restarts the \
         time. After a time-out, a read is a miss and a write is skipped.",
    ),
    OptionSpec::new(
        "",
        "overload",
        Kind::Choice(&["wait", "drop"]),
        "wait",
        "Behaviour of a put while the [write-back queue](glossary.md#write-back-queue) is full. \
         `wait`: the put waits for the lower tier. `drop`: if the lower tier, or a tier below it, \
         [acknowledges](glossary.md#acknowledged) puts, the put returns false (`dropped`); \
         otherwise, and for reservations (`reserve`), kvdepot stores the block in the upper tier \
         only. The vLLM and LMCache connectors use `drop` by default.",
    ),
    OptionSpec::new(
        "",
        "write_back_depth",
        Kind::Size,
        "half of the first tier",
        "Maximum number of bytes in the [write-back queue](glossary.md#write-back-queue) from the \
         first to the second tier. Each further write-back queue holds at most a quarter of the \
         capacity of its upper tier.",
    ),
    OptionSpec::new(
        "",
        "promote",
        Kind::Flag,
        "true",
        "[Promotion](glossary.md#promotion) of blocks: if `true`, kvdepot copies a block into the \
         first tier, in the background, after a read of the block from a lower tier.",
    ),
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["all", "learned"]),
        "all",
        "New blocks that may evict stored blocks from a full tier. `all`: every block. `learned`: \
         only blocks that are likely to be read again; if another block would evict blocks, a put \
         returns false ([`declined`](errors.md#declined)) for this block and for the later blocks \
         of the call. With `learned`, a promotion that would evict other \
         blocks waits for the second recent read. Depots with an asynchronous tier (`Posix`, \
         `Ds3fs`, `S3`, `Peer`) always use `all`; the vLLM connector uses `learned` by default.",
    ),
    OptionSpec::new(
        "",
        "close_timeout",
        Kind::Duration,
        "60s",
        "Maximum time that `close` waits for calls in progress and for \
         [write-back](glossary.md#write-back). After this time, kvdepot starts no further copy: \
         puts in progress store no further block, and blocks in the write-back queue do not reach \
         the lower tier. A copy that a medium has begun is waited for without a limit.",
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
         and `.`. The name becomes part of the file names of default [arenas](glossary.md#arena), \
         for example `arena-<instance>.kvd`.",
    ),
    OptionSpec::new(
        "",
        "shares",
        Kind::Count,
        "1",
        "Number of depots on this host that use default capacities, 1 to 1024. kvdepot divides \
         each default capacity by `shares`; an existing [arena](glossary.md#arena) keeps its size. \
         vLLM's connector sets `shares` to the number of data-parallel engines on the host.",
    ),
    OptionSpec::new(
        "",
        "socket",
        Kind::Text,
        "auto",
        "Socket through which other processes of this host use the depot. `auto`: a socket in the \
         runtime directory. `off`: no socket. Any other value is the path of the socket, which \
         contains a `/` or ends in `.sock`.",
    ),
    OptionSpec::new(
        "",
        "socket_mode",
        Kind::Mode,
        "0600",
        "Permission bits of the socket, an octal number from 0600 to 0777. In a configuration \
         file, put the number in quotes. The socket's owner can always read and write all blocks; \
         with `0660`, members of the socket's group can also read and write all blocks.",
    ),
    OptionSpec::new(
        "",
        "http",
        Kind::Text,
        "off",
        "Address at which the process that opens the depot serves \
         [metrics and health checks](monitoring.md#http) over HTTP. The value is a loopback \
         address with a port, such as `127.0.0.1:9410` or `[::1]:9410`, or `unix:` and the path of \
         a socket, which gets the permission bits `socket_mode`. With port 0, the system selects a \
         port, and kvdepot writes the address to a file: the path of the depot's socket with \
         `.http` at the end. `off`: no HTTP server.",
    ),
    OptionSpec::new(
        "",
        "http_token_file",
        Kind::Text,
        "none; every local user can then read the metrics at a TCP address",
        "File (mode 0600) with tokens for the HTTP server, one per line. Requests for `/metrics` \
         and `/stats` then need the header `Authorization: Bearer TOKEN` with one of the tokens. \
         kvdepot reads the file again after each change.",
    ),
    OptionSpec::new(
        "",
        "http_hosts",
        Kind::Text,
        "none",
        "Names or IP addresses, separated by commas, that requests to the HTTP server may have in \
         the header `Host`, in addition to `localhost` and loopback addresses. For example, a \
         proxy in front of the HTTP server sends the name of the proxy. kvdepot rejects all other \
         names, because a web page could otherwise read the metrics through a user's browser.",
    ),
    OptionSpec::new(
        "cache",
        "capacity",
        Kind::Size,
        "10 % of the cgroup's memory limit, divided by `shares`, at most 8 GiB",
        "Memory of the tier, from 4KiB to the memory that the process may use. At startup, \
         `kvdepot serve` and vLLM's connector allocate all memory of the tier in the background, \
         with huge pages if the system provides huge pages (see `kvdepot doctor`). Other processes \
         allocate a page at the first write to the page.",
    ),
    OptionSpec::new(
        "dax",
        "path",
        Kind::Text,
        "kvdepot/arena.kvd in the user's cache directory",
        "Path of a DAX device (`/dev/dax0.0`), or of a file that can be memory-mapped. kvdepot \
         creates a missing file and allocates the file's disk space; in `/dev`, a missing file is \
         an error. For a file on a memory file system such as `/dev/shm`, kvdepot logs that a \
         reboot deletes the file.",
    ),
    capacity_of("dax"),
    OptionSpec::new(
        "dax",
        "devices",
        Kind::Devices,
        "one device at `path`",
        "List of devices or files that together form the tier, instead of `path` and `capacity`; \
         for example `[{path: /dev/dax0.0}, {path: /mnt/pmem/kv, capacity: 64GiB}]`. Each device \
         has its own [arena](glossary.md#arena). If a device cannot be opened, the depot does not \
         open.",
    ),
    records_of("dax"),
    OptionSpec::durability("dax"),
    format_of("dax"),
    OptionSpec::new(
        "nvme",
        "path",
        Kind::Text,
        "kvdepot/nvme.kvd in the user's cache directory",
        "Path of a block device (`/dev/disk/by-id/…`), or of a file on a disk. kvdepot creates a \
         missing file and allocates the file's disk space. I/O bypasses the page cache \
         (`O_DIRECT`) if the file system supports direct I/O.",
    ),
    capacity_of("nvme"),
    OptionSpec::new(
        "nvme",
        "devices",
        Kind::Devices,
        "one device at `path`",
        "List of devices or files that together form the tier, instead of `path` and `capacity`; \
         for example `[{path: /mnt/a/kv, capacity: 1TiB}, {path: /mnt/b/kv, capacity: 1TiB}]`. \
         Each device has its own [arena](glossary.md#arena). If a device cannot be opened, the \
         depot does not open.",
    ),
    records_of("nvme"),
    OptionSpec::durability("nvme"),
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
        "Size of the whole device or file, including metadata. If an existing \
         [arena](glossary.md#arena) has another size, the depot does not open.",
    )
}

const fn records_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "records",
        Kind::Count,
        "one per 4 KiB of the first 4 GiB, and one per 32 KiB beyond",
        "Maximum number of blocks in a new [arena](glossary.md#arena), at most 4294967294. Each \
         block uses one record of the arena's record table.",
    )
}

const fn format_of(section: &'static str) -> OptionSpec {
    OptionSpec::new(
        section,
        "format",
        Kind::Choice(&["false", "true", "force"]),
        "false",
        "Condition for the creation of a new [arena](glossary.md#arena), which destroys the \
         content of the device or file. `false`: the device or file is [empty](tiers/dax.md#media) \
         (zeros). `true`: the device or file holds no valid arena; otherwise, the depot does not \
         open. `force`: no condition; kvdepot creates a new arena at every start.",
    )
}

/// Options in the section of every tier except the first of a pipeline.
pub const EDGE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "admission",
        Kind::Choice(&["first", "second"]),
        "first",
        "Access to a block at which kvdepot copies the block from the upper tier into this tier. \
         `first`: the first put. `second`: the second access (put, lookup, get or pin); the first \
         put of the block then returns false ([`declined`](errors.md#declined)) if this tier or a \
         lower tier [acknowledges](glossary.md#acknowledged) puts.",
    ),
    OptionSpec::new(
        "",
        "block_min",
        Kind::Size,
        "none",
        "Minimum size of blocks that kvdepot copies from the upper tier into this tier. Smaller \
         blocks stay in the upper tier. A put of a smaller block returns false \
         ([`declined`](errors.md#declined)) if this tier or a lower tier \
         [acknowledges](glossary.md#acknowledged) puts.",
    ),
    OptionSpec::new(
        "",
        "block_max",
        Kind::Size,
        "none",
        "Maximum size of blocks that kvdepot copies from the upper tier into this tier. Larger \
         blocks stay in the upper tier. A put of a larger block returns false \
         ([`declined`](errors.md#declined)) if this tier or a lower tier \
         [acknowledges](glossary.md#acknowledged) puts.",
    ),
    OptionSpec::new(
        "",
        "write_budget_hour",
        Kind::Size,
        "none",
        "Maximum number of bytes that the process writes to this tier within any hour, to limit \
         flash wear. Reserved space counts as written, and the count starts at 0 when the process \
         starts. A block beyond the budget stays in the upper tier until the next put of the \
         block. The put of a block beyond the budget returns false \
         ([`declined`](errors.md#declined)) if this tier or a lower tier \
         [acknowledges](glossary.md#acknowledged) puts.",
    ),
    OptionSpec::new(
        "",
        "write_budget_day",
        Kind::Size,
        "none",
        "Maximum number of bytes that the process writes to this tier within any 24 hours. kvdepot \
         treats blocks beyond `write_budget_day` like blocks beyond `write_budget_hour`.",
    ),
];

/// Options in the section of every asynchronous tier.
pub const LATE: &[OptionSpec] = &[
    OptionSpec::new(
        "",
        "lookup_timeout",
        Kind::Duration,
        "the depot's `lookup_timeout`",
        "Maximum time of a lookup in this tier. Keys without a response after this time are \
         misses.",
    ),
    OptionSpec::new(
        "",
        "timeout",
        Kind::Duration,
        "the depot's `tier_timeout`",
        "Maximum time without a response from this tier, for all operations except lookups. After \
         a time-out, a read is a miss and a write is skipped.",
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
        "# Configuration\n\nThis page lists every option of a depot. The [glossary](glossary.md) \
         defines the terms. `make docs` generates the page from \
         `crates/store/src/config/schema.rs`, which also validates configurations.\n\n\
         Options are valid in a YAML or JSON file (`kvdepot.open(\"FILE\")`, \
         `kvdepot serve --config FILE`), in a Python dictionary, and on the command line \
         (`-o NAME=VALUE`). Lists are valid only in files and dictionaries. Sizes are at least 1 \
         byte, and have units in upper or lower case: `64GiB`, `64Gi` and `64G` are 64 × 2³⁰ \
         bytes, and `64GB` is 64 × 10⁹ bytes. The units with K, M and T have the same forms. \
         Durations also have units: `500us`, `500ms`, `10s`, `2min` or `2m`, `1h`. A duration \
         without a unit is in seconds. An unknown name, or a value outside the range of an option, \
         is an error.\n\n\
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
    | `UC_LOGGER_LEVEL` | Log level with the names of UCM. kvdepot uses this variable only if \
    `KVDEPOT_LOG` is not set. |\n\
    | `XDG_RUNTIME_DIR` | Parent of the runtime directory `kvdepot`, which contains the sockets. \
    If the variable does not name a directory of the user, the sockets are in `/tmp/kvdepot-UID`, \
    or in `/dev/shm/kvdepot-UID` if `/tmp` is not writable. |\n\
    | `XDG_CACHE_HOME` | Parent of the cache directory `kvdepot`, which contains the default \
    arenas [default: `~/.cache`]. If the parent is not writable (for example, because the user \
    has no home directory), the default arenas are in `kvdepot-UID/cache` of `$TMPDIR` or `/tmp`, \
    and kvdepot logs the change. |\n";
