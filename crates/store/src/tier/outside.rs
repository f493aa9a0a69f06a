//! What processes of this host, which have no descriptor of a block's medium, find it by.

/// Where processes that have the tier's directory, or its [door](super::Door), reach a block by
/// themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// A file that has the block's payload, or is to have it, in the tier's directory and folders
    /// of it: `ab/cd/name`. Behind a door, whatever it goes by there.
    pub name: String,
    /// Which one it is of that name. Of a file its inode: another one is another attempt, or
    /// somebody else's.
    pub number: u64,
    /// Where the payload begins, bytes.
    pub offset: u64,
}
