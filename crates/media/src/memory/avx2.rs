//! The inner loops in 256-bit vectors: load once, hash in registers, store.
//!
//! One stripe is two vectors, and so are the lanes. The loop is bound by memory, not by the hash:
//! what counts is that the next kilobyte is being fetched while this one is hashed, across page
//! boundaries (the hardware's own prefetchers stop there) and across pieces.

use super::kernel::Store;
use super::xxh3::{BLOCK_STRIPES, Lanes, SCRAMBLE_AT, SCRAMBLE_PRIME, SECRET, STRIPE};
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm_stream_si128, _mm256_add_epi64, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set1_epi32,
    _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256,
    _mm256_stream_si256, _mm256_xor_si256,
};

/// Bytes in a block.
const BLOCK: usize = BLOCK_STRIPES * STRIPE;

/// Store nothing.
const NOTHING: u8 = 0;
/// Store through the caches.
const CACHED: u8 = 1;
/// Stream 32 bytes at a time; the destination is aligned to 32.
const STREAM_32: u8 = 2;
/// Stream 16 bytes at a time; the destination is aligned to 16, as large `malloc` blocks are.
const STREAM_16: u8 = 3;

/// See [`Isa::stripes`](super::kernel::Isa::stripes).
///
/// # Safety
///
/// As there, and the processor has AVX2.
pub(super) unsafe fn stripes(
    lanes: &mut Lanes,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
    stripes: usize,
    store: Store,
    next: *const u8,
) {
    // SAFETY: the caller's promise; streaming kernels get the alignment that they need.
    unsafe {
        match store {
            Store::Nothing => run::<NOTHING>(lanes, phase, src, dst, stripes, next),
            Store::Streaming if dst.addr().is_multiple_of(32) => {
                run::<STREAM_32>(lanes, phase, src, dst, stripes, next);
            }
            Store::Streaming if dst.addr().is_multiple_of(16) => {
                run::<STREAM_16>(lanes, phase, src, dst, stripes, next);
            }
            Store::Cached | Store::Streaming => {
                run::<CACHED>(lanes, phase, src, dst, stripes, next);
            }
        }
    }
}

/// The lanes in registers.
#[derive(Clone, Copy)]
struct Vectors(__m256i, __m256i);

/// # Safety
///
/// As `stripes`; `dst` is aligned for `STORE`.
#[target_feature(enable = "avx2")]
unsafe fn run<const STORE: u8>(
    lanes: &mut Lanes,
    mut phase: usize,
    mut src: *const u8,
    mut dst: *mut u8,
    mut stripes: usize,
    next: *const u8,
) {
    let mut acc = load_lanes(lanes);
    while stripes > 0 {
        if phase == 0 && stripes >= BLOCK_STRIPES {
            stripes -= BLOCK_STRIPES;
            // The block after this one, or what this lane reads after the last.
            let ahead = if stripes >= BLOCK_STRIPES {
                src.wrapping_add(BLOCK)
            } else {
                next
            };
            // SAFETY: a whole block is left.
            acc = unsafe { block::<STORE>(acc, src, dst, ahead) };
            (src, dst) = (src.wrapping_add(BLOCK), dst.wrapping_add(BLOCK));
            continue;
        }
        // SAFETY: a stripe is left, and `phase` is below 16.
        acc = unsafe { stripe::<STORE>(acc, phase, src, dst) };
        (src, dst) = (src.wrapping_add(STRIPE), dst.wrapping_add(STRIPE));
        stripes -= 1;
        phase += 1;
        if phase == BLOCK_STRIPES {
            acc = scramble(acc);
            phase = 0;
        }
    }
    store_lanes(lanes, acc);
}

/// One whole block, and the fetch of what lies at `ahead`.
///
/// # Safety
///
/// As `run`, for 1 KiB.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn block<const STORE: u8>(
    mut acc: Vectors,
    src: *const u8,
    dst: *mut u8,
    ahead: *const u8,
) -> Vectors {
    for phase in 0..BLOCK_STRIPES {
        let at = phase * STRIPE;
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(at).cast());
        // SAFETY: stripe `phase` of the block.
        acc = unsafe { stripe::<STORE>(acc, phase, src.add(at), dst.wrapping_add(at)) };
    }
    scramble(acc)
}

