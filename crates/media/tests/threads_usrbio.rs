//! Rings of a 3FS whose threads the system refuses for a while: alone in its process, because the
//! refusals are for all of it.

#![expect(
    unsafe_code,
    reason = "refuses threads, and says where the double's 3FS is"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvdepot_media::file::{File, Hands, UsrbioConfig};
use kvdepot_media::{Buffer, Copier, CopierConfig, PartId};
use std::ffi::{CString, c_int, c_void};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const LEN: usize = 5000;

/// Writes some pieces; whether all of them went well.
fn write(copier: &Copier, file: &Arc<File>, byte: u8) -> bool {
    let mut batch = copier.batch();
    for number in 0..4 {
        let id = PartId::whole([0; 16], [number as u8; 32]);
        let (from, to) = (
            Buffer::from_vec(vec![byte; LEN]),
            file.buffer(number * LEN, LEN),
        );
        batch.part(&id, &[from], &[to], None, 0).unwrap();
    }
    let (sender, ended) = mpsc::channel();
    let ticket = copier.submit(batch, move |done| sender.send(done.is_clean()).unwrap());
    assert!(ticket.wait(Some(Duration::from_secs(10))), "a batch hangs");
    ended.recv().unwrap()
}

/// Threads that this process may still start.
static ALLOWED: AtomicI64 = AtomicI64::new(i64::MAX);

type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

/// In the place of the system's: refuses as it does when a process has too many threads.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    if ALLOWED.fetch_sub(1, Ordering::SeqCst) <= 0 {
        ALLOWED.fetch_add(1, Ordering::SeqCst);
        return libc::EAGAIN;
    }
    // SAFETY: the system's function has this type, and the arguments are the caller's.
    unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr());
        std::mem::transmute::<*mut c_void, Create>(next)(thread, attributes, start, argument)
    }
}

/// Runs it while this process may start so many threads.
fn with_threads(count: i64, run: impl FnOnce()) {
    ALLOWED.store(count, Ordering::SeqCst);
    run();
    assert!(
        ALLOWED.swap(i64::MAX, Ordering::SeqCst) < 1,
        "a thread was asked for"
    );
}

/// How often the double was asked for what nobody may ask for.
fn misused(library: &Path) -> i64 {
    let library = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: both are strings, and the library is loaded; its function takes nothing and answers
    // with a `long`.
    unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
        let function = libc::dlsym(library, c"double_misused".as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i64>(function)()
    }
}

#[test]
fn a_ring_without_a_thread_is_asked_for_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // SAFETY: the only test of this process, before anything else runs.
    unsafe { std::env::set_var("KVDEPOT_DOUBLE_3FS", folder.path()) };
    let library = kvdepot_testkit::double::build("usrbio");
    let config = UsrbioConfig {
        library: library.clone(),
        path: folder.path().to_owned(),
        streams: 2,
        running: 32,
        waiting: 64,
        patience: Duration::from_secs(60),
    };
    let hands = Hands::usrbio(&config).unwrap();
    let plain = tempfile::NamedTempFile::new_in(folder.path()).unwrap();
    plain.as_file().set_len(4 * LEN as u64).unwrap();
    let file = File::new(plain.reopen().unwrap(), &hands).unwrap();
    let copier = Copier::new(CopierConfig::default()).unwrap();
    // Everything else is there: lanes, the slab, what waits for answers, the double's threads.
    let (mut batch, to) = (copier.batch(), Buffer::from_vec(vec![0; LEN]));
    let id = PartId::whole([0; 16], [0; 32]);
    batch
        .part(&id, &[file.buffer(0, LEN)], &[to], None, 0)
        .unwrap();
    assert!(
        copier
            .submit(batch, |_| {})
            .wait(Some(Duration::from_secs(10)))
    );
    with_threads(0, || assert!(!write(&copier, &file, 1)));
    with_threads(1, || {
        write(&copier, &file, 2);
    });
    for byte in 3..20 {
        assert!(write(&copier, &file, byte));
        let mut bytes = vec![0; 4 * LEN];
        plain.as_file().read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|one| *one == byte));
    }
    assert_eq!(misused(&library), 0);
}
