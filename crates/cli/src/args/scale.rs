//! The options of `bench scale`.

use std::path::PathBuf;

/// Options of `scale`.
#[derive(clap::Args)]
pub(crate) struct Scale {
    /// 65,536 blocks and 2 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Blocks in the arena, 4 KiB each; 1,000,000 and then 10,000,000 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) blocks: Vec<usize>,
    /// Rounds that count; 5 unless given.
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Only what puts from several threads gain.
    #[arg(long)]
    pub(crate) puts: bool,
    /// Where the arenas are made, and removed again; the directory for temporary files unless
    /// given, and /dev/shm for puts from several threads. They take 4,224 bytes a block (at
    /// most a million of them twice), and 1 GiB.
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
