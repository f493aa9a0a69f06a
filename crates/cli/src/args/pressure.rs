//! The options of `bench pressure`.

use std::path::PathBuf;

/// Options of `pressure`.
#[derive(clap::Args)]
pub(crate) struct Pressure {
    /// Quick run: calls of 10,000 keys for `small_p99_ms`, calls of 1,000 and 4,000 keys for
    /// `call_ms`, and 2,000 requests for `token_hit_rate`.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Metric to measure; repeatable [default: all].
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "head_kept", "small_p99_ms", "call_ms", "token_hit_rate",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Pipeline to measure; repeatable [default: all].
    #[arg(long = "tier", value_name = "TIER", value_parser = [
        "Cache", "Dax", "Nvme", "Posix", "Cache|Posix",
    ])]
    pub(crate) tiers: Vec<String>,
    /// Trace file for token_hit_rate, in the format of `bench alloc --trace` [default: generated
    /// requests].
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Directory for temporary arenas and files, up to 2.3 GiB in total [default: the system's
    /// temporary directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
