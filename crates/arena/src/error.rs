//! What can go wrong, split by who can mend it.

use std::path::PathBuf;

/// Errors of the store. A miss is never one: reads answer a reason per key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration names something that does not exist or cannot be.
    #[error("{field}: {value} is not allowed; allowed: {allowed}")]
    Config {
        /// The option, with its section: `dax.capacity`.
        field: String,
        /// What was given.
        value: String,
        /// What would be accepted, or what to do.
        allowed: String,
    },
    /// An argument of a call is wrong; no byte has moved.
    #[error("{field}: {value} is not allowed; allowed: {allowed}")]
    Input {
        /// The argument.
        field: String,
        /// What was given.
        value: String,
        /// What would be accepted.
        allowed: String,
    },
    /// Another process owns the arena.
    #[error("{path} is in use by {by}", path = path.display(), by = owner(*pid, host, *waited_s))]
    Locked {
        /// The arena.
        path: PathBuf,
        /// The owner's process id, 0 when it has not written its name yet.
        pid: u32,
        /// The owner's host.
        host: String,
        /// Seconds waited.
        waited_s: f64,
    },
    /// A device could not be emptied.
    #[error(
        "{path} takes writes again: {pinned} of its blocks were pinned and {reserved} being \
         written for {waited_s} s; unpin, commit or abort them, or wait longer",
        path = path.display()
    )]
    Busy {
        /// The device.
        path: PathBuf,
        /// Blocks that somebody has pinned.
        pinned: u64,
        /// Blocks that somebody is writing.
        reserved: u64,
        /// Seconds waited since the last block had left.
        waited_s: f64,
    },
    /// No room for a reservation.
    #[error("tier {tier} has no room for {requested} bytes: {reason}")]
    Full {
        /// The tier's name.
        tier: &'static str,
        /// Bytes asked for.
        requested: u64,
        /// What stands in the way, with its numbers.
        reason: String,
    },
    /// The medium holds something that is not a sound arena.
    #[error("{path}: {reason}", path = path.display())]
    Corrupt {
        /// The arena.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The depot was closed, or belongs to the process this one was forked from.
    #[error("{}", closed(.0))]
    Closed(&'static str),
    /// The time given to wait is over; the task goes on.
    #[error("{what} did not end within {seconds} s")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long.
        seconds: f64,
    },
    /// A tier did not answer in time: what was to be changed there may be as it was.
    #[error("tier {tier} does not answer; try again when it does")]
    Silent {
        /// The tier's name.
        tier: &'static str,
    },
    /// A signal ended the wait for another process: for its answer, and what was asked may happen,
    /// or for an arena.
    #[error("the call was interrupted")]
    Interrupted,
    /// The owner's process answered something else than the protocol allows, or went away.
    #[error("owner at {socket}: {reason}")]
    Peer {
        /// The socket.
        socket: String,
        /// What happened.
        reason: String,
    },
    /// The operating system or the medium refused.
    #[error(transparent)]
    Media(#[from] kvdepot_media::Error),
    /// The operating system refused a lock, a socket or a descriptor.
    #[error(transparent)]
    Host(#[from] kvdepot_host::Error),
    /// Reading a configuration file, or another plain file operation, failed.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's word.
        source: std::io::Error,
    },
}

/// Who has an arena, and what to do about it.
fn owner(pid: u32, host: &str, waited_s: f64) -> String {
    if pid == std::process::id() && host == kvdepot_host::peer::hostname() {
        return format!(
            "another depot of this process ({pid} on host {host}): use that one, or close it first \
             (without a close it stays open as long as one of its namespaces is kept)"
        );
    }
    format!(
        "process {pid} on host {host}: close it there, or wait longer than lock_wait = {waited_s} s"
    )
}

/// What is closed: the depot, with what more there is to say behind a colon, or something else.
fn closed(word: &str) -> String {
    match word.is_empty() || word.starts_with(':') {
        true => format!("the depot is closed{word}"),
        false => word.to_owned(),
    }
}

impl Error {
    /// A wrong argument.
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

    /// A wrong option.
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