/// # Safety
///
/// As `run`, for one stripe; `phase` is below 16.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn stripe<const STORE: u8>(
    acc: Vectors,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
) -> Vectors {
    // SAFETY: 64 bytes are readable at `src`; the secret has 64 bytes from 8 * 15 on.
    let (low, high, key_low, key_high) = unsafe {
        let key = SECRET.as_ptr().add(phase * 8);
        (load(src), load(src.add(32)), load(key), load(key.add(32)))
    };
    // SAFETY: 64 bytes are writable at `dst` unless `STORE` is `NOTHING`, and it is aligned.
    unsafe {
        match STORE {
            NOTHING => {}
            STREAM_32 => {
                _mm256_stream_si256(dst.cast(), low);
                _mm256_stream_si256(dst.add(32).cast(), high);
            }
            STREAM_16 => {
                _mm_stream_si128(dst.cast(), _mm256_castsi256_si128(low));
                _mm_stream_si128(dst.add(16).cast(), _mm256_extracti128_si256::<1>(low));
                _mm_stream_si128(dst.add(32).cast(), _mm256_castsi256_si128(high));
                _mm_stream_si128(dst.add(48).cast(), _mm256_extracti128_si256::<1>(high));
            }
            _ => {
                _mm256_storeu_si256(dst.cast(), low);
                _mm256_storeu_si256(dst.add(32).cast(), high);
            }
        }
    }
    Vectors(add(acc.0, low, key_low), add(acc.1, high, key_high))
}

/// Adds four 64-bit words to four lanes: the product of the keyed halves to a word's own lane,
/// the word itself to its neighbour's.
#[inline]
#[target_feature(enable = "avx2")]
fn add(acc: __m256i, data: __m256i, key: __m256i) -> __m256i {
    let keyed = _mm256_xor_si256(data, key);
    let upper = _mm256_shuffle_epi32::<0b00_11_00_01>(keyed);
    let product = _mm256_mul_epu32(keyed, upper);
    let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
    _mm256_add_epi64(product, _mm256_add_epi64(acc, swapped))
}

#[inline]
#[target_feature(enable = "avx2")]
fn scramble(acc: Vectors) -> Vectors {
    // SAFETY: the secret has 64 bytes from there on.
    let (low, high) = unsafe {
        let key = SECRET.as_ptr().add(SCRAMBLE_AT);
        (load(key), load(key.add(32)))
    };
    Vectors(scramble_half(acc.0, low), scramble_half(acc.1, high))
}

#[inline]
#[target_feature(enable = "avx2")]
fn scramble_half(acc: __m256i, key: __m256i) -> __m256i {
    let mixed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64::<47>(acc)), key);
    let prime = _mm256_set1_epi32(SCRAMBLE_PRIME.cast_signed());
    let upper = _mm256_shuffle_epi32::<0b00_11_00_01>(mixed);
    let product_upper = _mm256_slli_epi64::<32>(_mm256_mul_epu32(upper, prime));
    _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), product_upper)
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_lanes(lanes: &Lanes) -> Vectors {
    let at = lanes.0.as_ptr().cast::<u8>();
    // SAFETY: the lanes are 64 bytes.
    unsafe { Vectors(load(at), load(at.add(32))) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_lanes(lanes: &mut Lanes, acc: Vectors) {
    let at = lanes.0.as_mut_ptr().cast::<__m256i>();
    // SAFETY: the lanes are 64 bytes.
    unsafe {
        _mm256_storeu_si256(at, acc.0);
        _mm256_storeu_si256(at.add(1), acc.1);
    }
}

/// # Safety
///
/// 32 bytes are readable at `at`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise; the load needs no alignment.
    unsafe { _mm256_loadu_si256(at.cast()) }
}
