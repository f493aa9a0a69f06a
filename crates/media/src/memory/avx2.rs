//! The inner loops in 256-bit vectors: load once, hash in registers, store.
//!
//! One stripe is two vectors, and so are the lanes. The loop is bound by memory, not by the hash:
//! what counts is how many cache lines are on their way at once. So several leaves are moved in
//! turns where there are several, because the memory serves several streams faster than one; the
//! next kilobyte is fetched while this one is hashed where the hardware's own prefetchers would be
//! late; and a turn has as few instructions as it can, because a processor looks so many ahead, and
//! not so many lines.

use super::run::{Run, Store};
use super::xxh3::{BLOCK_STRIPES, Lanes, PRIME32_1, SCRAMBLE_AT, SECRET, STRIPE};
use crate::once;
use std::arch::asm;
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm_stream_si128, _mm256_add_epi64,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_mul_epu32,
    _mm256_set1_epi32, _mm256_setzero_si256, _mm256_shuffle_epi32, _mm256_slli_epi64,
    _mm256_srli_epi64, _mm256_storeu_si256, _mm256_xor_si256,
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

/// See `Isa::stripes`.
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

/// See `Isa::together`.
///
/// # Safety
///
/// As there, and the processor has AVX2.
pub(super) unsafe fn together<const WAYS: usize>(
    lanes: [&mut Lanes; WAYS],
    runs: [Run; WAYS],
    count: usize,
    (store, fetches): (Store, bool),
) {
    let widths = runs.map(|run| width(store, run.dst));
    // SAFETY: the caller's promise; `width` has looked at the alignment.
    unsafe {
        if store == Store::Through {
            return through(lanes, runs, count);
        }
        if widths.iter().any(|width| *width != widths[0]) {
            for (lanes, run) in lanes.into_iter().zip(runs) {
                stripes(lanes, 0, run, count, store);
            }
            return;
        }
        match widths[0] {
            NOTHING => several::<NOTHING, WAYS>(lanes, runs, count, true),
            CACHED => several::<CACHED, WAYS>(lanes, runs, count, fetches),
            STREAM_32 => several::<STREAM_32, WAYS>(lanes, runs, count, fetches),
            _ => several::<STREAM_16, WAYS>(lanes, runs, count, fetches),
        }
    }
}

