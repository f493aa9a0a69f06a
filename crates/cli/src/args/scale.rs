//! The options of `bench scale`.

use std::path::PathBuf;

/// Options of `scale`.
#[derive(clap::Args)]
pub(crate) struct Scale {
    /// Use 65,536 blocks and 2 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of blocks in the arena, 4 KiB each; repeatable [default: 1,000,000, then 10,000,000].
    #[arg(long, value_name = "COUNT")]
    pub(crate) blocks: Vec<usize>,
    /// Number of measured rounds [default: 5].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Measure only puts from several threads.
    #[arg(long)]
    pub(crate) puts: bool,
    /// Directory for temporary arenas: 4,224 bytes per block (up to a million blocks twice) and 1
    /// GiB [default: the system's temporary directory; /dev/shm for puts from several threads].
    #[arg(long, visible_alias = "path", value_name = "PATH")]
    pub(crate) dir: Option<PathBuf>,
    #[arg(long, hide = true, requires = "task")]
    pub(crate) child: Option<PathBuf>,
    #[arg(long, hide = true)]
    pub(crate) task: Option<Task>,
}

/// What a process of `scale` does.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Task {
    Fill,
    Beside,
    Measure,
}
