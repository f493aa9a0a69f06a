//! What peers may do with memory of this process: names, what each grants, and for how long.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_host::Condvar;
use kvdepot_media::Buffer;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::error::Error;
use crate::socket::Ranges;
use crate::wire::{NAME_MAX, Row, Status};

/// Rights of a grant.
///
/// # Examples
/// ```
/// use std::sync::Arc;
///
/// use kvdepot_media::Buffer;
/// use kvdepot_transfer::{Config, Engine, Rights};
///
/// let engine = Arc::new(Engine::start(Config::default())?);
/// let pages = [Buffer::from_vec(vec![0; 4096]), Buffer::from_vec(vec![0; 8192])];
/// let published = engine.publish(b"pages", &pages, Rights::READ, None)?;
/// assert_eq!(published.name(), b"pages");
/// drop(published); // from now on peers cannot access the memory
/// # Ok::<_, kvdepot_transfer::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "there are two")]
pub struct Rights {
    /// True if peers may read.
    pub read: bool,
    /// True if peers may write.
    pub write: bool,
}

impl Rights {
    /// Right to read.
    pub const READ: Rights = Rights {
        read: true,
        write: false,
    };
    /// Right to write.
    pub const WRITE: Rights = Rights {
        read: false,
        write: true,
    };
    /// Rights to read and to write.
    pub const BOTH: Rights = Rights {
        read: true,
        write: true,
    };

    pub(crate) fn bits(self) -> u32 {
        u32::from(self.read) | u32::from(self.write) << 1
    }

    pub(crate) fn of(bits: u32) -> Rights {
        Rights {
            read: bits & 1 != 0,
            write: bits & 2 != 0,
        }
    }
}

/// Memory that peers may use under a name, until it is withdrawn or its time is over.
#[derive(Debug)]
pub(crate) struct Grant {
    /// None once it is withdrawn.
    buffers: RwLock<Vec<Buffer>>,
    /// Where each begins in the grant, and where the last ends.
    starts: Vec<u64>,
    pub(crate) rights: Rights,
    pub(crate) until: Option<Instant>,
    withdrawn: AtomicBool,
    /// Frames that move its bytes.
    users: Mutex<usize>,
    unused: Condvar,
}

impl Grant {
    fn new(buffers: &[Buffer], rights: Rights, until: Option<Instant>) -> Grant {
        let mut starts = vec![0];
        let mut end = 0;
        for buffer in buffers {
            end += buffer.len() as u64;
            starts.push(end);
        }
        Grant {
            buffers: RwLock::new(buffers.to_vec()),
            starts,
            rights,
            until,
            withdrawn: AtomicBool::new(false),
            users: Mutex::new(0),
            unused: Condvar::new(),
        }
    }

    /// A grant of memory that may be granted so.
    pub(crate) fn checked(
        buffers: &[Buffer],
        rights: Rights,
        lasts: Option<Duration>,
    ) -> Result<Arc<Grant>, Error> {
        if buffers.is_empty() || buffers.iter().any(|one| one.is_empty() || !one.is_memory()) {
            let allowed = "one or more buffers in host memory, each of at least one byte";
            return Err(Error::input(
                "buffers",
                format!("{} buffers", buffers.len()),
                allowed,
            ));
        }
        if rights.write && buffers.iter().any(|buffer| !buffer.is_writable()) {
            return Err(Error::input(
                "rights",
                "write",
                "read only, because the memory is read-only",
            ));
        }
        // A time beyond the clock's range never comes.
        let until = lasts.and_then(|lasts| Instant::now().checked_add(lasts));
        Ok(Arc::new(Grant::new(buffers, rights, until)))
    }

