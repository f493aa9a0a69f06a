//! Keys and identities: what a block is called.

use std::fmt;

/// The 32 bytes that identify a block's tokens and everything before them: a chained hash,
/// usually the engine's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub [u8; Key::LEN]);

impl Key {
    /// Bytes of a key.
    pub const LEN: usize = 32;

    /// The keys in one contiguous buffer.
    ///
    /// # Errors
    /// [`crate::Error::Input`] when the length is not a multiple of 32.
    pub fn many(bytes: &[u8]) -> Result<Vec<Key>, crate::Error> {
        let (keys, rest) = bytes.as_chunks::<{ Key::LEN }>();
        if !rest.is_empty() {
            return Err(crate::Error::input(
                "keys",
                format!("a buffer of {} bytes", bytes.len()),
                "32 bytes a key, one after the other",
            ));
        }
        Ok(keys.iter().map(|key| Key(*key)).collect())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

/// The 16-byte digest of a [`crate::NamespaceSpec`]: part of every stored identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub [u8; 16]);

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

/// A block's whole name: the same key in another namespace is another block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// The namespace's digest.
    pub namespace: NamespaceId,
    /// The key inside it.
    pub key: Key,
}

fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}
