//! The options of `bench churn`.

use std::path::PathBuf;

/// Options of `churn`.
#[derive(clap::Args)]
pub(crate) struct Churn {
    /// Quick run: 300 requests, and a tenth of the calls for the metric `admission`.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of generated requests, at least 1 [default: 3,277].
    #[arg(long, value_name = "COUNT", conflicts_with = "trace")]
    pub(crate) requests: Option<usize>,
    /// Trace file with requests, in the format of `bench alloc --trace` [default: generated
    /// requests].
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Directory for the temporary arena [default: the system's temporary directory].
    #[arg(long, value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
}
