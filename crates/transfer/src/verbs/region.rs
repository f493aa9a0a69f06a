//! Memory that a device knows.

use super::abi::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, Mr, Sge};
use super::device::Device;
use super::error::{Error, Result};
use kvdepot_media::Buffer;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// What a peer may do with all of a region, once it knows its key, until the region is dropped. On
/// this side it is read, and written where its buffer may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights {
    /// It may read.
    pub(crate) remote_read: bool,
    /// It may write.
    pub(crate) remote_write: bool,
}

/// A buffer whose memory a device may touch until this is dropped.
#[derive(Debug)]
pub(crate) struct Region {
    device: Arc<Device>,
    mr: NonNull<Mr>,
    keys: Keys,
    /// Dropped once the library has taken the registration back.
    buffer: ManuallyDrop<Buffer>,
}

#[derive(Clone, Copy, Debug)]
struct Keys {
    local: u32,
    remote: u32,
}

// SAFETY: any thread may take the registration back; nothing else is done with it.
unsafe impl Send for Region {}
// SAFETY: as above; the keys are copies.
unsafe impl Sync for Region {}

impl Region {
    /// Registers memory of this process: it is locked in memory, and its owner kept alive, until
    /// this is dropped.
    ///
    /// What a device writes there it writes as the lanes of `media` do, and on the terms of
    /// [`Buffer::from_raw`]: nobody has a Rust reference to it. Before Linux 5.12 a process that
    /// forks must not register memory that its children inherit; what `media` maps they never do.
    ///
    /// # Errors
    ///
    /// [`Error::Elsewhere`] for what is not memory of this process, [`Error::ReadOnly`] where the
    /// peer could write what this process may not, [`Error::Invalid`] for no bytes;
    /// [`Error::Bounce`], [`Error::NoMemory`], [`Error::Os`], [`Error::Forked`].
    pub(crate) fn register(
        device: &Arc<Device>,
        buffer: Buffer,
        rights: Rights,
    ) -> Result<Arc<Self>> {
        device.check_here()?;
        if !buffer.is_memory() {
            return Err(Error::Elsewhere {
                addr: buffer.addr(),
            });
        }
        if rights.remote_write && !buffer.is_writable() {
            return Err(Error::ReadOnly {
                addr: buffer.addr(),
            });
        }
        if buffer.is_empty() {
            return Err(Error::invalid("length of a region", 0, "1 or more"));
        }
        let flags = [
            (buffer.is_writable(), ACCESS_LOCAL_WRITE),
            (rights.remote_read, ACCESS_REMOTE_READ),
            (rights.remote_write, ACCESS_REMOTE_WRITE),
        ];
        let access = flags.iter().filter(|(is_on, _)| *is_on);
        let access = access.fold(0, |sum, (_, flag)| sum | flag);
        let at = std::ptr::with_exposed_provenance_mut(buffer.addr());
        // SAFETY: the buffer was just found to be memory of this process, which its owner keeps
        // mapped for as long as this region has the buffer, and writable where it says so.
        let mr = unsafe { (device.functions().ibv_reg_mr)(device.pd(), at, buffer.len(), access) };
        let mr = NonNull::new(mr).ok_or_else(|| refused(device, &buffer))?;
        // SAFETY: the library made it, and `ibv_dereg_mr` alone, in the drop, ends it.
        let made = unsafe { mr.as_ref() };
        let keys = Keys {
            local: made.lkey,
            remote: made.rkey,
        };
        Ok(Arc::new(Self {
            device: Arc::clone(device),
            mr,
            keys,
            buffer: ManuallyDrop::new(buffer),
        }))
    }

    /// Its memory.
    pub(crate) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The key that a peer needs, with addresses of this process.
    pub(crate) fn rkey(&self) -> u32 {
        self.keys.remote
    }

    /// The address of its first byte, as a peer says it.
    pub(crate) fn addr(&self) -> u64 {
        self.buffer.addr() as u64
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A part of it, for a slice to be read from or written to.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]; [`Error::Invalid`] for no bytes, which to some devices mean 2 GiB,
    /// and for more than a work request can say.
    pub(crate) fn piece(self: &Arc<Self>, offset: usize, len: usize) -> Result<Piece> {
        let end = self.buffer.len();
        if offset.checked_add(len).is_none_or(|last| last > end) {
            return Err(Error::OutOfBounds { offset, len, end });
        }
        let length = u32::try_from(len).ok().filter(|len| *len > 0);
        let length = length.ok_or_else(|| {
            let allowed = format!("1 to {}", u32::MAX);
            Error::invalid("length of a piece", len as u64, allowed)
        })?;
        Ok(Piece {
            region: Arc::clone(self),
            sge: Sge {
                addr: (self.buffer.addr() + offset) as u64,
                length,
                lkey: self.keys.local,
            },
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // A child shares its parent's descriptor: what it takes back is its parent's.
        if self.device.is_here() {
            // SAFETY: the library made it, and this is the only place that ends it.
            let answer = unsafe { (self.device.functions().ibv_dereg_mr)(self.mr.as_ptr()) };
            let (device, len) = (self.device.name(), self.buffer.len());
            if let Err(error) = Error::check("deregister memory from", device, answer) {
                tracing::error!(
                    len,
                    "{error}; the memory stays allocated until the process exits"
                );
                return;
            }
        }
        // SAFETY: it is dropped here alone, and the device does not know it any more; a forked
        // child has memory of its own, or none.
        unsafe { ManuallyDrop::drop(&mut self.buffer) };
    }
}

/// The error of a registration that has just failed.
fn refused(device: &Device, buffer: &Buffer) -> Error {
    let source = io::Error::last_os_error();
    let (addr, len) = (buffer.addr(), buffer.len());
    let name = device.name().to_owned();
    match source.raw_os_error() {
        Some(libc::EOPNOTSUPP) => Error::Bounce {
            device: name,
            addr,
            len,
        },
        Some(libc::ENOMEM) => Error::NoMemory {
            device: name,
            addr,
            len,
            limit: getrlimit(Resource::Memlock)
                .current
                .map_or_else(|| "none".to_owned(), |bytes| bytes.to_string()),
        },
        _ => Error::Os {
            operation: "register memory with",
            subject: name,
            source,
        },
    }
}

/// A part of a region, which it keeps.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(super) region: Arc<Region>,
    pub(super) sge: Sge,
}

impl Piece {
    /// How many bytes it has.
    pub(crate) fn len(&self) -> u32 {
        self.sge.length
    }
}
