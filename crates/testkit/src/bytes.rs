//! Contents of blocks, made from a number and made again to compare.

use crate::seed::Rng;

/// `len` bytes that belong to `number`: no two numbers share eight bytes in the same place, and
/// no two places of one block either, but for chance.
#[must_use]
pub fn content(number: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(number.wrapping_mul(0xD1B5_4A32_D192_ED03));
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&rng.bits().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Whether `bytes` are those of `number`.
#[must_use]
pub fn is_content(number: u64, bytes: &[u8]) -> bool {
    bytes == content(number, bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_lengths_tell_contents_apart() {
        assert!(is_content(7, &content(7, 1001)));
        assert!(!is_content(8, &content(7, 1001)));
        assert_eq!(content(7, 10), content(7, 1001)[..10]);
    }
}
