//! A manifest: what a session is, and which blocks it is made of.
//!
//! The block of a manifest is the eight bytes `kvsessn` and the version, and then the fields of
//! [`Manifest`] in their order, as postcard writes them. Its bytes are under the checksum of a
//! block.

use kvdepot_store::{NamespaceId, NamespaceSpec};
use serde::{Deserialize, Serialize};

use crate::chain::{Cut, Link, bytes_of};
use crate::error::Error;

const MAGIC: &[u8; 7] = b"kvsessn";
const VERSION: u8 = 1;

/// Most objects of a session.
pub(crate) const OBJECTS_MAX: usize = 4096;

/// Most bytes of a piece, or of an object.
pub(crate) const PART_MAX: u64 = 1 << 30;

/// Cause of a checkpoint, with the names that ds4 uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reason {
    /// The prompt was computed without any reused state.
    Cold,
    /// The conversation has grown by the configured number of tokens since the last checkpoint.
    Continued,
    /// Another conversation is about to replace this one in the engine.
    Evict,
    /// The engine is shutting down.
    Shutdown,
    /// A user or program requested the checkpoint.
    Asked,
}

impl Reason {
    /// Returns the name of the reason, for example `"cold"`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reason::Cold => "cold",
            Reason::Continued => "continued",
            Reason::Evict => "evict",
            Reason::Shutdown => "shutdown",
            Reason::Asked => "asked",
        }
    }

    /// Returns the reason that has this name, or `None` if the name is unknown.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Reason> {
        let all = [
            Reason::Cold,
            Reason::Continued,
            Reason::Evict,
            Reason::Shutdown,
            Reason::Asked,
        ];
        all.into_iter().find(|reason| reason.name() == name)
    }
}

/// Object of a checkpoint, with its size and hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Named {
    /// Name that the engine chose.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the content.
    pub sum: [u8; 32],
}

/// Conditions under which a state can be used again: the fields of a [`NamespaceSpec`] without its
/// salt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Space {
    /// Model, like [`NamespaceSpec::model`].
    pub model: String,
    /// Element type, like [`NamespaceSpec::dtype`].
    pub dtype: String,
    /// Weights, like [`NamespaceSpec::weights`].
    pub weights: Option<String>,
    /// Layout, like [`NamespaceSpec::layout`].
    pub layout: Option<String>,
    /// Parallel configuration, like [`NamespaceSpec::world`].
    pub world: Option<String>,
    /// Hash function, like [`NamespaceSpec::hash`].
    pub hash: Option<String>,
    /// True if the namespace has a salt. The salt itself is not stored.
    pub is_salted: bool,
}

impl Space {
    pub(crate) fn of(spec: &NamespaceSpec) -> Space {
        Space {
            model: spec.model.clone(),
            dtype: spec.dtype.clone(),
            weights: spec.weights.clone(),
            layout: spec.layout.clone(),
            world: spec.world.clone(),
            hash: spec.hash.clone(),
            is_salted: spec.salt.is_some(),
        }
    }

    /// Returns the specification of the namespace with pieces of `piece_tokens` tokens and this
    /// `salt`.
    #[must_use]
    pub fn spec(&self, piece_tokens: u32, salt: Option<String>) -> NamespaceSpec {
        NamespaceSpec {
            model: self.model.clone(),
            dtype: self.dtype.clone(),
            block_tokens: piece_tokens.into(),
            weights: self.weights.clone(),
            layout: self.layout.clone(),
            world: self.world.clone(),
            hash: self.hash.clone(),
            salt,
            ..NamespaceSpec::default()
        }
    }
}

/// Description of a session: its tokens and all of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// ID of the namespace of the pieces.
    pub pieces_in: [u8; 16],
    /// ID of the namespace of the objects.
    pub objects_in: [u8; 16],
    /// Conditions under which the session can be used.
    pub space: Space,
    /// Time of the save, in Unix seconds.
    pub created: u64,
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Size of the engine's context, in tokens.
    pub context_tokens: u32,
    /// Number of tokens per piece.
    pub piece_tokens: u32,
    /// Tokens of the session.
    pub tokens: Vec<u32>,
    /// Rendered text of the tokens; empty if the engine did not pass it.
    pub text: Vec<u8>,
    /// Size of each piece, in bytes.
    pub piece_bytes: Vec<u64>,
    /// Index and key of each piece that is stored under the hash of its bytes, apart from other
    /// sessions with the same tokens.
    pub variants: Vec<(u32, [u8; 32])>,
    /// Objects: parts that do not grow with the tokens.
    pub objects: Vec<Named>,
    /// Note of the engine or its user.
    pub note: String,
}

