//! The boundary to C: status codes, error messages, and a guard against panics.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvdepot_session::Error as SessionError;
use kvdepot_session::policy::Error as PolicyError;
use kvdepot_store::Error as StoreError;

/// Most characters of a value in a message.
const SHOWN_MAX: usize = 80;

/// Implements `kvd_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Status {
    /// Success.
    Ok = 0,
    /// An option is unknown, or its value is not allowed.
    Config = 1,
    /// An argument is not allowed; no byte was copied.
    Input = 2,
    /// Another process owns the arena.
    Locked = 3,
    /// Not enough space, and nothing left to evict.
    Full = 4,
    /// A medium contains no valid arena, or a file does not have the expected content.
    Corrupt = 5,
    /// The depot or engine was closed, or the handle belongs to the parent of a forked process.
    Closed = 6,
    /// The time-out expired; the operation continues.
    Timeout = 7,
    /// No session or checkpoint has this ID.
    Unknown = 8,
    /// A part of a session was not stored; the session does not exist.
    NotStored = 9,
    /// A part of a session is missing or failed verification.
    NotWhole = 10,
    /// The caller's callback ended the call.
    Aborted = 11,
    /// Error of the operating system, a medium or another process.
    System = 12,
    /// Internal error of kvdepot.
    Bug = 13,
}

impl Status {
    /// All statuses, in the order of their numbers.
    pub const ALL: [Status; 14] = [
        Status::Ok,
        Status::Config,
        Status::Input,
        Status::Locked,
        Status::Full,
        Status::Corrupt,
        Status::Closed,
        Status::Timeout,
        Status::Unknown,
        Status::NotStored,
        Status::NotWhole,
        Status::Aborted,
        Status::System,
        Status::Bug,
    ];

    fn name(self) -> &'static CStr {
        match self {
            Status::Ok => c"ok",
            Status::Config => c"config",
            Status::Input => c"input",
            Status::Locked => c"locked",
            Status::Full => c"full",
            Status::Corrupt => c"corrupt",
            Status::Closed => c"closed",
            Status::Timeout => c"timeout",
            Status::Unknown => c"unknown session",
            Status::NotStored => c"not stored",
            Status::NotWhole => c"not whole",
            Status::Aborted => c"aborted",
            Status::System => c"system",
            Status::Bug => c"bug",
        }
    }
}

/// Status and message of a failed call.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    message: String,
}

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Failure {
        Failure {
            status,
            message: message.into(),
        }
    }

    /// Returns the error of an argument that is not allowed.
    pub(crate) fn input(
        field: impl Into<String>,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> Failure {
        StoreError::Input {
            field: field.into(),
            value: shown(&value.to_string()),
            allowed: allowed.into(),
        }
        .into()
    }

    /// Returns the error of an option that is not allowed.
    pub(crate) fn config(
        field: impl Into<String>,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> Failure {
        StoreError::Config {
            field: field.into(),
            value: shown(&value.to_string()),
            allowed: allowed.into(),
        }
        .into()
    }

    /// Returns the error of a handle that belongs to the parent of this forked process.
    pub(crate) fn forked() -> Failure {
        let word = ": it was opened before this process was forked; open it again in this process";
        StoreError::Closed(word).into()
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        let status = match &error {
            StoreError::Config { .. } => Status::Config,
            StoreError::Input { .. } => Status::Input,
            StoreError::Locked { .. } => Status::Locked,
            StoreError::Full { .. } => Status::Full,
            StoreError::Corrupt { .. } => Status::Corrupt,
            StoreError::Closed(_) => Status::Closed,
            StoreError::Timeout { .. } | StoreError::Busy { .. } => Status::Timeout,
            _ => Status::System,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Failure {
        let status = match &error {
            SessionError::Depot(_) => match error {
                SessionError::Depot(error) => return error.into(),
                _ => Status::Bug,
            },
            SessionError::Input { .. } => Status::Input,
            SessionError::NotStored { .. } => Status::NotStored,
            SessionError::Unknown(_) => Status::Unknown,
            SessionError::Malformed { .. } => Status::Corrupt,
            _ => Status::System,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<PolicyError> for Failure {
    fn from(error: PolicyError) -> Failure {
        Failure::new(Status::Input, error.to_string())
    }
}

/// Shortens a value for a message.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

thread_local! {
    /// Message of the last call of this thread that failed. It is thread-local, so that callers
    /// need not free it and other threads do not replace it.
    static LAST: RefCell<CString> = RefCell::default();
}

fn note(message: String) {
    let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
    // A thread that ends no longer reads the message.
    let _ended = LAST.try_with(|last| last.replace(text));
}

fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// Runs `call` and returns its status. A panic becomes [`Status::Bug`].
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    // Locks and handles protect state that a panic leaves incomplete.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(failure)) => {
            note(failure.message);
            failure.status
        }
        Err(panic) => {
            note(format!("internal error in kvdepot: {}", said(&*panic)));
            Status::Bug
        }
    }
}

/// Defines functions for C. Their bodies return a `Result`, and panics become a status.
macro_rules! exported {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        // SAFETY: the prefix is kvdepot's, and the header declares each name once.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $type),*) -> $crate::guard::Status {
            $crate::guard::guard(|| -> Result<(), $crate::guard::Failure> { $body })
        }
    )*};
}

/// Version of the interface: the major number in the upper 16 bits, the minor one in the lower 16.
pub const VERSION: u32 = 1 << 16;

/// Implements `kvd_version`.
// SAFETY: the prefix is kvdepot's, and the header declares each name once.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_version() -> u32 {
    VERSION
}

/// Implements `kvd_last_error`.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_last_error() -> *const c_char {
    let said = LAST.try_with(|last| last.borrow().as_ptr());
    said.unwrap_or(c"".as_ptr())
}

/// Implements `kvd_status_name`; any number is allowed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_status_name(status: i32) -> *const c_char {
    let known = Status::ALL.into_iter().find(|one| *one as i32 == status);
    known.map_or(c"unknown status", Status::name).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        LAST.with_borrow(|last| last.to_str().unwrap().to_owned())
    }

    #[test]
    fn a_panic_is_an_answer() {
        let status = guard(|| panic!("{}", "on purpose"));
        assert_eq!(status, Status::Bug);
        assert_eq!(last(), "internal error in kvdepot: on purpose");
    }

    #[test]
    fn a_failure_is_one_of_its_thread() {
        let status = guard(|| Err(Failure::input("tokens", "x".repeat(100), "fewer")));
        assert_eq!(status, Status::Input);
        let told = std::thread::spawn(last).join().unwrap();
        assert!(told.is_empty());
        let long = "x".repeat(80);
        assert_eq!(
            last(),
            format!("tokens: {long}… is not allowed; allowed: fewer")
        );
    }

    #[test]
    fn numbers_are_in_their_order() {
        for (at, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(status as usize, at);
        }
    }
}
