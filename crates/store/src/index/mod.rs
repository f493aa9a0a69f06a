//! The index of one arena: which identities it holds, where, and in which order they were used.
//! It knows what exists and never moves a byte.

mod entries;
mod map;

pub(crate) use entries::{Entries, Entry, Stage, Stamps, Uses};
pub(crate) use map::{KeyMap, Namespaces};
