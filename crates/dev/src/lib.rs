//! Generators and house rules of the kvdepot tree.
//!
//! Files that say again what code declares are written by `cargo run -p kvdepot-dev -- generate`;
//! with `--check` it only compares, which `make lint` does. The house rules are `tests/tidy/`.
//! [`mutants`] measures how sharp the simulator is, [`paired`] whether a change makes anything
//! slower, [`repeats`] what stands in two places.

#![forbid(unsafe_code)]

pub mod generate;
pub mod mutants;
pub mod paired;
pub mod repeats;

use std::path::Path;

/// The root of the source tree.
#[must_use]
pub fn root() -> &'static Path {
    // This crate lies two levels below it.
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().and_then(Path::parent).unwrap_or(here)
}
