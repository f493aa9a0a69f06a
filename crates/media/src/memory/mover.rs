//! Moves the units of a slice, several at a time.
//!
//! A single stream of memory accesses leaves a part of the memory's bandwidth unused, so a lane
//! has several units in hand and moves them in turns for as long as all have whole stripes at
//! hand. What does not fit that (heads, tails, spans of odd lengths) is moved alone.

use super::choice::{CopyKernel, WAYS, chosen};
use super::kernel::{self, Isa, Run, Store};
use super::leaf::{Leaf, Plan};
use super::staged::Stage;
use super::xxh3::{BLOCK_STRIPES, STRIPE};
use kvdepot_plan::Span;

/// How lanes move bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mover {
    /// The kernel to use; `None` for the one that is chosen for the length of the units.
    pub(crate) kernel: Option<CopyKernel>,
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
    /// The kernel for units of `len` bytes.
    pub(crate) fn kernel(self, len: u64) -> CopyKernel {
        self.kernel.unwrap_or_else(|| chosen(len))
    }

    /// Moves units `first..first + count` by way of `stage` and reports each. On return their bytes
    /// are visible to every thread that is told.
    ///
    /// # Safety
    ///
    /// All spans of the units are readable at their source and, if the unit is copied, writable
    /// at their destination; no span overlaps itself. The machine has `self.kernel`.
    pub(crate) unsafe fn run(
        self,
        units: &impl Units,
        first: u32,
        count: u32,
        stage: &mut impl Stage,
    ) {
        let mut numbers = first..first + count;
        let staged = stage.is_between();
        let kernel = match staged {
            true => CopyKernel::default_here(),
            false => self.kernel(units.unit(first).1),
        };
        let mut start = |way| {
            let number = numbers.next()?;
            let slot = Slot::start(units, number, self, way, staged);
            Some(Slot {
                ways: kernel.ways,
                ..slot
            })
        };
        let mut slots = [const { Slot::EMPTY }; WAYS];
        let mut used = 0;
        while used < kernel.ways
            && let Some(slot) = start(used)
        {
            slots[used] = slot;
            used += 1;
        }
        while used > 0 {
            // SAFETY: the caller's promise.
            unsafe { step(&mut slots[..used], kernel, units, stage) };
            let mut at = 0;
            while at < used {
                let slot = &mut slots[at];
                if !slot.spans.is_empty() {
                    at += 1;
                    continue;
                }
                units.report(slot.number, slot.leaf.finish());
                match start(slot.way) {
                    Some(next) => (*slot, at) = (next, at + 1),
                    None => {
                        used -= 1;
                        slots.swap(at, used);
                    }
                }
            }
        }
        kernel::fence();
    }
}

