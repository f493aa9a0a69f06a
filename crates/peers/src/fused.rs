//! The best plain loop that copies a block and computes a checksum: what kvdepot's copies are
//! measured beside. One stream, one block, no parts, no batches.
//!
//! The arithmetic is that of XXH3-128 on long inputs, with other constants and without the final
//! mix, which takes some nanoseconds a block.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use kvdepot_media::{Buffer, Plain};
use kvdepot_plan::Span;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, __m512i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_add_epi64, _mm256_loadu_si256,
    _mm256_mul_epu32, _mm256_set1_epi32, _mm256_shuffle_epi32, _mm256_slli_epi64,
    _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
    _mm512_add_epi64, _mm512_loadu_si512, _mm512_mul_epu32, _mm512_set1_epi32,
    _mm512_shuffle_epi32, _mm512_slli_epi64, _mm512_srli_epi64, _mm512_storeu_si512,
    _mm512_stream_si512, _mm512_xor_si512,
};

/// Bytes between two scrambles of the lanes.
const BLOCK: usize = 1024;
/// Bytes that are added to the lanes at a time.
const STRIPE: usize = 64;

#[cfg(target_arch = "x86_64")]
const PRIME32_1: u32 = 0x9E37_79B1;

/// Keys of the stripes of a block, 8 bytes apart, and the key of the scramble.
#[cfg(target_arch = "x86_64")]
static KEYS: [u8; 192] = keys();
#[cfg(target_arch = "x86_64")]
const SCRAMBLE_AT: usize = 128;

#[cfg(target_arch = "x86_64")]
const fn keys() -> [u8; 192] {
    let (mut keys, mut at, mut state) = ([0; 192], 0, 1_u32);
    while at < keys.len() {
        state = state.wrapping_mul(PRIME32_1).wrapping_add(1);
        keys[at] = (state >> 24) as u8;
        at += 1;
    }
    keys
}

/// A fused loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fused {
    /// 256-bit vectors.
    Avx2,
    /// 256-bit vectors; what comes two blocks later is fetched.
    Avx2Fetching,
    /// 512-bit vectors.
    Avx512,
    /// 512-bit vectors; what comes two blocks later is fetched.
    Avx512Fetching,
}

impl Fused {
    /// All loops that this machine can run.
    #[must_use]
    pub fn all() -> Vec<Fused> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                all.extend([Fused::Avx2, Fused::Avx2Fetching]);
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                all.extend([Fused::Avx512, Fused::Avx512Fetching]);
            }
        }
        all
    }

    /// The name, for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Fused::Avx2 => "fused-avx2",
            Fused::Avx2Fetching => "fused-avx2-fetching",
            Fused::Avx512 => "fused-avx512",
            Fused::Avx512Fetching => "fused-avx512-fetching",
        }
    }

    /// Copies blocks with streaming stores, in order, in the calling thread, and returns the sum of
    /// their checksums. The addresses of a block are offsets in the two buffers.
    ///
    /// # Panics
    ///
    /// If a block is outside the buffers, is no multiple of 1024 bytes or has a destination that is
    /// not aligned to 64; if the destination cannot be written; or if the machine cannot run the
    /// loop.
    #[must_use]
    pub fn copy(self, src: &Buffer, dst: &Buffer, blocks: &[Span]) -> u64 {
        assert!(Fused::all().contains(&self), "{self:?}");
        // Both are memory of this process, the destination can be written, and they are apart.
        let checked = Plain::Memcpy.copy(src, dst, &[]);
        assert!(checked.is_ok(), "{checked:?}");
        let mut sum = 0_u64;
        for block in blocks {
            let (from, to, len) = (block.src as usize, block.dst as usize, block.len as usize);
            let is_inside = |at: usize, all: usize| at <= all && len <= all - at;
            assert!(
                is_inside(from, src.len()) && is_inside(to, dst.len()),
                "{block:?}"
            );
            let (from, to) = (src.addr() + from, dst.addr() + to);
            assert!(len.is_multiple_of(BLOCK), "a block of {len} bytes");
            assert!(to.is_multiple_of(STRIPE), "a destination at {to:#x}");
            // SAFETY: both lie in their buffers, which are memory and do not overlap, and the
            // machine can run the loop.
            sum = sum.wrapping_add(unsafe {
                self.block(
                    with_exposed_provenance(from),
                    with_exposed_provenance_mut(to),
                    len,
                )
            });
        }
        sum
    }

    /// # Safety
    ///
    /// `src` is readable and `dst` writable for `len` bytes, a multiple of 1024, and they do not
    /// overlap; `dst` is aligned to 64. The machine can run the loop.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_variables, reason = "none can run")
    )]
    unsafe fn block(self, src: *const u8, dst: *mut u8, len: usize) -> u64 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        unsafe {
            let lanes = match self {
                Fused::Avx2 => avx2::<false>(src, dst, len),
                Fused::Avx2Fetching => avx2::<true>(src, dst, len),
                Fused::Avx512 => avx512::<false>(src, dst, len),
                Fused::Avx512Fetching => avx512::<true>(src, dst, len),
            };
            _mm_sfence();
            lanes.iter().fold(0, |sum, lane| sum ^ lane)
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no loop can run on this machine")
    }
}

