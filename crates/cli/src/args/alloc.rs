//! The options of `bench alloc`.

use std::path::PathBuf;

use super::bytes;

/// Options of `alloc`.
#[derive(clap::Args)]
pub(crate) struct Alloc {
    /// A fiftieth of the allocations, a ninth of the sizes, one round, a small paired pool.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this; all unless given.
    #[arg(long = "workload", value_name = "NAME", value_parser = [
        "uniform", "random", "paired", "trace", "threads", "rebuild", "spans",
    ])]
    pub(crate) workloads: Vec<String>,
    /// Bytes of a block of the uniform workload; all sizes of the published benchmark unless given.
    #[arg(long = "size", value_name = "SIZE", value_parser = bytes)]
    pub(crate) sizes: Vec<u64>,
    /// Objects that are allocated and counted, and extents of the rebuilt pool; 1,000,000 unless
    /// given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) operations: Option<usize>,
    /// Rounds of timing that count; 3 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Requests for `spans`, one JSON object a line: `hash_ids` has a number for each block of the
    /// prompt, `timestamp` (which may be missing) the moment. Made-up conversations unless given. A
    /// public one: FAST25-release/traces/conversation_trace.jsonl of
    /// https://github.com/kvcache-ai/Mooncake.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}
