//! The benchmarks, and the options of those that measure tiers in memory.

use std::path::PathBuf;

use clap::Subcommand;

use super::alloc::Alloc;
use super::churn::Churn;
use super::cluster::Cluster;
use super::cuda::Cuda;
use super::files::Files;
use super::pressure::Pressure;
use super::scale::Scale;
use super::sessions::Sessions;
use super::transfer::Transfer;
use super::values::{Extent, bytes, count, threads};

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Measure copies with checksums against the best plain copy of the same blocks.
    ///
    /// The operation `get` copies random blocks from a tier into memory that is in no CPU cache.
    /// The operation `put` copies random blocks from memory into a tier whose pages are resident.
    /// The memory has huge pages, if available. The column LIMIT shows the best plain copy (memcpy,
    /// rep movsb or streaming stores) of the same blocks with the same number of threads, in huge
    /// or ordinary pages.
    ///
    /// Metrics:
    ///   throughput                bytes per second
    ///   throughput_with_checksum  bytes per second; LIMIT: the best simple loop that copies a
    ///                             block and computes its checksum (only in builds with the feature
    ///                             peers, not in the wheel)
    ///   overhead                  extra time per block of 4096 bytes, compared with the plain copy
    #[command(verbatim_doc_comment)]
    Memory(Memory),
    /// Measure restores from the Dax tier against the best plain copy of the same blocks.
    ///
    /// The file of the tier and the caller's memory are resident and in no CPU cache. The column
    /// LIMIT shows the best plain copy (memcpy or streaming stores) with the same number of
    /// threads. For adjacent blocks, the plain copies include one contiguous copy per thread.
    ///
    /// Orders of the reads (--order):
    ///   adjacent  all blocks in stored order
    ///   shuffled  all blocks in random order
    ///   gapped    every second block in stored order
    ///
    /// Metrics:
    ///   throughput          bytes per second
    ///   staged_over_direct  throughput through the staging buffer, divided by the throughput of a
    ///                       direct copy
    ///   cpu_over_copy       processor time of all threads, divided by the processor time of the
    ///                       best plain copy
    ///   processes_over_one  throughput of four processes with one copy thread each, as clients of
    ///                       one server, divided by the throughput of one process with four copy
    ///                       threads
    ///   first_hit           time to open an arena of 100,000 blocks (10,000 with --quick) and to
    ///                       read the first block
    ///   pin_over_echo       time to pin 256 blocks (protect them from eviction) through the socket
    ///                       of a server, minus the time to echo the same bytes over a socket
    #[command(verbatim_doc_comment)]
    Restore(Restore),
    /// Measure the allocator's utilization and speed against other allocators.
    ///
    /// The allocator places blocks in an arena. Utilization is the number of live bytes divided by
    /// the size of the pool, sampled after each allocation; 99 % of the samples exceed
    /// utilisation_p99. The column LIMIT shows an exact best-fit allocator for utilization, and
    /// OffsetAllocator for time; for the workload threads, other ways to share a pool.
    ///
    /// Workloads:
    ///   uniform, random  the published benchmark of OffsetAllocator: a full pool of 2 GiB (128 MiB
    ///                    for blocks below 1 KiB), in which each allocation first frees random
    ///                    blocks until the new block fits
    ///   paired           blocks of a model with an indexer, each in two parts, in 1 TiB
    ///   trace            prompts of four models in 64 GiB; if a block does not fit, the least
    ///                    recently used blocks are freed first
    ///   threads          one shared pool against one pool per thread
    ///   rebuild          a pool rebuilt from its live extents (allocated ranges)
    ///   spans            number of contiguous ranges that hold a prompt's blocks in an aged arena,
    ///                    with and without the store's placement hints
    #[command(verbatim_doc_comment)]
    Alloc(Alloc),
    /// Measure write volume, hit rate and promotions of a depot smaller than its working set.
    ///
    /// A simulated engine repeatedly requests 54 prompts of some 2,400 tokens, which share 24
    /// prefixes, in random order. The tiers hold three quarters of the blocks of these prompts. For
    /// each request, the engine looks up the blocks that its own cache lacks, loads the hits, and
    /// stores the whole prompt.
    ///
    /// The column LIMIT shows exact LRU with the same number of blocks. With --trace, the requests
    /// come from a file. The capacities are then chosen so that exact LRU serves 40, 60 and 80 % of
    /// the tokens that an unlimited cache serves.
    ///
    /// Cases without --trace:
    ///   engine_cache=large  the engine's own cache holds all prompts
    ///   engine_cache=none   the engine's own cache holds nothing
    ///   order=uniform       all prompts are equally frequent
    ///   order=skewed        some prompts are more frequent, so that exact LRU serves 87 % of the
    ///                       tokens
    ///
    /// Metrics:
    ///   stored_over_capacity  bytes written to the last tier, divided by the tier's capacity
    ///   token_hit_rate        tokens of hits, divided by the tokens of all requests
    ///   promoted_over_hit     bytes copied from the last into the first tier (promoted), divided
    ///                         by the bytes of hits in the last tier
    ///   near_over_hit         bytes of hits in the first tier, divided by the bytes of all hits
    ///   admission             extra processor time per new block of a put with `admission:
    ///                         learned`, compared with `all` (median of puts into full arenas)
    #[command(verbatim_doc_comment)]
    Churn(Churn),
    /// Measure the placement of keys on 3 and on 1,000 hosts, and the effect of host changes.
    ///
    /// The benchmark simulates hosts of the tier Peer with one to four units of capacity each. The
    /// keys are a sample of 10^9 blocks.
    ///
    /// Metrics:
    ///   least_over_share, most_over_share
    ///                        smallest and largest number of blocks on a host, divided by the
    ///                        number of blocks that is proportional to the host's capacity
    ///   moved_over_ideal     copies of blocks that move when a host joins, fails, or changes its
    ///                        capacity, divided by the copies that must move
    ///   hosts_asked, hosts_asked_max
    ///                        mean and largest number of hosts that a lookup queries after the
    ///                        change
    ///   found_before_moving  fraction of the remaining blocks that lookups find before any block
    ///                        has moved
    ///   bytes_per_host       memory that each host needs per known host
    ///   lookup_ns            time to compute one host of a block; LIMIT: one logarithm per host
    #[command(verbatim_doc_comment)]
    Cluster(Cluster),
    /// Measure copies between host memory and a CUDA device against pinned copies.
    ///
    /// kvdepot loads verified blocks from Cache into scattered pages of the device, and stores
    /// blocks from these pages into Cache. For get and put, the column LIMIT shows the best plain
    /// program without checksums. The plain program has the bytes in pinned memory, and makes one
    /// copy per block or one copy for all blocks, on one or two streams.
    ///
    /// Metrics:
    ///   get, put      bytes per second
    ///   pinned_bytes  host memory that kvdepot has pinned
    ///   device_bytes  device memory that kvdepot has allocated
    ///   attach_s      time to open Cache|Dax, to attach a worker and to finish the first lookup;
    ///                 Dax has a file of at most 64 GiB, and Cache has a quarter of the memory.
    ///                 LIMIT of the last three metrics: their targets
    ///
    /// With a mock of the CUDA driver (`make bench-cuda` builds one), the benchmark measures only
    /// the processor's work, and LIMIT is the limit of `bench memory`.
    #[command(verbatim_doc_comment)]
    Cuda(Cuda),
    /// Measure the tiers Posix and Nvme (or S3, Ds3fs) against raw files of the same sizes.
    ///
    /// kvdepot moves blocks in random order, with --depth blocks in flight in up to eight calls.
    /// The column LIMIT shows the best plain program with the same number of requests in flight:
    /// io_uring or up to 8 threads, direct I/O, huge pages, with or without registered memory. The
    /// plain program uses one file per block for Posix, and one file for Nvme.
    ///
    /// With --direct false, the tier and the plain programs use the page cache. Caches below the
    /// file system stay filled (docs/benchmarking.md).
    ///
    /// Metrics:
    ///   dump, load_cold, load_warm
    ///                         bytes per second of puts (dump), of loads from the disk or the
    ///                         object store (load_cold), and from the page cache (load_warm)
    ///   commit_us             time until a put of a 4 KiB block is acknowledged; LIMIT: write,
    ///                         rename and sync of one page
    ///   lookup_hit, lookup_miss
    ///                         time per key in calls of 256 keys, minus the time of one system call
    ///   lookup_filter         time per key for keys that were looked up just before
    ///   cpu_s_per_gib         processor time per GiB of a cold load (S3, Ds3fs: also of a dump);
    ///                         LIMIT: the plain program, for Posix and Nvme plus one hash pass
    ///   hot_through_pipeline  bytes per second of gets from Cache in Cache|Posix; LIMIT: gets from
    ///                         Cache alone
    ///   keyed_over_plain, keyed_cpu_s_per_gib
    ///                         rate, and processor time per GiB, of cold loads of 1 MiB from Posix
    ///                         with mac_key_file, compared with loads without mac_key_file
    ///   requests_per_block    S3: requests per block (the plain client needs one)
    ///   hung_over_cache       time of a lookup and a get of a block in Cache while the lower tier
    ///                         does not respond, divided by the time with Cache alone
    ///
    /// With --tier S3, blocks are objects, and LIMIT is the crate object_store without checksums,
    /// with one or four threads and the same number of requests in flight. With --tier Ds3fs,
    /// kvdepot uses the I/O rings of 3FS, and LIMIT is the tier Posix with direct I/O on the 3FS
    /// mount.
    #[command(verbatim_doc_comment)]
    Files(Files),
    /// Measure lookups against a plain hash table.
    ///
    /// The metric is the number of keys per second. The benchmark looks up only stored keys, in
    /// random order.
    Index(Index),
    /// Measure the effect of large prompts and large calls on other prompts and calls.
    ///
    /// Like an engine, the benchmark stores a prompt in calls of 16 blocks of 4 KiB, and passes the
    /// previous block of the prompt to each call (argument `after`).
    ///
    /// Metrics:
    ///   head_kept       smallest fraction of a prompt in use that is still stored after each of
    ///                   three large prompts, with half, all and twice the tier's capacity. The
    ///                   benchmark requests the prompt in use once after each large prompt
    ///   small_p99_ms    99th percentile of the time of small calls (get, put or lookup of one
    ///                   block, or statistics) while another thread makes calls of many keys. LIMIT
    ///                   for tiers of files: a plain read of 4 KiB while other threads write files
    ///                   of the same size
    ///   call_ms         duration of a call of many keys (reserve includes the release; put_beyond
    ///                   stores into a tier with space for an eighth of the keys)
    ///   token_hit_rate  fraction of the requested blocks that are hits. The tier has space for a
    ///                   fifth of the blocks; one in a hundred requests is a document of 1.5 times
    ///                   the tier's capacity. LIMIT: the same requests without documents
    #[command(verbatim_doc_comment)]
    Pressure(Pressure),
    /// Measure the opening of an arena whose owner was killed, until the first block is served.
    ///
    /// In each round, the benchmark kills a child process that owns the arena.
    ///
    /// Metrics:
    ///   open         time from the start of opening until the first block is served
    ///   first_block  time to serve the first block after the arena is open
    #[command(verbatim_doc_comment)]
    Reopen(Reopen),
    /// Measure memory, opening, lookups and waits of an arena with very many blocks.
    ///
    /// Metrics:
    ///   bytes_per_block         anonymous memory of the index and the LRU order (without memory of
    ///                           the allocator), after filling and after opening the arena
    ///   peak_bytes_per_block    peak of bytes_per_block during the opening of the arena
    ///   open_s                  time to open the arena
    ///   lookups_over_table      speedup of lookups with more threads, divided by the speedup of a
    ///                           read-only table
    ///   wait_ms                 time that a lookup of 256 keys waits while puts of 1 MiB evict
    ///                           blocks, minus the time that the lookup waits while plain copies
    ///                           run
    ///   wait_over_unlocked_ms   time that the lookup of wait_ms waits, minus the time that a
    ///                           lookup in a table without locks waits
    ///   lock_hold_ms            longest time that a thread held a lock, in processor time of the
    ///                           thread
    ///   add_device_s            time to add a second full arena (at most a million blocks)
    ///   blocks_page_ms          longest time for one page of a list of the blocks
    ///   puts_over_one_thread    speedup of puts of 64 KiB into one full arena with more threads;
    ///                           LIMIT: the speedup of plain copies
    ///   puts                    throughput of the puts in puts_over_one_thread, in GB/s
    #[command(verbatim_doc_comment)]
    Scale(Scale),
    /// Measure saving and restoring sessions against plain files.
    ///
    /// The benchmark saves sessions from memory into the tier Posix, in blocks of 4 MiB. For rates,
    /// the column LIMIT shows the fastest of several plain programs without checksums, which write
    /// or read a file with 8 requests of 1 MiB in flight. A staged save first writes a separate
    /// file, and then copies this file into the final file.
    ///
    /// Metrics:
    ///   save_over_raw             bytes per second of a save
    ///   save_over_staged          time of a staged save, divided by the time of a save; LIMIT:
    ///                             time of two writes and a read, divided by the time of one write
    ///   disk_peak_over_payload    largest disk usage of a save, divided by the payload
    ///   restore_over_raw          bytes per second of a verified restore from disk
    ///   restore_warm_over_memcpy  bytes per second of a lookup and a verified restore, from the
    ///                             page cache and from Cache; LIMIT: a memory copy
    ///   write_amplification       growth of the files, divided by the bytes of the KV rows of new
    ///                             tokens: 512 tokens after 8,192, and 20 saves of random length
    ///   checkpoint_save_ms        time to save a growing session with the checkpoints of the
    ///                             engine ds4: staged, whole, and only the new KV rows
    ///   restore_ms                time to restore the last checkpoint of checkpoint_save_ms
    ///   lookup_us                 median time to find the longest saved prefix of a prompt among
    ///                             many sessions
    ///   decode_stall_share, decode_stall_p999_ms
    ///                             delay of an engine's decode steps while a save runs: lost share
    ///                             of the decode rate, and increase of the 99.9th percentile
    #[command(verbatim_doc_comment)]
    Session(Sessions),
    /// Measure batches of many small requests between two processes against plain sockets.
    ///
    /// The target is a child process, connected over loopback. Both processes use resident memory,
    /// with huge pages if available. Each request moves one contiguous range, and the ranges are in
    /// random order on both sides. For throughput over TCP, the column LIMIT shows the better of
    /// one and two plain TCP streams that send the same bytes from one contiguous range.
    ///
    /// Metrics:
    ///   batch_over_tcp            throughput over TCP, with and without checksums
    ///   cpu_s_per_gb              processor time of both processes per GB
    ///   over_memcpy               throughput over shared memory; LIMIT: the best plain copy
    ///   batch_over_one_by_one     one batch, compared with the same requests in batches of one
    ///   one_by_one_over_pingpong  time of a batch of one request; LIMIT: a blocking exchange of
    ///                             the same bytes over a plain socket
    ///   total_on_over_off         time of a batch with the transfer engine's options `watermark`
    ///                             and `tail_merge`, divided by the time without these options
    ///   first_byte_on_over_off    time until the kernel receives the first slice of 20,000
    ///                             requests with `watermark` and `tail_merge`, divided by the time
    ///                             without these options
    ///   messages_per_s            messages of one size per second, in batches; LIMIT: plain
    ///                             streams
    ///   read_rtt_us, read_rtt_over_pingpong
    ///                             time of a read of 4 KiB over TCP and over shared memory
    ///   submit_ns                 time to submit one of 100,000 requests: processor time and wall
    ///                             clock time
    ///   register_s                time to register and publish 100,000 ranges, and time of the
    ///                             first transfer
    ///   resolve_ms                time until each request of a batch has an outcome, if the target
    ///                             is killed or stopped; LIMIT: the batch's time-out plus 100 ms.
    ///                             The bytes of successful requests are verified
    ///
    /// With --where veth, the processes run in two network namespaces, which are removed at the
    /// end; veth needs root and the command `ip`. The metrics over_memcpy, first_byte_on_over_off,
    /// submit_ns and register_s exist only for loopback.
    #[command(verbatim_doc_comment)]
    Transfer(Transfer),
}

