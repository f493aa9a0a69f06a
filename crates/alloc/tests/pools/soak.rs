//! Long random histories of large pools: tens of thousands of live extents, every answer compared.
//! Short by default; `KVDEPOT_TEST_ALL=1` runs millions of steps with a fresh seed.

use crate::twin::{Allocator, Twin};
use kvdepot_alloc::{Pool, Shared};
use kvdepot_testkit::{Rng, rounds};

/// What a history asks for; changes now and then, as the load of an arena does.
#[derive(Debug, Clone, Copy)]
struct Phase {
    /// Sizes are below this many granules.
    granules: u64,
    /// Or one of a few, as blocks of models are.
    fixed: bool,
    /// Of 16 steps, those that free.
    frees: u64,
}

impl Phase {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            granules: *rng.pick(&[2, 16, 200, 2000, 100_000]),
            fixed: rng.once_in(2),
            // Fills, holds its level, drains.
            frees: *rng.pick(&[4, 6, 8, 8, 10]),
        }
    }

    fn len(self, granule: u64, rng: &mut Rng) -> u64 {
        let len = if self.fixed {
            [131_072, 658_432, 1 << 20, 3_274_752][rng.below(4) as usize]
                % (self.granules * granule)
        } else {
            rng.below(self.granules * granule)
        };
        len + 1
    }
}

/// Ends with the extents that are live then.
fn soak<A: Allocator>(name: &str, pool: A, (size, granule): (u64, u64)) -> Twin<A> {
    let mut rng = Rng::for_test(name);
    let mut twin = Twin::new(pool, size, granule);
    let mut phase = Phase::draw(&mut rng);
    for step in 0..rounds(150_000) {
        if rng.once_in(20_000) {
            phase = Phase::draw(&mut rng);
        }
        let place = rng.below(size);
        if rng.below(16) < phase.frees {
            match twin.near(place) {
                Some(offset) => assert!(twin.free(offset)),
                None => assert!(!twin.free(place)),
            }
        } else {
            let len = phase.len(granule, &mut rng);
            // Whether there was room is compared; what to do about it is not decided here.
            match rng.below(4) {
                0 => {
                    let near = twin.near(place).unwrap_or(place);
                    let _compared = twin.allocate_near(len, near);
                }
                1 => {
                    let max = 1 + rng.below(8) as usize;
                    let _compared = twin.allocate_scattered(len, max, Some(place));
                }
                _ => {
                    let _compared = twin.allocate(len);
                }
            }
        }
        if step % 1000 == 0 {
            // Not the start of a live extent, mostly.
            twin.free(rng.below(size));
            twin.compare();
        }
        if step % 50_000 == 0 {
            twin.compare_all();
        }
    }
    twin.compare_all();
    twin
}

fn drain<A: Allocator>(mut twin: Twin<A>, size: u64) {
    while let Some(offset) = twin.near(0) {
        assert!(twin.free(offset));
    }
    twin.compare_all();
    assert_eq!(twin.pool.largest_free_extent(), size);
}

fn pool(name: &str, size: u64, granule: u64) {
    let pool = Pool::new(size, granule).unwrap();
    let mut twin = soak(name, pool, (size, granule));
    twin.rebuild();
    twin.compare_all();
    drain(twin, size);
}

#[test]
fn soak_of_a_pool_of_narrow_numbers() {
    pool("soak::soak_of_a_pool_of_narrow_numbers", 16 << 30, 4096);
}

#[test]
fn soak_of_a_pool_of_wide_numbers() {
    pool("soak::soak_of_a_pool_of_wide_numbers", 1 << 40, 64);
}

#[test]
fn soak_of_a_crowded_pool() {
    pool("soak::soak_of_a_crowded_pool", 1 << 20, 16);
}

/// One thread, so that the answers are those of a pool.
#[test]
fn soak_of_a_shared_pool() {
    let (size, granule) = (1 << 20, 16);
    let pool = Shared::new(size, granule).unwrap();
    drain(
        soak("soak::soak_of_a_shared_pool", pool, (size, granule)),
        size,
    );
}
