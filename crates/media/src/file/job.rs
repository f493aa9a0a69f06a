//! What is to be done with a file, whoever does it.

use crate::carrier::Receipt;
use crate::error::Failure;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

/// A file, as those see it who read and write it.
pub(super) trait Performs: Debug + Send + Sync {
    /// Its descriptor.
    fn fd(&self) -> io::Result<BorrowedFd<'_>>;

    /// Its registration where 3FS has it.
    fn enlisted(&self) -> &Enlisted;

    /// Does what a receipt asks for, in this thread; how many bytes, fewer at the end of the file.
    fn perform(&self, receipt: &Receipt) -> Result<usize, Failure>;
}

/// A file's registration with a 3FS, which goes before it is closed; or the system's error number.
#[derive(Debug, Default)]
pub(super) struct Enlisted(pub(super) OnceLock<Result<(), i32>>);

/// A file, and what of it.
pub(super) type Job = (Arc<dyn Performs>, Receipt);
