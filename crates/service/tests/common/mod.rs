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
pub mod scrape;

pub use base::*;
use std::thread;
use std::time::{Duration, Instant};

use kvdepot_store::{Depot, Error};

/// A place whose depot others may use.
pub trait Served {
    fn serve(&self) -> Depot;
}

impl Served for Place {
    fn serve(&self) -> Depot {
        let config = self.config();
        let begun = Instant::now();
        loop {
            match kvdepot_service::open(&config) {
                // A child that another test is starting has the descriptors of a depot that was
                // just closed, until it is its own program.
                Err(Error::Locked { .. }) if begun.elapsed() < PATIENCE => {
                    thread::sleep(Duration::from_millis(1));
                }
                opened => return opened.unwrap(),
            }
        }
    }
}
