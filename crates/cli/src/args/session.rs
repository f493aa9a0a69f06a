use std::path::PathBuf;

use clap::Subcommand;

use super::{bytes, count};

/// Options of `session`.
#[derive(clap::Args)]
pub(crate) struct Session {
    #[command(subcommand)]
    pub(crate) command: SessionCommand,
}

fn depot_help() -> String {
    let text = super::targets::sentence(super::targets::DEPOT);
    format!("{text}. Files are not for save, restore and trim")
}

/// Which depot's sessions.
#[derive(clap::Args)]
pub(crate) struct InDepot {
    #[arg(value_name = "DEPOT", help = depot_help())]
    pub(crate) depot: String,
    /// A YAML or JSON file with the options of docs/configuration.md.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// One option, such as posix.path=/mnt/kv; as often as needed. It goes before that of --config.
    #[arg(short = 'o', long = "option", value_name = "NAME=VALUE")]
    pub(crate) options: Vec<String>,
    /// The salt of the sessions' namespaces, where they have one.
    #[arg(long, value_name = "TEXT")]
    pub(crate) salt: Option<String>,
}

/// What a state is, and where its parts lie.
#[derive(clap::Args)]
pub(crate) struct Saved {
    #[command(flatten)]
    pub(crate) depot: InDepot,
    /// All tokens: a list in JSON where the name ends in .json, or else numbers of 32 bits, the
    /// lowest byte first.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: PathBuf,
    /// The rows of all tokens, one behind the other, each of as many bytes. Those alone are read
    /// that the depot does not have.
    #[arg(long, value_name = "FILE")]
    pub(crate) rows: PathBuf,
    /// Bytes of a token's rows, which the file is held against; its size by the tokens unless
    /// given.
    #[arg(long, value_name = "SIZE", value_parser = super::bytes)]
    pub(crate) row_bytes: Option<u64>,
    /// Names the model.
    #[arg(long, value_name = "TEXT")]
    pub(crate) model: String,
    /// Names the type of the rows' elements.
    #[arg(long, value_name = "TEXT")]
    pub(crate) dtype: String,
    /// Names the weights; other names are never mixed.
    #[arg(long, value_name = "TEXT")]
    pub(crate) weights: Option<String>,
    /// Names whatever else the rows depend on.
    #[arg(long, value_name = "TEXT")]
    pub(crate) layout: Option<String>,
    /// Tokens of a piece; 512 unless given.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) piece_tokens: Option<usize>,
    /// A part that does not grow with the tokens; as often as needed.
    #[arg(long = "object", value_name = "NAME=FILE")]
    pub(crate) objects: Vec<String>,
    /// The text that the tokens were rendered from.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Tokens that the engine has room for.
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub(crate) context_tokens: Option<usize>,
    /// What ls shows beside it.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) note: String,
}

/// Which state, and where its parts go.
#[derive(clap::Args)]
pub(crate) struct Restored {
    #[command(flatten)]
    pub(crate) depot: InDepot,
    /// As ls names it, or digits that only it begins with.
    #[arg(
        value_name = "SESSION",
        required_unless_present = "tokens",
        conflicts_with = "tokens"
    )]
    pub(crate) session: Option<String>,
    /// In its place: the longest one that these tokens begin with, and that is whole. A file as
    /// save takes it.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<PathBuf>,
    /// Where the rows go, one behind the other; a file that is there is replaced.
    #[arg(long, value_name = "FILE")]
    pub(crate) rows: PathBuf,
    /// A directory that is there, for the objects: a file of its name for each.
    #[arg(long, value_name = "DIR")]
    pub(crate) objects: Option<PathBuf>,
}

#[derive(Subcommand)]
pub(crate) enum SessionCommand {
    /// The sessions of a depot, the newest first.
    Ls {
        #[command(flatten)]
        depot: InDepot,
    },
    /// What one session is made of.
    Show {
        #[command(flatten)]
        depot: InDepot,
        /// As ls names it, or digits that only it begins with; not needed for a file.
        #[arg(value_name = "SESSION")]
        session: Option<String>,
    },
    /// Saves a state that an engine, or a script, has written to files.
    ///
    /// Reads only the parts that the depot does not have yet. If the command is interrupted, or
    /// the file changes while it is read, the command removes what it has stored.
    Save(Saved),
    /// Writes a state to files, for an engine or a script to go on with.
    ///
    /// Each byte has been verified before a file is there; interrupted, no file is.
    Restore(Restored),
    /// Reads all bytes of sessions and names what is not there or does not verify; exit status 1 if
    /// anything.
    Verify {
        #[command(flatten)]
        depot: InDepot,
        /// As ls names it, or digits that only it begins with; all unless given.
        #[arg(value_name = "SESSION")]
        session: Option<String>,
    },
    /// Removes a session, and what no other one is made of.
    Rm {
        #[command(flatten)]
        depot: InDepot,
        /// As ls names it, or digits that only it begins with.
        #[arg(value_name = "SESSION")]
        session: String,
    },
    /// Removes sessions until all have so many bytes: those first that save the least compute a
    /// byte.
    ///
    /// What a longer one of the same conversation supersedes goes before all others. A block that
    /// several sessions name counts once, and stays with the last of them. Each model's sessions
    /// keep their share.
    Trim {
        #[command(flatten)]
        depot: InDepot,
        /// What all sessions may have then, such as 64GiB.
        #[arg(long, value_name = "SIZE", value_parser = bytes)]
        to: u64,
    },
    /// Writes a session to one file, to be copied and kept.
    Export {
        #[command(flatten)]
        depot: InDepot,
        /// As ls names it, or digits that only it begins with.
        #[arg(value_name = "SESSION")]
        session: String,
        /// The file; one that is there is replaced.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// As ds4's own file, byte for byte, of a session that was imported from one.
        #[arg(long)]
        ds4: bool,
    },
    /// Saves sessions that export has written, or ds4's own files (.kv).
    ///
    /// What is changed or cut is refused before anything is stored. Files of ds4 do not say which
    /// weights they are of: --weights names them, and sessions of other names are never mixed.
    Import {
        #[command(flatten)]
        depot: InDepot,
        /// The files.
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// Names the weights that ds4's files are of.
        #[arg(long, value_name = "TEXT")]
        weights: Option<String>,
        /// Tokens of a piece of what comes from ds4's files; 512 unless given.
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