/// # Safety
///
/// As `Fused::block`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<const FETCHES: bool>(src: *const u8, dst: *mut u8, len: usize) -> [u64; 8] {
    // SAFETY: all of it lies in the block, or in the keys.
    unsafe {
        let key = |at: usize| _mm512_loadu_si512(KEYS.as_ptr().add(at).cast());
        let added = |lanes: __m512i, data: __m512i, key: __m512i| {
            let keyed = _mm512_xor_si512(data, key);
            let product = _mm512_mul_epu32(keyed, _mm512_srli_epi64::<32>(keyed));
            let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(data);
            _mm512_add_epi64(_mm512_add_epi64(lanes, swapped), product)
        };
        let prime = _mm512_set1_epi32(PRIME32_1 as i32);
        let mut lanes = key(0);
        let mut at = 0;
        while at < len {
            for stripe in 0..16 {
                let from = src.add(at + stripe * STRIPE);
                if FETCHES {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(2 * BLOCK).cast());
                }
                let data = _mm512_loadu_si512(from.cast());
                _mm512_stream_si512(dst.add(at + stripe * STRIPE).cast(), data);
                lanes = added(lanes, data, key(stripe * 8));
            }
            let mixed = _mm512_xor_si512(lanes, _mm512_srli_epi64::<47>(lanes));
            let mixed = _mm512_xor_si512(mixed, key(SCRAMBLE_AT));
            let upper = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
            let lower = _mm512_mul_epu32(mixed, prime);
            lanes = _mm512_add_epi64(lower, _mm512_slli_epi64::<32>(upper));
            at += BLOCK;
        }
        let mut all = [0; 8];
        _mm512_storeu_si512(all.as_mut_ptr().cast(), lanes);
        all
    }
}

/// # Safety
///
/// As `Fused::block`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<const FETCHES: bool>(src: *const u8, dst: *mut u8, len: usize) -> [u64; 8] {
    // SAFETY: all of it lies in the block, or in the keys.
    unsafe {
        let key = |at: usize| _mm256_loadu_si256(KEYS.as_ptr().add(at).cast());
        let added = |lanes: __m256i, data: __m256i, key: __m256i| {
            let keyed = _mm256_xor_si256(data, key);
            let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
            _mm256_add_epi64(_mm256_add_epi64(lanes, swapped), product)
        };
        let prime = _mm256_set1_epi32(PRIME32_1 as i32);
        let mut lanes = [key(0), key(32)];
        let mut at = 0;
        while at < len {
            for stripe in 0..16 {
                let from = src.add(at + stripe * STRIPE);
                let to = dst.add(at + stripe * STRIPE);
                if FETCHES {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(2 * BLOCK).cast());
                }
                for (half, lanes) in lanes.iter_mut().enumerate() {
                    let data = _mm256_loadu_si256(from.add(half * 32).cast());
                    _mm256_stream_si256(to.add(half * 32).cast(), data);
                    *lanes = added(*lanes, data, key(stripe * 8 + half * 32));
                }
            }
            for (half, lanes) in lanes.iter_mut().enumerate() {
                let mixed = _mm256_xor_si256(*lanes, _mm256_srli_epi64::<47>(*lanes));
                let mixed = _mm256_xor_si256(mixed, key(SCRAMBLE_AT + half * 32));
                let upper = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
                let lower = _mm256_mul_epu32(mixed, prime);
                *lanes = _mm256_add_epi64(lower, _mm256_slli_epi64::<32>(upper));
            }
            at += BLOCK;
        }
        let mut all = [0_u64; 8];
        _mm256_storeu_si256(all.as_mut_ptr().cast(), lanes[0]);
        _mm256_storeu_si256(all.as_mut_ptr().add(4).cast(), lanes[1]);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_loop_copies_blocks_and_computes_the_same_checksum() {
        const LEN: usize = 5 * BLOCK;
        let mut bytes: Vec<u8> = (0..2 * LEN).map(|at| (at * 131 + at / 251) as u8).collect();
        let mut sums = Vec::new();
        for changed in [false, true] {
            bytes[3000] ^= u8::from(changed);
            let src = Buffer::from_vec(bytes.clone());
            for one in Fused::all() {
                let dst = Buffer::from_vec(vec![0xA5; 2 * LEN + 2 * STRIPE]);
                let begin = dst.addr().next_multiple_of(STRIPE) - dst.addr();
                let block = |from: usize, to: usize| {
                    Span::new(from as u64, (begin + to) as u64, LEN as u64)
                };
                let sum = one.copy(&src, &dst, &[block(0, LEN), block(LEN, 0)]);
                let to = dst.to_vec();
                assert_eq!(to[begin..][..LEN], bytes[LEN..], "{}", one.name());
                assert_eq!(to[begin + LEN..][..LEN], bytes[..LEN], "{}", one.name());
                assert_eq!(to[begin + 2 * LEN], 0xA5, "{}", one.name());
                sums.push((changed, sum));
            }
        }
        sums.dedup();
        let differ = sums.len() < 2 || sums[0].1 != sums[1].1;
        assert!(sums.len() <= 2 && differ, "{sums:?}");
    }
}
