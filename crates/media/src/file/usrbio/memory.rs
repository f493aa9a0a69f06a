//! Memory that 3FS knows: slabs as a whole, and some of its own for what lies elsewhere.
//!
//! A slab that can have a name gets one, so that the daemon can map it: a link in the mount's
//! `3fs-virt/iovs` leads there, and stays as long as the memory is used. All of this asks the
//! daemon, which may hang, so it is done by the thread that needs it first.

use super::api::{Api, Ended, Iov as Raw};
use crate::carrier::SlabMemory;
use crate::shm::{self, Shm};
use crate::tried::Tried;
use kvdepot_host::fork::Origin;
use std::cell::UnsafeCell;
use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

/// One piece of memory that is the library's own: what is copied at once.
pub(super) const SLOT: usize = 1 << 20;

/// Where a 3FS is mounted, and what it knows of this process's memory.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) api: Arc<Api>,
    pub(super) mount: PathBuf,
    origin: Origin,
    known: Mutex<Vec<Arc<Known>>>,
    own: Tried<Arc<Own>, i32>,
}

/// A slab, and what 3FS knows it by.
#[derive(Debug)]
pub(super) struct Known {
    at: usize,
    len: usize,
    shm: Arc<Shm>,
    iov: Tried<Arc<Iov>, ()>,
}

/// Memory by which the library knows it; it is forgotten when this is dropped.
pub(super) struct Iov {
    api: Arc<Api>,
    raw: Box<UnsafeCell<Raw>>,
    /// What names a slab to the daemon; none of the library's own memory.
    link: Option<PathBuf>,
    origin: Origin,
}

// SAFETY: the library only reads it from when it was made until it is dropped.
unsafe impl Send for Iov {}
// SAFETY: as above.
unsafe impl Sync for Iov {}

/// Memory of the library's own, in slots.
#[derive(Debug)]
pub(super) struct Own {
    iov: Arc<Iov>,
    free: Mutex<Vec<usize>>,
}

/// A slot that nobody else uses. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct Slot {
    own: Arc<Own>,
    number: usize,
}

impl Memory {
    pub(super) fn new(api: Arc<Api>, mount: PathBuf, origin: Origin) -> Self {
        Self {
            api,
            mount,
            origin,
            known: Mutex::default(),
            own: Tried::new(),
        }
    }

    /// Notes a slab, which is told to 3FS when something first goes through it; whether it can be.
    pub(super) fn note(&self, memory: &SlabMemory) -> bool {
        let Some(shm) = memory.shm() else {
            return false;
        };
        let known = Known {
            at: memory.at(),
            len: memory.len(),
            shm: Arc::clone(shm),
            iov: Tried::new(),
        };
        lock(&self.known).push(Arc::new(known));
        true
    }

    /// No longer knows the slab at an address, which is all of it that is left.
    pub(super) fn forget(&self, at: usize) -> Option<Arc<Known>> {
        let mut known = lock(&self.known);
        let number = known.iter().position(|known| known.at == at)?;
        Some(known.swap_remove(number))
    }

    fn slab(&self, at: usize, len: usize) -> Option<Arc<Known>> {
        let known = lock(&self.known);
        let has = |known: &&Arc<Known>| known.at <= at && at + len <= known.at + known.len;
        known.iter().find(has).cloned()
    }

    /// What 3FS knows memory by, if that need not be asked.
    pub(super) fn iov_at_once(&self, at: usize, len: usize) -> Option<Arc<Iov>> {
        self.slab(at, len)?.iov.get().cloned()
    }

    /// What 3FS knows memory by; it is told now, unless it has been, or has refused just before.
    pub(super) fn iov(&self, at: usize, len: usize) -> Option<Arc<Iov>> {
        let known = self.slab(at, len)?;
        let wrap = || Iov::wrap(self, &known).map(Arc::new).map_err(drop);
        known.iov.get_or_make(wrap).ok().cloned()
    }

    /// A slot of the library's own memory, of which there are `count`; or an error number.
    pub(super) fn slot(&self, count: usize) -> Ended<Slot> {
        let create = || Own::create(self, count).map(Arc::new);
        let own = self.own.get_or_make(create)?;
        let number = lock(&own.free).pop();
        // All of them are with what has not completed in time.
        let number = number.ok_or(libc::ETIMEDOUT)?;
        Ok(Slot {
            own: Arc::clone(own),
            number,
        })
    }
}

