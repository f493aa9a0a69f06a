//! What is to be a session's file, and what became of it.

use kvdepot_store::{Key, NamespaceSpec};

use super::about::About;
use crate::error::Error;
use crate::index::Id;
use crate::manifest::{Reason, Space};
use crate::store::{PIECE_TOKENS_MAX, PIECES};

/// A session that is to be a file.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct FileCheckpoint<'a> {
    /// What has to be the same for it to be used again. `block_tokens` are those of a piece; its
    /// `group` is not used.
    pub namespace: &'a NamespaceSpec,
    /// Its tokens, all of them.
    pub tokens: &'a [u32],
    /// What they were rendered from, where the engine knows it.
    pub text: &'a [u8],
    /// Why it is made.
    pub reason: Reason,
    /// Tokens that the engine has room for.
    pub context_tokens: u32,
    /// What the engine, or who it is for, notes.
    pub note: &'a str,
    /// When it is made, in Unix seconds.
    pub created: u64,
}

/// What became of a session that was saved as a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSaved {
    /// The session's name.
    pub id: Id,
    /// Tokens whose rows were there already: none, a file has all of its session.
    pub cached_tokens: usize,
    /// Tokens whose rows were written: all.
    pub cache_write_tokens: usize,
    /// Bytes of the file.
    pub bytes_written: u64,
}

/// What comes next into a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a session has these")]
pub enum Member {
    /// The rows of the next `block_tokens` tokens.
    Piece,
    /// A part that does not grow with the tokens, or all of a state that is not cut: by its name.
    Object(String),
}

impl FileCheckpoint<'_> {
    pub(super) fn about(&self) -> Result<About, Error> {
        let piece_tokens = u32::try_from(self.namespace.block_tokens).ok();
        let piece_tokens = piece_tokens.filter(|tokens| (1..=PIECE_TOKENS_MAX).contains(tokens));
        let piece_tokens = piece_tokens.ok_or_else(|| {
            let allowed = format!("tokens of a piece, 1 to {PIECE_TOKENS_MAX}");
            Error::input("block_tokens", self.namespace.block_tokens, allowed)
        })?;
        if self.tokens.is_empty() {
            return Err(Error::input("tokens", "none", "at least one"));
        }
        Ok(About {
            namespace: namespace_of(self.namespace)?,
            space: Space::of(self.namespace),
            created: self.created,
            reason: self.reason,
            context_tokens: self.context_tokens,
            piece_tokens,
            tokens: self.tokens.to_vec(),
            text: self.text.to_vec(),
            piece_bytes: Vec::new(),
            exact: Vec::new(),
            objects: Vec::new(),
            note: self.note.to_owned(),
        })
    }
}

/// The namespace that a depot's pieces would have.
pub(super) fn namespace_of(spec: &NamespaceSpec) -> Result<[u8; 16], Error> {
    let spec = NamespaceSpec {
        group: Some(PIECES.to_owned()),
        ..spec.clone()
    };
    Ok(spec.id()?.0)
}

/// A session is named by what is drawn for its file.
pub(super) fn id_of(key: &[u8; 32]) -> Id {
    Id::of(&Key(*key))
}
