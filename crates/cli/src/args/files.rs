//! The options of `bench files`.

use std::path::PathBuf;

use super::values::{bytes, count};

/// Options of `files`.
#[derive(clap::Args)]
pub(crate) struct Files {
    /// Use 256MiB in blocks of 64KiB and 1MiB, 8 in flight, in 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this metric; repeatable [default: all].
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "dump", "load_cold", "load_warm", "commit_us", "lookup_hit", "lookup_miss",
        "lookup_filter", "cpu_s_per_gib", "hot_through_pipeline", "requests_per_block",
        "keyed_over_plain", "keyed_cpu_s_per_gib", "hung_over_cache",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Only this tier: Posix, Nvme, S3 (needs --url) or Ds3fs (needs --path); repeatable [default:
    /// Posix and Nvme].
    #[arg(long = "tier", value_name = "TIER", value_parser = ["Posix", "Nvme", "S3", "Ds3fs"])]
    pub(crate) tiers: Vec<String>,
    /// s3://BUCKET/PREFIX for temporary objects. Credentials and region come from the environment.
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Endpoint of the object store [default: AWS_ENDPOINT, else AWS].
    #[arg(long, value_name = "URL")]
    pub(crate) endpoint: Option<String>,
    /// Existing directory below a 3FS mount, for temporary files.
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Option<PathBuf>,
    /// Path of 3FS's library, or `posix` for none [default: that of the system's loader].
    #[arg(long, value_name = "PATH")]
    pub(crate) library: Option<PathBuf>,
    /// Block size; repeatable [default: 64KiB, 256KiB, 1MiB and 4MiB].
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Number of blocks in flight; repeatable [default: 1, 8 and 32].
    #[arg(long = "depth", value_name = "COUNT", value_parser = count)]
    pub(crate) depths: Vec<usize>,
    /// Bypass the page cache in Posix (Nvme always does); repeatable [default: true and false].
    #[arg(long = "direct", value_name = "BOOL")]
    pub(crate) directs: Vec<bool>,
    /// Total size of the loaded blocks; the disk needs a little more than twice as much [default:
    /// 2GiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: Option<u64>,
    /// Bytes moved per round [default: 256MiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) batch: Option<u64>,
    /// Number of measured rounds [default: 7].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Directory for temporary files, on the disk to be measured [default: the system's temporary
    /// directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