/// How to store at `dst`.
fn width(store: Store, dst: *mut u8) -> u8 {
    match store {
        Store::Nothing => NOTHING,
        Store::Streaming if dst.addr().is_multiple_of(32) => STREAM_32,
        Store::Streaming if dst.addr().is_multiple_of(16) => STREAM_16,
        Store::Cached | Store::Streaming | Store::Through => CACHED,
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
        ..
    } = run;
    let mut acc = load_lanes(lanes);
    while stripes > 0 {
        let count = stripes.min(BLOCK_STRIPES - phase);
        stripes -= count;
        // What comes a block later, or what this lane reads after the last one.
        let ahead = if stripes > 0 {
            src.wrapping_add(BLOCK)
        } else {
            next
        };
        // SAFETY: `count` stripes are left, and they end with the block at the latest.
        acc = unsafe {
            match count {
                BLOCK_STRIPES => {
                    let half = TURN * STRIPE;
                    let acc = turn::<STORE, true>(acc, 0, src, dst, ahead);
                    let (dst, ahead) = (dst.wrapping_add(half), ahead.wrapping_add(half));
                    turn::<STORE, true>(acc, TURN, src.add(half), dst, ahead)
                }
                _ => few::<STORE>(acc, phase, src, dst, ahead, count),
            }
        };
        (src, dst) = (
            src.wrapping_add(count * STRIPE),
            dst.wrapping_add(count * STRIPE),
        );
        phase += count;
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

/// The code for each stripe of a turn, one after the other: in a loop the compiler would spend
/// instructions on counting and on addresses.
macro_rules! each_of_a_turn {
    ($number:ident => $code:block) => {
        each_of_a_turn!($number => $code, 0 1 2 3 4 5 6 7)
    };
    ($name:ident => $code:block, $($number:literal)*) => { $({
        const $name: usize = $number;
        $code
    })* };
}

/// Stripes of a run, some pages, from which on the processor's own prefetchers follow streams: of
/// shorter runs they are late. Measured on Zen 4: with small pages instructions that fetch cost a
/// tenth of the speed of longer runs, and with huge pages they gain as much.
const FOLLOWED: usize = (32 << 10) / STRIPE;

/// # Safety
///
/// As `together`; the destinations are aligned for `STORE`.
#[target_feature(enable = "avx2")]
unsafe fn several<const STORE: u8, const WAYS: usize>(
    lanes: [&mut Lanes; WAYS],
    mut runs: [Run; WAYS],
    mut stripes: usize,
    fetches: bool,
) {
    let mut acc = load_all(&lanes);
    let fetches = fetches || stripes < FOLLOWED;
    while stripes >= BLOCK_STRIPES {
        stripes -= BLOCK_STRIPES;
        for phase in [0, TURN] {
            for way in 0..WAYS {
                let ahead = runs[way].ahead(WAYS, stripes / BLOCK_STRIPES);
                let ahead = ahead.wrapping_add(phase * STRIPE);
                let run = runs[way].at(phase * STRIPE);
                // SAFETY: a whole block is left in every run.
                acc[way] = unsafe {
                    if fetches {
                        turn::<STORE, true>(acc[way], phase, run.src, run.dst, ahead)
                    } else {
                        turn::<STORE, false>(acc[way], phase, run.src, run.dst, ahead)
                    }
                };
            }
        }
        for way in 0..WAYS {
            acc[way] = scramble(acc[way]);
            runs[way] = runs[way].at(BLOCK);
        }
    }
    for (way, lanes) in lanes.into_iter().enumerate() {
        let Run { src, dst, next, .. } = runs[way];
        // SAFETY: fewer stripes than a block are left in every run.
        acc[way] = unsafe { few::<STORE>(acc[way], 0, src, dst, next, stripes) };
        store_lanes(lanes, acc[way]);
    }
}

/// Whole blocks, each by way of its run's desk. Hashing a block and streaming it are as close as
/// this, and a desk as small, so that the stores are still on their way to memory when the next
/// loads are; measured: with desks of several blocks one waits for the other.
///
/// # Safety
///
/// As `together`.
#[target_feature(enable = "avx2")]
unsafe fn through<const WAYS: usize>(
    lanes: [&mut Lanes; WAYS],
    mut runs: [Run; WAYS],
    mut stripes: usize,
) {
    let mut acc = load_all(&lanes);
    // So far behind the beginning of a line a destination begins, and what is on its desk too: only
    // whole lines go out, and what is left of the last one waits for the next block.
    let shifts = runs.map(|run| run.dst.addr() % STRIPE);
    let mut begun = false;
    while stripes >= BLOCK_STRIPES {
        stripes -= BLOCK_STRIPES;
        for phase in [0, TURN] {
            for way in 0..WAYS {
                let Run { src, desk, .. } = runs[way].at(phase * STRIPE);
                let desk = desk.wrapping_add(phase * STRIPE + shifts[way]);
                // SAFETY: a whole block is left in every run, and the desk has room for it and for
                // less than a line in front.
                unsafe {
                    acc[way] = turn::<CACHED, false>(acc[way], phase, src, desk, src);
                }
            }
        }
        for phase in [0, TURN] {
            for way in 0..WAYS {
                let (run, shift) = (runs[way].at(phase * STRIPE), shifts[way]);
                let desk = run.desk.wrapping_add(phase * STRIPE);
                let ahead = if stripes > 0 {
                    run.src.wrapping_add(BLOCK)
                } else {
                    run.next.wrapping_add(phase * STRIPE)
                };
                // SAFETY: the desk holds the block behind `shift` bytes, which are those before it
                // unless it is the first; that much is writable before and after `dst`.
                unsafe {
                    if begun || shift == 0 || phase > 0 {
                        lines(desk, run.dst.wrapping_sub(shift), ahead);
                    } else {
                        carry(desk.add(shift), run.dst, TURN * STRIPE - shift, ahead);
                    }
                }
            }
        }
        for way in 0..WAYS {
            acc[way] = scramble(acc[way]);
            if shifts[way] > 0 {
                let desk = runs[way].desk;
                // SAFETY: the desk is a block and a line.
                unsafe { std::ptr::copy_nonoverlapping(desk.add(BLOCK), desk, STRIPE) };
            }
            runs[way] = runs[way].at(BLOCK);
        }
        begun = true;
    }
    for (way, lanes) in lanes.into_iter().enumerate() {
        let (Run { dst, desk, .. }, shift) = (runs[way], shifts[way]);
        // SAFETY: the last `shift` bytes of the last block wait at the desk's beginning.
        unsafe { std::ptr::copy_nonoverlapping(desk, dst.wrapping_sub(shift), shift) };
        store_lanes(lanes, acc[way]);
    }
}

/// See `Isa::carry`.
///
/// # Safety
///
/// As there, and the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn carry(src: *const u8, dst: *mut u8, len: usize, next: *const u8) {
    // Streaming stores want whole lines. Meanwhile what is hashed next comes from memory.
    let head = dst.align_offset(STRIPE).min(len);
    let whole = (len - head) / STRIPE;
    let tail = head + whole * STRIPE;
    // SAFETY: head, lines and tail are what the caller promised.
    unsafe {
        if head > 0 {
            std::ptr::copy_nonoverlapping(src, dst, head);
        }
        for at in (head..tail).step_by(STRIPE) {
            line::<0>(src.add(at), dst.add(at), next.wrapping_add(at));
        }
        if tail < len {
            std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), len - tail);
        }
    }
}

