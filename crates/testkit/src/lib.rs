//! Fault injection, crash and model helpers for kvdepot's tests.

#![forbid(unsafe_code)]
