//! The inner loops in 256-bit vectors: load once, hash in registers, store.
//!
//! One stripe is two vectors, and so are the lanes. The loop is bound by memory, not by the hash:
//! what counts is how many cache lines are on their way at once. So the next kilobyte is fetched
//! while this one is hashed, across page boundaries (the hardware's own prefetchers stop there)
//! and across pieces; and several leaves are moved in turns where there are several, because the
//! memory serves several streams faster than one.

use super::kernel::{Run, Store};
use super::xxh3::{BLOCK_STRIPES, Lanes, PRIME32_1, SCRAMBLE_AT, SECRET, STRIPE};
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm_stream_si128, _mm256_add_epi64,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_mul_epu32,
    _mm256_set1_epi32, _mm256_setzero_si256, _mm256_shuffle_epi32, _mm256_slli_epi64,
    _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
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
    run: Run,
    stripes: usize,
    store: Store,
) {
    // SAFETY: the caller's promise; `width` has looked at the alignment.
    unsafe {
        match width(store, run.dst) {
            NOTHING => single::<NOTHING>(lanes, phase, run, stripes),
            CACHED => single::<CACHED>(lanes, phase, run, stripes),
            STREAM_32 => single::<STREAM_32>(lanes, phase, run, stripes),
            _ => single::<STREAM_16>(lanes, phase, run, stripes),
        }
    }
}

/// See [`Isa::together`](super::kernel::Isa::together).
///
/// # Safety
///
/// As there, and the processor has AVX2.
pub(super) unsafe fn together<const WAYS: usize>(
    lanes: [&mut Lanes; WAYS],
    runs: [Run; WAYS],
    count: usize,
    store: Store,
) {
    let widths = runs.map(|run| width(store, run.dst));
    // SAFETY: the caller's promise; `width` has looked at the alignment.
    unsafe {
        if widths.iter().any(|width| *width != widths[0]) {
            for (lanes, run) in lanes.into_iter().zip(runs) {
                stripes(lanes, 0, run, count, store);
            }
            return;
        }
        match widths[0] {
            NOTHING => several::<NOTHING, WAYS>(lanes, runs, count),
            CACHED => several::<CACHED, WAYS>(lanes, runs, count),
            STREAM_32 => several::<STREAM_32, WAYS>(lanes, runs, count),
            _ => several::<STREAM_16, WAYS>(lanes, runs, count),
        }
    }
}

/// How to store at `dst`.
fn width(store: Store, dst: *mut u8) -> u8 {
    match store {
        Store::Nothing => NOTHING,
        Store::Streaming if dst.addr().is_multiple_of(32) => STREAM_32,
        Store::Streaming if dst.addr().is_multiple_of(16) => STREAM_16,
        Store::Cached | Store::Streaming => CACHED,
    }
}

/// The lanes in registers.
#[derive(Clone, Copy)]
struct Vectors(__m256i, __m256i);

/// # Safety
///
/// As `stripes`; the destination is aligned for `STORE`.
#[target_feature(enable = "avx2")]
unsafe fn single<const STORE: u8>(
    lanes: &mut Lanes,
    mut phase: usize,
    run: Run,
    mut stripes: usize,
) {
    let Run {
        mut src,
        mut dst,
        next,
    } = run;
    let mut acc = load_lanes(lanes);
    while stripes > 0 {
        let turn = stripes.min(BLOCK_STRIPES - phase);
        stripes -= turn;
        // What comes a block later, or what this lane reads after the last one.
        let ahead = if stripes > 0 {
            src.wrapping_add(BLOCK)
        } else {
            next
        };
        // SAFETY: `turn` stripes are left, and they end with the block at the latest.
        acc = unsafe {
            match turn {
                BLOCK_STRIPES => some::<STORE, BLOCK_STRIPES>(acc, 0, src, dst, ahead),
                _ => few::<STORE>(acc, phase, src, dst, ahead, turn),
            }
        };
        (src, dst) = (
            src.wrapping_add(turn * STRIPE),
            dst.wrapping_add(turn * STRIPE),
        );
        phase += turn;
        if phase == BLOCK_STRIPES {
            acc = scramble(acc);
            phase = 0;
        }
    }
    store_lanes(lanes, acc);
}

