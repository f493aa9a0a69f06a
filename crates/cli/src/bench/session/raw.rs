//! What a plain program does: one file of a payload, without a checksum.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use kvdepot_media::file::plain::{self, PlainAt, PlainFiles, PlainRings};
use kvdepot_media::{Buffer, Op};

use super::plan::Io;
use crate::error::Error;

/// Bytes of a request.
const BLOCK: usize = 1 << 20;

/// A plain way, with its name.
pub(super) struct Raw {
    pub(super) name: &'static str,
    rings: PlainRings,
    direct: bool,
    syncs: bool,
    allocated: bool,
}

impl Raw {
    /// The ways that may be the limit: 8 requests of 1 MiB under way.
    pub(super) fn ways(io: Io, memory: &Buffer) -> Result<Vec<Raw>, Error> {
        // Threads, whether the page cache is passed by, and whether the file gets its space first.
        const WAYS: [(&str, usize, bool, bool); 6] = [
            ("1 thread", 1, true, false),
            ("1 thread, space first", 1, true, true),
            ("2 threads", 2, true, false),
            ("2 threads, space first", 2, true, true),
            ("1 thread, page cache", 1, false, false),
            ("2 threads, page cache", 2, false, false),
        ];
        let is_meant = |(_, _, direct, _): &(&str, usize, bool, bool)| match io {
            Io::Buffered => !direct,
            Io::Fsync => true,
            Io::Direct => *direct,
        };
        let way = |(name, threads, direct, allocated)| {
            let way = PlainFiles {
                threads,
                depth: 8,
                direct,
                registered: false,
                allocated: false,
            };
            Ok(Raw {
                name,
                rings: PlainRings::new(way, memory)?,
                direct,
                syncs: io == Io::Fsync,
                allocated,
            })
        };
        WAYS.into_iter().filter(is_meant).map(way).collect()
    }

    /// Writes the first bytes of the memory to a new file; seconds.
    pub(super) fn write(&mut self, path: &Path, bytes: usize) -> Result<f64, Error> {
        let begun = Instant::now();
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        let file = self.open(&mut options, path)?;
        if self.allocated {
            plain::allocate(&file, bytes as u64)?;
        }
        self.run(Op::Write, &file, bytes)?;
        if self.syncs {
            file.sync_all().map_err(Error::io(path))?;
            let folder = path.parent().unwrap_or(path);
            let folder = File::open(folder).map_err(Error::io(folder))?;
            folder.sync_all().map_err(Error::io(path))?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Reads a file into the memory; seconds.
    pub(super) fn read(&mut self, path: &Path, bytes: usize) -> Result<f64, Error> {
        let begun = Instant::now();
        let file = self.open(OpenOptions::new().read(true), path)?;
        self.run(Op::Read, &file, bytes)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    fn open(&self, options: &mut OpenOptions, path: &Path) -> Result<File, Error> {
        if self.direct {
            options.custom_flags(plain::DIRECT);
        }
        options.open(path).map_err(Error::io(path))
    }

    fn run(&mut self, op: Op, file: &File, bytes: usize) -> Result<(), Error> {
        let slots: Vec<usize> = (0..bytes / BLOCK).collect();
        let offsets: Vec<u64> = slots.iter().map(|slot| (slot * BLOCK) as u64).collect();
        let at = PlainAt::One(file.as_fd(), &offsets);
        Ok(self.rings.run(op, at, BLOCK, &slots)?)
    }
}

/// The old way to save: into a file of its own, from there into the final one, which is renamed
/// into place. `writes` is from the state's memory, `again` from what was read back.
pub(super) fn staged(
    (writes, again): (&mut Raw, &mut Raw),
    folder: &Path,
    bytes: usize,
) -> Result<f64, Error> {
    let begun = Instant::now();
    let (staging, new, last) = (
        folder.join("staging"),
        folder.join("new"),
        folder.join("last"),
    );
    writes.write(&staging, bytes)?;
    again.read(&staging, bytes)?;
    again.write(&new, bytes)?;
    std::fs::remove_file(&staging).map_err(Error::io(&staging))?;
    std::fs::rename(&new, &last).map_err(Error::io(&last))?;
    let taken = begun.elapsed().as_secs_f64();
    remove(&last)?;
    Ok(taken)
}

/// Removes a file once all is on the disk: what is still to be written is nobody else's time.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    let file = File::open(path).map_err(Error::io(path))?;
    plain::settle(file.as_fd())?;
    std::fs::remove_file(path).map_err(Error::io(path))
}
