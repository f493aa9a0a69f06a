//! Batched transfer between processes and hosts.

#![expect(
    unsafe_code,
    reason = "this crate hands memory to devices that read and write it"
)]

#[cfg_attr(
    not(test),
    expect(
        dead_code,
        unused_imports,
        reason = "the engine that uses it is not there yet"
    )
)]
mod verbs;
