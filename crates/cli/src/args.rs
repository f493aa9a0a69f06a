//! The command line, declared once: what parses it also writes its help and its reference page.

mod alloc;
mod churn;
mod cluster;
mod cuda;
mod files;
mod pressure;
mod quarantine;
mod scale;
mod session;
mod sessions;
pub(crate) mod targets;
mod transfer;

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use kvdepot_store::Key;
use kvdepot_store::config::size;

pub(crate) use alloc::Alloc;
pub(crate) use churn::Churn;
pub(crate) use cluster::Cluster;
pub(crate) use cuda::Cuda;
pub(crate) use files::Files;
pub(crate) use pressure::Pressure;
pub(crate) use quarantine::{Quarantine, QuarantineCommand};
pub(crate) use scale::{Scale, Task};
pub(crate) use session::{InDepot, Restored, Saved, Session, SessionCommand};
pub(crate) use sessions::Sessions;
pub(crate) use transfer::Transfer;

/// Looks after kvdepot's arenas and measures this machine.
#[derive(Parser)]
#[command(
    name = "kvdepot",
    version,
    after_help = "Exit status: 0 when all is well, 1 when problems were found, 2 for usage and \
                  errors.\nKVDEPOT_LOG=off|error|warn|info|debug|trace sets what is logged to stderr."
)]
pub(crate) struct Args {
    /// One JSON object a line instead of a table.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// What an arena or a live depot holds; alone, which depots are live.
    ///
    /// An arena is read beside its owner, at its PATH. `unix:SOCKET` asks the process that has a
    /// depot open. Without PATH and options it lists the depots that processes of this user have
    /// open, with sockets in the runtime directory or named after kvdepot.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::READ))))]
    Ls(Ls),
    /// Size, fill, owner and age of an arena; counters of a live depot.
    ///
    /// An arena is read beside its owner, at its PATH. `unix:SOCKET` asks the process that has a
    /// depot open.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::READ))))]
    Stat(Stat),
    /// Reads every payload and names the blocks that do not verify; exit status 1 if any.
    ///
    /// Works while another process owns the arena: blocks that the owner replaces at the same time
    /// do not count as bad. Ctrl-C ends it with what was checked so far. If a block of a directory
    /// of the tier Posix, or one block's file, does not verify, it names the MiB of the payload
    /// that are corrupt, where the file's header tells.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::VERIFY))))]
    Verify(Verify),
    /// Removes blocks, an arena, or everything that kvdepot made.
    ///
    /// With --namespace or --key blocks are removed and the arena stays; else the arena goes, once
    /// you have said yes: a file is deleted, a DAX device is no arena any more. Without PATH or
    /// --instance only blocks, of the default arena, are removed. An arena that a process owns is
    /// kept, and the process named; blocks of it, or of `unix:SOCKET`, are removed by that process,
    /// where it has a socket. The directory of a tier of files is removed with `rm -r`, once no
    /// process has the tier open.
    #[command(mut_arg("path", |path| path.help(targets::or_default(targets::RM))))]
    Rm(Rm),
    /// Serves a depot to the processes of this host, until Ctrl-C, SIGTERM or SIGHUP.
    ///
    /// It owns the tiers and their index; `kvdepot.open("unix:PATH")` in any process gives the same
    /// object as opening them there, and each process moves its bytes itself. A process that dies
    /// loses its pins and reservations, nothing else. When the service ends, its clients find every
    /// block missing, and find them again when it is back.
    Serve(Serve),
    /// Whole conversations of local engines, which are kept in a depot.
    Session(Session),
    /// Namespaces that this user's engines do not use any more, as stored blocks differ from what
    /// they compute.
    ///
    /// vLLM's connector computes some of the stored blocks again and compares them. If too many
    /// differ, it stops using their namespace, also after a restart: some setting, file or patch
    /// that changes keys and values is not part of the namespace.
    Quarantine(Quarantine),
    /// What this machine offers, what could be better, and what is amiss.
    ///
    /// A line with `warn` names what keeps kvdepot from working or storing, or is damaged, and
    /// makes the exit status 1. One with `advice` names what would make it faster or larger, or
    /// what is left over: the exit status stays 0.
    Doctor(DoctorArgs),
    /// This machine's limits, what kvdepot reaches, and the ratio.
    #[command(subcommand)]
    Bench(Bench),
}

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Copies with checksums, against the best plain copy of the same pieces.
    ///
    /// `get` copies random blocks of a tier into memory that no cache holds, `put` random blocks of
    /// memory into a tier whose pages have been touched. The memory has huge pages where the system
    /// gives them. The limit is the best plain copy (memcpy, streaming stores) of the same pieces
    /// on as many threads, between memory of huge pages and between memory of ordinary ones.
    /// Metrics: throughput, and for blocks of 4096 bytes overhead, the time that kvdepot takes
    /// beyond the copy.
    Memory(Memory),
    /// Blocks brought back from the Dax tier, against the best plain copy of the same pieces.
    ///
    /// The file of the tier and the caller's memory have been touched, and no cache holds what is
    /// copied. `adjacent` blocks are read in stored order, `shuffled` ones at random, `gapped` ones
    /// every second in stored order. The limit is the best plain copy (memcpy, streaming stores;
    /// of adjacent blocks also as one piece a thread) on as many threads as workers. Metrics:
    /// throughput; staged_over_direct, the throughput through the staging slab over that of a
    /// direct copy; cpu_over_copy, the processor time of all threads over that of the best plain
    /// copy; processes_over_one, the throughput of four processes that restore from one served
    /// depot at once, over that of one with as many lanes; first_hit, from the opening of an arena
    /// of 100,000 blocks (10,000 with --quick) until one of them is served; and pin_over_echo, how
    /// much longer a served depot takes to pin 256 keys than an echo of the same bytes over a
    /// socket of the same kind.
    Restore(Restore),
    /// Placing blocks: utilisation and time of the allocator, against others.
    ///
    /// `uniform` and `random` are the published benchmark of the allocator that others use, the
    /// reference: a full pool of 2 GiB (a sixteenth for blocks under 1 KiB), in which each
    /// allocation frees live ones at random until it fits. `paired` allocates the two parts of the
    /// blocks of a model with an indexer in 1 TiB and frees them together; `trace` the blocks of
    /// prompts of four models in 64 GiB and frees what was used longest ago. Utilisation is live
    /// bytes over the pool's, after each allocation; utilisation_p99 is what 99 % of the samples
    /// exceed; the limit is exact best fit. The limit of time is the reference. `threads` is the
    /// shared pool against a pool for each thread, `rebuild` the pool made anew from its live
    /// extents, `spans` the pieces of the arena that a prompt's blocks are in once the arena has
    /// churned, placed as the store does, with the block before and what will follow as hints,
    /// against without: one request after the other, and those of a moment in turns of 16 blocks
    /// and of one.
    Alloc(Alloc),
    /// What a depot writes, serves and promotes that is smaller than what passes by.
    ///
    /// 54 prompts of some 2,400 tokens over 24 prefixes come again and again; the tiers hold three
    /// quarters of what they need together. The engine asks for the blocks that it does not have,
    /// takes what is there, and stores the whole prompt: with a cache of its own that holds all of
    /// them (engine_cache=large), and without one (none). With --trace the requests of a file, with
    /// the capacities where the least recently used order serves 40, 60 and 80 % of what an
    /// unlimited cache does. Prompts come in random order, all alike (order=uniform), or some more
    /// often (skewed), so that exact least recently used order serves 87 % of the tokens. Metrics:
    /// stored_over_capacity, bytes written to the far tier over its capacity; token_hit_rate;
    /// promoted_over_hit, bytes promoted over those of far hits; near_over_hit, bytes of near hits
    /// over those of all; and admission, what a put takes longer for each new block where blocks
    /// are judged (in processor time of all threads, the median of puts into two full arenas in
    /// turns). The limit is exact least recently used order over as many blocks.
    Churn(Churn),
    /// Where keys live in clusters of 3 and of 1,000 hosts, and what changes of their hosts move.
    ///
    /// The hosts are only imagined, with capacities as 1 to 4; the keys are a sample of 10^9
    /// blocks. Metrics: least_over_share and most_over_share, what the hosts with the least and
    /// the most of their share by capacity hold over it (with fewer keys chance alone makes these
    /// differ: 20,000,000 keys leave 8,000 to the smallest of 1,000 hosts); moved_over_ideal, the
    /// copies that move when a host joins, dies, or gets another capacity, over those that must
    /// (by capacity, or with ideal=held, where no placement is by capacity, by what hosts hold);
    /// hosts_asked, how many a look-up asks until one has the block, and hosts_asked_max, and
    /// found_before_moving, the part of the blocks of which a copy is left that it finds, all
    /// after the change and before anything has moved; bytes_per_host, what a host remembers for
    /// each; and lookup_ns, the time of a look-up of one home, whose limit is a race for which
    /// every host's logarithm is taken.
    Cluster(Cluster),
    /// Blocks to and from a CUDA device, against pinned copies of the same bytes.
    ///
    /// Blocks come from Cache, checked, and go into pages anywhere on the device, and back. The
    /// limit is the best of plain programs that have the bytes in pinned memory already, a block in
    /// one piece, and hash nothing: by one copy of all, or one a block, on one stream or two.
    /// Metrics: get and put; pinned_bytes and device_bytes, what kvdepot has pinned and taken; and
    /// attach_s, from nothing until the first block could be asked for, of Cache|Dax with a file of
    /// 64 GiB and a Cache of a quarter of the memory. With a double of the driver (make bench-cuda
    /// builds one) that moves nothing, the limit of get and put is that of bench memory, and what
    /// is measured is the processor's side.
    Cuda(Cuda),
    /// Blocks to and from a disk by the tiers Posix and Nvme, against raw files of the same sizes.
    ///
    /// As many blocks as --depth says are under way at a time, in up to eight calls, in no order of
    /// the medium; the limit is the best plain program with as many requests under way: by
    /// io_uring, direct, from and to memory of huge pages, by up to 8 threads, with registered
    /// memory or without; one file for each block beside Posix, one for all beside Nvme. With
    /// --direct false the tier goes through the page cache, and so do plain programs beside those.
    /// What lies below the file system, as the cache of a virtual machine's host, serves both, and
    /// is not emptied. Metrics: dump, load_cold and, through the page cache, load_warm; commit_us,
    /// of one block of 4 KiB until it is acknowledged, against a page written, renamed, synced;
    /// lookup_hit and lookup_miss, the time of a key of 256 beyond a system call for each, and
    /// lookup_filter, what a key takes that was asked for just before; cpu_s_per_gib, the processor
    /// time of a cold load, against the plain program's and one pass of hashing;
    /// hot_through_pipeline, gets of what is in Cache through Cache|Posix, over Cache alone;
    /// keyed_over_plain, cold loads of 1 MiB from Posix with a key in mac_key_file, against those
    /// without, and keyed_cpu_s_per_gib, the processor time of both.
    ///
    /// With --tier S3 blocks are objects, and the limit is the crate object_store used as it is, by
    /// one thread or four, with as many requests under way, which hashes nothing. Metrics: dump,
    /// load_cold (of what no lookup has asked for before), cpu_s_per_gib of this process,
    /// requests_per_block, of which the plain client needs one, and hung_over_cache, a lookup and a
    /// get of a block in Cache, with a server behind it that never answers, over Cache alone.
    ///
    /// With --tier Ds3fs files are moved by the rings of a 3FS, and the limit is Posix with direct
    /// I/O through its mount. Metrics: dump, load_cold, cpu_s_per_gib of this process, and, where
    /// it is asked for of a 3FS that never answers, hung_over_cache.
    Files(Files),
    /// Lookups, against a bare hash table.
    ///
    /// Metric: lookups, in keys a second; every key is found, in random order.
    Index(Index),
    /// What prompts and calls that are large do to the others.
    ///
    /// Blocks have 4 KiB, and prompts come as an engine stores them, in calls of 16 blocks that say
    /// what they continue. Metrics: head_kept, the part of a prompt that is still found while
    /// prompts of a half of the tier, all of it and twice as much pass, and it is asked for once
    /// between two of them; small_p99_ms, what 99 % of the gets, puts and lookups of one block, and
    /// of the statistics, do not exceed beside calls of so many keys, whose limit in a tier of
    /// files is a plain read of 4 KiB beside as large files that others write; call_ms, what a call
    /// of so many keys takes (reserve with the giving back, and put_beyond into a tier that has
    /// room for an eighth of them); and token_hit_rate, the part of the requests' blocks that are
    /// there in a tier that holds a fifth of them, with a document of 1.5 times the tier in every
    /// hundred requests, whose limit is the same without documents.
    Pressure(Pressure),
    /// Opening an arena whose owner was killed, until its first block is served.
    ///
    /// Metrics: open, from the start of the opening until the first block is served, and
    /// first_block, the part of it that the block takes. A child process owns the arena and is
    /// killed each time.
    Reopen(Reopen),
    /// What an arena of very many blocks costs: memory, opening, lookups, waits.
    ///
    /// Metrics: bytes_per_block, the anonymous memory of index and order of use, without the
    /// allocator's, after filling the arena and after opening it; peak_bytes_per_block, the most of
    /// it while it is opened; open_s; lookups_over_table, what lookups gain from more threads over
    /// what a table that is only read gains; wait_ms, of a lookup of 256 keys while puts of 1 MiB
    /// evict, beyond one beside plain copies of as many bytes; wait_over_unlocked_ms, beyond one in
    /// a table without locks, beside the same puts; lock_hold_ms, the longest that a lock was held,
    /// in the thread's processor time; add_device_s, of a second arena as full, of a million blocks
    /// at most; blocks_page_ms, the longest page of a listing; puts_over_one_thread, what puts of
    /// 64 KiB into one full arena, in calls of so many blocks, gain from more threads, beside what
    /// plain copies gain; and puts, in GB/s.
    Scale(Scale),
    /// Saving and bringing back conversations, against plain files, and against the old way to
    /// save.
    ///
    /// States are in memory, in pieces of 4 MiB, and are kept by Posix. The limit is the fastest
    /// way to write them to a new file, or to read one, by 8 requests of 1 MiB at a time, that
    /// makes no checksum. The old way is a file of its own, which is read back into the final one:
    /// by the same writer. Metrics: save_over_raw; save_over_staged, how many times as long the old
    /// way takes, whose limit is two writes and a read over one write; disk_peak_over_payload, most
    /// of the disk that a save takes; restore_over_raw, from the disk, and
    /// restore_warm_over_memcpy, from the page cache and from Cache, verified and with the lookup;
    /// write_amplification, what files grow by over the new tokens' rows, of 512 tokens behind
    /// 8,192 and of 20 saves at any; checkpoint_save_ms, of states that grow as ds4's do, by the
    /// old way, whole, and what is new, whose limit is the whole one's time by its share of bytes;
    /// restore_ms of the last of these; and lookup_us, the longest beginning of a prompt among so
    /// many sessions.
    Session(Sessions),
    /// Batches of many small pieces between two processes, against plain sockets.
    ///
    /// The target is a process of this command, over loopback. Memory of both has huge pages where
    /// the system gives them, and has been touched; pieces are in random order on both sides, so
    /// that none continues another. The limit is the better of one and two plain TCP streams of as
    /// many bytes in one piece, by sends of 1 MiB. Metrics: batch_over_tcp, checksums off and on;
    /// cpu_s_per_gb, the processor time of both processes; over_memcpy, of batches over shared
    /// memory, against the best plain copy; batch_over_one_by_one, beside the same pieces in
    /// batches of one (500 of them, for all), and one_by_one_over_pingpong, what each of those
    /// takes, beside as many bytes to and fro over a plain socket, by blocking calls;
    /// total_on_over_off, with slices handed on at a watermark and tails merged, over without, and
    /// first_byte_on_over_off, until the first slice of 20,000 pieces is given to the kernel;
    /// messages_per_s, of batches of messages of one size, against plain streams of their bytes;
    /// read_rtt_us and read_rtt_over_pingpong, a read of 4 KiB alone, over TCP and over shared
    /// memory; submit_ns, of one of 100,000 requests, in the caller's processor time and by the
    /// clock on the wall; register_s, of 100,000 ranges that are registered and published, and of
    /// the first transfer to them; resolve_ms, from when the target is killed or stopped in the
    /// middle of a batch until each request has an outcome, whose limit is the batch's timeout and
    /// 100 ms: those that are said to be done are compared.
    ///
    /// With --where veth each process has a network namespace of its own, which takes root and ip;
    /// they go when it ends. What no network changes is not measured there: over_memcpy,
    /// first_byte_on_over_off, submit_ns, register_s.
    Transfer(Transfer),
}

