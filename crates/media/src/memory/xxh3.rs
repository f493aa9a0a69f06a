//! XXH3-128 as published by its author: constants, the portable accumulator and the final mix.
//!
//! The long form of the hash (more than [`SHORT_MAX`] bytes) works on *stripes* of 64 bytes that
//! are added into eight 64-bit lanes; after 16 stripes (a *block* of 1 KiB) the lanes are
//! scrambled. This module has that in portable Rust; `avx2` has the same in vector registers.
//! The seed is 0 and the secret is the default one everywhere.

/// The longest input of the short forms, which see the whole input at once.
pub(crate) const SHORT_MAX: usize = 240;

/// Bytes in a stripe.
pub(crate) const STRIPE: usize = 64;

/// Stripes between two scrambles: the secret moves on by 8 bytes a stripe, (192 - 64) / 8.
pub(crate) const BLOCK_STRIPES: usize = 16;

/// Offset in the secret of the key of the scramble.
pub(crate) const SCRAMBLE_AT: usize = SECRET_LEN - STRIPE;

/// Offset in the secret of the key of the last stripe.
const LAST_AT: usize = SECRET_LEN - STRIPE - 7;

/// Length of the default secret.
const SECRET_LEN: usize = 192;

/// The multiplier of the scramble, among other things.
pub(crate) const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const PRIME_MX1: u64 = 0x1656_6791_9E37_79F9;

/// The default secret of XXH3.
#[rustfmt::skip]
pub(crate) static SECRET: [u8; SECRET_LEN] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// The eight lanes of the hash.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Lanes(pub(crate) [u64; 8]);

impl Lanes {
    /// The lanes before the first stripe.
    pub(crate) const START: Self = Self([
        PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
    ]);

    /// Adds one stripe; `phase` is its number in the block, 0 to 15.
    #[inline]
    pub(crate) fn add(&mut self, stripe: &[u8; STRIPE], phase: usize) {
        self.add_keyed(stripe, phase * 8);
    }

    #[inline]
    fn add_keyed(&mut self, stripe: &[u8; STRIPE], key_at: usize) {
        self.add_words(std::array::from_fn(|i| read(stripe, i * 8)), key_at);
    }

    /// Adds the eight words of a stripe; the secret is read from `key_at` on.
    #[inline]
    pub(crate) fn add_words(&mut self, words: [u64; 8], key_at: usize) {
        for (i, value) in words.into_iter().enumerate() {
            let keyed = value ^ read(&SECRET, key_at + i * 8);
            self.0[i ^ 1] = self.0[i ^ 1].wrapping_add(value);
            self.0[i] = self.0[i].wrapping_add((keyed & 0xFFFF_FFFF).wrapping_mul(keyed >> 32));
        }
    }

    /// Mixes the lanes at the end of a block.
    #[inline]
    pub(crate) fn scramble(&mut self) {
        for i in 0..8 {
            let key = read(&SECRET, SCRAMBLE_AT + i * 8);
            let lane = self.0[i];
            self.0[i] = ((lane ^ (lane >> 47)) ^ key).wrapping_mul(PRIME32_1);
        }
    }

    /// Adds the last 64 bytes of the input and mixes the lanes into the digest of `len` bytes.
    pub(crate) fn finish(mut self, last: &[u8; STRIPE], len: u64) -> u128 {
        self.add_keyed(last, LAST_AT);
        let low = self.merge(11, len.wrapping_mul(PRIME64_1));
        let high = self.merge(SECRET_LEN - STRIPE - 11, !len.wrapping_mul(PRIME64_2));
        (u128::from(high) << 64) | u128::from(low)
    }

    fn merge(&self, key_at: usize, start: u64) -> u64 {
        let mut sum = start;
        for i in 0..4 {
            let a = self.0[2 * i] ^ read(&SECRET, key_at + 16 * i);
            let b = self.0[2 * i + 1] ^ read(&SECRET, key_at + 16 * i + 8);
            let product = u128::from(a) * u128::from(b);
            sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        sum ^= sum >> 37;
        sum = sum.wrapping_mul(PRIME_MX1);
        sum ^ (sum >> 32)
    }
}

#[inline]
fn read(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
