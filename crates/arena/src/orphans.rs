//! Processes that worked for an owner that is gone: while one of them may still write, nothing is
//! stored on the medium. A stopped one can hold that up for as long as it likes, so somebody says
//! who it is: once in the log, and in statistics and errors for as long as it lasts.

use std::sync::atomic::{AtomicBool, AtomicU32};

use parking_lot::Mutex;

#[derive(Default)]
pub(crate) struct Orphans {
    /// Whether there are none, for good.
    pub(crate) none: AtomicBool,
    /// Whether somebody was kept from writing.
    pub(crate) noticed: AtomicBool,
    /// Whether the log has named them.
    pub(crate) named: AtomicBool,
    /// One of them; 0 as long as none is known.
    pub(crate) first: AtomicU32,
    pub(crate) pids: Mutex<Vec<u32>>,
}
