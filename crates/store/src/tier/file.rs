//! Blocks in files of a directory that other processes have too: how one is named there, and its
//! file once it is open.
//!
//! Whoever has opened a file keeps it: it may be replaced or removed, and its bytes stay. So an
//! open file is a pin; but who opens it by its name must see that it is the one that was meant.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::{fs, io};

use kvdepot_arena::parts::{self, Part};
use kvdepot_arena::{Error, Place};
use kvdepot_host::dir::{Access, Dir};
use kvdepot_media::Buffer;
use kvdepot_media::file::{File, Threads};

use super::contract::Ends;

/// A file that has a block's payload, or is to have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileAt {
    /// In the tier's directory, and folders of it: `ab/cd/name`.
    pub name: String,
    /// Which file it is: another one of that name is another attempt, or somebody else's.
    pub inode: u64,
    /// Where the payload begins, bytes.
    pub offset: u64,
}

/// A block's file, open.
pub struct BlockFile {
    file: Arc<File>,
    offset: u64,
}

impl BlockFile {
    /// One that is open, whose payload begins at `offset`, and who reads and writes it.
    ///
    /// # Errors
    /// [`Error::Media`] when the system refuses.
    pub fn new(raw: fs::File, offset: u64, threads: &Arc<Threads>) -> Result<BlockFile, Error> {
        let file = File::new(raw, threads)?;
        Ok(BlockFile { file, offset })
    }

    /// Opens what `at` names; `None` where it is gone, or another file has its name.
    ///
    /// # Errors
    /// Those of [`Dir::open_at`].
    pub fn open(
        dir: &Dir,
        at: &FileAt,
        access: Access,
        threads: &Arc<Threads>,
    ) -> Result<Option<BlockFile>, Error> {
        let Some(fd) = dir.open_at(&at.name, access)? else {
            return Ok(None);
        };
        let raw = fs::File::from(fd);
        let same = raw.metadata().is_ok_and(|file| file.ino() == at.inode);
        same.then(|| BlockFile::new(raw, at.offset, threads))
            .transpose()
    }

    /// The number that [`FileAt`] names it by; 0 where the system does not tell.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.raw().metadata().map_or(0, |file| file.ino())
    }

    /// The file itself, for what stands in it beside the payload.
    #[must_use]
    pub fn raw(&self) -> &fs::File {
        self.file.raw()
    }

    /// `len` bytes of the payload from `offset` on.
    #[must_use]
    pub fn payload(&self, offset: u64, len: u64) -> Buffer {
        let at = (self.offset + offset) as usize;
        self.file.buffer(at, len as usize)
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
        match self.raw().read_exact_at(&mut table, at) {
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
        self.raw()
            .write_all_at(&table, self.offset + begin)
            .map_err(failed)
    }
}

fn failed(source: io::Error) -> Error {
    Error::Io {
        path: "a block's file".into(),
        source,
    }
}
