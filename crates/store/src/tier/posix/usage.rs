//! How much of its capacity a directory has: one count for all who share it.
//!
//! The count is of bytes that are there or promised. Who wants to write takes a grant from it, a
//! small part of the capacity, and writes from that without asking again; so what lies there is
//! never more than the count, and the count never more than the capacity. Grants of processes that
//! were killed stay in it until the next [collection](super::collect) has looked at every file.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvdepot_arena::Error;
use kvdepot_host::dir::{Access, Dir};
use kvdepot_host::fork::LockFd;
use kvdepot_host::lock::{self, Kind};
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The count's file.
const NAME: &str = "usage";

/// Its bytes that are locked: while the count is read and written, and by who collects.
const COUNT_BYTE: u64 = 0;
const COLLECTOR_BYTE: u64 = 1;

/// How long the count is waited for: whoever has it reads and writes a few bytes.
const PATIENCE: Duration = Duration::from_secs(5);

/// A grant, of the capacity: so that some dozen processes promise less than 5 % of it together.
const GRANT_PART: u64 = 512;

/// What one process may have in files without a name, as grants.
const UNNAMED_GRANTS: u64 = 2;

/// Where a collection begins, in thousandths of the capacity.
pub(super) const BEGIN: u64 = 940;

/// How often a use is marked: so many times while all is replaced, and at least once in this time.
const TURNOVER_PART: u32 = 8;
const MARKED_AT_LEAST: Duration = Duration::from_secs(3600);

/// A count as it stands in the file.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Count {
    magic: [u8; 8],
    version: U32,
    /// Seconds since the use before which all has gone, when that was looked at; 0 before.
    turnover: U32,
    used: U64,
    checksum: U64,
}

const MAGIC: [u8; 8] = *b"KVDUSAGE";
const VERSION: u32 = 1;

impl Count {
    fn new(used: u64, turnover: u32) -> Count {
        let mut count = Count {
            magic: MAGIC,
            version: VERSION.into(),
            turnover: turnover.into(),
            used: used.into(),
            checksum: 0.into(),
        };
        count.checksum = count.sum().into();
        count
    }

    fn sum(&self) -> u64 {
        let bytes = self.as_bytes();
        xxh3_64(&bytes[..bytes.len() - size_of::<U64>()])
    }

    fn read(bytes: &[u8; size_of::<Count>()]) -> Option<(u64, u32)> {
        let count = Count::ref_from_bytes(bytes).ok()?;
        let is_whole = count.magic == MAGIC && count.version == VERSION;
        let read = || (count.used.get(), count.turnover.get());
        (is_whole && count.checksum == count.sum()).then(read)
    }
}

/// The count, as one process uses it.
pub(super) struct Usage {
    /// Its locks keep other processes away, and not other threads of this one: whoever reads or
    /// writes it has this.
    file: Mutex<LockFd>,
    /// The one who collects has a description of its own.
    collector: Mutex<Arc<LockFd>>,
    capacity: u64,
    grant: u64,
    /// As the count has it; what this process writes there next, where it has looked.
    turnover: AtomicU32,
    /// Held while what is spare is looked at and taken.
    spare: Mutex<()>,
    /// Never held while the file is read or written.
    mine: Mutex<Mine>,
}

#[derive(Default)]
struct Mine {
    /// Granted, and not written.
    left: u64,
    /// Taken for files that are not there yet.
    promised: u64,
    /// In files without a name.
    unnamed: u64,
    /// The count when it was read last.
    seen: u64,
    /// How often the directory was removed and opened again: what was taken before is in no count.
    epoch: u64,
}

/// A file without a name: its bytes are in the count, and no look finds them.
pub(super) struct Unnamed {
    usage: Arc<Usage>,
    bytes: u64,
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        self.usage.mine.lock().unnamed -= self.bytes;
    }
}

