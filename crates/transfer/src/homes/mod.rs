//! Which hosts a key's block lives on: weighted rendezvous hashing over a view of the hosts.
//!
//! Each host draws a time for each key, exponential with its capacity as the rate, from nothing but
//! the key, the host's name and its capacity. The hosts with the earliest times are the key's
//! homes. So a host gets keys in proportion to its capacity, and a change of one host changes no
//! other's times: what joins or grows takes keys from others and moves none between them, what
//! leaves or shrinks gives only its own away. With `n` homes a key is at one more host when the
//! view changes by one, and keeps the others.
//!
//! Nothing is remembered but one row a host. Every host must find the same homes, whatever
//! processor and version it runs: only integers, and sums and products of `f64` in a fixed order,
//! are used, and a change of how points, seeds and times are made moves every block there is.
//!
//! Two copies of one key are never on one host. A host that holds more than `1 / replicas` of all
//! capacity therefore gets less than its share, and small ones more.

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
