//! The options of `bench churn`.

use std::path::PathBuf;

/// Options of `churn`.
#[derive(clap::Args)]
pub(crate) struct Churn {
    /// 300 requests.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Requests; 3,277 unless given.
    #[arg(long, value_name = "COUNT", conflicts_with = "trace")]
    pub(crate) requests: Option<usize>,
    /// A file of requests instead, as for `alloc`.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Where the arena is made, and removed again; the directory for temporary files unless given.
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
