//! libibverbs, found at run time: nothing of it is needed to build or to load this crate.

use super::abi::Functions;
use super::error::{Error, Result};
use kvdepot_media::Library;
use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;

/// The name by which the system's loader finds it; the number has been the same since 2006.
const NAME: &str = "libibverbs.so.1";

/// Loads the library. Once that has succeeded it costs little more than its look-ups by name.
pub(super) fn load() -> Result<Arc<Functions>> {
    functions(Path::new(NAME)).map_err(Error::Library)
}

fn functions(path: &Path) -> kvdepot_media::Result<Arc<Functions>> {
    let library = Library::load(path)?;
    macro_rules! find {
        ($($name:ident),*) => {
            Functions {
                $($name: {
                    let name = concat!(stringify!($name), "\0").as_bytes();
                    let name = CStr::from_bytes_with_nul(name).unwrap_or_default();
                    let at = library.function(name)?;
                    // SAFETY: infiniband/verbs.h declares the function of that name as the field's
                    // type does, and a pointer to it is as wide as any. Where there are several
                    // versions of it, the loader gives the newest, which is what the header means.
                    unsafe { std::mem::transmute_copy(&at) }
                }),*
            }
        };
    }
    Ok(Arc::new(find!(
        ibv_get_device_list,
        ibv_free_device_list,
        ibv_get_device_name,
        ibv_open_device,
        ibv_close_device,
        ibv_query_device,
        ibv_query_port,
        ibv_query_gid,
        ibv_alloc_pd,
        ibv_dealloc_pd,
        ibv_reg_mr,
        ibv_dereg_mr,
        ibv_create_comp_channel,
        ibv_destroy_comp_channel,
        ibv_create_cq,
        ibv_destroy_cq,
        ibv_get_cq_event,
        ibv_ack_cq_events,
        ibv_create_qp,
        ibv_modify_qp,
        ibv_destroy_qp
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_not_the_one_is_named() {
        for (path, says) in [
            ("libkvdepot-no-such.so.1", "libkvdepot-no-such.so.1"),
            ("libc.so.6", "no function ibv_get_device_list"),
        ] {
            let error = functions(Path::new(path)).map_err(Error::Library);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert!(error.contains("libibverbs1"), "{error}");
        }
    }
}
