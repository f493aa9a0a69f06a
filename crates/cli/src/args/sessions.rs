//! The options of `bench session`.

use std::path::PathBuf;

use super::values::{bytes, count};

/// Options of `bench session`.
#[derive(clap::Args)]
pub(crate) struct Sessions {
    /// Quick run: states of 64MiB, 1,000 sessions and 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Metric to measure; repeatable [default: all].
    #[arg(long = "metric", value_name = "NAME", value_parser = [
        "save_over_raw", "save_over_staged", "restore_over_raw", "restore_warm_over_memcpy",
        "disk_peak_over_payload", "write_amplification", "checkpoint_save_ms", "restore_ms",
        "lookup_us", "decode_stall_share", "decode_stall_p999_ms",
    ])]
    pub(crate) metrics: Vec<String>,
    /// Size of a session's state, a multiple of 1MiB, at least 8MiB; repeatable [default: 256MiB,
    /// 1GiB and 4GiB].
    #[arg(long = "bytes", value_name = "SIZE", value_parser = bytes)]
    pub(crate) bytes: Vec<u64>,
    /// I/O mode of the files: through the page cache (`buffered`), through the page cache with
    /// fsync (`fsync`), or bypassing the page cache (`direct`); repeatable [default: all].
    #[arg(long = "io", value_name = "IO", value_parser = ["buffered", "fsync", "direct"])]
    pub(crate) ios: Vec<String>,
    /// Number of stored sessions during the lookups of `lookup_us`, at least 1 [default: 100,000].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) sessions: Option<usize>,
    /// Number of measured rounds, at least 1 [default: 5].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Directory for temporary files, on the disk to measure [default: the system's temporary
    /// directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
