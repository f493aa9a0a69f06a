//! Devices: which there are, and one that is open.

use super::abi::{Context, DeviceAttr, Functions, Listed, Pd};
use super::error::{Error, Result};
use super::library;
use kvdepot_host::fork::Origin;
use std::ffi::{CStr, c_int};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// The names of the RDMA devices of this machine.
///
/// # Errors
///
/// [`Error::Library`] where libibverbs is not installed, [`Error::Os`].
pub(crate) fn devices() -> Result<Vec<String>> {
    let functions = library::load()?;
    Ok(List::of(&functions)?.names())
}

/// An open device, and the protection domain in which everything of it is made.
#[derive(Debug)]
pub(crate) struct Device {
    functions: Arc<Functions>,
    context: NonNull<Context>,
    pd: NonNull<Pd>,
    name: String,
    limits: Limits,
    origin: Origin,
}

/// What a device can do, of what matters here.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Work requests of a send queue.
    pub(super) depth_max: u32,
    /// Pieces of a work request.
    pub(super) pieces_max: u32,
    /// READs that a queue pair serves at once, and has under way.
    pub(super) serves_max: u8,
    pub(super) reads_max: u8,
    /// Its ports have the numbers from 1 on.
    pub(super) ports: u8,
}

// SAFETY: the library lets any thread use what it made, several at once too.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device by its name, such as `mlx5_0`.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`], which names those that are there; [`Error::Library`] where libibverbs
    /// is not installed; [`Error::Os`].
    pub(crate) fn open(name: &str) -> Result<Arc<Self>> {
        Self::open_by(library::load()?, name)
    }

    pub(super) fn open_by(functions: Arc<Functions>, name: &str) -> Result<Arc<Self>> {
        let origin = Origin::here().map_err(|error| Error::Os {
            operation: "open RDMA device",
            subject: name.to_owned(),
            source: io::Error::other(error),
        })?;
        let list = List::of(&functions)?;
        let Some(listed) = list.find(name) else {
            return Err(Error::NoDevice {
                name: name.to_owned(),
                found: list.names(),
            });
        };
        // SAFETY: the device is one of the list, which has not been freed.
        let context = unsafe { (functions.ibv_open_device)(listed.as_ptr()) };
        let context = NonNull::new(context);
        let context = context.ok_or_else(|| Error::last("open RDMA device", name))?;
        drop(list); // The library keeps what it has opened.
        // SAFETY: the context was just opened.
        let pd = unsafe { (functions.ibv_alloc_pd)(context.as_ptr()) };
        let Some(pd) = NonNull::new(pd) else {
            let error = Error::last("create a protection domain on", name);
            // SAFETY: nothing was made in the context.
            unsafe { (functions.ibv_close_device)(context.as_ptr()) };
            return Err(error);
        };
        let mut device = Self {
            functions,
            context,
            pd,
            name: name.to_owned(),
            limits: Limits::of(&DeviceAttr::default()),
            origin,
        };
        device.limits = Limits::of(&device.attributes()?);
        Ok(Arc::new(device))
    }

    fn attributes(&self) -> Result<DeviceAttr> {
        let mut attributes = DeviceAttr::default();
        // SAFETY: the context is open, and the attributes are writable.
        let answer = unsafe {
            (self.functions.ibv_query_device)(self.context.as_ptr(), &raw mut attributes)
        };
        Error::check("query the limits of", &self.name, answer)?;
        Ok(attributes)
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The open context, for as long as this lives.
    pub(super) fn context(&self) -> *mut Context {
        self.context.as_ptr()
    }

    /// Its protection domain, for as long as this lives.
    pub(super) fn pd(&self) -> *mut Pd {
        self.pd.as_ptr()
    }

    /// Whether this process opened it, and not one that it was forked from.
    pub(super) fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// Refuses in a forked child.
    pub(super) fn check_here(&self) -> Result<()> {
        match self.is_here() {
            true => Ok(()),
            false => Err(Error::Forked {
                device: self.name.clone(),
            }),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A child shares its parent's descriptor: what it takes back is its parent's.
        if !self.is_here() {
            return;
        }
        // SAFETY: what was made in the domain holds an `Arc` of this device, so all of it is gone,
        // or was kept by the library on an error; then the domain is refused and stays.
        unsafe { (self.functions.ibv_dealloc_pd)(self.pd.as_ptr()) };
        // SAFETY: as above; nothing uses the context any more.
        unsafe { (self.functions.ibv_close_device)(self.context.as_ptr()) };
    }
}

impl Limits {
    fn of(attributes: &DeviceAttr) -> Self {
        let count = |number: c_int| u32::try_from(number).unwrap_or(0);
        let small = |number: c_int| u8::try_from(number.clamp(0, 255)).unwrap_or(u8::MAX);
        Self {
            // Each request may complete by itself.
            depth_max: count(attributes.max_qp_wr.min(attributes.max_cqe)),
            // Of READs some devices take fewer, and say nothing where they do not.
            pieces_max: match count(attributes.max_sge_rd) {
                0 => count(attributes.max_sge),
                reads => count(attributes.max_sge).min(reads),
            },
            serves_max: small(attributes.max_qp_rd_atom),
            reads_max: small(attributes.max_qp_init_rd_atom),
            ports: attributes.phys_port_cnt,
        }
    }
}

/// What the library lists, until it is dropped.
struct List<'a> {
    functions: &'a Functions,
    /// None where the system knows no RDMA.
    at: Option<NonNull<*mut Listed>>,
    count: usize,
}

impl<'a> List<'a> {
    fn of(functions: &'a Functions) -> Result<Self> {
        let mut count: c_int = 0;
        // SAFETY: `count` is writable.
        let at = NonNull::new(unsafe { (functions.ibv_get_device_list)(&raw mut count) });
        if at.is_none() {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::ENOSYS) {
                return Err(Error::Os {
                    operation: "list",
                    subject: "RDMA devices".to_owned(),
                    source: error,
                });
            }
        }
        Ok(Self {
            functions,
            at,
            count: usize::try_from(count).unwrap_or(0),
        })
    }

    fn devices(&self) -> impl Iterator<Item = (NonNull<Listed>, String)> {
        let devices = match self.at {
            // SAFETY: the library made an array of as many, which is freed by the drop.
            Some(at) => unsafe { std::slice::from_raw_parts(at.as_ptr(), self.count) },
            None => &[],
        };
        devices.iter().filter_map(|device| {
            let device = NonNull::new(*device)?;
            // SAFETY: the device is one of the list.
            let name = unsafe { (self.functions.ibv_get_device_name)(device.as_ptr()) };
            if name.is_null() {
                return None;
            }
            // SAFETY: the library gave a string that lives as long as the device.
            let name = unsafe { CStr::from_ptr(name) };
            Some((device, name.to_string_lossy().into_owned()))
        })
    }

    fn names(&self) -> Vec<String> {
        self.devices().map(|(_, name)| name).collect()
    }

    fn find(&self, name: &str) -> Option<NonNull<Listed>> {
        let mut devices = self.devices();
        devices.find_map(|(device, other)| (other == name).then_some(device))
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            // SAFETY: the library made it, and nothing of it is used any more.
            unsafe { (self.functions.ibv_free_device_list)(at.as_ptr()) };
        }
    }
}
