//! What a change of the view moves, by a sample of keys.

use super::map::HomeMap;
use super::point::Point;

/// Where copies of sampled keys are under two views.
#[derive(Clone, Debug)]
pub struct Shift {
    /// For each host of the view before, its place in the view after.
    places: Vec<Option<u32>>,
    /// Points that were looked at.
    pub points: u64,
    /// Copies that some host has to get from another: homes after the change that were none before.
    pub moved: u64,
    /// Copies of each host of the view before.
    pub held_before: Vec<u64>,
    /// Copies of each host of the view after.
    pub held_after: Vec<u64>,
}

impl Shift {
    /// Nothing looked at yet.
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

    /// Looks at one more point; both maps are those that it was made for.
    ///
    /// # Panics
    /// With maps of other views.
    pub fn look(&mut self, before: &HomeMap, after: &HomeMap, point: Point) {
        let (old, new) = (before.homes(point), after.homes(point));
        self.count(&old, &new);
    }

    /// The same, for homes that are known.
    ///
    /// # Panics
    /// With homes of other views.
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

    /// Takes in what another one, of the same maps, has looked at.
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

/// Copies of each key that no placement by capacity can leave where they are: what hosts' shares
/// grow by, for as many copies as a key has. Where one host holds more than `1 / replicas` of all
/// capacity no placement is by capacity, and this is a number like others.
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
