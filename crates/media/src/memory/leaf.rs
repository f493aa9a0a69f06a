//! The digest of one leaf, fed piece by piece while its bytes are moved.
//!
//! The hash adds whole stripes, except that the last 64 bytes of a leaf are added once more in a
//! form of their own. A leaf's length is known before its first byte, so it is known which stripe
//! is the last plain one; what lies behind it, and stripes that straddle two spans, wait in a
//! small buffer. So does the last plain stripe, part of which is among the last 64 bytes. Every
//! byte is read from the source once: what is hashed is what is stored, whatever becomes of the
//! source meanwhile.

use super::kernel::{Isa, Run, Store};
use super::xxh3::{BLOCK_STRIPES, Lanes, SHORT_MAX, STRIPE};
use crate::once;
use xxhash_rust::xxh3::xxh3_128;

/// The state of one leaf's digest.
pub(crate) struct Leaf {
    lanes: Lanes,
    /// Bytes of the whole leaf, known from the start.
    len: u64,
    /// Whole stripes that are still to be added.
    stripes_left: u64,
    /// Number of the next stripe in its block of 16.
    phase: usize,
    /// Bytes waiting in `held`, after the first 64 of it for long leaves.
    pending: usize,
    /// Short leaves: all bytes so far. Long leaves: the last stripe added, then the bytes that
    /// wait for their stripe to be complete or to be the last.
    held: [u8; 256],
}

impl Leaf {
    /// The leaf without bytes.
    pub(crate) const EMPTY: Self = Self {
        lanes: Lanes::START,
        len: 0,
        stripes_left: 0,
        phase: 0,
        pending: 0,
        held: [0; 256],
    };

    /// A leaf of `len` bytes, none of which has been fed.
    pub(crate) fn new(len: u64) -> Self {
        let stripes_left = if len > SHORT_MAX as u64 {
            (len - 1) / STRIPE as u64
        } else {
            0
        };
        Self {
            len,
            stripes_left,
            ..Self::EMPTY
        }
    }

