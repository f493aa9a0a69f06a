//! The keyed checksum: BLAKE3 over the bytes themselves, for media that others can write.
//!
//! Whoever can write a medium can write bytes and the [`Checksum`](super::Checksum) that fits them;
//! without the key nobody can write the MAC. It is cut into leaves as the checksum is:
//!
//! ```text
//! keys of a namespace  KL, KP = BLAKE3 derive_key(context, secret 32 | namespace 16)
//!                      contexts "kvdepot mac 1 leaf" and "kvdepot mac 1 part"
//! leaf                 M_i = BLAKE3 keyed(KL, bytes of leaf i), its first 16 bytes
//! MAC of a part            = BLAKE3 keyed(KP, namespace 16 | key 32 | part u32 | parts u32
//!                            | length u64 | M_0 | M_1 | ..), its first 16 bytes
//! ```
//!
//! Everything is little-endian. Source: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3: one
//! function, fast everywhere" (2020).

use super::{LEAF, PartId};
use std::fmt;

/// A message authentication code (MAC): a keyed checksum of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mac(pub [u8; 16]);

/// The key that authenticates the blocks of a namespace.
#[derive(Clone, PartialEq, Eq)]
pub struct MacKey {
    leaf: [u8; 32],
    part: [u8; 32],
}

impl MacKey {
    /// Derives the key of a namespace from a secret, which may serve many namespaces.
    #[must_use]
    pub fn derive(secret: &[u8; 32], namespace: &[u8; 16]) -> Self {
        let derived = |context: &str| {
            let mut hasher = blake3::Hasher::new_derive_key(context);
            hasher.update(secret).update(namespace);
            *hasher.finalize().as_bytes()
        };
        Self {
            leaf: derived("kvdepot mac 1 leaf"),
            part: derived("kvdepot mac 1 part"),
        }
    }

    /// Returns the MAC of the part `id` with the content `bytes`.
    #[must_use]
    pub fn of(&self, id: &PartId, bytes: &[u8]) -> Mac {
        let leaves = bytes.chunks(LEAF as usize).map(|leaf| self.leaf(leaf));
        self.compose(id, bytes.len() as u64, leaves)
    }

    /// Returns the MAC of one leaf, for [`MacKey::compose`].
    #[must_use]
    pub fn leaf(&self, bytes: &[u8]) -> u128 {
        let mut mac = LeafMac::new(self);
        mac.update(bytes);
        mac.finish()
    }

    /// Returns the MAC of the part `id` of `len` bytes from the MACs of its leaves, in order.
    #[must_use]
    pub fn compose(&self, id: &PartId, len: u64, leaves: impl IntoIterator<Item = u128>) -> Mac {
        let mut hasher = blake3::Hasher::new_keyed(&self.part);
        hasher.update(&id.prefix(len));
        for leaf in leaves {
            hasher.update(&leaf.to_le_bytes());
        }
        Mac(half(&hasher))
    }
}

impl fmt::Debug for MacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MacKey(..)")
    }
}

/// The bytes of a leaf, which come in pieces.
pub(crate) struct LeafMac(Box<blake3::Hasher>);

impl LeafMac {
    pub(crate) fn new(key: &MacKey) -> Self {
        Self(Box::new(blake3::Hasher::new_keyed(&key.leaf)))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(&self) -> u128 {
        u128::from_le_bytes(half(&self.0))
    }
}

fn half(hasher: &blake3::Hasher) -> [u8; 16] {
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: PartId = PartId::whole([1; 16], [2; 32]);

    fn mac(secret: u8, namespace: u8, id: &PartId, bytes: &[u8]) -> Mac {
        MacKey::derive(&[secret; 32], &[namespace; 16]).of(id, bytes)
    }

    #[test]
    fn all_that_it_covers_decides() {
        let bytes = vec![7; LEAF as usize + 5];
        let right = mac(1, 1, &ID, &bytes);
        assert_eq!(mac(1, 1, &ID, &bytes), right);
        assert_ne!(mac(2, 1, &ID, &bytes), right);
        assert_ne!(mac(1, 2, &ID, &bytes), right);
        for id in [
            PartId { key: [3; 32], ..ID },
            PartId { part: 1, ..ID },
            PartId { parts: 2, ..ID },
        ] {
            assert_ne!(mac(1, 1, &id, &bytes), right);
        }
        assert_ne!(mac(1, 1, &ID, &bytes[1..]), right);
        for at in [0, LEAF as usize - 1, LEAF as usize, bytes.len() - 1] {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_ne!(mac(1, 1, &ID, &bad), right, "{at}");
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        let key = MacKey::derive(&[0xAB; 32], &[1; 16]);
        assert_eq!(format!("{key:?}"), "MacKey(..)");
    }
}