/// Options of `serve`.
#[derive(clap::Args)]
pub(crate) struct Serve {
    /// Tiers chained near to far, such as "Cache|Dax"; what --config says, or "Cache|Dax", unless
    /// given.
    #[arg(value_name = "PIPELINE")]
    pub(crate) pipeline: Option<String>,
    /// A YAML or JSON file with the options of docs/configuration.md.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// One option, such as dax.path=/dev/dax0.0 or cache.capacity=8GiB; as often as needed. It
    /// goes before that of --config.
    #[arg(short = 'o', long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
    /// Where to listen; kvdepot.sock in the runtime directory unless given, or with an instance
    /// kvdepot-INSTANCE.sock.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

/// How much is measured, and how often.
#[derive(clap::Args)]
pub(crate) struct Extent {
    /// Bytes of the tier; 1GiB unless given.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: Option<u64>,
    /// Bytes of a call; 128MiB unless given.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) batch: Option<u64>,
    /// Rounds that count; 15 unless given.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) rounds: Option<usize>,
}

/// Options of `memory`.
#[derive(clap::Args)]
pub(crate) struct Memory {
    /// A quarter of the size and a third of the rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// get or put; both unless given.
    #[arg(long = "op", value_name = "OP", value_parser = ["get", "put"])]
    pub(crate) ops: Vec<String>,
    /// Dax (a file in --dir) or Cache; both unless given.
    #[arg(long = "tier", value_name = "TIER", value_parser = ["Dax", "Cache"])]
    pub(crate) tiers: Vec<String>,
    /// Bytes of a block; 4KiB, 64KiB, 256KiB, 1MiB and 4MiB unless given.
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Lanes, and threads of the plain copies; 1 and 2 unless given.
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) threads: Vec<usize>,
    #[command(flatten)]
    pub(crate) extent: Extent,
    /// Where the file of the Dax tier is made, and removed again; /dev/shm unless given.
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}

