//! What a new arena is to be, and how it keeps its word.

/// What an acknowledged block outlives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Durability {
    /// The process, killed at any instruction.
    #[default]
    Process,
    /// A power cut too.
    Power,
}

/// What becomes of a medium that holds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Format {
    /// It is opened, or refused if it is no arena. One of zeros becomes an arena.
    #[default]
    Never,
    /// It becomes a new arena, unless it is a sound one.
    Once,
    /// It becomes a new arena.
    Always,
}

/// How a medium is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Access {
    /// As memory, where it is mapped: files and DAX devices.
    #[default]
    Mapped,
    /// By calls, past the page cache where the file system can: files, which need no addresses.
    Direct,
}

/// How one medium is opened.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Options {
    /// Bytes of the medium.
    pub capacity: Option<u64>,
    /// Entries of a new arena's record table.
    pub records: Option<u64>,
    /// What acknowledged blocks outlive.
    pub durability: Durability,
    /// Whether to make a new arena of what is there.
    pub format: Format,
    /// How the medium is read and written; what stands there is the same.
    pub access: Access,
    /// Owners of this host that each make such an arena: a new one without a capacity takes so
    /// small a part of the usual share of the free disk. 0 is 1.
    pub sharers: u64,
}