/// Options of `memory`.
#[derive(clap::Args)]
pub(crate) struct Memory {
    /// Quick run: a quarter of the size and a third of the rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Operation to measure; repeatable [default: both operations].
    #[arg(long = "op", value_name = "OP", value_parser = ["get", "put"])]
    pub(crate) ops: Vec<String>,
    /// Tier to measure; repeatable. The tier Dax uses a file in the directory of --dir [default:
    /// both tiers].
    #[arg(long = "tier", value_name = "TIER", value_parser = ["Dax", "Cache"])]
    pub(crate) tiers: Vec<String>,
    /// Block size, a multiple of 4096 bytes; repeatable [default: 4KiB, 64KiB, 256KiB, 1MiB, 2MiB,
    /// 3MiB, 4MiB, 8MiB and 40MiB, at most --batch].
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Number of threads, 1 to 256, in kvdepot and in the plain copies of the column LIMIT;
    /// repeatable [default: 1 and 2].
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) threads: Vec<usize>,
    #[command(flatten)]
    pub(crate) extent: Extent,
    /// Directory for the temporary file of the Dax tier [default: /dev/shm].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}

/// Options of `restore`.
#[derive(clap::Args)]
pub(crate) struct Restore {
    /// Quick run: calls of 256 blocks of 64KiB and 1MiB, 1 and 2 threads, 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Metric to measure; repeatable [default: all].
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "throughput", "staged_over_direct", "cpu_over_copy", "processes_over_one", "first_hit",
        "pin_over_echo",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Number of blocks per call, at least 1; repeatable [default: 64, 256 and 1024].
    #[arg(long = "blocks", value_name = "COUNT", value_parser = count)]
    pub(crate) counts: Vec<usize>,
    /// Block size, a multiple of 4096 bytes; repeatable. The benchmark skips combinations of
    /// --block and --blocks with more than 1GiB per call [default: 4KiB, 64KiB, 256KiB, 1MiB and
    /// 4MiB].
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) sizes: Vec<u64>,
    /// Order of the reads of the blocks in the tier; repeatable [default: all].
    #[arg(long = "order", value_name = "ORDER", value_parser = ["adjacent", "shuffled", "gapped"])]
    pub(crate) orders: Vec<String>,
    /// Number of threads, 1 to 256, in kvdepot and in the plain copies of the column LIMIT;
    /// repeatable [default: 1, 2 and 4].
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) workers: Vec<usize>,
    /// Number of measured rounds, at least 1 [default: 5].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Number of bytes that the benchmark copies before it copies the same block again; use several
    /// times the size of the CPU caches [default: 256MiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) cold: Option<u64>,
    /// Directory for the temporary file of the tier [default: /dev/shm].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
    /// Internal: restores from the depot at this socket on request.
    #[arg(long, hide = true)]
    pub(crate) child: Option<PathBuf>,
    /// Internal: share of the blocks.
    #[arg(long, hide = true, value_parser = share)]
    pub(crate) share: Option<(usize, usize)>,
}

