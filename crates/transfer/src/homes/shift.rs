//! What a change of the view moves, by a sample of keys.

use super::map::HomeMap;
use super::point::Point;

/// Positions of the copies of sampled keys under two views, to measure the effect of a change.
#[derive(Clone, Debug)]
pub struct Shift {
    /// For each host of the view before, its place in the view after.
    places: Vec<Option<u32>>,
    /// Number of sampled points.
    pub points: u64,
    /// Number of copies that a host must get from another one: homes after the change that were no
    /// homes before.
    pub moved: u64,
    /// Number of copies per host of the view before the change.
    pub held_before: Vec<u64>,
    /// Number of copies per host of the view after the change.
    pub held_after: Vec<u64>,
}

impl Shift {
    /// Creates an empty sample for a change from `before` to `after`.
    #[must_use]
    pub fn new(before: &HomeMap, after: &HomeMap) -> Shift {
        let hosts = before.view().hosts().iter();
        let place = |name: &str| after.view().find(name).map(|place| place as u32);
        Shift {
            places: hosts.map(|host| place(&host.name)).collect(),
            points: 0,
            moved: 0,
            held_before: vec![0; before.view().hosts().len()],
            held_after: vec![0; after.view().hosts().len()],
        }
    }

    /// Adds a point. Both maps must be those that the sample was created for.
    ///
    /// # Panics
    /// If a map has another view.
    pub fn look(&mut self, before: &HomeMap, after: &HomeMap, point: Point) {
        let (old, new) = (before.homes(point), after.homes(point));
        self.count(&old, &new);
    }

    /// Adds a point with known homes, `old` before the change and `new` after it.
    ///
    /// # Panics
    /// If the homes belong to another view.
    pub fn count(&mut self, old: &[u32], new: &[u32]) {
        self.points += 1;
        for host in old {
            self.held_before[*host as usize] += 1;
        }
        for host in new {
            self.held_after[*host as usize] += 1;
            let had = old
                .iter()
                .any(|old| self.places[*old as usize] == Some(*host));
            self.moved += u64::from(!had);
        }
    }

    /// Adds all points of `other`, which was created for the same maps.
    pub fn add(&mut self, other: &Shift) {
        self.points += other.points;
        self.moved += other.moved;
        let add = |sums: &mut [u64], more: &[u64]| {
            sums.iter_mut()
                .zip(more)
                .for_each(|(sum, more)| *sum += more);
        };
        add(&mut self.held_before, &other.held_before);
        add(&mut self.held_after, &other.held_after);
    }
}

/// Returns the number of copies per key that every placement by capacity must move: the growth of
/// the hosts' fractions, times the number of copies per key.
///
/// If one host has more than `1 / replicas` of the total capacity, no placement is exactly by
/// capacity, and the number is only an estimate.
#[must_use]
pub fn ideal(before: &HomeMap, after: &HomeMap) -> f64 {
    let hosts = after.view().hosts().iter().enumerate();
    let grown = hosts.map(|(place, host)| {
        let old = before.view().find(&host.name);
        let old = old.map_or(0.0, |place| before.share(place) * before.replicas() as f64);
        (after.share(place) * after.replicas() as f64 - old).max(0.0)
    });
    grown.sum()
}
