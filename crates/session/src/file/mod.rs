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
//!
//! # Examples
//! A [`SessionWriter`] takes parts whose size is not known yet:
//!
//! ```
//! use kvdepot_session::Reason;
//! use kvdepot_session::file::{FileCheckpoint, FileMover, FileOptions, Member, SessionWriter};
//! use kvdepot_store::{Buffer, NamespaceSpec};
//!
//! # let dir = tempfile::tempdir()?;
//! let mover = FileMover::new(FileOptions::default())?;
//! let namespace = NamespaceSpec {
//!     model: "m".into(),
//!     dtype: "f16".into(),
//!     block_tokens: 256,
//!     ..NamespaceSpec::default()
//! };
//! let checkpoint = FileCheckpoint {
//!     namespace: &namespace,
//!     tokens: &[1, 2, 3],
//!     text: b"",
//!     reason: Reason::Asked,
//!     context_tokens: 4096,
//!     note: "",
//!     created: 1_700_000_000,
//! };
//! let path = dir.path().join("conversation.kvs");
//! let mut writer = SessionWriter::new(&mover, &path, &checkpoint, None)?;
//! writer.put(Member::Piece, &[Buffer::from_vec(vec![7; 300])])?;
//! writer.begin(Member::Object("logits".into()))?;
//! for _ in 0..10 {
//!     writer.write(&[1; 100])?; // chunks of a serializer
//! }
//! assert_eq!(writer.end()?, 1000);
//! assert_eq!(writer.finish()?.cache_write_tokens, 3);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

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
