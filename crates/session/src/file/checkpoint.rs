//! What is to be a session's file, and what became of it.

use kvdepot_store::{Key, NamespaceSpec};

use super::about::About;
use crate::error::Error;
use crate::index::Id;
use crate::manifest::{Reason, Space};
use crate::store::{PIECE_TOKENS_MAX, PIECES};

/// Description of a session to save as a file.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct FileCheckpoint<'a> {
    /// Model, weights, element types, layout and tokenizer, which must be equal for the session to
    /// be used again. `block_tokens` is the number of tokens per piece. `group` is ignored.
    pub namespace: &'a NamespaceSpec,
    /// All tokens of the conversation; at least one.
    pub tokens: &'a [u32],
    /// Rendered text of the tokens; empty if it is unknown.
    pub text: &'a [u8],
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Size of the engine's context, in tokens.
    pub context_tokens: u32,
    /// Note of the engine or its user.
    pub note: &'a str,
    /// Time of the checkpoint, in Unix seconds.
    pub created: u64,
}

/// Result of a save to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSaved {
    /// ID of the session.
    pub id: Id,
    /// Number of tokens whose rows were already stored; always 0, because a file contains its whole
    /// session.
    pub cached_tokens: usize,
    /// Number of tokens whose rows were written: all tokens.
    pub cache_write_tokens: usize,
    /// Size of the file, in bytes.
    pub bytes_written: u64,
}

/// Next part of a file that is being written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a session has these")]
pub enum Member {
    /// Rows of the next `block_tokens` tokens.
    Piece,
    /// Part with this name that does not grow with the tokens, or a whole state that is not cut.
    Object(String),
}

impl FileCheckpoint<'_> {
    pub(super) fn about(&self) -> Result<About, Error> {
        let piece_tokens = u32::try_from(self.namespace.block_tokens).ok();
        let piece_tokens = piece_tokens.filter(|tokens| (1..=PIECE_TOKENS_MAX).contains(tokens));
        let piece_tokens = piece_tokens.ok_or_else(|| {
            let allowed = format!("1 to {PIECE_TOKENS_MAX} tokens per piece");
            Error::input("block_tokens", self.namespace.block_tokens, allowed)
        })?;
        if self.tokens.is_empty() {
            return Err(Error::input("tokens", "none", "at least one token"));
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