/// As `carry`, for as many lines as a turn has stripes.
///
/// # Safety
///
/// As `carry`; `dst` is aligned to lines.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn lines(src: *const u8, dst: *mut u8, next: *const u8) {
    each_of_a_turn!(NUMBER => {
        // SAFETY: the caller's promise.
        unsafe { line::<{ NUMBER * STRIPE }>(src, dst, next) };
    });
}

/// Streams the line `AT` bytes behind `src` as far behind `dst`, and fetches one for later: as far
/// as the second-level cache, in the first it would drive out what is to be streamed.
///
/// # Safety
///
/// As `lines`, for one line.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn line<const AT: usize>(src: *const u8, dst: *mut u8, next: *const u8) {
    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(AT).cast());
    // SAFETY: the caller's promise.
    unsafe { stream::<AT>(dst, load(src.add(AT)), load(src.add(AT + 32))) };
}

/// `TURN` stripes of one block, and the fetch of as many lines at `ahead` if it `FETCHES`.
///
/// # Safety
///
/// As `single`, for `TURN` stripes; `phase` is at most 8.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn turn<const STORE: u8, const FETCHES: bool>(
    acc: Vectors,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
    ahead: *const u8,
) -> Vectors {
    let mut sums = Sums::after(acc);
    each_of_a_turn!(NUMBER => {
        const AT: usize = NUMBER * STRIPE;
        if FETCHES {
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(AT).cast());
        }
        // SAFETY: the caller's promise.
        unsafe { stripe::<STORE, AT>(&mut sums, phase + NUMBER, src, dst) };
    });
    sums.lanes()
}

