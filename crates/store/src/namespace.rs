//! Namespaces: everything that must match for bytes to be reusable.

use kvdepot_arena::{Error, NamespaceId};
use sha2::{Digest, Sha256};

/// Prefix of the `group` field of namespaces whose blocks a caller saves explicitly.
///
/// Sessions use it, for example. Admission policies accept all blocks of these namespaces.
pub const SAVED: &str = "session ";

/// Whether a [description](NamespaceSpec::describe) is of such a namespace.
pub(crate) fn is_saved(description: &str) -> bool {
    let (_, group) = description.split_once(" group=").unwrap_or_default();
    group.starts_with(SAVED)
}

/// Fields that identify a namespace. Namespaces that differ in one field share no blocks.
///
/// # Examples
///
/// ```
/// use kvdepot_store::NamespaceSpec;
///
/// let spec = NamespaceSpec {
///     model: "llama-3-8b".into(),
///     dtype: "bfloat16".into(),
///     block_tokens: 16,
///     salt: Some("tenant-a".into()),
///     ..NamespaceSpec::default()
/// };
/// let other = NamespaceSpec { block_tokens: 32, ..spec.clone() };
/// assert_ne!(spec.id()?, other.id()?);
/// // Descriptions do not contain the salt.
/// assert!(!spec.describe().contains("tenant-a"));
/// # Ok::<(), kvdepot_store::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// Model ID, as the engine names it. Required, not empty.
    pub model: String,
    /// Element type of the KV cache, as the engine names it. Required, not empty.
    pub dtype: String,
    /// Number of tokens per block. Required, at least 1.
    pub block_tokens: u64,
    /// Fingerprint of the weights and their configuration.
    pub weights: Option<String>,
    /// Layout and geometry of the bytes.
    pub layout: Option<String>,
    /// Group of layers that the blocks belong to.
    pub group: Option<String>,
    /// Parallelism of the model: tensor and pipeline parallel sizes, without the rank.
    pub world: Option<String>,
    /// Hash algorithm and seed of the keys.
    pub hash: Option<String>,
    /// Secret or label that separates tenants.
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

    /// Returns the digest of the namespace.
    ///
    /// The digest is the first 16 bytes of SHA-256 over the name and the value of each field that
    /// is set. The length of each name and of each value precedes it as a little-endian `u64`, so
    /// that different specs hash different bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] if a required field is empty or zero.
    pub fn id(&self) -> Result<NamespaceId, Error> {
        for (name, value) in [("model", &self.model), ("dtype", &self.dtype)] {
            if value.is_empty() {
                return Err(Error::input(name, "\"\"", "text of at least one character"));
            }
        }
        if self.block_tokens == 0 {
            return Err(Error::input(
                "block_tokens",
                0,
                "at least 1 token per block",
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

    /// Returns the text that `kvdepot ls` prints: the fields that are set.
    ///
    /// The salt, which may be a secret, is replaced.
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
