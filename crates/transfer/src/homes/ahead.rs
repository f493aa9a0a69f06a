//! Whom a look-up asks, also while blocks are on their way to new homes.

use super::map::{HomeMap, Homes};
use super::point::Point;

/// Most hosts that are asked for one key.
const ASKED_MAX: usize = 2;

/// Returns the hosts of the view `now` that a lookup of a point should query, at most two.
///
/// The first is the first home in `now`. The second is the first home in the view `before` that
/// still exists, while blocks have not moved after a change. Otherwise it is the second home in
/// `now`, if there is one.
///
/// After one change this is sufficient: a key with a new home has kept all others but one.
#[must_use]
pub fn ask(now: &HomeMap, before: Option<&HomeMap>, point: Point) -> Homes {
    let mut asked = Homes::default();
    let homes = now.homes(point);
    if let Some(first) = homes.first() {
        asked.push(*first);
    }
    if let Some(before) = before {
        for host in before.homes(point).iter() {
            let name = &before.view().hosts()[*host as usize].name;
            let there = now.view().find(name).map(|host| host as u32);
            if asked.len() < ASKED_MAX
                && let Some(host) = there
            {
                asked.push(host);
            }
        }
    }
    for host in homes.iter() {
        if asked.len() < ASKED_MAX {
            asked.push(*host);
        }
    }
    asked
}
