//! A file or block device that is read and written by calls and has no address here. The calls
//! bypass the page cache where the file system lets them (`O_DIRECT`), so they are of whole pages:
//! a record is written with the others of its page, by whoever is at a [group](super::group).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_host::fork::LockFd;
use kvdepot_media::file::{Aligned, File, Hands, Losses, PAGE};
use kvdepot_media::{Buffer, Error, Kind, Opened, Result};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::group::{Done, Groups, Order};
use super::{Lock, Medium, Written};
use crate::held;

/// Most bytes of a call.
const CALL_MAX: usize = 1 << 20;

/// Payloads' reads and writes that are under way at a time where there is no ring: what keeps a
/// disk's queue filled. Each arena has hands of its own, so that no disk waits for a slower one, or
/// for one that hangs.
const THREADS: usize = 8;

/// A regular file, or a block device, without an address.
#[derive(Debug)]
pub(super) struct Direct {
    opened: Opened,
    /// A description of its own, or the one that it was handed, which a forked child does not have.
    fd: Arc<LockFd>,
    /// Of all values that the file has while it grows.
    common: Arc<Common>,
}

#[derive(Debug)]
struct Common {
    groups: Groups,
    written: Mutex<Pages>,
    lost: Arc<Lost>,
    payloads: Mutex<Payloads>,
}

/// Pages that were written lately, by their number: nobody else writes them, so that the next
/// record of one need not read it first.
type Pages = HashMap<u64, Box<[u8]>>;

/// Most of them, a megabyte.
const PAGES_MAX: usize = 256;

/// What the medium has failed under. The carrier has it too, which is let go with the medium.
#[derive(Debug)]
struct Lost {
    name: String,
    /// Where its lost pages begin.
    pages: Mutex<BTreeSet<u64>>,
    count: AtomicU64,
}

/// Who carries payloads. A ring's writes go on when their process is killed, and keep their
/// description until they have ended: so it has the writers' lock, for which the next owner waits.
#[derive(Debug, Default)]
struct Payloads {
    carrier: Option<Arc<File>>,
    /// Takes the lock, once this process may write.
    lock: Option<Lock>,
}

impl Common {
    fn new(name: String) -> Common {
        let lost = Lost {
            name,
            pages: Mutex::default(),
            count: AtomicU64::new(0),
        };
        Common {
            groups: Groups::default(),
            written: Mutex::default(),
            lost: Arc::new(lost),
            payloads: Mutex::default(),
        }
    }
}

impl Losses for Lost {
    fn lost(&self, at: u64, len: u64, error: &io::Error) {
        let page = PAGE as u64;
        for at in (at / page * page..at + len).step_by(PAGE) {
            if self.pages.lock().insert(at) {
                self.count.fetch_add(1, Ordering::Release);
                tracing::error!(path = self.name, at, %error,
                    "medium error: cannot read or write a page of the arena; its blocks are misses");
            }
        }
    }
}

impl Direct {
    pub(super) fn new(opened: Opened) -> Result<Direct> {
        let common = Common::new(opened.name());
        Direct::with(opened, Arc::new(common))
    }

    /// What another process has handed over: that description has the lock, or will have it, and
    /// all that is done here is done by it.
    pub(super) fn adopted(fd: LockFd, len: u64) -> Result<Direct> {
        let fd = Arc::new(fd);
        let opened = Opened::from_fd(Arc::clone(&fd), len)?;
        let common = Arc::new(Common::new(opened.name()));
        let direct = Direct::by(opened, Arc::clone(&fd), common)?;
        direct.common.payloads.lock().carrier = Some(direct.carry_by(fd)?);
        Ok(direct)
    }

    fn with(opened: Opened, common: Arc<Common>) -> Result<Direct> {
        let fail = |error| Error::Io {
            operation: "open",
            subject: opened.name(),
            source: io::Error::other(error),
        };
        let fd = opened.fd().and_then(|fd| LockFd::reopen(fd, false));
        let fd = Arc::new(fd.map_err(fail)?);
        Direct::by(opened, fd, common)
    }

