//! What the tests of the service share: that of the store's, and a depot that others may use.

#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    clippy::allow_attributes,
    reason = "each test binary uses its own part of this"
)]

#[path = "../../../store/tests/common/mod.rs"]
mod base;
pub mod frames;
pub mod recording;

pub use base::*;
use kvdepot_store::Depot;

/// A place whose depot others may use.
pub trait Served {
    fn serve(&self) -> Depot;
}

impl Served for Place {
    fn serve(&self) -> Depot {
        kvdepot_service::open(&self.config()).unwrap()
    }
}
