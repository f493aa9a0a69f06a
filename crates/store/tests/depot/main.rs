//! Depots over memory and arenas.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/folder.rs"]
mod folder;

mod authenticated;
mod crash_kill9;
mod devices;
mod erase;
mod groups;
mod large_prompts;
mod listing;
mod live_verify;
mod lost_media;
mod new_media;
mod pipeline;
mod pressure;
mod recovery;
mod restore;
mod turns;
mod ucm;
