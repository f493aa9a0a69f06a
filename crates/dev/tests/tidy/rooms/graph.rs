//! Who uses whom, and the circles in it. Pure: names and arrows.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// From one name to another.
pub(crate) type Arrow = (String, String);

/// Arrows, each with the places that draw it.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) arrows: BTreeMap<Arrow, BTreeSet<String>>,
}

impl Graph {
    pub(crate) fn add(&mut self, from: &str, to: &str, place: &str) {
        if from != to {
            let places = self.arrows.entry((from.to_owned(), to.to_owned()));
            places.or_default().insert(place.to_owned());
        }
    }

    /// The shortest circle through an arrow, of at least so many names, which stand in its order.
    /// It takes none of the arrows that are left out; the arrow itself may be one of them.
    pub(crate) fn through(
        &self,
        (from, to): &Arrow,
        least: usize,
        without: &BTreeSet<Arrow>,
    ) -> Option<Vec<String>> {
        let mut before: BTreeMap<&str, &str> = BTreeMap::new();
        let mut next = VecDeque::from([to.as_str()]);
        while let Some(here) = next.pop_front() {
            let ahead = self.arrows.keys().filter(|arrow| {
                let pair = least > 2 && (&arrow.0, &arrow.1) == (to, from);
                arrow.0 == here && !pair && !without.contains(*arrow)
            });
            for (_, name) in ahead {
                if name == from {
                    let mut circle = vec![here];
                    while let Some(name) = before.get(circle[circle.len() - 1]) {
                        circle.push(name);
                    }
                    circle.push(from);
                    return Some(circle.into_iter().rev().map(str::to_owned).collect());
                }
                if name != to && !before.contains_key(name.as_str()) {
                    before.insert(name, here);
                    next.push_back(name);
                }
            }
        }
        None
    }

    /// The shortest circle of at least so many names.
    pub(crate) fn circle(&self, least: usize, without: &BTreeSet<Arrow>) -> Option<Vec<String>> {
        let left = self.arrows.keys().filter(|arrow| !without.contains(*arrow));
        let circles = left.filter_map(|arrow| self.through(arrow, least, without));
        circles.min_by_key(Vec::len)
    }

    /// Arrows without which there is no circle of at least so many names, none of them for
    /// nothing: always the one with the fewest places out of the shortest circle.
    pub(crate) fn cut(&self, least: usize) -> BTreeSet<Arrow> {
        let mut cut = BTreeSet::new();
        while let Some(circle) = self.circle(least, &cut) {
            let arrows = steps(&circle);
            cut.extend(arrows.min_by_key(|arrow| self.arrows[arrow].len()));
        }
        for arrow in cut.clone() {
            cut.remove(&arrow);
            if self.through(&arrow, least, &cut).is_some() {
                cut.insert(arrow);
            }
        }
        cut
    }
}

/// The arrows of a circle.
pub(crate) fn steps(circle: &[String]) -> impl Iterator<Item = Arrow> {
    let next = circle.iter().cycle().skip(1);
    circle
        .iter()
        .zip(next)
        .map(|(from, to)| (from.clone(), to.clone()))
}

fn graph(arrows: &[&str]) -> Graph {
    let mut graph = Graph::default();
    for arrow in arrows {
        graph.add(&arrow[..1], &arrow[1..], "");
    }
    graph
}

#[test]
fn circles_are_found_and_cut() {
    let none = BTreeSet::new();
    assert_eq!(graph(&["ab", "bc", "ac"]).circle(2, &none), None);
    let pair = graph(&["ab", "ba", "bc"]);
    assert_eq!(pair.circle(2, &none).map(|circle| circle.len()), Some(2));
    assert_eq!(pair.circle(3, &none), None);
    // Two pairs that share a name are no circle of three.
    assert_eq!(graph(&["ab", "ba", "bc", "cb"]).circle(3, &none), None);
    let three = graph(&["ab", "bc", "ca", "cb"]);
    assert_eq!(three.circle(3, &none).map(|circle| circle.len()), Some(3));
    assert_eq!((three.cut(3).len(), three.cut(2).len()), (1, 1));
    assert_eq!(three.circle(2, &three.cut(2)), None);
}
