//! Policies that decide when a session is saved.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod policy_behaviour;
mod policy_model;
