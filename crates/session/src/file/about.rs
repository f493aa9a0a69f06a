//! What a session's file says of itself.

use std::ops::Range;

use kvdepot_store::{NamespaceId, NamespaceSpec};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::manifest::{Manifest, Named, OBJECTS_MAX, Reason, Space};

/// Description of the session in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct About {
    /// ID of the namespace that the pieces would have in a depot. It depends on model, weights,
    /// layout, piece size and salt.
    pub namespace: [u8; 16],
    /// Conditions under which the session can be used.
    pub space: Space,
    /// Time of the save, in Unix seconds.
    pub created: u64,
    /// Cause of the checkpoint.
    pub reason: Reason,
    /// Size of the engine's context, in tokens.
    pub context_tokens: u32,
    /// Number of tokens per piece, if the session has pieces.
    pub piece_tokens: u32,
    /// Tokens of the session.
    pub tokens: Vec<u32>,
    /// Rendered text of the tokens; empty if the engine did not pass it.
    pub text: Vec<u8>,
    /// Size of each piece, in bytes; empty if the state is not cut by tokens.
    pub piece_bytes: Vec<u64>,
    /// Indices, in ascending order, of pieces that a depot also stores under a hash of their bytes,
    /// so that other rows of the same tokens cannot replace them. Exact sessions have such pieces.
    pub exact: Vec<u32>,
    /// Name and size in bytes of each object: parts that do not grow with the tokens, or a state
    /// that is not cut.
    pub objects: Vec<(String, u64)>,
    /// Note of the engine or its user.
    pub note: String,
}

impl About {
    /// As it is written.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        postcard::to_allocvec(self)
            .map_err(|error| Error::malformed("session description", error.to_string()))
    }

    /// Reads one; nothing is believed that does not fit.
    pub(crate) fn decode(bytes: &[u8]) -> Result<About, String> {
        let (about, rest) =
            postcard::take_from_bytes::<About>(bytes).map_err(|error| error.to_string())?;
        match rest.is_empty() {
            true => about.check().map(|()| about),
            false => Err("unexpected bytes after its description".to_owned()),
        }
    }

    /// What cannot be.
    pub(crate) fn check(&self) -> Result<(), String> {
        let wrong = |reason: &str| Err(reason.to_owned());
        if self.tokens.is_empty() || self.piece_tokens == 0 {
            return wrong("it has no tokens");
        }
        let pieces = self.tokens.len().div_ceil(self.piece_tokens as usize);
        if !self.piece_bytes.is_empty() && self.piece_bytes.len() != pieces {
            return wrong("its pieces do not match its tokens");
        }
        let exact = self.exact.iter().map(|at| *at as usize);
        if !exact.clone().is_sorted_by(|one, next| one < next)
            || exact.clone().any(|at| at >= self.piece_bytes.len())
        {
            return wrong("its list of exact pieces is not valid");
        }
        if self.members().any(|bytes| bytes == 0) {
            return wrong("it has an empty piece or object");
        }
        if self.members().next().is_none() {
            return wrong("it has neither pieces nor objects");
        }
        let total = self.members().try_fold(0_u64, u64::checked_add);
        if self.objects.len() > OBJECTS_MAX || total.is_none() {
            return wrong("it has too many objects, or too many bytes");
        }
        let mut names: Vec<&str> = self.objects.iter().map(|(name, _)| &**name).collect();
        names.sort_unstable();
        match names.windows(2).any(|two| two[0] == two[1]) {
            true => wrong("two of its objects have the same name"),
            false => Ok(()),
        }
    }

    /// Bytes of all members, the pieces first.
    pub(crate) fn members(&self) -> impl Iterator<Item = u64> + '_ {
        let objects = self.objects.iter().map(|(_, bytes)| *bytes);
        self.piece_bytes.iter().copied().chain(objects)
    }

    /// Returns the size of all pieces and objects, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.members().sum()
    }

    /// Returns the range of tokens and the size in bytes of each piece.
    #[must_use]
    pub fn pieces(&self) -> Vec<(Range<usize>, u64)> {
        let (each, count) = (self.piece_tokens as usize, self.tokens.len());
        let run = |(at, bytes): (usize, &u64)| (at * each..((at + 1) * each).min(count), *bytes);
        self.piece_bytes.iter().enumerate().map(run).collect()
    }

    /// Returns the ID of the namespace.
    #[must_use]
    pub fn namespace(&self) -> NamespaceId {
        NamespaceId(self.namespace)
    }

    /// Returns the specification of the session's namespace with this `salt`.
    #[must_use]
    pub fn spec(&self, salt: Option<String>) -> NamespaceSpec {
        self.space.spec(self.piece_tokens, salt)
    }

    /// As a depot's manifest. What objects hold is not known of it.
    pub(crate) fn as_manifest(&self) -> Manifest {
        let objects = self.objects.iter();
        let named = |(name, bytes): &(String, u64)| Named {
            name: name.clone(),
            bytes: *bytes,
            sum: [0; 32],
        };
        Manifest {
            pieces_in: self.namespace,
            objects_in: [0; 16],
            space: self.space.clone(),
            created: self.created,
            reason: self.reason,
            context_tokens: self.context_tokens,
            piece_tokens: self.piece_tokens,
            tokens: self.tokens.clone(),
            text: self.text.clone(),
            piece_bytes: self.piece_bytes.clone(),
            variants: Vec::new(),
            objects: objects.map(named).collect(),
            note: self.note.clone(),
        }
    }
}

