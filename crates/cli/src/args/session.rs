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
    format!(
        "{text}. An argument with a / or a dot is a path. The commands save, restore and trim \
         reject session files and directories of session files"
    )
}

/// Which depot's sessions.
#[derive(clap::Args)]
pub(crate) struct InDepot {
    #[arg(value_name = "DEPOT", help = depot_help())]
    pub(crate) depot: String,
    /// YAML or JSON file with options of the depot (docs/configuration.md).
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Option of the depot, such as posix.path=/mnt/kv; repeatable; overrides the --config file.
    #[arg(short = 'o', long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
    /// Salt (text that separates tenants) of the sessions. The command finds only sessions with
    /// this salt [default: no salt].
    #[arg(long, value_name = "TEXT")]
    pub(crate) salt: Option<String>,
}

/// What a state is, and where its parts lie.
#[derive(clap::Args)]
pub(crate) struct Saved {
    #[command(flatten)]
    pub(crate) depot: InDepot,
    /// File with the token IDs of the session: a JSON list if the name ends in .json, otherwise
    /// 32-bit little-endian integers.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: PathBuf,
    /// File with the concatenated KV rows (keys and values of one token each) of all tokens, all of
    /// the same size. The command reads only rows that are not stored yet.
    #[arg(long, value_name = "FILE")]
    pub(crate) rows: PathBuf,
    /// Size of a KV row in bytes, to check the size of the --rows file [default: size of the file
    /// divided by the number of tokens].
    #[arg(long, value_name = "SIZE", value_parser = super::values::bytes)]
    pub(crate) row_bytes: Option<u64>,
    /// Name of the model that computed the session.
    #[arg(long, value_name = "TEXT")]
    pub(crate) model: String,
    /// Data type of the elements of the KV rows, such as float16.
    #[arg(long, value_name = "TEXT")]
    pub(crate) dtype: String,
    /// Name of the model's weights. Sessions with different names share no data [default: no name].
    #[arg(long, value_name = "TEXT")]
    pub(crate) weights: Option<String>,
    /// Name of your choice for the memory layout of the KV rows and all other settings that affect
    /// the rows [default: no name].
    #[arg(long, value_name = "TEXT")]
    pub(crate) layout: Option<String>,
    /// Number of tokens per piece (stored block of KV rows), 1 to 1,048,576 [default: 512].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) piece_tokens: Option<usize>,
    /// Name and file of an object in addition to the KV rows, such as a recurrent state;
    /// repeatable. The command stores the object whole.
    #[arg(long = "object", value_name = "NAME=FILE")]
    pub(crate) objects: Vec<String>,
    /// File with the text of the tokens [default: no text].
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Size of the engine's context window, in tokens, at most 4294967295 [default: unknown].
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) context_tokens: Option<usize>,
    /// Note about the session, which `kvdepot session ls` prints with the session.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) note: String,
}

/// Which state, and where its parts go.
#[derive(clap::Args)]
pub(crate) struct Restored {
    #[command(flatten)]
    pub(crate) depot: InDepot,
    /// Session ID, or a unique prefix of a session ID.
    #[arg(
        value_name = "SESSION",
        required_unless_present = "tokens",
        conflicts_with = "tokens"
    )]
    pub(crate) session: Option<String>,
    /// File with token IDs, in the format of `session save --tokens`, instead of SESSION. The
    /// command restores the longest complete session whose tokens are a prefix of the tokens in the
    /// file.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<PathBuf>,
    /// Output file for the KV rows of all tokens, concatenated; replaces an existing file.
    #[arg(long, value_name = "FILE")]
    pub(crate) rows: PathBuf,
    /// Existing output directory for the objects of the session, one file per object [default:
    /// objects are not written].
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
    /// Show the parts of a session: pieces (stored blocks of KV rows), objects and text.
    Show {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of a session ID; optional if DEPOT is a session file.
        #[arg(value_name = "SESSION")]
        session: Option<String>,
    },
    /// Save a session from files that an engine has written.
    ///
    /// The command reads only KV rows that are not stored yet. If the command is interrupted, or if
    /// a file changes during the save, nothing is saved.
    Save(Saved),
    /// Restore a session to files for an engine.
    ///
    /// The command first verifies all data, and then creates the files.
    Restore(Restored),
    /// Read and verify sessions, and list missing or corrupt parts; exit status 1 if a part is
    /// listed.
    Verify {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of a session ID [default: all sessions].
        #[arg(value_name = "SESSION")]
        session: Option<String>,
    },
    /// Delete a session, and the blocks that only this session uses.
    Rm {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of a session ID.
        #[arg(value_name = "SESSION")]
        session: String,
    },
    /// Delete sessions until all sessions together use at most --to bytes.
    ///
    /// The command first deletes sessions that a longer session of the same conversation
    /// supersedes, and then the sessions that save the least compute per byte. A block that several
    /// sessions use counts once, and is deleted with the last of these sessions. Each model gets a
    /// part of the limit, in proportion to the size of the model's sessions.
    Trim {
        #[command(flatten)]
        depot: InDepot,
        /// Maximum total size of the remaining sessions, such as 64GiB; at least 1 byte.
        #[arg(long, value_name = "SIZE", value_parser = bytes)]
        to: u64,
    },
    /// Export a session to one file.
    Export {
        #[command(flatten)]
        depot: InDepot,
        /// Session ID, or a unique prefix of a session ID.
        #[arg(value_name = "SESSION")]
        session: String,
        /// Output file; replaces an existing file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Write a file of the engine ds4 instead, byte for byte equal to the imported file. Only
        /// for a session that was imported from a file of ds4.
        #[arg(long)]
        ds4: bool,
    },
    /// Import sessions from exported files, or from files of the engine ds4 (.kv).
    ///
    /// The command rejects a modified or truncated exported file before any byte of the file is
    /// stored. Files of ds4 have no checksums, so the command checks only their structure. Files of
    /// ds4 do not identify the weights of the model: pass the name of the weights with --weights.
    Import {
        #[command(flatten)]
        depot: InDepot,
        /// Exported session files, or files of ds4, to import.
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// Name of the model's weights: required for files of ds4 that are imported into a depot,
        /// not allowed otherwise. Sessions with different names share no data.
        #[arg(long, value_name = "TEXT")]
        weights: Option<String>,
        /// Number of tokens per piece (stored block of KV rows), for files of ds4, 1 to 1,048,576
        /// [default: 512].
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
