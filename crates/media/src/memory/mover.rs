//! Moves the units of a slice, two at a time.
//!
//! A single stream of memory accesses leaves a part of the memory's bandwidth unused, so a lane
//! has two units in hand and moves them in turns for as long as both have whole stripes at hand.
//! What does not fit that (heads, tails, spans of odd lengths) is moved alone.

use super::kernel::{self, Isa, Run, Store};
use super::leaf::{Leaf, Plan};
use super::xxh3::STRIPE;
use kvdepot_plan::Span;

/// How lanes move bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mover {
    /// The kernels to use.
    pub(crate) isa: Isa,
    /// The shortest leaf that is stored by streaming stores.
    pub(crate) stream_min: u64,
}

/// Units by number, and who wants their digests.
pub(crate) trait Units {
    /// The unit's spans, its length, and whether it is copied or else only hashed.
    fn unit(&self, number: u32) -> (&[Span], u64, bool);

    /// Where unit `number` begins to read; 0 when there is no such unit.
    fn source(&self, number: u32) -> u64;

    /// All bytes of the unit have been moved, though streaming stores may still be on their way.
    fn report(&self, number: u32, digest: u128);
}

impl Mover {
    /// Moves units `first..first + count` and reports each. On return their bytes are visible to
    /// every thread that is told.
    ///
    /// # Safety
    ///
    /// All spans of the units are readable at their source and, if the unit is copied, writable
    /// at their destination; no span overlaps itself. The machine has `self.isa`.
    pub(crate) unsafe fn run(self, units: &impl Units, first: u32, count: u32) {
        let mut numbers = first..first + count;
        let mut start = || {
            numbers
                .next()
                .map(|number| Slot::start(units, number, self))
        };
        let (mut a, mut b) = (start(), start());
        loop {
            // SAFETY: the caller's promise, for all of this block.
            unsafe {
                match (&mut a, &mut b) {
                    (Some(x), Some(y)) => step(x, y, self.isa, units),
                    (Some(x), None) | (None, Some(x)) => x.step(self.isa, units),
                    (None, None) => break,
                }
            }
            for slot in [&mut a, &mut b] {
                if let Some(ended) = slot.take_if(|slot| slot.spans.is_empty()) {
                    units.report(ended.number, ended.leaf.finish());
                    *slot = start();
                }
            }
        }
        kernel::fence();
    }
}

/// A unit in hand.
struct Slot<'a> {
    number: u32,
    leaf: Leaf,
    store: Store,
    /// The spans that are not finished, and how much of the first one is.
    spans: &'a [Span],
    done: u64,
}

impl<'a> Slot<'a> {
    fn start(units: &'a impl Units, number: u32, mover: Mover) -> Self {
        let (spans, bytes, copies) = units.unit(number);
        #[cfg(test)]
        super::fault::strike(bytes);
        let store = match copies {
            false => Store::Nothing,
            true if bytes >= mover.stream_min => Store::Streaming,
            true => Store::Cached,
        };
        Self {
            number,
            leaf: Leaf::new(bytes),
            store,
            spans,
            done: 0,
        }
    }

    /// What is left of the current span; its length may be 0 after the last one only.
    fn left(&self, units: &impl Units) -> (Run, u64) {
        let span = self.spans.first().copied().unwrap_or(Span::new(0, 0, 0));
        let next = match self.spans.get(1) {
            Some(next) => next.src,
            // The other slot has the unit after this one, most of the time.
            None => units.source(self.number + 2),
        };
        let run = Run {
            src: std::ptr::with_exposed_provenance((span.src + self.done) as usize),
            dst: std::ptr::with_exposed_provenance_mut((span.dst + self.done) as usize),
            next: std::ptr::with_exposed_provenance(next as usize),
        };
        (run, span.len - self.done)
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        if let Some((span, rest)) = self.spans.split_first()
            && span.len == self.done
        {
            (self.spans, self.done) = (rest, 0);
        }
    }

    /// Moves what is left of the current span.
    ///
    /// # Safety
    ///
    /// As [`Mover::run`].
    unsafe fn step(&mut self, isa: Isa, units: &impl Units) {
        let (run, len) = self.left(units);
        let plan = Plan {
            store: self.store,
            next: run.next,
        };
        // SAFETY: the caller's promise, for the rest of a span.
        unsafe { self.leaf.feed(isa, run.src, run.dst, len as usize, plan) };
        self.advance(len);
    }
}

/// Moves whole stripes of both, as many as both have, or else one's span.
///
/// # Safety
///
/// As [`Mover::run`].
unsafe fn step<'a>(a: &mut Slot<'a>, b: &mut Slot<'a>, isa: Isa, units: &impl Units) {
    let ((run_a, len_a), (run_b, len_b)) = (a.left(units), b.left(units));
    let (ahead_a, ahead_b) = (a.leaf.stripes_ahead(len_a), b.leaf.stripes_ahead(len_b));
    let stripes = ahead_a.min(ahead_b);
    if stripes == 0 || a.store != b.store {
        let slot = if ahead_b == 0 && ahead_a > 0 { b } else { a };
        // SAFETY: the caller's promise.
        return unsafe { slot.step(isa, units) };
    }
    // SAFETY: the caller's promise; both spans have that many stripes left.
    unsafe {
        let leaves = [&mut a.leaf, &mut b.leaf];
        Leaf::feed_pair(leaves, isa, [run_a, run_b], stripes as usize, a.store);
    }
    a.advance(stripes * STRIPE as u64);
    b.advance(stripes * STRIPE as u64);
}
