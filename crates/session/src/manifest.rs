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

/// Why a checkpoint was made, in ds4's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reason {
    /// A prompt that nothing was known of.
    Cold,
    /// So many tokens have come since the last.
    Continued,
    /// Another conversation takes its place.
    Evict,
    /// The engine ends.
    Shutdown,
    /// Somebody asked for it.
    Asked,
}

impl Reason {
    /// As it is written.
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

    /// From its name.
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

/// A part of a checkpoint that has a name, and its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "made from its fields")]
pub struct Named {
    /// Whatever the engine calls it.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Their BLAKE3.
    pub sum: [u8; 32],
}

/// Under which conditions a state can be used again: a namespace's fields, but for its salt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Space {
    /// As in [`NamespaceSpec`].
    pub model: String,
    /// Likewise.
    pub dtype: String,
    /// Likewise.
    pub weights: Option<String>,
    /// Likewise.
    pub layout: Option<String>,
    /// Likewise.
    pub world: Option<String>,
    /// Likewise.
    pub hash: Option<String>,
    /// Whether there is a salt, which is not told.
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

    /// The namespace, with pieces of so many tokens and this salt.
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

/// What a session is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// The namespaces of its pieces and of its objects.
    pub pieces_in: [u8; 16],
    /// Of its objects.
    pub objects_in: [u8; 16],
    /// Under which conditions it can be used.
    pub space: Space,
    /// When it was saved, in Unix seconds.
    pub created: u64,
    /// Why.
    pub reason: Reason,
    /// Tokens that the engine had room for.
    pub context_tokens: u32,
    /// Tokens of a piece.
    pub piece_tokens: u32,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// What they were rendered from, as far as the engine said it.
    pub text: Vec<u8>,
    /// Bytes of each piece.
    pub piece_bytes: Vec<u64>,
    /// Pieces, by their number, that are not those of other sessions with these tokens, and their
    /// keys.
    pub variants: Vec<(u32, [u8; 32])>,
    /// What does not grow with the tokens.
    pub objects: Vec<Named>,
    /// What the engine, or who it is for, notes.
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
            .ok_or_else(|| wrong("it is none"))?;
        let (version, body) = body.split_first().ok_or_else(|| wrong("it is cut"))?;
        if *version != VERSION {
            return Err(wrong(&format!(
                "it is of version {version}, this release reads {VERSION}"
            )));
        }
        let (manifest, rest) = postcard::take_from_bytes::<Manifest>(body)
            .map_err(|error| wrong(&error.to_string()))?;
        if !rest.is_empty() {
            return Err(wrong("bytes behind it"));
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |reason: &str| Err(Error::malformed("manifest", reason));
        if self.tokens.is_empty() || self.piece_tokens == 0 {
            return wrong("no tokens");
        }
        let pieces = self.tokens.len().div_ceil(self.piece_tokens as usize);
        let can_be = |bytes: u64| (1..=PART_MAX).contains(&bytes);
        if pieces != self.piece_bytes.len() || !self.piece_bytes.iter().all(|len| can_be(*len)) {
            return wrong("pieces that do not fit its tokens");
        }
        let is_behind = |(at, _): &(u32, _)| *at as usize >= pieces;
        if self.variants.iter().any(is_behind) {
            return wrong("variants of pieces that it has not");
        }
        let objects = &self.objects;
        if objects.len() > OBJECTS_MAX || !objects.iter().all(|one| can_be(one.bytes)) {
            return wrong("objects that cannot be");
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

    /// The namespace of its pieces.
    #[must_use]
    pub fn pieces_in(&self) -> NamespaceId {
        NamespaceId(self.pieces_in)
    }

    /// The namespace of its objects.
    #[must_use]
    pub fn objects_in(&self) -> NamespaceId {
        NamespaceId(self.objects_in)
    }

    /// Bytes of all that it names, shared or not.
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
