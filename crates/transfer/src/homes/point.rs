//! Where a key stands among all keys.

use xxhash_rust::xxh3::xxh3_64;

/// Hash of a key, or of a key with its namespace. The homes of a block depend on it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Point(pub u64);

impl Point {
    /// Returns the point of an identity: any bytes that are equal on every host.
    #[must_use]
    pub fn of(identity: &[u8]) -> Point {
        Point(xxh3_64(identity))
    }

    /// Any number at all for a point and a host's seed: its high bits depend on all bits of both.
    /// For one seed no two points have the same.
    #[inline]
    pub(super) fn mix(self, seed: u64) -> u64 {
        // Odd constants of no pattern, and a fold between them, as a product's low bits depend on
        // low bits alone.
        let mixed = (self.0 ^ seed).wrapping_mul(0x9FB2_1C65_1E98_DF25);
        (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_and_mixes_are_what_they_have_always_been() {
        assert_eq!(Point::of(b"kvdepot"), Point(0x0b45_dc3c_0831_85ff));
        assert_eq!(Point(1).mix(2), 0x3fd7_7722_9aee_3cc0);
    }
}
