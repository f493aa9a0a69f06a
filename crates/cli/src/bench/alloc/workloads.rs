//! What is allocated and freed: sizes, pools, the order of frees.

use std::marker::PhantomData;

use super::driver::{AtRandom, Oldest};
use crate::bench::random::Random;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The pool of the uniform and the random workload, and what smaller sizes have of it.
const POOL: u64 = 2 * GIB;
const SMALL: u64 = KIB;
const SMALL_SHARE: u64 = 16;

/// The largest size that still leaves a choice of what to free.
pub(super) const UNIFORM_MAX: u64 = POOL / 8;

/// The two allocations of a block of a model with an indexer.
const PAIR: [u64; 2] = [3_274_752, 658_432];

/// Bytes of a block of 16 tokens: Llama 3.1 8B and 70B, Qwen2.5 7B, DeepSeek V3, in 16 bits.
const MODELS: [u64; 4] = [2_097_152, 5_242_880, 917_504, 1_124_352];

/// Blocks of a prompt in the trace-like workload, at most.
const PROMPT: u64 = 64;

/// What the sizes of the paired and the trace-like workload are multiples of.
const SECTOR: u64 = 512;

/// Sizes of objects of `PARTS` allocations, in a pool where objects are freed as `F` says.
pub(super) struct Workload<S, F, const PARTS: usize> {
    pub(super) name: &'static str,
    /// The size of every allocation, where they have one.
    pub(super) size: Option<u64>,
    pub(super) pool: u64,
    pub(super) granule: u64,
    /// More allocations than can be live.
    pub(super) live: u64,
    /// Runs with other random numbers, of which the median counts.
    pub(super) seeds: u64,
    /// The most extents of an allocation, one measurement each.
    pub(super) max_extents: &'static [usize],
    pub(super) sizes: S,
    frees: PhantomData<F>,
}

/// The sizes of the uniform workload: powers of two, and others around them.
pub(super) fn uniform_sizes() -> Vec<u64> {
    let powers: Vec<u64> = (0..)
        .map(|i| 32 << (2 * i))
        .take_while(|size| *size < 1 << 26)
        .collect();
    let around: [fn(u64) -> u64; 5] = [
        |size| size,
        |size| size - 17,
        |size| size + 17,
        |size| size * 9 / 10,
        |size| size * 11 / 10,
    ];
    let sizes = around
        .iter()
        .flat_map(|change| powers.iter().map(|size| change(*size)));
    sizes.collect()
}

/// Allocations of one size, which are freed at random.
pub(super) fn uniform(
    size: u64,
) -> Workload<impl Fn(&mut Random) -> [u64; 1] + Clone, AtRandom, 1> {
    let pool = match size {
        ..SMALL => POOL / SMALL_SHARE,
        _ => POOL,
    };
    Workload {
        name: "uniform",
        size: Some(size),
        pool,
        granule: 1,
        live: pool / size + 1,
        seeds: 1,
        max_extents: &[1],
        sizes: move |_: &mut Random| [size],
        frees: PhantomData,
    }
}

/// Every size from 1 KiB to 64 MiB is as likely as any other; freed at random.
pub(super) fn random() -> Workload<impl Fn(&mut Random) -> [u64; 1] + Clone, AtRandom, 1> {
    Workload {
        name: "random",
        size: None,
        pool: POOL,
        granule: 1,
        live: 1 << 14,
        seeds: 5,
        max_extents: &[1, 2, 4, 8],
        sizes: |random: &mut Random| [random.within(KIB, 64 * MIB)],
        frees: PhantomData,
    }
}

/// Objects of two allocations, which are freed together, at random.
pub(super) fn paired(
    quick: bool,
) -> Workload<impl Fn(&mut Random) -> [u64; 2] + Clone, AtRandom, 2> {
    let pool = if quick { 16 * GIB } else { 1024 * GIB };
    Workload {
        name: "paired",
        size: None,
        pool,
        granule: SECTOR,
        live: pool / PAIR[1],
        seeds: 1,
        max_extents: &[1, 4],
        sizes: |_: &mut Random| PAIR,
        frees: PhantomData,
    }
}

/// Prompts of one to 64 blocks of one of four models; what was used longest ago is freed.
pub(super) fn trace() -> Workload<impl FnMut(&mut Random) -> [u64; 1] + Clone, Oldest, 1> {
    let pool = 64 * GIB;
    let (mut size, mut left) = (0, 0);
    Workload {
        name: "trace",
        size: None,
        pool,
        granule: SECTOR,
        live: pool / MODELS[2],
        seeds: 1,
        max_extents: &[1, 4],
        sizes: move |random: &mut Random| {
            if left == 0 {
                size = MODELS[random.below(MODELS.len() as u64) as usize];
                left = random.within(1, PROMPT);
            }
            left -= 1;
            [size]
        },
        frees: PhantomData,
    }
}

/// Blocks of any size from 64 KiB to 4 MiB, freed at random by several threads.
pub(super) const THREADS_POOL: u64 = 64 * GIB;
/// What allocations of several threads are rounded up to.
pub(super) const THREADS_GRANULE: u64 = 4 * KIB;

pub(super) fn threads_sizes(random: &mut Random) -> [u64; 1] {
    [random.within(64 * KIB, 4 * MIB)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_sizes_are_those_of_the_published_benchmark() {
        let sizes = uniform_sizes();
        assert_eq!(sizes.len(), 55);
        assert_eq!(sizes[..3], [32, 128, 512]);
        assert_eq!(sizes[10..13], [1 << 25, 15, 111]);
        assert_eq!(sizes[22], 49);
        assert_eq!(sizes[33], 28);
        assert_eq!(sizes[54], (1 << 25) * 11 / 10);
        assert_eq!(uniform(1007).pool, 128 * MIB);
        assert_eq!(uniform(1024).pool, 2 * GIB);
    }
}