/// Stripes of one leaf before it is the next one's turn: half a block. Measured: turns of 64 or 256
/// bytes let the streams get into each other's way, and a whole block is more than a processor
/// looks ahead.
const TURN: usize = BLOCK_STRIPES / 2;

/// # Safety
///
/// As `together`; the destinations are aligned for `STORE`.
#[target_feature(enable = "avx2")]
unsafe fn several<const STORE: u8, const WAYS: usize>(
    lanes: [&mut Lanes; WAYS],
    mut runs: [Run; WAYS],
    mut stripes: usize,
) {
    let mut acc = [Vectors(_mm256_setzero_si256(), _mm256_setzero_si256()); WAYS];
    for way in 0..WAYS {
        acc[way] = load_lanes(lanes[way]);
    }
    while stripes >= BLOCK_STRIPES {
        stripes -= BLOCK_STRIPES;
        for turn in 0..BLOCK_STRIPES / TURN {
            let (phase, at) = (turn * TURN, turn * TURN * STRIPE);
            for way in 0..WAYS {
                let Run { src, dst, next } = runs[way];
                let ahead = if stripes > 0 {
                    src.wrapping_add(BLOCK)
                } else {
                    next
                };
                // SAFETY: a whole block is left in every run.
                unsafe {
                    let (src, dst) = (src.add(at), dst.wrapping_add(at));
                    acc[way] =
                        some::<STORE, TURN>(acc[way], phase, src, dst, ahead.wrapping_add(at));
                }
            }
        }
        for way in 0..WAYS {
            acc[way] = scramble(acc[way]);
            runs[way].src = runs[way].src.wrapping_add(BLOCK);
            runs[way].dst = runs[way].dst.wrapping_add(BLOCK);
        }
    }
    for way in 0..WAYS {
        let Run { src, dst, next } = runs[way];
        // SAFETY: fewer stripes than a block are left in every run.
        acc[way] = unsafe { few::<STORE>(acc[way], 0, src, dst, next, stripes) };
        store_lanes(lanes[way], acc[way]);
    }
}

/// See [`Isa::carry`](super::kernel::Isa::carry).
///
/// # Safety
///
/// As there, and the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn carry(src: *const u8, dst: *mut u8, len: usize, next: *const u8) {
    // Streaming stores want whole lines. Meanwhile what is hashed next comes from memory, as far
    // as the second-level cache: in the first it would drive out the bytes to be carried.
    let head = dst.align_offset(STRIPE).min(len);
    let lines = (len - head) / STRIPE;
    let tail = head + lines * STRIPE;
    // SAFETY: head, lines and tail are what the caller promised.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        for at in (head..tail).step_by(STRIPE) {
            _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(at).cast());
            let (low, high) = (load(src.add(at)), load(src.add(at + 32)));
            _mm256_stream_si256(dst.add(at).cast(), low);
            _mm256_stream_si256(dst.add(at + 32).cast(), high);
        }
        std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), len - tail);
    }
}

/// Some stripes of one block, unrolled, and the fetch of as many lines at `ahead`.
///
/// # Safety
///
/// As `single`, for `COUNT` stripes; `phase + COUNT` is at most 16.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn some<const STORE: u8, const COUNT: usize>(
    mut acc: Vectors,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
    ahead: *const u8,
) -> Vectors {
    for number in 0..COUNT {
        let at = number * STRIPE;
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(at).cast());
        // SAFETY: the caller's promise.
        acc = unsafe { stripe::<STORE>(acc, phase + number, src.add(at), dst.wrapping_add(at)) };
    }
    acc
}

/// As `some`, not unrolled.
///
/// # Safety
///
/// As `some`.
#[target_feature(enable = "avx2")]
unsafe fn few<const STORE: u8>(
    mut acc: Vectors,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
    ahead: *const u8,
    count: usize,
) -> Vectors {
    for number in 0..count {
        let at = number * STRIPE;
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(at).cast());
        // SAFETY: the caller's promise.
        acc = unsafe { stripe::<STORE>(acc, phase + number, src.add(at), dst.wrapping_add(at)) };
    }
    acc
}

/// # Safety
///
/// As `single`, for one stripe; `phase` is below 16.
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
    let prime = _mm256_set1_epi32((PRIME32_1 as u32).cast_signed());
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
