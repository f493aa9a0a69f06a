//! Randomness that can be replayed.
//!
//! `KVDEPOT_SEED=n` sets the seed. Without it a test runs the same way each time, and with
//! `KVDEPOT_TEST_ALL=1` it draws a fresh one and runs many more rounds. Every test prints the
//! command that replays it.

use std::hash::{BuildHasher, RandomState};

/// How many times more rounds `KVDEPOT_TEST_ALL=1` runs.
const ALL: u64 = 20;

fn test_all() -> bool {
    std::env::var_os("KVDEPOT_TEST_ALL").is_some_and(|value| value != "0")
}

/// The rounds of a loop: `usual`, or many more with `KVDEPOT_TEST_ALL=1`.
#[must_use]
pub fn rounds(usual: u64) -> u64 {
    if test_all() { usual * ALL } else { usual }
}

/// The same where rounds take long: a part of those that [`rounds`] has are left to
/// `KVDEPOT_TEST_ALL=1`.
#[must_use]
pub fn few_rounds(few: u64, usual: u64) -> u64 {
    if test_all() { usual * ALL } else { few }
}

/// SplitMix64 (Steele, Lea, Flood 2014): small, fast, and any seed is a good one.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Numbers for the test `name`, whose replay command is printed.
    ///
    /// # Panics
    /// When `KVDEPOT_SEED` is no number.
    #[must_use]
    pub fn for_test(name: &str) -> Rng {
        let seed = match std::env::var("KVDEPOT_SEED") {
            Ok(seed) => seed.parse().unwrap(),
            Err(_) if test_all() => RandomState::new().hash_one(name) >> 16,
            Err(_) => 1,
        };
        println!("replay: KVDEPOT_SEED={seed} cargo test {name}");
        Rng::new(seed)
    }

    /// Numbers from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is above zero.
    pub fn below(&mut self, end: u64) -> u64 {
        // The bias is far below what a test could notice.
        self.bits() % end
    }

    /// A number from `begin` to `end` inclusive.
    pub fn between(&mut self, begin: u64, end: u64) -> u64 {
        begin + self.below(end - begin + 1)
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of `choices`.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// A generator of its own, for another thread.
    #[must_use]
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_replays_and_the_first_numbers_are_the_published_ones() {
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.bits(), 6_457_827_717_110_365_317);
        assert_eq!(rng.bits(), 3_203_168_211_198_807_973);
        let (mut a, mut b) = (Rng::new(9), Rng::new(9));
        assert!((0..100).all(|_| a.between(3, 7) == b.between(3, 7)));
        assert!((0..1000).all(|_| (3..=7).contains(&a.between(3, 7))));
    }
}