    /// Hashes `bytes` without moving them.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        // SAFETY: the slice is readable for its length, and nothing is stored.
        unsafe {
            self.feed(
                Isa::best(),
                bytes.as_ptr(),
                std::ptr::null_mut(),
                bytes.len(),
                Plan::HASH,
            );
        }
    }

    /// Hashes the next `len` bytes at `src` and, unless `plan` says otherwise, moves them to
    /// `dst`. Bytes beyond the leaf's length must not be fed.
    ///
    /// # Safety
    ///
    /// `src` is readable and, unless `plan.store` is [`Store::Nothing`], `dst` is writable for
    /// `len` bytes, and the two do not overlap. `plan.isa` is one this processor has.
    pub(crate) unsafe fn feed(
        &mut self,
        isa: Isa,
        mut src: *const u8,
        mut dst: *mut u8,
        mut len: usize,
        plan: Plan,
    ) {
        if self.len <= SHORT_MAX as u64 {
            // SAFETY: passed on; a short leaf fits the buffer because no more than its length is
            // fed, which `hold` asserts.
            unsafe { self.hold(0, src, dst, len, plan.store) };
            return;
        }
        if self.pending > 0 {
            let take = len.min(STRIPE - self.pending);
            // SAFETY: `take` is at most `len`.
            unsafe { self.hold(STRIPE, src, dst, take, plan.store) };
            (src, dst, len) = (src.wrapping_add(take), dst.wrapping_add(take), len - take);
            if self.pending == STRIPE && self.stripes_left > 0 {
                self.add_held();
            }
        }
        let plain = self.stripes_left.saturating_sub(1).min(usize::MAX as u64);
        let stripes = (len / STRIPE).min(plain as usize);
        if stripes > 0 {
            // SAFETY: `stripes * 64` is at most `len`; the rest is passed on.
            unsafe { self.add(isa, src, dst, stripes, plan) };
            let moved = stripes * STRIPE;
            (src, dst, len) = (
                src.wrapping_add(moved),
                dst.wrapping_add(moved),
                len - moved,
            );
        }
        if len >= STRIPE && self.stripes_left == 1 {
            // SAFETY: a stripe is left, and none waits where one does not end another.
            unsafe { self.hold(STRIPE, src, dst, STRIPE, plan.store) };
            self.add_held();
            (src, dst, len) = (
                src.wrapping_add(STRIPE),
                dst.wrapping_add(STRIPE),
                len - STRIPE,
            );
        }
        if len > 0 {
            // SAFETY: `len` bytes are left, fewer than a stripe or the last one; `hold` asserts it.
            unsafe { self.hold(STRIPE, src, dst, len, plan.store) };
        }
    }

    /// How many stripes could be added at once, of `len` bytes that come next: none unless the leaf
    /// is at the beginning of a block, and not the last plain one.
    pub(crate) fn stripes_ahead(&self, len: u64) -> u64 {
        match self.phase + self.pending {
            0 => (len / STRIPE as u64).min(self.stripes_left.saturating_sub(1)),
            _ => 0,
        }
    }

    /// Feeds `stripes` stripes to each of several leaves, in turns.
    ///
    /// # Safety
    ///
    /// As [`Leaf::feed`] for each, with `stripes * 64` bytes; `stripes` is at least 1 and no more
    /// than [`Leaf::stripes_ahead`] of any.
    pub(crate) unsafe fn feed_together<const WAYS: usize>(
        mut leaves: [&mut Self; WAYS],
        (isa, fetches): (Isa, bool),
        runs: [Run; WAYS],
        stripes: usize,
        store: Store,
    ) {
        let lanes = leaves.each_mut().map(|leaf| &mut leaf.lanes);
        // SAFETY: the caller's promise, also for `added`.
        unsafe {
            isa.together(lanes, runs, stripes, (store, fetches));
        }
        for leaf in leaves {
            leaf.added(stripes);
        }
    }

    /// The digest. All bytes of the leaf have been fed.
    pub(crate) fn finish(&self) -> u128 {
        if self.len <= SHORT_MAX as u64 {
            assert_eq!(self.pending as u64, self.len, "bytes of a leaf are missing");
            return xxh3_128(&self.held[..self.pending]);
        }
        assert!(
            self.stripes_left == 0 && self.pending as u64 == self.len - (self.len - 1) / 64 * 64,
            "bytes of a leaf are missing"
        );
        let mut last = [0; STRIPE];
        last.copy_from_slice(&self.held[self.pending..self.pending + STRIPE]);
        self.lanes.finish(&last, self.len)
    }

    /// Adds `stripes` whole stripes straight from the source.
    ///
    /// # Safety
    ///
    /// As `feed`, for `stripes * 64` bytes.
    unsafe fn add(&mut self, isa: Isa, src: *const u8, dst: *mut u8, stripes: usize, plan: Plan) {
        // SAFETY: the caller's promise.
        unsafe {
            let run = Run {
                src,
                dst,
                desk: std::ptr::null_mut(),
                next: plan.next,
            };
            isa.stripes(&mut self.lanes, self.phase, run, stripes, plan.store);
        }
        self.added(stripes);
    }

    /// Notes that `stripes` stripes have been added to the lanes, of which none was the last one.
    fn added(&mut self, stripes: usize) {
        debug_assert!((stripes as u64) < self.stripes_left, "the last one is held");
        self.phase = (self.phase + stripes) % BLOCK_STRIPES;
        self.stripes_left -= stripes as u64;
    }

    /// Adds the stripe that has been completed in the buffer.
    fn add_held(&mut self) {
        let mut stripe = [0; STRIPE];
        stripe.copy_from_slice(&self.held[STRIPE..2 * STRIPE]);
        self.lanes.add(&stripe, self.phase);
        self.phase += 1;
        if self.phase == BLOCK_STRIPES {
            self.lanes.scramble();
            self.phase = 0;
        }
        self.held[..STRIPE].copy_from_slice(&stripe);
        self.stripes_left -= 1;
        self.pending = 0;
    }

    /// Takes `len` bytes into the buffer, `base` bytes after its start, and stores them from there.
    ///
    /// # Safety
    ///
    /// As `feed`.
    unsafe fn hold(&mut self, base: usize, src: *const u8, dst: *mut u8, len: usize, store: Store) {
        let at = base + self.pending;
        let room = &mut self.held[at..at + len];
        // SAFETY: `room` has `len` bytes and belongs to this leaf alone; `src` and `dst` are the
        // caller's promise.
        unsafe {
            once::copy(src, room.as_mut_ptr(), len);
            if store != Store::Nothing {
                std::ptr::copy_nonoverlapping(room.as_ptr(), dst, len);
            }
        }
        self.pending += len;
    }
}

