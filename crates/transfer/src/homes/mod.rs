//! Replica hosts of keys: weighted rendezvous hashing over a view of the hosts.
//!
//! Each host draws a time for each key from the key, the name of the host and its capacity. The
//! time is exponentially distributed with the capacity as its rate. The hosts with the earliest
//! times are the replica hosts of the key, here called its *homes*.
//!
//! * Each host gets keys in proportion to its capacity.
//! * A change of one host does not change the times of the others. A host that joins or grows takes
//!   keys from others, and moves none between them. A host that leaves or shrinks gives away only
//!   its own keys.
//! * If the view changes by one host, a key with `n` homes gets at most one new home, and keeps the
//!   others.
//! * Two copies of one key are on different hosts. Therefore a host with more than `1 / replicas`
//!   of the total capacity gets less than its proportion, and small hosts get more.
//!
//! A [`HomeMap`] keeps one row per host. Every host must compute the same homes, on every processor
//! and in every version. Therefore the computation uses only integers, and sums and products of
//! `f64` in a fixed order. A change of the formulas for points, seeds and times would move every
//! block.
//!
//! # Examples
//! ```
//! use std::sync::Arc;
//!
//! use kvdepot_transfer::homes::{Host, HomeMap, Point, View};
//!
//! let host = |name: &str| Host {
//!     name: name.into(),
//!     address: format!("{name}:7700"),
//!     capacity: 1 << 40,
//!     incarnation: 0,
//! };
//! let view = View::new(1, vec![host("a"), host("b"), host("c")])?;
//! let map = HomeMap::new(Arc::new(view), 2);
//! let homes = map.homes(Point::of(b"a key"));
//! assert_eq!(homes.len(), 2);
//! let first = &map.view().hosts()[homes[0] as usize];
//! println!("first replica host: {}", first.name);
//! # Ok::<_, kvdepot_transfer::homes::ViewError>(())
//! ```

mod ahead;
mod map;
mod point;
mod shift;
mod view;

pub use ahead::ask;
pub use map::{HomeMap, Homes, REPLICAS_MAX};
pub use point::Point;
pub use shift::{Shift, ideal};
pub use view::{Host, View, ViewError};
