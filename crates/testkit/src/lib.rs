//! Fault injection, crash and model helpers for kvdepot's tests.
