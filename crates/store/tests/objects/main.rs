//! The tier `S3`: objects in a shared bucket.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/bucket.rs"]
mod bucket;
#[path = "../common/mod.rs"]
mod common;

mod s3;
mod s3_conditions;
mod s3_faults;
mod s3_linear;
mod s3_lists;
mod s3_pressure;