/// Some stripes of one block, and the fetch of as many lines at `ahead`.
///
/// # Safety
///
/// As `single`, for `count` stripes; `phase + count` is at most 16.
#[target_feature(enable = "avx2")]
unsafe fn few<const STORE: u8>(
    acc: Vectors,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
    ahead: *const u8,
    count: usize,
) -> Vectors {
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
#[target_feature(enable = "avx2")]
unsafe fn stripe<const STORE: u8, const AT: usize>(
    sums: &mut Sums,
    phase: usize,
    src: *const u8,
    dst: *mut u8,
) {
    // SAFETY: 64 bytes are readable there; the secret has 64 bytes from 8 * 15 on.
    let (low, high, key_low, key_high) = unsafe {
        let (src, key) = (src.add(AT), SECRET.as_ptr().add(phase * 8));
        (load(src), load(src.add(32)), load(key), load(key.add(32)))
    };
    // What is stored is what is hashed.
    let (low, high) = (once::vector(low), once::vector(high));
    // SAFETY: 64 bytes are writable there unless `STORE` is `NOTHING`, and it is aligned.
    unsafe {
        match STORE {
            NOTHING => {}
            STREAM_32 => stream::<AT>(dst, low, high),
            STREAM_16 => {
                let dst = dst.add(AT);
                _mm_stream_si128(dst.cast(), _mm256_castsi256_si128(low));
                _mm_stream_si128(dst.add(16).cast(), _mm256_extracti128_si256::<1>(low));
                _mm_stream_si128(dst.add(32).cast(), _mm256_castsi256_si128(high));
                _mm_stream_si128(dst.add(48).cast(), _mm256_extracti128_si256::<1>(high));
            }
            _ => {
                _mm256_storeu_si256(dst.add(AT).cast(), low);
                _mm256_storeu_si256(dst.add(AT + 32).cast(), high);
            }
        }
    }
    let Sums { products, words } = sums;
    products.0 = _mm256_add_epi64(products.0, product(low, key_low));
    products.1 = _mm256_add_epi64(products.1, product(high, key_high));
    words.0 = _mm256_add_epi64(words.0, low);
    words.1 = _mm256_add_epi64(words.1, high);
}

/// Streams a line to the address `AT` bytes behind `dst`. The compiler's intrinsic would compute
/// that address by an instruction of its own for every store.
///
/// # Safety
///
/// 64 bytes are writable there, and it is aligned to 32.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn stream<const AT: usize>(dst: *mut u8, low: __m256i, high: __m256i) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "vmovntdq ymmword ptr [{dst} + {at}], {low}",
            "vmovntdq ymmword ptr [{dst} + {at} + 32], {high}",
            dst = in(reg) dst,
            at = const AT,
            low = in(ymm_reg) low,
            high = in(ymm_reg) high,
            options(nostack, preserves_flags),
        );
    }
}

/// The products of the halves of four 64-bit words, after the key.
#[inline]
#[target_feature(enable = "avx2")]
fn product(data: __m256i, key: __m256i) -> __m256i {
    let keyed = _mm256_xor_si256(data, key);
    _mm256_mul_epu32(keyed, _mm256_shuffle_epi32::<0b00_11_00_01>(keyed))
}

/// What is added to the lanes: products to a word's own lane, and words to its neighbour's, which
/// is looked for once for all of them.
struct Sums {
    products: Vectors,
    words: Vectors,
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn after(lanes: Vectors) -> Self {
        Self {
            products: lanes,
            words: Vectors(_mm256_setzero_si256(), _mm256_setzero_si256()),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn lanes(self) -> Vectors {
        let Self { products, words } = self;
        let swapped = |words| _mm256_shuffle_epi32::<0b01_00_11_10>(words);
        Vectors(
            _mm256_add_epi64(products.0, swapped(words.0)),
            _mm256_add_epi64(products.1, swapped(words.1)),
        )
    }
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
fn load_all<const WAYS: usize>(lanes: &[&mut Lanes; WAYS]) -> [Vectors; WAYS] {
    let mut acc = [Vectors(_mm256_setzero_si256(), _mm256_setzero_si256()); WAYS];
    for way in 0..WAYS {
        acc[way] = load_lanes(lanes[way]);
    }
    acc
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
