//! A view made ready for look-ups: one row a host, and the race between them.
//!
//! A look-up touches every row, so a row costs a nanosecond: a hash, and a product that bounds the
//! host's time from below (`-ln(1 - v) >= v`). The logarithm is only taken of the few whose bound
//! comes before the latest time that is kept.

use std::ops::Deref;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::point::Point;
use super::view::View;

/// Largest number of homes of a key.
pub const REPLICAS_MAX: usize = 8;

/// Hosts that are expected to come before the limit that a race begins with, beyond those that are
/// asked for. Of eight fewer than one is there once in three thousand times; then it is run again
/// without a limit.
const SLACK: f64 = 7.0;

/// What one host brings to a race.
#[derive(Clone, Copy, Debug)]
struct Row {
    seed: u64,
    /// The smallest capacity over this one, in units of 2^-64: its times are as much shorter.
    haste: u64,
    /// The host in the view.
    host: u32,
    /// One over the capacity.
    pace: f64,
}

/// Homes of a key, as indices into the hosts of one view, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Homes {
    hosts: [u32; REPLICAS_MAX],
    count: usize,
}

impl Homes {
    /// Takes one more; `false` where it is there already, or there is no room.
    pub(super) fn push(&mut self, host: u32) -> bool {
        let is_new = self.count < REPLICAS_MAX && !self.contains(&host);
        if is_new {
            self.hosts[self.count] = host;
            self.count += 1;
        }
        is_new
    }
}

impl Deref for Homes {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.hosts[..self.count]
    }
}

/// The earliest times so far, in order.
struct Kept {
    entries: [(f64, u32); REPLICAS_MAX],
    count: usize,
    wanted: usize,
}

impl Kept {
    fn insert(&mut self, time: f64, host: u32) {
        // Hosts come in order of their names: of equal times the first in that order is kept.
        let sooner = |entry: &(f64, u32)| entry.0 <= time;
        let at = self.entries[..self.count].partition_point(sooner);
        if at == self.wanted {
            return;
        }
        self.count = (self.count + 1).min(self.wanted);
        self.entries[at..self.count].rotate_right(1);
        self.entries[at] = (time, host);
    }

    /// The latest of them, once there are as many as wanted.
    fn latest(&self) -> Option<f64> {
        (self.count == self.wanted).then(|| self.entries[self.wanted - 1].0)
    }
}

/// Homes of all keys under one view. The [module](super) has an example.
#[derive(Clone, Debug)]
pub struct HomeMap {
    view: Arc<View>,
    replicas: usize,
    rows: Vec<Row>,
    /// Units of a bound for one of time: the smallest capacity, times 2^64.
    scale: f64,
    /// What a race for one home more widens its first limit by.
    step: f64,
}

impl HomeMap {
    /// Creates a map with `replicas` homes per key, 1 to [`REPLICAS_MAX`]. Other values are set to
    /// the nearest allowed one.
    #[must_use]
    pub fn new(view: Arc<View>, replicas: usize) -> HomeMap {
        let with_room = view.hosts().iter().zip(0..);
        let with_room = with_room.filter(|(host, _)| host.capacity > 0);
        let capacities = with_room.clone().map(|(host, _)| host.capacity);
        let least = capacities.min().unwrap_or(1);
        let total: f64 = with_room
            .clone()
            .map(|(host, _)| host.capacity as f64)
            .sum();
        let row = |(host, index): (&super::view::Host, u32)| Row {
            seed: xxh3_64(host.name.as_bytes()),
            haste: ((u128::from(least) << 64) / u128::from(host.capacity))
                .try_into()
                .unwrap_or(u64::MAX),
            host: index,
            pace: 1.0 / host.capacity as f64,
        };
        let scale = least as f64 * 2.0_f64.powi(64);
        HomeMap {
            rows: with_room.map(row).collect(),
            replicas: replicas.clamp(1, REPLICAS_MAX),
            scale,
            step: scale / total.max(1.0),
            view,
        }
    }

    /// Returns the view.
    #[must_use]
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Returns the number of homes per key, if there are enough hosts.
    #[must_use]
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the homes of a point, in order. There are fewer than `replicas` only if fewer hosts
    /// have capacity.
    #[must_use]
    pub fn homes(&self, point: Point) -> Homes {
        self.first(point, self.replicas)
    }

    /// Returns the first `count` homes of a point, at most [`REPLICAS_MAX`].
    ///
    /// The homes for a smaller count are the first of those for a larger one. A caller that needs
    /// more copies can therefore request more homes, and the existing copies stay.
    #[must_use]
    pub fn first(&self, point: Point, count: usize) -> Homes {
        let wanted = count.min(REPLICAS_MAX).min(self.rows.len());
        let mut homes = Homes::default();
        if wanted == 0 {
            return homes;
        }
        // Saturates.
        let limit = (self.step * (wanted as f64 + SLACK)) as u64;
        let mut kept = self.race(point, wanted, limit);
        if kept.count < wanted {
            kept = self.race(point, wanted, u64::MAX);
        }
        for (_, host) in &kept.entries[..kept.count] {
            homes.push(*host);
        }
        homes
    }

