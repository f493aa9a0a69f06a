//! The options of `bench cuda`.

use std::path::PathBuf;

use super::{Extent, bytes, count, threads};

/// Options of `cuda`.
#[derive(clap::Args)]
pub(crate) struct Cuda {
    /// A quarter of the size and a third of the rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this; all unless given.
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "get", "put", "pinned_bytes", "device_bytes", "attach_s",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Pages that a block lies in on the device; 1 and 16 unless given. Pages of less than 4KiB are
    /// left out.
    #[arg(long = "pages", value_name = "COUNT", value_parser = count)]
    pub(crate) pages: Vec<usize>,
    /// Bytes of a block; 16KiB, 64KiB, 256KiB, 1MiB and 4MiB unless given.
    #[arg(long = "block", value_name = "SIZE", value_parser = bytes)]
    pub(crate) blocks: Vec<u64>,
    /// Number of the device; 0 unless given.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) device: i32,
    /// Lanes; 2 on a double, else this machine's processors, at most 16.
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    pub(crate) lanes: Option<usize>,
    /// The depot's staging_slab; what it takes by itself unless given.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) staging_slab: Option<u64>,
    /// The depot's staging_regions.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) staging_regions: Option<usize>,
    #[command(flatten)]
    pub(crate) extent: Extent,
    /// Where files are made, and removed again; the directory for temporary files unless given.
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
