//! Rings of a 3FS whose threads the system refuses for a while: alone in its process, because it
//! takes its room for stacks.

#![expect(
    unsafe_code,
    reason = "limits its memory, and says where the double's 3FS is"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvdepot_media::file::{File, Hands, UsrbioConfig};
use kvdepot_media::{Buffer, Copier, CopierConfig, PartId};
use std::ffi::CString;
use std::os::unix::fs::FileExt;
use std::path::Path;
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

/// The most memory that this process may have mapped, for as long as this runs.
fn with_room_for(bytes: u64, run: impl FnOnce()) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is writable.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) }, 0);
    let less = libc::rlimit {
        rlim_cur: pages * 4096 + bytes,
        ..limit
    };
    // SAFETY: a limit of this process, which is lifted below.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &less) }, 0);
    run();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
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
        std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn() -> i64>(function)()
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
    // No stack at all, and then one: a thread's has two MiB.
    with_room_for(1 << 20, || assert!(!write(&copier, &file, 1)));
    with_room_for(7 << 19, || {
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
