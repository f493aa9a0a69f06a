//! The options of `bench files`.

use std::path::PathBuf;

use super::{bytes, count};

/// Options of `files`.
#[derive(clap::Args)]
pub(crate) struct Files {
    /// 256MiB of blocks of 64KiB and 1MiB, 8 under way, in 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this; all unless given.
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "dump", "load_cold", "load_warm", "commit_us", "lookup_hit", "lookup_miss",
        "lookup_filter", "cpu_s_per_gib", "hot_through_pipeline", "requests_per_block",
        "keyed_over_plain", "keyed_cpu_s_per_gib", "hung_over_cache",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Posix or Nvme; both unless given. Or S3, with --url, or Ds3fs, with --path.
    #[arg(long = "tier", value_name = "TIER", value_parser = ["Posix", "Nvme", "S3", "Ds3fs"])]
    pub(crate) tiers: Vec<String>,
    /// s3://BUCKET/PREFIX below which objects are made and removed again. Credentials and the
    /// region are the environment's.
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// The bucket's server; what AWS_ENDPOINT says unless given, or AWS.
    #[arg(long, value_name = "URL")]
    pub(crate) endpoint: Option<String>,
    /// A directory that is there, below the mount of a 3FS, in which files are made and removed
    /// again.
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Option<PathBuf>,
    /// 3FS's library, or posix for none; where the system's loader finds it unless given.
    #[arg(long, value_name = "PATH")]
    pub(crate) library: Option<PathBuf>,
    /// Bytes of a block; 64KiB, 256KiB, 1MiB and 4MiB unless given.
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Blocks under way at a time; 1, 8 and 32 unless given.
    #[arg(long = "depth", value_name = "COUNT", value_parser = count)]
    pub(crate) depths: Vec<usize>,
    /// Whether Posix bypasses the page cache, which Nvme always does; both unless given.
    #[arg(long = "direct", value_name = "BOOL")]
    pub(crate) directs: Vec<bool>,
    /// Bytes of the blocks that are loaded; 2GiB unless given. There is room for twice as much and
    /// some more, or it says how much is needed.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: Option<u64>,
    /// Bytes that are moved in a round; 256MiB unless given.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) batch: Option<u64>,
    /// Rounds that count; 7 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// A directory on the disk that is meant, where files are made and removed again; the directory
    /// for temporary files unless given.
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
