//! The boundary: what a function answers, and that no panic crosses it.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvdepot_session::Error as SessionError;
use kvdepot_session::policy::Error as PolicyError;
use kvdepot_store::Error as StoreError;

/// Longest text of a value in a message.
const SHOWN_MAX: usize = 80;

/// `kvd_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Status {
    /// It worked.
    Ok = 0,
    /// An option of a depot does not exist, or cannot have that value.
    Config = 1,
    /// An argument is wrong; no byte has moved.
    Input = 2,
    /// Another process owns the arena.
    Locked = 3,
    /// No room, and nothing left to evict.
    Full = 4,
    /// The medium holds something that is no sound arena, or a file is not what it should be.
    Corrupt = 5,
    /// The depot was closed, or belongs to the process that this one was forked from.
    Closed = 6,
    /// The time given is over; what was waited for goes on.
    Timeout = 7,
    /// No session has this name.
    Unknown = 8,
    /// A part of a session was not stored: there is no such session.
    NotStored = 9,
    /// A part of a session is not there, or does not verify.
    NotWhole = 10,
    /// The caller's function has ended the call.
    Aborted = 11,
    /// The system, a medium or another process has refused.
    System = 12,
    /// A fault of kvdepot's own.
    Bug = 13,
}

impl Status {
    /// All of them, in order.
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

/// Why a call has failed.
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

    /// An argument that is not allowed.
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

    /// An option that is not allowed.
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

    /// A handle whose process this one is a fork of.
    pub(crate) fn forked() -> Failure {
        let word = ": it belongs to the process this one was forked from; open it here";
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

/// A value as a message shows it.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

thread_local! {
    /// What the last call of this thread that has failed says. A thread's own, so that nobody has
    /// to free it, and no other thread's failure takes its place.
    static LAST: RefCell<CString> = RefCell::default();
}

fn note(message: String) {
    let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
    // While a thread ends there is nobody who could still ask.
    let _ended = LAST.try_with(|last| last.replace(text));
}

fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// Carries out a call. What panics is a fault of kvdepot's own, and answered as one.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    // What a panic leaves half done stays behind locks and handles that say so themselves.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(failure)) => {
            note(failure.message);
            failure.status
        }
        Err(panic) => {
            note(format!("a fault of kvdepot: {}", said(&*panic)));
            Status::Bug
        }
    }
}

/// Functions that C calls: their bodies answer with a result, and none lets a panic out.
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

/// The version of the interface: its major number above the lower 16 bits, which are the minor one.
pub const VERSION: u32 = 1 << 16;

/// `kvd_version`.
// SAFETY: the prefix is kvdepot's, and the header declares each name once.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_version() -> u32 {
    VERSION
}

/// `kvd_last_error`.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_last_error() -> *const c_char {
    let said = LAST.try_with(|last| last.borrow().as_ptr());
    said.unwrap_or(c"".as_ptr())
}

/// `kvd_status_name`. Any number may come.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_status_name(status: i32) -> *const c_char {
    let known = Status::ALL.into_iter().find(|one| *one as i32 == status);
    known.map_or(c"no status of kvdepot", Status::name).as_ptr()
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
        assert_eq!(last(), "a fault of kvdepot: on purpose");
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
