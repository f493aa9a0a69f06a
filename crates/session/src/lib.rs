//! Session store: saved states of conversations, for engines that keep one state and extend it.
//!
//! A *session* is the saved state of one conversation in a [depot](kvdepot_store::Depot): its
//! tokens, and the KV data that an engine needs to continue. All of its parts are ordinary blocks
//! of the depot:
//!
//! | part | content |
//! | --- | --- |
//! | piece | rows of a fixed number of tokens; the last piece may be shorter |
//! | object | a part that does not grow with the tokens, for example logits or a recurrent state |
//! | manifest | list of all parts of one session |
//!
//! The key of a piece is a hash chain over all tokens up to its end. Sessions with a common prefix
//! therefore share pieces, and a save writes only new parts. The manifest is stored last, so that a
//! session is complete or absent.
//!
//! Entry points:
//!
//! * [`Sessions`] saves, finds, restores and removes sessions of a depot. [`Stream`] saves a
//!   session of unknown length.
//! * [`background::Saver`] saves in the background, while the engine decodes.
//! * [`file::SessionFiles`] is a directory with one file per session, and [`file::SessionFile`] one
//!   such file. [`export`] and [`import`] copy between a depot and a file.
//! * [`policy::Policy`] decides when to save, and [`policy::Catalogue`] what to delete.
//! * [`ds4`] and [`llama`] read the formats of two engines. [`import_ds4`] and [`export_ds4`]
//!   convert files of ds4.
//!
//! # Examples
//! ```
//! use kvdepot_session::{Checkpoint, Reason, Sessions, Spec};
//! use kvdepot_store::{BlockBuffers, Buffer, Config, Depot, NamespaceSpec};
//!
//! # let dir = tempfile::tempdir()?;
//! let posix = serde_json::json!({"path": dir.path(), "capacity": "64MiB"});
//! let config = Config::new("Posix", &serde_json::json!({"socket": "off", "posix": posix}))?;
//! let spec = Spec::new(NamespaceSpec {
//!     model: "m".into(),
//!     dtype: "f16".into(),
//!     block_tokens: 256, // tokens per piece
//!     ..NamespaceSpec::default()
//! });
//! let sessions = Sessions::open(Depot::open(&config)?, &spec)?;
//!
//! let tokens: Vec<u32> = (0..1000).collect();
//! let checkpoint = Checkpoint {
//!     tokens: &tokens,
//!     text: b"",
//!     reason: Reason::Asked,
//!     context_tokens: 4096,
//!     objects: Vec::new(),
//!     note: String::new(),
//!     created: 1_700_000_000,
//!     exact: false,
//! };
//! // 100 bytes of rows per token.
//! let saved = sessions.save(checkpoint, Box::new(|runs| {
//!     let rows = runs.iter().map(|run| Buffer::from_vec(vec![7; run.len() * 100]));
//!     Ok(BlockBuffers::whole(rows))
//! }))?;
//! assert_eq!((saved.cached_tokens, saved.cache_write_tokens), (0, 1000));
//!
//! let prompt: Vec<u32> = (0..1007).collect();
//! let found = sessions.lookup(&prompt, 1)?.remove(0);
//! let pieces = found.pieces.iter().map(|(_, bytes)| Buffer::from_vec(vec![0; *bytes as usize]));
//! let pieces: Vec<Buffer> = pieces.collect();
//! let rows = BlockBuffers::whole(pieces.clone());
//! let restored = sessions.restore(&found, rows, BlockBuffers::default())?;
//! assert!(restored.whole && restored.cached_tokens == 1000);
//! assert_eq!(pieces[3].to_vec(), [7; 232 * 100]);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

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
