//! Errors of planning.

/// A movement that cannot be planned. A call that returns an error plans nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Sources and destinations of a movement differ in length.
    #[error(
        "the sources have {src} bytes, but the destinations have {dst} bytes; use equal lengths"
    )]
    LengthMismatch {
        /// Bytes in all sources.
        src: u64,
        /// Bytes in all destinations.
        dst: u64,
    },
    /// A range ends outside the 64-bit address space.
    #[error("range of {len} bytes at {addr:#x} ends beyond 2^64 - 1")]
    RangeOverflow {
        /// First address of the range.
        addr: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// The ranges of one side add up to more than 2^64 - 1 bytes.
    #[error("ranges add up to more than 2^64 - 1 bytes")]
    TotalOverflow,
    /// A unit or span without bytes was passed to a planner.
    #[error("{what} with tag {tag} has 0 bytes; allowed: at least 1 byte")]
    Empty {
        /// `"unit"` or `"span"`.
        what: &'static str,
        /// The caller's tag of the movement.
        tag: u32,
    },
    /// A batch would need more entries than a 32-bit number can count.
    #[error("{count} {what} in one batch; allowed: at most 4294967295")]
    TooMany {
        /// `"spans"` or `"pieces"`.
        what: &'static str,
        /// Upper bound on the number of entries that the batch would need.
        count: u64,
    },
    /// A limit is outside its allowed values.
    #[error("{field}: {value} is not allowed; allowed: {allowed}")]
    Config {
        /// Name of the limit.
        field: &'static str,
        /// The value in the call.
        value: u64,
        /// Description of the allowed values.
        allowed: &'static str,
    },
}
