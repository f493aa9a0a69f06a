//! The functions that are used of 3FS's library, as `hf3fs_usrbio.h` declares them.

use crate::error::{Error, Result};
use crate::library::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::{fmt, io};

/// What a call came to, or the system's error number.
pub(super) type Ended<T> = std::result::Result<T, i32>;

/// The bytes of a mount point, with the zero behind it.
pub(super) const MOUNT_MAX: usize = 256;

/// `struct hf3fs_iov`: memory that 3FS knows.
#[repr(C)]
pub(super) struct Iov {
    base: *mut u8,
    handle: *mut c_void,
    id: [u8; 16],
    mount_point: [c_char; MOUNT_MAX],
    size: usize,
    block_size: usize,
    numa: c_int,
}

/// `struct hf3fs_ior`: a ring.
#[repr(C)]
pub(super) struct Ior {
    iov: Iov,
    handle: *mut c_void,
    mount_point: [c_char; MOUNT_MAX],
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    flags: u64,
}

/// `struct hf3fs_cqe`: a completion.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Cqe {
    index: i32,
    reserved: i32,
    /// Bytes, or less than zero: the error.
    pub(super) result: i64,
    pub(super) userdata: *const c_void,
}

const _: () = assert!(size_of::<Iov>() == 312 && size_of::<Ior>() == 600 && size_of::<Cqe>() == 24);

// SAFETY: plain values; who uses them together keeps the library's rules.
unsafe impl Send for Iov {}
// SAFETY: as above.
unsafe impl Sync for Iov {}
// SAFETY: as above.
unsafe impl Send for Ior {}
// SAFETY: as above.
unsafe impl Sync for Ior {}

impl Iov {
    /// One that the library is to fill.
    pub(super) const EMPTY: Self = Self {
        base: std::ptr::null_mut(),
        handle: std::ptr::null_mut(),
        id: [0; 16],
        mount_point: [0; MOUNT_MAX],
        size: 0,
        block_size: 0,
        numa: -1,
    };

    /// The address of its first byte.
    pub(super) fn base(&self) -> usize {
        self.base.expose_provenance()
    }
}

impl Ior {
    /// One that the library is to fill.
    pub(super) const EMPTY: Self = Self {
        iov: Iov::EMPTY,
        handle: std::ptr::null_mut(),
        mount_point: [0; MOUNT_MAX],
        for_read: false,
        io_depth: 0,
        priority: 0,
        timeout: 0,
        flags: 0,
    };
}

impl Cqe {
    pub(super) const EMPTY: Self = Self {
        index: 0,
        reserved: 0,
        result: 0,
        userdata: std::ptr::null(),
    };
}

type Create = unsafe extern "C" fn(*mut Iov, *const c_char, usize, usize, c_int) -> c_int;
type Wrap = unsafe extern "C" fn(
    *mut Iov,
    *mut c_void,
    *const u8,
    *const c_char,
    usize,
    usize,
    c_int,
) -> c_int;
type CreateRing =
    unsafe extern "C" fn(*mut Ior, *const c_char, c_int, bool, c_int, c_int, c_int, u64) -> c_int;
type Prepare = unsafe extern "C" fn(
    *const Ior,
    *const Iov,
    bool,
    *mut c_void,
    c_int,
    usize,
    u64,
    *const c_void,
) -> c_int;
type Wait =
    unsafe extern "C" fn(*const Ior, *mut Cqe, c_int, c_int, *const libc::timespec) -> c_int;