impl Usage {
    /// The count of a directory; one that has none, or a broken one, is full until it has been
    /// looked at.
    pub(super) fn open(dir: &Dir, capacity: u64) -> Result<Usage, Error> {
        let open = || LockFd::open(|| file_of(dir));
        Ok(Usage {
            file: Mutex::new(open()?),
            collector: Mutex::new(Arc::new(open()?)),
            capacity,
            grant: (capacity / GRANT_PART).max(1),
            turnover: AtomicU32::new(0),
            spare: Mutex::new(()),
            mine: Mutex::default(),
        })
    }

    /// The count of a directory that has taken the place of one which was removed.
    pub(super) fn open_again(&self, dir: &Dir) -> Result<(), Error> {
        let open = || LockFd::open(|| file_of(dir));
        let (file, collector) = (open()?, open()?);
        *self.file.lock() = file;
        *self.collector.lock() = Arc::new(collector);
        let mut mine = self.mine.lock();
        *mine = Mine {
            unnamed: mine.unnamed,
            epoch: mine.epoch + 1,
            ..Mine::default()
        };
        drop(mine);
        Ok(())
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The count when it was read last.
    pub(super) fn seen(&self) -> u64 {
        self.mine.lock().seen
    }

    /// Whether a collection is to begin.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.seen() >= self.part(BEGIN)
    }

    /// Notes how long ago the oldest use is that has left a trace.
    pub(super) fn turned_over(&self, since: Duration) -> Result<(), Error> {
        let seconds = u32::try_from(since.as_secs()).unwrap_or(u32::MAX).max(1);
        self.turnover.store(seconds, Ordering::Relaxed);
        self.change_as(Some(seconds), |used| used.unwrap_or(self.capacity))
            .map(|_| ())
    }

    /// A use is marked where others see it when the mark before is older than this, in nanoseconds.
    pub(super) fn marking_interval(&self) -> i128 {
        let turnover = self.turnover.load(Ordering::Relaxed);
        let interval = match turnover {
            0 => MARKED_AT_LEAST,
            _ => Duration::from_secs(u64::from(turnover / TURNOVER_PART)).min(MARKED_AT_LEAST),
        };
        interval.as_nanos() as i128
    }

    /// So many thousandths of the capacity.
    pub(super) fn part(&self, thousandths: u64) -> u64 {
        (u128::from(self.capacity) * u128::from(thousandths) / 1000) as u64
    }

    /// Takes so many bytes, if there are: until they are [settled](Usage::settle) they are in no
    /// file that a look could find.
    pub(super) fn take(&self, bytes: u64) -> Result<bool, Error> {
        loop {
            let least = {
                let mut mine = self.mine.lock();
                if mine.left >= bytes {
                    mine.left -= bytes;
                    mine.promised += bytes;
                    return Ok(true);
                }
                bytes - mine.left
            };
            let mut granted = 0;
            let used = self.change(|used| {
                let room = self.capacity.saturating_sub(used);
                granted = match room {
                    _ if room >= least + self.grant => least + self.grant,
                    _ if room >= least => least,
                    _ => 0,
                };
                used + granted
            })?;
            let mut mine = self.mine.lock();
            mine.seen = used;
            mine.left += granted;
            if granted == 0 {
                return Ok(false);
            }
        }
    }

    /// What is free and needs no collection, as far as it is known.
    pub(super) fn spare(&self) -> u64 {
        self.spare_end().saturating_sub(self.seen())
    }

    /// An eighth is for the heads of prompts, which may come later than the tails of others.
    fn spare_end(&self) -> u64 {
        let kept = self.capacity / 8 + self.grant;
        self.part(BEGIN).saturating_sub(kept)
    }