/// Options of `restore`.
#[derive(clap::Args)]
pub(crate) struct Restore {
    /// Only 256 blocks, of 64KiB and 1MiB, on 1 and 2 workers, in 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this; all unless given.
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "throughput", "staged_over_direct", "cpu_over_copy", "processes_over_one", "first_hit",
        "pin_over_echo",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Blocks of a call; 64, 256 and 1024 unless given.
    #[arg(long = "blocks", value_name = "COUNT", value_parser = count)]
    pub(crate) counts: Vec<usize>,
    /// Bytes of a block; 4KiB, 64KiB, 256KiB, 1MiB and 4MiB unless given. Calls of more than 1GiB
    /// are left out.
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) sizes: Vec<u64>,
    /// adjacent, shuffled or gapped; all unless given.
    #[arg(long = "order", value_name = "ORDER", value_parser = ["adjacent", "shuffled", "gapped"])]
    pub(crate) orders: Vec<String>,
    /// Lanes, and threads of the plain copies; 1, 2 and 4 unless given.
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) workers: Vec<usize>,
    /// Rounds that count; 5 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Bytes that are copied before any of them is copied again, many times what the caches hold;
    /// 256MiB unless given.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) cold: Option<u64>,
    /// Where the file of the tier is made, and removed again; /dev/shm unless given.
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
    /// Restores from the depot at this socket when told to; what a process of the benchmark does.
    #[arg(long, hide = true)]
    pub(crate) child: Option<PathBuf>,
    /// Its share of the blocks.
    #[arg(long, hide = true, value_parser = share)]
    pub(crate) share: Option<(usize, usize)>,
}