/// The library's functions, by their names there without `hf3fs_`.
pub(super) struct Api {
    pub(super) iovcreate: Create,
    pub(super) iovunlink: unsafe extern "C" fn(*mut Iov),
    pub(super) iovdestroy: unsafe extern "C" fn(*mut Iov),
    pub(super) iovwrap: Wrap,
    pub(super) iorcreate4: CreateRing,
    pub(super) iordestroy: unsafe extern "C" fn(*mut Ior),
    pub(super) reg_fd: unsafe extern "C" fn(c_int, u64) -> c_int,
    pub(super) dereg_fd: unsafe extern "C" fn(c_int),
    pub(super) prep_io: Prepare,
    pub(super) submit_ios: unsafe extern "C" fn(*const Ior) -> c_int,
    pub(super) wait_for_ios: Wait,
    extract_mount_point: unsafe extern "C" fn(*mut c_char, c_int, *const c_char) -> c_int,
}

impl Api {
    pub(super) fn load(path: &Path) -> Result<Self> {
        let library = Library::load(path)?;
        macro_rules! function {
            ($name:literal) => {{
                let at = library.function($name)?;
                // SAFETY: the header declares the function of that name as the field's type does,
                // and a pointer to it is as wide as any.
                unsafe { std::mem::transmute_copy(&at) }
            }};
        }
        Ok(Self {
            iovcreate: function!(c"hf3fs_iovcreate"),
            iovunlink: function!(c"hf3fs_iovunlink"),
            iovdestroy: function!(c"hf3fs_iovdestroy"),
            iovwrap: function!(c"hf3fs_iovwrap"),
            iorcreate4: function!(c"hf3fs_iorcreate4"),
            iordestroy: function!(c"hf3fs_iordestroy"),
            reg_fd: function!(c"hf3fs_reg_fd"),
            dereg_fd: function!(c"hf3fs_dereg_fd"),
            prep_io: function!(c"hf3fs_prep_io"),
            submit_ios: function!(c"hf3fs_submit_ios"),
            wait_for_ios: function!(c"hf3fs_wait_for_ios"),
            extract_mount_point: function!(c"hf3fs_extract_mount_point"),
        })
    }

    /// Where the 3FS is mounted that has a path.
    pub(super) fn mount_point(&self, path: &Path) -> Result<PathBuf> {
        use std::os::unix::ffi::{OsStrExt, OsStringExt};
        let fail = |problem: io::Error| {
            let subject = path.display().to_string();
            Error::io("find the 3FS mount (fuse.hf3fs) of", subject, problem)
        };
        // Of a path that does not exist the library does not say so: it throws.
        let real = std::fs::canonicalize(path).map_err(fail)?;
        let real = std::ffi::CString::new(real.as_os_str().as_bytes());
        let real = real.map_err(|error| fail(error.into()))?;
        let mut out = [0_u8; MOUNT_MAX];
        // SAFETY: `out` has as many bytes as is said, and `real` is a string.
        let len = unsafe {
            (self.extract_mount_point)(out.as_mut_ptr().cast(), MOUNT_MAX as c_int, real.as_ptr())
        };
        if len <= 0 || len as usize > MOUNT_MAX {
            let why = if len <= 0 {
                "the path is not below a 3FS mount"
            } else {
                "the path of the mount is too long"
            };
            return Err(fail(io::Error::other(why)));
        }
        let mount = CStr::from_bytes_until_nul(&out).unwrap_or_default();
        Ok(std::ffi::OsString::from_vec(mount.to_bytes().to_vec()).into())
    }

    /// Registers a descriptor.
    pub(super) fn register(&self, fd: RawFd) -> Ended<()> {
        // SAFETY: the library looks the number up.
        match unsafe { (self.reg_fd)(fd, 0) } {
            // A file that had the number was closed without its knowledge.
            libc::EINVAL => {
                self.deregister(fd);
                // SAFETY: as above.
                match unsafe { (self.reg_fd)(fd, 0) } {
                    errno @ 1.. => Err(errno),
                    _ => Ok(()),
                }
            }
            errno @ 1.. => Err(errno),
            _ => Ok(()),
        }
    }

    /// Undoes it, while the descriptor is open.
    pub(super) fn deregister(&self, fd: RawFd) {
        // SAFETY: the library looks the number up.
        unsafe { (self.dereg_fd)(fd) };
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}