/// Moves one step of all slots: those that are not at whole stripes alone, and then as many
/// stripes of the others as each of them has.
///
/// # Safety
///
/// As [`Mover::run`].
unsafe fn step(
    slots: &mut [Slot<'_>],
    kernel: CopyKernel,
    units: &impl Units,
    stage: &mut impl Stage,
) {
    let (store, mut stripes) = slots[0].ahead(stage);
    for slot in &mut *slots {
        let ahead = slot.ahead(stage);
        if ahead.0 == store && ahead.1 > 0 {
            stripes = stripes.min(ahead.1);
            continue;
        }
        // SAFETY: the caller's promise.
        unsafe { slot.step(kernel.isa, units, stage) };
        stripes = 0;
    }
    if stripes == 0 {
        return;
    }
    // SAFETY: the caller's promise; every current span has that many stripes left.
    unsafe {
        match slots {
            [a, b, c, d] => together([a, b, c, d], kernel, units, store, stripes, stage),
            [a, b, c] => together([a, b, c], kernel, units, store, stripes, stage),
            [a, b] => together([a, b], kernel, units, store, stripes, stage),
            [a, ..] => together([a], kernel, units, store, stripes, stage),
            [] => {}
        }
    }
}

/// Moves `stripes` stripes of each.
///
/// # Safety
///
/// As [`Mover::run`]; every slot has that many stripes ahead that are stored so.
unsafe fn together<const COUNT: usize>(
    mut slots: [&mut Slot<'_>; COUNT],
    kernel: CopyKernel,
    units: &impl Units,
    store: Store,
    stripes: u64,
    stage: &mut impl Stage,
) {
    let runs = slots.each_ref().map(|slot| slot.run(store, units, stage));
    // SAFETY: the caller's promise.
    unsafe {
        let leaves = slots.each_mut().map(|slot| &mut slot.leaf);
        // The processor is late to follow fewer streams.
        let fetches = kernel.fetches || COUNT < kernel.ways;
        let how = (kernel.isa, fetches);
        Leaf::feed_together(leaves, how, runs, stripes as usize, store);
    }
    for slot in slots {
        // SAFETY: so many bytes have been moved, by the caller's promise.
        unsafe { slot.advance(stripes * STRIPE as u64, store, units, stage) };
    }
}

/// A unit in hand.
struct Slot<'a> {
    number: u32,
    /// Number of units that the thread moves in turns.
    ways: usize,
    leaf: Leaf,
    store: Store,
    /// Its place on the stage.
    way: usize,
    /// Whether its bytes go by way of the stage.
    staged: bool,
    /// Whether what goes there from the stage bypasses the caches.
    streams: bool,
    /// The spans that are not finished, and how much of the first one is.
    spans: &'a [Span],
    done: u64,
}

impl<'a> Slot<'a> {
    /// Nothing in hand.
    const EMPTY: Self = Self {
        number: 0,
        ways: WAYS,
        leaf: Leaf::EMPTY,
        store: Store::Nothing,
        way: 0,
        staged: false,
        streams: false,
        spans: &[],
        done: 0,
    };

    fn start(units: &'a impl Units, number: u32, mover: Mover, way: usize, staged: bool) -> Self {
        let (spans, bytes, copies) = units.unit(number);
        #[cfg(test)]
        super::fault::strike(bytes);
        let (staged, streams) = (staged && copies, bytes >= mover.stream_min);
        let store = match copies {
            false => Store::Nothing,
            true if streams && !staged => Store::Streaming,
            true => Store::Cached,
        };
        Self {
            number,
            ways: WAYS,
            leaf: Leaf::new(bytes),
            store,
            way,
            staged,
            streams,
            spans,
            done: 0,
        }
    }

    /// How the stripes that come next are stored, and how many of them at once.
    fn ahead(&self, stage: &impl Stage) -> (Store, u64) {
        let whole = self.leaf.stripes_ahead(self.left(Store::Through, stage));
        let blocks = whole / BLOCK_STRIPES as u64 * BLOCK_STRIPES as u64;
        if self.staged && self.streams && blocks > 0 && !stage.block(self.way).is_null() {
            return (Store::Through, blocks);
        }
        let left = self.left(self.store, stage);
        (self.store, self.leaf.stripes_ahead(left))
    }

    /// Bytes of the current span that can be moved at once, stored so.
    fn left(&self, store: Store, stage: &impl Stage) -> u64 {
        let left = self.spans.first().map_or(0, |span| span.len - self.done);
        match self.waits(store) {
            true => left.min(stage.room(self.way)),
            false => left,
        }
    }

    /// Whether what is stored so stays on the stage until it is told of.
    fn waits(&self, store: Store) -> bool {
        self.staged && store != Store::Through
    }

    /// Where the rest of the current span is, and what this lane reads after it.
    fn run(&self, store: Store, units: &impl Units, stage: &impl Stage) -> Run {
        let span = self.spans.first().copied().unwrap_or(Span::new(0, 0, 0));
        let left = self.left(store, stage);
        let next = match self.spans.get(1) {
            _ if self.done + left < span.len => span.src + self.done + left,
            Some(next) => next.src,
            // The other slots have the units in between, most of the time.
            None => units.source(self.number.saturating_add(self.ways as u32)),
        };
        let dst = std::ptr::with_exposed_provenance_mut((span.dst + self.done) as usize);
        Run {
            src: std::ptr::with_exposed_provenance((span.src + self.done) as usize),
            dst: match self.waits(store) {
                true => stage.desk(self.way),
                false => dst,
            },
            desk: stage.block(self.way),
            next: std::ptr::with_exposed_provenance(next as usize),
        }
    }

    /// Notes that `bytes` of the current span have been moved, or have reached the stage.
    ///
    /// # Safety
    ///
    /// They have; otherwise as [`Mover::run`].
    unsafe fn advance(
        &mut self,
        bytes: u64,
        store: Store,
        units: &impl Units,
        stage: &mut impl Stage,
    ) {
        let Some((span, rest)) = self.spans.split_first() else {
            return;
        };
        let at = span.dst + self.done;
        self.done += bytes;
        let ends = span.len == self.done;
        if ends {
            (self.spans, self.done) = (rest, 0);
        }
        if self.waits(store) {
            let next = self.run(store, units, stage).src;
            // SAFETY: the caller's promise.
            unsafe { stage.arrived(self.way, at, bytes, ends, self.streams, next) };
        }
    }

    /// Moves what is left of the current span.
    ///
    /// # Safety
    ///
    /// As [`Mover::run`].
    unsafe fn step(&mut self, isa: Isa, units: &impl Units, stage: &mut impl Stage) {
        let (store, len) = (self.store, self.left(self.store, stage));
        let run = self.run(store, units, stage);
        let plan = Plan {
            store,
            next: run.next,
        };
        // SAFETY: the caller's promise, for the rest of a span.
        unsafe { self.leaf.feed(isa, run.src, run.dst, len as usize, plan) };
        // SAFETY: as above.
        unsafe { self.advance(len, store, units, stage) };
    }
}
