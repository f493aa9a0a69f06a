//! The HTTP server of a depot: pages, formats, rejected requests, and connections that do nothing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod abuse;
mod formats;
mod pages;