/// `2/4`: the third of four shares.
fn share(text: &str) -> Result<(usize, usize), String> {
    let (share, of) = text.split_once('/').ok_or("two numbers and a slash")?;
    let number = |text: &str| text.parse::<usize>().map_err(|error| error.to_string());
    Ok((number(share)?, number(of)?.max(1)))
}

/// Options of `index`.
#[derive(clap::Args)]
pub(crate) struct Index {
    /// 65,536 blocks and a third of the rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Blocks in the index; 1,000,000 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) blocks: Option<usize>,
    /// Keys of a call.
    #[arg(long, value_name = "COUNT", default_value_t = 256)]
    pub(crate) batch: usize,
    /// Rounds that count; 15 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
}

/// Options of `reopen`.
#[derive(clap::Args)]
pub(crate) struct Reopen {
    /// 65,536 blocks and 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Blocks in the arena, 4 KiB each; 1,000,000 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) blocks: Option<usize>,
    /// Rounds that count; 7 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Where the arena is made, and removed again; the directory for temporary files unless given.
    #[arg(long, visible_alias = "path", value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
    #[arg(long, hide = true)]
    pub(crate) child: Option<PathBuf>,
}

/// Which arena.
#[derive(clap::Args)]
pub(crate) struct ArenaArgs {
    // Its help is the command's (`targets`).
    pub(crate) path: Option<PathBuf>,
    /// The default arena of this instance.
    #[arg(long, value_name = "NAME", conflicts_with = "path")]
    pub(crate) instance: Option<String>,
}

