//! Many small pages as one copy: between host memory and a ring of the device by the copy engine,
//! between ring and pages by a kernel. A copy engine takes a microsecond or two for each copy,
//! which small ones do not last; a device copies its own memory many times faster than its bus
//! does.

use super::context::Context;
use super::driver::Handle;
use crate::error::{Error, Result};
use std::ffi::c_void;

/// Pages of one launch: what a kernel's parameters have room for.
const PAGES_MAX: usize = 250;

/// Threads of a block, and the bytes that it copies at least.
const THREADS: u32 = 256;
const BLOCK_BYTES: u32 = 16 << 10;

/// Blocks for each page at most.
const ROWS_MAX: u32 = 64;

/// The kernel, as text that the driver compiles.
const PTX: &str = concat!(include_str!("pages.ptx"), "\0");

/// The kernel, loaded into a context.
#[derive(Debug)]
pub(super) struct Kernel(Handle);

// SAFETY: a function of a module may be launched by any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// A page, and where it is in the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Page {
    pub(super) at: u64,
    pub(super) offset: u32,
    pub(super) len: u32,
}

/// The kernel's parameter, as `pages.ptx` reads it.
#[repr(C)]
struct Table {
    ring: u64,
    gathers: u32,
    unused: u32,
    pages: [Page; PAGES_MAX],
}

impl Kernel {
    /// Loads it. The calling thread has entered the context, here and below.
    pub(super) fn load(context: &Context) -> Result<Self> {
        let driver = &context.driver;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the text ends with a zero, and so does the name; both handles are writable. The
        // module stays for as long as the process.
        unsafe {
            let loaded = (driver.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast());
            driver.check("cuModuleLoadData", loaded)?;
            let name = c"kvdepot_pages".as_ptr();
            let found = (driver.cuModuleGetFunction)(&raw mut function, module, name);
            driver.check("cuModuleGetFunction", found)?;
        }
        Ok(Self(function))
    }

    /// Copies pages into a ring where it `gathers`, and out of it otherwise.
    ///
    /// # Safety
    ///
    /// Until the stream has done it, the pages and their places in the ring are memory of the
    /// device that nobody else touches.
    pub(super) unsafe fn launch(
        &self,
        context: &Context,
        stream: Handle,
        ring: u64,
        pages: &[Page],
        gathers: bool,
    ) -> Result<()> {
        for some in pages.chunks(PAGES_MAX) {
            let mut table = Table {
                ring,
                gathers: u32::from(gathers),
                unused: 0,
                pages: [Page::default(); PAGES_MAX],
            };
            table.pages[..some.len()].copy_from_slice(some);
            let longest = some.iter().map(|page| page.len).max().unwrap_or(0);
            let rows = longest.div_ceil(BLOCK_BYTES).clamp(1, ROWS_MAX);
            let columns = u32::try_from(some.len()).map_err(|_| too_many())?;
            let mut parameters = [(&raw mut table).cast::<c_void>()];
            // SAFETY: the driver copies the parameter, which is as long as the kernel says, before
            // it returns; what the kernel touches is as the caller promises.
            let launched = unsafe {
                (context.driver.cuLaunchKernel)(
                    self.0,
                    columns,
                    rows,
                    1,
                    THREADS,
                    1,
                    1,
                    0,
                    stream,
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            context.driver.check("cuLaunchKernel", launched)?;
        }
        Ok(())
    }
}

fn too_many() -> Error {
    let problem = std::io::Error::other("too many pages");
    Error::io("call", "cuLaunchKernel", problem)
}
