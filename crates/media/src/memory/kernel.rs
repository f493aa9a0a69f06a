//! The inner loops, one per instruction set, chosen once at run time.

pub(crate) use super::run::{Run, Store};
use super::xxh3::{BLOCK_STRIPES, Lanes, STRIPE};
use crate::once;
use std::sync::OnceLock;

/// Bytes of a desk: a block, and less than a line that waits for it.
pub(crate) const DESK: usize = (BLOCK_STRIPES + 1) * STRIPE;

/// An instruction set that has kernels. Code outside can only hold one that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// Plain Rust, on every processor; the compiler vectorises it where it can.
    Portable,
    /// 256-bit vectors and streaming stores of x86-64.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx2,
    /// 512-bit vectors and streaming stores of x86-64.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx512,
}

impl Isa {
    /// The one that is fast on each machine that has it.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| *Self::all().get(1).unwrap_or(&Self::Portable))
    }

    /// All that this machine has, narrowest first.
    pub(crate) fn all() -> Vec<Self> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if std::arch::is_x86_feature_detected!("avx2") {
            let mut all = vec![Self::Portable, Self::Avx2];
            all.extend(std::arch::is_x86_feature_detected!("avx512f").then_some(Self::Avx512));
            return all;
        }
        vec![Self::Portable]
    }

    /// Adds `stripes` stripes of `run` to `lanes`, the first being number `phase` of its block, and
    /// stores them.
    ///
    /// # Safety
    ///
    /// The source is readable for `stripes * 64` bytes, and so is the destination writable unless
    /// `store` is [`Store::Nothing`]; they do not overlap. `self` comes from [`Isa::all`]. `store`
    /// is not [`Store::Through`].
    #[inline]
    pub(crate) unsafe fn stripes(
        self,
        lanes: &mut Lanes,
        phase: usize,
        run: Run,
        stripes: usize,
        store: Store,
    ) {
        debug_assert!(phase < BLOCK_STRIPES);
        match self {
            // SAFETY: the caller's promise.
            Self::Portable => unsafe { portable(lanes, phase, run, stripes, store) },
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller's promise; `Isa::all` has seen AVX-512.
            Self::Avx512 if super::avx512::can_store(store, &[run]) => unsafe {
                super::avx512::stripes(lanes, phase, run, stripes, store)
            },
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller's promise; `Isa::all` has seen AVX2.
            Self::Avx2 | Self::Avx512 => unsafe {
                super::avx2::stripes(lanes, phase, run, stripes, store)
            },
        }
    }

    /// As [`Isa::stripes`], for several leaves at once that are all at the beginning of a block.
    /// With `fetches`, instructions prefetch; without, only the processor's own prefetcher does in
    /// long runs.
    ///
    /// # Safety
    ///
    /// As [`Isa::stripes`], for each. For [`Store::Through`], the stripes are whole blocks, and
    /// [`DESK`] bytes at each desk are writable, apart from the others and the destinations.
    #[cfg_attr(
        any(not(target_arch = "x86_64"), miri),
        expect(unused_variables, reason = "nothing is fetched")
    )]
    #[inline]
    pub(crate) unsafe fn together<const WAYS: usize>(
        self,
        lanes: [&mut Lanes; WAYS],
        runs: [Run; WAYS],
        stripes: usize,
        (store, fetches): (Store, bool),
    ) {
        match self {
            Self::Portable => {
                for (lanes, run) in lanes.into_iter().zip(runs) {
                    // SAFETY: the caller's promise.
                    unsafe {
                        match store {
                            Store::Through => portable_through(lanes, run, stripes),
                            _ => portable(lanes, 0, run, stripes, store),
                        }
                    };
                }
            }
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller's promise; `Isa::all` has seen AVX-512.
            Self::Avx512 if super::avx512::can_store(store, &runs) => unsafe {
                super::avx512::together(lanes, runs, stripes, (store, fetches))
            },
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller's promise; `Isa::all` has seen AVX2.
            Self::Avx2 | Self::Avx512 => unsafe {
                super::avx2::together(lanes, runs, stripes, (store, fetches))
            },
        }
    }

    /// Copies `len` bytes that the caches hold, past the caches if it `streams`, and fetches the
    /// first of what is read `next` (null when unknown). [`fence`] before anybody is told.
    ///
    /// # Safety
    ///
    /// `src` is readable and `dst` writable for `len` bytes, they do not overlap, and `self` comes
    /// from [`Isa::all`].
    #[cfg_attr(
        any(not(target_arch = "x86_64"), miri),
        expect(unused_variables, reason = "plain copies know neither")
    )]
    pub(crate) unsafe fn carry(
        self,
        src: *const u8,
        dst: *mut u8,
        len: usize,
        streams: bool,
        next: *const u8,
    ) {
        match self {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller's promise; `Isa::all` has seen AVX2.
            Self::Avx2 | Self::Avx512 if streams => unsafe {
                super::avx2::carry(src, dst, len, next)
            },
            // SAFETY: the caller's promise.
            _ => unsafe { std::ptr::copy_nonoverlapping(src, dst, len) },
        }
    }
}

/// The shortest copy that goes past the caches: what is shorter is likely to be read soon, and the
/// lines at its ends cost more.
const STREAM_MIN: usize = 16 << 10;

/// Copies `len` bytes, with streaming stores if there are many. Call [`fence`] before another
/// thread uses the bytes.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `len` bytes, and they do not overlap. Other threads may
/// change the bytes during the call; the result is then any mixture.
pub unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise; the machine has the best of its instruction sets.
    unsafe { Isa::best().carry(src, dst, len, len >= STREAM_MIN, std::ptr::null()) }
}

/// Makes streaming stores of this thread visible before its later operations.
#[inline]
pub fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: `sfence` is part of SSE, which every x86-64 processor has.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// The kernel without vectors.
///
/// # Safety
///
/// As [`Isa::stripes`].
unsafe fn portable(lanes: &mut Lanes, mut phase: usize, run: Run, stripes: usize, store: Store) {
    for i in 0..stripes {
        // SAFETY: stripe `i` lies inside what the caller promised; no alignment is needed.
        let words: [u64; STRIPE / 8] = unsafe {
            run.src
                .add(i * STRIPE)
                .cast::<[u64; STRIPE / 8]>()
                .read_unaligned()
        };
        let words = words.map(once::word);
        if store != Store::Nothing {
            // SAFETY: as above.
            unsafe {
                run.dst
                    .add(i * STRIPE)
                    .cast::<[u64; STRIPE / 8]>()
                    .write_unaligned(words)
            };
        }
        lanes.add_words(words.map(u64::from_le), phase * 8);
        phase += 1;
        if phase == BLOCK_STRIPES {
            lanes.scramble();
            phase = 0;
        }
    }
}

/// As `portable`, for whole blocks, by way of the run's desk.
///
/// # Safety
///
/// As [`Isa::together`].
unsafe fn portable_through(lanes: &mut Lanes, run: Run, stripes: usize) {
    const BLOCK: usize = BLOCK_STRIPES * STRIPE;
    for at in (0..stripes * STRIPE).step_by(BLOCK) {
        let Run { dst, desk, .. } = run.at(at);
        let into = Run {
            dst: desk,
            ..run.at(at)
        };
        // SAFETY: the caller's promise, for one of the blocks.
        unsafe {
            portable(lanes, 0, into, BLOCK_STRIPES, Store::Cached);
            std::ptr::copy_nonoverlapping(desk, dst, BLOCK);
        }
    }
}
