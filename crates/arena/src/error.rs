//! What can go wrong, split by who can mend it.

use std::path::PathBuf;

/// In place of a value that is missing.
const MISSING: &str = "missing";

/// Errors of the store. A miss is not an error: reads return a reason per key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option has a value that does not exist or is not possible.
    #[error("{}", not_allowed(field, value, allowed))]
    Config {
        /// Name of the option, with its section: `dax.capacity`.
        field: String,
        /// The configured value.
        value: String,
        /// Description of the allowed values, or of a remedy.
        allowed: String,
    },
    /// An argument of a call is not allowed; no byte has moved.
    #[error("{}", not_allowed(field, value, allowed))]
    Input {
        /// Name of the argument.
        field: String,
        /// The value in the call.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// Another process owns the arena.
    #[error(
        "{path} is in use by {by}", path = path.display(), by = owner(*pid, host, *lock_wait_s)
    )]
    Locked {
        /// Path of the arena.
        path: PathBuf,
        /// Process ID of the owner; 0 if the owner has not written it yet.
        pid: u32,
        /// Host name of the owner.
        host: String,
        /// The setting `lock_wait`, in seconds.
        lock_wait_s: f64,
    },
    /// A device could not be drained.
    #[error(
        "cannot drain {path}: after {waited_s} s, {pinned} blocks are pinned and {reserved} blocks \
         are being written; release the blocks and drain again (until then, the device accepts \
         writes)",
        path = path.display()
    )]
    Busy {
        /// Path of the device.
        path: PathBuf,
        /// Number of pinned blocks.
        pinned: u64,
        /// Number of blocks that are being written.
        reserved: u64,
        /// Time waited since the last block was moved or evicted, in seconds.
        waited_s: f64,
    },
    /// A tier has no space for a reservation.
    #[error("tier {tier} has no space for {requested} bytes: {reason}")]
    Full {
        /// Name of the tier.
        tier: &'static str,
        /// Requested size in bytes.
        requested: u64,
        /// Reason for the lack of space, with its numbers.
        reason: String,
    },
    /// The medium does not contain a valid arena.
    #[error("{path}: {reason}", path = path.display())]
    Corrupt {
        /// Path of the arena.
        path: PathBuf,
        /// Description of the problem and of a remedy.
        reason: String,
    },
    /// The depot is closed, or belongs to the process from which this one was forked.
    #[error("{}", closed(.0))]
    Closed(&'static str),
    /// A wait timed out; the task continues.
    #[error("{what} timed out after {seconds} s")]
    Timeout {
        /// Name of the operation that timed out.
        what: &'static str,
        /// Time limit in seconds.
        seconds: f64,
    },
    /// A tier timed out. The requested change may or may not have happened.
    #[error("tier {tier} is not responding; try again later")]
    Silent {
        /// Name of the tier.
        tier: &'static str,
    },
    /// A signal ended the wait for a response of another process or for an arena. A requested
    /// operation may still happen.
    #[error("a signal interrupted the wait; kvdepot may still complete the call")]
    Interrupted,
    /// The server sent an invalid message or closed the connection.
    #[error("server at {socket}: {reason}")]
    Peer {
        /// Path of the socket.
        socket: String,
        /// Description of the event.
        reason: String,
    },
    /// An operation on a medium failed.
    #[error(transparent)]
    Media(#[from] kvdepot_media::Error),
    /// The system failed to provide a lock, a socket or a descriptor.
    #[error(transparent)]
    Host(#[from] kvdepot_host::Error),
    /// A file operation failed, for example reading a configuration file.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Who has an arena, and what to do about it.
fn owner(pid: u32, host: &str, lock_wait_s: f64) -> String {
    if pid == std::process::id() && host == kvdepot_host::peer::hostname() {
        return format!(
            "another depot of this process ({pid} on host {host}): use that depot, or close that \
             depot first"
        );
    }
    format!(
        "process {pid} on host {host}: close the depot there, or increase lock_wait (now \
         {lock_wait_s} s)"
    )
}

/// What is closed: the depot, with what more there is to say behind a colon, or something else.
fn closed(word: &str) -> String {
    match word.is_empty() || word.starts_with(':') {
        true => format!("the depot is closed{word}"),
        false => word.to_owned(),
    }
}

/// The text of a value that is not allowed, or that is missing.
fn not_allowed(field: &str, value: &str, allowed: &str) -> String {
    match value {
        MISSING => format!("{field} is required; allowed: {allowed}"),
        _ => format!("{field}: {value} is not allowed; allowed: {allowed}"),
    }
}

impl Error {
    /// Creates an error for an argument that is not allowed.
    pub fn input(
        field: impl Into<String>,
        value: impl std::fmt::Display,
        allowed: impl Into<String>,
    ) -> Error {
        Error::Input {
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }

    /// Creates an error for an option that is not allowed.
    pub fn config(
        field: impl Into<String>,
        value: impl std::fmt::Display,
        allowed: impl Into<String>,
    ) -> Error {
        Error::Config {
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }
}
