//! Whether io_uring can be used: kernels can be built without it, a sysctl can forbid it, and the
//! default profiles of container runtimes block it.

use rustix::io_uring::{io_uring_params, io_uring_setup};

use super::{Error, Result};

/// Makes a ring and lets it go again.
///
/// # Errors
///
/// [`Error::Os`] with the system's reason: `ENOSYS` from a kernel that has none, `EPERM` from a
/// sysctl or a seccomp profile that forbids it.
pub fn probe() -> Result<()> {
    let mut params = io_uring_params::default();
    // SAFETY: the parameters are zeroed, which asks for nothing special and refers to no other
    // descriptor; nobody but the kernel keeps anything of the ring, and it is closed at once.
    let ring = unsafe { io_uring_setup(1, &mut params) };
    ring.map(drop).map_err(Error::os("make an io_uring"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_can_be_made_or_the_reason_is_named() {
        if let Err(error) = probe() {
            assert!(error.to_string().contains("io_uring"), "{error}");
            assert!(matches!(error, Error::Os { .. }));
        }
    }
}
