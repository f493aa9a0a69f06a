//! Namespaces: everything that must match for bytes to be reusable.

use kvdepot_arena::{Error, NamespaceId};
use sha2::{Digest, Sha256};

/// What the `group` of a namespace begins with whose blocks somebody saves on purpose, such as
/// those of sessions: admission rules let all of them pass.
pub const SAVED: &str = "session ";

/// Whether a [description](NamespaceSpec::describe) is of such a namespace.
pub(crate) fn is_saved(description: &str) -> bool {
    let (_, group) = description.split_once(" group=").unwrap_or_default();
    group.starts_with(SAVED)
}

/// The fields of a namespace. Two that differ anywhere share no block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// Model id, as the engine names it. Required.
    pub model: String,
    /// Element type of the cache, as the engine names it. Required.
    pub dtype: String,
    /// Tokens of a block. Required.
    pub block_tokens: u64,
    /// Fingerprint of the weights and their configuration.
    pub weights: Option<String>,
    /// Layout and geometry of the bytes.
    pub layout: Option<String>,
    /// Which group of layers the blocks are of.
    pub group: Option<String>,
    /// How the model is split: tensor and pipeline parallel sizes (not the rank).
    pub world: Option<String>,
    /// Hash algorithm and seed of the keys.
    pub hash: Option<String>,
    /// A secret or label that keeps tenants apart.
    pub salt: Option<String>,
}

/// The names of the fields, in the order of the digest.
const FIELDS: [&str; 9] = [
    "model",
    "dtype",
    "block_tokens",
    "weights",
    "layout",
    "group",
    "world",
    "hash",
    "salt",
];

impl NamespaceSpec {
    fn fields(&self) -> [Option<String>; FIELDS.len()] {
        [
            Some(self.model.clone()),
            Some(self.dtype.clone()),
            Some(self.block_tokens.to_string()),
            self.weights.clone(),
            self.layout.clone(),
            self.group.clone(),
            self.world.clone(),
            self.hash.clone(),
            self.salt.clone(),
        ]
    }

    /// The digest: the first 16 bytes of SHA-256 over each given field's name and value, both
    /// preceded by their lengths as little-endian u64, so that no two specs read the same.
    ///
    /// # Errors
    /// [`Error::Input`] when a required field is empty or zero.
    pub fn id(&self) -> Result<NamespaceId, Error> {
        for (name, value) in [("model", &self.model), ("dtype", &self.dtype)] {
            if value.is_empty() {
                return Err(Error::input(name, "\"\"", "a text that is not empty"));
            }
        }
        if self.block_tokens == 0 {
            return Err(Error::input(
                "block_tokens",
                0,
                "the tokens of a block, at least 1",
            ));
        }
        let mut hash = Sha256::new();
        for (name, value) in FIELDS.iter().zip(self.fields()) {
            let Some(value) = value else { continue };
            for text in [*name, value.as_str()] {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text.as_bytes());
            }
        }
        let mut id = [0; 16];
        id.copy_from_slice(&hash.finalize()[..16]);
        Ok(NamespaceId(id))
    }

    /// What `kvdepot ls` shows: the fields given, without the salt, which may be a secret.
    #[must_use]
    pub fn describe(&self) -> String {
        let fields = self.fields();
        let shown = FIELDS
            .iter()
            .zip(&fields)
            .filter_map(|(name, value)| match (*name, value) {
                ("salt", Some(_)) => Some("salt=(set)".to_owned()),
                (name, Some(value)) => Some(format!("{name}={value}")),
                _ => None,
            });
        shown.collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> NamespaceSpec {
        NamespaceSpec {
            model: "m".into(),
            dtype: "f32".into(),
            block_tokens: 16,
            ..NamespaceSpec::default()
        }
    }

    #[test]
    fn every_field_changes_the_digest() {
        let changes: [fn(&mut NamespaceSpec); 9] = [
            |s| s.model = "n".into(),
            |s| s.dtype = "f16".into(),
            |s| s.block_tokens = 17,
            |s| s.weights = Some("x".into()),
            |s| s.layout = Some("x".into()),
            |s| s.group = Some("x".into()),
            |s| s.world = Some("x".into()),
            |s| s.hash = Some("x".into()),
            |s| s.salt = Some("x".into()),
        ];
        let mut seen = vec![spec().id().unwrap()];
        for change in changes {
            let mut other = spec();
            change(&mut other);
            let id = other.id().unwrap();
            assert!(!seen.contains(&id));
            seen.push(id);
        }
    }

    #[test]
    fn the_salt_is_not_shown() {
        let spec = NamespaceSpec {
            salt: Some("secret".into()),
            ..spec()
        };
        assert!(!spec.describe().contains("secret"));
    }

    #[test]
    fn required_fields_are_named() {
        let error = NamespaceSpec {
            model: String::new(),
            ..spec()
        }
        .id()
        .unwrap_err();
        assert!(error.to_string().contains("model"));
        let error = NamespaceSpec {
            block_tokens: 0,
            ..spec()
        }
        .id()
        .unwrap_err();
        assert!(error.to_string().contains("block_tokens"));
    }
}
