//! What a new arena is to be, and how it keeps its word.

/// The failures that an acknowledged block survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Durability {
    /// The end of the process, including a kill at any instruction.
    #[default]
    Process,
    /// Also a power loss.
    Power,
}

/// The treatment of an existing medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Format {
    /// Open it, or reject it if it is not an arena. A medium of zeros becomes an arena.
    #[default]
    Never,
    /// Create a new arena, unless the medium has a valid one.
    Once,
    /// Create a new arena.
    Always,
}

/// The method of reading and writing a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Access {
    /// Mapped into memory; for files and DAX devices.
    #[default]
    Mapped,
    /// System calls that bypass the page cache, if the file system supports that; for files,
    /// without addresses.
    Direct,
}

/// Options for opening one medium.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Options {
    /// Size of the medium in bytes.
    pub capacity: Option<u64>,
    /// Number of entries in the record table of a new arena.
    pub records: Option<u64>,
    /// Failures that acknowledged blocks survive.
    pub durability: Durability,
    /// Treatment of an existing medium.
    pub format: Format,
    /// Method of reading and writing the medium. The format on the medium is the same for all
    /// methods.
    pub access: Access,
    /// Number of owners on this host that each create such an arena; 0 counts as 1. A new arena
    /// without a capacity gets that part of the usual share of the free disk space.
    pub sharers: u64,
}