    /// Its memory, in its order.
    pub(crate) fn buffers(&self) -> RwLockReadGuard<'_, Vec<Buffer>> {
        self.buffers.read()
    }

    /// How many bytes it has.
    pub(crate) fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Whether it holds.
    pub(crate) fn holds(&self) -> bool {
        let over = self.until.is_some_and(|until| Instant::now() >= until);
        !over && !self.withdrawn.load(Ordering::Acquire)
    }

    /// Nobody begins to use it any more. `end_users` ends what does; when this returns nothing
    /// does.
    pub(crate) fn withdraw(&self, end_users: impl FnOnce()) {
        self.withdrawn.store(true, Ordering::Release);
        if *self.users.lock() > 0 {
            end_users();
        }
        let mut users = self.users.lock();
        while *users > 0 {
            self.unused.wait(&mut users);
        }
        drop(users);
        self.buffers.write().clear();
    }

    /// True if the last use ends within `limit`.
    pub(crate) fn is_unused_within(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut users = self.users.lock();
        while *users > 0 && !self.unused.wait_until(&mut users, until).timed_out() {}
        *users == 0
    }

    /// Whether a frame may read or write a range.
    pub(crate) fn check(&self, row: &Row, writes: bool) -> Result<(), Status> {
        let allowed = if writes {
            self.rights.write
        } else {
            self.rights.read
        };
        if !allowed {
            return Err(Status::Rights);
        }
        let end = row.offset.get().checked_add(u64::from(row.len.get()));
        match end {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(Status::Range),
        }
    }

    /// Adds the memory of a range that was checked.
    ///
    /// # Safety
    ///
    /// The ranges go before the [`Use`] of this grant that is held meanwhile.
    pub(crate) unsafe fn add_to(&self, row: &Row, ranges: &mut Ranges) {
        let (mut offset, mut left) = (row.offset.get(), u64::from(row.len.get()));
        let buffers = self.buffers.read();
        let mut number = self.starts.partition_point(|start| *start <= offset) - 1;
        while left > 0 {
            let buffer = &buffers[number];
            let inside = offset - self.starts[number];
            let take = left.min(buffer.len() as u64 - inside);
            // SAFETY: `take` bytes from `inside` on lie in the buffer, which this grant keeps; the
            // use of the grant keeps that.
            unsafe { ranges.push(buffer.addr() + inside as usize, take as usize) };
            (offset, left, number) = (offset + take, left - take, number + 1);
        }
    }
}

/// A frame that moves bytes of a grant. While it lives the grant is not withdrawn.
pub(crate) struct Use(Arc<Grant>);

impl Use {
    /// Of a grant that holds.
    pub(crate) fn begin(grant: &Arc<Grant>) -> Option<Use> {
        let mut users = grant.users.lock();
        // Under the lock: who withdraws has not counted yet, or has said so.
        if !grant.holds() {
            return None;
        }
        *users += 1;
        drop(users);
        Some(Use(Arc::clone(grant)))
    }

    /// Whether it is wanted back. Who has put a use where those that withdraw look for it asks this
    /// behind that: they have looked before, or they find it.
    pub(crate) fn is_wanted_back(&self) -> bool {
        self.0.withdrawn.load(Ordering::Acquire)
    }

    /// Whose it is.
    pub(crate) fn is_of(&self, grant: &Arc<Grant>) -> bool {
        Arc::ptr_eq(&self.0, grant)
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut users = self.0.users.lock();
        *users -= 1;
        if *users == 0 {
            self.0.unused.notify_all();
        }
    }
}

/// All names of an engine.
#[derive(Debug, Default)]
pub(crate) struct Names {
    all: Mutex<HashMap<Vec<u8>, Arc<Grant>>>,
}

impl Names {
    /// Grants memory under a name that nobody has.
    pub(crate) fn publish(
        &self,
        name: &[u8],
        buffers: &[Buffer],
        rights: Rights,
        lasts: Option<Duration>,
    ) -> Result<Arc<Grant>, Error> {
        let shown = || String::from_utf8_lossy(name).into_owned();
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(Error::input("name", shown(), "1 to 1024 bytes"));
        }
        let grant = Grant::checked(buffers, rights, lasts)?;
        let mut all = self.all.lock();
        if all.get(name).is_some_and(|other| other.holds()) {
            return Err(Error::input(
                "name",
                shown(),
                "a name that is not published yet",
            ));
        }
        all.insert(name.to_vec(), Arc::clone(&grant));
        Ok(grant)
    }

    /// What is granted under a name.
    pub(crate) fn find(&self, name: &[u8]) -> Option<Arc<Grant>> {
        let all = self.all.lock();
        all.get(name).filter(|grant| grant.holds()).cloned()
    }

    /// Withdraws a grant: nobody begins to use it any more. `end_users` ends what does; when this
    /// returns nothing does.
    pub(crate) fn withdraw(&self, name: &[u8], grant: &Arc<Grant>, end_users: impl FnOnce()) {
        let mut all = self.all.lock();
        if all.get(name).is_some_and(|other| Arc::ptr_eq(other, grant)) {
            all.remove(name);
        }
        drop(all);
        grant.withdraw(end_users);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_unused_as_soon_as_the_last_use_has_ended() {
        let buffer = Buffer::from_vec(vec![1; 64]);
        let grant = Grant::checked(std::slice::from_ref(&buffer), Rights::READ, None).unwrap();
        let used = Use::begin(&grant);
        assert!(!grant.is_unused_within(Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| drop(used));
            assert!(grant.is_unused_within(Duration::from_secs(60)));
        });
        assert!(grant.is_unused_within(Duration::ZERO));
    }
}