/// `2/4`: the third of four shares.
fn share(text: &str) -> Result<(usize, usize), String> {
    let (share, of) = text
        .split_once('/')
        .ok_or("expected two numbers separated by a slash")?;
    let number = |text: &str| text.parse::<usize>().map_err(|error| error.to_string());
    Ok((number(share)?, number(of)?.max(1)))
}

/// Options of `index`.
#[derive(clap::Args)]
pub(crate) struct Index {
    /// Quick run: 65,536 blocks and a third of the rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of blocks in the depot's index, at least 1 [default: 1,000,000].
    #[arg(long, value_name = "COUNT")]
    pub(crate) blocks: Option<usize>,
    /// Number of keys per call, at least 1.
    #[arg(long, value_name = "COUNT", default_value_t = 256)]
    pub(crate) batch: usize,
    /// Number of measured rounds, at least 1 [default: 15].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
}

/// Options of `reopen`.
#[derive(clap::Args)]
pub(crate) struct Reopen {
    /// Quick run: 65,536 blocks and 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of blocks of 4 KiB in the arena, at least 9 [default: 1,000,000].
    #[arg(long, value_name = "COUNT")]
    pub(crate) blocks: Option<usize>,
    /// Number of measured rounds, at least 1 [default: 7].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Directory for the temporary arena [default: the system's temporary directory].
    #[arg(long, visible_alias = "path", value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
    #[arg(long, hide = true)]
    pub(crate) child: Option<PathBuf>,
}
