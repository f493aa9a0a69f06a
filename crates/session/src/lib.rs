//! Sessions: checkpoints of whole conversations, for engines that keep one state and go on with it.
//!
//! A state that grows by appending is cut into *pieces*, each the rows of a fixed run of tokens, as
//! ordinary blocks of a depot. A piece's key is the chain of all tokens up to its end, so that two
//! conversations with a common beginning share it, and saving what has come since writes just that.
//! Small parts that do not grow so (logits, a window, a recurrent state) are *objects* of one
//! checkpoint. A *manifest* names all of them, and is committed last: a session is there whole, or
//! not at all.
//!
//! `chain` makes keys, `manifest` is the format, `index` finds the longest usable beginning;
//! [`Sessions`] is the public face, with its verbs in `save`, `restore`, `upkeep` and `trim`;
//! `archive` is one session as one file. [`ds4`] is that engine's own format, and `from_ds4` the
//! way in and out. [`policy`] says when to save, and what goes.

#![forbid(unsafe_code)]

mod archive;
pub mod background;
mod chain;
mod counted;
pub mod ds4;
mod error;
mod feed;
pub mod file;
mod from_ds4;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod index;
pub mod llama;
mod manifest;
mod parts;

pub mod policy;
mod restore;
mod save;
mod serialized;
mod store;
mod stream;
mod sums;
mod trim;
mod upkeep;
mod usage;

pub use archive::{Imported, export, import, look};
pub use error::Error;
pub use from_ds4::{export_ds4, import_ds4};
pub use index::Id;
pub use manifest::{Manifest, Named, Reason, Space};
pub use restore::{Found, Restored};
pub use save::{Checkpoint, Rows, Saved};
pub use serialized::Sink;
pub use store::{GROUP, PIECE_TOKENS_MAX, Sessions, Spec};
pub use stream::{Ending, Stream};
pub use trim::Trimmed;
pub use upkeep::{Checked, Listed};
pub use usage::Usage;
