//! The hash of an identity.

use std::hash::{BuildHasher, RandomState};

use crate::held::worked;
use crate::key::Key;

/// Words that nobody else knows, one for each of a key: who chooses keys cannot choose collisions.
#[derive(Clone, Copy)]
pub(super) struct Secret([u64; 4]);

impl Secret {
    pub(super) fn new() -> Secret {
        let random = RandomState::new();
        Secret(std::array::from_fn(|word| random.hash_one(word)))
    }

    #[inline]
    pub(super) fn hash(&self, namespace: u32, key: &Key) -> u64 {
        worked();
        let (words, _) = key.0.as_chunks::<8>();
        let fold = |a: u64, b: u64| {
            let product = u128::from(a) * u128::from(b);
            product as u64 ^ (product >> 64) as u64
        };
        let word = |i: usize| u64::from_le_bytes(words[i]) ^ self.0[i];
        fold(word(0), word(1)) ^ fold(word(2) ^ u64::from(namespace), word(3))
    }
}
