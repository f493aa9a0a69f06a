//! Whom a look-up asks, also while blocks are on their way to new homes.

use super::map::{HomeMap, Homes};
use super::point::Point;

/// Most hosts that are asked for one key.
const ASKED_MAX: usize = 2;

/// The hosts of the view `now` to ask for a point, at most two: its first home, and then, where
/// blocks have not yet moved as a change of the view wants it, the first of its homes `before` that
/// is still there; else its second home, if it has one.
///
/// After one change that is enough: a key that got a new home kept all others but one.
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