    /// As [`Usage::take`], of what is spare: granted bytes by the count that was read last, others
    /// by the count now. `None` before the first count.
    pub(super) fn take_spare(&self, bytes: u64) -> Result<Option<bool>, Error> {
        // One after the other: what is taken meanwhile is seen by the next.
        let _turn = self.spare.lock();
        {
            // What is granted is in the count already: it is not read for each file.
            let mut mine = self.mine.lock();
            if mine.left >= bytes && mine.seen + bytes <= self.spare_end() {
                mine.left -= bytes;
                mine.promised += bytes;
                return Ok(Some(true));
            }
        }
        let mut is_counted = false;
        let used = self.change_from(|used| {
            is_counted = used.is_some();
            used.unwrap_or(self.capacity)
        })?;
        self.mine.lock().seen = used;
        match is_counted {
            true if used + bytes <= self.spare_end() => self.take(bytes).map(Some),
            true => Ok(Some(false)),
            false => Ok(None),
        }
    }

    /// Room for a file without a name, if it is little enough for a look to miss.
    pub(super) fn unnamed(self: &Arc<Usage>, bytes: u64) -> Option<Unnamed> {
        let mut mine = self.mine.lock();
        if mine.unnamed + bytes > UNNAMED_GRANTS * self.grant {
            return None;
        }
        mine.unnamed += bytes;
        let usage = Arc::clone(self);
        Some(Unnamed { usage, bytes })
    }

    /// Notes that a file has what was taken for it, or will not be made.
    pub(super) fn settle(&self, bytes: u64) {
        let mut mine = self.mine.lock();
        mine.promised = mine.promised.saturating_sub(bytes);
    }

    /// What this process has of the count and is in no file that a look could find.
    pub(super) fn unseen(&self) -> u64 {
        let mine = self.mine.lock();
        mine.left + mine.promised + mine.unnamed
    }

    /// Which of the counts this is that have been at its place: whoever takes of it notes it.
    pub(super) fn epoch(&self) -> u64 {
        self.mine.lock().epoch
    }

    /// Gives bytes back that were taken in that epoch and not written; to the count what a put does
    /// not need soon. Who looks at all files would take it for lost, and it would be granted twice.
    pub(super) fn give_back(&self, bytes: u64, epoch: u64) {
        {
            let mut mine = self.mine.lock();
            if mine.epoch != epoch {
                return;
            }
            mine.left += bytes;
        }
        if let Err(error) = self.freed(0) {
            tracing::debug!(%error, "usage that was not written stays reserved");
        }
    }