/// What `doctor` looks at besides the machine.
#[derive(clap::Args)]
pub(crate) struct DoctorArgs {
    /// Path of a future `nvme.path` or `posix.path`: the report says whether direct I/O works
    /// there.
    pub(crate) path: Option<PathBuf>,
}

/// Options of `ls`.
#[derive(clap::Args)]
pub(crate) struct Ls {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Only namespaces whose digest begins with these hexadecimal digits.
    #[arg(long, value_name = "DIGEST", value_parser = hexadecimal)]
    pub(crate) namespace: Option<String>,
    /// List every block, of an arena the newest first.
    #[arg(long)]
    pub(crate) blocks: bool,
    /// At most so many lines.
    #[arg(long, value_name = "COUNT")]
    pub(crate) limit: Option<usize>,
    /// Of an arena only: blocks that were stored before the one with this sequence, where a list
    /// that --limit has cut goes on.
    #[arg(long, value_name = "SEQUENCE")]
    pub(crate) before: Option<u64>,
}

impl Ls {
    /// Whether neither an arena nor anything of one is asked for.
    pub(crate) fn names_nothing(&self) -> bool {
        let arena = self.arena.path.is_some() || self.arena.instance.is_some();
        let part = self.namespace.is_some() || self.limit.is_some() || self.before.is_some();
        !(arena || part || self.blocks)
    }
}

