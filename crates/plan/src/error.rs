//! Why a plan was refused. Nothing is planned by a call that returns an error.

/// A movement that cannot be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The sources and the destinations of a movement differ in length.
    #[error("sources have {src} bytes and destinations {dst}: they must be equal")]
    LengthMismatch {
        /// Bytes in all sources.
        src: u64,
        /// Bytes in all destinations.
        dst: u64,
    },
    /// A range ends beyond the 64-bit address space.
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
    /// A unit or span of no bytes was given to a planner.
    #[error("a {what} with tag {tag} has 0 bytes: at least 1 is needed")]
    Empty {
        /// `"unit"` or `"span"`.
        what: &'static str,
        /// The caller's tag.
        tag: u32,
    },
    /// A batch would need more entries than 32 bits can count.
    #[error("{count} {what} in one batch: at most 4294967295 are allowed")]
    TooMany {
        /// `"spans"` or `"pieces"`.
        what: &'static str,
        /// How many the batch would need, at most.
        count: u64,
    },
    /// A limit is outside of its allowed values.
    #[error("{field} is {value}: allowed is {allowed}")]
    Config {
        /// The limit's name.
        field: &'static str,
        /// The value that was given.
        value: u64,
        /// What is allowed, in words.
        allowed: &'static str,
    },
}