impl Iov {
    fn wrap(memory: &Memory, slab: &Known) -> io::Result<Self> {
        let file = slab.shm.name().ok_or(io::ErrorKind::Unsupported)?;
        let ((name, id), mount) = (number()?, mount(&memory.mount)?);
        let links = memory.mount.join("3fs-virt/iovs");
        sweep(&links);
        let link = links.join(name);
        std::os::unix::fs::symlink(file, &link)?;
        let base = std::ptr::with_exposed_provenance_mut::<c_void>(slab.at);
        let mut iov = Self {
            api: Arc::clone(&memory.api),
            raw: Box::new(UnsafeCell::new(Raw::EMPTY)),
            link: Some(link),
            origin: memory.origin,
        };
        let (raw, id) = (iov.raw.get_mut(), id.as_ptr());
        // SAFETY: `raw` is writable, `mount` a string and `id` 16 bytes; the memory is mapped for
        // as long as the slab is registered, and nothing goes through it afterwards.
        let wrapped =
            unsafe { (memory.api.iovwrap)(raw, base, id, mount.as_ptr(), slab.len, 0, -1) };
        // On an error the link goes with it.
        answer(wrapped).map(|()| iov)
    }

    /// What the library's functions take.
    pub(super) fn raw(&self) -> *const Raw {
        self.raw.get()
    }
}

impl Drop for Iov {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        match &self.link {
            // Of an error nobody could make anything: the daemon forgets it with this process.
            Some(link) => drop(std::fs::remove_file(link)),
            // SAFETY: the library made it, and nothing goes through it any more.
            None => unsafe { (self.api.iovdestroy)(self.raw.get()) },
        }
    }
}

impl Own {
    fn create(memory: &Memory, count: usize) -> Ended<Self> {
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        let mount = mount(&memory.mount).map_err(errno)?;
        let mut raw = Box::new(UnsafeCell::new(Raw::EMPTY));
        // SAFETY: `raw` is writable, and `mount` a string.
        let created =
            unsafe { (memory.api.iovcreate)(raw.get_mut(), mount.as_ptr(), count * SLOT, 0, -1) };
        answer(created).map_err(errno)?;
        // Its name would outlive a process that is killed; the daemon has the memory.
        // SAFETY: the library just made it.
        unsafe { (memory.api.iovunlink)(raw.get_mut()) };
        let iov = Iov {
            api: Arc::clone(&memory.api),
            raw,
            link: None,
            origin: memory.origin,
        };
        Ok(Self {
            iov: Arc::new(iov),
            free: Mutex::new((0..count).collect()),
        })
    }
}

impl Slot {
    pub(super) fn iov(&self) -> Arc<Iov> {
        Arc::clone(&self.own.iov)
    }

    /// Its first byte, of [`SLOT`].
    pub(super) fn memory(&self) -> *mut u8 {
        // SAFETY: nobody changes it any more.
        let base = unsafe { (*self.own.iov.raw()).base() };
        std::ptr::with_exposed_provenance_mut(base + self.number * SLOT)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.own.free).push(self.number);
    }
}

impl fmt::Debug for Iov {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iov")
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

/// Takes away the links of those who were killed, which lead nowhere since their slabs' names went.
/// As long the daemon has their memory: of a process that is gone it forgets only what was linked
/// by the thread that had opened the folder, which the library's calls do.
fn sweep(links: &Path) {
    for link in std::fs::read_dir(links).into_iter().flatten().flatten() {
        let file = std::fs::read_link(link.path());
        if file.is_ok_and(|file| shm::is_gone(&file)) {
            // Somebody else may have done so.
            drop(std::fs::remove_file(link.path()));
        }
    }
}

/// What the library said, which says errors below zero.
pub(super) fn answer(answered: i32) -> io::Result<()> {
    match answered {
        errno @ ..0 => Err(io::Error::from_raw_os_error(-errno)),
        _ => Ok(()),
    }
}

pub(super) fn mount(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// A new name, and the number that it stands for.
fn number() -> io::Result<(String, [u8; 16])> {
    let name = shm::uuid()?;
    let number = u128::from_str_radix(&name.replace('-', ""), 16).map_err(io::Error::other)?;
    // They stand in the name in their order.
    let mut id = [0; 16];
    for (at, byte) in id.iter_mut().rev().enumerate() {
        *byte = (number >> (8 * at)) as u8;
    }
    Ok((name, id))
}

/// No code that runs under these locks can panic half way, so poison means nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