/// Options of `stat`.
#[derive(clap::Args)]
pub(crate) struct Stat {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// The counters of a live depot in the Prometheus text format.
    #[arg(long)]
    pub(crate) metrics: bool,
}

/// Options of `verify`.
#[derive(clap::Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// Threads that read and hash; by default the processors of the process, at most 8.
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Keys, as the setting `mac_key_file` names them: every block must have a MAC by one of them.
    /// For blocks in files of their own.
    #[arg(long, value_name = "FILE")]
    pub(crate) mac_key_file: Option<PathBuf>,
}

/// Options of `rm`.
#[derive(clap::Args)]
pub(crate) struct Rm {
    #[command(flatten)]
    pub(crate) arena: ArenaArgs,
    /// The blocks of the namespace whose digest begins with these hexadecimal digits.
    #[arg(long, value_name = "DIGEST", value_parser = hexadecimal)]
    pub(crate) namespace: Option<String>,
    /// The block with this key of 64 hexadecimal digits, in every namespace or in --namespace. May
    /// be given several times.
    #[arg(long = "key", value_name = "KEY", value_parser = key)]
    pub(crate) keys: Vec<Key>,
    /// Default arenas, sockets, and what benchmarks left behind.
    #[arg(long, conflicts_with_all = ["path", "instance", "namespace", "keys"])]
    pub(crate) all: bool,
    /// Do not ask; without it nothing but blocks is removed where no terminal is to ask on.
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Reads a size with its unit.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    match size::size(text) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(format!("expected {}", size::SIZE_HELP)),
    }
}

