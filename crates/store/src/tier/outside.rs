//! What processes of this host, which have no descriptor of a block's medium, find it by.

/// Location of a block outside of all media.
///
/// Processes that have the tier's directory, or its remote reader ([`Door`](super::Door)), read the
/// block there by themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Path of the block's file in the directory of the tier, for example `ab/cd/name`.
    ///
    /// For a remote reader: the name of the block there.
    pub name: String,
    /// Number that distinguishes blocks of this name.
    ///
    /// For a file it is the inode. Another inode is another attempt, or the file of another
    /// process.
    pub number: u64,
    /// Offset of the payload in bytes.
    pub offset: u64,
}
