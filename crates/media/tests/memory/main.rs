//! Mappings and the copier. `changing` has data races on purpose: not for ThreadSanitizer.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod changing;
mod copier;
mod leaves;
mod mapping;
mod staged;