/// How a piece is moved.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// What happens to the bytes besides being hashed.
    pub(crate) store: Store,
    /// Where this lane reads next, to fetch it early; null when unknown.
    pub(crate) next: *const u8,
}

impl Plan {
    /// Hash only.
    pub(crate) const HASH: Self = Self {
        store: Store::Nothing,
        next: std::ptr::null(),
    };
}

#[cfg(test)]
mod tests {
    use super::super::kernel::DESK;
    use super::*;

    /// A small generator (splitmix64), seeded so that a failure repeats.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }

        fn below(&mut self, limit: usize) -> usize {
            (self.next() % limit as u64) as usize
        }

        fn bytes(&mut self, len: usize) -> Vec<u8> {
            (0..len).map(|_| self.next() as u8).collect()
        }
    }

    /// Feeds `bytes` in pieces of the given lengths; returns the digest and what was stored.
    fn fed(isa: Isa, store: Store, bytes: &[u8], cuts: &[usize], shift: usize) -> (u128, Vec<u8>) {
        // Room for any shift of the alignment, and a border that must stay untouched.
        let mut out = vec![0xA5; bytes.len() + 192];
        let base = out.as_ptr().align_offset(64) + shift;
        let mut leaf = Leaf::new(bytes.len() as u64);
        let mut at = 0;
        for &cut in cuts {
            let plan = Plan {
                store,
                next: std::ptr::null(),
            };
            // SAFETY: the cuts add up to the length of `bytes`, and `out` has that much room.
            unsafe {
                leaf.feed(
                    isa,
                    bytes.as_ptr().add(at),
                    out.as_mut_ptr().add(base + at),
                    cut,
                    plan,
                );
            }
            at += cut;
        }
        super::super::kernel::fence();
        assert_eq!(at, bytes.len());
        let end = base + at;
        assert!(
            out[..base].iter().chain(&out[end..]).all(|&b| b == 0xA5),
            "wrote outside"
        );
        (leaf.finish(), out[base..end].to_vec())
    }

    const STORES: [Store; 3] = [Store::Nothing, Store::Cached, Store::Streaming];

    #[test]
    fn every_length_up_to_5000_matches_the_published_hash() {
        let bytes = Random(1).bytes(5000);
        let step = if cfg!(miri) { 331 } else { 1 };
        for len in (0..=bytes.len()).step_by(step) {
            let expected = xxh3_128(&bytes[..len]);
            for isa in Isa::all() {
                let store = STORES[len % 3];
                let (digest, stored) = fed(isa, store, &bytes[..len], &[len], 0);
                assert_eq!(digest, expected, "{isa:?} length {len}");
                assert!(
                    store == Store::Nothing || stored == bytes[..len],
                    "{isa:?} {len}"
                );
            }
        }
    }

    #[test]
    fn random_cuts_and_alignments_change_nothing() {
        let rounds = if cfg!(miri) { 6 } else { 4000 };
        for seed in 0..rounds {
            let mut random = Random(seed);
            let len = match random.below(3) {
                0 => random.below(600),
                1 => random.below(5000),
                _ => random.below(if cfg!(miri) { 6000 } else { 70_000 }),
            };
            let bytes = random.bytes(len + 64);
            let bytes = &bytes[random.below(64)..][..len];
            let longest = [7, 100, 1024, 5000, 40_000][random.below(5)];
            let mut cuts = Vec::new();
            let mut left = len;
            while left > 0 {
                let cut = random.below(longest + 1).min(left);
                cuts.push(cut);
                left -= cut;
            }
            let shift = random.below(64);
            let expected = xxh3_128(bytes);
            for isa in Isa::all() {
                for store in STORES {
                    let (digest, stored) = fed(isa, store, bytes, &cuts, shift);
                    assert_eq!(digest, expected, "seed {seed} {isa:?} {store:?}");
                    assert!(
                        store == Store::Nothing || stored == bytes,
                        "seed {seed} {isa:?}"
                    );
                }
            }
        }
    }

    /// `WAYS` leaves of some blocks and `tail` bytes go through desks to destinations that begin
    /// `shift` bytes behind a line, one more for each.
    fn through<const WAYS: usize>(isa: Isa, blocks: usize, tail: usize, shift: usize) {
        let (whole, len) = (blocks * 1024, blocks * 1024 + tail);
        let bytes: [Vec<u8>; WAYS] = std::array::from_fn(|way| Random(way as u64).bytes(len));
        let mut outs: [Vec<u8>; WAYS] = std::array::from_fn(|_| vec![0xA5; len + 256]);
        let bases: [usize; WAYS] = std::array::from_fn(|way| {
            let line = outs[way].as_ptr().align_offset(64);
            line + 64 + (shift + way) % 64
        });
        // A desk more, which stays as it is.
        let mut desks = vec![0xA5; (WAYS + 1) * DESK];
        let desks_at = desks.as_mut_ptr();
        let mut leaves: [Leaf; WAYS] = std::array::from_fn(|_| Leaf::new(len as u64));
        let runs = std::array::from_fn(|way| Run {
            src: bytes[way].as_ptr(),
            dst: outs[way].as_mut_ptr().wrapping_add(bases[way]),
            desk: desks_at.wrapping_add(way * DESK),
            next: std::ptr::null(),
        });
        let plan = Plan {
            store: Store::Cached,
            next: std::ptr::null(),
        };
        // SAFETY: every source and destination has `len` bytes, every desk its own.
        unsafe {
            let (fed, stripes) = (leaves.each_mut(), whole / STRIPE);
            Leaf::feed_together(fed, (isa, false), runs, stripes, Store::Through);
            for (leaf, run) in leaves.iter_mut().zip(runs) {
                let Run { src, dst, .. } = run.at(whole);
                leaf.feed(isa, src, dst, tail, plan);
            }
        }
        super::super::kernel::fence();
        let case = format!("{isa:?}, {WAYS} of {blocks} blocks and {tail} bytes, shift {shift}");
        assert!(desks[WAYS * DESK..].iter().all(|&b| b == 0xA5), "{case}");
        for way in 0..WAYS {
            let (out, base) = (&outs[way], bases[way]);
            assert_eq!(leaves[way].finish(), xxh3_128(&bytes[way]), "{case}");
            assert!(out[base..base + len] == bytes[way], "{case}");
            let mut around = out[..base].iter().chain(&out[base + len..]);
            assert!(around.all(|&b| b == 0xA5), "{case} wrote outside");
        }
    }

    #[test]
    fn blocks_go_through_desks_to_destinations_of_any_alignment() {
        // Under Miri a byte takes long.
        let (step, shapes): (usize, &[[usize; 2]]) = match cfg!(miri) {
            true => (37, &[[2, 65]]),
            // The last plain stripe is none of theirs.
            false => (1, &[[1, 65], [2, 128], [3, 1000], [8, 100]]),
        };
        for isa in Isa::all() {
            for shift in (0..64).step_by(step) {
                for &[blocks, tail] in shapes {
                    through::<1>(isa, blocks, tail, shift);
                    through::<2>(isa, blocks, tail, shift);
                    through::<3>(isa, blocks, tail, shift);
                    through::<4>(isa, blocks, tail, shift);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "bytes of a leaf are missing")]
    fn a_leaf_with_missing_bytes_has_no_digest() {
        let mut leaf = Leaf::new(1000);
        leaf.update(&[0; 999]);
        leaf.finish();
    }
}
