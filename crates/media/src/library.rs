//! Libraries that are found at run time: nothing of them is needed to build or to load what uses
//! them.

use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_void};
use std::io;
use std::path::Path;

/// A dynamic library. It is never closed, because its threads may run as long as the process.
#[derive(Debug)]
pub struct Library<'a> {
    at: *mut c_void,
    path: &'a Path,
}

impl<'a> Library<'a> {
    /// Loads the library at `path`, which may be a name that the system's loader searches for.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], with the message of the loader.
    pub fn load(path: &'a Path) -> Result<Self> {
        let fail = |problem: io::Error| Error::io("load", path.display().to_string(), problem);
        let name = CString::new(path.as_os_str().as_encoded_bytes());
        let name = name.map_err(|error| fail(error.into()))?;
        // SAFETY: `name` is a string; the library's initialisers are trusted like the system's.
        let at = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if at.is_null() {
            return Err(fail(io::Error::other(problem())));
        }
        Ok(Self { at, path })
    }

    /// Returns the address of the function `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the library has no such function.
    pub fn function(&self, name: &CStr) -> Result<*mut c_void> {
        // SAFETY: the library is loaded, and `name` a string.
        let at = unsafe { libc::dlsym(self.at, name.as_ptr()) };
        if at.is_null() {
            let problem = io::Error::other(format!(
                "the library has no function {}",
                name.to_string_lossy()
            ));
            let path = self.path.display().to_string();
            return Err(Error::io("load", path, problem));
        }
        Ok(at)
    }
}

/// What the loader said last in this thread.
fn problem() -> String {
    // SAFETY: the answer is a string of this thread until it calls the loader again, or none.
    let said = unsafe {
        let said = libc::dlerror();
        (!said.is_null()).then(|| CStr::from_ptr(said).to_string_lossy().into_owned())
    };
    said.unwrap_or_else(|| "unknown error of the loader".to_owned())
}
