//! What a disk may hold after a power cut, by a log of what was written to it: that of Linux's
//! device mapper target `log-writes`
//! (`Documentation/admin-guide/device-mapper/log-writes.rst`).
//!
//! The log has writes in the order in which they became durable: one that was not flushed is noted
//! when a flush that began after it has ended. So a disk that obeys flushes holds, when the power
//! fails, all that stands before the last flush, and of what stands behind it anything: the
//! *epoch* that was under way.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::seed::Rng;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;

/// Bytes of an entry's own fields.
const HEADER: u64 = 32;

/// An entry is a flush of all before it, or begins with one.
const FLUSH: u64 = 1;
/// It is durable when it is noted.
const FUA: u64 = 2;
const DISCARD: u64 = 4;
/// Somebody's word, and no write.
const MARK: u64 = 8;

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// Where it was written to, in bytes.
    at: u64,
    len: u64,
    flags: u64,
    /// Where its bytes, or its word's, are in the log.
    from: u64,
    word: u64,
}

impl Entry {
    fn is(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Whether it changes what the disk holds.
    fn writes(&self) -> bool {
        self.len > 0 && !self.is(MARK) && !self.is(DISCARD)
    }
}

/// A log that is whole.
#[derive(Debug)]
pub struct WriteLog {
    file: File,
    entries: Vec<Entry>,
}

impl WriteLog {
    /// Reads what was noted.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::InvalidData`] where no such log is.
    pub fn open(file: File) -> io::Result<WriteLog> {
        let number = |at: u64| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at)?;
            Ok::<u64, io::Error>(u64::from_le_bytes(bytes))
        };
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if number(0)? != MAGIC || number(8)? != VERSION {
            return wrong("no log of writes".into());
        }
        let (count, unit) = (number(16)?, number(24)? & u64::from(u32::MAX));
        if unit < 512 {
            return wrong(format!("sectors of {unit} bytes"));
        }
        let mut entries = Vec::new();
        let mut next = unit;
        for _ in 0..count {
            let [sector, sectors, flags, word] = [
                number(next)?,
                number(next + 8)?,
                number(next + 16)?,
                number(next + 24)?,
            ];
            let mut entry = Entry {
                at: sector * unit,
                len: sectors * unit,
                flags,
                from: next + unit,
                word,
            };
            if entry.is(MARK) {
                entry.from = next + HEADER;
            }
            next += unit;
            if entry.writes() {
                next += entry.len;
            }
            entries.push(entry);
        }
        Ok(WriteLog { file, entries })
    }

    /// How many entries there are. After any number of them the power may fail.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The words that were said, each with how many entries stand before it.
    ///
    /// # Panics
    /// When the log cannot be read.
    #[must_use]
    pub fn marks(&self) -> Vec<(usize, String)> {
        let marks = self.entries.iter().enumerate();
        let marks = marks.filter(|(_, entry)| entry.is(MARK));
        let read = |(index, entry): (usize, &Entry)| {
            let mut word = vec![0; entry.word as usize];
            self.file.read_exact_at(&mut word, entry.from).unwrap();
            let word = String::from_utf8_lossy(&word);
            (index, word.trim_end_matches('\0').to_owned())
        };
        marks.map(read).collect()
    }

    /// Where flushes have just ended, and forced writes: how many entries stand before.
    #[must_use]
    pub fn boundaries(&self) -> Vec<usize> {
        let each = self.entries.iter().enumerate();
        let each = each.filter(|(_, entry)| entry.is(FLUSH) || entry.is(FUA));
        each.map(|(index, _)| index + 1).collect()
    }
}

/// A disk while it is written anew, in memory: one epoch after the other.
#[derive(Debug)]
pub struct Replay<'a> {
    log: &'a WriteLog,
    /// What is durable.
    disk: Vec<u8>,
    /// Written, not flushed yet.
    epoch: Vec<Entry>,
    next: usize,
}

