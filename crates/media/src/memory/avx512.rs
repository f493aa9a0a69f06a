//! The inner loops in 512-bit vectors: one stripe is one vector, and so are the lanes. What is
//! said of `avx2` holds here, except that a leaf's turn is a whole block: its instructions are
//! half as many.

use super::run::{Run, Store};
use super::xxh3::{BLOCK_STRIPES, Lanes, PRIME32_1, SCRAMBLE_AT, SECRET, STRIPE};
use crate::once;
use std::arch::asm;
use std::arch::x86_64::{
    __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_add_epi64, _mm512_loadu_si512, _mm512_mul_epu32,
    _mm512_set1_epi32, _mm512_setzero_si512, _mm512_shuffle_epi32, _mm512_slli_epi64,
    _mm512_srli_epi64, _mm512_storeu_si512, _mm512_xor_si512,
};

/// Bytes in a block.
const BLOCK: usize = BLOCK_STRIPES * STRIPE;

/// Store nothing.
const NOTHING: u8 = 0;
/// Store through the caches.
const CACHED: u8 = 1;
/// Stripes of a run from which on the processor fetches by itself, as in `avx2`.
const FOLLOWED: usize = (32 << 10) / STRIPE;

/// Stream 64 bytes at a time; the destination is aligned to 64.
const STREAM: u8 = 2;

/// True if 512-bit vectors can store these runs in the way of `store`; narrower vectors can always.
pub(super) fn can_store(store: Store, runs: &[Run]) -> bool {
    let is_aligned = |run: &Run| run.dst.addr().is_multiple_of(STRIPE);
    match store {
        Store::Nothing | Store::Cached => true,
        Store::Streaming => runs.iter().all(is_aligned),
        Store::Through => false,
    }
}

/// See `Isa::stripes`.
///
/// # Safety
///
/// As there, and the processor has AVX-512F; it can store so.
pub(super) unsafe fn stripes(
    lanes: &mut Lanes,
    phase: usize,
    run: Run,
    stripes: usize,
    store: Store,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match store {
            Store::Nothing => single::<NOTHING>(lanes, phase, run, stripes),
            Store::Streaming => single::<STREAM>(lanes, phase, run, stripes),
            Store::Cached | Store::Through => single::<CACHED>(lanes, phase, run, stripes),
        }
    }
}

/// See `Isa::together`.
///
/// # Safety
///
/// As there, and the processor has AVX-512F; it can store so.
pub(super) unsafe fn together<const WAYS: usize>(
    lanes: [&mut Lanes; WAYS],
    runs: [Run; WAYS],
    count: usize,
    (store, fetches): (Store, bool),
) {
    // SAFETY: the caller's promise.
    unsafe {
        match store {
            Store::Nothing => several::<NOTHING, WAYS>(lanes, runs, count, true),
            Store::Streaming => several::<STREAM, WAYS>(lanes, runs, count, fetches),
            Store::Cached | Store::Through => {
                several::<CACHED, WAYS>(lanes, runs, count, fetches);
            }
        }
    }
}

/// # Safety
///
/// As `stripes`; the destination is aligned for `STORE`.
#[target_feature(enable = "avx512f")]
unsafe fn single<const STORE: u8>(lanes: &mut Lanes, phase: usize, run: Run, stripes: usize) {
    let head = match phase {
        0 => 0,
        _ => stripes.min(BLOCK_STRIPES - phase),
    };
    let rest = run.at(head * STRIPE);
    if head > 0 {
        let ahead = if stripes > head { rest.src } else { run.next };
        let mut acc = load_lanes(lanes);
        // SAFETY: so many stripes are there, and they end with the block at the latest.
        acc = unsafe { few::<STORE>(acc, phase, run.src, run.dst, ahead, head) };
        if phase + head == BLOCK_STRIPES {
            acc = scramble(acc);
        }
        store_lanes(lanes, acc);
    }
    if stripes > head {
        // SAFETY: the rest is at the beginning of a block.
        unsafe { several::<STORE, 1>([lanes], [rest], stripes - head, true) };
    }
}

/// # Safety
///
/// As `together`; the destinations are aligned for `STORE`.
#[target_feature(enable = "avx512f")]
unsafe fn several<const STORE: u8, const WAYS: usize>(
    lanes: [&mut Lanes; WAYS],
    mut runs: [Run; WAYS],
    mut stripes: usize,
    fetches: bool,
) {
    let fetches = fetches || stripes < FOLLOWED;
    let mut acc = [_mm512_setzero_si512(); WAYS];
    for way in 0..WAYS {
        acc[way] = load_lanes(lanes[way]);
    }
    while stripes >= BLOCK_STRIPES {
        stripes -= BLOCK_STRIPES;
        for way in 0..WAYS {
            let run = runs[way];
            let ahead = run.ahead(WAYS, stripes / BLOCK_STRIPES);
            // SAFETY: a whole block is left in every run.
            acc[way] = scramble(unsafe {
                if fetches {
                    block::<STORE, true>(acc[way], run.src, run.dst, ahead)
                } else {
                    block::<STORE, false>(acc[way], run.src, run.dst, ahead)
                }
            });
            runs[way] = run.at(BLOCK);
        }
    }
    for (way, lanes) in lanes.into_iter().enumerate() {
        let Run { src, dst, next, .. } = runs[way];
        // SAFETY: fewer stripes than a block are left in every run.
        acc[way] = unsafe { few::<STORE>(acc[way], 0, src, dst, next, stripes) };
        store_lanes(lanes, acc[way]);
    }
}

