//! What an engine's peer says over a connection, whatever bytes those are.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    kvdepot_transfer::fuzz::wire(bytes);
});
