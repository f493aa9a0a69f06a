//! Session files: one file per session, written from memory in one pass, and verified when it is
//! read.
//!
//! * [`SessionFiles`] is a directory of session files with lookups, a capacity and eviction.
//!   Several processes may share it.
//! * [`SessionFile`] reads one file. [`save_file`] and [`SessionWriter`] write one.
//! * [`FileMover`] has the threads that move the bytes.
//!
//! A file contains its whole session. It shares no parts with other sessions, and each save writes
//! all of them.

mod about;
mod checkpoint;
mod cut;
mod format;
mod mover;
mod read;
mod store;
mod temporary;
mod whole;
mod write;

pub use about::About;
pub use checkpoint::{FileCheckpoint, FileSaved, Member};
pub(crate) use format::MAGIC;
pub use mover::{FileMover, FileOptions};
pub(crate) use read::open_file;
pub use read::{SessionFile, is_session_file};
pub use store::{FilesSpec, OpenedFile, SessionFiles, files_of};
pub(crate) use temporary::replace;
pub use whole::save_file;
pub use write::SessionWriter;
