//! A session as one file: saved from memory in one pass, and brought back into it, verified.
//!
//! `format` has the bytes, `about` what a file says of itself; `mover` is who moves bytes, `cut`
//! what of a member moves at once, `temporary` how a file comes to its name. [`SessionWriter`] and
//! [`save_file`] write, [`SessionFile`] reads; [`SessionFiles`] is a
//! directory of them. A file has all of its session: nothing is shared with
//! others, and no save writes only what is new.

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