impl From<Manifest> for About {
    fn from(manifest: Manifest) -> About {
        let objects = manifest.objects.into_iter();
        let mut exact: Vec<u32> = manifest.variants.iter().map(|(at, _)| *at).collect();
        exact.sort_unstable();
        exact.dedup();
        About {
            namespace: manifest.pieces_in,
            space: manifest.space,
            created: manifest.created,
            reason: manifest.reason,
            context_tokens: manifest.context_tokens,
            piece_tokens: manifest.piece_tokens,
            tokens: manifest.tokens,
            text: manifest.text,
            piece_bytes: manifest.piece_bytes,
            exact,
            objects: objects.map(|one| (one.name, one.bytes)).collect(),
            note: manifest.note,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn about() -> About {
        About {
            namespace: [1; 16],
            space: Space::of(&NamespaceSpec::default()),
            created: 1_700_000_000,
            reason: Reason::Cold,
            context_tokens: 4096,
            piece_tokens: 4,
            tokens: (0..9).collect(),
            text: b"some text".to_vec(),
            piece_bytes: vec![400, 400, 100],
            exact: vec![2],
            objects: vec![("logits".into(), 12), ("window".into(), 5 << 20)],
            note: String::new(),
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(about().check(), Ok(()));
        assert_eq!(about().pieces()[2], (8..9, 100));
        let flat = About {
            piece_bytes: Vec::new(),
            exact: Vec::new(),
            ..about()
        };
        assert_eq!(flat.check(), Ok(()));
        let wrong: [fn(&mut About); 9] = [
            |about| about.exact = vec![3],
            |about| about.exact = vec![1, 1],
            |about| about.tokens.clear(),
            |about| about.piece_tokens = 0,
            |about| about.piece_bytes.truncate(2),
            |about| about.piece_bytes[1] = 0,
            |about| about.objects[1].0 = "logits".into(),
            |about| about.objects[0].1 = u64::MAX,
            |about| (about.piece_bytes, about.objects) = (Vec::new(), Vec::new()),
        ];
        for change in wrong {
            let mut about = about();
            change(&mut about);
            assert!(about.check().is_err(), "{about:?}");
            assert!(About::decode(&about.encode().unwrap()).is_err());
        }
        let bytes = about().encode().unwrap();
        for end in 0..bytes.len() {
            assert!(About::decode(&bytes[..end]).is_err());
        }
    }
}
