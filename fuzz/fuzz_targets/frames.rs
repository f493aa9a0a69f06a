//! What a peer says over an owner's socket, whatever bytes those are.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    kvdepot_service::fuzz::frames(bytes);
});