    /// The earliest times of those whose bound is no later than the limit. Where that are as many
    /// as wanted, and each of their times is within the limit too, nobody else can come before.
    fn race(&self, point: Point, wanted: usize, limit: u64) -> Kept {
        let mut kept = Kept {
            entries: [(f64::INFINITY, 0); REPLICAS_MAX],
            count: 0,
            wanted,
        };
        let mut bound = limit;
        for row in &self.rows {
            let drawn = point.mix(row.seed);
            let earliest = ((u128::from(drawn) * u128::from(row.haste)) >> 64) as u64;
            if earliest <= bound {
                let time = exponential(drawn) * row.pace;
                // One that is later than the limit might come after another that was not looked at.
                if limit == u64::MAX || self.units(time) <= limit {
                    kept.insert(time, row.host);
                    if let Some(latest) = kept.latest() {
                        bound = bound.min(self.units(latest));
                    }
                }
            }
        }
        kept
    }

    /// A time in the units of bounds, a little later than it is: products of `f64` round.
    #[inline]
    fn units(&self, time: f64) -> u64 {
        ((time * self.scale * (1.0 + 1e-12)) as u64).saturating_add(1)
    }

    /// Returns the fraction of the total capacity that the host with the index `host` contributes.
    #[must_use]
    pub fn share(&self, host: usize) -> f64 {
        let capacity = self.view.hosts().get(host).map_or(0, |host| host.capacity);
        capacity as f64 / (self.view.capacity().max(1)) as f64
    }

    /// Returns the memory that the map uses, in bytes, without the view.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<HomeMap>() + self.rows.capacity() * size_of::<Row>()
    }
}

/// A number of 64 equal bits as a time that is exponential with rate 1: `-ln(1 - drawn / 2^64)`.
///
/// Of sums, products and quotients in a fixed order: the logarithm of a system's library may differ
/// from another's in its last bit.
fn exponential(drawn: u64) -> f64 {
    // Of 64 bits 53 are left above a half, and more below it: what is left over is at least 2^-64.
    let rest = (u64::MAX - drawn) as f64 + 0.5;
    if drawn < 1 << 60 {
        // Near 1 the rest has lost what the drawn number still has.
        return series((drawn as f64 + 0.5) / 2.0_f64.powi(64));
    }
    let bits = rest.to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    // Within a factor of the root of 2 of 1, where the terms fall fastest.
    let (mantissa, exponent) = match mantissa > std::f64::consts::SQRT_2 {
        true => (mantissa / 2.0, exponent + 1),
        false => (mantissa, exponent),
    };
    let part = (mantissa - 1.0) / (mantissa + 1.0);
    f64::from(64 - exponent) * std::f64::consts::LN_2 - twice_artanh(part)
}

/// `-ln(1 - v)` of a small one, which is twice the artanh of `v / (2 - v)`.
fn series(v: f64) -> f64 {
    twice_artanh(v / (2.0 - v))
}

/// To the last bit but one, up to 0.172.
fn twice_artanh(part: f64) -> f64 {
    let square = part * part;
    let fourth = square * square;
    // Two sums that do not wait for each other.
    let (mut even, mut odd) = (0.0, 0.0);
    for [one, other] in TERMS.as_chunks::<2>().0.iter().rev() {
        even = even * fourth + one;
        odd = odd * fourth + other;
    }
    let sum = even + odd * square;
    2.0 * part * sum
}

/// Of the series of the artanh: one over the odd numbers.
const TERMS: [f64; 12] = [
    1.0,
    1.0 / 3.0,
    1.0 / 5.0,
    1.0 / 7.0,
    1.0 / 9.0,
    1.0 / 11.0,
    1.0 / 13.0,
    1.0 / 15.0,
    1.0 / 17.0,
    1.0 / 19.0,
    1.0 / 21.0,
    1.0 / 23.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_logarithms() {
        let close = |drawn: u64, exact: f64| {
            let error = (exponential(drawn) / exact - 1.0).abs();
            assert!(error < 1e-15, "{drawn:#x}: {error:e}");
        };
        let unit = 2.0_f64.powi(64);
        for shift in 0..64 {
            for odd in [1_u64, 3, 0xDEAD_BEEF_1234_5679] {
                let drawn = odd.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> shift;
                let part = (drawn as f64 + 0.5) / unit;
                let rest = ((u64::MAX - drawn) as f64 + 0.5) / unit;
                match part < 0.25 {
                    true => close(drawn, -(-part).ln_1p()),
                    false => close(drawn, -rest.ln()),
                }
            }
        }
        assert!(exponential(0) > 0.0);
        assert!((exponential(u64::MAX) - 45.05).abs() < 0.01);
    }

    #[test]
    fn a_row_is_half_a_line_of_the_cache() {
        assert_eq!(size_of::<Row>(), 32);
    }
}
