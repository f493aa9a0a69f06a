//! The options of `bench files`.

use std::path::PathBuf;

use super::values::{bytes, count};

/// Options of `files`.
#[derive(clap::Args)]
pub(crate) struct Files {
    /// Quick run: 256MiB in blocks of 64KiB and 1MiB, 8 blocks in flight, 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Metric to measure; repeatable [default: all].
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "dump", "load_cold", "load_warm", "commit_us", "lookup_hit", "lookup_miss",
        "lookup_filter", "cpu_s_per_gib", "hot_through_pipeline", "requests_per_block",
        "keyed_over_plain", "keyed_cpu_s_per_gib", "hung_over_cache",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Tier to measure; repeatable. The tier S3 requires --url, and the tier Ds3fs requires --path
    /// [default: Posix and Nvme].
    #[arg(long = "tier", value_name = "TIER", value_parser = ["Posix", "Nvme", "S3", "Ds3fs"])]
    pub(crate) tiers: Vec<String>,
    /// Bucket and prefix for temporary objects of the tier S3, as s3://BUCKET/PREFIX. The
    /// environment provides credentials and region.
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Endpoint of the object store for the tier S3 [default: AWS_ENDPOINT, or AWS if AWS_ENDPOINT
    /// is not set].
    #[arg(long, value_name = "URL")]
    pub(crate) endpoint: Option<String>,
    /// Existing directory below a 3FS mount, for temporary files of the tier Ds3fs.
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Option<PathBuf>,
    /// Path or name of 3FS's library for the tier Ds3fs. With the value `posix`, the tier uses no
    /// library [default: the library that the system's loader finds].
    #[arg(long, value_name = "PATH")]
    pub(crate) library: Option<PathBuf>,
    /// Block size; repeatable [default: 64KiB, 256KiB, 1MiB and 4MiB].
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Number of blocks in flight, at least 1; repeatable [default: 1, 8 and 32].
    #[arg(long = "depth", value_name = "COUNT", value_parser = count)]
    pub(crate) depths: Vec<usize>,
    /// Direct I/O of the tier Posix, to bypass the page cache; repeatable. The tier Nvme always
    /// uses direct I/O [default: true and false].
    #[arg(long = "direct", value_name = "BOOL")]
    pub(crate) directs: Vec<bool>,
    /// Total size of the loaded blocks. The disk needs a little more than twice this size [default:
    /// 2GiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: Option<u64>,
    /// Number of bytes that a round reads or writes, at least two blocks [default: 256MiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) batch: Option<u64>,
    /// Number of measured rounds, at least 1 [default: 7].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Directory for temporary files, on the disk to measure [default: the system's temporary
    /// directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