    fn by(opened: Opened, fd: Arc<LockFd>, common: Arc<Common>) -> Result<Direct> {
        let fail = |source: io::Error| Error::Io {
            operation: "open",
            subject: opened.name(),
            source,
        };
        if !matches!(opened.kind(), Kind::File | Kind::Block) {
            let kind = "Nvme supports files and block devices only; use Dax for a DAX device";
            return Err(fail(io::Error::new(io::ErrorKind::Unsupported, kind)));
        }
        let io = fd.fd().map_err(|error| fail(io::Error::other(error)))?;
        // A file system that knows no direct I/O says so; its page cache serves as well.
        match rustix::fs::fcntl_getfl(io)
            .and_then(|flags| rustix::fs::fcntl_setfl(io, flags | OFlags::DIRECT))
        {
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(fail(errno.into())),
        }
        Ok(Direct { opened, fd, common })
    }

    fn fail(&self, operation: &'static str, source: impl Into<io::Error>) -> Error {
        let (subject, source) = (self.opened.name(), source.into());
        Error::Io {
            operation,
            subject,
            source,
        }
    }

    fn check(&self, at: u64, len: usize) -> Result<()> {
        let end = self.opened.len();
        let len = len as u64;
        match at.checked_add(len) {
            Some(last) if last <= end => Ok(()),
            _ => Err(Error::OutOfBounds {
                offset: at,
                len,
                end,
            }),
        }
    }

