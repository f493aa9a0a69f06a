//! The options of `bench alloc`.

use std::path::PathBuf;

use super::values::bytes;

/// Options of `alloc`.
#[derive(clap::Args)]
pub(crate) struct Alloc {
    /// Quick run: 20,000 allocations, one ninth of the block sizes, one round, and a pool of 16 GiB
    /// for `paired`.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Workload to measure; repeatable [default: all].
    #[arg(long = "workload", value_name = "NAME", value_parser = [
        "uniform", "random", "paired", "trace", "threads", "rebuild", "spans",
    ])]
    pub(crate) workloads: Vec<String>,
    /// Block size of the workload `uniform`; repeatable [default: all sizes of OffsetAllocator's
    /// published benchmark].
    #[arg(long = "size", value_name = "SIZE", value_parser = bytes)]
    pub(crate) sizes: Vec<u64>,
    /// Number of allocations, at least 1; for the workload `rebuild`, number of extents (allocated
    /// ranges) [default: 1,000,000].
    #[arg(long, value_name = "COUNT")]
    pub(crate) operations: Option<usize>,
    /// Number of measured rounds, at least 1 [default: 3].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Trace file for the workload `spans`, such as FAST25-release/traces/conversation_trace.jsonl
    /// of https://github.com/kvcache-ai/Mooncake. Each line is the JSON object of one request. The
    /// list `hash_ids` of an object has one number per block of the prompt; `timestamp` is optional
    /// [default: generated conversations].
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}
