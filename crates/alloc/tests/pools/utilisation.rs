//! How full a pool gets before something must go: the published workloads of offset allocators,
//! at fewer operations. Deterministic, so a change of placement that costs room shows.

use crate::common::Random;
use kvdepot_alloc::{Error, Pool};

/// Allocates like an arena that evicts: while there is no room, a random live allocation goes.
struct Churn {
    pool: Pool,
    random: Random,
    /// Offsets and requested bytes of the pieces of each allocation.
    live: Vec<(Vec<u64>, u64)>,
    requested: u64,
    max_extents: usize,
    extents: u64,
}

impl Churn {
    fn new(size: u64, granule: u64, max_extents: usize) -> Self {
        let pool = Pool::new(size, granule).unwrap();
        Self {
            pool,
            random: Random(1),
            live: Vec::new(),
            requested: 0,
            max_extents,
            extents: 0,
        }
    }

    fn allocate(&mut self, len: u64) {
        loop {
            match self.pool.allocate_scattered(len, self.max_extents, None) {
                Ok(pieces) => {
                    self.extents += pieces.len() as u64;
                    self.requested += len;
                    self.live
                        .push((pieces.iter().map(|piece| piece.offset).collect(), len));
                    return;
                }
                Err(Error::Full { .. }) => self.evict(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn evict(&mut self) {
        let victim = self.random.below(self.live.len() as u64) as usize;
        let (offsets, len) = self.live.swap_remove(victim);
        offsets
            .into_iter()
            .for_each(|offset| self.pool.free(offset).unwrap());
        self.requested -= len;
    }

    fn utilisation(&self) -> f64 {
        self.requested as f64 / self.pool.size() as f64
    }
}

/// Average and minimum utilisation, and extents per allocation, on sizes of 1 KiB to 64 MiB.
fn random_sizes(max_extents: usize) -> (f64, f64, f64) {
    const ROUNDS: u32 = 30_000;
    let mut churn = Churn::new(2 << 30, 1, max_extents);
    let mut sizes = Random(2);
    let mut size = || 1024 + sizes.below((64 << 20) - 1023);
    let mut warm = 0;
    while warm < 2 << 30 {
        let len = size();
        churn.allocate(len);
        warm += len;
    }
    churn.extents = 0;
    let (mut sum, mut min) = (0.0, 1.0_f64);
    for _ in 0..ROUNDS {
        churn.allocate(size());
        sum += churn.utilisation();
        min = min.min(churn.utilisation());
    }
    churn.pool.check().unwrap();
    let rounds = f64::from(ROUNDS);
    (sum / rounds, min, churn.extents as f64 / rounds)
}

#[test]
fn random_sizes_in_one_extent_reach_best_fit() {
    let (average, min, extents) = random_sizes(1);
    println!("average {average:.4}, minimum {min:.4}, {extents:.3} extents");
    assert!(average >= 0.862, "average {average}");
    assert!(min >= 0.62, "minimum {min}");
    assert_eq!(extents, 1.0);
}

#[test]
fn random_sizes_in_four_extents_leave_little_room() {
    let (average, min, extents) = random_sizes(4);
    println!("average {average:.4}, minimum {min:.4}, {extents:.3} extents");
    assert!(average >= 0.97, "average {average}");
    assert!(min >= 0.885, "minimum {min}");
    assert!(extents <= 2.52, "{extents} extents an allocation");
}

#[test]
fn one_size_fills_what_whole_blocks_can_fill() {
    for base in [512_u64, 32 << 10, 2 << 20, 32 << 20] {
        for len in [base, base - 17, base + 17, base * 9 / 10, base * 11 / 10] {
            let pool_size = if len < 1024 { 8 << 20 } else { 2 << 30 };
            let mut churn = Churn::new(pool_size, 1, 1);
            let blocks = pool_size / len;
            (0..blocks).for_each(|_| churn.allocate(len));
            for _ in 0..2000 {
                churn.allocate(len);
                assert_eq!(churn.requested, blocks * len, "blocks of {len} bytes");
            }
        }
    }
}
