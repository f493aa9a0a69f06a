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
    /// `get` copies random blocks of a tier into memory that is in no CPU cache. `put` copies
    /// random blocks of memory into a tier whose pages are resident. The memory has huge pages if
    /// the system provides huge pages. The limit is the best plain copy (memcpy, rep movsb or
    /// streaming stores) of the same blocks with the same number of threads, in huge or ordinary
    /// pages.
    ///
    /// Metrics:
    ///   throughput                bytes per second
    ///   throughput_with_checksum  the same; the limit is the best simple loop that copies a block
    ///                             and computes its checksum (feature peers, not in the wheel)
    ///   overhead                  time per block of 4096 bytes, in addition to the time of the
    ///                             plain copy
    #[command(verbatim_doc_comment)]
    Memory(Memory),
    /// Measure restores from the Dax tier against the best plain copy of the same blocks.
    ///
    /// The file of the tier and the caller's memory are resident and in no CPU cache. With
    /// --order adjacent, blocks are read in stored order; with shuffled, in random order; with
    /// gapped, every second block is read in stored order. The limit is the best plain copy (memcpy
    /// or streaming stores) with the same number of threads. For adjacent blocks, one contiguous
    /// copy per thread is also tried.
    ///
    /// Metrics:
    ///   throughput          bytes per second
    ///   staged_over_direct  throughput through the staging buffer, divided by the throughput of a
    ///                       direct copy
    ///   cpu_over_copy       processor time of all threads, divided by the processor time of the
    ///                       best plain copy
    ///   processes_over_one  throughput of four processes that restore from one served depot,
    ///                       divided by the throughput of one process with the same number of
    ///                       threads
    ///   first_hit           time from opening an arena of 100,000 blocks (10,000 with --quick)
    ///                       until it serves the first block
    ///   pin_over_echo       time in which a served depot pins 256 keys, divided by the time to
    ///                       echo the same bytes over a socket
    #[command(verbatim_doc_comment)]
    Restore(Restore),
    /// Measure the allocator's utilization and speed against other allocators.
    ///
    /// Workloads:
    ///   uniform, random  the published benchmark of OffsetAllocator: a full pool of 2 GiB (1/16
    ///                    for blocks below 1 KiB); before an allocation, random blocks are freed
    ///                    until the new block fits
    ///   paired           the two parts of the blocks of a model with an indexer, in 1 TiB
    ///   trace            the prompts of four models in 64 GiB; the least recently used prompts
    ///                    are freed
    ///   threads          one shared pool against one pool per thread
    ///   rebuild          a pool rebuilt from its live extents
    ///   spans            number of contiguous ranges that hold a prompt's blocks in an aged arena,
    ///                    with the store's placement hints and without
    ///
    /// Utilization is live bytes divided by the pool's bytes, sampled after each allocation. The
    /// value utilisation_p99 is exceeded by 99 % of the samples. The limit of utilization is an
    /// exact best-fit allocator; the limit of time is OffsetAllocator.
    #[command(verbatim_doc_comment)]
    Alloc(Alloc),
    /// Measure write volume, hit rate and promotions of a depot smaller than its working set.
    ///
    /// A simulated engine requests 54 prompts of some 2,400 tokens with 24 prefixes repeatedly. The
    /// tiers hold three quarters of the blocks of these prompts. The engine looks up the blocks
    /// that its own cache lacks, loads the hits, and stores the whole prompt. The engine's own
    /// cache holds all prompts (engine_cache=large) or nothing (engine_cache=none). The prompts
    /// come in random order: all equally often (order=uniform), or so that exact LRU serves 87 % of
    /// the tokens (order=skewed). The limit is exact LRU with the same number of blocks.
    ///
    /// With --trace the requests come from a file. The capacities are then chosen so that exact LRU
    /// serves 40, 60 and 80 % of the tokens that an unlimited cache serves.
    ///
    /// Metrics:
    ///   stored_over_capacity  bytes written to the last tier, divided by the tier's capacity
    ///   token_hit_rate        tokens of hits, divided by all tokens of the requests
    ///   promoted_over_hit     bytes promoted, divided by the bytes of hits in the last tier
    ///   near_over_hit         bytes of hits in the first tier, divided by the bytes of all hits
    ///   admission             processor time of a put for each new block that the admission policy
    ///                         judges (median of puts into two full arenas in turns)
    #[command(verbatim_doc_comment)]
    Churn(Churn),
    /// Measure the placement of keys on 3 and on 1,000 hosts, and the effect of host changes.
    ///
    /// The hosts are simulated, with capacities in the ratio of 1 to 4. The keys are a sample of
    /// 10^9 blocks.
    ///
    /// Metrics:
    ///   least_over_share, most_over_share
    ///                        the smallest and largest number of blocks on a host, divided by the
    ///                        number of blocks that is proportional to the host's capacity
    ///   moved_over_ideal     copies that move when a host joins, dies, or changes its capacity,
    ///                        divided by the copies that must move
    ///   hosts_asked, hosts_asked_max
    ///                        hosts that a lookup queries, mean and largest, after the change
    ///   found_before_moving  fraction of the remaining blocks that lookups find before any block
    ///                        has moved
    ///   bytes_per_host       memory that each host uses per known host
    ///   lookup_ns            time to compute one replica host; limit: one logarithm for each host
    #[command(verbatim_doc_comment)]
    Cluster(Cluster),
    /// Measure copies between host memory and a CUDA device against pinned copies.
    ///
    /// kvdepot loads verified blocks from Cache into scattered pages of the device, and stores
    /// blocks from these pages into Cache. The limit is the best plain program without checksums:
    /// it has the bytes in pinned memory, and makes one copy per block or one copy for all blocks,
    /// on one or two streams.
    ///
    /// Metrics:
    ///   get, put      bytes per second
    ///   pinned_bytes  host memory that kvdepot has pinned
    ///   device_bytes  device memory that kvdepot has allocated
    ///   attach_s      time to open Cache|Dax with a file of 64 GiB and a Cache of a quarter of the
    ///                 memory, until the first lookup
    ///
    /// With a mock of the CUDA driver (`make bench-cuda` builds one) the benchmark measures only
    /// the processor's work, and the limit is the limit of `bench memory`.
    #[command(verbatim_doc_comment)]
    Cuda(Cuda),
    /// Measure the tiers Posix and Nvme (or S3, Ds3fs) against raw files of the same sizes.
    ///
    /// The number of blocks in flight is --depth, in up to eight calls, in random order. The limit
    /// is the best plain program with the same number of requests in flight: io_uring or up to 8
    /// threads, direct I/O, huge pages, with or without registered memory. The plain program uses
    /// one file per block for Posix, and one file for Nvme. With --direct false, the tier and the
    /// plain programs use the page cache. The benchmark does not drop caches below the file system,
    /// such as the caches of a virtual machine's host.
    ///
    /// Metrics:
    ///   dump, load_cold, load_warm
    ///                         bytes per second (load_warm: from the page cache)
    ///   commit_us             time until a block of 4 KiB is acknowledged; limit: write, rename
    ///                         and sync of one page
    ///   lookup_hit, lookup_miss
    ///                         time per key in calls of 256 keys, in addition to one system call
    ///   lookup_filter         time per key for keys that were looked up just before
    ///   cpu_s_per_gib         processor time of a cold load, also compared with one hash pass
    ///   hot_through_pipeline  gets from Cache in Cache|Posix, divided by gets from Cache alone
    ///   keyed_over_plain, keyed_cpu_s_per_gib
    ///                         cold loads of 1 MiB from Posix with mac_key_file and without
    ///   requests_per_block    S3: requests for each block (the plain client needs one)
    ///   hung_over_cache       time of a lookup and a get of a block in Cache while the lower tier
    ///                         does not respond, divided by the time with Cache alone
    ///
    /// With --tier S3, blocks are objects. The limit is the crate object_store without checksums,
    /// with one or four threads and the same number of requests in flight.
    /// With --tier Ds3fs, kvdepot uses the I/O rings of a 3FS. The limit is the tier Posix with
    /// direct I/O on the mount of the 3FS.
    #[command(verbatim_doc_comment)]
    Files(Files),
    /// Measure lookups against a plain hash table.
    ///
    /// The metric is lookups, in keys per second. All keys are stored, and are looked up in random
    /// order.
    Index(Index),
    /// Measure the effect of large prompts and large calls on other prompts and calls.
    ///
    /// Blocks have 4 KiB. Prompts are stored in calls of 16 blocks with `after`, as an engine does.
    ///
    /// Metrics:
    ///   head_kept       fraction of a prompt in use that is still stored after prompts of half,
    ///                   all and twice the tier's capacity; after each of these prompts, the prompt
    ///                   in use is requested once
    ///   small_p99_ms    99th percentile of the time of gets, puts and lookups of one block, and of
    ///                   statistics, while another thread makes calls of many keys; limit for tiers
    ///                   of files: a plain read of 4 KiB while other threads write files of the
    ///                   same size
    ///   call_ms         duration of a call of many keys (reserve includes the release; put_beyond
    ///                   stores into a tier with space for an eighth of the keys)
    ///   token_hit_rate  fraction of the requested blocks that are hits; the tier has space for a
    ///                   fifth of the blocks, and one in a hundred requests is a document of 1.5
    ///                   times the tier's capacity; limit: the same requests without documents
    #[command(verbatim_doc_comment)]
    Pressure(Pressure),
    /// Measure the opening of an arena whose owner was killed, until it serves the first block.
    ///
    /// In each round, a child process that owns the arena is killed.
    ///
    /// Metrics:
    ///   open         time from the start of opening until the first block is served
    ///   first_block  time to serve the first block after the arena is open
    #[command(verbatim_doc_comment)]
    Reopen(Reopen),
    /// Measure memory, opening, lookups and waits of an arena with very many blocks.
    ///
    /// Metrics:
    ///   bytes_per_block         anonymous memory of the index and the LRU order, after filling the
    ///                           arena and after opening it (without memory of the allocator)
    ///   peak_bytes_per_block    peak of the same memory while the arena is opened
    ///   open_s                  time to open the arena
    ///   lookups_over_table      speedup of lookups with more threads, divided by the speedup of a
    ///                           read-only table
    ///   wait_ms                 wait of a lookup of 256 keys while puts of 1 MiB evict, minus the
    ///                           wait while plain copies run
    ///   wait_over_unlocked_ms   wait of the same lookup, minus the wait with a table without locks
    ///   lock_hold_ms            longest time that a thread held a lock, in processor time of the
    ///                           thread
    ///   add_device_s            time to add a second full arena (at most a million blocks)
    ///   blocks_page_ms          longest time for one page of a listing
    ///   puts_over_one_thread    speedup of puts of 64 KiB into one full arena with more threads;
    ///                           limit: the speedup of plain copies
    ///   puts                    throughput of the same puts, in GB/s
    #[command(verbatim_doc_comment)]
    Scale(Scale),
    /// Measure saving and restoring sessions against plain files.
    ///
    /// The sessions are in memory, in blocks of 4 MiB, and the tier Posix stores them. The limit is
    /// the fastest of several plain programs that write or read a file with 8 requests of 1 MiB in
    /// flight, without checksums. A staged save first writes a separate file, and then copies this
    /// file into the final file.
    ///
    /// Metrics:
    ///   save_over_raw             time of a save, against the limit
    ///   save_over_staged          time of a staged save, divided by the time of a save; limit: the
    ///                             time of two writes and a read, divided by the time of one write
    ///   disk_peak_over_payload    largest disk usage of a save, divided by the payload
    ///   restore_over_raw          time of a verified restore from disk, against the limit
    ///   restore_warm_over_memcpy  time of a lookup and a verified restore from the page cache and
    ///                             from Cache, against memcpy
    ///   write_amplification       growth of the files, divided by the bytes of the new tokens' KV
    ///                             rows: 512 tokens after 8,192, and 20 saves at random
    ///   checkpoint_save_ms        time to save a growing session with the checkpoints of the
    ///                             engine ds4: staged, whole, and only the new KV rows
    ///   restore_ms                time to restore the last of these checkpoints
    ///   lookup_us                 longest time to find a prompt's prefix among many sessions
    ///   decode_stall_share, decode_stall_p999_ms
    ///                             delay of an engine's decode steps while a save runs
    #[command(verbatim_doc_comment)]
    Session(Sessions),
    /// Measure batches of many small requests between two processes against plain sockets.
    ///
    /// The target is a child process, connected over loopback. Both processes use resident memory
    /// with huge pages if the system provides huge pages. Each request moves one contiguous range,
    /// and the ranges are in random order on both sides. The limit is the better of one and two
    /// plain TCP streams that send the same bytes from one contiguous range.
    ///
    /// Metrics:
    ///   batch_over_tcp            throughput, with and without checksums
    ///   cpu_s_per_gb              processor time of both processes per GB
    ///   over_memcpy               throughput over shared memory, against the best plain copy
    ///   batch_over_one_by_one     one batch, compared with the same requests in batches of one
    ///   one_by_one_over_pingpong  time of a batch of one request, compared with a blocking
    ///                             exchange of the same bytes over a plain socket
    ///   total_on_over_off         time of a batch with watermarked slices and merged tails,
    ///                             divided by the time without
    ///   first_byte_on_over_off    time until the kernel receives the first slice of 20,000
    ///                             requests, with watermarked slices and merged tails, divided by
    ///                             the time without
    ///   messages_per_s            batches of messages of one size, against plain streams
    ///   read_rtt_us, read_rtt_over_pingpong
    ///                             time of a read of 4 KiB over TCP and over shared memory
    ///   submit_ns                 time to submit one of 100,000 requests: processor and wall clock
    ///   register_s                time to register and publish 100,000 ranges and make the first
    ///                             transfer
    ///   resolve_ms                time until each request has an outcome after the target is
    ///                             killed or stopped; limit: the batch's time-out and 100 ms; the
    ///                             data of successful requests is compared
    ///
    /// With --where veth, the processes run in two network namespaces, which are removed at the
    /// end; this needs root and the command `ip`. The metrics over_memcpy, first_byte_on_over_off,
    /// submit_ns and register_s are not measured with veth.
    #[command(verbatim_doc_comment)]
    Transfer(Transfer),
}

