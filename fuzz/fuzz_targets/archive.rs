//! What a file has as a session, whatever bytes those are.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    kvdepot_session::fuzz::archive(bytes);
});