impl Manifest {
    /// As it is stored.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        let mut head = MAGIC.to_vec();
        head.push(VERSION);
        postcard::to_extend(self, head)
            .map_err(|error| Error::malformed("manifest", error.to_string()))
    }

    /// Reads one; nothing is believed that does not fit.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub(crate) fn decode(bytes: &[u8]) -> Result<Manifest, Error> {
        let wrong = |reason: &str| Error::malformed("manifest", reason);
        let body = bytes
            .strip_prefix(MAGIC)
            .ok_or_else(|| wrong("it is not a manifest"))?;
        let (version, body) = body.split_first().ok_or_else(|| wrong("it is truncated"))?;
        if *version != VERSION {
            return Err(wrong(&format!(
                "it has format version {version}; this release reads version {VERSION}"
            )));
        }
        let (manifest, rest) = postcard::take_from_bytes::<Manifest>(body)
            .map_err(|error| wrong(&error.to_string()))?;
        if !rest.is_empty() {
            return Err(wrong("unexpected bytes after it"));
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |reason: &str| Err(Error::malformed("manifest", reason));
        if self.tokens.is_empty() || self.piece_tokens == 0 {
            return wrong("it has no tokens");
        }
        let pieces = self.tokens.len().div_ceil(self.piece_tokens as usize);
        let can_be = |bytes: u64| (1..=PART_MAX).contains(&bytes);
        if pieces != self.piece_bytes.len() || !self.piece_bytes.iter().all(|len| can_be(*len)) {
            return wrong("its pieces do not match its tokens");
        }
        let is_behind = |(at, _): &(u32, _)| *at as usize >= pieces;
        if self.variants.iter().any(is_behind) {
            return wrong("its variants do not match its pieces");
        }
        let objects = &self.objects;
        if objects.len() > OBJECTS_MAX || !objects.iter().all(|one| can_be(one.bytes)) {
            return wrong("its objects are not valid");
        }
        Ok(())
    }

    pub(crate) fn cut(&self) -> Cut {
        Cut::of_tokens(self.piece_tokens)
    }

    /// A link for each piece.
    pub(crate) fn links(&self) -> Vec<Link> {
        self.cut().links(&bytes_of(&self.tokens))
    }

    /// Returns the ID of the namespace of the pieces.
    #[must_use]
    pub fn pieces_in(&self) -> NamespaceId {
        NamespaceId(self.pieces_in)
    }

    /// Returns the ID of the namespace of the objects.
    #[must_use]
    pub fn objects_in(&self) -> NamespaceId {
        NamespaceId(self.objects_in)
    }

    /// Returns the total size of all pieces and objects in bytes, including those that other
    /// sessions share.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let pieces: u64 = self.piece_bytes.iter().sum();
        pieces + self.objects.iter().map(|one| one.bytes).sum::<u64>()
    }
}

/// One for tests.
#[cfg(test)]
pub(crate) fn sample() -> Manifest {
    Manifest {
        pieces_in: [1; 16],
        objects_in: [2; 16],
        space: Space::of(&NamespaceSpec::default()),
        created: 1_700_000_000,
        reason: Reason::Cold,
        context_tokens: 4096,
        piece_tokens: 4,
        tokens: (0..9).collect(),
        text: b"some text".to_vec(),
        piece_bytes: vec![400, 400, 100],
        variants: vec![(2, [7; 32])],
        objects: vec![Named {
            name: "logits".into(),
            bytes: 12,
            sum: [9; 32],
        }],
        note: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_manifest_is_read_as_it_was_written_and_no_part_of_one_is() {
        let bytes = sample().encode().unwrap();
        assert_eq!(Manifest::decode(&bytes).unwrap(), sample());
        for end in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..end]).is_err());
        }
        let mut wrong = sample();
        wrong.piece_bytes.pop();
        assert!(Manifest::decode(&wrong.encode().unwrap()).is_err());
        let mut huge = sample();
        huge.piece_bytes = vec![1 << 63, 1 << 63, 4];
        assert!(Manifest::decode(&huge.encode().unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_are_trouble(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let head = [&MAGIC[..], &[VERSION]].concat();
            let len = bytes.len().min(head.len());
            bytes[..len].copy_from_slice(&head[..len]);
            let _read = Manifest::decode(&bytes);
        }
    }
}