/// A block, and the fetch of as many lines at `ahead` if it `FETCHES`.
///
/// # Safety
///
/// As `single`, for the stripes of a block.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn block<const STORE: u8, const FETCHES: bool>(
    acc: __m512i,
    src: *const u8,
    dst: *mut u8,
    ahead: *const u8,
) -> __m512i {
    let mut sums = Sums::after(acc);
    macro_rules! each {
        ($($number:literal)*) => { $({
            const AT: usize = $number * STRIPE;
            if FETCHES {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(AT).cast());
            }
            // SAFETY: the caller's promise.
            unsafe { stripe::<STORE, AT>(&mut sums, $number, src, dst) };
        })* };
    }
    each!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    sums.lanes()
}

/// Some stripes of one block, and the fetch of as many lines at `ahead`.
///
/// # Safety
///
/// As `single`, for `count` stripes; `phase + count` is at most 16.
#[target_feature(enable = "avx512f")]
unsafe fn few<const STORE: u8>(
    acc: __m512i,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
    ahead: *const u8,
    count: usize,
) -> __m512i {
    let mut sums = Sums::after(acc);
    for number in 0..count {
        let at = number * STRIPE;
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(at).cast());
        let (src, dst) = (src.wrapping_add(at), dst.wrapping_add(at));
        // SAFETY: the caller's promise.
        unsafe { stripe::<STORE, 0>(&mut sums, phase + number, src, dst) };
    }
    sums.lanes()
}

/// Stores the stripe `AT` bytes behind `src` as far behind `dst`, and adds it to the sums.
///
/// # Safety
///
/// As `single`, for one stripe; `phase` is below 16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn stripe<const STORE: u8, const AT: usize>(
    sums: &mut Sums,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
) {
    // SAFETY: 64 bytes are readable there; the secret has 64 bytes from 8 * 15 on.
    let (data, key) = unsafe { (load(src.add(AT)), load(SECRET.as_ptr().add(phase * 8))) };
    // What is stored is what is hashed.
    let data = once::wide_vector(data);
    // SAFETY: 64 bytes are writable there unless `STORE` is `NOTHING`, and it is aligned.
    unsafe {
        match STORE {
            NOTHING => {}
            STREAM => asm!(
                "vmovntdq zmmword ptr [{dst} + {at}], {data}",
                dst = in(reg) dst,
                at = const AT,
                data = in(zmm_reg) data,
                options(nostack, preserves_flags),
            ),
            _ => _mm512_storeu_si512(dst.add(AT).cast(), data),
        }
    }
    let keyed = _mm512_xor_si512(data, key);
    let product = _mm512_mul_epu32(keyed, _mm512_shuffle_epi32::<0b00_11_00_01>(keyed));
    sums.products = _mm512_add_epi64(sums.products, product);
    sums.words = _mm512_add_epi64(sums.words, data);
}

/// Summands of the lanes: each product goes to its word's lane, and each word to the adjacent lane.
/// The words of all stripes are shuffled once, after they are added.
struct Sums {
    products: __m512i,
    words: __m512i,
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn after(lanes: __m512i) -> Self {
        Self {
            products: lanes,
            words: _mm512_setzero_si512(),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn lanes(self) -> __m512i {
        let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(self.words);
        _mm512_add_epi64(self.products, swapped)
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn scramble(acc: __m512i) -> __m512i {
    // SAFETY: the secret has 64 bytes from there on.
    let key = unsafe { load(SECRET.as_ptr().add(SCRAMBLE_AT)) };
    let mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64::<47>(acc)), key);
    let prime = _mm512_set1_epi32((PRIME32_1 as u32).cast_signed());
    let upper = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
    _mm512_add_epi64(
        _mm512_mul_epu32(mixed, prime),
        _mm512_slli_epi64::<32>(upper),
    )
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_lanes(lanes: &Lanes) -> __m512i {
    // SAFETY: the lanes are 64 bytes.
    unsafe { load(lanes.0.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_lanes(lanes: &mut Lanes, acc: __m512i) {
    // SAFETY: the lanes are 64 bytes.
    unsafe { _mm512_storeu_si512(lanes.0.as_mut_ptr().cast(), acc) };
}

/// # Safety
///
/// 64 bytes are readable at `at`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(at: *const u8) -> __m512i {
    // SAFETY: the caller's promise; the load needs no alignment.
    unsafe { _mm512_loadu_si512(at.cast()) }
}
