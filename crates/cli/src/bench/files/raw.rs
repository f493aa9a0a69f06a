//! The plain files beside a tier's, and the ways to read and write them.

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use kvdepot_media::file::plain::{PlainAt, PlainFiles, PlainRings, cool, settle};
use kvdepot_media::{Buffer, Op};

use crate::error::Error;

/// Folders that plain files are spread over, as those of a tier are.
const FOLDERS: usize = 256;

/// A plain way, with its name.
pub(super) struct Way {
    pub(super) name: &'static str,
    rings: PlainRings,
    direct: bool,
}

/// All ways that may be the limit.
pub(super) fn ways(op: Op, direct: bool, depth: usize, memory: &Buffer) -> Result<Vec<Way>, Error> {
    // Threads, whether the page cache is passed by, and whether memory is registered, and files get
    // their space first.
    const WAYS: [(&str, usize, bool, bool); 12] = [
        ("1 thread", 1, true, false),
        ("1 thread, prepared", 1, true, true),
        ("1 thread, page cache", 1, false, false),
        ("2 threads", 2, true, false),
        ("2 threads, prepared", 2, true, true),
        ("2 threads, page cache", 2, false, false),
        ("4 threads", 4, true, false),
        ("4 threads, prepared", 4, true, true),
        ("4 threads, page cache", 4, false, false),
        ("8 threads", 8, true, false),
        ("8 threads, prepared", 8, true, true),
        ("8 threads, page cache", 8, false, false),
    ];
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let is_fit = |(_, threads, past, prepared): &(&str, usize, bool, bool)| {
        let few = *threads <= depth && *threads <= processors.max(2);
        few && if direct { *past } else { !*prepared }
    };
    let way = |(name, threads, direct, prepared)| {
        let way = PlainFiles {
            threads,
            depth,
            direct,
            registered: prepared,
            allocated: prepared && op == Op::Write,
        };
        Ok(Way {
            name,
            rings: PlainRings::new(way, memory)?,
            direct,
        })
    };
    WAYS.into_iter().filter(is_fit).map(way).collect()
}

/// Plain blocks.
pub(super) struct Raw {
    dir: File,
    path: PathBuf,
    block: usize,
    count: usize,
    made: usize,
    /// Where all blocks are in one file: with the page cache, and without.
    one: Option<File>,
}

impl Raw {
    /// `count` blocks with the content of the memory's.
    pub(super) fn new(
        path: &Path,
        in_one: bool,
        block: usize,
        count: usize,
        memory: &Buffer,
    ) -> Result<Raw, Error> {
        std::fs::create_dir(path).map_err(Error::io(path))?;
        let mut raw = Raw {
            dir: File::open(path).map_err(Error::io(path))?,
            path: path.to_owned(),
            block,
            count,
            made: 0,
            one: None,
        };
        match in_one {
            true => raw.one = Some(one(&path.join("blocks"), count * block)?),
            false => {
                for number in 0..FOLDERS {
                    let folder = path.join(format!("{number:02x}"));
                    std::fs::create_dir(&folder).map_err(Error::io(&folder))?;
                }
            }
        }
        let way = PlainFiles {
            threads: 1,
            depth: 8,
            direct: true,
            registered: false,
            allocated: true,
        };
        let mut rings = PlainRings::new(way, memory)?;
        let slots: Vec<usize> = (0..count)
            .map(|number| number % (memory.len() / block))
            .collect();
        let all: Vec<usize> = (0..count).collect();
        raw.with(&all, |at| Ok(rings.run(Op::Write, at, block, &slots)?))?;
        raw.made = count;
        Ok(raw)
    }

    /// Reads blocks with these numbers into the memory's slots.
    pub(super) fn read(
        &self,
        way: &mut Way,
        numbers: &[usize],
        slots: &[usize],
    ) -> Result<(), Error> {
        let block = self.block;
        self.with(numbers, |at| {
            Ok(way.rings.run(Op::Read, at, block, slots)?)
        })
    }

    /// Writes the memory's slots as new files, or over these blocks of the one file.
    pub(super) fn write(
        &mut self,
        way: &mut Way,
        numbers: &[usize],
        slots: &[usize],
    ) -> Result<Written, Error> {
        let block = self.block;
        let new: Vec<usize> = match self.one {
            Some(_) => numbers.to_vec(),
            None => (self.made..self.made + numbers.len()).collect(),
        };
        self.made += new.len();
        let start = std::time::Instant::now();
        self.with(&new, |at| Ok(way.rings.run(Op::Write, at, block, slots)?))?;
        Ok(Written {
            seconds: start.elapsed().as_secs_f64(),
            new,
        })
    }

    /// Removes what a write has made, once it is on the disk.
    pub(super) fn remove(&self, written: &Written) -> Result<(), Error> {
        if self.one.is_some() {
            return Ok(());
        }
        settle(self.dir.as_fd())?;
        for number in &written.new {
            let path = self.path.join(name(*number));
            std::fs::remove_file(&path).map_err(Error::io(&path))?;
        }
        Ok(())
    }

    /// Empties the page cache of these blocks, where a way goes through it.
    pub(super) fn cool(&self, way: &Way, numbers: &[usize]) -> Result<(), Error> {
        if way.direct || self.one.is_some() {
            return Ok(());
        }
        for number in numbers {
            let path = self.path.join(name(*number));
            cool(&File::open(&path).map_err(Error::io(&path))?, 0)?;
        }
        Ok(())
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    fn with<T>(
        &self,
        numbers: &[usize],
        run: impl FnOnce(PlainAt<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if let Some(file) = &self.one {
            let at = |number: &usize| (number * self.block) as u64;
            let offsets: Vec<u64> = numbers.iter().map(at).collect();
            return run(PlainAt::One(file.as_fd(), &offsets));
        }
        let text = |number: &usize| CString::new(name(*number));
        let names: Result<Vec<CString>, _> = numbers.iter().map(text).collect();
        let names = names.map_err(|error| Error::Bench(error.to_string()))?;
        let names: Vec<&CStr> = names.iter().map(CString::as_c_str).collect();
        run(PlainAt::Each(self.dir.as_fd(), &names))
    }
}

/// What was written, and how long that took.
pub(super) struct Written {
    pub(super) seconds: f64,
    new: Vec<usize>,
}

fn name(number: usize) -> String {
    format!("{:02x}/{number}", number % FOLDERS)
}

fn one(path: &Path, bytes: usize) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    let file = options
        .custom_flags(kvdepot_media::file::plain::DIRECT)
        .open(path);
    let file = file.map_err(Error::io(path))?;
    kvdepot_media::file::plain::allocate(&file, bytes as u64)?;
    Ok(file)
}
