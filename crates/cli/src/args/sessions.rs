//! The options of `bench session`.

use std::path::PathBuf;

use super::{bytes, count};

/// Options of `bench session`.
#[derive(clap::Args)]
pub(crate) struct Sessions {
    /// 64MiB, 1,000 sessions, 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only this; all unless given.
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "save_over_raw", "save_over_staged", "restore_over_raw", "restore_warm_over_memcpy",
        "disk_peak_over_payload", "write_amplification", "checkpoint_save_ms", "restore_ms",
        "lookup_us", "decode_stall_share", "decode_stall_p999_ms",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Bytes of a state, whole MiB; 256MiB, 1GiB and 4GiB unless given.
    #[arg(long = "bytes", value_name = "SIZE", value_parser = bytes)]
    pub(crate) bytes: Vec<u64>,
    /// Through the page cache, so and made to last with fsync, or past it; all unless given.
    #[arg(long = "io", value_name = "IO", value_parser = ["buffered", "fsync", "direct"])]
    pub(crate) ios: Vec<String>,
    /// Sessions that lookups are among; 100,000 unless given.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) sessions: Option<usize>,
    /// Rounds that count; 5 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// A directory on the disk that is meant, where files are made and removed again; the directory
    /// for temporary files unless given.
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
