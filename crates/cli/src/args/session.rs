use std::path::PathBuf;

use clap::Subcommand;

use super::values::{bytes, count};

/// Options of `session`.
#[derive(clap::Args)]
pub(crate) struct Session {
    #[command(subcommand)]
    pub(crate) command: SessionCommand,
}

fn depot_help() -> String {
    let text = super::targets::sentence(super::targets::DEPOT);
    format!("{text} (files: not for save, restore and trim)")
}

/// Which depot's sessions.
#[derive(clap::Args)]
pub(crate) struct InDepot {
    #[arg(value_name = "DEPOT", help = depot_help())]
    pub(crate) depot: String,
    /// YAML or JSON file with options (docs/configuration.md).
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// One option, such as posix.path=/mnt/kv; overrides --config; repeatable.
    #[arg(short = 'o', long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
    /// Salt of the sessions' namespaces, if they have one.
    #[arg(long, value_name = "TEXT")]
    pub(crate) salt: Option<String>,
}

/// What a state is, and where its parts lie.
#[derive(clap::Args)]
pub(crate) struct Saved {
    #[command(flatten)]
    pub(crate) depot: InDepot,
    /// File with all tokens: a JSON list (*.json), else 32-bit little-endian integers.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: PathBuf,
    /// File with the KV rows of all tokens, concatenated, all of the same size. Only rows that are
    /// not stored yet are read.
    #[arg(long, value_name = "FILE")]
    pub(crate) rows: PathBuf,
    /// Bytes per token, to check the size of --rows [default: file size / tokens].
    #[arg(long, value_name = "SIZE", value_parser = super::values::bytes)]
    pub(crate) row_bytes: Option<u64>,
    /// Name of the model.
    #[arg(long, value_name = "TEXT")]
    pub(crate) model: String,
    /// Data type of the rows' elements, such as float16.
    #[arg(long, value_name = "TEXT")]
    pub(crate) dtype: String,
    /// Name of the weights. Sessions of different names share no data.
    #[arg(long, value_name = "TEXT")]
    pub(crate) weights: Option<String>,
    /// Name of the layout and of other settings that the rows depend on.
    #[arg(long, value_name = "TEXT")]
    pub(crate) layout: Option<String>,
    /// Tokens per piece [default: 512].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) piece_tokens: Option<usize>,
    /// A part of fixed size, such as a recurrent state; repeatable.
    #[arg(long = "object", value_name = "NAME=FILE")]
    pub(crate) objects: Vec<String>,
    /// File with the text of the tokens.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Size of the engine's context, in tokens.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) context_tokens: Option<usize>,
    /// Note that `session ls` shows.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) note: String,
}

/// Which state, and where its parts go.
#[derive(clap::Args)]
pub(crate) struct Restored {
    #[command(flatten)]
    pub(crate) depot: InDepot,
    /// Session ID, or a unique prefix of it.
    #[arg(
        value_name = "SESSION",
        required_unless_present = "tokens",
        conflicts_with = "tokens"
    )]
    pub(crate) session: Option<String>,
    /// Instead of SESSION: restore the longest complete session that is a prefix of these tokens
    /// (same file format as `save`).
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<PathBuf>,
    /// Output file for the rows, concatenated; replaces an existing file.
    #[arg(long, value_name = "FILE")]
    pub(crate) rows: PathBuf,
    /// Existing output directory for the objects, one file per object.
    #[arg(long, value_name = "DIR")]
    pub(crate) objects: Option<PathBuf>,
}

#[derive(Subcommand)]
pub(crate) enum SessionCommand {
    /// List the sessions of a depot, newest first.
    Ls {
        #[command(flatten)]
        depot: InDepot,
    },
    /// Show the parts of a session.
    Show {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of it; not needed for a session file.
        #[arg(value_name = "SESSION")]
        session: Option<String>,
    },
    /// Save an engine state from files.
    ///
    /// Rows that are already stored are not read. If the command is interrupted, or a file changes
    /// while it is read, nothing is saved.
    Save(Saved),
    /// Restore an engine state to files.
    ///
    /// Files are created only after all data has been verified.
    Restore(Restored),
    /// Read and verify sessions, and list missing or corrupt parts; exit status 1 if there are any.
    Verify {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of it [default: all sessions].
        #[arg(value_name = "SESSION")]
        session: Option<String>,
    },
    /// Delete a session and the blocks that no other session uses.
    Rm {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of it.
        #[arg(value_name = "SESSION")]
        session: String,
    },
    /// Delete sessions until they use at most --to bytes, starting with the least compute saved per
    /// byte.
    ///
    /// Sessions that a longer one of the same conversation supersedes are deleted first. A block
    /// that several sessions use counts once, and is deleted with the last of them. The sessions of
    /// each model keep their share.
    Trim {
        #[command(flatten)]
        depot: InDepot,
        /// Total size of the remaining sessions, such as 64GiB.
        #[arg(long, value_name = "SIZE", value_parser = bytes)]
        to: u64,
    },
    /// Export a session to one file.
    Export {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of it.
        #[arg(value_name = "SESSION")]
        session: String,
        /// Output file; replaces an existing file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Write the original ds4 file, byte for byte (only for a session imported from one).
        #[arg(long)]
        ds4: bool,
    },
    /// Import sessions from exported files, or from ds4's files (.kv).
    ///
    /// A modified or truncated file is rejected before anything is stored. ds4's files do not
    /// identify the weights: name them with --weights. Sessions of different names share no data.
    Import {
        #[command(flatten)]
        depot: InDepot,
        /// Files to import.
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// Name of the weights of ds4's files.
        #[arg(long, value_name = "TEXT")]
        weights: Option<String>,
        /// Tokens per piece for ds4's files [default: 512].
        #[arg(long, value_name = "COUNT", value_parser = count)]
        piece_tokens: Option<usize>,
    },
}

impl SessionCommand {
    /// The depot that it is about.
    pub(crate) fn depot(&self) -> &InDepot {
        match self {
            SessionCommand::Ls { depot }
            | SessionCommand::Show { depot, .. }
            | SessionCommand::Verify { depot, .. }
            | SessionCommand::Rm { depot, .. }
            | SessionCommand::Trim { depot, .. }
            | SessionCommand::Export { depot, .. }
            | SessionCommand::Import { depot, .. } => depot,
            SessionCommand::Save(saved) => &saved.depot,
            SessionCommand::Restore(restored) => &restored.depot,
        }
    }
}
