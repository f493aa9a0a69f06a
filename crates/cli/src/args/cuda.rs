//! The options of `bench cuda`.

use std::path::PathBuf;

use super::values::{Extent, bytes, count, threads};

/// Options of `cuda`.
#[derive(clap::Args)]
pub(crate) struct Cuda {
    /// Quick run: a quarter of the size and a third of the rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Metric to measure; repeatable [default: all].
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "get", "put", "pinned_bytes", "device_bytes", "attach_s",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Number of device pages per block, at least 1; repeatable. The benchmark skips block sizes
    /// that need pages smaller than 4KiB [default: 1 and 16].
    #[arg(long = "pages", value_name = "COUNT", value_parser = count)]
    pub(crate) pages: Vec<usize>,
    /// Block size; repeatable [default: 16KiB, 64KiB, 256KiB, 1MiB and 4MiB].
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Number of the CUDA device, from 0.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) device: i32,
    /// Number of copy threads, 1 to 256 [default: the number of this machine's CPUs, at most 16;
    /// with a mock driver, 2].
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) lanes: Option<usize>,
    /// Size of the staging buffer (the depot's option `staging_slab`) [default: the depot's
    /// default].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) staging_slab: Option<u64>,
    /// Number of regions of the staging buffer (the depot's option `staging_regions`) [default: the
    /// depot's default].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) staging_regions: Option<usize>,
    #[command(flatten)]
    pub(crate) extent: Extent,
    /// Directory for temporary files [default: the system's temporary directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
