//! Keys and identities: what a block is called.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What the hash before the first block's begins with.
const CHAIN: &[u8] = b"kvdepot keys 1";

/// The 32 bytes that identify a block's tokens and all tokens before them: a chained hash, usually
/// computed by the engine.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct Key(pub [u8; Key::LEN]);

impl Key {
    /// Size of a key in bytes.
    pub const LEN: usize = 32;

    /// Splits one contiguous buffer into keys.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Input`] if the length is not a multiple of 32.
    pub fn many(bytes: &[u8]) -> Result<Vec<Key>, crate::Error> {
        let (keys, rest) = bytes.as_chunks::<{ Key::LEN }>();
        if !rest.is_empty() {
            return Err(crate::Error::input(
                "keys",
                format!("a buffer of {} bytes", bytes.len()),
                "a multiple of 32 bytes, the size of a key",
            ));
        }
        Ok(keys.iter().map(|key| Key(*key)).collect())
    }

    /// Returns the keys of a prompt, one per full block of `block_tokens` tokens.
    ///
    /// A key is the SHA-256 of the previous key and of the block's tokens as little-endian u32. The
    /// first block uses the SHA-256 of `kvdepot keys 1` and `salt` as its previous key. `salt`
    /// covers everything else that determines the bytes besides the namespace and the tokens, such
    /// as an image or a tenant.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Input`] if `block_tokens` is 0.
    pub fn chain(
        tokens: &[u32],
        block_tokens: usize,
        salt: &[u8],
    ) -> Result<Vec<Key>, crate::Error> {
        if block_tokens == 0 {
            let allowed = "at least 1 token per block";
            return Err(crate::Error::input("block_tokens", 0, allowed));
        }
        let first = Sha256::new().chain_update(CHAIN).chain_update(salt);
        let mut key: [u8; Key::LEN] = first.finalize().into();
        let blocks = tokens.chunks_exact(block_tokens).map(|block| {
            let mut hash = Sha256::new_with_prefix(key);
            for token in block {
                hash.update(token.to_le_bytes());
            }
            key = hash.finalize().into();
            Key(key)
        });
        Ok(blocks.collect())
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

/// The 16-byte digest of a namespace, a part of every stored identity.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
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

/// The full name of a block. The same key in another namespace is another block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// Digest of the namespace.
    pub namespace: NamespaceId,
    /// Key in the namespace.
    pub key: Key,
}

/// At once: digit by digit it takes longer than to ask a file system for the name.
fn write_hex<const LEN: usize>(f: &mut fmt::Formatter<'_>, bytes: &[u8; LEN]) -> fmt::Result {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let text = bytes.map(|byte| [byte >> 4, byte & 15].map(|digit| DIGITS[usize::from(digit)]));
    f.write_str(str::from_utf8(text.as_flattened()).map_err(|_| fmt::Error)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_chained_and_lasting() {
        let tokens: Vec<u32> = (0..10).chain([u32::MAX, 7]).collect();
        let keys = Key::chain(&tokens, 4, b"tenant").unwrap();
        // As the page of the Python surface writes it down; arenas are found again by these.
        let expected = [
            "7ebdffcfda5323fdbab8949ff8644ae4ccec9c5cfa32d75f714176968a2301d7",
            "85bc37d157400674ffff71cc8ece227e8e30775c1596a565cc7f447b01117192",
            "68e11fec6b9f648757701850972cca43b73f222549c483e4975aa11545ce2566",
        ];
        assert_eq!(
            keys.iter().map(Key::to_string).collect::<Vec<_>>(),
            expected
        );
        // What continues a prompt continues its keys, and a block that is not full has none.
        assert_eq!(Key::chain(&tokens[..11], 4, b"tenant").unwrap(), keys[..2]);
        // The salt is in every key, and so is every token before.
        let others = Key::chain(&tokens, 4, b"").unwrap();
        assert!(keys.iter().all(|key| !others.contains(key)));
        let mut changed = tokens;
        changed[3] = 9;
        let changed = Key::chain(&changed, 4, b"tenant").unwrap();
        assert!(keys.iter().all(|key| !changed.contains(key)));
    }

    #[test]
    fn blocks_without_tokens_have_no_keys() {
        let error = Key::chain(&[1, 2], 0, b"").unwrap_err();
        assert!(error.to_string().contains("block_tokens"));
        assert!(Key::chain(&[], 16, b"").unwrap().is_empty());
    }
}
