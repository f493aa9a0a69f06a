//! The options of `bench pressure`.

use std::path::PathBuf;

/// Options of `pressure`.
#[derive(clap::Args)]
pub(crate) struct Pressure {
    /// Calls of 1,000 and 4,000 keys, beside those of 10,000, and 2,000 requests.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this; all unless given.
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "head_kept", "small_p99_ms", "call_ms", "token_hit_rate",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Only this; all unless given.
    #[arg(long = "tier", value_name = "TIER", value_parser = [
        "Cache", "Dax", "Nvme", "Posix", "Cache|Posix",
    ])]
    pub(crate) tiers: Vec<String>,
    /// A file of requests for token_hit_rate, as for `alloc`; made-up ones unless given.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Where arenas and files are made, and removed again; the directory for temporary files unless
    /// given. They take up to 2.3 GiB.
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
