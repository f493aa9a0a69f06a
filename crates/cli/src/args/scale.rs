//! The options of `bench scale`.

use std::path::PathBuf;

/// Options of `scale`.
#[derive(clap::Args)]
pub(crate) struct Scale {
    /// Quick run: 65,536 blocks and 2 rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of blocks of 4 KiB in the arena, at least 8,192; repeatable [default: 1,000,000, then
    /// 10,000,000].
    #[arg(long, value_name = "COUNT")]
    pub(crate) blocks: Vec<usize>,
    /// Number of measured rounds, at least 1 [default: 5].
    #[arg(long, value_name = "COUNT")]
    pub(crate) rounds: Option<usize>,
    /// Measure only puts from several threads (the metrics `puts_over_one_thread` and `puts`).
    #[arg(long)]
    pub(crate) puts: bool,
    /// Directory for temporary arenas: one for puts from several threads (1.25 GiB of free space);
    /// and, without --puts, one with --blocks blocks and one with the same number, but at most a
    /// million (4,224 bytes of free space per block of both) [default: /dev/shm for puts from
    /// several threads, otherwise the system's temporary directory].
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
