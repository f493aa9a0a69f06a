//! A session as one file: saved from memory in one pass, and brought back into it, verified.
//!
//! `format` has the bytes, `about` what a file says of itself; `mover` is who moves bytes, `cut`
//! what of a member moves at once, `temporary` how a file comes to its name. [`SessionWriter`] and
//! [`save_file`] write, [`SessionFile`] reads. A file has all of its session: nothing is shared with
//! others, and no save writes only what is new.

mod about;
mod cut;
mod format;
mod mover;
mod read;
mod temporary;
mod write;

pub use about::About;
pub(crate) use format::{MAGIC, VERSION};
pub use mover::{FileMover, FileOptions};
pub use read::SessionFile;
pub use write::{FileCheckpoint, FileSaved, Member, SessionWriter, save_file};
