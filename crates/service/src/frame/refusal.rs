//! Errors as answers, told apart by kinds where a caller treats them differently.

use kvdepot_arena::Error;
use serde::{Deserialize, Serialize};

/// An error that travels.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Refusal {
    Other(String),
    Input {
        field: String,
        value: String,
        allowed: String,
    },
    Closed,
    Full {
        tier: String,
        requested: u64,
        reason: String,
    },
    Config {
        field: String,
        value: String,
        allowed: String,
    },
    Busy {
        path: String,
        pinned: u64,
        reserved: u64,
        waited_s: f64,
    },
}

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Refusal {
        match error {
            Error::Input {
                field,
                value,
                allowed,
            } => Refusal::Input {
                field: field.clone(),
                value: value.clone(),
                allowed: allowed.clone(),
            },
            Error::Closed(_) => Refusal::Closed,
            Error::Full {
                tier,
                requested,
                reason,
            } => Refusal::Full {
                tier: (*tier).to_owned(),
                requested: *requested,
                reason: reason.clone(),
            },
            Error::Config {
                field,
                value,
                allowed,
            } => Refusal::Config {
                field: field.clone(),
                value: value.clone(),
                allowed: allowed.clone(),
            },
            Error::Busy {
                path,
                pinned,
                reserved,
                waited_s,
            } => Refusal::Busy {
                path: path.to_string_lossy().into_owned(),
                pinned: *pinned,
                reserved: *reserved,
                waited_s: *waited_s,
            },
            other => Refusal::Other(other.to_string()),
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        match refusal {
            Refusal::Other(reason) => broken(reason),
            Refusal::Input {
                field,
                value,
                allowed,
            } => Error::input(field, value, allowed),
            Refusal::Closed => Error::Closed(": its server is closing"),
            Refusal::Full {
                tier,
                requested,
                reason,
            } => Error::Full {
                tier: tier_name(&tier),
                requested,
                reason,
            },
            Refusal::Config {
                field,
                value,
                allowed,
            } => Error::config(field, value, allowed),
            Refusal::Busy {
                path,
                pinned,
                reserved,
                waited_s,
            } => Error::Busy {
                path: path.into(),
                pinned,
                reserved,
                waited_s,
            },
        }
    }
}

/// Of a peer that says what cannot be, or nothing more; whose it is knows whoever has its socket.
pub(crate) fn broken(what: impl Into<String>) -> Error {
    Error::Peer {
        socket: String::new(),
        reason: what.into(),
    }
}

/// The name of a tier as this program has it.
pub(crate) fn tier_name(name: &str) -> &'static str {
    let known = ["Cache", "Dax", "Nvme"];
    known
        .into_iter()
        .find(|known| *known == name)
        .unwrap_or("tier")
}
