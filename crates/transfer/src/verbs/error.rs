//! What can go wrong while devices are set up, and why a slice was not carried.

use std::ffi::c_int;
use std::io;

/// An error of setting something up or of using it wrongly. Nothing was moved by the call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// There is no libibverbs here.
    #[error("RDMA needs rdma-core's libibverbs (Debian: libibverbs1 and ibverbs-providers): {0}")]
    Library(#[source] kvdepot_media::Error),
    /// There is no device of the name.
    #[error("no RDMA device {name}; available: {}", there_are(found))]
    NoDevice {
        /// The name that was asked for.
        name: String,
        /// The names of those that are there.
        found: Vec<String>,
    },
    /// A device has no port, or no address on it, that can be used.
    #[error("RDMA device {device} has no {what}")]
    Unusable {
        /// The device.
        device: String,
        /// What it lacks.
        what: String,
    },
    /// The library or the system refused something.
    #[error("cannot {operation} {subject}: {source}")]
    Os {
        /// What was attempted.
        operation: &'static str,
        /// The device.
        subject: String,
        /// What it answered.
        source: io::Error,
    },
    /// Memory that no device can be given for as long as it likes: a file on a DAX file system,
    /// whose blocks the file system must be free to move.
    #[error(
        "cannot register {len} bytes at {addr:#x} with {device}: this memory does not support RDMA \
         (for example, a file on a DAX file system); use the DAX device (/dev/daxX.Y) or other \
         memory"
    )]
    Bounce {
        /// The device.
        device: String,
        /// The first byte.
        addr: usize,
        /// How many there are.
        len: usize,
    },
    /// More memory would be locked than the process may have.
    #[error(
        "cannot register {len} bytes at {addr:#x} with {device}: out of memory, or over the \
         limit of locked memory (ulimit -l: {limit})"
    )]
    NoMemory {
        /// The device.
        device: String,
        /// The first byte.
        addr: usize,
        /// How many there are.
        len: usize,
        /// The limit of locked memory, in bytes.
        limit: String,
    },
    /// Bytes that are not in this process's memory.
    #[error("buffer at {addr:#x} is not host memory and cannot be registered")]
    Elsewhere {
        /// Their address or offset there.
        addr: usize,
    },
    /// Memory that may not be written was to be.
    #[error("memory at {addr:#x} is read-only")]
    ReadOnly {
        /// The first byte.
        addr: usize,
    },
    /// A range reaches beyond the end of its region.
    #[error("range of {len} bytes at offset {offset} exceeds the end at {end}")]
    OutOfBounds {
        /// The first byte of the range.
        offset: usize,
        /// Its length.
        len: usize,
        /// The length of the region.
        end: usize,
    },
    /// Memory that another device knows than the one that is to carry it.
    #[error(
        "memory that is registered with the RDMA device {region} cannot be used by the RDMA device \
         {device}"
    )]
    OtherDevice {
        /// The device that knows it.
        region: String,
        /// The one that was asked.
        device: String,
    },
    /// A number that cannot be used.
    #[error("{field}: {value} is not allowed; allowed: {allowed}")]
    Invalid {
        /// Its name.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is allowed.
        allowed: String,
    },
    /// There is no room for another slice until some have been reported.
    #[error(
        "{waiting} RDMA requests are queued; allowed: at most {room}, the size of the send queue"
    )]
    Full {
        /// How many wait.
        waiting: usize,
        /// How many may.
        room: usize,
    },
    /// The queue pair was shut, or a work request of it has failed: it carries nothing any more.
    #[error("the queue pair is closed")]
    Shut,
    /// This process was forked from the one that opened the device.
    #[error("RDMA device {device} was opened before a fork; open the device again in this process")]
    Forked {
        /// The device.
        device: String,
    },
}

fn there_are(found: &[String]) -> String {
    match found {
        [] => "none".to_owned(),
        _ => found.join(", "),
    }
}

/// The result of this module's operations.
pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The error of a function that says by its answer why it failed: the system's error number,
    /// or a negative number, with the error number in its usual place.
    pub(super) fn answered(operation: &'static str, subject: &str, answer: c_int) -> Self {
        let source = match answer {
            errno @ 1.. => io::Error::from_raw_os_error(errno),
            _ => io::Error::last_os_error(),
        };
        Self::Os {
            operation,
            subject: subject.to_owned(),
            source,
        }
    }

    /// The error of a function that has just returned nothing.
    pub(super) fn last(operation: &'static str, subject: &str) -> Self {
        Self::answered(operation, subject, 0)
    }

    /// Turns a function's answer into an error.
    pub(super) fn check(operation: &'static str, subject: &str, answer: c_int) -> Result<()> {
        match answer {
            0 => Ok(()),
            answer => Err(Self::answered(operation, subject, answer)),
        }
    }

    /// A number that cannot be used.
    pub(super) fn invalid(field: &'static str, value: u64, allowed: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            value,
            allowed: allowed.into(),
        }
    }
}

/// Why a slice was not carried, as far as its device knows. What is then in the memory it was to
/// write, here or at the peer, is unspecified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// The peer's device refused: no such key, another range than the key is for, or no right.
    #[error("remote access error (status 10): wrong key, range or permission")]
    RemoteAccess,
    /// The peer's device could not make sense of the request, or does not serve its kind.
    #[error("remote invalid request (status 9)")]
    RemoteRequest,
    /// The peer's device failed while it carried the request.
    #[error("the peer's RDMA device could not complete the operation (status 11)")]
    RemoteOperation,
    /// The peer has not answered, however often its device was asked.
    #[error("peer not responding (status {status})")]
    Unreachable {
        /// 12 where nothing came, 13 where it was never ready.
        status: c_int,
    },
    /// The memory on this side is none that the device knows, or not for this use.
    #[error("the RDMA device cannot access the registered memory of this host (status {status})")]
    LocalMemory {
        /// 1 for a length, 4 for a key, a range or a right, 8 for a right.
        status: c_int,
    },
    /// Something before it has failed, so it was not tried, or not to the end.
    #[error("RDMA operation cancelled after an earlier failure of the connection (status 5)")]
    Flushed,
    /// The device says something else.
    #[error("RDMA device error (status {status}, vendor code {vendor:#x})")]
    Device {
        /// `enum ibv_wc_status`.
        status: c_int,
        /// What the device's documentation explains.
        vendor: u32,
    },
    /// It had not completed at the deadline.
    #[error("the RDMA transfer timed out")]
    Deadline,
    /// The queue pair was shut before it had completed.
    #[error("the queue pair was closed before the transfer ended")]
    Shut,
}

impl Failure {
    /// What a completion's status means; nothing for a success.
    pub(super) fn of_status(status: c_int, vendor: u32) -> Option<Self> {
        match status {
            0 => None,
            1 | 4 | 8 => Some(Self::LocalMemory { status }),
            5 => Some(Self::Flushed),
            9 => Some(Self::RemoteRequest),
            10 => Some(Self::RemoteAccess),
            11 => Some(Self::RemoteOperation),
            12 | 13 => Some(Self::Unreachable { status }),
            _ => Some(Self::Device { status, vendor }),
        }
    }
}
