//! Blocks in files of a directory that other processes have too: how one is named there, and its
//! file once it is open.
//!
//! Whoever has opened a file keeps it: it may be replaced or removed, and its bytes stay. So an
//! open file is a pin; but who opens it by its name must see that it is the one that was meant.

use std::sync::Arc;
use std::{fs, io};

use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Error, Place};
use kvdepot_host::dir::{Access, Dir};
use kvdepot_media::Buffer;
use kvdepot_media::file::{File, Hands};

use super::contract::Ends;
use super::outside::Outside;

/// A directory that other processes have open too.
#[derive(Clone, Debug)]
pub struct Directory {
    /// The open directory.
    pub dir: Arc<Dir>,
    /// True if its files are opened with `O_DIRECT`.
    pub direct: bool,
}

/// Open file of a block.
pub struct BlockFile {
    file: Arc<File>,
    inode: u64,
    offset: u64,
}

impl BlockFile {
    /// Creates a block file from an open file, its inode and the offset of its payload in bytes.
    #[must_use]
    pub fn new(file: Arc<File>, inode: u64, offset: u64) -> BlockFile {
        BlockFile {
            file,
            inode,
            offset,
        }
    }

    /// Opens the file at `at`, or returns `None` if it was removed or replaced by another file.
    ///
    /// # Errors
    ///
    /// Those of [`Dir::open_seen`].
    pub fn open(
        Directory { dir, direct }: &Directory,
        at: &Outside,
        access: Access,
        hands: &Arc<Hands>,
    ) -> Result<Option<BlockFile>, Error> {
        let opened = dir.open_seen(&at.name, access, *direct)?;
        let Some((fd, _)) = opened.filter(|(_, seen)| seen.inode == at.number) else {
            return Ok(None);
        };
        let file = File::new(fs::File::from(fd), hands)?;
        Ok(Some(BlockFile::new(file, at.number, at.offset)))
    }

    /// Returns the number of the file in [`Outside`], or 0 if the system does not report it.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// Returns the file, for data outside of the payload.
    #[must_use]
    pub fn raw(&self) -> &File {
        &self.file
    }

    /// Returns a buffer of `len` bytes of the payload from `offset` on: one part, or all.
    ///
    /// Parts begin at pages. Bytes after the last part in its page have no meaning.
    #[must_use]
    pub fn payload(&self, offset: u64, len: u64) -> Buffer {
        let at = (self.offset + offset) as usize;
        self.file.buffer(at, len as usize).padded()
    }

    /// Where the table of a block in so many parts begins in its payload, and room for it.
    fn table(len: u64, count: usize) -> Option<(u64, Vec<u8>)> {
        let bytes = count * parts::ENTRY as usize;
        Some((len.checked_sub(bytes as u64)?, vec![0; bytes]))
    }
}

impl Ends for BlockFile {
    fn buffers(
        &self,
        _: &Place,
        offset: u64,
        len: u64,
        ends: &mut Vec<Buffer>,
    ) -> Result<(), Error> {
        ends.clear();
        ends.push(self.payload(offset, len));
        Ok(())
    }

    fn parts(&self, place: &Place) -> Result<Option<Vec<Part>>, Error> {
        if let Some(parts) = parts::single(place) {
            return Ok(Some(parts.to_vec()));
        }
        let Some((begin, mut table)) = BlockFile::table(place.len, place.parts.into()) else {
            return Ok(None);
        };
        let at = self.offset + begin;
        match self.file.read_exact_at(at, &mut table) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            // Says nothing about the block.
            Err(source) => return Err(failed(source)),
        }
        let (identity, sum) = (&place.identity, place.checksum);
        Ok(parts::of_table(identity, &table, begin, sum))
    }

    fn write_parts(&self, place: &Place, found: &[Part]) -> Result<(), Error> {
        let table = parts::encode(found);
        let (begin, _) = BlockFile::table(place.len, found.len()).unwrap_or_default();
        self.file
            .write_all_at(self.offset + begin, &table)
            .map_err(failed)
    }
}

fn failed(source: io::Error) -> Error {
    Error::Io {
        path: "write to a block file".into(),
        source,
    }
}