/// Options of `memory`.
#[derive(clap::Args)]
pub(crate) struct Memory {
    /// Quick run: a quarter of the size and a third of the rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Operation to measure; repeatable [default: both].
    #[arg(long = "op", value_name = "OP", value_parser = ["get", "put"])]
    pub(crate) ops: Vec<String>,
    /// Tier to measure; repeatable. The tier Dax uses a file in --dir [default: both].
    #[arg(long = "tier", value_name = "TIER", value_parser = ["Dax", "Cache"])]
    pub(crate) tiers: Vec<String>,
    /// Block size, a multiple of 4096 bytes; repeatable [default: 4KiB, 64KiB, 256KiB, 1MiB, 2MiB,
    /// 3MiB, 4MiB, 8MiB and 40MiB, at most --batch].
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Number of copy threads, 1 to 256, of kvdepot and of the plain copy that it is compared with;
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
    /// Block size, a multiple of 4096 bytes; repeatable. Combinations with more than 1GiB per call
    /// are skipped [default: 4KiB, 64KiB, 256KiB, 1MiB and 4MiB].
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) sizes: Vec<u64>,
    /// Order of the blocks in the tier; repeatable [default: all].
    #[arg(long = "order", value_name = "ORDER", value_parser = ["adjacent", "shuffled", "gapped"])]
    pub(crate) orders: Vec<String>,
    /// Number of copy threads, 1 to 256, of kvdepot and of the plain copy that it is compared with;
    /// repeatable [default: 1, 2 and 4].
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) workers: Vec<usize>,
    /// Number of measured rounds, at least 1 [default: 5].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Bytes to copy before the same block is copied again; use several times the size of the CPU
    /// caches [default: 256MiB].
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