fn threads(text: &str) -> Result<usize, String> {
    let allowed = 1..=256;
    let count = text.parse().ok().filter(|count| allowed.contains(count));
    count.ok_or_else(|| "expected 1 to 256".into())
}

fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| "expected a whole number from 1".into())
}

fn hexadecimal(text: &str) -> Result<String, String> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err("expected hexadecimal digits".into());
    }
    Ok(text.to_ascii_lowercase())
}

fn key(text: &str) -> Result<Key, String> {
    let refused = || format!("expected {} hexadecimal digits", 2 * Key::LEN);
    if text.len() != 2 * Key::LEN || !text.is_ascii() {
        return Err(refused());
    }
    let mut key = [0; Key::LEN];
    for (index, byte) in key.iter_mut().enumerate() {
        let digits = &text[2 * index..2 * index + 2];
        *byte = u8::from_str_radix(digits, 16).map_err(|_| refused())?;
    }
    Ok(Key(key))
}

/// The reference of all commands as Markdown.
pub(crate) fn reference(mut command: clap::Command) -> String {
    command.build();
    let mut page = format!(
        "# Command line\n\n<!-- Generated from crates/cli/src/args.rs: make docs -->\n\n\
         ```text\n{}```\n",
        command.render_long_help()
    );
    describe(&mut command, "kvdepot", &mut page);
    page
}

fn describe(command: &mut clap::Command, above: &str, page: &mut String) {
    for inner in command.get_subcommands_mut() {
        if inner.is_hide_set() || inner.get_name() == "help" {
            continue;
        }
        let name = format!("{above} {}", inner.get_name());
        let help = inner.render_long_help();
        page.push_str(&format!("\n## `{name}`\n\n```text\n{help}```\n"));
        describe(inner, &name, page);
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declarations_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_reference_has_every_command() {
        let page = reference(Args::command());
        for name in [
            "kvdepot ls",
            "kvdepot rm",
            "kvdepot doctor",
            "kvdepot bench memory",
            "kvdepot bench restore",
        ] {
            assert!(page.contains(&format!("## `{name}`")), "{name}");
        }
    }
}
