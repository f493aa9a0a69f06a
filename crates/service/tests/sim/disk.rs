//! A file system of the simulator's own that can be full: a tmpfs in the place of `/dev/shm`, in a
//! mount namespace, which most systems let any user have. It is gone with the simulator, however
//! that ends. On other systems no disk is ever full, and the last line counts no such fault.

#![expect(unsafe_code, reason = "no safe call makes a namespace or mounts")]

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kvdepot_host::limits;

const SHM: &str = "/dev/shm";

/// More than a history ever needs.
const ROOMY: u64 = 8 << 30;

/// Whether this process has it.
static OWN: OnceLock<bool> = OnceLock::new();

/// Makes it, before this process has a second thread.
pub fn mount() {
    OWN.get_or_init(|| {
        // SAFETY: these two calls only ask.
        let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
        // SAFETY: the process has one thread, and what it has open stays so.
        let apart = unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) } == 0;
        let says = |file: &str, text: String| std::fs::write(file, text).is_ok();
        apart
            && says("/proc/self/setgroups", "deny".into())
            && says("/proc/self/uid_map", format!("{user} {user} 1"))
            && says("/proc/self/gid_map", format!("{group} {group} 1"))
            && sized(ROOMY, 0)
    });
}

/// Mounts it, or gives it so many bytes.
fn sized(bytes: u64, flags: libc::c_ulong) -> bool {
    let text = |text: &str| CString::new(text).unwrap();
    let (kind, at) = (text("tmpfs"), text(SHM));
    // Huge pages would be counted as a whole.
    let how = text(&format!("size={bytes},mode=1777,huge=never"));
    let (kind, at, how) = (kind.as_ptr(), at.as_ptr(), how.as_ptr().cast());
    // SAFETY: strings that end, and live until it has returned.
    unsafe { libc::mount(kind, at, kind, flags, how) == 0 }
}

/// Where histories have their files.
pub fn dir() -> PathBuf {
    let shm = Path::new(SHM);
    if shm.is_dir() { shm } else { Path::new("/tmp") }.into()
}

/// Bytes that are free there.
pub fn free() -> u64 {
    limits::disk_free(&dir()).unwrap()
}

/// Whether nobody else uses it.
pub fn is_own() -> bool {
    OWN.get() == Some(&true)
}

/// Whether nothing is there, and there is room for everything.
pub fn is_empty() -> bool {
    free() == ROOMY
}

/// Leaves so many bytes free, or room for everything. False where there is no such file system.
pub fn leave(bytes: Option<u64>) -> bool {
    let resize = || {
        assert!(sized(ROOMY, libc::MS_REMOUNT), "{SHM} could not be resized");
        let used = ROOMY - free();
        // A size of zero would be no limit.
        let size = bytes.map_or(ROOMY, |bytes| (used + bytes).max(4096));
        assert!(sized(size, libc::MS_REMOUNT), "{SHM} could not be resized");
    };
    is_own().then(resize).is_some()
}