impl<'a> Replay<'a> {
    /// A disk of zeros, of `len` bytes.
    #[must_use]
    pub fn new(log: &'a WriteLog, len: usize) -> Replay<'a> {
        Replay {
            log,
            disk: vec![0; len],
            epoch: Vec::new(),
            next: 0,
        }
    }

    /// What the disk holds when the power fails after `count` entries, which grows from call to
    /// call: what was noted, or of the epoch that was under way any of it but what was forced:
    /// disks write in an order of their own.
    ///
    /// # Errors
    /// The log's.
    pub fn cut(&mut self, count: usize, mut any: Option<&mut Rng>) -> io::Result<Vec<u8>> {
        while self.next < count {
            let entry = self.log.entries[self.next];
            self.next += 1;
            if entry.is(FLUSH) {
                for before in std::mem::take(&mut self.epoch) {
                    write(&self.log.file, &mut self.disk, &before)?;
                }
            }
            if entry.writes() {
                self.epoch.push(entry);
            }
        }
        let mut disk = self.disk.clone();
        for entry in &self.epoch {
            let has = |rng: &mut Rng| entry.is(FUA) || rng.once_in(2);
            if any.as_deref_mut().is_none_or(has) {
                write(&self.log.file, &mut disk, entry)?;
            }
        }
        Ok(disk)
    }
}

fn write(log: &File, disk: &mut [u8], entry: &Entry) -> io::Result<()> {
    let place = entry.at as usize..(entry.at + entry.len) as usize;
    let beyond = || io::Error::other(format!("a write to {place:?}"));
    let to = disk.get_mut(place.clone()).ok_or_else(beyond)?;
    log.read_exact_at(to, entry.from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log as the target writes it, in units of 512 bytes.
    fn log(entries: &[(u64, &[u8], u64)]) -> WriteLog {
        let mut bytes = Vec::new();
        for number in [MAGIC, VERSION, entries.len() as u64, 512] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.resize(512, 0);
        for (sector, data, flags) in entries {
            let is_mark = flags & MARK != 0;
            let sectors = if is_mark { 0 } else { data.len() as u64 };
            let word = if is_mark { data.len() as u64 } else { 0 };
            for number in [*sector, sectors, *flags, word] {
                bytes.extend(number.to_le_bytes());
            }
            if is_mark {
                bytes.extend(*data);
            }
            bytes.resize(bytes.len().next_multiple_of(512), 0);
            if !is_mark && flags & DISCARD == 0 {
                data.iter().for_each(|byte| bytes.extend([*byte; 512]));
            }
        }
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        WriteLog::open(file).unwrap()
    }

    fn first(disk: &[u8]) -> Vec<u8> {
        disk.iter().step_by(512).copied().collect()
    }

    #[test]
    fn what_was_flushed_is_there_and_of_the_rest_anything() {
        let log = log(&[
            (0, &[1, 1], 0),
            (3, &[9, 9, 9], DISCARD),
            (0, &[], FLUSH),
            (0, b"one", MARK),
            (1, &[2], 0),
            (2, &[3], FUA),
            (3, &[4], FLUSH),
            (0, b"two", MARK),
        ]);
        let marks: Vec<_> = log.marks();
        assert_eq!(marks, [(3, "one".to_owned()), (7, "two".to_owned())]);
        assert_eq!(log.boundaries(), [3, 6, 7]);
        let mut replay = Replay::new(&log, 4 * 512);
        let mut at = |count| first(&replay.cut(count, None).unwrap());
        assert_eq!(at(0), [0, 0, 0, 0]);
        assert_eq!(at(1), [1, 1, 0, 0]);
        assert_eq!(at(4), [1, 1, 0, 0]);
        assert_eq!(at(5), [1, 2, 0, 0]);
        assert_eq!(at(6), [1, 2, 3, 0]);
        assert_eq!(at(8), [1, 2, 3, 4]);
        let (mut rng, mut seen) = (Rng::new(1), [false; 2]);
        for _ in 0..64 {
            let mut replay = Replay::new(&log, 4 * 512);
            let disk = replay.cut(6, Some(&mut rng)).unwrap();
            let [begin, between, forced, end] = first(&disk)[..] else {
                panic!("four sectors");
            };
            assert_eq!((begin, forced, end), (1, 3, 0));
            seen[usize::from(between == 2)] = true;
        }
        assert_eq!(seen, [true; 2]);
    }
}
