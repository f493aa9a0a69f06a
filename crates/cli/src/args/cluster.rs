//! The options of `bench cluster`.

/// Options of `cluster`.
#[derive(clap::Args)]
pub(crate) struct Cluster {
    /// Quick run: 1,000,000 keys and 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of keys to look up, at least 1 [default: 20,000,000].
    #[arg(long, value_name = "COUNT")]
    pub(crate) keys: Option<u64>,
    /// Number of measured rounds, at least 1 [default: 7].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
}
