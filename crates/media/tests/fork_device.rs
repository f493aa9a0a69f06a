//! A forked child has no CUDA driver, and gives nothing back to it: alone in its process, because
//! it forks.

#![expect(unsafe_code, reason = "forks, and asks the double of the driver")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvdepot_media::cuda::Device;
use kvdepot_media::{Buffer, Copier, CopierConfig, PartId};
use std::ffi::CString;
use std::path::Path;
use std::time::{Duration, Instant};

/// What the double counts.
fn count(library: &Path, name: &str) -> i64 {
    let library = CString::new(library.to_str().unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: the library is loaded already, and its counts are functions that answer an int or a
    // long.
    unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let at = libc::dlsym(handle, name.as_ptr());
        assert!(!at.is_null(), "{name:?}");
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> i64>(at)() & 0xFFFF_FFFF
    }
}

#[test]
fn a_forked_child_gives_nothing_of_a_device_back() {
    let library = kvdepot_testkit::double::build("cuda");
    let counts = || ["double_taken", "double_entered"].map(|name| count(&library, name));
    let device = Device::open_with(&library, 0).unwrap();
    let memory = device.memory(1 << 20).unwrap();
    // SAFETY: 0 is the default stream.
    let fence = unsafe { device.fence(0) }.unwrap();
    let copier = Copier::new(CopierConfig::default()).unwrap();
    let mut batch = copier.batch();
    let (id, from) = (
        PartId::whole([0; 16], [0; 32]),
        Buffer::from_vec(vec![7; 1 << 20]),
    );
    // Of pages that go through a ring.
    let to = Buffer::of_device(&memory);
    let pages: Vec<Buffer> = (0..256)
        .map(|page| to.slice(page << 12, 4096).unwrap())
        .collect();
    batch.part(&id, &[from], &pages, None, 0).unwrap();
    let ticket = copier.submit(batch, |done| assert!(done.is_clean()));
    assert!(ticket.wait(Some(Duration::from_secs(60))));
    drop((to, pages));
    assert!(device.rest(Duration::from_secs(60)));
    let before = counts();
    assert!(before.iter().all(|count| *count > 0), "{before:?}");
    // SAFETY: the child calls nothing that another thread of the parent could hold locked: all of
    // them sleep.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends this process where it waits for a lock that was held.
        unsafe { libc::alarm(30) };
        drop((ticket, copier, fence, memory, device));
        let kept = counts() == before;
        // SAFETY: ends this process without the parent's exit handlers.
        unsafe { libc::_exit(if kept { 7 } else { 8 }) }
    }
    let mut status = 0;
    // SAFETY: waits for the child of above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7,
        "{status:x}"
    );
    drop((ticket, copier, fence, memory));
    // By the device's thread, where that is the last that has the slab.
    let end = Instant::now() + Duration::from_secs(60);
    while count(&library, "double_registered") > 0 {
        assert!(Instant::now() < end, "the slab is unpinned");
        std::thread::yield_now();
    }
}