    /// Reads whole pages; what lies behind the end of the file is zeros.
    fn read(&self, at: u64, pages: &mut [u8]) -> io::Result<()> {
        held::may_wait();
        let mut done = 0;
        while done < pages.len() {
            let from = at + done as u64;
            let fd = self.fd.fd().map_err(io::Error::other)?;
            match rustix::io::pread(fd, &mut pages[done..], from) {
                Ok(read) if read > 0 && read.is_multiple_of(PAGE) => done += read,
                Ok(read) if from + read as u64 >= self.opened.len() => {
                    pages[done + read..].fill(0);
                    break;
                }
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Writes whole pages.
    fn write(&self, at: u64, pages: &[u8]) -> io::Result<()> {
        held::may_wait();
        let mut done = 0;
        while done < pages.len() {
            let fd = self.fd.fd().map_err(io::Error::other)?;
            match rustix::io::pwrite(fd, &pages[done..], at + done as u64) {
                Ok(written) if written > 0 && written.is_multiple_of(PAGE) => done += written,
                // Of a page that is not written whole nobody knows what is there.
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Reads pages, one by one where that fails, so that no more is lost than must be.
    fn read_pages(&self, at: u64, pages: &mut [u8]) -> io::Result<()> {
        if self.read(at, pages).is_ok() {
            return Ok(());
        }
        let mut first = Ok(());
        for (at, page) in (at..).step_by(PAGE).zip(pages.chunks_mut(PAGE)) {
            if let Err(error) = self.read(at, page) {
                self.common.lost.lost(at, PAGE as u64, &error);
                page.fill(0);
                first = first.and(Err(error));
            }
        }
        first
    }

    /// Writes pages, as [`Direct::read_pages`] reads them.
    fn write_pages(&self, at: u64, pages: &[u8]) -> io::Result<()> {
        self.forget(at, pages.len());
        if self.write(at, pages).is_ok() {
            return Ok(());
        }
        let mut first = Ok(());
        for (at, page) in (at..).step_by(PAGE).zip(pages.chunks(PAGE)) {
            if let Err(error) = self.write(at, page) {
                self.common.lost.lost(at, PAGE as u64, &error);
                first = first.and(Err(error));
            }
        }
        first
    }

    /// Has an order done with those that others give meanwhile.
    fn have(&self, order: Order) -> Done {
        self.common.groups.have(order, |group| self.work(group))
    }

    /// Does a group: each page that is touched is written once, with what else is there.
    fn work(&self, group: &[(u64, Order)]) -> Vec<Done> {
        let unwritten = |(_, order): &(u64, Order)| Done {
            written: vec![false; order.pieces.len()],
            synced: false,
        };
        let mut done: Vec<Done> = group.iter().map(unwritten).collect();
        let mut touched: BTreeMap<u64, Vec<(usize, usize)>> = BTreeMap::new();
        for (order, (_, Order { pieces, .. })) in group.iter().enumerate() {
            for (piece, (at, _)) in pieces.iter().enumerate() {
                let page = touched.entry(at / PAGE as u64).or_default();
                page.push((order, piece));
            }
        }
        let mut page = Aligned::new(PAGE);
        for (number, pieces) in touched {
            let begin = number * PAGE as u64;
            let written = self.page(number, &mut page).and_then(|()| {
                for (order, piece) in &pieces {
                    let (at, bytes) = &group[*order].1.pieces[*piece];
                    page[(at - begin) as usize..][..bytes.len()].copy_from_slice(bytes);
                }
                self.write_pages(begin, &page)?;
                self.keep(number, &page);
                Ok(())
            });
            for (order, piece) in pieces {
                done[order].written[piece] = written.is_ok();
            }
        }
        if group.iter().any(|(_, order)| order.durable) {
            let synced = self.fdatasync();
            done.iter_mut().for_each(|done| done.synced = synced);
        }
        done
    }

    /// A page as it is on the medium.
    fn page(&self, number: u64, page: &mut [u8]) -> io::Result<()> {
        if let Some(written) = self.common.written.lock().get(&number) {
            page.copy_from_slice(written);
            return Ok(());
        }
        self.read_pages(number * PAGE as u64, page)
    }

    fn keep(&self, number: u64, page: &[u8]) {
        let mut written = self.common.written.lock();
        if written.len() >= PAGES_MAX {
            written.clear();
        }
        written.insert(number, page.into());
    }

    /// What is written now is not known before it has been.
    fn forget(&self, at: u64, len: usize) {
        let mut written = self.common.written.lock();
        if !written.is_empty() {
            let pages = at / PAGE as u64..(at + len as u64).div_ceil(PAGE as u64);
            match pages.end - pages.start > PAGES_MAX as u64 {
                true => written.clear(),
                false => pages.for_each(|page| drop(written.remove(&page))),
            }
        }
    }

    fn fdatasync(&self) -> bool {
        let fd = self.fd.fd().map_err(io::Error::other);
        let synced = fd.and_then(|fd| Ok(rustix::fs::fdatasync(fd)?));
        if let Err(error) = &synced {
            tracing::error!(path = self.opened.name(), %error,
                "cannot sync the arena's file or device; blocks just written count as not stored");
        }
        synced.is_ok()
    }

    /// Who carries payloads from and to it.
    fn carrier(&self) -> Result<Arc<File>> {
        let mut payloads = self.common.payloads.lock();
        if let Some(file) = &payloads.carrier {
            return Ok(Arc::clone(file));
        }
        let fail = |error: kvdepot_host::Error| self.fail("open", io::Error::other(error));
        let fd = LockFd::reopen(self.fd.fd().map_err(fail)?, false).map_err(fail)?;
        let file = self.carry_by(Arc::new(fd))?;
        if let Some(lock) = payloads.lock {
            self.lock(&file, lock);
        }
        Ok(Arc::clone(payloads.carrier.insert(file)))
    }

    /// As it is with the file system that may have refused direct I/O before.
    fn carry_by(&self, fd: Arc<LockFd>) -> Result<Arc<File>> {
        let fail = |error: kvdepot_host::Error| self.fail("open", io::Error::other(error));
        let flags = rustix::fs::fcntl_getfl(self.fd.fd().map_err(fail)?);
        let flags = flags.map_err(|errno| self.fail("open", errno))?;
        let set = rustix::fs::fcntl_setfl(fd.fd().map_err(fail)?, flags);
        set.map_err(|errno| self.fail("open", errno))?;
        let losses = Arc::clone(&self.common.lost) as _;
        let hands = Hands::new(THREADS)?;
        let way = hands.way(flags.contains(OFlags::DIRECT));
        tracing::info!(path = self.opened.name(), way, "I/O engine selected");
        File::heard(fd, &hands, losses)
    }

    fn lock(&self, file: &File, lock: Lock) {
        if !file.fd().is_ok_and(lock) {
            tracing::error!(
                path = self.opened.name(),
                "cannot lock the arena as a writer; the next owner cannot detect this process"
            );
        }
    }
}

impl Medium for Direct {
    fn opened(&self) -> &Opened {
        &self.opened
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.check(at, out.len())?;
        let mut begin = at / PAGE as u64 * PAGE as u64;
        let end = (at + out.len() as u64).next_multiple_of(PAGE as u64);
        let mut pages = Aligned::new(((end - begin) as usize).min(CALL_MAX));
        let (mut out, mut skip) = (out, (at - begin) as usize);
        let mut first = Ok(());
        while !out.is_empty() {
            let len = ((end - begin) as usize).min(CALL_MAX);
            let read = self.read_pages(begin, &mut pages[..len]);
            first = first.and(read);
            let (now, later) = out.split_at_mut((len - skip).min(out.len()));
            now.copy_from_slice(&pages[skip..][..now.len()]);
            (out, skip, begin) = (later, 0, begin + len as u64);
        }
        first.map_err(|error| self.fail("read", error))
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.check(at, bytes.len())?;
        if at.is_multiple_of(PAGE as u64) && bytes.len().is_multiple_of(PAGE) {
            let mut first = Ok(());
            let mut pages = Aligned::new(bytes.len().min(CALL_MAX));
            for (at, bytes) in (at..).step_by(CALL_MAX).zip(bytes.chunks(CALL_MAX)) {
                pages[..bytes.len()].copy_from_slice(bytes);
                let written = self.write_pages(at, &pages[..bytes.len()]);
                first = first.and(written);
            }
            return first.map_err(|error| self.fail("write", error));
        }
        let (mut pieces, mut at, mut rest) = (Vec::new(), at, bytes);
        while !rest.is_empty() {
            let room = PAGE - (at % PAGE as u64) as usize;
            let (now, later) = rest.split_at(room.min(rest.len()));
            pieces.push((at, now.to_vec()));
            (at, rest) = (at + now.len() as u64, later);
        }
        let durable = false;
        let done = self.have(Order { pieces, durable });
        match done.written.iter().all(|written| *written) {
            true => Ok(()),
            // Which it was is in the log.
            false => Err(self.fail("write", Errno::IO)),
        }
    }

    fn sync(&self, ranges: &[(u64, u64)]) -> Vec<bool> {
        let (pieces, durable) = (Vec::new(), true);
        let done = self.have(Order { pieces, durable });
        vec![done.synced; ranges.len()]
    }

    fn commit(&self, records: &[Written], durable: bool) -> Vec<bool> {
        let piece = |(at, bytes): &Written| (*at, bytes.to_vec());
        let pieces = records.iter().map(piece).collect();
        let done = self.have(Order { pieces, durable });
        let kept = |written| written && (done.synced || !durable);
        done.written.into_iter().map(kept).collect()
    }

    fn is_lost(&self, at: u64, len: u64) -> bool {
        let pages = at / PAGE as u64 * PAGE as u64..at.saturating_add(len);
        let has_lost = || self.common.lost.pages.lock().range(pages).next().is_some();
        self.check(at, len as usize).is_err() || (self.losses() > 0 && has_lost())
    }

    fn lost(&self) -> Option<Vec<(u64, u64)>> {
        let lost = self.common.lost.pages.lock();
        Some(lost.iter().map(|at| (*at, PAGE as u64)).collect())
    }

    fn losses(&self) -> u64 {
        self.common.lost.count.load(Ordering::Acquire)
    }

    fn lock_writes(&self, lock: Lock) {
        let mut payloads = self.common.payloads.lock();
        payloads.lock = Some(lock);
        if let Some(file) = &payloads.carrier {
            self.lock(file, lock);
        }
    }

    fn unlock_writes(&self) {
        let mut payloads = self.common.payloads.lock();
        payloads.lock = None;
        // Who still reads or writes by it keeps it, with its lock.
        let carrier = payloads.carrier.take();
        drop(payloads);
        drop(carrier);
    }

    fn grown(&self, len: u64) -> Result<Arc<dyn Medium>> {
        let common = Arc::clone(&self.common);
        let grown = self
            .opened
            .grown(len, |opened| Direct::with(opened, common))?;
        Ok(Arc::new(grown))
    }

    fn buffer(&self, at: u64, len: u64) -> Result<Buffer> {
        self.check(at, len as usize)?;
        Ok(self.carrier()?.buffer(at as usize, len as usize))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kvdepot_media::checksum::{self, PartId};
    use kvdepot_media::{Copier, CopierConfig};

    use super::*;

    #[test]
    fn the_writers_lock_lives_as_long_as_what_may_write() {
        use kvdepot_host::lock::{self, Kind as Lock};
        const BYTE: u64 = 1;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        drop(Opened::create(&path, 1 << 20, Direct::new).unwrap());
        let open = || {
            let file = std::fs::File::options().read(true).write(true).open(&path);
            file.unwrap()
        };
        let other = open();
        let alone = || lock::try_lock(&other, BYTE, Lock::Exclusive).unwrap();
        // As a worker has it: locked by who has handed it over.
        let handed = LockFd::open(|| Ok(open().into())).unwrap();
        assert!(handed.try_lock(BYTE, Lock::Shared).unwrap());
        let medium = Direct::adopted(handed, 1 << 20).unwrap();
        let buffer = medium.buffer(0, 4096).unwrap();
        drop(medium);
        assert!(!alone(), "a batch may still write");
        drop(buffer);
        assert!(alone());
        lock::unlock(&other, BYTE).unwrap();
        // As an owner has it: from when it may write.
        let medium = Direct::new(Opened::open(&path, kvdepot_media::Access::ReadWrite).unwrap());
        let medium = medium.unwrap();
        let buffer = medium.buffer(0, 4096).unwrap();
        assert!(alone());
        lock::unlock(&other, BYTE).unwrap();
        medium.lock_writes(|fd| lock::try_lock(fd, BYTE, Lock::Shared).unwrap());
        assert!(!alone());
        medium.unlock_writes();
        assert!(!alone(), "a batch may still write");
        drop(buffer);
        assert!(alone());
    }

    #[test]
    fn a_payload_that_is_gone_does_not_verify_and_its_room_is_lost() {
        const LEN: u64 = 16 * PAGE as u64;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let medium = Opened::create(&path, LEN, Direct::new).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(LEN / 2).unwrap();
        let copier = Copier::new(CopierConfig::default()).unwrap();
        let id = PartId {
            namespace: [1; 16],
            key: [2; 32],
            part: 0,
            parts: 1,
        };
        let mut batch = copier.batch();
        let bytes = medium.buffer(LEN / 2 - PAGE as u64, 3 * PAGE as u64);
        let sum = checksum::of(&id, &[7; 3 * PAGE]);
        let bytes = [bytes.unwrap()];
        batch.hash_only(&id, &bytes, Some(sum), 0).unwrap();
        let (sender, ended) = mpsc::channel();
        let ticket = copier.submit(batch, move |done| {
            let (_, outcome) = done.part(0).unwrap();
            sender.send(outcome.map(|outcome| outcome.matches)).unwrap();
        });
        assert!(ticket.wait(None));
        assert_eq!(ended.recv().unwrap(), Ok(Some(false)));
        let page = PAGE as u64;
        let lost = [(LEN / 2, page), (LEN / 2 + page, page)];
        assert_eq!((medium.losses(), medium.lost()), (2, Some(lost.to_vec())));
        let is_lost = [1, 2, 7].map(|pages| medium.is_lost(LEN / 2 - page, pages * page));
        assert_eq!(is_lost, [false, true, true]);
    }
}
