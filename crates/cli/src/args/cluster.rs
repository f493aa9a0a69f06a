//! The options of `bench cluster`.

/// Options of `cluster`.
#[derive(clap::Args)]
pub(crate) struct Cluster {
    /// 1,000,000 keys and 3 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Keys that are looked up; 20,000,000 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) keys: Option<u64>,
    /// Rounds of timing that count; 7 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
}