    /// Notes that files have gone, and gives back what was granted beyond what a put needs soon: a
    /// grant at least, so that many small files are one change of the count.
    pub(super) fn freed(&self, bytes: u64) -> Result<(), Error> {
        let spare = {
            let mut mine = self.mine.lock();
            let spare = match mine.left > 2 * self.grant {
                true => mine.left - self.grant,
                false => 0,
            };
            mine.left -= spare;
            spare
        };
        if bytes + spare == 0 {
            return Ok(());
        }
        match self.change(|used| used.saturating_sub(bytes + spare)) {
            Ok(used) => self.mine.lock().seen = used,
            Err(error) => {
                self.mine.lock().left += spare;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Corrects a count that differs by much from what was found, with what is
    /// [unseen](Usage::unseen). What the other of `sharers` processes are granted, and may have in
    /// files without a name, is nowhere to be found, and stays counted. What others have changed
    /// since it was `counted` is no difference.
    pub(super) fn found(&self, counted: u64, found: u64, sharers: u64) -> Result<(), Error> {
        let others = sharers.saturating_sub(1);
        let granted = (2 + UNNAMED_GRANTS) * self.grant.saturating_mul(others);
        let tolerated = self.capacity / 50;
        let used = self.change_from(|used| {
            let Some(used) = used else {
                // Nobody has been granted anything.
                return found;
            };
            let lost = counted.min(used).saturating_sub(found);
            let more = found.saturating_sub(counted.max(used));
            match () {
                () if lost > tolerated.max(granted) => used - (lost - granted),
                () if more > tolerated => used + more,
                () => used,
            }
        })?;
        self.mine.lock().seen = used;
        Ok(())
    }

    /// The count now.
    pub(super) fn used(&self) -> Result<u64, Error> {
        let used = self.change(|used| used)?;
        self.mine.lock().seen = used;
        Ok(used)
    }

    /// Whoever collects, until the answer is dropped; `None` where another one does.
    pub(super) fn collector(&self) -> Option<Collector> {
        let file = Arc::clone(&self.collector.lock());
        let taken = lock::try_lock(file.fd().ok()?, COLLECTOR_BYTE, Kind::Exclusive);
        taken.unwrap_or(false).then_some(Collector(file))
    }

    /// What is left of the grants goes back.
    pub(super) fn close(&self) {
        let left = std::mem::take(&mut self.mine.lock().left);
        if let Err(error) = self.change(|used| used.saturating_sub(left)) {
            tracing::debug!(%error, "reserved bytes stay in the usage count");
        }
    }

    /// Reads the count and writes what `change` makes of it. Where nobody has counted yet, all of
    /// it may be in use.
    fn change(&self, change: impl FnOnce(u64) -> u64) -> Result<u64, Error> {
        self.change_from(|used| change(used.unwrap_or(self.capacity)))
    }

    /// The same from `None` where nobody has counted yet.
    fn change_from(&self, change: impl FnOnce(Option<u64>) -> u64) -> Result<u64, Error> {
        self.change_as(None, change)
    }

    /// The same, with another turnover.
    fn change_as(
        &self,
        turnover: Option<u32>,
        change: impl FnOnce(Option<u64>) -> u64,
    ) -> Result<u64, Error> {
        let file = self.file.lock();
        let fd = file.fd()?;
        if !lock::lock_timeout(fd, COUNT_BYTE, Kind::Exclusive, PATIENCE)? {
            return Err(failed(rustix::io::Errno::TIMEDOUT));
        }
        let changed = (|| {
            let mut bytes = [0; size_of::<Count>()];
            let read = rustix::io::pread(fd, &mut bytes, 0).map_err(failed)?;
            let known = match read == bytes.len() {
                true => Count::read(&bytes),
                false => None,
            };
            let used = known.map(|(used, _)| used);
            let seen = known.map_or(0, |(_, turnover)| turnover);
            let turnover = turnover.unwrap_or(seen);
            self.turnover.store(turnover, Ordering::Relaxed);
            // All of it may be in use where it is broken.
            let before = used.or_else(|| (read > 0).then_some(self.capacity));
            let after = change(before);
            // One that is not known is full, and stays unknown by that.
            let is_known = used.is_some() || after != self.capacity;
            if (used != Some(after) || seen != turnover) && is_known {
                let count = Count::new(after, turnover);
                rustix::io::pwrite(fd, count.as_bytes(), 0).map_err(failed)?;
            }
            Ok(after)
        })();
        lock::unlock(fd, COUNT_BYTE)?;
        changed
    }
}

/// The one who collects.
pub(super) struct Collector(Arc<LockFd>);

impl Drop for Collector {
    fn drop(&mut self) {
        if let Ok(fd) = self.0.fd() {
            let _unlocked = lock::unlock(fd, COLLECTOR_BYTE);
        }
    }
}

/// The count's file, which is made where there is none.
fn file_of(dir: &Dir) -> kvdepot_host::Result<OwnedFd> {
    if let Some(file) = dir.open_at(NAME, Access::Write)? {
        return Ok(file);
    }
    // Somebody else may have made it meanwhile.
    let made = dir.create(NAME, false);
    made.or_else(|error| dir.open_at(NAME, Access::Write)?.ok_or(error))
}

fn failed(errno: rustix::io::Errno) -> Error {
    Error::Io {
        path: NAME.into(),
        source: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correction_leaves_counted_what_nobody_can_find() {
        const CAPACITY: u64 = 64 << 20;
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        let [mine, others] = [0, 1].map(|_| Arc::new(Usage::open(&dir, CAPACITY).unwrap()));
        mine.found(CAPACITY, 0, 1).unwrap();
        assert!(mine.take(1 << 20).unwrap() && others.take(1 << 20).unwrap());
        others.settle(1 << 20);
        // All that was promised to one that has died is lost; of the others' is nothing found.
        let died = Usage::open(&dir, CAPACITY).unwrap();
        assert!(died.take(16 << 20).unwrap());
        let counted = mine.used().unwrap();
        mine.found(counted, mine.unseen() + (1 << 20), 2).unwrap();
        let real = (2 << 20) + 2 * mine.grant;
        let used = mine.used().unwrap();
        assert!(
            used >= real && used < real + (2 << 20),
            "{used}, and {real} are in use"
        );
        // Of a directory that is gone nothing goes into the count of the next one.
        let before = mine.epoch();
        mine.open_again(&dir).unwrap();
        mine.give_back(8 << 20, before);
        assert_eq!((mine.used().unwrap(), mine.unseen()), (used, 0));
    }

    #[test]
    fn what_many_files_give_back_is_counted_a_grant_at_a_time() {
        const CAPACITY: u64 = 64 << 20;
        const BLOCK: u64 = 4096;
        const BLOCKS: u64 = 200;
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        let [mine, others] = [0, 1].map(|_| Usage::open(&dir, CAPACITY).unwrap());
        mine.found(CAPACITY, 0, 1).unwrap();
        for _ in 0..BLOCKS {
            assert!(mine.take(BLOCK).unwrap());
            mine.settle(BLOCK);
        }
        let (mut used, mut changes) = (others.used().unwrap(), 0);
        for _ in 0..BLOCKS {
            mine.give_back(BLOCK, mine.epoch());
            let now = others.used().unwrap();
            changes += u64::from(now != used);
            used = now;
        }
        assert!(changes <= BLOCKS * BLOCK / mine.grant + 1, "{changes}");
        assert!(used <= 2 * mine.grant && used == mine.unseen(), "{used}");
        mine.close();
        assert_eq!(others.used().unwrap(), 0);
    }

    #[test]
    fn what_is_granted_is_taken_while_the_count_cannot_be_read() {
        const CAPACITY: u64 = 64 << 20;
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        let usage = Usage::open(&dir, CAPACITY).unwrap();
        usage.found(CAPACITY, 0, 1).unwrap();
        assert_eq!(usage.take_spare(1).unwrap(), Some(true));
        let other = LockFd::open(|| file_of(&dir)).unwrap();
        let taken = lock::try_lock(other.fd().unwrap(), COUNT_BYTE, Kind::Exclusive);
        assert!(taken.unwrap());
        assert_eq!(usage.take_spare(usage.grant / 2).unwrap(), Some(true));
    }

    #[test]
    fn all_who_take_at_once_get_no_more_than_there_is_and_nearly_all_of_it() {
        const CAPACITY: u64 = 8 << 20;
        const BLOCK: u64 = 5000;
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        // As two processes have it, each with threads.
        let sharers = [0, 1].map(|_| Usage::open(&dir, CAPACITY).unwrap());
        assert!(
            !sharers[0].take(BLOCK).unwrap(),
            "full until it was looked at"
        );
        sharers[0].found(CAPACITY, 0, 1).unwrap();
        let fill = |usage: &Usage| {
            let mut taken = 0;
            while usage.take(BLOCK).unwrap() {
                taken += BLOCK;
            }
            taken
        };
        let all = || -> u64 {
            std::thread::scope(|scope| {
                let each = [0, 1, 0, 1].map(|at: usize| {
                    let usage = &sharers[at];
                    scope.spawn(move || fill(usage))
                });
                each.into_iter().map(|one| one.join().unwrap()).sum()
            })
        };
        let taken = all();
        let nearly_all = CAPACITY * 99 / 100..=CAPACITY;
        assert!(nearly_all.contains(&taken), "{taken}");
        sharers[0].freed(taken / 2).unwrap();
        let again = all();
        assert!(taken / 2 + again <= CAPACITY && again > 0, "{again}");
        sharers.iter().for_each(Usage::close);
        let counted = sharers[0].used().unwrap();
        assert_eq!(counted, taken - taken / 2 + again, "grants go back");
    }
}
