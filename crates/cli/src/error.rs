//! What ends a command, and what to do about it.

use std::path::{Path, PathBuf};

use kvdepot_store::inspect::block_files;

/// Errors of the command line. Each has one line for people; [`Error::hint`] adds what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    /// The store refused.
    #[error(transparent)]
    Store(#[from] kvdepot_store::Error),
    /// A mapping or a copy failed.
    #[error(transparent)]
    Media(#[from] kvdepot_media::Error),
    /// The host refused.
    #[error(transparent)]
    Host(#[from] kvdepot_host::Error),
    /// The transfer engine refused.
    #[error(transparent)]
    Transfer(#[from] kvdepot_transfer::Error),
    /// A session was refused.
    #[error(transparent)]
    Session(#[from] kvdepot_session::Error),
    /// Nothing is where an arena was expected.
    #[error("{path}: no arena found", path = path.display())]
    NoArena {
        /// Path of the missing arena.
        path: PathBuf,
        /// True if it is the default path.
        default: bool,
        /// The instance whose default it would be.
        instance: Option<String>,
    },
    /// Nothing is where an arena was to be removed.
    #[error("{}: no arena found; nothing was removed", .0.display())]
    Absent(PathBuf),
    /// A command reads an arena, and was given a depot's socket.
    #[error(
        "unix:{} is not allowed for this command; only ls, stat, and rm with --namespace or --key \
         accept a socket", .0.display()
    )]
    NotServed(PathBuf),
    /// A socket has its listener.
    #[error("{path}: another process is listening on this socket", path = path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// An arena has its owner, and this command does not wait for its end.
    #[error("{path} is in use by process {pid} on host {host}", path = path.display())]
    Owned {
        /// The arena.
        path: PathBuf,
        /// The owner's process id.
        pid: u32,
        /// The owner's host.
        host: String,
    },
    /// An option's value is impossible.
    #[error("{}", not_allowed(field, value, allowed))]
    Usage {
        /// The option.
        field: &'static str,
        /// The value that was given.
        value: String,
        /// The accepted values.
        allowed: String,
    },
    /// `rm` was not told what to remove.
    #[error("PATH is required: the arena to remove (or use --namespace, --key or --all)")]
    Nameless,
    /// `rm` asked, and nobody said yes.
    #[error("nothing was removed: there is no terminal for the confirmation; use --yes")]
    Unconfirmed,
    /// A file operation failed.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's word.
        source: std::io::Error,
    },
    /// The output could not be written.
    #[error("cannot write to stdout: {0}")]
    Output(#[from] std::io::Error),
    /// A result could not be written as JSON.
    #[error("cannot write to stdout: {0}")]
    Json(#[from] serde_json::Error),
    /// A benchmark did not do what it measures.
    #[error("the benchmark failed: {0}")]
    Bench(String),
    /// The user ended it.
    #[error("a signal interrupted the command")]
    Interrupted,
}

/// The text of a value that is not allowed, or that is missing.
fn not_allowed(field: &str, value: &str, allowed: &str) -> String {
    match value {
        "missing" => format!("{field} is required; allowed: {allowed}"),
        _ => format!("{field}: {value} is not allowed; allowed: {allowed}"),
    }
}

impl Error {
    /// The error of a file that a user gave as `field`, and that cannot be read.
    pub(crate) fn unreadable<'a>(
        field: &'static str,
        path: &'a Path,
    ) -> impl Fn(std::io::Error) -> Error + 'a {
        move |source| Error::Usage {
            field,
            value: path.display().to_string(),
            allowed: format!("a file that this user can read ({source})"),
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }

    /// Returns true if the command does not take a PATH or DEPOT of this kind.
    pub(crate) fn is_about_target(&self) -> bool {
        use kvdepot_store::Error as StoreError;
        matches!(
            self,
            Error::NoArena {
                default: false,
                instance: None,
                ..
            } | Error::Absent(_)
                | Error::NotServed(_)
                | Error::Store(StoreError::Corrupt { .. })
                | Error::Store(StoreError::Media(kvdepot_media::Error::WrongKind { .. }))
        )
    }

    /// Returns the remedy, if the error's text does not name it.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Error::NoArena {
                instance: Some(instance),
                ..
            } => Some(format!(
                "the first engine or server with instance: {instance} creates it"
            )),
            Error::NoArena { default: true, .. } => Some(
                "the first engine that starts with kvdepot creates the default arena; give the \
                 PATH of another arena, or --instance"
                    .into(),
            ),
            Error::Unconfirmed => Some("--yes removes without confirmation".into()),
            Error::Store(kvdepot_store::Error::Peer { reason, .. })
                if reason.starts_with("cannot connect") =>
            {
                Some("kvdepot ls lists running depots; kvdepot serve starts one".into())
            }
            Error::Owned { pid, host, .. }
            | Error::Store(kvdepot_store::Error::Locked { pid, host, .. }) => Some(format!(
                "end process {pid} on {host} first; ls, stat and verify work while it is running"
            )),
            Error::Store(kvdepot_store::Error::Media(kvdepot_media::Error::WrongKind {
                path,
                found: "a socket",
            })) => Some(format!(
                "unix:{} queries the server of this socket",
                path.display()
            )),
            Error::Store(kvdepot_store::Error::Media(kvdepot_media::Error::WrongKind {
                path,
                found: "a directory",
            })) if matches!(block_files(path), Ok(Some(_))) => Some(format!(
                "it is a directory of the tier Posix: kvdepot verify {path} checks its blocks, \
                 kvdepot session ls {path} lists its sessions, and unix:SOCKET queries a server \
                 that has it open; when no process uses it, rm -r {path} removes it",
                path = as_path(path)
            )),
            Error::Store(kvdepot_store::Error::Config { field, value, .. })
                if field == "pipeline" && Path::new(value.trim_matches('"')).exists() =>
            {
                let path = value.trim_matches('"');
                Some(format!(
                    "a pipeline consists of tiers, and the path is an option: Posix -o \
                     posix.path={path}"
                ))
            }
            Error::Host(kvdepot_host::Error::NotPrivate { path, .. }) => Some(format!(
                "kvdepot keeps its files in directories of mode 700: {}",
                path.display()
            )),
            _ => None,
        }
    }
}

/// A path as all commands take it: a name without a slash may be a pipeline's.
fn as_path(path: &Path) -> String {
    let here = path.components().count() == 1 && !path.is_absolute();
    let begin = if here { "./" } else { "" };
    format!("{begin}{}", path.display())
}
